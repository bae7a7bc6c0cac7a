"""What a run logged, metric by metric.

    history_of   log_history of trainer_state.json -> {key: Series}
    thinned      a long series with fewer points and the same look
    number       a value as the pages print it

A key that begins with eval_ was measured on evaluation data.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

_NOT_CURVES = ("step", "epoch", "total_flos", "train_loss", "num_input_tokens_seen")
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

    So a spike stays, and every point is one that was logged. A value that is not finite stays as the stretch's greatest.
    """
    count = len(series.steps)
    if count <= limit:
        return series
    width = 2 * (count - 2) / (limit - 2)
    kept = {0, count - 1}
    for stretch in range((limit - 2) // 2):
        inside = range(1 + int(stretch * width), 1 + int((stretch + 1) * width))
        kept |= {min(inside, key=lambda i: _order(series.values[i])), max(inside, key=lambda i: _order(series.values[i]))}
    order = sorted(kept)
    return Series(series.key, tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def number(value: Any) -> str:
    """Four significant digits: 0.4312, 1,234, 5e-07; text and None as they are ("none")."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
