"""Broken recipes, arguments and files: exit code 2, one line that says what, where and what to do, nothing written.

    broken/before_torch.txt   what YAML and the file system show: the command in forks of one process, without torch
    broken/afterwards.txt     what takes a tokenizer or the rows: in this process, and two of them by the real command

Times are not asserted, this machine is not always idle: `pytest --durations=0 tests/test_broken.py` prints them.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers_for_tests import CHATML, CHATML_GENERATION, DEEPSEEK, LLAMA, QWEN3, bos_tokenizer, byte_tokenizer
from transformers import Qwen3Config

from hf_posttrain import run
from hf_posttrain.data.template import template_problem
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.recipe import rules

REPOSITORY = Path(__file__).parents[2]
RECIPE = """\
method: {method}
model:
  name_or_path: {model}
  from_scratch: true
data:
  train: {{path: rows.jsonl}}
train:
  output_dir: {output}
  max_steps: 1
  use_cpu: true
"""
TEACHER = "teacher: {name_or_path: tiny, from_scratch: true}\n"
ROWS = [
    {"prompt": f"{n} + 1 = ", "completion": str(n + 1), "chosen": "a", "rejected": "b", "label": n % 2 == 0}
    for n in range(8)
]
TAGS = "{%+ generation %}{{ messages }}{%- endgeneration +%}{%\n generation\t%}{% endgeneration %}"
BREAKS = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"


def recipe(method, more="", model="tiny", output="out"):
    teacher = TEACHER if TABLE[method].second == "teacher" else ""
    return RECIPE.format(method=method, model=model, output=output) + more + teacher


def lines(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"


FILES = {
    **{f"{method}.yaml": recipe(method) for method in TABLE},
    "open.yaml": "method: sft\nmodel: {name_or_path: tiny\n",
    "tab.yaml": "method: sft\n\tmodel: tiny\n",
    "list.yaml": "- method: sft\n",
    "twice.yaml": recipe("sft", "  max_steps: 2\n"),
    "far.yaml": recipe("opd", "  loss_type: reverse_kl\n  reward: {function: exact_match}\n"),
    "best.yaml": recipe("sft", "  load_best_model_at_end: true\n  eval_strategy: epoch\n").replace(
        "train:\n  output", "  eval: {path: rows.jsonl}\ntrain:\n  output"
    ),
    "first.yaml": recipe("sft", output="outputs/first"),
    "second.yaml": recipe("sft", model="outputs/first"),
    "chat.yaml": recipe("sft", "  apply_chat_template: true\n"),
    "rows.jsonl": lines(*ROWS),
    "texts.jsonl": lines({"text": "a"}, {"text": "b"}),
    "folder/readme.md": "no model\n",
    "adapter/adapter_config.json": "{}",
    "run/checkpoint-3/trainer_state.json": "{}",
    "open.jinja": "{% for m in messages %}\n{{ m.content }}\n",
    "empty.jsonl": "",
    "blank.jsonl": "\n \n",
    "pointer.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "rows.jsonl.zst": b"\x28\xb5",
    "rows.parquet": "prompt,completion\n",
    "utf16.jsonl": lines(*ROWS).encode("utf-16"),
    "comma.jsonl": lines(ROWS[0], '{"prompt": "a", }', ROWS[1]),
    "cut.jsonl": lines(*ROWS)[:-20],
    "python.jsonl": "{'prompt': 'a', 'completion': 'b'}\n",
    "scalar.jsonl": lines(ROWS[0], "7"),
    "latin.jsonl": lines(ROWS[0]).encode() + '{"prompt": "café", "completion": "b"}\n'.encode("latin-1"),
    "latin.csv": "prompt,completion\ncafé,b\n".encode("latin-1"),
    "ragged.csv": "prompt,completion\na,b\nc,d,e\n",
    "quote.csv": 'prompt,completion\na,"b\nc,d\n',
    "semicolon.csv": "prompt;completion\na;b\n",
    "header.csv": "a,b\nc,d\n",
    "nested/one.jsonl": lines(*ROWS),
    "nested/two.jsonl": lines(ROWS[0], "{x"),
    "gap.jsonl": lines(*ROWS[:6], {"prompt": "a"}, ROWS[7]),
    "single.jsonl": lines(*({"prompt": f"{n}", "completion": "b"} for n in range(3))),
    "null.jsonl": lines(ROWS[0], {"prompt": None, "completion": "b"}),
    "mixed.jsonl": lines({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": {"text": 3}}),
    "turns.jsonl": lines({"messages": [{"role": "assistant", "content": "a"}]}, {"messages": "b"}),
    "yes.jsonl": lines(*({"prompt": f"{n}", "completion": "b", "label": "yes"} for n in range(3))),
    "one.jsonl": lines(*({"prompt": "a", "completion": f"{n}", "label": True} for n in range(3))),
}


def transcript(name):
    """[(arguments, the line on stderr)] of a file of tests/recipe/broken; "..." ends a line that goes on."""
    text = (REPOSITORY / "tests/recipe/broken" / name).read_text()
    return re.findall(r"^\$ hf-posttrain (.*)\n(error: .*)$", text, re.MULTILINE)


BEFORE_TORCH, AFTERWARDS = transcript("before_torch.txt"), transcript("afterwards.txt")
WHOLE = [case for case in AFTERWARDS if "teacher=" in case[0] or "teacher." in case[0] or "latin.jsonl" in case[0]]
"""Those of AFTERWARDS that the real command runs too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """FILES, and models: tiny, `other` with another vocabulary, `small` with too few ids, `endless` without eos and
    template, `mute` without a tokenizer, `garbled` with a broken config."""
    here = tmp_path_factory.mktemp("broken")
    for name, content in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    endless = byte_tokenizer(None)
    endless.eos_token = endless.pad_token = None
    tokenizers = {"tiny": byte_tokenizer(), "other": bos_tokenizer(), "small": byte_tokenizer(), "endless": endless}
    for name in (*tokenizers, "mute", "garbled"):
        vocabulary = 200 if name == "small" else 300
        Qwen3Config(hidden_size=32, num_hidden_layers=1, vocab_size=vocabulary).save_pretrained(here / name)
        tokenizers.get(name, byte_tokenizer()).save_pretrained(here / name)
    for file in (here / "mute").glob("tokenizer*"):
        file.unlink()
    (here / "garbled/config.json").write_text('{"model_type": ')
    return here


@pytest.fixture
def untouched(folder, monkeypatch):
    """The folder, as the current directory, which must hold the same files after the test."""
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    yield folder
    assert sorted(folder.rglob("*")) == before


def command(arguments, **environment):
    """(exit code, lines on stderr) of the real command."""
    done = subprocess.run(
        [sys.executable, "-m", "hf_posttrain.run", *shlex.split(arguments)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


ONE_BY_ONE = """
import json, os, shlex, sys
from hf_posttrain import run
for arguments in json.load(sys.stdin):
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 2)
        try:
            code = run.main(shlex.split(arguments))
        except SystemExit as stop:
            code = stop.code
        print(json.dumps([code, [*sys.modules]]), flush=True)
        sys.exit()
    os.close(write)
    said = os.fdopen(read).read()
    os.waitpid(child, 0)
    print(json.dumps(said), flush=True)
"""
"""A program that runs each command in a process of its own, without importing the package again. It prints the exit
code and the imported modules of each, then its stderr."""


@pytest.fixture(scope="module")
def before_torch(folder):
    """{arguments: (exit code, lines on stderr, modules imported by then)} of BEFORE_TORCH, which write nothing."""
    arguments, before = [case[0] for case in BEFORE_TORCH], sorted(folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE], cwd=folder, input=json.dumps(arguments), capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*")) == before
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [(code, said.splitlines(), modules) for (code, modules), said in zip(lines[::2], lines[1::2], strict=True)]
    return dict(zip(arguments, found, strict=True))


def assert_is(said, expected, here):
    """The one line that is said is the one expected."""
    assert len(said) == 1
    expected = expected.replace("{here}", str(here))
    assert said[0].startswith(expected[:-3]) if expected.endswith("...") else said[0] == expected


def test_there_are_enough():
    assert len(BEFORE_TORCH) >= 80
    assert len(AFTERWARDS) >= 24
    assert len(WHOLE) == 2


@pytest.mark.parametrize(("arguments", "expected"), BEFORE_TORCH, ids=[case[0] for case in BEFORE_TORCH])
def test_what_yaml_and_files_show_is_said_before_torch(folder, before_torch, arguments, expected):
    code, lines, imported = before_torch[arguments]
    assert code == 2
    assert_is(lines, expected, folder)
    assert not {"torch", "transformers", "datasets", "pandas"} & {*imported}


SINCE_PYTHON_3_13 = {
    "unexpected keyword argument 'num_cycle'": "unexpected keyword argument 'num_cycle'. Did you mean 'num_cycles'?",
    "Expecting property name enclosed in double quotes, column 17": (
        "Illegal trailing comma before end of object, column 15"
    ),
}
"""Parts of messages that Python itself has changed."""


@pytest.mark.parametrize(("arguments", "expected"), AFTERWARDS, ids=[case[0] for case in AFTERWARDS])
def test_what_tokenizers_and_rows_show_is_said_in_one_line(untouched, capsys, arguments, expected):
    assert run.main(shlex.split(arguments)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    if sys.version_info >= (3, 13):
        for older, newer in SINCE_PYTHON_3_13.items():
            expected = expected.replace(older, newer)
    assert_is(said, expected, untouched)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [pytest.param(*case, id=case[0], marks=[] if "latin.jsonl" in case[0] else pytest.mark.slow) for case in WHOLE],
)
def test_the_real_command_says_nothing_else(untouched, arguments, expected):
    code, lines = command(arguments)
    assert code == 2
    assert_is(lines, expected, untouched)


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_rows(untouched):
    code, lines = command("sft.yaml", HF_DATASETS_CACHE=str(untouched / "rows.jsonl"))
    problem = f"{untouched}/rows.jsonl is a file, not a folder. Set HF_DATASETS_CACHE to another folder"
    assert (code, lines) == (2, [f"error: the cache of datasets cannot be written: {problem}"])


@pytest.mark.parametrize(("key", "path"), [("data.train.path", "rows.jsonl"), ("model.chat_template", "open.jinja")])
def test_a_file_that_may_not_be_read(untouched, monkeypatch, capsys, key, path):
    """By a stand-in of the system's refusal: root may read everything."""

    def refused(self, *args, before=Path.open, **kwargs):
        if self.name == path:
            raise PermissionError(13, "Permission denied")
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: self.open(**kwargs).read())
    assert run.main(["sft.yaml", f"{key}={path}"]) == 2
    assert capsys.readouterr().err == f"error: command line: {key}: {path} cannot be read (Permission denied)\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.name_or_path", "closed/model"), ("model.adapter", "closed/model"), ("train.output_dir", "closed/out"),
     ("train.resume_from_checkpoint", "closed/out"), ("model.chat_template", "closed/a.jinja"),
     ("data.train.path", "closed/rows.jsonl")],
)  # fmt: skip
def test_what_is_below_a_folder_that_may_not_be_entered(untouched, monkeypatch, capsys, key, value):
    """By a stand-in of the system's refusal, as above."""

    def refused(self, *args, before=Path.stat, **kwargs):
        if "closed" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Path, "stat", refused)
    trained = ["model.from_scratch=false"] if key == "model.adapter" else []
    assert run.main(["sft.yaml", f"{key}={value}", *trained]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"error: command line: {key}: ")
    assert said.endswith(f"{value} cannot be read (Permission denied)\n")


@pytest.mark.parametrize("key", ["model.name_or_path", "model.adapter"])
def test_weights_that_may_not_be_read(untouched, tmp_path, monkeypatch, capsys, key):
    """By a stand-in of the system's refusal, as above."""
    given = tmp_path / "given"
    shutil.copytree("tiny", given)
    (given / "adapter_config.json").write_text("{}")
    weights = given / "model.safetensors"
    weights.touch()
    monkeypatch.setattr("os.access", lambda path, mode: path != weights)
    assert run.main(["sft.yaml", f"{key}={given}", "model.from_scratch=false", "--check"]) == 2
    problem = f"there is no permission to read {weights}. Its owner can grant it with chmod a+r"
    assert f"error: command line: {key}: {problem}\n" in capsys.readouterr().err
    if key == "model.name_or_path":  # random weights are read from no file
        assert run.main(["sft.yaml", f"{key}={given}", "model.from_scratch=true", "--check"]) == 0


def test_a_link_to_nothing_alongside_the_recipe_is_no_recipe(untouched, capsys):
    (untouched / "gone.yaml").symlink_to("nowhere.yaml")
    assert run.main(["sft.yaml", "model.name_or_path=runs/missing/here"]) == 2
    said = capsys.readouterr().err
    (untouched / "gone.yaml").unlink()
    assert said.startswith("error: command line: model.name_or_path: runs/missing/here: no such folder")
    assert said.count("\n") == 1


def test_a_reporter_that_is_not_installed_is_named(untouched, monkeypatch, capsys):
    monkeypatch.setattr(rules, "REPORTER_PACKAGES", {"wandb": ("no_such_package",)})
    assert run.main(["sft.yaml", "train.report_to=wandb"]) == 2
    problem = "train.report_to: wandb requires a package that is not installed. Run pip install no_such_package"
    assert capsys.readouterr().err == f"error: command line: {problem}\n"


@pytest.mark.parametrize("template", [CHATML, CHATML_GENERATION, QWEN3, DEEPSEEK, LLAMA, BREAKS, TAGS])
def test_templates_that_transformers_renders_are_let_through(template, tmp_path):
    (tmp_path / "own.jinja").write_text(template)
    assert template_problem(str(tmp_path / "own.jinja")) is None


@pytest.mark.parametrize("name", ["bom.jsonl", "array.jsonl", "pretty.json", "crlf.csv", "one class"])
def test_files_that_look_odd_and_are_sound(untouched, name, tmp_path, capsys):
    """A BOM, one JSON array, indented JSON, Windows lines; KTO with answers of one class, which is exact."""
    method = "kto" if name == "one class" else "sft"
    path = tmp_path / (name if "." in name else "rows.jsonl")
    path.write_bytes({
        "bom.jsonl": b"\xef\xbb\xbf" + lines(*ROWS).encode(),
        "array.jsonl": json.dumps(ROWS).encode(),
        "pretty.json": json.dumps(ROWS, indent=2).encode(),
        "crlf.csv": b"prompt,completion\r\n" + b"a,b\r\n" * 8,
        "one class": lines(*({**row, "label": True} for row in ROWS)).encode(),
    }[name])  # fmt: skip
    assert run.main([f"{method}.yaml", f"data.train={{path: {path}}}", "--preprocess-only"]) == 0
    assert "train: rows: 8, " in capsys.readouterr().out
