"""What the options of single methods exclude: losses and their options, and rollouts by vLLM.

Each rule takes an object with the fields of the method's Config, as given, and yields problems, without torch. A test
holds the names of losses equal to the tables of functions in `losses`.
"""

import re
from collections.abc import Iterator
from typing import Any

from ..data.template import parsed
from ..models.section import TeacherSection
from ..trainer.method import LARGEST, Problem
from ..trainer.rules import one_of, vllm_problems
from ..watch.symptoms import listed

PAIRED = (
    "sigmoid", "ipo", "ipo_sum", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "sft", "simpo", "orpo",
)  # fmt: skip
REFERENCE_FREE = {"sft", "simpo", "orpo"}
LABEL_SMOOTHED = ("exo_pair", "robust", "sigmoid")
UNPAIRED = ("kto", "apo_zero_unpaired", "bco")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd")
POLICY_GRADIENT = "policy_gradient"
TOKEN_WEIGHTS: dict[str, dict[str, tuple[float, float]]] = {
    "cumulative": {"gain": (0.0, 100.0)}, "top_share": {"share": (0.0, 1.0)}, "extremes": {"share": (0.0, 0.5)},
    "bounded": {}, "sign": {},
}  # fmt: skip
"""Name -> its options, each with the range that it must be in, its lower end excluded."""
OF_ADVANTAGE = ("bounded", "sign")
"""Those that weigh the advantage of the policy gradient, and so no other loss."""


def sft(values: Any) -> Iterator[Problem]:
    """What SFTConfig refuses."""
    if values.packing and values.max_length is None:
        yield ("packing", "max_length"), "packing needs max_length, the length of a packed row"


def dpo_losses(values: Any) -> Iterator[Problem]:
    """Names and number of DPO's losses."""
    names, weights = listed(values.loss_type), values.loss_weights
    for name in names:
        yield from one_of("loss_type", name, PAIRED)
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
    if given and {*names} <= REFERENCE_FREE:
        yield (given[0], "loss_type"), f"{given[0]}: loss_type {', '.join(names)} has no reference: drop it"


def dpo_smoothing(values: Any) -> Iterator[Problem]:
    """Which of DPO's losses know label_smoothing, and how much of it."""
    names, smoothing, keys = listed(values.loss_type), values.label_smoothing, ("label_smoothing", "loss_type")
    if smoothing and (others := [name for name in names if name not in LABEL_SMOOTHED]):
        yield keys, f"label_smoothing acts in {', '.join(LABEL_SMOOTHED)}, not in loss_type {others[0]!r}"
    if "exo_pair" in names and smoothing == 0:
        yield keys[::-1], "loss_type='exo_pair' needs label_smoothing above 0, for instance 1e-3"
    if "robust" in names and smoothing >= 0.5:
        yield keys, f"loss_type='robust' needs label_smoothing below 0.5, not {smoothing}"


def kto(values: Any) -> Iterator[Problem]:
    """What KTOConfig refuses."""
    yield from one_of("loss_type", values.loss_type, UNPAIRED)
    for name in ("desirable_weight", "undesirable_weight"):
        value = getattr(values, name)
        if value != "auto" and not (isinstance(value, int | float) and 0 <= value <= LARGEST):
            yield (name,), f"{name}={value!r} is neither auto nor a number from 0 to 1e6"
    if values.desirable_weight == values.undesirable_weight == 0:
        yield ("undesirable_weight", "desirable_weight"), "both class weights are 0, which trains nothing"


def kd(values: Any) -> Iterator[Problem]:
    """What KDConfig refuses."""
    yield from one_of("divergence", values.divergence, DIVERGENCES)
    yield from _of_divergence("divergence", values)
    if values.teacher_top_k is not None and values.precompute_teacher_top_k is not None:
        yield ("teacher_top_k", "precompute_teacher_top_k"), "teacher_top_k is online: drop it, or the other"


def taught(values: Any) -> Iterator[Problem]:
    """What options for teachers exclude."""
    own, prompt, names = values.teacher_tokenizer, values.teacher_prompt, values.teacher_names or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        yield ("teacher_names",), f"teacher_names={names!r}: a list of names is wanted, each a text"
        return
    for option, value in (("teacher_tokenizer", own), ("teacher_prompt", prompt)):
        if isinstance(value, dict) != bool(names) and value is not None:
            yield (option, "teacher_names"), f"{option} has a value for each of teacher_names, and one without them"
        elif isinstance(value, dict) and (unknown := sorted({*value} - {*names})):
            yield (option,), f"{option}: {unknown[0]!r} is none of teacher_names: {', '.join(names)}"
    if own is not None and names:
        yield ("teacher_tokenizer", "teacher_names"), "of several teachers none may have a tokenizer of its own yet"
    if not (own or prompt or names):
        return
    what = "a teacher with a prompt of its own" if prompt else "one of several teachers"
    what = "a teacher with its own tokenizer" if own else what
    if own and getattr(values, "rollouts", "live") != "live":
        yield ("rollouts",), f"rollouts: {what} estimates from tokens that the policy of now sampled: set live"
    elif getattr(values, "rollouts", "live") == "replay":
        yield ("rollouts",), f"rollouts: replay keeps no rows, which {what} needs: set live or frozen"
    if prompt or own:
        for option, refused in (("assistant_only_loss", True), ("completion_only_loss", False)):
            if getattr(values, option, None) is refused:
                yield (option,), f"{option}={refused}: {what} reads another text before the answer: drop it"
    if own:
        yield from _of_own_tokenizer(values)


def _of_own_tokenizer(values: Any) -> Iterator[Problem]:
    """What a teacher with a tokenizer of its own excludes."""
    only = "a teacher with its own tokenizer is compared by chunks of text"
    for option, usual in (("teacher_top_k", None), ("precompute_teacher_top_k", None),
                          ("reward", None), ("lmbda", 1.0), ("rollout_ahead", 0)):  # fmt: skip
        if getattr(values, option, usual) != usual:
            yield (option,), f"{option}: {only}: drop it"
    if not hasattr(values, "loss_type") and values.one_stop_outcome:
        yield ("one_stop_outcome",), f"one_stop_outcome: {only}, and the end is one in any case: drop it"
    if not hasattr(values, "loss_type") and values.temperature != 1:
        yield ("temperature",), f"temperature={values.temperature:g}: {only}, of which none is known but at 1: drop it"
    if getattr(values, "token_weights", None) and named_options(values.token_weights)[0] in OF_ADVANTAGE:
        yield ("token_weights",), f"token_weights: {only}: choose another"


def section_problems(key: str, section: TeacherSection) -> Iterator[Problem]:
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
    """What a teacher's section wants of a Config, or excludes in it."""
    if section.url and (found := served_problem(values)):
        yield found
    if section.self == "ema" and values.precompute_teacher_top_k is not None:
        yield ("precompute_teacher_top_k",), "self: ema moves on, and its scores would be those of the start: drop it"
    if section.self and not values.teacher_prompt and hasattr(values, "loss_type") and not values.reward:
        problem = "self: behind its own prompt the student has nothing to learn from itself: set prompt"
        yield ("teacher_prompt",), problem


def served_problem(values: Any) -> Problem | None:
    """What a served teacher wants of a Config: it gives its top tokens, and those of the text, alone."""
    by_token = getattr(values, "loss_type", None) == POLICY_GRADIENT
    if values.temperature != 1 and (by_token or values.teacher_tokenizer):
        return ("temperature",), "a server gives log-probabilities at temperature 1: set temperature: 1"
    if values.teacher_tokenizer:
        if hasattr(values, "loss_type") and not by_token:
            problem = "with its own tokenizer it scores the text alone: set loss_type: policy_gradient"
            return ("loss_type",), problem
        return None
    if by_token or values.teacher_top_k or values.precompute_teacher_top_k:
        return None
    other = ", or loss_type: policy_gradient" if hasattr(values, "loss_type") else ""
    return ("teacher_top_k",), f"a server gives a teacher's top tokens alone: set teacher_top_k (20){other}"


def _of_divergence(key: str, values: Any) -> Iterator[Problem]:
    name, beta, alpha = getattr(values, key), values.beta, values.skew_alpha
    if beta is not None and name != "jsd":
        yield ("beta", key), f"beta is the interpolation of divergence jsd, not of {name}: set {key}: jsd or drop beta"
    if beta is not None and not 0 <= beta <= 1:
        yield ("beta",), f"beta={beta:g} is not in [0, 1]"
    if alpha != 0.1 and not str(name).startswith("skew"):
        yield ("skew_alpha", key), f"skew_alpha is of skew_forward_kl and skew_reverse_kl, not of {name}: drop it"
    if not 0 < alpha < 1:
        yield ("skew_alpha",), f"skew_alpha={alpha:g} is not in (0, 1)"


def opd(values: Any) -> Iterator[Problem]:
    """OPD's losses, and tokens left for its prompts."""
    yield from one_of("loss_type", values.loss_type, (POLICY_GRADIENT, *DIVERGENCES))
    yield from _of_divergence("loss_type", values)
    if values.lmbda < 1 and values.loss_type == POLICY_GRADIENT:
        problem = "lmbda below 1 needs a loss_type over the whole vocabulary: policy_gradient is biased on data"
        yield ("lmbda", "loss_type"), problem
    if values.neftune_noise_alpha:
        yield ("neftune_noise_alpha",), "neftune_noise_alpha: rollouts are drawn without it and would be scored with it"
    longest, rollout = values.max_length, values.max_completion_length
    if longest is not None and longest <= rollout:
        problem = (
            f"max_length={longest} leaves no prompt next to max_completion_length={rollout}: raise it, or lower that"
        )
        yield ("max_length", "max_completion_length"), problem


def named_options(asked: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What `token_weights` asks for: a name, and options."""
    if isinstance(asked, str):
        return asked, {}
    return asked.get("name", ""), {key: value for key, value in asked.items() if key != "name"}


def opd_tokens(values: Any) -> Iterator[Problem]:
    """Which tokens OPD trains, with how much of the teacher, and how much each counts."""
    yield from _of_horizon(values)
    yield from _of_teacher_top_k(values)
    yield from _of_token_weights(values) if values.token_weights is not None else ()


def _of_horizon(values: Any) -> Iterator[Problem]:
    asked, most = values.horizon, values.max_completion_length
    if isinstance(asked, dict):
        keys = ("from", "to", "steps")
        if {*asked} != {*keys} or not all(type(asked[key]) is int and asked[key] > 0 for key in keys):
            yield ("horizon",), f"horizon={asked!r}: from, to and steps are wanted, numbers of tokens and of steps"
        elif max(asked["from"], asked["to"]) > most:
            yield ("horizon", "max_completion_length"), f"horizon goes beyond max_completion_length={most}: raise that"
    elif asked is not None and not (type(asked) is int and 1 <= asked <= most):
        problem = f"horizon={asked!r} is not between 1 and max_completion_length={most}"
        yield ("horizon", "max_completion_length"), problem


def _of_teacher_top_k(values: Any) -> Iterator[Problem]:
    yield from one_of("teacher_rest", values.teacher_rest, ("residual", "tail"))
    if values.teacher_top_k is None and values.teacher_rest != "tail":
        problem = "teacher_rest is of teacher_top_k: set that, or drop teacher_rest"
        yield ("teacher_rest", "teacher_top_k"), problem
    elif values.teacher_top_k is not None and values.loss_type == POLICY_GRADIENT:
        yield ("teacher_top_k", "loss_type"), "teacher_top_k: policy_gradient needs the sampled token alone: drop it"
    elif values.teacher_top_k is not None and values.teacher_rest == "residual":
        if values.loss_type != "reverse_kl":
            problem = f"teacher_rest: residual is of loss_type reverse_kl, not {values.loss_type}: set tail"
            yield ("teacher_rest", "loss_type"), problem
        for option, usual in (("rollouts", "live"), ("lmbda", 1), ("rollout_ahead", 0)):
            if getattr(values, option) != usual:
                problem = "teacher_rest: residual is of tokens that the policy of now sampled: set tail"
                yield ("teacher_rest", option), f"{problem}, or {option}: {usual}"


def _of_token_weights(values: Any) -> Iterator[Problem]:
    if not isinstance(values.token_weights, str | dict):
        yield ("token_weights",), f"token_weights={values.token_weights!r}: name it, or give {{name, option: number}}"
        return
    name, options = named_options(values.token_weights)
    yield from one_of("token_weights", name, tuple(TOKEN_WEIGHTS))
    for key, value in options.items() if name in TOKEN_WEIGHTS else ():
        low, high = TOKEN_WEIGHTS[name].get(key, (0.0, 0.0))
        if not isinstance(value, int | float) or not low < value <= high:
            ranges = [f"{each} above {least:g} and up to {top:g}" for each, (least, top) in TOKEN_WEIGHTS[name].items()]
            known = ", ".join(ranges) or "no options"
            yield ("token_weights",), f"token_weights: {key}={value!r}: {name} has {known}"
    if name in OF_ADVANTAGE and values.loss_type != POLICY_GRADIENT:
        problem = f"token_weights: {name} weighs the advantage of loss_type policy_gradient: set that, or another"
        yield ("token_weights", "loss_type"), problem
    elif name in OF_ADVANTAGE and values.reward:
        problem = f"token_weights: {name} is of the advantage of a token alone, to which reward adds: drop one of both"
        yield ("token_weights", "reward"), problem


def opd_reward(values: Any) -> Iterator[Problem]:
    """OPD's reward beside the teacher."""
    reward = values.reward
    if reward is None:
        return
    if isinstance(reward, dict) and {"when", "start"} & {*reward}:
        yield ("reward",), "reward: `when` and `start` were removed: the reward is added in every step. Remove them."
        return
    if not isinstance(reward, dict) or not isinstance(reward.get("function"), str) or {*reward} - {"function", "coef"}:
        yield ("reward",), f"reward={reward!r} requires `function`, and may have `coef`"
        return
    coef = reward.get("coef", 1.0)
    if not isinstance(coef, int | float) or not 0 < coef <= LARGEST:
        yield ("reward",), f"reward: coef={coef!r} is not a number above 0, and at most 1e6"
    if values.loss_type != POLICY_GRADIENT:
        yield ("reward", "loss_type"), "reward is added to the advantage of loss_type policy_gradient: set that"
    if values.num_generations < 2:
        problem = "reward: rollouts of a prompt are compared with each other: set num_generations to 2 or more"
        yield ("reward", "num_generations"), problem


def opd_rollouts(values: Any) -> Iterator[Problem]:
    """What samples OPD's rollouts, and whose options are given."""
    yield from one_of("rollout", values.rollout, ("transformers", "vllm"))
    yield from one_of("rollouts", values.rollouts, ("live", "frozen", "replay"))
    if values.rollouts != "live" and values.lmbda == 0:
        yield ("rollouts", "lmbda"), f"lmbda: 0 samples no rollouts: drop rollouts: {values.rollouts}, or raise lmbda"
    if values.rollouts != "live" and values.loss_type == POLICY_GRADIENT:
        problem = f"policy_gradient is biased on rollouts: {values.rollouts}: set live, or a loss over the vocabulary"
        yield ("rollouts", "loss_type"), problem
    if values.precompute_teacher_top_k is not None:
        problem = _of_precomputed(values)
        yield from [(("precompute_teacher_top_k",), f"precompute_teacher_top_k {problem}")] if problem else []
    if values.rollouts != "replay" and (values.fresh != 0.25 or values.replay_windows != 16):
        name = "fresh" if values.fresh != 0.25 else "replay_windows"
        yield (name, "rollouts"), f"{name} is an option of rollouts: replay: set that, or drop {name}"
    yield from vllm_problems(values)
    if values.rollout_ahead not in (0, 1):
        yield ("rollout_ahead",), f"rollout_ahead={values.rollout_ahead}: 0, or 1 for the next step's rollouts"
    if values.rollout_ahead and values.rollout != "vllm":
        problem = "rollout_ahead is an option of rollout: vllm: set that, or drop rollout_ahead"
        yield ("rollout_ahead", "rollout"), problem
    elif values.rollout_ahead and (values.vllm_mode != "server" or values.rollouts != "live"):
        problem = "rollout_ahead: a server samples live rollouts while this step trains: set vllm_mode: server"
        yield ("rollout_ahead", "vllm_mode"), problem


def _of_precomputed(values: Any) -> str:
    """What is wrong with `precompute_teacher_top_k` of OPD, or nothing."""
    if values.rollouts != "frozen":
        return "scores rollouts once, and those of rollouts: frozen alone stay: set that, or teacher_top_k"
    if values.loss_type == POLICY_GRADIENT:
        return "is of a loss over the vocabulary: choose one, or drop it"
    if values.lmbda < 1:
        return "scores rollouts, and lmbda below 1 trains on completions of the data too: set lmbda: 1"
    return "takes the place of teacher_top_k: drop that" if values.teacher_top_k is not None else ""
