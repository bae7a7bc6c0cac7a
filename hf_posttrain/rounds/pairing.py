"""Selection of a prompt's judged answers to train on, as pairs, as labeled answers or as single answers."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..data.row_schema import RowKind
from .config import PairSection

ALIKE = "answers that differ score alike"
TOO_CLOSE = "the better one is better by less than the margin"
NOT_GOOD = "no answer reaches the threshold"
ALL_SAME = "all answers are the same"
UNJUDGED = "no score"
UNFINISHED = "the good answers did not end"
EMPTY = "empty answers"
LABELS_ALIKE = "no score is far enough from the threshold"


class Row(NamedTuple):
    """A row to train on, by the numbers of its answers."""

    answers: tuple[int, ...]  # the better one first
    label: bool | None = None


@dataclass
class SelectedRows:
    """The rows of many prompts, and the number of prompts without a row, by reason."""

    rows: list[list[Row]] = field(default_factory=list)  # of each prompt
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.rows))


def pair_up(
    kind: RowKind,
    answers: Sequence[Sequence[Hashable]],
    scores: Sequence[Sequence[float | None]],
    stopped: Sequence[Sequence[bool]],
    pair: PairSection,
    threshold: float | None,
) -> SelectedRows:
    """Return the rows to train on from the answers of each prompt.

    The first of several equal answers is used.

    Args:
        kind: Kind of rows that the method trains on.
        answers: Answers of each prompt, as texts or ids.
        scores: Their scores; None for an answer that was not judged.
        stopped: Whether each of them ended before it was truncated.
        pair: Options of the selection.
        threshold: Lowest score of a good answer, from `resolve_threshold`.
    """
    selected = SelectedRows()
    for answers_of_prompt, scores_of_prompt, stopped_of_prompt in zip(answers, scores, stopped, strict=True):
        rows, reason = _select_rows(kind, answers_of_prompt, scores_of_prompt, stopped_of_prompt, pair, threshold)
        selected.rows.append(rows)
        if reason:
            selected.left_out[reason] += 1
    return selected


def _select_rows(
    kind: RowKind,
    answers: Sequence[Hashable],
    scores: Sequence[float | None],
    stopped: Sequence[bool],
    pair: PairSection,
    threshold: float | None,
) -> tuple[list[Row], str]:
    """Return the rows of a prompt, and the reason if there are none."""
    scored = {number: score for number, score in enumerate(scores) if score is not None}
    # of equal answers the first one that ended, or else the first
    first: dict[Hashable, int] = {}
    for number in sorted(scored, key=lambda number: not stopped[number]):
        if answers[number]:
            first.setdefault(answers[number], number)
    if not first:
        return [], EMPTY if scored else UNJUDGED
    known = {number: scored[number] for number in sorted(first.values())}
    order = sorted(known, key=known.__getitem__, reverse=True)  # best first
    eligible = [number for number in order if pair.unfinished or stopped[number]]  # may be good ones
    return _RULES[kind.paired, kind.labeled](order, eligible, known, pair, threshold)


def _pairs(
    order: list[int], eligible: list[int], scores: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    """Return pairs of a better and a worse answer."""
    if len(order) < 2:
        return [], ALL_SAME
    if scores[order[0]] == scores[order[-1]]:
        return [], ALIKE
    candidates = [(a, b) for a in eligible for b in reversed(order) if scores[a] > scores[b]]
    if not candidates:
        return [], UNFINISHED
    pairs = [(a, b) for a, b in candidates if scores[a] - scores[b] >= pair.margin]
    if not pairs:
        return [], TOO_CLOSE
    return [Row(answers) for answers in (pairs if pair.take == "all" else pairs[:1])], ""


def _labels(
    order: list[int], eligible: list[int], scores: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    """Return answers that are labeled good or bad. Without a threshold the mean score of the answers divides them."""
    by_mean = threshold is None
    if by_mean and scores[order[0]] == scores[order[-1]]:  # the mean of equal scores may be rounded to another number
        return [], ALIKE
    edge = sum(scores.values()) / len(scores) if threshold is None else threshold
    high = [
        n for n in order if (scores[n] > edge if by_mean else scores[n] >= edge) and scores[n] - edge >= pair.margin
    ]
    good = [n for n in high if n in eligible]
    bad = [n for n in reversed(order) if scores[n] < edge and edge - scores[n] >= pair.margin]
    if not good and not bad:
        return [], UNFINISHED if high else LABELS_ALIKE
    if pair.take == "best":
        good = good[:1]
        bad = bad[:1]
    return [*(Row((n,), True) for n in good), *(Row((n,), False) for n in bad)], ""


def _singles(
    order: list[int], eligible: list[int], scores: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    """Return good answers that are trained alone."""
    good = [number for number in order if threshold is None or scores[number] >= threshold]
    if not good:
        return [], NOT_GOOD
    ended = [number for number in good if number in eligible]
    if not ended:
        return [], UNFINISHED
    return [Row((number,)) for number in (ended if pair.take == "all" else ended[:1])], ""


_RULES = {(True, False): _pairs, (False, True): _labels, (False, False): _singles}
"""(whether rows are paired, whether they are labeled) -> function that selects rows."""
