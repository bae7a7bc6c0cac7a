"""Judged answers of a prompt -> which of them are trained on, as pairs, labelled answers or answers alone."""

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
    """The rows of many prompts, and how many prompts gave none, by reason."""

    rows: list[list[Row]] = field(default_factory=list)  # of each prompt
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.rows))


def pair_up(
    kind: RowKind,
    answers: Sequence[Sequence[Hashable]],
    scores: Sequence[Sequence[float | None]],
    stopped: Sequence[Sequence[bool]],
    pair: PairSection,
    threshold: float | None,
) -> SelectedRows:
    """Rows of `kind` from the answers of each prompt: texts or ids, their scores, and whether they ended by themselves.

    Of equal answers the first is taken. threshold: `resolve_threshold`.
    """
    found = SelectedRows()
    for own, values, ended in zip(answers, scores, stopped, strict=True):
        rows, reason = _select_rows(kind, own, values, ended, pair, threshold)
        found.rows.append(rows)
        if reason:
            found.left_out[reason] += 1
    return found


def _select_rows(
    kind: RowKind,
    answers: Sequence[Hashable],
    scores: Sequence[float | None],
    stopped: Sequence[bool],
    pair: PairSection,
    threshold: float | None,
) -> tuple[list[Row], str]:
    """(rows, why there are none)."""
    scored = {number: score for number, score in enumerate(scores) if score is not None}
    # of equal answers the first one that ended, or else the first
    first: dict[Hashable, int] = {}
    for number in sorted(scored, key=lambda number: not stopped[number]):
        if answers[number]:
            first.setdefault(answers[number], number)
    if not first:
        return [], EMPTY if scored else UNJUDGED
    known = {number: scored[number] for number in sorted(first.values())}
    order = sorted(known, key=lambda number: -known[number])  # best first
    fit = [number for number in order if pair.unfinished or stopped[number]]  # may be good ones
    return _RULES[kind.paired, kind.labelled](order, fit, known, pair, threshold)


def _pairs(
    order: list[int], fit: list[int], known: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    if len(order) < 2:
        return [], ALL_SAME
    if known[order[0]] == known[order[-1]]:
        return [], ALIKE
    better = [(a, b) for a in fit for b in reversed(order) if known[a] > known[b]]
    if not better:
        return [], UNFINISHED
    wide = [(a, b) for a, b in better if known[a] - known[b] >= pair.margin]
    if not wide:
        return [], TOO_CLOSE
    return [Row(each) for each in (wide if pair.take == "all" else wide[:1])], ""


def _labels(
    order: list[int], fit: list[int], known: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    mean = threshold is None
    if mean and known[order[0]] == known[order[-1]]:  # their mean is rounded, and not always what they are
        return [], ALIKE
    edge = sum(known.values()) / len(known) if threshold is None else threshold
    high = [n for n in order if (known[n] > edge if mean else known[n] >= edge) and known[n] - edge >= pair.margin]
    good = [n for n in high if n in fit]
    bad = [n for n in reversed(order) if known[n] < edge and edge - known[n] >= pair.margin]
    if not good and not bad:
        return [], UNFINISHED if high else LABELS_ALIKE
    if pair.take == "best":
        good = good[:1]
        bad = bad[:1]
    return [*(Row((n,), True) for n in good), *(Row((n,), False) for n in bad)], ""


def _alone(
    order: list[int], fit: list[int], known: dict[int, float], pair: PairSection, threshold: float | None
) -> tuple[list[Row], str]:
    good = [number for number in order if threshold is None or known[number] >= threshold]
    if not good:
        return [], NOT_GOOD
    ended = [number for number in good if number in fit]
    if not ended:
        return [], UNFINISHED
    return [Row((number,)) for number in (ended if pair.take == "all" else ended[:1])], ""


_RULES = {(True, False): _pairs, (False, True): _labels, (False, False): _alone}
"""By whether rows are paired, and labelled."""
