"""`hf-posttrain init --from FILE`: every key of another tool's file is converted, or listed with what to do."""

import re
from pathlib import Path

import pytest
import yaml

from hf_posttrain import run
from hf_posttrain.commands import convert
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.fields import lora_fields, train_fields
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.yaml_tree import read_tree

FOLDER = Path(__file__).with_name("foreign")
METHOD = {"trl_dpo": "dpo", "trl_sft": "sft", "trl_distillation": "opd"}
FILES = sorted(FOLDER.glob("*.yaml"))
TABLES = yaml.safe_load(Path(convert.__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))


def converted(name, tmp_path, capsys):
    """The tree of the recipe, and the printed lines."""
    out = tmp_path / "recipe.yaml"
    arguments = [METHOD[name]] if name in METHOD else []
    assert run.main(["init", *arguments, "--from", str(FOLDER / f"{name}.yaml"), "-o", str(out)]) == 0
    return read_tree(out)[0], capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_example_becomes_a_recipe_and_lists_the_rest(file, tmp_path, capsys):
    tree, lines = converted(file.stem, tmp_path, capsys)
    load_recipe(tmp_path / "recipe.yaml")
    assert not [line for line in lines if line.startswith("before it can run")]
    listed = {line.split(":")[0].strip() for line in lines if line.startswith("  ")}
    comments = (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
    assert all(f"#   {name}" in comments for name in listed if not name.startswith("hf-posttrain"))

    # a key that is not listed leaves its value in the recipe, or a value that a table gives it
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    values = str(tree)
    tool = next(table for name, table in TABLES.items() if file.stem.startswith(name))
    special = {"dataset", "dataset_dir", "lora_target", "evals_per_epoch", "saves_per_epoch", "method"}
    for key, value in settings.items():
        if value is None or key in listed or key in special or key == tool.get("method", {}).get("key"):
            continue
        from_table = isinstance(value, str | bool | int) and value in tool["values"].get(key, {})
        number = {"1e-5": "1e-05"}.get(value, value) if isinstance(value, str) else value
        assert from_table or isinstance(value, list | dict) or str(number) in values, key


def test_what_depends_on_several_keys(tmp_path, capsys):
    tree, lines = converted("axolotl_qlora", tmp_path, capsys)
    assert tree["model"]["lora"] == {"r": 32, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"}
    assert tree["model"]["quantization"] == "4bit"
    assert tree["train"]["save_steps"] == 0.25
    assert "  eval_steps: requires rows to evaluate on. Set data.eval first" in lines
    assert any(line.startswith("  datasets.type: its prompt format alpaca is not applied") for line in lines)

    (tmp_path / "recipe.yaml").unlink()
    tree, lines = converted("axolotl_chat", tmp_path, capsys)
    sources = [{"path": "org/conversations", "columns": {"messages": "turns"}}, {"path": "more.jsonl"}]
    assert tree["data"] == {"train": sources, "eval": {"path": "org/conversations", "split": "test"}}
    assert tree["train"]["assistant_only_loss"] is True
    assert "  datasets.train_on_eos: no counterpart" in lines

    (tmp_path / "recipe.yaml").unlink()
    tree, _ = converted("axolotl_dpo", tmp_path, capsys)
    assert (tree["method"], tree["train"]["loss_type"], tree["train"]["beta"]) == ("dpo", "simpo", 2.0)

    (tmp_path / "recipe.yaml").unlink()
    tree, lines = converted("llama_factory_lora", tmp_path, capsys)
    own = {"path": "data/own.json", "columns": {"instruction": "question", "output": "answer"}, "limit": 1000}
    assert tree["data"]["train"] == [own, {"path": "org/shared", "split": "train", "limit": 1000}]
    assert tree["model"]["lora"] == {"alpha": 16, "target_modules": "all-linear", "r": 8}

    (tmp_path / "recipe.yaml").unlink()
    tree, lines = converted("trl_distillation", tmp_path, capsys)
    assert tree["teacher"] == {"name_or_path": "Qwen/Qwen3-4B"}
    assert tree["train"]["max_completion_length"] == 128
    assert any(re.match("  top_k: ", line) for line in lines)

    (tmp_path / "recipe.yaml").unlink()
    _, lines = converted("trl_sft", tmp_path, capsys)
    assert "  lora_r: no adapter is trained" in lines


def test_columns_of_a_prompt_format_are_those_of_the_rows(tmp_path):
    form = {"field_instruction": "task", "field_output": "answer", "field_input": "", "field_system": "persona"}
    settings = {"base_model": "org/model", "datasets": [{"path": "rows.jsonl", "type": form}]}
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(settings))
    assert run.main(["init", "sft", "--from", str(tmp_path / "axolotl.yaml"), "-o", str(tmp_path / "out.yaml")]) == 0
    columns = read_tree(tmp_path / "out.yaml")[0]["data"]["train"]["columns"]
    assert columns == {"instruction": "task", "output": "answer", "system": "persona"}


def test_every_key_of_the_tables_exists_here():
    names = {name for method in METHODS for name in train_fields(method)}
    for tool in TABLES.values():
        ours = [*tool["keys"].values()]
        ours += [key for values in tool["values"].values() for new in values.values() for key in new]
        for key in ours:
            section, _, name = key.rpartition(".")
            if section == "train":
                assert name in names, key
            if section == "model.lora":
                assert name in lora_fields(), key
        assert not tool["keys"].keys() & (tool["ignored"].keys() | tool["replaced"].keys())


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        ("colour: red", [], "is no file of Axolotl, LLaMA-Factory, TRL: it has none of the keys base_model, "),
        ("[1]", [], "must be a mapping of keys to values"),
        ("a: [", [], "is not valid YAML"),
        ("base_model: m\nrl: grpo", [], "rl: grpo is not supported. The supported values are "),
        ("model_name_or_path: m\nlearning_rate: 1", [], "does not name a method. Use hf-posttrain init METHOD --from"),
        ("base_model: m\nrl: dpo", ["kto"], "is for the method dpo, not kto. Remove kto"),
        ("base_model: m", [], "names no data. Add it, and convert again"),
        ("base_model: m", ["--lora"], "--lora cannot be combined with --from"),
    ],
)
def test_files_that_cannot_be_converted(text, arguments, problem, tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text(text, encoding="utf-8")
    out = tmp_path / "recipe.yaml"
    assert run.main(["init", *arguments, "--from", str(file), "-o", str(out)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert not out.exists()


def test_a_missing_file():
    with pytest.raises(InputError, match=r"no\.yaml cannot be read \(No such file"):
        convert.convert(Path("no.yaml"), None)
