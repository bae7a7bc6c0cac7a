"""Rules of the Configs: the same from Python and from a recipe, whose fields are those of fields.json."""

import dataclasses
import importlib.util
import json
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posttrain import methods
from hf_posttrain.errors import InputError
from hf_posttrain.losses.divergence import DIVERGENCES
from hf_posttrain.losses.preference import PAIRED
from hf_posttrain.losses.unpaired import UNPAIRED
from hf_posttrain.methods import METHODS
from hf_posttrain.methods import rules as names
from hf_posttrain.recipe import fields
from hf_posttrain.recipe import rules as of_recipe
from hf_posttrain.recipe.fields import lora_fields, methods_with_option, train_fields
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.trainer import rules


def config_class(method):
    return methods.config_class(METHODS[method])


def stand_in(method, **values):
    """What a recipe is checked on: the fields of the method's Config, as fields.json has them."""
    return SimpleNamespace(**{name: field.default for name, field in train_fields(method).items()} | values)


def config(method, **values):
    return config_class(method)(**{"output_dir": "out", "use_cpu": True, "report_to": "none"} | values)


def from_transformers(kernel):
    return getattr(kernel, "__module__", "").startswith("transformers.")


def test_names_without_torch_are_those_of_the_functions():
    assert tuple(PAIRED) == names.PAIRED_LOSSES
    assert tuple(UNPAIRED) == names.UNPAIRED_LOSSES
    assert tuple(DIVERGENCES) == names.DIVERGENCES
    assert set(INTEGRATION_TO_CALLBACK) <= set(rules.REPORTER_PACKAGES)
    ours = {name for name, kernel in ALL_ATTENTION_FUNCTIONS.items() if not from_transformers(kernel)}
    kernels = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name} - ours
    assert kernels <= set(of_recipe.ATTENTION)


STORED = json.loads(fields.FILE.read_text(encoding="utf-8"))
PINNED = pytest.mark.skipif(
    any(version(name) != known for name, known in STORED["versions"].items()),
    reason="fields.json is that of the versions in constraints.txt",
)
IN_FILE = [name.removeprefix("train.") for name in STORED if name.startswith("train.")]
"""The methods that fields.json has; one that it lacks is imported, which a recipe's mistakes have to wait for."""


def written_fields(methods):
    """What `make fields` would write of these methods."""
    spec = importlib.util.spec_from_file_location("docs_fields", Path(__file__).parents[2] / "docs/fields.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.text(methods)


@PINNED
def test_the_data_file_is_what_the_installed_packages_give():
    assert fields.FILE.read_text(encoding="utf-8") == written_fields(IN_FILE), "run `make fields`"


@PINNED
def test_a_method_of_the_data_file_whose_config_has_changed_is_told(monkeypatch):
    monkeypatch.setattr(config_class("dpo").__dataclass_fields__["beta"], "default", 0.7)
    stored, written = STORED, json.loads(written_fields(IN_FILE))
    assert [name for name in stored if stored[name] != written[name]] == ["train.dpo"]


@PINNED
@pytest.mark.parametrize("method", IN_FILE)
def test_the_data_file_has_the_fields_and_defaults_of_the_config(method):
    known, differing = train_fields(method), []
    config = config_class(method)
    python_only = config.python_only
    config_fields = [field for field in dataclasses.fields(config) if field.init and field.name not in python_only]
    assert known.keys() == {field.name for field in config_fields}
    for field in config_fields:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default.value if isinstance(default, Enum) else default
        if known[field.name].default != default:
            differing.append(field.name)
    assert differing == []


@PINNED
def test_the_data_file_has_the_fields_of_peft_and_the_friendly_names():
    known = {field.name for field in dataclasses.fields(peft.LoraConfig) if field.init}
    assert lora_fields().keys() == known | {"alpha", "dropout"}


@pytest.fixture
def recipe(tmp_path):
    """recipe(train, lora) reads a recipe with these sections and checks them."""

    def read(train="{}", lora="{}"):
        path = tmp_path / "sft.yaml"
        path.write_text(f"method: sft\nmodel: {{name_or_path: m, lora: {lora}}}\ndata: {{train: {{path: d}}}}\n"
                        f"train: {train}\n")  # fmt: skip
        return load_recipe(path)

    return read


@pytest.mark.parametrize("older", [False, True])
def test_a_field_that_only_a_newer_package_has_is_accepted(recipe, monkeypatch, older):
    """By fields.json of an older version, without three of the fields; by that of this version they are unknown."""
    stored = json.loads(json.dumps(STORED))
    stored["versions"] = dict.fromkeys(STORED["versions"], "0.1" if older else "999")
    del stored["train"]["optim_target_modules"], stored["model.lora"]["use_dora"]
    stored["train"]["save_strategy"][0] = [["no"]]
    monkeypatch.setattr(fields, "_stored_fields", lambda: stored)
    given = ("{optim_target_modules: a}", "{}"), ("{save_strategy: steps}", "{}"), ("{}", "{use_dora: true}")
    for train, lora in given:
        if older:
            recipe(train, lora)
        else:
            with pytest.raises(InputError, match=r"sft\.yaml:\d: (unknown key|train\.save_strategy must be no)"):
                recipe(train, lora)
    with pytest.raises(InputError, match=r"sft\.yaml:4: unknown key train\.max_stps; did you mean 'max_steps'\?"):
        recipe("{max_stps: 1}")
    with pytest.raises(InputError, match=r"sft\.yaml:4: train\.layout='flat' is not one of"):
        recipe("{optim_target_modules: a, layout: flat}" if older else "{layout: flat}")


def test_a_method_that_the_data_file_lacks_is_imported(monkeypatch):
    without = {name: table for name, table in STORED.items() if name != "train.dpo"}
    known = train_fields("dpo")
    monkeypatch.setattr(fields, "_stored_fields", lambda: without)
    assert train_fields("dpo").keys() >= known.keys() - train_fields("sft").keys()


@pytest.mark.parametrize("method", METHODS)
def test_defaults_break_no_rule(method):
    for values in (stand_in(method), config(method)):
        assert [*rules.problems(values, METHODS[method])] == []


@pytest.mark.parametrize("method", METHODS)
def test_limits_are_of_fields_that_exist(method):
    known = {field.name for field in dataclasses.fields(config_class(method))}
    assert set(rules.LIMITS) | set(METHODS[method].limits) <= known


@pytest.mark.parametrize(
    ("method", "values", "names"),
    [
        ("sft", {"packing": True, "max_length": None}, ("packing", "max_length")),
        ("sft", {"per_device_train_batch_size": 0}, ("per_device_train_batch_size",)),
        ("sft", {"learning_rate": float("nan")}, ("learning_rate",)),
        ("sft", {"layout": "flat"}, ("layout",)),
        ("sft", {"report_to": ["wandb", "wnadb"]}, ("report_to",)),
        ("sft", {"batch_eval_metrics": True}, ("batch_eval_metrics",)),
        ("sft", {"eval_strategy": "steps", "eval_steps": 2.5}, ("eval_steps", "eval_strategy")),
        ("sft", {"load_best_model_at_end": True}, ("load_best_model_at_end", "eval_strategy")),
        ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300, "save_steps": 500},
         ("save_steps", "eval_steps", "load_best_model_at_end")),
        ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 500},
         ("save_steps", "eval_steps", "load_best_model_at_end")),
        ("sft", {"fp16": True, "bf16": True}, ("fp16", "bf16")),
        ("sft", {"lr_scheduler_type": "reduce_lr_on_plateau"}, ("lr_scheduler_type", "eval_strategy")),
        ("sft", {"optim_args": "fast"}, ("optim_args",)),
        ("dpo", {"loss_type": []}, ("loss_type",)),
        ("dpo", {"loss_type": "exo_pair"}, ("loss_type", "label_smoothing")),
        ("dpo", {"loss_type": "robust", "label_smoothing": 0.6}, ("label_smoothing", "loss_type")),
        ("dpo", {"loss_type": "hinge", "label_smoothing": 0.1}, ("label_smoothing", "loss_type")),
        ("dpo", {"loss_type": ["simpo", "sft"]}, ("loss_type",)),
        ("dpo", {"simpo_gamma": 1.0}, ("simpo_gamma", "loss_type")),
        ("dpo", {"beta": 1e308}, ("beta",)),  # infinite in float32
        ("dpo", {"loss_weights": [1e308]}, ("loss_weights",)),
        ("kto", {"desirable_weight": 1e308}, ("desirable_weight",)),
        ("kd", {"neftune_noise_alpha": 1e308}, ("neftune_noise_alpha",)),
        ("dpo", {"loss_type": ["simpo", "orpo"], "beta": 2.0, "precompute_ref_log_probs": True},
         ("precompute_ref_log_probs", "loss_type")),
        ("dpo", {"loss_type": "sft", "precompute_ref_batch_size": 4}, ("precompute_ref_batch_size", "loss_type")),
        ("kto", {"desirable_weight": "heavy"}, ("desirable_weight",)),
        ("kd", {"divergence": "jsd", "beta": 2.0}, ("beta",)),
        ("kd", {"divergence": "skew_forward_kl", "beta": 1.0}, ("beta",)),
        ("kd", {"beta": 0.2}, ("beta", "divergence")),
        ("opd", {"loss_type": "policy_gradient", "beta": 0.2}, ("beta", "loss_type")),
        ("opd", {"loss_type": "policy_gradient", "lmbda": 0.5}, ("lmbda", "loss_type")),
        ("opd", {"loss_type": "policy_gradient", "beta": 0.5}, ("beta", "loss_type")),
        ("opd", {"sampler": "vllm_server"}, ("sampler",)),
        ("opd", {"sampler": {"kind": "vllm_colocate", "base_url": "localhost"}}, ("sampler.base_url", "sampler")),
    ],
)  # fmt: skip
def test_a_config_refuses_what_a_recipe_does(method, values, names):
    told = list(rules.problems(stand_in(method, **values), METHODS[method]))
    assert told[0][0] == names
    with pytest.raises(InputError) as refused:
        config(method, **values)
    assert str(refused.value) == told[0][1]


@pytest.mark.parametrize(
    "values",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.05, "save_steps": 0.05},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best"},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 100, "save_steps": 100},
        {"eval_strategy": "steps", "eval_steps": None},
        {"max_steps": 5, "num_train_epochs": 0},
        {"learning_rate": 0.0, "max_grad_norm": 0.0, "warmup_steps": 0.1, "seed": 0},
        {"save_strategy": "no", "save_steps": 0, "logging_strategy": "no", "logging_steps": 0},
        {"report_to": "all"},
    ],
)
def test_what_makes_sense_is_let_through(values):
    assert list(rules.problems(stand_in("sft", **values), METHODS["sft"])) == []


def test_owners_of_a_field():
    assert methods_with_option("sampler") == ["opd"]
    assert {*methods_with_option("beta")} >= {"dpo", "kto", "kd", "opd"}
    assert "sft" not in methods_with_option("beta")
    assert methods_with_option("learning_rate")[:2] == ["sft", "dpo"]  # each with its own default
    assert methods_with_option("max_length") == []  # of all, from PostTrainConfig
