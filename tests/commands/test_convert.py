"""`hf-posttrain init --from FILE`: every key of another tool's file is converted, or listed with what to do."""

import json
import re
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
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.0}, {"warmup_steps": 0.0}),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0}),
        ({"lr_scheduler": "constant", "warmup_steps": 9}, {"lr_scheduler_type": "constant", "warmup_steps": 0}),
        (
            {"cosine_min_lr_ratio": 0.1},
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
        (
            {"cosine_min_lr_ratio": 0.1, "lr_scheduler_kwargs": {"num_cycles": 2}},
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
        ({"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"}, {"lr_scheduler_type": "linear"}),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, {"warmup_steps": 7}),
        ({"warmup_steps": 0}, {"warmup_steps": 0}),
        (
            {"saves_per_epoch": 1, "num_epochs": "2"},
            {"save_strategy": "steps", "save_steps": 0.5, "num_train_epochs": 2.0},
        ),
        ({"save_steps": 50, "save_total_limit": 2}, {"save_steps": 50, "save_total_limit": 2}),
        ({"save_strategy": "no"}, {"save_strategy": "no"}),
        ({"wandb_project": "p", "wandb_name": "n", "wandb_run_id": "i"}, {"report_to": "wandb", "run_name": "n"}),
        ({"wandb_project": "", "wandb_name": ""}, {}),
        ({"use_tensorboard": True, "mlflow_experiment_name": "e"}, {"report_to": ["mlflow", "tensorboard"]}),
        (
            {"trackio_project_name": "p", "trackio_run_name": "n"},
            {"report_to": "trackio", "project": "p", "run_name": "n"},
        ),
        ({"hub_model_id": "me/m"}, {"hub_model_id": "me/m", "push_to_hub": True, "hub_private_repo": True}),
    ],
)
def test_schedule_and_tracker_of_axolotl(settings, train, tmp_path):
    defaults = {
        "num_train_epochs": 1.0, "per_device_train_batch_size": 1, "max_length": 512, "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03, "save_strategy": "epoch", "save_total_limit": 4,
    }  # fmt: skip
    if "save_steps" in settings:
        del defaults["save_strategy"]  # that of the recipe is steps
    assert convert_axolotl(tmp_path, **settings)[0]["train"] == defaults | train


def test_evaluation_of_axolotl(tmp_path):
    settings = {"evals_per_epoch": 2, "micro_batch_size": 4, "test_datasets": [{"path": "heldout.jsonl"}]}
    train = convert_axolotl(tmp_path, **settings)[0]["train"]
    evaluation = {"eval_strategy": "steps", "eval_on_start": True, "per_device_eval_batch_size": 4}
    assert train.items() >= (evaluation | {"eval_steps": 0.5}).items()
    settings = {"eval_steps": 20, "eval_strategy": "epoch", "micro_batch_size": 4, "test_datasets": ["heldout.jsonl"]}
    assert convert_axolotl(tmp_path, **settings)[0]["train"].items() >= (evaluation | {"eval_steps": 20}).items()
    assert "evals_per_epoch" in convert_axolotl(tmp_path, evals_per_epoch=2)[1]
    _, notes, ignored = convert_axolotl(tmp_path, eval_strategy="no", val_set_size=0.0)
    assert not notes
    assert "eval_strategy" in ignored


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
    (
        "llama_factory",
        {"lora_target": ["q_proj", "v_proj"], "additional_target": "embed_tokens,lm_head"},
        {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        None,
    ),
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
        (settings.get("use_peft") is True or settings.get("adapter") == "lora")
        and not settings.keys() & {"lora_target_modules", "lora_model_dir"}
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


def test_sources_of_axolotl_that_disagree(tmp_path):
    """In either order, all turns are trained, and a note names each source that asks for something else."""
    chat = {"type": "chat_template"}
    assistant, everyone = {"path": "a", **chat}, {"path": "b", "roles_to_train": ["user", "assistant"], **chat}
    for first, second in ((assistant, everyone), (everyone, assistant)):
        recipe, notes, _ = convert_axolotl(tmp_path, datasets=[first, second])
        assert "assistant_only_loss" not in recipe["train"]
        position = [first, second].index(everyone)
        assert notes.keys() == {f"datasets[{position}].roles_to_train", f"datasets[{1 - position}]"}
    rows = {"path": "c"}  # no conversations
    assert convert_axolotl(tmp_path, datasets=[assistant, rows])[0]["train"]["assistant_only_loss"] is True


def test_each_source_of_axolotl_has_its_own_notes(tmp_path):
    entries = [{"path": "a", "type": "alpaca"}, {"path": "b", "type": "gpteacher", "shards": 2}]
    _, notes, _ = convert_axolotl(tmp_path, datasets=entries)
    assert [*notes] == ["datasets[0].type", "datasets[1].type", "datasets[1].shards"]


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ("chatml.intel", {"prompt": "question"}),
        ("llama3.argilla", {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"}),
        ("llama3.prompt_pairs", None),
    ],
)
def test_preference_formats_of_axolotl(form, columns, tmp_path):
    recipe, notes, _ = convert_axolotl(tmp_path, rl="dpo", datasets=[{"path": "pairs", "type": form}])
    assert recipe["train"]["apply_chat_template"] is True
    assert recipe["data"]["train"].get("columns") == columns
    assert not notes


def test_pretraining_data_of_axolotl(tmp_path):
    entry = {"path": "org/web", "name": "en", "type": "pretrain", "text_column": "content", "skip": 5}
    recipe, notes, _ = convert_settings(tmp_path, base_model="m", pretraining_dataset=entry, max_steps=10)
    source = {"path": "org/web", "name": "en", "columns": {"text": "content"}, "streaming": True}
    assert recipe["data"]["train"] == source
    assert [*notes] == ["pretraining_dataset", "pretraining_dataset.skip"]
    recipe, notes, _ = convert_settings(
        tmp_path, base_model="m", pretraining_dataset=entry, max_steps=10, sample_packing=True
    )
    assert "packing" not in recipe["train"]
    assert "sample_packing" in notes


def test_sections_and_columns_of_axolotl(tmp_path):
    form = {"field_prompt": "question", "field_completion": "answer", "field_label": "good"}
    entry = {"path": "rows.jsonl", "type": form}
    recipe, notes, _ = convert_axolotl(tmp_path, rl="kto", datasets=[entry], trl={"beta": 0.3, "use_vllm": False})
    columns = {"prompt": "question", "completion": "answer", "label": "good"}
    assert recipe["data"]["train"]["columns"] == columns
    assert recipe["train"]["beta"] == 0.3
    assert [*notes] == ["trl.use_vllm"]
    entry = {"path": "rows.jsonl", "type": "bradley_terry.chat_template.default"}
    recipe, notes, _ = convert_axolotl(tmp_path, reward_model=True, datasets=[entry])
    assert recipe["method"] == "rm"
    assert recipe["train"]["apply_chat_template"] is True
    assert recipe["data"]["train"]["columns"] == {"prompt": "input"}
    chat = {"message_field_role": "from", "message_field_content": "value", "train_on_eos": "turn"}
    entries = [{"path": "a", "type": "chat_template", "chat_template": "tokenizer_default", **chat}]
    assert not convert_axolotl(tmp_path, datasets=entries)[1]
    assert [*convert_axolotl(tmp_path, datasets=[*entries, {"path": "b"}])[1]] == ["datasets"]
    assert convert_axolotl(tmp_path, bf16=True)[0]["model"]["dtype"] == "bfloat16"
    recipe, notes, _ = convert_axolotl(tmp_path, rl="dpo", trl={"sync_ref_model": True, "num_generations": 4})
    assert notes["trl.sync_ref_model"] == "Axolotl uses it for GRPO alone. Set train.sync_ref_model"
    assert notes["trl.num_generations"] == "Axolotl uses it for GRPO alone"
    assert convert_axolotl(tmp_path, processor_type="AutoProcessor")[0]["model"]["images"] is True


def test_plugins_of_axolotl(tmp_path):
    assert "plugins" in convert_axolotl(tmp_path, plugins=["axolotl.integrations.kd.KDPlugin"])[1]
    assert "plugins" in convert_axolotl(tmp_path, plugins=["axolotl.integrations.liger.LigerPlugin"])[2]


@pytest.mark.parametrize(
    ("entry", "settings", "source", "note"),
    [
        ({"file_name": "x.json", "num_samples": 5}, {}, {"path": "FOLDER/x.json", "limit": 5}, None),
        ({"ms_hub_url": "org/x"}, {}, {"path": "rows"}, "dataset rows"),
        ({"hf_hub_url": "x", "ms_hub_url": "y"}, {}, {"path": "x"}, None),
        ({"hf_hub_url": "x", "subset": "s", "split": "t"}, {}, {"path": "x", "name": "s", "split": "t"}, None),
        ({"file_name": "x.json", "columns": {"prompt": "text"}}, {"stage": "pt"}, {"path": "FOLDER/x.json"}, "stage"),
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


@pytest.mark.parametrize(
    ("entry", "settings", "applied"),
    [
        ({"file_name": "x.json"}, {"template": "qwen3"}, True),
        ({"file_name": "x.json"}, {"template": "qwen3", "stage": "dpo"}, True),
        ({"file_name": "x.json"}, {}, True),
        ({"file_name": "x.json"}, {"template": "default"}, True),
        ({"file_name": "x.json"}, {"template": "empty"}, None),
        ({"file_name": "x.json"}, {"template": "qwen3", "stage": "pt"}, None),
        ({"file_name": "x.json", "formatting": "sharegpt"}, {"template": "qwen3"}, None),
    ],
)
def test_prompts_of_llama_factory_get_the_chat_template(entry, settings, applied, tmp_path):
    recipe, notes, _ = convert_llama_factory(tmp_path, entry, **settings)
    assert recipe["train"].get("apply_chat_template") == applied
    assert recipe["train"].get("packing") == (True if settings.get("stage") == "pt" else None)
    assert ("template" in notes) == (settings.get("template") == "default")


def test_options_of_the_rows_of_llama_factory(tmp_path):
    settings = {"dataset": "rows", "eval_dataset": "rows", "max_samples": 9}
    recipe, _, _ = convert_llama_factory(tmp_path, **settings)
    assert [recipe["data"][name]["limit"] for name in ("train", "eval")] == [9, 9]
    entry = {"file_name": "x.json", "num_samples": 5}
    assert convert_llama_factory(tmp_path, entry, max_samples=9)[0]["data"]["train"]["limit"] == 5
    entry = {"file_name": "x.json", "columns": {"images": "pictures", "videos": "clips"}}
    recipe, notes, _ = convert_llama_factory(tmp_path, entry)
    assert recipe["model"]["images"] is True
    assert recipe["data"]["train"]["columns"] == {"images": "pictures"}
    assert [*notes] == ["dataset rows.columns.videos"]
    columns = {"prompt": "q", "response": "a", "history": "earlier", "tones": "t"}
    recipe, notes, _ = convert_llama_factory(tmp_path, {"file_name": "x.json", "columns": columns})
    assert recipe["data"]["train"]["columns"] == {"instruction": "q", "output": "a"}
    assert {*notes} == {"dataset rows.columns.history", "dataset rows.columns.tones"}
    recipe, notes, ignored = convert_llama_factory(
        tmp_path, freeze_vision_tower=False, shift_attn=False, use_unsloth=True
    )
    assert recipe["train"]["train_vision"] is True
    assert ignored["shift_attn"] == "it is off"
    assert [*notes] == ["use_unsloth"]
    recipe, notes, _ = convert_llama_factory(tmp_path, adapter_name_or_path="a, b")
    assert recipe["model"]["adapter"] == "b"  # after the others are merged
    assert [*notes] == ["adapter_name_or_path"]
    recipe, notes, _ = convert_llama_factory(tmp_path, adapter_name_or_path="a", create_new_adapter=True, lora_rank=4)
    assert recipe["model"]["lora"]["r"] == 4
    assert "adapter" not in recipe["model"]
    assert [*notes] == ["adapter_name_or_path"]
    recipe, notes, _ = convert_llama_factory(tmp_path, stage="pt", streaming=True)
    assert "packing" not in recipe["train"]
    assert "packing" in notes
    recipe, _, ignored = convert_llama_factory(tmp_path, eval_dataset="rows", evaluation_strategy="steps", eval_steps=5)
    assert recipe["train"]["eval_steps"] == 5
    recipe, _, ignored = convert_llama_factory(tmp_path, eval_dataset="rows", eval_steps=5, enable_thinking=False)
    assert "eval_steps" in ignored
    assert recipe["train"]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("entry", [{"file_name": 5}, {"columns": ["a"]}, {"tags": 1}, 3])
def test_wrong_entries_of_dataset_info(entry, tmp_path):
    with pytest.raises(InputError, match=r"dataset_info\.json: .*must be a|dataset_info\.json must be a"):
        convert_llama_factory(tmp_path, entry)


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
    recipe, notes, _ = convert_settings(tmp_path, "opd", **settings)
    assert recipe["train"] == train
    assert [*notes] == ["lmbda, temperature, max_new_tokens"]  # defaults of TRL that differ
    name = train.pop("loss_type")
    recipe, notes, _ = convert_settings(tmp_path, "kd", **settings)
    assert recipe["train"] == train | {"divergence": name, "kd_coef": 1.0}
    assert [*notes] == ["disable_dropout"]


def test_temperature_and_defaults_of_gkd(tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d", "teacher_model_name_or_path": "t", "temperature": 0.9}
    gkd = settings | {"lmbda": 0.0, "max_new_tokens": 64}
    recipe, notes, ignored = convert_settings(tmp_path, "kd", **gkd)
    assert recipe["train"] == {"kd_coef": 1.0, "divergence": "jsd", "beta": 0.5, "disable_dropout": True}
    assert [*notes] == []
    assert {*ignored} == {"temperature", "max_new_tokens"}
    assert [*convert_settings(tmp_path, "kd", **gkd | {"lmbda": 0.5})[1]] == ["lmbda"]
    recipe, notes, _ = convert_settings(tmp_path, "opd", **gkd)
    assert recipe["train"]["temperature"] == 0.9
    assert [*notes] == ["temperature"]
    _, notes, _ = convert_settings(tmp_path, "opd", **settings, max_completion_length=64)
    assert [*notes] == ["lmbda, beta"]  # not set, and the trainer is not known


def test_defaults_of_trl_do_not_replace_other_names(tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d"}
    assert convert_settings(tmp_path, "sft", **settings, torch_dtype="bfloat16")[0]["model"]["dtype"] == "bfloat16"
    recipe, notes, _ = convert_settings(tmp_path, "sft", **settings, dtype="float32", torch_dtype="bfloat16")
    assert recipe["model"]["dtype"] == "float32"
    assert notes == {"torch_dtype": "model.dtype is 'float32', by another key of the file"}


def test_names_of_trl_that_are_renamed(tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d", "max_seq_length": 2048, "chat_template_path": "t.jinja"}
    recipe, notes, ignored = convert_settings(tmp_path, "dpo", **settings, rpo_alpha=0.5, padding_free=True)
    assert recipe["model"] == {"name_or_path": "m", "chat_template": "t.jinja", "dtype": "float32"}
    assert recipe["train"] == {"max_length": 2048, "nll_coef": 0.5}
    assert not notes
    assert [*ignored] == ["padding_free"]


@pytest.mark.parametrize(
    ("settings", "sampler"),
    [
        (
            {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4},
            {"kind": "vllm_colocate", "gpu_memory_utilization": 0.4},
        ),
        ({"use_vllm": True, "vllm_mode": "server"}, {"kind": "vllm_server"}),
        ({"use_vllm": False, "vllm_mode": "server"}, None),
    ],
)  # fmt: skip
def test_vllm_of_trl(settings, sampler, tmp_path):
    settings |= {"model_name_or_path": "m", "dataset_name": "d", "teacher_model_name_or_path": "t"}
    recipe, notes, _ = convert_settings(tmp_path, "opd", **settings)
    assert recipe["train"].get("sampler") == sampler
    assert not [key for key in notes if "vllm" in key]


WRONG = [3, "text", ["text"], [3], {"a": 1}, [{"a": 1}], True, float("inf"), float("nan")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_values_of_a_wrong_type_are_converted_or_rejected(file, tmp_path):
    """Each value of an example, and of its data sets, is replaced by values of other types."""
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys = [*settings, "warmup_ratio", "saves_per_epoch", "pretraining_dataset", "max_samples", "lora_rank"]
    changed = [settings | {key: value} for key in keys for value in WRONG]
    for key, entries in settings.items():
        if isinstance(entries, list) and isinstance(entries[0], dict):
            names = [*entries[0], "data_files", "roles_to_train", "type"]
            changed += [settings | {key: [entries[0] | {name: value}]} for name in names for value in WRONG]
    errors = []
    for each in changed:
        try:
            convert_settings(tmp_path, METHOD.get(file.stem), **each)
        except InputError as error:
            errors.append(str(error))
    assert 0 < len(errors) < len(changed)
    with pytest.raises(InputError, match=r"max_samples must be a number, not True$"):
        convert_llama_factory(tmp_path, max_samples=True)
    assert all(error.startswith("--from: ") for error in errors)


def test_rows_to_evaluate_on_of_trl(tmp_path):
    settings = {"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "epoch"}
    recipe, _, _ = convert_settings(tmp_path, "sft", **settings)
    assert recipe["data"]["eval"] == {"path": "d", "split": "test"}
    recipe, notes, _ = convert_settings(tmp_path, "sft", **settings | {"eval_strategy": False})  # YAML's `no`
    assert "eval" not in recipe["data"]
    assert not notes
    old = {"evaluation_strategy": "steps", "eval_steps": 5, "dataset_test_split": "validation"}
    recipe, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", dataset_name="d", **old)
    assert recipe["data"]["eval"] == {"path": "d", "split": "validation"}
    assert recipe["train"] == {"eval_strategy": "steps", "eval_steps": 5}
    assert not notes
    settings = {"model_name_or_path": "m", "datasets": [{"path": "a"}, {"path": "b"}], "dataset_num_proc": 2}
    single = {"dataset_name": "unused", "dataset_config": "en", "dataset_test_split": "test", "dataset_streaming": True}
    recipe, notes, ignored = convert_settings(tmp_path, "sft", **settings, **single, eval_strategy="steps")
    assert recipe["data"] == {"train": [{"path": "a"}, {"path": "b"}]}
    assert recipe["train"] == {"dataset_num_proc": 2}
    assert {*ignored} == {*single}
    assert [*notes] == ["eval_strategy"]


def test_files_of_a_split_of_trl(tmp_path):
    files = {"train": "x.jsonl", "extra": ["y.jsonl", "z.jsonl"]}
    entries = [{"path": "json", "data_files": files}, {"path": "json", "data_files": files, "split": "extra"}]
    recipe, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", datasets=entries)
    assert recipe["data"]["train"] == [{"path": "x.jsonl"}, {"path": "y.jsonl"}]
    assert [*notes] == ["datasets[1].data_files"]
    half = {"path": "json", "data_files": {"extra": "x.jsonl"}, "split": "extra[:50%]"}
    recipe, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", datasets=[half])
    assert recipe["data"]["train"] == {"path": "x.jsonl", "split": "train[:50%]"}
    assert not notes
    both = {"path": "json", "data_files": files, "split": "train+extra"}
    recipe, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", datasets=[both], test_split_size=0.1)
    assert recipe["data"] == {"train": {"path": "x.jsonl"}}
    assert [*notes] == ["datasets.data_files", "test_split_size"]
    text = {"path": "text", "data_files": "x.txt"}
    _, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", datasets=[text])
    assert "is not read" in notes["datasets.data_files"]


SPLITS = {
    "share": (0.1, {}, "train[:90%]", "train[90%:]"),
    "number": (7, {}, "train[:-7]", "train[-7:]"),
    "many rows": (2_000_000, {}, "train[:-2000000]", "train[-2000000:]"),
    "other split": (0.25, {"split": "extra"}, "extra[:75%]", "extra[75%:]"),
    "sum of splits": (0.25, {"split": "train+test"}, "train[:75%]+test[:75%]", "train[75%:]+test[75%:]"),
    "rows of a sum": (7, {"split": "train+test"}, "train+test", None),
    "all splits": (0.25, {"split": "all"}, "all", None),
    "slice": (0.1, {"split": "train[:50%]"}, "train[:50%]", None),
    "small share": (0.005, {}, None, None),
    "all rows": (1.0, {}, "train[:-1]", "train[-1:]"),
}


@pytest.mark.parametrize(("size", "entry", "train", "held_out"), SPLITS.values(), ids=SPLITS)
def test_rows_that_are_held_out(size, entry, train, held_out, tmp_path):
    """Each tool has a key for them, with a share or a number."""
    source = {"path": "rows.jsonl", **entry}
    tools = {
        "val_set_size": convert_axolotl(tmp_path, datasets=[source], val_set_size=size),
        "val_size": convert_llama_factory(tmp_path, {"file_name": "rows.jsonl", **entry}, val_size=size),
        "test_split_size": convert_settings(
            tmp_path, "sft", model_name_or_path="m", datasets=[source], test_split_size=size
        ),
    }
    for key, (recipe, notes, _) in tools.items():
        assert recipe["data"]["train"].get("split") == train, key
        assert recipe["data"].get("eval", {}).get("split") == held_out, key
        assert ("held out" in notes[key]) == bool(held_out), key


def test_rows_of_streams_limits_and_several_sources_are_not_held_out(tmp_path):
    sources = [{"path": "a"}, {"path": "b"}]
    for recipe, notes, _ in (
        convert_axolotl(tmp_path, datasets=sources, val_set_size=5),
        convert_axolotl(tmp_path, streaming=True, max_steps=1, val_set_size=0.1),
        convert_axolotl(tmp_path, test_datasets=[{"path": "t"}], val_set_size=0.1),
        convert_axolotl(tmp_path, datasets=[{"path": "json", "data_files": ["a.json", "b.json"]}], val_set_size=0.1),
    ):
        assert "set data.eval" in notes["val_set_size"]
        assert recipe["data"].get("eval", {}).get("path") in (None, "t")
    _, notes, _ = convert_llama_factory(tmp_path, max_samples=9, val_size=0.1)
    assert "set data.eval" in notes["val_size"]
    settings = {"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "steps", "eval_steps": 1}
    recipe, notes, ignored = convert_settings(tmp_path, "sft", **settings, test_split_size=0.1)
    assert recipe["data"]["eval"] == {"path": "d", "split": "test"}
    assert ignored["test_split_size"] == "only datasets are split"
    assert not notes
    recipe, notes, _ = convert_axolotl(tmp_path, datasets=sources, val_set_size=0.5)
    assert [source["split"] for source in recipe["data"]["eval"]] == ["train[50%:]"] * 2


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"data_files": {"validation": "x.jsonl"}}, "must have files of the split train, not {'validation'"),
        ({"data_files": {"train": "x.jsonl"}, "split": "test[:9]"}, "must have files of the split test, not"),
        ({}, "must name the files of the format json"),
    ],
)
def test_files_that_a_source_lacks_are_an_error(entry, problem, tmp_path):
    with pytest.raises(InputError, match=rf"datasets\.data_files {re.escape(problem)}"):
        convert_axolotl(tmp_path, datasets=[{"path": "json", **entry}])


def test_trackers_of_axolotl_that_are_not_used(tmp_path):
    recipe, notes, ignored = convert_axolotl(tmp_path, wandb_name="n", use_mlflow=True, mlflow_run_name="r")
    assert recipe["train"]["report_to"] == "mlflow"
    assert recipe["train"]["run_name"] == "r"
    assert ignored["wandb_name"] == "wandb is not used"
    recipe, notes, ignored = convert_axolotl(tmp_path, wandb_project="p", wandb_mode="disabled", wandb_name="n")
    assert not recipe["train"].keys() & {"report_to", "run_name"}
    assert ignored.keys() >= {"wandb_project", "wandb_mode", "wandb_name"}
    recipe, notes, _ = convert_axolotl(
        tmp_path, wandb_project="p", wandb_name="n", use_mlflow=True, mlflow_run_name="r", wandb_mode="offline"
    )
    assert recipe["train"]["report_to"] == ["wandb", "mlflow"]
    assert "sends the run to its server" in notes["wandb_mode"]
    assert recipe["train"]["run_name"] == "n"  # the first one in the file
    assert "mlflow_run_name" in notes


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"saves_per_epoch": -1}, "saves_per_epoch must be 0 or more, not -1"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must be from 0 to 1, not 1.5"),
        ({"trl": [1]}, r"trl must be a mapping, not [1]"),
    ],
)
def test_numbers_of_axolotl_out_of_range_are_errors(settings, problem, tmp_path):
    with pytest.raises(InputError, match=re.escape(problem)):
        convert_axolotl(tmp_path, **settings)


def test_numbers_of_axolotl_that_mean_nothing_or_all(tmp_path):
    recipe, notes, ignored = convert_axolotl(tmp_path, saves_per_epoch=0, warmup_ratio=1.0)
    assert ignored["saves_per_epoch"] == "it is off"
    assert recipe["train"]["save_strategy"] == "epoch"
    assert recipe["train"]["warmup_steps"] == 0.9999  # which transformers rounds up
    assert not notes
    recipe, notes, _ = convert_axolotl(tmp_path, rl="dpo", trl={"beta": None})
    assert "beta" not in recipe["train"]
    assert not [key for key in notes if "beta" in key]


@pytest.mark.parametrize("settings", [{"max_samples": 0.5}, {"finetuning_type": "lora", "lora_rank": 0}])
def test_counts_of_llama_factory_are_whole_and_positive(settings, tmp_path):
    with pytest.raises(InputError, match="must be a whole number of at least 1, not"):
        convert_llama_factory(tmp_path, **settings)


def test_streams_are_not_packed_and_are_evaluated_as_streams(tmp_path):
    recipe, notes, _ = convert_axolotl(tmp_path, streaming=True, sample_packing=True, max_steps=3)
    assert recipe["data"]["train"] == {"path": "rows.jsonl", "streaming": True}
    assert "packing" not in recipe["train"]
    assert [*notes] == ["sample_packing"]
    settings = {"model_name_or_path": "m", "dataset_name": "d", "dataset_streaming": True, "max_steps": 3}
    recipe, notes, _ = convert_settings(tmp_path, "sft", **settings, eval_strategy="steps", eval_steps=1)
    assert recipe["data"]["eval"] == {"path": "d", "split": "test", "streaming": True}
    assert not notes


def test_a_mode_of_vllm_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(InputError, match="vllm_mode must be colocate or server, not 3"):
        convert_settings(tmp_path, "opd", model_name_or_path="m", dataset_name="d", use_vllm=True, vllm_mode=3)


def test_values_without_effect_are_those_of_the_method(tmp_path):
    _, notes, ignored = convert_settings(tmp_path, "kd", model_name_or_path="m", dataset_name="d", loss_type="nll")
    assert "divergence" in notes["loss_type"]
    assert "loss_type" not in ignored


def test_a_misspelled_key_is_noted_with_the_similar_one(tmp_path):
    _, notes, _ = convert_settings(tmp_path, "sft", model_name_or_path="m", dataset_name="d", logn_steps=1, odd=2)
    assert notes == {"logn_steps": "no counterpart; did you mean 'logging_steps'?", "odd": "no counterpart"}


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
