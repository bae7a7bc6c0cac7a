"""`hf-posttrain init`: recipes that load and train, what is asked, columns of files, and what is refused."""

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from models_for_tests import tiny_model
from rows_for_tests import methods_of, raw_row
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import quick

from hf_posttrain import run
from hf_posttrain.commands import init, recipes
from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, SUPERVISED, UNPAIRED
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.fields import train_fields
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.yaml_tree import read_tree

SHIPPED = Path(__file__).parents[2] / "recipes"
TAUGHT = [name for name, method in METHODS.items() if method.second == "teacher"]
JUDGED = [name for name in methods_of(SUPERVISED, PREFERENCE, UNPAIRED) if name not in TAUGHT]
MAPPING = {"prompt": "question", "completion": "answer"}
EXAMPLES = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, and a stdin that is at its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return tmp_path


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def written(method, *arguments, file=None):
    """The recipe that is written, as it is read."""
    assert init.main([method, *arguments]) == 0
    return load_recipe(file or f"{method}.yaml")


def refused(*arguments):
    """What is said of arguments with which nothing is written."""
    before = sorted(Path().iterdir())
    with pytest.raises(InputError) as raised:
        init.main(arguments)
    assert sorted(Path().iterdir()) == before
    return str(raised.value)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_methods_recipe_loads_and_begins_where_the_shipped_one_does(method, lora, capsys):
    recipe, shipped = written(method, "--yes", *["--lora"] * lora), load_recipe(SHIPPED / f"{method}.yaml")
    assert (recipe.method, recipe.model.name_or_path) == (method, shipped.model.name_or_path)
    assert recipe.teacher is None or recipe.teacher.name_or_path == shipped.teacher.name_or_path
    assert (recipe.teacher is None) == (method not in TAUGHT)
    assert recipe.data == shipped.data
    assert (recipe.model.lora is not None) == lora
    rate = METHODS[method].initial_rate or train_fields(method)["learning_rate"].default
    assert recipe.train["learning_rate"] == pytest.approx(rate * 10 if lora else rate)
    assert recipe.train["output_dir"] == f"outputs/{method}"
    # the options that are the method's own, and sizes, as in the shipped one
    options = [name for name in METHODS[method].limits if name in shipped.train]
    assert options or method == next(iter(METHODS))
    for name in (*options, "per_device_train_batch_size", "gradient_accumulation_steps"):
        assert recipe.train[name] == shipped.train[name]
    said = capsys.readouterr().out
    assert f"\n  hf-posttrain {method}.yaml --check\n  hf-posttrain {method}.yaml\n" in said
    assert said.endswith(f"on several GPUs:\n  accelerate launch -m hf_posttrain.run {method}.yaml\n")


@pytest.mark.parametrize("method", METHODS)
def test_every_line_says_what_it_is_for(method):
    written(method, "--yes", "--lora")
    lines = Path(f"{method}.yaml").read_text().splitlines()
    assert [line for line in lines if not re.search(r":$|^#|  # \S.*\S$", line)] == []
    assert max(map(len, lines)) < 125
    assert [line for line in lines if "`" in line or "None" in line] == []
    for metric in METHODS[method].key_metrics:
        assert any(metric in line for line in lines)


@pytest.mark.parametrize("method", METHODS)
def test_without_shipped_recipes_places_are_kept(method, monkeypatch):
    monkeypatch.setattr(init, "find_shipped", lambda: {folder: {} for folder in recipes.FOLDERS})
    recipe = written(method, "--yes")
    assert (recipe.model.name_or_path, recipe.data.train.path) == ("ORG/MODEL", "ROWS.jsonl")
    fields = train_fields(method)
    given = {name for name in METHODS[method].limits if fields[name].default is not None}
    assert given <= {*recipe.train}


@pytest.mark.parametrize("method", quick("dpo", among=METHODS))
def test_it_starts_a_run(method):
    tiny_model(vocab_size=300).save_pretrained("tiny")
    byte_tokenizer().save_pretrained("tiny")
    write_rows("rows.jsonl", [raw_row(METHODS[method].rows, f"{n}?", str(n), "no", n % 2 == 0) for n in range(8)])
    teacher = ["--teacher", "tiny"] if method in TAUGHT else []
    written(method, "--model", "tiny", *teacher, "--data", "rows.jsonl", "--eval", "rows.jsonl", "-o", "mine.yaml",
            file="mine.yaml")  # fmt: skip
    small = ["train.max_steps=2", "train.use_cpu=true", "train.gradient_accumulation_steps=1", "train.max_length=64"]
    small += ["train.max_completion_length=8"] if METHODS[method].rows.sampled else []
    assert run.main(["mine.yaml", *small]) == 0
    assert Path("outputs/mine/checkpoint-2").is_dir()
    assert "eval_loss" in json.loads(Path("outputs/mine/all_results.json").read_text())


# ---- questions


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_not_given_is_asked(method, terminal, monkeypatch, capsys):
    taught = method in TAUGHT
    stdin = io.StringIO("my/model\n" + "my/teacher\n" * taught + " my/rows \n")
    stdin.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdin", stdin)
    recipe = written(method)
    assert (recipe.model.name_or_path, recipe.data.train.path) == ("my/model", "my/rows")
    assert not taught or recipe.teacher.name_or_path == "my/teacher"
    asked = re.findall(r"(\w+) \[(\S+)\]: ", capsys.readouterr().err)
    shipped = load_recipe(SHIPPED / f"{method}.yaml")
    defaults = {"model": shipped.model.name_or_path, "data": shipped.data.train.path}
    defaults |= {"teacher": shipped.teacher.name_or_path} if taught else {}
    assert dict(asked) == defaults


def test_enter_takes_the_default_and_what_is_given_is_not_asked(monkeypatch, capsys):
    [method, *_] = TAUGHT
    monkeypatch.setattr("sys.stdin", io.StringIO("\nmy/rows\n"))
    recipe = written(method, "--model", "my/model")
    assert recipe.teacher.name_or_path == load_recipe(SHIPPED / f"{method}.yaml").teacher.name_or_path
    assert (recipe.model.name_or_path, recipe.data.train.path) == ("my/model", "my/rows")
    assert "model [" not in capsys.readouterr().err


def test_the_end_of_the_input_is_reported_with_the_default(capsys):
    recipe = written("sft", "--data", "my/rows")
    said = capsys.readouterr().err
    assert f"no answer, since the input has ended: {recipe.model.name_or_path}\n" in said


def test_nothing_is_asked_with_yes_or_without_a_stdin(monkeypatch, capsys):
    written("sft", "--yes")
    monkeypatch.setattr("sys.stdin", None)
    written("dpo")
    assert capsys.readouterr().err == ""


# ---- data


@pytest.mark.parametrize(("row", "columns", "methods"), [
    (EXAMPLES[0], MAPPING, methods_of(SUPERVISED, PROMPTS)),
    ({"prompt": "1+1?", "completion": "2"}, None, methods_of(SUPERVISED, PROMPTS)),
    ({"query": "1+1?", "chosen": "2", "rejected": "3"}, {"prompt": "query"}, methods_of(PREFERENCE, UNPAIRED)),
    ({"instruction": "1+1?", "output": "2"}, None, methods_of(SUPERVISED, PROMPTS)),
])  # fmt: skip
def test_the_columns_of_a_file_are_mapped_where_they_must_be(row, columns, methods):
    write_rows("mine.jsonl", [row] * 3)
    for method in methods:
        recipe = written(method, "--data", "mine.jsonl", "--yes")
        assert recipe.data.train.columns == columns
        assert recipe.data.eval is None
        assert "eval_strategy" not in recipe.train
        assert recipe.train["apply_chat_template"] is True


def test_columns_with_unknown_names_are_given_on_the_command_line():
    write_rows("german.jsonl", [{"frage": "1+1?", "antwort": "2"}] * 8)
    message = refused("sft", "--model", "m", "--data", "german.jsonl")
    assert "To rename columns, use --columns NAME=COLUMN" in message
    columns = ("--columns", "prompt=frage", "completion=antwort")
    found = written("sft", "--model", "m", "--data", "german.jsonl", *columns)
    assert found.data.train.columns == {"prompt": "frage", "completion": "antwort"}
    assert found.train["apply_chat_template"]
    assert "--columns requires --data or --eval" in refused("dpo", "--yes", "--columns", "prompt=frage")


def test_rows_to_evaluate_on_are_mapped_too():
    write_rows("mine.jsonl", EXAMPLES)
    write_rows("other.jsonl", [{"prompt": "1+1?", "completion": "2"}])
    recipe = written("sft", "--data", "mine.jsonl", "--eval", "other.jsonl", "--yes")
    assert recipe.data.eval.path == "other.jsonl"
    assert (recipe.data.train.columns, recipe.data.eval.columns) == (MAPPING, None)
    assert recipe.train["eval_steps"] == 0.1


def test_the_chat_template_is_for_plain_prompts_of_a_model_that_has_one():
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    write_rows("chat.jsonl", [{"messages": turns}])
    write_rows("text.jsonl", [{"text": "1+1=2"}])
    write_rows("mine.jsonl", EXAMPLES)
    byte_tokenizer().save_pretrained("with")
    byte_tokenizer(None).save_pretrained("without")
    for data, model, expected in (("chat", "with", None), ("text", "with", None), ("mine", "with", True),
                                  ("mine", "without", None), ("mine", "org/name", True)):  # fmt: skip
        recipe = written("sft", "--data", f"{data}.jsonl", "--model", model, "-o", f"{data}-{Path(model).name}.yaml",
                         file=f"{data}-{Path(model).name}.yaml")  # fmt: skip
        assert recipe.train.get("apply_chat_template") is expected


def test_switches_of_a_template_are_those_of_the_shipped_recipes_model():
    assert written("sft", "--yes").train["chat_template_kwargs"] == {"enable_thinking": False}
    recipe = written("sft", "--yes", "--model", "org/name", "-o", "other.yaml", file="other.yaml")
    assert "chat_template_kwargs" not in recipe.train


@pytest.mark.parametrize("method", METHODS)
def test_a_file_that_cannot_serve_is_refused_in_one_line(method):
    write_rows("mine.jsonl", [{"price": 3, "weight": 4}])
    said = refused(method, "--data", "mine.jsonl", "--yes")
    assert said.startswith("--data: nothing was written. mine.jsonl: columns price, weight; format: not supported")
    assert f"{method} reads {METHODS[method].rows.formats[0]}" in said


def test_files_that_are_missing_or_hold_nothing():
    write_rows("mine.jsonl", EXAMPLES)
    Path("empty.jsonl").write_text("\n")
    Path("broken.jsonl").write_text('{"prompt": "1+1?", "completion": 3')
    assert "there is no file or folder mine.json " in refused("sft", "--data", "mine.json")
    assert "did you mean 'mine.jsonl'?" in refused("sft", "--data", "mine.json")
    assert refused("sft", "--data", "mine.jsonl", "--eval", "empty.jsonl").startswith("--eval: empty.jsonl is empty")
    assert "line 1 is not valid JSON" in refused("sft", "--data", "broken.jsonl")


# ---- arguments


def test_nothing_is_overwritten():
    Path("sft.yaml").write_text("mine")
    assert refused("sft", "--yes") == "command line: -o: sft.yaml exists. Set another file, or delete it"
    assert Path("sft.yaml").read_text() == "mine"
    assert "-o: no/where.yaml cannot be written (No such file or directory)" in refused("sft", "-o", "no/where.yaml")


@pytest.mark.parametrize(("arguments", "problem"), [
    ([], "METHOD is missing. It is one of "),
    (["dop"], "invalid choice: 'dop'"),
    ([JUDGED[0], "--teacher", "org/name"], f"--teacher is not supported for {JUDGED[0]}"),
    ([JUDGED[0], "--version"], "unrecognized arguments: --version"),
    ([JUDGED[0], "--rounds", "0"], "--rounds: must be a whole number of at least 1, not 0"),
    ([JUDGED[0], "--rounds", "many"], "--rounds: must be a whole number of at least 1, not many"),
    *(([name, "--rounds", "3"], f"--rounds is not supported for {name}, which learns from") for name in TAUGHT),
])  # fmt: skip
def test_arguments_that_make_no_sense(arguments, problem):
    assert problem in refused(*arguments)


@pytest.mark.parametrize("method", JUDGED)
def test_rounds_begin_from_prompts(method):
    write_rows("mine.jsonl", EXAMPLES)
    init.main([method, "--rounds", "3", "--data", "mine.jsonl", "--yes"])
    tree = yaml.safe_load(Path(f"{method}.yaml").read_text())
    expected = {"count": 3, "num_generations": 8, "temperature": 1.0, "max_completion_length": 256}
    expected |= {"max_completion_length": 320, "reference": "round"} if method == "dpo" else {}  # of dpo_rounds.yaml
    assert tree["rounds"] == expected | {"judge": "exact_match"}
    assert tree["train"]["save_strategy"] == "epoch"
    assert "precompute_ref_log_probs" not in tree["train"]
    assert "eval_strategy" not in tree["train"]
    assert tree["data"] == {"train": {"path": "mine.jsonl", "columns": MAPPING}}
    init.main([method, "--rounds", "2", "--yes", "-o", "usual.yaml"])
    [sampling, *_] = methods_of(PROMPTS)
    shipped = yaml.safe_load((SHIPPED / f"{sampling}.yaml").read_text())
    usual = yaml.safe_load(Path("usual.yaml").read_text())
    assert usual["data"] == shipped["data"]
    assert usual["train"].get("nll_coef") == (1.0 if method == "dpo" else None)  # as dpo_rounds.yaml has it
    assert ("eval" in usual["data"]) == ("eval_strategy" in usual["train"])


@pytest.mark.parametrize(
    "rows", [[{"prompt": "1+1="}], [{"prompt_ids": [1]}], [{"messages": [{"role": "user", "content": "1+1="}]}]]
)
def test_rounds_on_data_without_answers_name_another_judge(rows):
    write_rows("asked.jsonl", rows)
    init.main(["cpo", "--rounds", "2", "--data", "asked.jsonl", "--yes"])
    tree = yaml.safe_load(Path("cpo.yaml").read_text())
    assert tree["rounds"]["judge"] == {"by": "model", "name": "ORG/REWARD_MODEL"}


@pytest.mark.parametrize("name", [
    "a b", "yes", "null", "a: b", "a #b", "#a", "[a]", "{a}", "it's", '"a"', "é/ü", "a, b", "~/a", "train[:9%]", "- a",
    "C:\\a", "x" * 300, "a\nb", "10", "1.5",
])  # fmt: skip
def test_names_are_read_back_as_they_were_given(name):
    file = Path("sft.yaml")
    init.main(["sft", "--model", name, "--output_dir", name, "--yes"])
    tree, _ = read_tree(file)
    assert (tree["model"]["name_or_path"], tree["train"]["output_dir"]) == (name, name)
    assert yaml.safe_load(init.format_yaml({"prompt": name, "completion": "b"})) == {"prompt": name, "completion": "b"}
