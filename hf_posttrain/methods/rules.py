"""What the options of single methods exclude: losses and their options, and rollouts by vLLM.

Each rule takes an object with the fields of the method's Config, as given, and yields problems, without torch. A test
holds the names of losses equal to the tables of functions in `losses`.
"""

import re
from collections.abc import Iterator
from typing import Any

from ..capabilities import Feature, conflict
from ..data.template import parsed
from ..losses.names import DIVERGENCES
from ..models.config import TeacherSection
from ..monitoring.symptoms import listed
from ..trainer.limits import LARGEST, Problem
from ..trainer.rules import one_of

PAIRED_LOSSES = (
    "sigmoid",
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
SMOOTHED_LOSSES = ("exo_pair", "robust", "sigmoid")
UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired", "bco")
POLICY_GRADIENT = "policy_gradient"


def sft_problems(values: Any) -> Iterator[Problem]:
    """What SFTConfig refuses."""
    if values.packing and values.max_length is None:
        yield ("packing", "max_length"), "packing needs max_length, the length of a packed row"


def dpo_loss_problems(values: Any) -> Iterator[Problem]:
    """Names and number of DPO's losses."""
    names = listed(values.loss_type)
    weights = values.loss_weights
    for name in names:
        yield from one_of("loss_type", name, PAIRED_LOSSES)
    if not names:
        yield ("loss_type",), "loss_type is empty: name one loss at least, such as sigmoid"
    if weights is not None:
        each = weights if isinstance(weights, list | tuple) else [weights]
        numbers = [weight for weight in each if isinstance(weight, int | float) and 0 <= weight <= LARGEST]
        if len(each) != len(names):
            yield ("loss_weights", "loss_type"), f"loss_weights has {len(each)} values for {len(names)} loss_type"
        elif len(numbers) < len(each) or not (any(numbers) or values.nll_coef):
            yield ("loss_weights",), f"loss_weights={weights!r} must be numbers from 0 to 1e6, not all of them 0"
    if "simpo" in names and len(names) > 1 and values.beta is None:
        yield ("loss_type",), "loss_type combines simpo (beta 2) with others (beta 0.1): set beta"
    # what other losses would read
    if values.simpo_gamma != 0.5 and "simpo" not in names:
        yield ("simpo_gamma", "loss_type"), "simpo_gamma is the margin of loss_type simpo: set that, or drop it"
    given = [name for name in ("precompute_ref_log_probs", "precompute_ref_batch_size") if getattr(values, name)]
    if given and {*names} <= REFERENCE_FREE_LOSSES:
        yield (given[0], "loss_type"), f"{given[0]}: loss_type {', '.join(names)} has no reference: drop it"


def dpo_smoothing_problems(values: Any) -> Iterator[Problem]:
    """Which of DPO's losses know label_smoothing, and how much of it."""
    names = listed(values.loss_type)
    smoothing = values.label_smoothing
    keys = ("label_smoothing", "loss_type")
    if smoothing and (others := [name for name in names if name not in SMOOTHED_LOSSES]):
        yield keys, f"label_smoothing acts in {', '.join(SMOOTHED_LOSSES)}, not in loss_type {others[0]!r}"
    if "exo_pair" in names and smoothing == 0:
        yield keys[::-1], "loss_type='exo_pair' needs label_smoothing above 0, for instance 1e-3"
    if "robust" in names and smoothing >= 0.5:
        yield keys, f"loss_type='robust' needs label_smoothing below 0.5, not {smoothing}"


def kto_problems(values: Any) -> Iterator[Problem]:
    """What KTOConfig refuses."""
    yield from one_of("loss_type", values.loss_type, UNPAIRED_LOSSES)
    for name in ("desirable_weight", "undesirable_weight"):
        value = getattr(values, name)
        if value != "auto" and not (isinstance(value, int | float) and 0 <= value <= LARGEST):
            yield (name,), f"{name}={value!r} is neither auto nor a number from 0 to 1e6"
    if values.desirable_weight == values.undesirable_weight == 0:
        yield ("undesirable_weight", "desirable_weight"), "both class weights are 0, which trains nothing"


def kd_problems(values: Any) -> Iterator[Problem]:
    """Yield what KDConfig rejects."""
    yield from one_of("divergence", values.divergence, DIVERGENCES)
    yield from _divergence_problems("divergence", values)
    if values.teacher.top_k_remainder != "tail":
        problem = f"teacher.top_k_remainder={values.teacher.top_k_remainder!r} is only valid with method opd. Set tail"
        yield ("teacher.top_k_remainder", "teacher"), problem


def teacher_option_problems(values: Any) -> Iterator[Problem]:
    """Yield what the options of teachers exclude."""
    options = values.teacher
    tokenizer = options.tokenizer
    prompt = options.prompt
    names = options.names or []
    if options.precompute and options.top_k is None:
        problem = "teacher.precompute requires teacher.top_k, the number of tokens that are kept for each position"
        yield ("teacher.precompute", "teacher"), problem
    if not all(name.strip() for name in names):
        yield ("teacher.names", "teacher"), f"teacher.names={names!r}: each name must be a text that is not empty"
        return
    for option, value in (("tokenizer", tokenizer), ("prompt", prompt)):
        keys = f"teacher.{option}", "teacher"
        if isinstance(value, dict) != bool(names) and value is not None:
            yield keys, f"teacher.{option} is a mapping by name exactly if teacher.names is given"
        elif isinstance(value, dict) and (unknown := sorted({*value} - {*names})):
            yield keys, f"teacher.{option}: {unknown[0]!r} is not one of teacher.names: {', '.join(names)}"
    if tokenizer and not hasattr(values, "rollouts"):
        reason = "cannot be combined with a teacher with its own tokenizer, which is compared by chunks of text"
        if options.merge_eos:
            yield ("teacher.merge_eos", "teacher"), f"teacher.merge_eos {reason}. Remove it"
        if values.temperature != 1:
            yield ("temperature",), f"temperature={values.temperature:g} {reason}. Remove it"


def teacher_section_problems(key: str, section: TeacherSection) -> Iterator[Problem]:
    """What makes no sense in a teacher's section, which is `key`: keys of another kind of teacher than it is."""
    loading = ("from_scratch", "dtype", "attn_implementation", "quantization", "adapter", "offload")
    plain = TeacherSection()
    given = {name for name in loading if getattr(section, name) != getattr(plain, name)}
    named = (given | ({"name_or_path"} if section.name_or_path else set())) - {"offload"}  # of another model
    if section.self is not None:
        yield from one_of(f"{key}.self", section.self, ("start", "ema"))
    if section.url and section.self:
        problem = f"{key}.self and {key}.url exclude each other: the student, or a server"
        yield (f"{key}.self", f"{key}.url"), problem
    elif section.url and given:
        name = min(given)
        yield (f"{key}.{name}",), f"{key}.{name}: the server at {key}.url has loaded the model: drop it"
    elif section.self and named:
        name = min(named)
        yield (f"{key}.{name}",), f"{key}.{name}: with {key}.self the student is the teacher: drop it"
    if section.url and not section.url.startswith(("http://", "https://")):
        yield (f"{key}.url",), f"{key}.url={section.url!r} is not a URL such as http://localhost:8000"
    if section.ema != plain.ema and section.self != "ema":
        yield (f"{key}.ema",), f"{key}.ema is of {key}.self: ema: set that, or drop it"
    if not 0 <= section.ema < 1:
        yield (f"{key}.ema",), f"{key}.ema={section.ema:g} is not in [0, 1)"
    if section.own_tokenizer and section.self:
        yield (f"{key}.own_tokenizer",), f"{key}.own_tokenizer: the student itself has no other tokens: drop it"
    if section.prompt is not None and (wrong := prompt_problem(section.prompt)):
        yield (f"{key}.prompt",), f"{key}.prompt: {wrong}"
    elif section.self and re.fullmatch(r"\s*\{\{-?\s*prompt\s*-?\}\}\s*", section.prompt or ""):
        problem = "behind its own prompt the student has nothing to learn from itself: add what it does not see"
        yield (f"{key}.prompt",), f"{key}.prompt: {problem}"


def prompt_problem(template: str) -> str | None:
    """What is wrong with the template of a teacher's prompt."""
    from jinja2 import TemplateSyntaxError, meta  # reports are read without it

    try:
        read = meta.find_undeclared_variables(parsed(template))
    except TemplateSyntaxError as error:
        return f"no valid Jinja template: {(error.message or '').rstrip('.')}"
    if not template.strip():
        return "is empty"
    if not read:
        return f"{template!r} names no column, so each row would have the same: write {{{{ prompt }}}} and what is more"
    return None


def teacher_problems(values: Any, section: TeacherSection) -> Iterator[Problem]:
    """Yield what the section of a teacher requires of a Config, or excludes in it."""
    if section.url and (found := served_teacher_problem(values)):
        yield found
    if section.self == "ema" and values.teacher.precompute:
        yield ("teacher.precompute", "teacher"), conflict(Feature.PRECOMPUTE, Feature.MOVING_AVERAGE)
    if section.self and not values.teacher.prompt and hasattr(values, "loss_type") and not values.reward:
        problem = "self: with its own prompt the student has nothing to learn from itself. Set prompt"
        yield ("teacher.prompt", "teacher"), problem


def served_teacher_problem(values: Any) -> Problem | None:
    """Return what a served teacher requires of a Config: it gives its top tokens, and those of the text, alone."""
    by_token = getattr(values, "loss_type", None) == POLICY_GRADIENT
    if values.temperature != 1 and (by_token or values.teacher.tokenizer):
        return ("temperature",), "a server gives log-probabilities at temperature 1: set temperature: 1"
    if values.teacher.tokenizer:
        if hasattr(values, "loss_type") and not by_token:
            problem = "with its own tokenizer it scores the text alone: set loss_type: policy_gradient"
            return ("loss_type",), problem
        return None
    if by_token or values.teacher.top_k:
        return None
    other = ", or loss_type: policy_gradient" if hasattr(values, "loss_type") else ""
    problem = f"a server gives a teacher's top tokens alone: set teacher: {{top_k: 20}}{other}"
    return ("teacher.top_k", "teacher"), problem


def _divergence_problems(key: str, values: Any) -> Iterator[Problem]:
    name = getattr(values, key)
    beta = values.beta
    if beta is None:
        return
    skewed = str(name).startswith("skew")
    if name != "jsd" and not skewed:
        problem = f"beta is only valid with {key} jsd, skew_forward_kl or skew_reverse_kl, not {name}"
        yield ("beta", key), f"{problem}: set {key}: jsd or drop beta"
    elif skewed and not 0 < beta < 1:
        yield ("beta",), f"beta={beta:g} is not in (0, 1)"
    elif not 0 <= beta <= 1:
        yield ("beta",), f"beta={beta:g} is not in [0, 1]"


def opd_problems(values: Any) -> Iterator[Problem]:
    """OPD's losses, and tokens left for its prompts."""
    yield from one_of("loss_type", values.loss_type, (POLICY_GRADIENT, *DIVERGENCES))
    yield from _divergence_problems("loss_type", values)
    if values.neftune_noise_alpha:
        yield ("neftune_noise_alpha",), "neftune_noise_alpha: rollouts are drawn without it and would be scored with it"
    longest = values.max_length
    rollout = values.max_completion_length
    if longest is not None and longest <= rollout:
        problem = (
            f"max_length={longest} leaves no prompt next to max_completion_length={rollout}: raise it, or lower that"
        )
        yield ("max_length", "max_completion_length"), problem


def opd_token_problems(values: Any) -> Iterator[Problem]:
    """Yield what excludes which tokens OPD trains, how much of the teacher, and the weights of tokens."""
    yield from _train_max_tokens_problems(values)
    yield from _top_k_problems(values)
    weights = values.token_weights
    if weights is not None and weights.requires_advantage and values.loss_type != POLICY_GRADIENT:
        problem = f"token_weights: {weights.kind} requires loss_type policy_gradient. Set that, or choose another"
        yield ("token_weights", "loss_type"), problem


def _train_max_tokens_problems(values: Any) -> Iterator[Problem]:
    tokens = values.rollouts.train_max_tokens
    longest = values.max_completion_length
    keys = "rollouts.train_max_tokens", "rollouts", "max_completion_length"
    if isinstance(tokens, dict):
        if {*tokens} != {"from", "to", "steps"} or min(tokens.values()) < 1:
            problem = f"rollouts.train_max_tokens={tokens!r} must have from and to, numbers of tokens, and steps"
            yield keys[:2], problem
        elif max(tokens["from"], tokens["to"]) > longest:
            yield keys, f"rollouts.train_max_tokens is above max_completion_length={longest}: raise that"
    elif tokens is not None and not 1 <= tokens <= longest:
        yield keys, f"rollouts.train_max_tokens={tokens} is not between 1 and max_completion_length={longest}"


def _top_k_problems(values: Any) -> Iterator[Problem]:
    options = values.teacher
    keys = "teacher.top_k_remainder", "teacher"
    yield from one_of("teacher.top_k_remainder", options.top_k_remainder, ("residual", "tail"))
    if options.top_k is None and options.top_k_remainder != "tail":
        yield keys, "teacher.top_k_remainder requires teacher.top_k: set that, or remove top_k_remainder"
    elif options.top_k_remainder == "residual" and values.loss_type != "reverse_kl":
        problem = f"top_k_remainder: residual is only valid with loss_type reverse_kl, not {values.loss_type}"
        yield (*keys, "loss_type"), f"teacher.{problem}. Set tail"


def opd_reward_problems(values: Any) -> Iterator[Problem]:
    """Yield what a reward in addition to the teacher requires."""
    if values.reward is None:
        return
    if values.loss_type != POLICY_GRADIENT:
        yield ("reward", "loss_type"), "reward is added to the advantage of loss_type policy_gradient: set that"
    if values.num_generations < 2:
        problem = "reward: rollouts of a prompt are compared with each other: set num_generations to 2 or more"
        yield ("reward", "num_generations"), problem
