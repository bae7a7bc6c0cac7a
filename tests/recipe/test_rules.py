"""Rules of the Configs: the same from Python and from a recipe, whose stand-in of the Config is read from source."""

import dataclasses
from enum import Enum

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
from hf_posttrain.recipe import contradictions
from hf_posttrain.recipe.keys import lora_fields, owners, train_fields
from hf_posttrain.scoring.cpu import BY_DOCUMENT
from hf_posttrain.trainer import rules


def config_class(method):
    return methods.config_class(METHODS[method])


def config(method, **values):
    return config_class(method)(**{"output_dir": "out", "use_cpu": True, "report_to": "none"} | values)


def test_names_without_torch_are_those_of_the_functions():
    assert tuple(PAIRED) == names.PAIRED
    assert tuple(UNPAIRED) == names.UNPAIRED
    assert tuple(DIVERGENCES) == names.DIVERGENCES
    assert set(INTEGRATION_TO_CALLBACK) <= set(rules.REPORTERS)
    kernels = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name} - {BY_DOCUMENT}
    assert kernels <= set(contradictions.ATTENTION)


@pytest.mark.parametrize("method", METHODS)
def test_the_stand_in_has_the_defaults_of_the_config(method):
    """Where it has None, the default is no literal, of which there is one: the optimizer."""
    stand_in, differing = train_fields(method)(), []
    for field in dataclasses.fields(config_class(method)):
        if not field.init or field.default is field.default_factory:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default.value if isinstance(default, Enum) else default
        if getattr(stand_in, field.name) != default:
            differing.append(field.name)
    assert differing == ["optim"]


def test_the_stand_in_of_lora_has_the_fields_of_peft_and_the_friendly_names():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig) if field.init}
    assert {field.name for field in dataclasses.fields(lora_fields())} == fields | {"alpha", "dropout"}


@pytest.mark.parametrize("method", METHODS)
def test_defaults_break_no_rule(method):
    for values in (train_fields(method)(), config(method)):
        assert [*rules.problems(values, METHODS[method])] == []


@pytest.mark.parametrize("method", METHODS)
def test_limits_are_of_fields_that_exist(method):
    fields = {field.name for field in dataclasses.fields(config_class(method))}
    assert set(rules.LIMITS) | set(METHODS[method].limits) <= fields


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
        ("kto", {"desirable_weight": "heavy"}, ("desirable_weight",)),
        ("kd", {"divergence": "jsd", "beta": 2.0}, ("beta",)),
        ("kd", {"divergence": "skew_forward_kl", "skew_alpha": 1.0}, ("skew_alpha",)),
        ("opd", {"loss_type": "policy_gradient", "lmbda": 0.5}, ("lmbda", "loss_type")),
        ("opd", {"loss_type": "policy_gradient", "beta": 0.5}, ("beta", "loss_type")),
        ("opd", {"discount": 0.5}, ("discount", "loss_type")),
        ("opd", {"vllm_mode": "server"}, ("vllm_mode", "rollout")),
        ("opd", {"rollout": "vllm", "vllm_server_base_url": "localhost"}, ("vllm_server_base_url", "vllm_mode")),
    ],
)  # fmt: skip
def test_a_config_refuses_what_a_recipe_does(method, values, names):
    stand_in = train_fields(method)(**values)
    told = list(rules.problems(stand_in, METHODS[method]))
    assert told[0][0] == names
    with pytest.raises(InputError) as refused:
        config(method, **values)
    assert str(refused.value) == told[0][1]


@pytest.mark.parametrize(
    "values",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.05, "save_steps": 0.15},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best"},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 100, "save_steps": 300},
        {"eval_strategy": "steps", "eval_steps": None},
        {"max_steps": 5, "num_train_epochs": 0},
        {"learning_rate": 0.0, "max_grad_norm": 0.0, "warmup_steps": 0.1, "seed": 0},
        {"save_strategy": "no", "save_steps": 0, "logging_strategy": "no", "logging_steps": 0},
        {"report_to": "all"},
    ],
)
def test_what_makes_sense_is_let_through(values):
    assert list(rules.problems(train_fields("sft")(**values), METHODS["sft"])) == []


def test_owners_of_a_field():
    assert owners("rollout") == ["opd"]
    assert owners("beta") == ["dpo", "kto", "kd", "opd"]
    assert owners("learning_rate") == list(METHODS)
    assert owners("max_length") == []  # of all, from PostTrainConfig
