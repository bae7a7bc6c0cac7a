"""The `rounds` section of a recipe. Importable without torch."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..capabilities import Feature
from ..data.row_schema import RowKind
from ..errors import InputError, name_hint, short_repr
from ..options import option
from ..rollouts.options import SAMPLERS, sampler_problems, uses_vllm
from ..trainer.limits import COUNT, NOT_NEGATIVE, Problem
from ..trainer.renamed_options import rename_options, warn_about_old_names
from ..trainer.rules import limit_problems
from .judges.config import JudgeSection, expand_judge, judge_problems

LIMITS = {
    "count": COUNT,
    "steps": COUNT,
    "num_generations": COUNT,
    "temperature": NOT_NEGATIVE,
    "max_completion_length": COUNT,
}


@dataclass
class PairSection:
    """Selection of the judged answers of a prompt that are trained on."""

    take: Literal["best", "all"] | None = option(
        None,
        "best takes the best answer, and also the worst if rows are pairs or labeled. all takes every answer or pair "
        "that is good enough. By default all for labeled rows, otherwise best.",
    )
    margin: float = option(
        0.0,
        "Smallest difference between the scores of a pair. For labeled rows, smallest distance of a score from the "
        "threshold.",
    )
    threshold: float | None = option(
        None,
        "Lowest score of a good answer, which is labeled as desirable or may be trained alone. By default 0.5 for "
        "exact_match. For other judges labels use the mean score of the prompt's answers, and answers that are trained "
        "alone have no threshold.",
    )
    unfinished: bool = option(
        False, "Whether an answer that was truncated at max_completion_length may be a good answer."
    )


@dataclass
class RoundsSection:
    """Rounds of sampling answers from the current policy, judging them, and training on rows made of them."""

    count: int | None = option(
        None,
        "Number of rounds, each over all prompts. num_train_epochs is the number of passes over the rows of a round. "
        "By default 3, unless steps is set.",
    )
    steps: int | None = option(
        None,
        "Number of optimizer steps of a round, in place of count. A round has the prompts of as many steps. 1 is "
        "online training.",
    )
    num_generations: int = option(8, "Number of answers to each prompt.")
    temperature: float = option(1.0, "Sampling temperature.")
    max_completion_length: int = option(
        256, "Largest number of tokens of an answer. A prompt may have max_length minus this."
    )
    judge: JudgeSection = option(
        help="Judge that scores the answers: exact_match, or {by: ..., name: ...}.", default_factory=JudgeSection
    )
    pair: PairSection = option(help="Selection of the answers that are trained on.", default_factory=PairSection)
    reference: Literal["first", "round"] = option(
        "first",
        "Reference of methods with one: the model at the start of the run (first), or at the start of each round "
        "(round).",
    )
    sampler: Any = option(
        "policy",
        "Program that samples the answers: policy, vllm_colocate or vllm_server, or {kind, options}. vLLM gets the "
        "weights once in each round.",
    )

    def __post_init__(self) -> None:
        if not any(SAMPLERS.problems("sampler", self.sampler)):
            self.sampler = SAMPLERS.build("sampler", self.sampler)
        if self.count is None and self.steps is None:
            self.count = 3

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that the trained weights depend on."""
        options = {name: value for name, value in dataclasses.asdict(self).items() if name != "sampler"}
        options["sampler"] = self.sampler.fingerprint()
        options["judge"] = self.judge.fingerprint()
        return options


def expand_rounds(value: Any) -> Any:
    """Return the mappings for the short forms `rounds: 3` and `judge: exact_match`, and other values unchanged."""
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return {"count": int(value)}
    if isinstance(value, Mapping) and "judge" in value:
        return {**value, "judge": expand_judge(value["judge"])}
    return value


def make_section(value: object) -> RoundsSection:
    """Return the section for a number of rounds, a mapping, or a section."""
    if isinstance(value, RoundsSection):
        return value
    options = _check_keys(_with_new_names(expand_rounds(value)), RoundsSection, "rounds")
    for name, kind in (("judge", JudgeSection), ("pair", PairSection)):
        if not isinstance(options.get(name), kind):
            options[name] = kind(**_check_keys(options.get(name, {}), kind, f"rounds.{name}"))
    return RoundsSection(**options)


def _with_new_names(value: Any) -> Any:
    """Return the options with their new names, and warn about old ones."""
    if not isinstance(value, Mapping):
        return value
    names = [field.name for field in dataclasses.fields(RoundsSection)]
    options, renamed = rename_options(value, {"sampler": SAMPLERS}, names)
    warn_about_old_names(renamed)
    return options


def _check_keys(value: object, section: type, where: str) -> dict[str, Any]:
    """Return the options of a section. Raises InputError for a value that is no mapping, and for an unknown key."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {short_repr(value)} must be a mapping of its keys, or a short form of one")
    fields = [field.name for field in dataclasses.fields(section)]
    if unknown := next((name for name in value if name not in fields), None):
        raise InputError(f"unknown key {where}.{unknown}{name_hint(unknown, fields)}")
    return dict(value)


def rounds_problems(rounds: RoundsSection, kind: RowKind) -> Iterator[Problem]:
    """Yield the problems of a section for a method that trains on rows of `kind`."""
    problems = [*SAMPLERS.problems("sampler", rounds.sampler)]
    yield from problems or sampler_problems(rounds)
    yield from limit_problems(LIMITS, rounds)
    if rounds.count is not None and rounds.steps is not None:
        yield ("steps", "count"), "steps cannot be combined with count. Remove one of the two"
    if rounds.num_generations < 2 and (kind.paired or rounds.judge.by == "url"):
        problem = "num_generations must be at least 2, because answers are compared with each other"
        yield ("num_generations",), problem
    if rounds.temperature == 0 and rounds.num_generations > 1:
        yield ("temperature",), "temperature must be above 0, because 0 gives the same answer each time"
    for names, problem in pair_problems(rounds.pair, kind):
        yield tuple(f"pair.{name}" for name in names), f"pair.{problem}"
    yield from _range_problems(rounds, kind)
    for names, problem in judge_problems(rounds.judge):
        yield tuple(f"judge.{name}" for name in names), f"judge.{problem}"


def rounds_features(rounds: RoundsSection) -> dict[Feature, str]:
    """Return the features of a section, each with its key."""
    features = {Feature.ROUNDS: "rounds"}
    if uses_vllm(rounds):
        features[Feature.VLLM] = "rounds.sampler"
    if rounds.sampler.prefetch:
        features[Feature.PREFETCH] = "rounds.sampler"
    if rounds.judge.by not in ("exact_match", "function"):
        features[Feature.MODEL_JUDGE] = "rounds.judge"
    return features


def _range_problems(rounds: RoundsSection, kind: RowKind) -> Iterator[Problem]:
    """Yield thresholds and margins that no score reaches, for judges with scores from 0 to 1."""
    by = rounds.judge.by
    pair = rounds.pair
    if by not in ("exact_match", "url"):
        return
    reason = f"because scores of {by} are from 0 to 1"
    if pair.threshold is not None and not 0 < pair.threshold <= 1:
        yield ("pair.threshold",), f"pair.threshold={pair.threshold:g} must be above 0 and at most 1, {reason}"
    threshold = resolve_threshold(pair, by)
    largest = max(threshold, 1 - threshold) if kind.labeled and threshold is not None else 1
    if pair.margin > largest:
        yield ("pair.margin",), f"pair.margin={pair.margin:g} must be at most {largest:g}, {reason}"


def resolve_threshold(pair: PairSection, judge: str) -> float | None:
    """Return the lowest score of a good answer, with the default for a judge resolved.

    judge: the `by` of a JudgeSection.
    """
    return 0.5 if pair.threshold is None and judge == "exact_match" else pair.threshold


def number_of_rounds(rounds: RoundsSection, steps: int) -> int:
    """Return how many rounds over all prompts a run of `steps` optimizer steps has. Each takes at least one step."""
    return min(rounds.count or 1, steps)


def pair_problems(pair: PairSection, kind: RowKind) -> Iterator[Problem]:
    """Yield the problems of a `pair` section for a method that trains on rows of `kind`."""
    yield from limit_problems({"margin": NOT_NEGATIVE}, pair)
    if pair.margin and not (kind.paired or kind.labeled):
        problem = "margin is only valid with pairs and labels. Set threshold for answers that are trained alone"
        yield ("margin",), problem
    if pair.threshold is not None and kind.paired:
        problem = "threshold is only valid with labels, and with answers that are trained alone. Set margin for pairs"
        yield ("threshold",), problem
