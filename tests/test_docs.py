"""README.md, CONTRIBUTING.md, AGENTS.md and docs/: every code block runs, every table and link is true.

The examples in the docstrings of the methods' Trainers and Configs run in the same way.

Blocks of a page run one after the other in a folder where hub names are local folders (`hub_for_tests`):

    bash      each line: the command itself in this process, with overrides that make it small; what cannot run here is
              parsed as far as can be (PROGRAMS), and an unknown program fails
    python    executed, names are kept for the page's next block
    yaml      loaded as a recipe; a fragment is laid over a small recipe of the page's method
    json      each line is a row that some method reads
    text      formulas and output; mermaid: drawings

A word behind the language is the file that the block is (`mine.yaml`), or a fragment's method. Commands in running text
are parsed, not run.
"""

import dataclasses
import importlib
import inspect
import io
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from hub_for_tests import REPOSITORY, at_home, make_hub, small
from models_for_tests import tiny_model
from torch.distributed.run import get_args_parser as torchrun_parser
from training_for_tests import quick, token_rows, trainer_for
from transformers import TrainingArguments

from hf_posttrain import run
from hf_posttrain.data.formats import canonical_name, detect_format
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods import config_class, trainer_class
from hf_posttrain.methods.distillation import DistillationConfig
from hf_posttrain.methods.sft import SupervisedOptions
from hf_posttrain.models.config import ModelSection, TeacherSection
from hf_posttrain.monitoring import symptoms as watch
from hf_posttrain.recipe import build
from hf_posttrain.recipe import cli as arguments
from hf_posttrain.recipe.read import load_recipe, train_config
from hf_posttrain.recipe.sections import Source
from hf_posttrain.report import callbacks, charts
from hf_posttrain.trainer.config import PostTrainConfig

PAGES = [
    *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
METHODS = tuple(TABLE)
CONFIGS = {name: config_class(method) for name, method in TABLE.items()}
NEEDS_A_SERVER = "train.sampler={kind: vllm_server"
"""Commands with it are checked up to the call of vLLM's server: tests/rollouts/test_vllm.py has stand-ins for that."""


class Block(NamedTuple):
    """A fenced block."""

    line: int
    language: str
    note: str
    text: str


def name(page: Path) -> str:
    """In test ids and messages."""
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return fenced_blocks(page.read_text(encoding="utf-8"), name(page))


def fenced_blocks(text: str, source: str) -> list[Block]:
    """Return the fenced blocks of a text, in order. `source` names the text in messages."""
    found, open_ = [], None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if open_ is None:
                language, _, note = line[3:].partition(" ")
                open_ = Block(number, language, note, "")
            else:
                found.append(open_)
                open_ = None
        elif open_ is not None:
            open_ = open_._replace(text=f"{open_.text}{line}\n")
    assert open_ is None, f"{source}: a block is not closed"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def table(text: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table below a heading."""
    lines = text.split(f"\n{heading}\n")[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- bash


def _of_hf_posttrain(words: list[str], runs: bool) -> None:
    """The command, in this process; small, if it trains."""
    if not words or words[0] in run.COMMANDS:
        if runs:
            sys.stdin = io.StringIO("347+589=\n")  # of chat
            try:
                assert run.main(small_command(words)) == 0
            finally:
                sys.stdin = sys.__stdin__
        return
    asked = arguments.parse(words)
    if not runs and not Path(asked.recipe).exists():
        return
    recipe = load_recipe(asked.recipe, asked.overrides)
    asks_a_server = any(word.startswith(NEEDS_A_SERVER) for word in words)
    if not runs or asks_a_server or any(section.url for _, section in recipe.teacher_sections()):
        build.configure(load_recipe(asked.recipe, [*asked.overrides, "train.use_cpu=true"]))
        return
    assert run.main([*words, *small(recipe)]) in ((0, 1) if asked.check else (0,))  # 1: so few rows are a warning


def small_command(words: list[str]) -> list[str]:
    """A command with options that make it one of seconds. The models are random: their answers are never right, and do
    not end."""
    line = " ".join(words) if words and words[0] in ("judge", "pair") else ""
    line = line.replace("--by exact_match", "--by function hub_for_tests:even_bytes")
    line += " --unfinished" if line.startswith("pair") else ""
    more = {"sample": ["--limit", "16"], "eval": ["--limit", "4"]}.get(words[0] if words else "", [])
    return line.split() if line else [*words, *(more if "--limit" not in words else [])]


def _module(words: list[str], runs: bool) -> None:
    """`python FILE` or `python -m MODULE ...`: hf_posttrain.run is the command; others and their options exist."""
    if words[0] != "-m":
        return _file(words, runs)
    if words[1] == "hf_posttrain.run":
        return _of_hf_posttrain(words[2:], runs)
    spec = importlib.util.find_spec(words[1])
    spec = importlib.util.find_spec(f"{words[1]}.__main__") if spec.submodule_search_locations else spec
    source = Path(spec.origin).read_text(encoding="utf-8")
    unknown = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source]
    assert not unknown, f"{words[1]} has no {unknown}"
    return None


def _accelerate(words: list[str], runs: bool) -> None:
    """The launcher's options are parsed by itself and its file is there; what it launches runs in this process."""
    assert words[0] == "launch"
    given = launch_command_parser().parse_args(words[1:] if runs or "-m" in words else [*words[1:], "script.py"])
    assert given.config_file is None or Path(given.config_file).is_file(), given.config_file
    if given.module:
        _module(["-m", given.training_script, *given.training_script_args], runs)


def _torchrun(words: list[str], runs: bool) -> None:
    given = torchrun_parser().parse_args(words)
    assert given.module
    _module(["-m", given.training_script, *given.training_script_args], runs)


def _make(words: list[str], runs: bool) -> None:
    """Tests, installation and quickstart are jobs of their own: the target is there."""
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), words


def _pip(words: list[str], runs: bool) -> None:
    """Nothing is installed by a test: the extra is there."""
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    assert words[0] == "install"
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(setup["options.extras_require"]), extras


def _file(words: list[str], runs: bool) -> None:
    """Long, or for a GPU: the script is there (tests/test_gpu_benchmarks.py runs gpu.sh dry)."""
    assert Path(words[0]).is_file(), words[0]


def _environment(words: list[str], runs: bool) -> None:
    """`source .venv/bin/activate`: what `make` makes."""
    assert words == [".venv/bin/activate"]


def _vllm(words: list[str], runs: bool) -> None:
    """No vLLM here: its subcommand alone is checked."""
    assert words[0] == "serve"


PROGRAMS = {
    "hf-posttrain": _of_hf_posttrain, "python": _module, "accelerate": _accelerate, "torchrun": _torchrun,
    "make": _make, "pip": _pip, "bash": _file, "source": _environment, "vllm": _vllm,
}  # fmt: skip


def command(line: str, runs: bool) -> None:
    """One command line, its environment variables and comment aside."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return
    assert words[0] in PROGRAMS, f"no way to check {words[0]!r}: add it to PROGRAMS"
    PROGRAMS[words[0]](words[1:], runs)


# ---- the other languages


def recipe_of(block: Block, page: Path, folder: Path) -> None:
    """A recipe, or a fragment laid over a small one: strictly loaded, and its train section made a Config."""
    tree = yaml.safe_load(block.text)
    if "method" not in tree:
        tree = _whole(tree, block.note or (page.stem if page.stem in METHODS else "sft"))
    file = folder / f"block-{block.line}.yaml"
    file.write_text(yaml.safe_dump(tree))
    recipe = load_recipe(file, ["train.use_cpu=true", "train.bf16=null"])
    train_config(recipe, CONFIGS[recipe.method])


def _whole(fragment: dict, method: str) -> dict:
    """A recipe of the method with the fragment's sections in place of its own."""
    rows, second = {"path": "mine.jsonl"}, {"teacher": {"name_or_path": "Qwen/Qwen3-4B"}}
    tree = {"method": method, "model": {"name_or_path": "Qwen/Qwen3-0.6B"}, "data": {"train": rows, "eval": rows}}
    tree |= second if TABLE[method].second == "teacher" else {}
    return tree | fragment | {"train": {"output_dir": "outputs/fragment", **fragment.get("train", {})}}


def rows_of(block: Block) -> None:
    for line in filter(None, block.text.splitlines()):
        row = json.loads(line)
        columns = [canonical_name(column, row) for column in row]
        assert any(_reads(columns, method) for method in METHODS), line


def _reads(columns: list[str], method: str) -> bool:
    try:
        return bool(detect_format(columns, TABLE[method]))
    except InputError:
        return False


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_hub(folder)
    return folder


@pytest.fixture
def folder(hub, tmp_path, monkeypatch):
    """The current directory: the hub's names are folders in it, and the files of the README's table."""
    at_home(tmp_path, hub)
    monkeypatch.setattr(charts, "write_image", lambda *run: False)  # it takes time; test_report.py has it
    monkeypatch.setattr(callbacks, "MAX_NEW_TOKENS", 4)
    for file, line in _own_files():
        (tmp_path / file).write_text(f"{line}\n{line.replace('347', '348')}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _own_files() -> Iterator[tuple[str, str]]:
    page = REPOSITORY / "docs" / "guides" / "finetune.md"
    for file, line, _ in table(page.read_text(encoding="utf-8"), "## 1. Prepare the rows"):
        yield code(file)[0], "\n".join(code(line))


SLOW = {
    *(f"docs/guides/{name}.md" for name in ("scaling", "rounds", "reward_models")),
    *(f"docs/reference/{name}.md" for name in ("sft", "kto", "kd", "opd", "rm", "recipes")),
}
"""Pages whose commands run recipes that tests/test_recipes.py runs too, or take more than 7 s."""


@pytest.mark.parametrize("page", quick(*({*map(name, PAGES)} - SLOW), among=[*map(name, PAGES)]))
def test_every_block_of_a_page_runs(page, folder):
    page = REPOSITORY / page
    kept = {"__name__": "page"}
    for block in blocks(page):
        place = f"{name(page)}:{block.line}"
        if "." in block.note:
            (folder / block.note).write_text(block.text)
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                print(f"{place}: {line}", file=sys.stderr)
                command(line, runs=True)
        elif block.language == "python":
            exec(compile(block.text, place, "exec"), kept)
        elif block.language == "yaml":
            recipe_of(block, page, folder)
        elif block.language == "json":
            rows_of(block)
        else:
            assert block.language in ("text", "mermaid"), f"{place}: a block of {block.language or 'no language'}"


# ---- docstrings


def sections(cls: type) -> dict[str, str]:
    """Return the sections of a docstring in Google style, such as Args and Example, without their indentation."""
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", inspect.getdoc(cls), flags=re.MULTILINE)
    return {title: textwrap.dedent(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


CLASSES = {cls.__name__: cls for method in TABLE.values() for cls in (config_class(method), trainer_class(method))}
"""Trainers and Configs of all methods by name."""


@pytest.mark.parametrize("class_name", CLASSES)
def test_the_example_of_a_docstring_runs(class_name, folder):
    example = sections(CLASSES[class_name])["Example"]
    [block] = fenced_blocks(example, class_name)
    assert block.language == "python"
    assert f"{class_name}(" in block.text
    exec(compile(block.text, f"example of {class_name}", "exec"), {"__name__": "example"})


@pytest.mark.parametrize(
    "cls", [*CONFIGS.values(), DistillationConfig, SupervisedOptions], ids=lambda cls: cls.__name__
)
def test_the_arguments_of_a_docstring_are_the_help_texts(cls):
    described = dict(re.findall(r"^(\w+): (.*(?:\n .*)*)", sections(cls)["Args"], re.MULTILINE))
    fields = {field.name: field for field in dataclasses.fields(cls)}
    options = [fields[key] for key in cls.__annotations__ if key in fields]
    help_texts = {field.name: field.metadata["help"] for field in options}
    assert {key: " ".join(text.split()) for key, text in described.items()} == help_texts


@pytest.mark.parametrize("trainer", [trainer_class(method) for method in TABLE.values()], ids=lambda cls: cls.__name__)
def test_the_arguments_that_a_trainer_adds_are_in_its_docstring(trainer):
    if "__init__" in vars(trainer):
        described = re.findall(r"^\**(\w+):", sections(trainer)["Args"], re.MULTILINE)
        assert described == [key for key in inspect.signature(trainer.__init__).parameters if key != "self"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_running_text_can_be_parsed(page, folder):
    for span in spans(page):
        if span.split()[0] in PROGRAMS and " " in span:
            command(span, runs=False)


def test_an_unknown_command_or_option_fails():
    with pytest.raises(AssertionError, match="add it to PROGRAMS"):
        command("rm -rf /", runs=False)
    with pytest.raises(InputError, match="unknown option --chekc"):
        command("hf-posttrain x.yaml --chekc", runs=False)
    with pytest.raises(AssertionError):
        command("make coffee", runs=False)


def options_of(group):
    """The names of all options of a group."""
    return {field.name for kind in group.kinds.values() for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_in_running_text_exist(page):
    fields = {name for config in CONFIGS.values() for name in config.__dataclass_fields__}
    sections = {"model": ModelSection, "teacher": TeacherSection, "data.train": Source, "data.eval": Source}
    names = r"(?<!train\.)\b(train|model|teacher|sampler|rollouts|reward|data\.train|data\.eval)\.(\w+)"
    for section, key in re.findall(names, " ".join(spans(page))):
        known = fields if section == "train" else set(getattr(sections.get(section), "__dataclass_fields__", ()))
        for row in TABLE.values():
            known |= options_of(row.groups[section]) if section in row.groups else set()
        assert key in known or key in ("jsonl", "py"), f"{section}.{key}"


# ---- links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# ---- tables


def options_script():
    spec = importlib.util.spec_from_file_location("docs_options", REPOSITORY / "docs" / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts[-3:]], ids=name)
def test_tables_of_options_are_those_of_the_source(page):
    text = page.read_text(encoding="utf-8")
    assert options_script().written(text) == text, "run `make docs`"
    for part in re.findall(r"<!-- options \w+ -->\n(.*?)<!-- end -->", text, re.DOTALL):
        for line in part.splitlines():
            assert "|  |" not in line, f"a cell is empty: {line}"


def test_every_method_has_a_page_with_all_its_options():
    for method, config in CONFIGS.items():
        text = (REPOSITORY / "docs" / "reference" / f"{method}.md").read_text(encoding="utf-8")
        shown = "".join(re.findall(r"<!-- (?:options|shared) \w+ -->\n(.*?)<!-- end -->", text, re.DOTALL))
        inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
        assert {field.name for field in dataclasses.fields(config)} - inherited <= set(code(shown)), method


def test_the_table_of_training_arguments_is_true():
    text = (REPOSITORY / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
    fields = {field.name: field for field in dataclasses.fields(PostTrainConfig)}
    for option, default, _ in table(text, "## TrainingArguments"):
        given = fields[code(option)[0]].default
        assert code(default)[0] == (given if isinstance(given, str) else json.dumps(given)), option


def test_the_table_of_warnings_has_all_of_them():
    page = REPOSITORY / "docs" / "guides" / "troubleshooting.md"
    rows = table(page.read_text(encoding="utf-8"), "## Warnings while it runs")
    said = {code(name)[0]: text.replace("`", "") for name, text, _ in rows}
    assert said.pop("nan")
    assert said == {name: symptom.description for name, symptom in watch.SYMPTOMS.items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_page_of_a_method_names_its_warnings(method):
    text = (REPOSITORY / "docs" / "reference" / f"{method}.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in TABLE[method].symptoms)


GRADED = {"loss_type": "policy_gradient", "num_generations": 2, "reward": {"function": "exact_match"}}
VARIANTS = {"kto": [{}, {"loss_type": "bco"}], "opd": [{}, GRADED]}
"""Options that log other metrics."""


@pytest.mark.parametrize("method", METHODS)
def test_metrics_of_a_method_are_those_that_it_logs(method, tmp_path):
    logged = set()
    for options in VARIANTS.get(method, [{}]):
        second = {"second": tiny_model(seed=1)} if TABLE[method].second == "teacher" else {}
        rows = token_rows(method)
        trainer = trainer_for(method, tiny_model(), rows, tmp_path, eval_rows=rows, eval_strategy="steps", eval_steps=1,
                              **second, **options)  # fmt: skip
        trainer.train()
        logged |= {key.removeprefix("eval_") for log in trainer.state.log_history for key in log}
    logged = {re.sub(r"^(position/\w+)_\d$", r"\1_…", key) for key in logged}
    shared = {one for cells in _metrics("options", "## Metrics of every method") for one in code(cells[0])}
    own = {one.removeprefix("eval_") for cells in _metrics(method, "## Metrics") for one in code(cells[0])}
    plain = {one.removeprefix("eval_") for one in shared}
    assert logged <= own | plain, logged - own - plain
    assert own - {"…", "exact_match"} <= logged, own - logged


def _metrics(page: str, heading: str) -> list[list[str]]:
    return table((REPOSITORY / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8"), heading)


def test_formats_of_the_guide_are_read_by_their_method():
    text = (REPOSITORY / "docs" / "guides" / "finetune.md").read_text(encoding="utf-8")
    for _, line, method in table(text, "## 1. Prepare the rows"):
        row = TABLE[method.partition(",")[0]]
        assert detect_format(list(json.loads(code(line)[0])), row) in row.rows.formats
