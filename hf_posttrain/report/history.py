"""What a run logged, metric by metric.

    history_of   log_history of trainer_state.json -> {key: Series}
    thinned      a long series with fewer points and the same look
    smoothed     its running mean
    number       a value as the pages print it

A key that begins with eval_ was measured on evaluation data.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

_NOT_CURVES = ("step", "epoch", "total_flos", "train_loss", "num_input_tokens_seen")
SMOOTHED_FROM, STRETCHES = 150, 40
"""Points from which a series may get a running mean, and how many separate means it then has room for."""
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second")


@dataclass(frozen=True)
class Series:
    """The values of one key."""

    key: str
    """As logged, such as eval_loss."""
    steps: tuple[float, ...]
    """Optimizer steps, rising."""
    values: tuple[float, ...]
    """One for each step; not always finite."""

    @property
    def held_out(self) -> bool:
        """Was it measured on evaluation data?"""
        return self.key.startswith("eval_")

    @property
    def metric(self) -> str:
        """The key without eval_."""
        return self.key.removeprefix("eval_")

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def finite(self) -> list[tuple[float, float]]:
        """(step, value) where the value is finite."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]


History: TypeAlias = dict[str, Series]


def history_of(log: Iterable[dict[str, Any]]) -> History:
    """Every number that was logged at a step but times and totals; of two at one step the later."""
    found: dict[str, dict[float, float]] = {}
    for entry in log:
        for key, value in entry.items():
            if isinstance(value, int | float) and key not in _NOT_CURVES and not key.endswith(_TIMES):
                found.setdefault(key, {})[entry.get("step", 0)] = float(value)
    points = {key: sorted(values.items()) for key, values in found.items()}
    return {key: Series(key, *(tuple(part) for part in zip(*pairs, strict=True))) for key, pairs in points.items()}


def thinned(series: Series, limit: int) -> Series:
    """At most about `limit` points: the first, the last, and of each stretch between them its least and greatest.

    So a spike stays, and every point is one that was logged. What is not finite counts as the stretch's greatest.
    """
    count = len(series.steps)
    if count <= limit:
        return series
    width = 2 * (count - 2) / (limit - 2)
    kept, order = {0, count - 1}, [value if math.isfinite(value) else math.inf for value in series.values]
    for stretch in range((limit - 2) // 2):
        inside = range(1 + int(stretch * width), 1 + int((stretch + 1) * width))
        kept |= {min(inside, key=order.__getitem__), max(inside, key=order.__getitem__)}
    points = sorted(kept)
    return Series(series.key, tuple(series.steps[i] for i in points), tuple(series.values[i] for i in points))


def smoothed(series: Series) -> Series | None:
    """The mean of the finite values around each point; None for a series that is short, or has no noise to take out."""
    count, values = len(series.values), series.values
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(values, values[1:], values[2:], strict=False))
    if count < SMOOTHED_FROM or turns < count / 4:
        return None
    reach = count // (2 * STRETCHES)
    finite = [(value, 1) if math.isfinite(value) else (0.0, 0) for value in values]
    sums, counts = ([0, *accumulate(part)] for part in zip(*finite, strict=True))
    means = []
    for i in range(count):
        first, last = max(0, i - reach), min(count, i + reach + 1)
        known = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / known if known else math.nan)
    return Series(series.key, series.steps, tuple(means))


def number(value: Any) -> str:
    """Four significant digits: 0.4312, 1,234, 5e-07; text and None as they are ("none")."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
