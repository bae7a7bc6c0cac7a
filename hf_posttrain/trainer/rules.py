"""What the values of a method's Config may be, and which exclude each other: told without torch.

A recipe is checked by `problems` before torch is imported; every Config raises the first of them when it is made.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..capabilities import Feature, conflict, conflicts, option_features
from ..data.template import switch_problem
from ..errors import InputError, nearest
from ..monitoring import symptoms
from .limits import ABOVE_ZERO, BELOW_ONE, COEFFICIENT, COUNT, NOT_NEGATIVE, Limit, Problem
from .method_spec import Method
from .option_group import with_groups
from .renamed_options import RENAMED

SEED = Limit(lambda n: 0 <= n < 2**32, "is no seed: they are 0 to 4294967295")
LIMITS = {
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "eval_accumulation_steps": COUNT,
    "dataset_num_proc": COUNT,
    "torch_empty_cache_steps": COUNT,
    "dataloader_num_workers": NOT_NEGATIVE,
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "neftune_noise_alpha": COEFFICIENT,
    "router_aux_loss_coef": COEFFICIENT,
    "adam_epsilon": ABOVE_ZERO,
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "seed": SEED,
    "data_seed": SEED,
    "max_steps": Limit(lambda n: n == -1 or n > 0, "trains nothing: steps to train, or -1 for num_train_epochs"),
    "max_length": Limit(lambda n: n >= 2, "is too short: a prompt and a completion need 2 tokens at least"),
}
"""Option of every method -> what its number must keep to; null is always allowed."""
_LOG_LEVELS = ("debug", "detail", "info", "warning", "error", "critical", "passive")
REPORTERS: dict[str, tuple[str, ...]] = {
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
"""What transformers reports to, and the packages of which it needs one."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
CHECKPOINTING = {
    "context_fn",
    "debug",
    "determinism_check",
    "early_stop",
    "every_n_layers",
    "offload",
    "preserve_rng_state",
    "use_reentrant",
}
LIGER_HEADS = ("fused_linear_cross_entropy", "cross_entropy")  # what Liger would do of the head
WEIGHTS_ALONE = "resume_from_checkpoint: with save_only_model: true there is no optimizer state to resume: drop either"
_ROUNDS = "it rounds the weights themselves, which then train on so; under bf16 evaluation is in bf16 anyway"
_REFUSED = {  # field: (off, why it stays off)
    "label_smoothing_factor": (0.0, "it smooths full logits, which never exist; label_smoothing is for preferences"),
    "auto_find_batch_size": (False, "out of memory, HF goes on with trained weights from step 0: see --check"),
    "remove_unused_columns": (False, "the collators read columns that no model's forward has"),
    "bf16_full_eval": (False, _ROUNDS),
    "fp16_full_eval": (False, _ROUNDS),
    "restore_callback_states_from_checkpoint": (False, "a resumed run restores them anyway"),
    "batch_eval_metrics": (False, "metrics are exact sums over the whole set; leave it off"),
}


def allowed_values(values: Any) -> Iterator[Problem]:
    """Names and options that no method can honour."""
    layouts = ("auto", "shared", "packed", "padded")
    named = [("layout", layouts), ("log_level", _LOG_LEVELS), ("log_level_replica", _LOG_LEVELS)]
    if values.reasoning is not None:
        yield from one_of("reasoning", values.reasoning, ("keep", "drop"))
    if (turns := getattr(values, "train_on", None)) is not None:
        yield from one_of("train_on", turns, ("all", "assistant", "last"))
        if turns == "all" and values.assistant_only_loss:
            yield ("train_on", "assistant_only_loss"), "train_on: all contradicts assistant_only_loss: drop one of both"
    if values.train_sampling_strategy == "batch_rebalance":
        problem = "train_sampling_strategy: batch_rebalance repeats rows unseen: use random or group_by_length"
        yield ("train_sampling_strategy",), problem
    else:
        named.append(("train_sampling_strategy", ("random", "sequential", "group_by_length")))
    for name, allowed in named:
        yield from one_of(name, getattr(values, name), allowed)
    if values.include_num_input_tokens_seen == "non_padding":
        problem = "non_padding is not told from token ids here: use all (of layouts that hardly pad)"
        yield ("include_num_input_tokens_seen",), f"include_num_input_tokens_seen: {problem}"
    for reporter in symptoms.listed(values.report_to):
        yield from one_of("report_to", reporter, ("all", "none", *REPORTERS))
    if getattr(values.lr_scheduler_type, "value", values.lr_scheduler_type) == "constant" and values.warmup_steps:
        yield ("warmup_steps", "lr_scheduler_type"), "warmup_steps: constant has no warm-up: use constant_with_warmup"
    if switch := switch_problem(values.chat_template_kwargs or {}):
        yield ("chat_template_kwargs",), f"chat_template_kwargs: {switch}"
    for name, (off, reason) in _REFUSED.items():
        if (value := getattr(values, name, None)) not in (off, None):
            yield (name,), f"{name}={value!r} cannot be honoured: {reason}"


def checkpointing(values: Any) -> Iterator[Problem]:
    """Options of activation checkpointing, under its two names, that transformers and torch know."""
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        given = getattr(values, name)
        if not isinstance(given, dict):
            continue
        for option in given.keys() - CHECKPOINTING:
            yield (name,), f"{name}: there is no option {option!r}{nearest(str(option), CHECKPOINTING)}"
        every = given.get("every_n_layers", 1)
        if type(every) is not int or every < 1:
            yield (name,), f"{name}: every_n_layers={every!r} must be a whole number from 1 on"


def liger(values: Any) -> Iterator[Problem]:
    """Liger's kernels of layers work with our head; those of the head would take its place."""
    if not values.use_liger_kernel:
        return
    if find_spec("liger_kernel") is None:
        yield ("use_liger_kernel",), "use_liger_kernel needs a package that is not installed: pip install liger-kernel"
    if values.torch_compile or values.torch_compile_backend or values.torch_compile_mode:
        problem = "use_liger_kernel and torch_compile: torch 2.11 fails on Liger's kernels, and fuses layers itself"
        yield ("use_liger_kernel", "torch_compile"), f"{problem}: keep one of the two (torch_compile is faster)"
    given = values.liger_kernel_config  # a text from a command line is read by HF
    if not isinstance(given, dict | str | None):
        yield ("liger_kernel_config",), f"liger_kernel_config: {given!r} is no mapping of kernels to true or false"
    for name in LIGER_HEADS:
        if isinstance(given, dict) and given.get(name):
            problem = f"liger_kernel_config: {name} would take the place of our head, which is fused: leave it out"
            yield ("liger_kernel_config",), problem


def steps(values: Any) -> Iterator[Problem]:
    """Is anything trained, and is every interval a whole number of steps, or below 1 a share of all?"""
    if values.max_steps <= 0 and not 0 < values.num_train_epochs < float("inf"):
        problem = f"num_train_epochs={values.num_train_epochs:g} trains nothing: set it above 0, or max_steps"
        yield ("num_train_epochs", "max_steps"), problem
    # HF evaluates whenever it logs where eval_steps is not given
    evaluated = values.eval_steps or values.logging_steps
    for what, every in (("logging", values.logging_steps), ("save", values.save_steps), ("eval", evaluated)):
        names = f"{what}_steps", f"{what}_strategy"
        if getattr(values, names[1]) != "steps":
            continue
        if not 0 < every < float("inf"):
            yield names, f"{names[0]}={every:g} with {names[1]}: steps must be above 0; {names[1]}: no turns it off"
        elif every > 1 and every != int(every):
            yield names, f"{names[0]}={every:g} must be a whole number, or below 1 a share of all steps"


def best_model(values: Any) -> Iterator[Problem]:
    """load_best_model_at_end loads a checkpoint, so one must be saved whenever the model is evaluated."""
    # a strategy is an enum in a Config, and equal to its name
    saved, evaluated = (str(getattr(s, "value", s)) for s in (values.save_strategy, values.eval_strategy))
    option = "load_best_model_at_end"
    if not values.load_best_model_at_end:
        if saved == "best" and not values.metric_for_best_model:  # with the former, that is eval_loss
            problem = "save_strategy: best needs metric_for_best_model, such as eval_loss"
            yield ("save_strategy", "metric_for_best_model"), problem
    elif evaluated == "no":
        yield (option, "eval_strategy"), f"{option} needs eval_strategy: steps or epoch, which finds the best"
    elif saved not in (evaluated, "best"):
        wanted = f"save_strategy ({saved}) must be eval_strategy's ({evaluated}), or best"
        yield (option, "save_strategy", "eval_strategy"), f"{option} loads a checkpoint: {wanted}"
    # the best step must have been saved
    elif saved == "steps":
        save = values.save_steps
        evaluate = values.eval_steps or values.logging_steps
        given = f"save_steps={save:g}, eval_steps={evaluate:g}"
        names = ("save_steps", "eval_steps", option)
        if (save < 1) != (evaluate < 1):
            yield names, f"{option}: {given} must both be steps, or both shares below 1"
        elif evaluate and save != evaluate:  # a multiple, which HF takes, loses the best of the steps between
            problem = f"{option}: of {given} what is evaluated between saves could not be loaded"
            yield names, f"{problem}: set both the same, or save_strategy: best"


def together(values: Any) -> Iterator[Problem]:
    """Fields that exclude or need each other; torch says some of it with the model loaded."""
    if values.fp16 and values.bf16:
        yield ("fp16", "bf16"), "fp16 and bf16 exclude each other: set one of them to false"
    for name in ("fp16", "use_liger_kernel"):
        if values.use_cpu and getattr(values, name) and os.environ.get("TRITON_INTERPRET") != "1":
            yield (name, "use_cpu"), f"{name}: true needs a GPU, and use_cpu: true takes none: drop either"
    if values.torch_compile_mode is not None:
        yield from one_of("torch_compile_mode", values.torch_compile_mode, COMPILE_MODES)
    if values.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") and values.eval_strategy == "no":
        kind = getattr(values.lr_scheduler_type, "value", values.lr_scheduler_type)
        problem = f"lr_scheduler_type: {kind} needs eval_strategy: steps or epoch, whose results it follows"
        yield ("lr_scheduler_type", "eval_strategy"), problem
    if values.max_grad_norm is None:
        yield ("max_grad_norm",), "max_grad_norm: null: 0 is what leaves gradients as they are"
    if values.save_only_model and values.resume_from_checkpoint in (True, "true", "auto"):
        yield ("save_only_model", "resume_from_checkpoint"), WEIGHTS_ALONE
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(values, name) and values.dataloader_num_workers == 0:
            yield (name, "dataloader_num_workers"), f"{name} needs dataloader_num_workers above 0"
    if values.optim_args and not all("=" in pair for pair in values.optim_args.split(",")):
        yield ("optim_args",), f"optim_args={values.optim_args!r} is not name=value, or several with commas between"
    if (values.metric_for_best_model or "").endswith("exact_match") and not values.eval_exact_match:
        problem = "metric_for_best_model: exact match is measured with eval_exact_match: true"
        yield ("metric_for_best_model", "eval_exact_match"), problem
    if values.eval_exact_match and values.eval_max_completion_length < 1:
        yield ("eval_max_completion_length", "eval_exact_match"), "eval_max_completion_length must be at least 1"


def group_problems(values: Any, method: Method) -> Iterator[Problem]:
    """Yield what is wrong with the groups of options."""
    for key, group in method.groups.items():
        yield from group.problems(key, getattr(values, key))


def problems(values: Any, method: Method) -> Iterator[Problem]:
    """Yield what is wrong with `values`, an object with the fields of the method's Config as they were given."""
    # groups first: other rules read their options
    wrong = [*group_problems(values, method)]
    yield from wrong
    if wrong:
        return
    values = with_groups(values, method.groups)

    # the rules of every method, then the method's own; numbers before what they exclude
    common = (allowed_values, checkpointing, liger, steps, best_model, together)
    for limits, rules in ((LIMITS, common), (method.limits, method.rules)):
        yield from beyond(limits, values)
        for rule in rules:
            yield from rule(values)
    yield from conflicts(option_features(values))
    yield from stops(values.stop_on, method)


def stops(given: list[str] | str | None, method: Method) -> Iterator[Problem]:
    """Names in a `stop_on` that do not exist, or are no symptoms of the method."""
    known = ("nan", *method.symptoms)
    for name in symptoms.listed(given):
        if name not in symptoms.NAMES:
            yield ("stop_on",), f"stop_on: there is no {name!r}{nearest(str(name), symptoms.NAMES)}"
        elif name not in known:
            yield ("stop_on",), f"stop_on: {name} is no symptom of {method.name}, which has {', '.join(known)}"


@cache
def _renamed() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("trl_compat.yaml").read_text(encoding="utf-8"))


_OF_TRL = {  # a method of ours -> those of TRL's trainers in whose place it is
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


def instead_of(name: str, reader: str, owner: str = "") -> str | None:
    """What to use instead of a name that TRL or older transformers have and we lack. reader: "recipe" or "python";
    owner: the Config that it was given to, which may have a meaning of its own.
    """
    if name in RENAMED:
        return f"its name is now {RENAMED[name]}, of methods with {RENAMED[name].partition('.')[0]}"
    known = _renamed().get(name)
    if not isinstance(known, dict):
        return known
    known = known.get(owner, known)
    return known.get(reader, known.get("use"))


def refuse_overrides(classes: Collection[type]) -> None:
    """Raises InputError for a class with a method that TRL's trainers call, and which nothing calls here."""
    for each in classes:
        for instead, names in _OF_TRL.items():
            if found := sorted(names & vars(each).keys()):
                problem = f"{each.__name__}.{found[0]}: nothing here calls this method of TRL's"
                raise InputError(f"{problem}: override `{instead}`")


def without_defaults(given: Mapping[str, Any], known: Collection[str], owner: str = "") -> dict[str, Any]:
    """`given` without those names beyond `known` that ask, as TRL's defaults do, for what is done anyway. owner: as in
    `instead_of`.
    """
    kept = {}
    for name, value in given.items():
        entry = None if name in known else _renamed().get(name)
        same = entry.get(owner, entry).get("same", ()) if isinstance(entry, dict) else ()
        if not any(value == one and type(value) is type(one) for one in same):  # False == 0
            kept[name] = value
    return kept


def keywords(function: Any, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Keyword arguments for `function`, which takes `known`: without TRL's defaults. Raises InputError for another name
    that TRL has, TypeError for one that nobody has.
    """
    kept = without_defaults(given, known, function)
    for name in kept:
        if name in known:
            continue
        if instead := instead_of(name, "python", function):
            raise InputError(f"{function} has no {name}: {instead}")
        raise TypeError(f"{function} has no {name}{nearest(name, known, listed=False)}")
    return kept


def merge_problem(has_adapter: bool, quantised: bool) -> str | None:
    """Why merge_lora cannot be honoured for such a model; None where it can."""
    if not has_adapter:
        return "merge_lora: true needs model.lora or model.adapter (peft_config), the adapter to merge"
    return conflict(Feature.MERGE_LORA, Feature.QUANTIZED) if quantised else None


def beyond(limits: Mapping[str, Limit], values: Any) -> Iterator[Problem]:
    """The numbers of `values` that do not keep to their limits."""
    for name, limit in limits.items():
        value = getattr(values, name, None)
        if isinstance(value, int | float) and not limit.holds(value):
            yield (name,), f"{name}={value:g} {limit.otherwise}"


def one_of(name: str, value: object, allowed: Collection[str]) -> Iterator[Problem]:
    """A problem where `value` of the field `name` is none of those allowed, with the nearest."""
    if value not in allowed:
        hint = nearest(str(value), allowed, listed=False)
        yield (name,), f"{name}={value!r} is not one of {', '.join(allowed)}{hint}"
