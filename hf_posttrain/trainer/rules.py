"""Rules for the options of all methods: valid values, and options that exclude or require each other.

This module can be imported without torch. A recipe is checked with `problems` before torch is imported, and every
Config raises its first problem.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..capabilities import Feature, conflict_message, conflicts, option_features
from ..data.template import string_boolean_problem
from ..errors import InputError, name_hint
from ..monitoring import symptoms
from ..options import OptionValues
from .limits import (
    ABOVE_ZERO,
    COEFFICIENT,
    COUNT,
    FRACTION_BELOW_ONE,
    MAX_FACTOR,
    NOT_NEGATIVE,
    Limit,
    Problem,
)
from .method_spec import Method
from .option_group import build_groups
from .renamed_options import RENAMED

SEED = Limit("must be from 0 to 4294967295", at_least=0, below=2**32)
ADAPTER_RATE_FACTOR = 10
"""Learning rate of an adapter divided by that of training of all weights, as a rule of thumb."""
LIMITS = {
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "eval_accumulation_steps": COUNT,
    "dataset_num_proc": COUNT,
    "torch_empty_cache_steps": COUNT,
    "dataloader_num_workers": NOT_NEGATIVE,
    "learning_rate": COEFFICIENT,
    "weight_decay": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "neftune_noise_alpha": COEFFICIENT,
    "router_aux_loss_coef": COEFFICIENT,
    "adam_epsilon": ABOVE_ZERO,
    "adam_beta1": FRACTION_BELOW_ONE,
    "adam_beta2": FRACTION_BELOW_ONE,
    "seed": SEED,
    "data_seed": SEED,
    "max_steps": Limit("must be at least 1, or -1 to train for num_train_epochs", at_least=1, also=-1),
    "max_length": Limit("must be at least 2, for a token of the prompt and one of the completion", at_least=2),
}
"""Limits of the numeric options of all methods. A value of None is always valid."""
_LOG_LEVELS = ("debug", "detail", "info", "warning", "error", "critical", "passive")
REPORTER_PACKAGES: dict[str, tuple[str, ...]] = {
    "azure_ml": ("azureml",),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""Integrations of `report_to` in transformers, with the packages of which each requires one."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
CHECKPOINTING_OPTIONS = {
    "context_fn",
    "debug",
    "determinism_check",
    "early_stop",
    "every_n_layers",
    "offload",
    "preserve_rng_state",
    "use_reentrant",
}
LIGER_HEAD_KERNELS = ("fused_linear_cross_entropy", "cross_entropy")  # replacements of the head by Liger
REFERENCE_SYNC_DEFAULTS = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}
"""Defaults of the options that `sync_ref_model` reads."""
MUON = "muon"
"""Value of `optim` that transformers does not have."""
NO_OPTIMIZER_STATE = (
    "resume_from_checkpoint cannot be combined with save_only_model, which saves no optimizer state. Remove one of the"
    " two"
)
_FULL_EVAL = "it casts the weights that are trained afterwards. Use bf16: true, which evaluates in bf16"
_UNSUPPORTED: dict[str, tuple[object, str]] = {
    "label_smoothing_factor": (
        0.0,
        "it smooths full logits, which are not computed. Use label_smoothing of a preference method",
    ),
    "auto_find_batch_size": (
        False,
        "after an out-of-memory error, Trainer restarts at step 0 with trained weights. Use --check to estimate memory",
    ),
    "remove_unused_columns": (
        False,
        "the collators read columns that are no arguments of the model's forward. Remove it",
    ),
    "bf16_full_eval": (False, _FULL_EVAL),
    "fp16_full_eval": (False, _FULL_EVAL),
    "restore_callback_states_from_checkpoint": (False, "a resumed run always restores them. Remove it"),
    "batch_eval_metrics": (False, "metrics are exact sums over the whole data set. Remove it"),
}
"""Options of TrainingArguments with their only valid value, and the reason and fix for the error about other values."""


LAYOUTS = ("auto", "shared", "packed", "padded")
"""Values of the option `layout`."""
REASONING = ("keep", "drop")
"""Values of the option `reasoning`."""
TRAINED_TURNS = ("all", "assistant", "last")
"""Values of the option `train_on`."""


def value_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the options with values that no method supports."""
    choices = [("layout", LAYOUTS), ("log_level", _LOG_LEVELS), ("log_level_replica", _LOG_LEVELS)]
    if values.reasoning is not None:
        yield from choice_problems("reasoning", values.reasoning, REASONING)
    if (turns := getattr(values, "train_on", None)) is not None:
        yield from choice_problems("train_on", turns, TRAINED_TURNS)
        if turns == "all" and values.assistant_only_loss:
            problem = "train_on: all cannot be combined with assistant_only_loss. Remove one of the two"
            yield ("train_on", "assistant_only_loss"), problem
    if values.train_sampling_strategy == "batch_rebalance":
        reason = "it repeats rows, and the repetitions cannot be excluded from the loss. Use random or group_by_length"
        problem = f"train_sampling_strategy: batch_rebalance is not supported: {reason}"
        yield ("train_sampling_strategy",), problem
    else:
        choices.append(("train_sampling_strategy", ("random", "sequential", "group_by_length")))
    if getattr(values, "dataloader_multiprocessing_context", None) is not None:
        choices.append(("dataloader_multiprocessing_context", ("fork", "spawn", "forkserver")))
    for name, allowed in choices:
        yield from choice_problems(name, getattr(values, name), allowed)
    if values.include_num_input_tokens_seen == "non_padding":
        reason = "padding cannot be recognized by its token id. Use all, with a layout that has little padding"
        problem = f"include_num_input_tokens_seen: non_padding is not supported: {reason}"
        yield ("include_num_input_tokens_seen",), problem
    for reporter in symptoms.as_list(values.report_to):
        yield from choice_problems("report_to", reporter, ("all", "none", *REPORTER_PACKAGES))
    if getattr(values.lr_scheduler_type, "value", values.lr_scheduler_type) == "constant" and values.warmup_steps:
        problem = "warmup_steps cannot be combined with lr_scheduler_type: constant. Use constant_with_warmup"
        yield ("warmup_steps", "lr_scheduler_type"), problem
    if option_problem := string_boolean_problem(values.chat_template_kwargs or {}):
        yield ("chat_template_kwargs",), f"chat_template_kwargs: {option_problem}"
    for name, (off, reason) in _UNSUPPORTED.items():
        if (value := getattr(values, name, None)) not in (off, None):
            yield (name,), f"{name}={value!r} is not supported: {reason}"


def checkpointing_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the problems of the options of activation checkpointing, under both names that transformers has."""
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        options = getattr(values, name)
        if not isinstance(options, dict):
            continue
        for option in options.keys() - CHECKPOINTING_OPTIONS:
            hint = name_hint(str(option), CHECKPOINTING_OPTIONS)
            yield (name,), f"{name}.{option} is not an option{hint}"
        every = options.get("every_n_layers", 1)
        if type(every) is not int or every < 1:
            yield (name,), f"{name}.every_n_layers must be a whole number from 1 on, not {every!r}"


def learning_rate_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the problems of the factors of learning rates."""
    factors = {} if values.learning_rate_factors is None else values.learning_rate_factors
    if not isinstance(factors, dict):
        problem = "must map expressions for names of weights to factors, such as {lora_B: 16}"
        yield ("learning_rate_factors",), f"learning_rate_factors={factors!r} {problem}"
        return
    for pattern, factor in factors.items():
        name = f"learning_rate_factors[{pattern!r}]"
        if not isinstance(pattern, str):
            yield ("learning_rate_factors",), f"{name}: the key must be a string, such as lora_B"
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield ("learning_rate_factors",), f"{name} is not a regular expression: {error}"
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor <= MAX_FACTOR:
            yield ("learning_rate_factors",), f"{name}={factor!r} must be a number from 0 to 1e6"


def liger_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the problems of Liger's kernels. Its kernels for the head would replace the fused head of this package."""
    if not values.use_liger_kernel:
        return
    if find_spec("liger_kernel") is None:
        problem = "use_liger_kernel requires liger-kernel, which is not installed. Run pip install liger-kernel"
        yield ("use_liger_kernel",), problem
    if values.torch_compile or values.torch_compile_backend or values.torch_compile_mode:
        reason = "torch 2.11 cannot compile Liger's kernels"
        fix = "Remove one of the two (torch_compile is faster)"
        problem = f"use_liger_kernel cannot be combined with torch_compile: {reason}. {fix}"
        yield ("use_liger_kernel", "torch_compile"), problem
    kernels = values.liger_kernel_config  # Trainer parses a string from a command line
    if not isinstance(kernels, dict | str | None):
        problem = f"liger_kernel_config must be a mapping of kernels to true or false, not {kernels!r}"
        yield ("liger_kernel_config",), problem
    for name in LIGER_HEAD_KERNELS:
        if isinstance(kernels, dict) and kernels.get(name):
            problem = f"liger_kernel_config: {name} would replace the head, which is already fused. Remove it"
            yield ("liger_kernel_config",), problem


def step_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the problems of the number of steps, and of intervals in steps or, below 1, in fractions of all steps."""
    if values.max_steps <= 0 and not 0 < values.num_train_epochs < float("inf"):
        problem = f"num_train_epochs={values.num_train_epochs:g} must be above 0. Set it, or max_steps"
        yield ("num_train_epochs", "max_steps"), problem
    # Trainer evaluates at each log if eval_steps is not set
    eval_interval = values.eval_steps or values.logging_steps
    intervals = (("logging", values.logging_steps), ("save", values.save_steps), ("eval", eval_interval))
    for event, interval in intervals:
        names = f"{event}_steps", f"{event}_strategy"
        if getattr(values, names[1]) != "steps":
            continue
        if not 0 < interval < float("inf"):
            problem = f"{names[0]}={interval:g} must be above 0 with {names[1]}: steps"
            yield names, f"{problem}. Use {names[1]}: no to disable it"
        elif interval > 1 and interval != int(interval):
            yield names, f"{names[0]}={interval:g} must be a whole number, or below 1 a fraction of all steps"


def best_model_problems(values: OptionValues) -> Iterator[Problem]:
    """Yield the problems of `load_best_model_at_end`, which requires a checkpoint of each evaluated step."""
    # in a Config a strategy is an enum that equals its value
    save_strategy, eval_strategy = (str(getattr(s, "value", s)) for s in (values.save_strategy, values.eval_strategy))
    option = "load_best_model_at_end"
    if not values.load_best_model_at_end:
        if save_strategy == "best" and not values.metric_for_best_model:  # load_best_model_at_end sets it to eval_loss
            problem = "save_strategy: best requires metric_for_best_model, such as eval_loss"
            yield ("save_strategy", "metric_for_best_model"), problem
    elif eval_strategy == "no":
        yield (option, "eval_strategy"), f"{option} requires evaluations. Set eval_strategy to steps or epoch"
    elif save_strategy not in (eval_strategy, "best"):
        problem = f"{option} requires a checkpoint at each evaluation"
        fix = f"Set save_strategy, which is {save_strategy}, to {eval_strategy} (as eval_strategy) or best"
        yield (option, "save_strategy", "eval_strategy"), f"{problem}. {fix}"
    # the best step must have been saved
    elif save_strategy == "steps":
        save_steps = values.save_steps
        eval_steps = values.eval_steps or values.logging_steps
        intervals = f"save_steps={save_steps:g} and eval_steps={eval_steps:g}"
        names = ("save_steps", "eval_steps", option)
        if (save_steps < 1) != (eval_steps < 1):
            yield names, f"{option}: {intervals} must both be numbers of steps, or both fractions below 1"
        elif eval_steps and save_steps != eval_steps:  # Trainer accepts a multiple, and misses the best step between
            problem = f"{option} requires a checkpoint at each evaluation, not {intervals}"
            yield names, f"{problem}. Set both to the same number, or set save_strategy: best"


def incompatible_options(values: OptionValues) -> Iterator[Problem]:
    """Yield the options that exclude or require each other. torch raises some of these errors after loading a model."""
    if values.fp16 and values.bf16:
        yield ("fp16", "bf16"), "fp16 cannot be combined with bf16. Set one of the two to false"
    for name in ("fp16", "use_liger_kernel"):
        if values.use_cpu and getattr(values, name) and os.environ.get("TRITON_INTERPRET") != "1":
            yield (name, "use_cpu"), f"{name} requires a GPU and cannot be combined with use_cpu. Remove one of the two"
    if values.torch_compile_mode is not None:
        yield from choice_problems("torch_compile_mode", values.torch_compile_mode, COMPILE_MODES)
    if values.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") and values.eval_strategy == "no":
        kind = getattr(values.lr_scheduler_type, "value", values.lr_scheduler_type)
        problem = f"lr_scheduler_type: {kind} requires evaluations. Set eval_strategy to steps or epoch"
        yield ("lr_scheduler_type", "eval_strategy"), problem
    if values.max_grad_norm is None:
        yield ("max_grad_norm",), "max_grad_norm must be a number, not null. Use 0 to disable gradient clipping"
    if values.save_only_model and values.resume_from_checkpoint in (True, "true", "auto"):
        yield ("save_only_model", "resume_from_checkpoint"), NO_OPTIMIZER_STATE
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(values, name) and values.dataloader_num_workers == 0:
            yield (name, "dataloader_num_workers"), f"{name} requires dataloader_num_workers above 0"
    if values.optim_args and not all("=" in pair for pair in values.optim_args.split(",")):
        yield ("optim_args",), f"optim_args={values.optim_args!r} must be name=value, or several joined with commas"
    if (values.metric_for_best_model or "").endswith("exact_match") and not values.eval_exact_match:
        problem = f"metric_for_best_model: {values.metric_for_best_model} requires eval_exact_match: true"
        yield ("metric_for_best_model", "eval_exact_match"), problem
    if values.eval_exact_match and values.eval_max_completion_length < 1:
        yield ("eval_max_completion_length", "eval_exact_match"), "eval_max_completion_length must be at least 1"


def group_problems(values: OptionValues, method: Method) -> Iterator[Problem]:
    """Yield the problems of the groups of options."""
    for key, group in method.groups.items():
        yield from group.problems(key, getattr(values, key))


def problems(values: OptionValues, method: Method) -> Iterator[Problem]:
    """Yield the problems of the options that a Config of the method is built from."""
    # groups are checked first, since other rules read their options
    invalid_groups = [*group_problems(values, method)]
    yield from invalid_groups
    if invalid_groups:
        return
    values = build_groups(values, method.groups)

    # the rules of all methods come first, and limits of numbers before the rules that read them
    common = (
        value_problems,
        checkpointing_problems,
        learning_rate_problems,
        liger_problems,
        step_problems,
        best_model_problems,
        incompatible_options,
    )
    for limits, rules in ((LIMITS, common), (method.limits, method.rules)):
        yield from limit_problems(limits, values)
        for rule in rules:
            yield from rule(values)
    features = option_features(values)
    if method.head == "score":
        features[Feature.REWARD_MODEL] = "method"
    yield from conflicts(features)
    yield from stop_on_problems(values.stop_on, method)


def stop_on_problems(stop_on: list[str] | str | None, method: Method) -> Iterator[Problem]:
    """Yield the names in `stop_on` that do not exist or do not apply to the method."""
    valid_names = ("nan", *method.symptoms)
    for name in symptoms.as_list(stop_on):
        if name not in symptoms.SYMPTOM_NAMES:
            yield ("stop_on",), f"stop_on: {name!r} is not a warning{name_hint(str(name), symptoms.SYMPTOM_NAMES)}"
        elif name not in valid_names:
            problem = f"stop_on: {name} is not a warning of method {method.name}"
            yield ("stop_on",), f"{problem}. Use {', '.join(valid_names)}"


@cache
def _trl_compat() -> dict[str, Any]:
    """Return the content of trl_compat.yaml."""
    return yaml.safe_load(Path(__file__).with_name("trl_compat.yaml").read_text(encoding="utf-8"))


_TRL_METHODS = {
    "losses": {
        "_compute_loss",
        "get_batch_loss_metrics",
        "concatenated_forward",
        "get_batch_logps",
        "dpo_loss",
        "kto_loss",
        "bco_loss",
        "cpo_loss",
        "odds_ratio_loss",
        "generalized_jsd_loss",
        "compute_ref_log_probs",
        "_precompute_ref_logps",
        "_compute_kl_logps",
    },
    "prepare": {"_prepare_dataset", "tokenize_row", "build_tokenized_answer", "concatenated_inputs"},
    "generate": {"generate_on_policy_outputs", "_generate_and_score_completions"},
}
"""Methods of PostTrainer, each with the methods of TRL's trainers that it replaces."""


def replacement_hint(name: str, interface: str, owner: str = "") -> str | None:
    """Return the replacement of a name of TRL or an older transformers that this package lacks, or None.

    Args:
        name: The name.
        interface: "recipe" or "python".
        owner: Class that the name was passed to. Some names have another replacement for some classes.
    """
    if name in RENAMED:
        return f"its name is now {RENAMED[name]}, of methods with {RENAMED[name].partition('.')[0]}"
    entry = _trl_compat().get(name)
    if not isinstance(entry, dict):
        return entry
    entry = entry.get(owner, entry)
    return entry.get(interface, entry.get("use"))


def reject_trl_overrides(classes: Collection[type]) -> None:
    """Raise InputError for a class that overrides a method of TRL's trainers, which PostTrainer does not call."""
    for cls in classes:
        for replacement, names in _TRL_METHODS.items():
            if overrides := sorted(names & vars(cls).keys()):
                problem = f"{cls.__name__}.{overrides[0]}: PostTrainer does not call this method of TRL"
                raise InputError(f"{problem}. Override `{replacement}`")


def drop_trl_defaults(options: Mapping[str, Any], valid_names: Collection[str], owner: str = "") -> dict[str, Any]:
    """Remove options of TRL that this package lacks, and whose value has no effect.

    Args:
        options: The options.
        valid_names: Names of the options that this package has, which are kept.
        owner: As in `replacement_hint`.
    """
    without_effect = trl_values_without_effect(owner)
    remaining = {}
    for name, value in options.items():
        accepted = () if name in valid_names else without_effect.get(name, ())
        # False == 0
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            remaining[name] = value
    return remaining


def trl_values_without_effect(owner: str = "") -> dict[str, list[Any]]:
    """Return the values that are accepted for options of TRL that this package lacks, because they have no effect.

    Args:
        owner: As in `replacement_hint`.
    """
    entries = {name: entry.get(owner, entry) for name, entry in _trl_compat().items() if isinstance(entry, dict)}
    return {name: entry["same"] for name, entry in entries.items() if "same" in entry}


def checked_keywords(function: str, kwargs: Mapping[str, Any], valid_names: Collection[str]) -> dict[str, Any]:
    """Return keyword arguments without defaults of TRL that have no effect.

    Args:
        function: Name of the class or function that gets the arguments.
        kwargs: The keyword arguments.
        valid_names: Names of the parameters.

    Raises:
        InputError: If an argument is an option of TRL that this package lacks.
        TypeError: If an argument is unknown.
    """
    remaining = drop_trl_defaults(kwargs, valid_names, function)
    for name in remaining:
        if name in valid_names:
            continue
        if hint := replacement_hint(name, "python", function):
            raise InputError(f"{function} has no {name}: {hint}")
        raise TypeError(f"{function} has no {name}{name_hint(name, valid_names, list_valid=False)}")
    return remaining


def merge_problem(has_adapter: bool, quantized: bool) -> str | None:
    """Return why `merge_lora` is not supported for a model, or None if it is."""
    if not has_adapter:
        return "merge_lora requires an adapter. Set model.lora or model.adapter (in Python: peft_config)"
    return conflict_message(Feature.MERGE_LORA, Feature.QUANTIZED) if quantized else None


def limit_problems(limits: Mapping[str, Limit], values: OptionValues) -> Iterator[Problem]:
    """Yield the numbers that are not within their limits."""
    for name, limit in limits.items():
        value = getattr(values, name, None)
        if isinstance(value, int | float) and not limit.is_valid(value):
            yield (name,), f"{name}={value:g} {limit.message}"


def choice_problems(name: str, value: object, allowed: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if the value of an option is not one of the allowed values."""
    if value not in allowed:
        hint = name_hint(str(value), allowed, list_valid=False)
        yield (name,), f"{name}={value!r} is not one of {', '.join(allowed)}{hint}"
