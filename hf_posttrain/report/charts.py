"""Turns what a run logged into charts: which metrics share one, what a reader should see in it, its words and numbers.

drawing.py draws them. A metric that is not in KINDS (of compute_metrics, say) gets a chart of its own at the end.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

SPLITS = {"": "training", "eval_": "evaluation"}
"""How keys of the log begin: where their values were measured."""
_NOT_CURVES = ("step", "epoch", "total_flos", "train_loss", "num_input_tokens_seen")
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second")
SMOOTHED_FROM, STRETCHES = 150, 40
"""Points from which a series may get a running mean, and how many windows that do not overlap fit into it."""
ROWS = 60
"""Rows that a line adds to the table of numbers, at most."""


class Series(NamedTuple):
    """The values of one key of the log: optimizer steps, rising, and a value for each, not always finite."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> list[tuple[float, float]]:
        """(step, value) where the value is finite."""
        return [(step, value) for step, value in zip(*self, strict=True) if math.isfinite(value)]


History: TypeAlias = Mapping[str, Series]
"""Key of the log, such as eval_loss -> its values."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    label: str
    """Its name in the legend."""
    colour: int
    series: Series
    dash: str = ""
    """Class in style.css: "dashed" for evaluation, d0 to d3 to tell runs apart without colours; "" is solid."""

    @property
    def look(self) -> str:
        """Its classes in style.css."""
        return f"c{self.colour % 8} {self.dash}".strip()


@dataclass(frozen=True)
class Chart:
    """Lines over optimizer steps, under the heading `group`; `note` says what to look for."""

    group: str
    title: str
    note: str
    lines: tuple[Line, ...]


class _Kind(NamedTuple):
    group: str
    title: str
    metrics: Mapping[str, str]
    """Metric: its name in the legend."""
    note: str = ""


QUALITY, METHOD, LENGTHS, OPTIMISER, MACHINE, OTHER = (
    "Loss and quality", "What the method moves", "Answers", "Optimiser", "Machine", "Other metrics",
)  # fmt: skip
KINDS = (
    _Kind(QUALITY, "Loss", {"loss": "loss"}, "Evaluation loss that rises while training loss falls: overfitting."),
    _Kind(QUALITY, "Exact match", {"exact_match": "exact match"}, "Share of greedy answers that end right."),
    _Kind(QUALITY, "Token accuracy", {"mean_token_accuracy": "accuracy"}, "Share of trained tokens ranked first."),
    _Kind(QUALITY, "Reward accuracy", {"rewards/accuracies": "accuracy"},
          "Share of pairs whose chosen answer has the higher reward. Near 1 from the first steps: look for a leak."),
    _Kind(METHOD, "Rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
          "beta times the log-ratio to the reference. Both falling together: the policy forgets both answers."),
    _Kind(METHOD, "Reward margin", {"rewards/margins": "margin"}, "Chosen less rejected reward; it should rise."),
    _Kind(METHOD, "Log-probabilities", {"logps/chosen": "chosen", "logps/rejected": "rejected"},
          "Sum over an answer's tokens, under the policy."),
    _Kind(METHOD, "Chosen against the reference", {"logps/chosen_change": "change"},
          "Log-probability of chosen answers less the reference's. Well below 0: they become unlikely too."),
    _Kind(METHOD, "KL estimate", {"kl": "KL"}, "Distance from the reference. Always 0: the policy stands still."),
    _Kind(METHOD, "KL clamped at 0", {"kl_clamped": "share"}, "Share of steps whose estimate was negative."),
    _Kind(METHOD, "Delta", {"delta": "delta"}, "BCO's running mean of rewards."),
    _Kind(METHOD, "Divergence from teacher", {"distill/divergence": "divergence"}, "Per token; it should fall."),
    _Kind(METHOD, "Reverse KL to teacher", {"distill/reverse_kl": "reverse KL"}, "Per token; it should fall."),
    _Kind(METHOD, "Log-probability per token", {"logprob/student": "student", "logprob/teacher": "teacher"},
          "Of the student's own answers. The teacher's rises as they become better."),
    _Kind(METHOD, "Perplexity", {"perplexity/student": "student", "perplexity/teacher": "teacher"},
          "Of the student's own answers."),
    _Kind(METHOD, "Entropy", {"entropy": "entropy"}, "Of the policy, per token. A collapse to 0: it no longer varies."),
    _Kind(LENGTHS, "Rollout length", {"generation/length": "tokens"}, "Mean tokens of a sampled answer."),
    _Kind(LENGTHS, "Rollouts that ended", {"generation/stopped": "share"},
          "Share that stopped by themselves before the limit. Low: raise max_completion_length, or look at EOS."),
    _Kind(OPTIMISER, "Learning rate", {"learning_rate": "rate"}),
    _Kind(OPTIMISER, "Gradient norm", {"grad_norm": "norm"}, "Before clipping."),
    _Kind(MACHINE, "Tokens per second", {"tokens_per_second": "tokens/s"}, "Through the policy, all processes."),
    _Kind(MACHINE, "Peak memory", {"peak_memory_gib": "GiB"}, "GiB, of the process with the most."),
)  # fmt: skip
REPEATED = ("logprob/gap", "distill/advantage")
"""Metrics that are the difference of two others that are shown."""
TITLES = {metric: kind.title for kind in KINDS for metric in kind.metrics if len(kind.metrics) == 1}


def history_of(log: Iterable[dict[str, Any]]) -> History:
    """Every number of a log_history (trainer_state.json) but times and totals; of two at one step the later."""
    found: dict[str, dict[float, float]] = {}
    for entry in log:
        for key, value in entry.items():
            if isinstance(value, int | float) and key not in _NOT_CURVES and not key.endswith(_TIMES):
                found.setdefault(key, {})[entry.get("step", 0)] = float(value)
    return {key: Series(*zip(*sorted(values.items()), strict=True)) for key, values in found.items()}


def metrics_of(*histories: History) -> list[str]:
    """Names of all metrics, without eval_, the loss first."""
    names = {key.removeprefix("eval_") for history in histories for key in history}
    return sorted(names, key=lambda name: (name != "loss", name))


def charts(history: History) -> list[Chart]:
    """Charts of one run: training solid, evaluation dashed in the same colour."""
    found = []
    for kind in _kinds(history):
        lines = tuple(
            Line(f"{label}, {split}" if len(kind.metrics) > 1 else split, colour, history[begin + metric],
                 "dashed" if begin else "")
            for colour, (metric, label) in enumerate(kind.metrics.items())
            for begin, split in SPLITS.items() if begin + metric in history
        )  # fmt: skip
        if lines:
            found.append(Chart(kind.group, kind.title, kind.note, lines))
    return found


def shared_charts(histories: Mapping[str, History]) -> list[Chart]:
    """One chart for each metric and split that at least one run has: {name of a run: its history}."""
    found = []
    for kind in _kinds(*histories.values()):
        for (metric, label), (begin, split) in product(kind.metrics.items(), SPLITS.items()):
            lines = tuple(
                Line(name, number, history[begin + metric], f"d{number % 4}")
                for number, (name, history) in enumerate(histories.items()) if begin + metric in history
            )  # fmt: skip
            title = f"{kind.title}, {label}" if len(kind.metrics) > 1 else kind.title
            if lines:
                found.append(Chart(kind.group, f"{title} ({split})", kind.note, lines))
    return found


def _kinds(*histories: History) -> list[_Kind]:
    """The known kinds, and one for every other metric."""
    known = {metric for kind in KINDS for metric in kind.metrics} | {*REPEATED}
    return [*KINDS, *(_Kind(OTHER, name, {name: name}) for name in metrics_of(*histories) if name not in known)]


def by_group(found: Iterable[Chart]) -> list[tuple[str, list[Chart]]]:
    """Charts under their headings; both keep their order."""
    return [(group, list(members)) for group, members in groupby(found, lambda chart: chart.group)]


def averaged(found: Iterable[Chart]) -> bool:
    """Is there a line that is drawn as its running mean?"""
    return any(smoothed(line.series) for chart in found for line in chart.lines)


def thinned(series: Series, limit: int) -> Series:
    """At most `limit` points: the first, the last, and of each stretch between them its least and greatest.

    So a spike stays, and every point is one that was logged. What is not finite counts as the stretch's greatest.
    """
    count = len(series.steps)
    if count <= limit:
        return series
    order = np.nan_to_num(np.array(series.values), nan=math.inf, neginf=math.inf)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(1, count - 1), (limit - 2) // 2):
        kept |= {int(stretch[order[stretch].argmin()]), int(stretch[order[stretch].argmax()])}
    return Series(*zip(*((series.steps[i], series.values[i]) for i in sorted(kept)), strict=True))


def smoothed(series: Series) -> Series | None:
    """The mean of the finite values around each point; None for a series that is short, or has no noise to take out."""
    count, finite = len(series.values), np.isfinite(series.values)
    known = np.where(finite, series.values, 0.0)
    directions = np.sign(np.diff(known))
    if count < SMOOTHED_FROM or (directions[1:] * directions[:-1] < 0).sum() < count / 4:
        return None
    window = np.ones(2 * (count // (2 * STRETCHES)) + 1)
    sums, counts = np.convolve(known, window, "same"), np.convolve(finite, window, "same")
    means = np.divide(sums, counts, out=np.full(count, math.nan), where=counts > 0)
    return Series(series.steps, tuple(means.tolist()))


def words(chart: Chart) -> str:
    """What the lines do, for those who do not see them."""
    return " ".join(f"{line.label}: {_course(line.series)}." for line in chart.lines)


def _course(series: Series) -> str:
    finite = series.finite()
    if not finite:
        return "no finite value"
    points = {
        "from": finite[0], "to": finite[-1],
        "lowest": min(finite, key=lambda point: point[1]), "highest": max(finite, key=lambda point: point[1]),
    }  # fmt: skip
    said = [f"{name} {number(value)} at step {number(step)}" for name, (step, value) in points.items()]
    missing = len(series.steps) - len(finite)
    return ", ".join(said + ([f"{missing} values not finite"] if missing else []))


def numbers(chart: Chart) -> tuple[list[list[str]], bool]:
    """(rows of a table: the step, then each line's value there or ""; are all logged values in it?)."""
    few = [thinned(line.series, ROWS) for line in chart.lines]
    found = [dict(zip(*series, strict=True)) for series in few]
    rows = [
        [number(step), *(number(values[step]) if step in values else "" for values in found)]
        for step in sorted({step for values in found for step in values})
    ]
    return rows, all(len(kept.steps) == len(line.series.steps) for kept, line in zip(few, chart.lines, strict=True))


def number(value: Any) -> str:
    """A value as the pages print it, with four significant digits: 0.4312, 1,234, 5e-07; text stays, None is "none"."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
