"""The `rounds` section of a recipe: importable without torch."""

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
from ..trainer.renamed_options import warn_about_old_names, rename_options
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
    """Which of a prompt's judged answers are trained on, and as what."""

    take: Literal["best", "all"] | None = option(
        None,
        "best: the best answer, next to the worst where rows are pairs or labelled; all: every answer, or every pair, "
        "that is good enough. None: all where rows are labelled, else best.",
    )
    margin: float = option(
        0.0,
        "By how much the better of a pair must be better; of labelled rows, how far from the threshold a score must "
        "be.",
    )
    threshold: float | None = option(
        None,
        "Answers from this score on are good: those that are labelled so, or may be trained alone. None: 0.5 of "
        "exact_match; otherwise the mean of a prompt's own answers for labels, and none for answers that are trained "
        "alone.",
    )
    unfinished: bool = option(False, "May an answer that was cut at max_completion_length be a good one?")


@dataclass
class RoundsSection:
    """Each round: sample answers from the policy of now, judge them, make rows of them, train on these."""

    count: int | None = option(
        None, "How many rounds, each over all prompts; num_train_epochs is how often a round's rows are seen."
    )
    steps: int | None = option(
        None, "In place of count: optimizer steps of a round, whose prompts are those of as many steps. 1 is online."
    )
    num_generations: int = option(8, "Answers to each prompt.")
    temperature: float = option(1.0, "Of sampling.")
    max_completion_length: int = option(256, "Longest answer in tokens; the prompt has max_length minus this.")
    judge: JudgeSection = option(
        help="Who scores the answers: exact_match, or {by: ..., name: ...}.", default_factory=JudgeSection
    )
    pair: PairSection = option(help="Which answers are trained on.", default_factory=PairSection)
    reference: Literal["first", "round"] = option(
        "first", "The reference of methods with one: the model as the run began, or as each round begins."
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
        """What the trained weights depend on."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if name != "sampler"}
        found["sampler"] = self.sampler.fingerprint()["kind"]
        found["judge"] = self.judge.fingerprint()
        return found


def expand_rounds(given: Any) -> Any:
    """`rounds: 3` and `judge: exact_match` as the mappings that they stand for; anything else as it is."""
    if isinstance(given, int) and not isinstance(given, bool):
        return {"count": given}
    if isinstance(given, Mapping) and "judge" in given:
        return {**given, "judge": expand_judge(given["judge"])}
    return given


def make_section(given: Any) -> RoundsSection:
    """A section from what Python gives: a number of rounds, a mapping, or a section."""
    if isinstance(given, RoundsSection):
        return given
    options = _check_keys(_with_new_names(expand_rounds(given)), RoundsSection, "rounds")
    for name, kind in (("judge", JudgeSection), ("pair", PairSection)):
        if not isinstance(options.get(name), kind):
            options[name] = kind(**_check_keys(options.get(name, {}), kind, f"rounds.{name}"))
    return RoundsSection(**options)


def _with_new_names(given: Any) -> Any:
    """Return the options with their new names, and warn of old ones."""
    if not isinstance(given, Mapping):
        return given
    names = [field.name for field in dataclasses.fields(RoundsSection)]
    options, renamed = rename_options(given, {"sampler": SAMPLERS}, names)
    warn_about_old_names(renamed)
    return options


def _check_keys(given: Any, section: Any, where: str) -> dict[str, Any]:
    """The options of a section. Raises InputError for what has none, and for one that does not exist."""
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: {short_repr(given)} is neither a mapping of its keys nor a short form of one")
    fields = [field.name for field in dataclasses.fields(section)]
    if unknown := next((name for name in given if name not in fields), None):
        raise InputError(f"{where}: there is no {unknown!r}{name_hint(unknown, fields)}")
    return dict(given)


def rounds_problems(rounds: RoundsSection, kind: RowKind) -> Iterator[Problem]:
    """What is wrong with a section of a method that trains on rows of `kind`: names of its keys, and a sentence."""
    wrong = [*SAMPLERS.problems("sampler", rounds.sampler)]
    yield from wrong or sampler_problems(rounds)
    yield from limit_problems(LIMITS, rounds)
    if rounds.count is not None and rounds.steps is not None:
        yield ("steps", "count"), "steps excludes count: a round is over all prompts, or of so many steps: drop either"
    if rounds.num_generations < 2 and (kind.paired or rounds.judge.by == "url"):
        yield ("num_generations",), "num_generations: answers are compared with each other: set 2 or more"
    if rounds.temperature == 0 and rounds.num_generations > 1:
        yield ("temperature",), "temperature: 0 gives the same answer each time: set it above 0"
    for names, said in pair_problems(rounds.pair, kind):
        yield tuple(f"pair.{name}" for name in names), f"pair.{said}"
    yield from _range_problems(rounds, kind)
    for names, said in judge_problems(rounds.judge):
        yield tuple(f"judge.{name}" for name in names), f"judge.{said}"


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
    """Thresholds and margins that no score reaches, of judges whose scores are from 0 to 1."""
    by = rounds.judge.by
    pair = rounds.pair
    if by not in ("exact_match", "url"):
        return
    if pair.threshold is not None and not 0 < pair.threshold <= 1:
        problem = f"pair.threshold={pair.threshold:g}: scores of {by} are from 0 to 1: set it above 0 and up to 1"
        yield ("pair.threshold",), problem
    good = resolve_threshold(pair, by)
    most = max(good, 1 - good) if kind.labelled and good is not None else 1
    if pair.margin > most:
        problem = f"pair.margin={pair.margin:g}: scores of {by} are from 0 to 1: set it to {most:g} at most"
        yield ("pair.margin",), problem


def resolve_threshold(pair: PairSection, judge: str) -> float | None:
    """The score from which an answer is good. judge: the `by` of a JudgeSection."""
    return 0.5 if pair.threshold is None and judge == "exact_match" else pair.threshold


def number_of_rounds(rounds: RoundsSection, steps: int) -> int:
    """How many rounds over all prompts a run has in so many optimizer steps, of which each takes one at least."""
    return min(rounds.count or 1, steps)


def pair_problems(pair: PairSection, kind: RowKind) -> Iterator[Problem]:
    """The same of a `pair` section."""
    yield from limit_problems({"margin": NOT_NEGATIVE}, pair)
    if pair.margin and not (kind.paired or kind.labelled):
        yield ("margin",), "margin is of pairs and labels: set threshold for answers that are trained alone"
    if pair.threshold is not None and kind.paired:
        yield ("threshold",), "threshold is of labels and of answers that are trained alone: set margin for pairs"
