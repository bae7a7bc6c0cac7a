"""`hf-posttrain init --from FILE`: every key of another tool's file is converted, or listed with what to do."""

import json
from pathlib import Path

import pytest
import yaml

from hf_posttrain import run
from hf_posttrain.commands import convert
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.models.config import ModelSection, TeacherSection
from hf_posttrain.recipe.fields import fields_of, lora_fields, train_fields
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.sections import Source
from hf_posttrain.recipe.yaml_tree import read_tree

FOLDER = Path(__file__).with_name("foreign")
METHOD = {"trl_dpo": "dpo", "trl_sft": "sft", "trl_distillation": "opd"}
FILES = sorted(FOLDER.glob("*.yaml"))
TABLES = yaml.safe_load(Path(convert.__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))


def convert_example(name, tmp_path, monkeypatch, capsys):
    """The file that is written for an example, and the printed lines."""
    monkeypatch.chdir(FOLDER)
    out = tmp_path / "recipe.yaml"
    arguments = [METHOD[name]] if name in METHOD else []
    assert run.main(["init", *arguments, "--from", f"{name}.yaml", "-o", str(out)]) == 0
    return out, capsys.readouterr().out.splitlines()


def convert_settings(tmp_path, method=None, **settings):
    """The recipe of some settings, the notes on keys that were not converted, and the keys that are not needed."""
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    conversion = convert.convert(file, method)
    return conversion.recipe, conversion.notes, conversion.ignored


def convert_axolotl(tmp_path, **settings):
    """The conversion of a minimal file of Axolotl with some settings."""
    return convert_settings(tmp_path, **{"base_model": "m", "datasets": [{"path": "rows.jsonl"}]} | settings)


def convert_llama_factory(tmp_path, entry=None, **settings):
    """The conversion of a minimal file of LLaMA-Factory with some settings, and an entry of dataset_info.json."""
    (tmp_path / "data").mkdir(exist_ok=True)
    info = {"rows": entry or {"file_name": "rows.json"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return convert_settings(tmp_path, **{"model_name_or_path": "m", "stage": "sft", "dataset": "rows"} | settings)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_example_becomes_the_expected_recipe(file, tmp_path, monkeypatch, capsys):
    out, lines = convert_example(file.stem, tmp_path, monkeypatch, capsys)
    load_recipe(out)
    assert not [line for line in lines if line.startswith("before it can run")]
    schema, _, text = out.read_text(encoding="utf-8").partition("\n")
    assert schema.startswith("# yaml-language-server: ")
    assert text == (FOLDER / "recipes" / file.name).read_text(encoding="utf-8")
    listed = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#   ")]
    assert listed == [line for line in lines if line.startswith("  ") and "hf-posttrain" not in line]


QUARTERS = {"save_strategy": "steps", "save_steps": 0.25}


@pytest.mark.parametrize(
    ("settings", "train"),
    [
        ({"saves_per_epoch": 1}, {"save_strategy": "epoch", "num_train_epochs": 1.0}),  # save_steps 1.0: every step
        ({"saves_per_epoch": 2}, {"save_strategy": "steps", "save_steps": 0.5, "num_train_epochs": 1.0}),
        (
            {"saves_per_epoch": 1, "num_epochs": 4},
            {"save_strategy": "steps", "save_steps": 0.25, "num_train_epochs": 4},
        ),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, {"warmup_steps": 7}),
        ({"warmup_steps": 0}, {"warmup_steps": 0}),
        ({"wandb_project": "p", "wandb_name": "n", "wandb_run_id": "i"}, {"report_to": "wandb", "run_name": "n"}),
    ],
)
def test_schedule_and_tracker_of_axolotl(settings, train, tmp_path):
    defaults = {
        "num_train_epochs": 1.0,
        "per_device_train_batch_size": 1,
        "max_length": 512,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
    }
    assert convert_axolotl(tmp_path, **settings)[0]["train"] == defaults | train


def test_simpo_of_axolotl_is_that_of_its_trainer(tmp_path):
    recipe, notes, _ = convert_axolotl(tmp_path, rl="simpo", cpo_alpha=0.5, simpo_gamma=0.7)
    chosen = {"loss_type": "simpo", "cpo_alpha": 0.5, "simpo_gamma": 0.7}
    assert (recipe["method"], notes) == ("cpo", {})
    assert recipe["train"].items() >= chosen.items()


ADAPTERS = [
    ("axolotl", {"peft_use_dora": True, "lora_r": 8, "lora_target_linear": True}, None, None),
    ("axolotl", {"adapter": "lora", "lora_r": 8}, {"r": 8}, None),
    ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_model_dir": "a"}, None, "a"),
    ("llama_factory", {"finetuning_type": "full", "use_dora": False, "additional_target": ["x"]}, None, None),
    ("llama_factory", {}, {"r": 8, "alpha": 16, "target_modules": "all-linear"}, None),
    ("llama_factory", {"lora_rank": 4, "lora_alpha": 3}, {"r": 4, "alpha": 3, "target_modules": "all-linear"}, None),
    ("llama_factory", {"adapter_name_or_path": "a", "lora_rank": 4}, None, "a"),
    ("trl", {"use_dora": False, "lora_target_modules": ["q_proj"]}, None, None),
    ("trl", {"use_peft": True}, {"r": 16, "alpha": 32, "dropout": 0.05}, None),
    (
        "trl",
        {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_r": 4},
        {"r": 4, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"},
        None,
    ),
]


@pytest.mark.parametrize(("tool", "settings", "lora", "adapter"), ADAPTERS)
def test_adapters_have_the_options_that_the_tool_trains_with(tool, settings, lora, adapter, tmp_path):
    if tool == "axolotl":
        recipe, notes, ignored = convert_axolotl(tmp_path, **settings)
    elif tool == "llama_factory":
        recipe, notes, ignored = convert_llama_factory(tmp_path, **settings)
    else:
        settings |= {"model_name_or_path": "m", "dataset_name": "d"}
        recipe, notes, ignored = convert_settings(tmp_path, "sft", **settings)
    assert recipe["model"].get("lora") == lora
    assert recipe["model"].get("adapter") == adapter
    options = {key for key in settings if key.startswith(("lora_", "peft_", "use_dora", "additional_target"))}
    if lora is None:
        assert ignored.keys() >= options - {"lora_model_dir"}
    assert ("lora_target_modules" in notes) == (
        settings.get("use_peft") is True and "lora_target_modules" not in settings
    )


@pytest.mark.parametrize(
    ("entry", "train", "note"),
    [
        ({"path": "org/x", "type": "chat_template"}, True, None),
        ({"path": "org/x", "type": "chat_template", "roles_to_train": ["gpt"]}, True, None),
        ({"path": "org/x", "type": "chat_template", "roles_to_train": ["user", "assistant"]}, None, "roles_to_train"),
        ({"path": "org/x", "type": "input_output"}, None, "type"),
        ({"path": "org/x", "data_files": "a.jsonl"}, None, "data_files"),
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, None, "data_files"),
        ({"path": "json", "data_files": "a.jsonl"}, None, None),
    ],
)
def test_sources_of_axolotl(entry, train, note, tmp_path):
    recipe, notes, _ = convert_axolotl(tmp_path, datasets=[entry])
    assert recipe["train"].get("assistant_only_loss") == train
    assert [*notes] == ([f"datasets.{note}"] if note else [])
    assert recipe["data"]["train"]["path"] == ("a.jsonl" if entry["path"] == "json" else "org/x")


@pytest.mark.parametrize(
    ("entry", "settings", "source", "note"),
    [
        ({"file_name": "x.json", "num_samples": 5}, {}, {"path": "FOLDER/x.json", "limit": 5}, None),
        ({"ms_hub_url": "org/x"}, {}, {"path": "rows"}, "dataset rows"),
        ({"hf_hub_url": "x", "ms_hub_url": "y"}, {}, {"path": "x"}, "dataset rows.ms_hub_url"),
        ({"hf_hub_url": "x", "subset": "s", "split": "t"}, {}, {"path": "x", "name": "s", "split": "t"}, None),
        ({"file_name": "x.json", "columns": {"prompt": "text"}}, {"stage": "pt"}, {"path": "FOLDER/x.json"}, None),
        (
            {"file_name": "x.json", "formatting": "sharegpt", "tags": {"role_tag": "speaker", "user_tag": "human"}},
            {},
            {"path": "FOLDER/x.json"},
            "dataset rows.tags.role_tag",
        ),
        (None, {"dataset": "a,b"}, None, "dataset b"),
    ],
)  # fmt: skip
def test_sources_of_llama_factory(entry, settings, source, note, tmp_path):
    recipe, notes, _ = convert_llama_factory(tmp_path, entry, **settings)
    if source:
        source["path"] = source["path"].replace("FOLDER", str(tmp_path / "data"))
        assert recipe["data"]["train"] == source
    assert note is None or note in notes
    assert bool(notes) == bool(note)


def test_rows_of_llama_factory_that_train_on_prompts(tmp_path):
    entry = {"file_name": "x.json", "formatting": "sharegpt"}
    assert convert_llama_factory(tmp_path, entry)[0]["train"]["assistant_only_loss"] is True
    recipe, notes, _ = convert_llama_factory(tmp_path, entry, train_on_prompt=True, neat_packing=True)
    assert "assistant_only_loss" not in recipe["train"]
    assert recipe["train"]["packing"] is True
    _, notes, _ = convert_llama_factory(tmp_path, stage="dpo", train_on_prompt=True)
    assert [*notes] == ["train_on_prompt"]


@pytest.mark.parametrize(
    ("beta", "train"),
    [(1.0, {"loss_type": "reverse_kl"}), (0, {"loss_type": "forward_kl"}), (0.5, {"loss_type": "jsd", "beta": 0.5})],
)
def test_divergence_of_trl(beta, train, tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d", "teacher_model_name_or_path": "t", "beta": beta}
    assert convert_settings(tmp_path, "opd", **settings)[0]["train"] == train
    name = train.pop("loss_type")
    assert convert_settings(tmp_path, "kd", **settings)[0]["train"] == train | {"divergence": name}


def test_rows_to_evaluate_on_of_trl(tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "epoch"}
    recipe, _, _ = convert_settings(tmp_path, "sft", **settings)
    assert recipe["data"]["eval"] == {"path": "d", "split": "test"}
    settings = {"model_name_or_path": "m", "datasets": [{"path": "d"}], "dataset_test_split": "test"}
    assert [*convert_settings(tmp_path, "sft", **settings)[1]] == ["dataset_test_split"]


def test_columns_of_a_prompt_format_are_those_of_the_rows(tmp_path):
    form = {"field_instruction": "task", "field_output": "answer", "field_input": "", "field_system": "persona"}
    settings = {"base_model": "org/model", "datasets": [{"path": "rows.jsonl", "type": form}]}
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(settings))
    assert run.main(["init", "sft", "--from", str(tmp_path / "axolotl.yaml"), "-o", str(tmp_path / "out.yaml")]) == 0
    columns = read_tree(tmp_path / "out.yaml")[0]["data"]["train"]["columns"]
    assert columns == {"instruction": "task", "output": "answer", "system": "persona"}


def test_every_key_of_the_tables_exists_here():
    names = {
        "train": {name for method in METHODS for name in train_fields(method)},
        "model": fields_of(ModelSection),
        "model.lora": lora_fields(),
        "data.train": fields_of(Source),
        "teacher": fields_of(TeacherSection),
    }
    for tool in TABLES.values():
        ours = [*tool["keys"].values()]
        ours += [key for values in tool["values"].values() for new in values.values() for key in new]
        for key in ours:
            section, _, name = key.rpartition(".")
            assert name in names[section], key
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
