"""Validation rules for the options of each method. A rule yields a `Problem` for each invalid or conflicting option.

A rule takes an object with the fields of the Config of its method before validation. This module can be imported
without torch. A test ensures that the names of losses are the keys of the tables in `losses`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..capabilities import Feature, conflict_message
from ..data.row_schema import is_weight
from ..data.template import parse_template
from ..losses.names import DISCOPOP_TAU, DIVERGENCES, F_DIVERGENCES, SIMPO_GAMMA
from ..models.config import TeacherSection
from ..monitoring.symptoms import as_list
from ..trainer.limits import MAX_FACTOR, Problem
from ..trainer.rules import REFERENCE_SYNC_DEFAULTS, choice_problems

if TYPE_CHECKING:
    from ..trainer.method_spec import Method
    from .cpo import CPOConfig
    from .dpo import DPOConfig
    from .kto import KTOConfig
    from .sft import SFTConfig

PAIRED_LOSSES = (
    "sigmoid",
    "sigmoid_norm",
    "discopop",
    "ipo",
    "ipo_sum",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sft",
    "simpo",
    "orpo",
)
REFERENCE_FREE_LOSSES = {"sft", "simpo", "orpo"}
MARGIN_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "exo_pair", "robust", "discopop", "sft")
"""Losses that read the log-ratios only through their difference, so that another f-divergence is defined."""
SMOOTHED_LOSSES = ("exo_pair", "robust", "sigmoid")
SUPERVISED_LOSSES = ("nll", "chunked_nll", "dft", "eaft")
"""Losses of SFT. TRL computes the head of chunked_nll in chunks, as all losses do here."""
REMAINDERS = {"residual": ("reverse_kl",), "generalized": ("forward_kl", "reverse_kl")}
"""Treatments of the tokens outside the teacher's top k, each with its divergences. `tail` is valid with all."""
CONTRASTIVE_LOSSES = ("sigmoid", "hinge", "ipo", "simpo")
"""Losses of CPO."""
UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired", "bco")
POLICY_GRADIENT = "policy_gradient"
ROLLOUT_LOSSES = (POLICY_GRADIENT, *DIVERGENCES)
"""Losses of OPD."""
_SAME_PROMPT = "teacher and student would see the same prompt, so there is no training signal"


def sft_problems(values: "SFTConfig") -> Iterator[Problem]:
    """Yield the problems of the options of SFT."""
    yield from choice_problems("loss_type", values.loss_type, SUPERVISED_LOSSES)
    if values.packing and values.max_length is None:
        yield ("packing", "max_length"), "packing requires max_length. Set it to the length of a packed row"


def text_weight_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of `text_weights`."""
    patterns = values.text_weights or {}
    if not isinstance(patterns, Mapping):
        problem = f"text_weights={patterns!r} must be a mapping of regular expressions to weights"
        yield ("text_weights",), f"{problem}, such as {{'<tool_call>': 2.0}}"
        return
    for pattern, weight in patterns.items():
        name = f"text_weights[{pattern!r}]"
        try:
            matches_nothing = not pattern or re.fullmatch(pattern, "")
        except (re.error, TypeError) as error:
            yield ("text_weights",), f"{name}: the regular expression is not valid: {error}"
            continue
        if matches_nothing:
            yield ("text_weights",), f"{name} matches an empty text. Write a pattern of at least one character"
        if not is_weight(weight):
            yield ("text_weights",), f"{name}={weight!r} must be a number from 0 to 1e6"


def dpo_loss_problems(values: "DPOConfig") -> Iterator[Problem]:
    """Yield the problems of the losses of DPO, their weights, and the options that single losses read."""
    names = as_list(values.loss_type)
    weights = values.loss_weights
    for name in names:
        if name in ("aot", "aot_unpaired"):
            problem = f"loss_type={name!r} is not supported, because it compares the pairs of a micro-batch"
            yield ("loss_type",), f"{problem}, so that the loss would depend on its size. Use sigmoid or apo_zero"
        else:
            yield from choice_problems("loss_type", name, PAIRED_LOSSES)
    if not names:
        yield ("loss_type",), "loss_type must not be empty. Set a loss such as sigmoid"
        return
    if weights is not None:
        weight_list = weights if isinstance(weights, list | tuple) else [weights]
        valid = [weight for weight in weight_list if isinstance(weight, int | float) and 0 <= weight <= MAX_FACTOR]
        if len(weight_list) != len(names):
            problem = (
                f"loss_weights has {len(weight_list)} values for {len(names)} loss_type. Set one weight for each loss"
            )
            yield ("loss_weights", "loss_type"), problem
        elif len(valid) < len(weight_list) or not (any(valid) or values.nll_coef):
            problem = f"loss_weights={weights!r} must be numbers from 0 to 1e6, and not all 0 unless nll_coef is set"
            yield ("loss_weights",), problem
    if "simpo" in names and len(names) > 1 and values.beta is None:
        yield ("loss_type",), "loss_type combines simpo (beta 2) with other losses (beta 0.1). Set beta"

    # options that the given losses do not read
    if values.simpo_gamma != SIMPO_GAMMA and "simpo" not in names:
        yield ("simpo_gamma", "loss_type"), "simpo_gamma is only valid with loss_type simpo. Remove simpo_gamma"
    if values.discopop_tau != DISCOPOP_TAU and "discopop" not in names:
        yield ("discopop_tau", "loss_type"), "discopop_tau is only valid with loss_type discopop. Remove discopop_tau"
    reference_options = [
        name
        for name in ("precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model")
        if getattr(values, name)
    ]
    if reference_options and {*names} <= REFERENCE_FREE_LOSSES:
        name = reference_options[0]
        yield (name, "loss_type"), f"{name} has no effect: {no_reference(names)}. Remove {name}"


def dpo_divergence_problems(values: "DPOConfig") -> Iterator[Problem]:
    """Yield the problems of the f-divergence, which only some losses of DPO have."""
    kind = values.f_divergence_type
    yield from choice_problems("f_divergence_type", kind, F_DIVERGENCES)
    if kind != "reverse_kl" and (others := [name for name in as_list(values.loss_type) if name not in MARGIN_LOSSES]):
        problem = f"f_divergence_type={kind!r} is only valid with {', '.join(MARGIN_LOSSES)}"
        keys = ("f_divergence_type", "loss_type")
        yield keys, f"{problem}, not with loss_type {others[0]!r}. Remove f_divergence_type"
    if kind != "alpha_divergence" and values.f_alpha_divergence_coef not in (0.5, 1.0):
        problem = "f_alpha_divergence_coef is only valid with f_divergence_type: alpha_divergence"
        yield ("f_alpha_divergence_coef", "f_divergence_type"), f"{problem}. Remove f_alpha_divergence_coef"


def cpo_problems(values: "CPOConfig") -> Iterator[Problem]:
    """Yield the problems of the options of CPO."""
    yield from choice_problems("loss_type", values.loss_type, CONTRASTIVE_LOSSES)
    if values.simpo_gamma != SIMPO_GAMMA and values.loss_type != "simpo":
        yield ("simpo_gamma", "loss_type"), "simpo_gamma is only valid with loss_type simpo. Remove simpo_gamma"


def reference_sync_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options that update the reference during training."""
    if values.sync_ref_model:
        return
    for name, default in REFERENCE_SYNC_DEFAULTS.items():
        if getattr(values, name) != default:
            yield (name, "sync_ref_model"), f"{name} requires sync_ref_model. Set sync_ref_model: true"


def no_reference(losses: Iterable[str]) -> str:
    """Return the part of a message about the losses of DPO that none of them uses a reference."""
    return f"loss_type {', '.join(losses)} does not use a reference"


def dpo_smoothing_problems(values: "DPOConfig") -> Iterator[Problem]:
    """Yield the problems of label_smoothing in the losses of DPO."""
    names = as_list(values.loss_type)
    smoothing = values.label_smoothing
    keys = ("label_smoothing", "loss_type")
    if smoothing and (others := [name for name in names if name not in SMOOTHED_LOSSES]):
        problem = f"label_smoothing is only valid with {', '.join(SMOOTHED_LOSSES)}, not with loss_type {others[0]!r}"
        yield keys, f"{problem}. Remove it"
    if "exo_pair" in names and smoothing == 0:
        yield keys[::-1], "loss_type='exo_pair' requires label_smoothing above 0. Set label_smoothing: 1e-3"
    if "robust" in names and smoothing >= 0.5:
        yield keys, f"loss_type='robust' requires label_smoothing below 0.5, not {smoothing}. Lower it"


def kto_problems(values: "KTOConfig") -> Iterator[Problem]:
    """Yield the problems of the options of KTO."""
    yield from choice_problems("loss_type", values.loss_type, UNPAIRED_LOSSES)
    for name in ("desirable_weight", "undesirable_weight"):
        value = getattr(values, name)
        if value != "auto" and not (isinstance(value, int | float) and 0 <= value <= MAX_FACTOR):
            yield (name,), f"{name}={value!r} must be auto or a number from 0 to 1e6"
    if values.desirable_weight == values.undesirable_weight == 0:
        yield (
            ("undesirable_weight", "desirable_weight"),
            "undesirable_weight and desirable_weight are both 0. Raise one of them",
        )


def kd_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options of KD."""
    yield from choice_problems("divergence", values.divergence, DIVERGENCES)
    yield from _divergence_problems("divergence", values)
    if values.teacher.top_k_remainder == "residual":
        problem = "teacher.top_k_remainder='residual' is only valid with method opd. Set tail"
        yield ("teacher.top_k_remainder", "teacher"), problem
    else:
        yield from _top_k_problems("divergence", values)


def recorded_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options of KD with recorded log-probabilities of the teacher."""
    options = values.teacher
    if options.logprobs_column is None:
        return
    keys = "teacher.logprobs_column", "teacher"
    if options.top_k is None:
        problem = "teacher.logprobs_column requires teacher.top_k, the number of tokens to read at each position"
        yield keys, f"{problem}. Set it to the number of tokens that were recorded, or less"
    if options.merge_eos:
        problem = "teacher.merge_eos cannot be combined with teacher.logprobs_column, which may lack EOS ids"
        yield ("teacher.merge_eos", *keys), f"{problem}. Remove teacher.merge_eos"
    if values.temperature != 1:
        problem = f"temperature={values.temperature:g} cannot be combined with teacher.logprobs_column"
        yield ("temperature", *keys), f"{problem}, which is read at temperature 1. Remove temperature"


def teacher_option_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options of teachers in a Config."""
    options = values.teacher
    names = options.names or []
    if options.precompute and options.top_k is None and names:
        problem = "teacher.precompute requires teacher.top_k with several teachers, which have several heads"
        fix = "Set it to the number of tokens to keep for each position"
        yield ("teacher.precompute", "teacher"), f"{problem}. {fix}"
    if not all(name.strip() for name in names):
        yield ("teacher.names", "teacher"), f"teacher.names={names!r} must not have empty names"
        return
    for option, value in (("tokenizer", options.tokenizer), ("prompt", options.prompt)):
        keys = f"teacher.{option}", "teacher"
        if isinstance(value, dict) != bool(names) and value is not None:
            form = "a mapping by the names in teacher.names" if names else "a string unless teacher.names is set"
            yield keys, f"teacher.{option} must be {form}"
        elif isinstance(value, dict) and (unknown := sorted({*value} - {*names})):
            yield keys, f"teacher.{option}: {unknown[0]!r} is not one of teacher.names, which are {', '.join(names)}"


def kd_tokenizer_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options of KD with a teacher that has its own tokenizer."""
    options = values.teacher
    if not options.tokenizer:
        return
    reason = (
        "cannot be combined with a teacher with its own tokenizer, whose tokens are aligned with the student's by "
        "text spans"
    )
    if options.merge_eos:
        yield ("teacher.merge_eos", "teacher"), f"teacher.merge_eos {reason}. Remove it"
    if values.temperature != 1:
        yield ("temperature",), f"temperature={values.temperature:g} {reason}. Remove it"


def teacher_section_problems(key: str, section: TeacherSection) -> Iterator[Problem]:
    """Yield the problems of a teacher section, such as keys of another kind of teacher.

    Args:
        key: Name of the section in messages.
        section: The section.
    """
    loading = ("from_scratch", "dtype", "attn_implementation", "quantization", "adapter", "offload")
    defaults = TeacherSection()
    loading_keys = {name for name in loading if getattr(section, name) != getattr(defaults, name)}
    # keys that describe a model other than the student
    model_keys = (loading_keys | ({"name_or_path"} if section.name_or_path else set())) - {"offload"}
    if section.self is not None:
        yield from choice_problems(f"{key}.self", section.self, ("start", "ema"))
    if section.url and section.self:
        problem = f"{key}.self cannot be combined with {key}.url. Remove one of the two"
        yield (f"{key}.self", f"{key}.url"), problem
    elif section.url and loading_keys:
        name = min(loading_keys)
        problem = f"{key}.{name} cannot be combined with {key}.url, whose server has loaded the model. Remove it"
        yield (f"{key}.{name}",), problem
    elif section.self and model_keys:
        name = min(model_keys)
        problem = f"{key}.{name} cannot be combined with {key}.self, with which the student is the teacher. Remove it"
        yield (f"{key}.{name}",), problem
    if section.url and not section.url.startswith(("http://", "https://")):
        yield (f"{key}.url",), f"{key}.url={section.url!r} must be a URL such as http://localhost:8000"
    if section.ema != defaults.ema and section.self != "ema":
        yield (f"{key}.ema",), f"{key}.ema is only valid with {key}.self: ema. Set {key}.self: ema, or remove {key}.ema"
    if not 0 <= section.ema < 1:
        yield (f"{key}.ema",), f"{key}.ema={section.ema:g} must be in [0, 1)"
    if section.own_tokenizer and section.self:
        problem = f"{key}.own_tokenizer cannot be combined with {key}.self, with which the student is the teacher"
        yield (f"{key}.own_tokenizer",), f"{problem}. Remove it"
    if section.prompt is not None and (template_problem := prompt_template_problem(section.prompt)):
        yield (f"{key}.prompt",), f"{key}.prompt: {template_problem}"
    elif section.self and re.fullmatch(r"\s*\{\{-?\s*prompt\s*-?\}\}\s*", section.prompt or ""):
        yield (f"{key}.prompt",), f"{key}.prompt: {_SAME_PROMPT}. Add information to the prompt"


def prompt_template_problem(template: str) -> str | None:
    """Return the problem of the template of a teacher's prompt, or None."""
    from jinja2 import TemplateSyntaxError, meta  # imported late, as commands that read reports do not require it

    try:
        variables = meta.find_undeclared_variables(parse_template(template))
    except TemplateSyntaxError as error:
        return f"the Jinja template is not valid: {(error.message or '').rstrip('.')}"
    if not template.strip():
        return "the template must not be empty"
    if not variables:
        return f"{template!r} uses no column, so all prompts would be the same. Add {{{{ prompt }}}} or another column"
    return None


def teacher_problems(values: Any, section: TeacherSection, method: "Method") -> Iterator[Problem]:
    """Yield the problems of a Config with the section of a teacher.

    Args:
        values: The Config of the method, or its fields.
        section: The section.
        method: The method.
    """
    if section.url and (served_problem := served_teacher_problem(values, method)):
        yield served_problem
    if section.self == "ema" and values.teacher.precompute:
        yield ("teacher.precompute", "teacher"), conflict_message(Feature.PRECOMPUTE, Feature.MOVING_AVERAGE)
    if section.self and not values.teacher.prompt and method.rows.sampled and not values.reward:
        yield ("teacher.prompt", "teacher"), f"self: {_SAME_PROMPT}. Set prompt"


def served_teacher_problem(values: Any, method: "Method") -> Problem | None:
    """Return the problem of a Config with a teacher on a server, or None.

    A server returns log-probabilities only of the most likely tokens and of the tokens of the text.

    Args:
        values: The Config of the method, or its fields.
        method: The method. Only one that samples rollouts has a policy gradient.
    """
    by_token = method.rows.sampled and values.loss_type == POLICY_GRADIENT
    if values.temperature != 1 and (by_token or values.teacher.tokenizer):
        return ("temperature",), "a server returns log-probabilities at temperature 1. Set temperature: 1"
    if values.teacher.tokenizer:
        if method.rows.sampled and not by_token:
            problem = "a server with its own tokenizer scores only the text. Set loss_type: policy_gradient"
            return ("loss_type",), problem
        return None
    if by_token or values.teacher.top_k:
        return None
    alternative = ", or loss_type: policy_gradient" if method.rows.sampled else ""
    problem = f"a server returns only the most likely tokens. Set teacher: {{top_k: 20}}{alternative}"
    return ("teacher.top_k", "teacher"), problem


def _divergence_problems(key: str, values: Any) -> Iterator[Problem]:
    """Yield the problems of `beta` and `entropy_threshold` with the divergence that the option `key` names."""
    name = getattr(values, key)
    if values.entropy_threshold is not None and name != "entropy_aware_kl":
        problem = f"entropy_threshold is only valid with {key} entropy_aware_kl, not {name}"
        yield ("entropy_threshold", key), f"{problem}. Set {key}: entropy_aware_kl, or remove entropy_threshold"
    beta = values.beta
    if beta is None:
        return
    skewed = str(name).startswith("skew")
    if name != "jsd" and not skewed:
        problem = f"beta is only valid with {key} jsd, skew_forward_kl or skew_reverse_kl, not {name}"
        yield ("beta", key), f"{problem}. Set {key}: jsd, or remove beta"
    elif skewed and not 0 < beta < 1:
        yield ("beta",), f"beta={beta:g} must be in (0, 1)"
    elif not 0 <= beta <= 1:
        yield ("beta",), f"beta={beta:g} must be in [0, 1]"


def opd_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the loss of OPD, and of the lengths of its prompts and rollouts."""
    yield from choice_problems("loss_type", values.loss_type, ROLLOUT_LOSSES)
    yield from _divergence_problems("loss_type", values)
    if values.neftune_noise_alpha:
        problem = "neftune_noise_alpha is not supported, because rollouts are sampled without noise. Remove it"
        yield ("neftune_noise_alpha",), problem
    max_length = values.max_length
    rollout_length = values.max_completion_length
    if max_length is not None and max_length <= rollout_length:
        problem = f"max_length={max_length} leaves no prompt next to max_completion_length={rollout_length}"
        yield ("max_length", "max_completion_length"), f"{problem}. Raise max_length, or lower max_completion_length"


def opd_token_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of the options of OPD about trained tokens, the teacher's top tokens and token weights."""
    if values.teacher.logprobs_column is not None:
        problem = "teacher.logprobs_column cannot be combined with method opd, whose rollouts are not in the data"
        yield ("teacher.logprobs_column", "teacher"), f"{problem}. Use method kd"
    yield from _train_max_tokens_problems(values)
    yield from _top_k_problems("loss_type", values)
    weights = values.token_weights
    if weights is not None and weights.requires_advantage and values.loss_type != POLICY_GRADIENT:
        problem = f"token_weights: {weights.kind} requires loss_type policy_gradient. Set loss_type: policy_gradient"
        problem += ", or use other token_weights"
        yield ("token_weights", "loss_type"), problem


def _train_max_tokens_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of rollouts.train_max_tokens."""
    tokens = values.rollouts.train_max_tokens
    rollout_length = values.max_completion_length
    keys = "rollouts.train_max_tokens", "rollouts", "max_completion_length"
    if isinstance(tokens, dict):
        if {*tokens} != {"from", "to", "steps"} or min(tokens.values()) < 1:
            problem = f"rollouts.train_max_tokens={tokens!r} must have the keys from, to and steps, each at least 1"
            yield keys[:2], problem
        elif max(tokens["from"], tokens["to"]) > rollout_length:
            problem = f"rollouts.train_max_tokens is above max_completion_length={rollout_length}"
            yield keys, f"{problem}. Lower it, or raise max_completion_length"
    elif tokens is not None and not 1 <= tokens <= rollout_length:
        problem = f"rollouts.train_max_tokens={tokens} must be from 1 to max_completion_length={rollout_length}"
        yield keys, problem


def _top_k_problems(key: str, values: Any) -> Iterator[Problem]:
    """Yield the problems of teacher.top_k_remainder with the divergence that the option `key` names."""
    options = values.teacher
    keys = "teacher.top_k_remainder", "teacher"
    remainder = options.top_k_remainder
    divergence = getattr(values, key)
    yield from choice_problems("teacher.top_k_remainder", remainder, ("tail", *REMAINDERS))
    if options.top_k is None and remainder != "tail":
        yield (
            keys,
            "teacher.top_k_remainder requires teacher.top_k. Set teacher.top_k, or remove teacher.top_k_remainder",
        )
    elif remainder in REMAINDERS and divergence not in REMAINDERS[remainder]:
        valid = " or ".join(REMAINDERS[remainder])
        problem = f"teacher.top_k_remainder: {remainder} is only valid with {key} {valid}, not {divergence}"
        yield (*keys, key), f"{problem}. Set tail"


def opd_reward_problems(values: Any) -> Iterator[Problem]:
    """Yield the problems of a reward in addition to the teacher."""
    if values.reward is None:
        return
    if values.loss_type != POLICY_GRADIENT:
        problem = "reward requires loss_type policy_gradient, because the reward is added to its advantage"
        yield ("reward", "loss_type"), f"{problem}. Set loss_type: policy_gradient"
    if values.num_generations < 2:
        problem = "reward requires several rollouts per prompt, which are compared. Set num_generations to 2 or more"
        yield ("reward", "num_generations"), problem
