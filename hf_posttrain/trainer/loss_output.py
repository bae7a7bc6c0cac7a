"""What losses and metrics are averaged over: the units of a micro-batch, each counted once or not at all.

A method returns one loss a unit, a token or an example, as `Losses`. Nothing is averaged twice: sums and counts travel
until one division is made over all ranks and the whole accumulation window or logging interval.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass
class Losses:
    """What a method says of one micro-batch."""

    values: Tensor  # [units] loss of each token or example, not reduced
    weights: Tensor  # [units] 1, or 0 for what must not count: of `PostTrainer.weights`, by which a step is divided
    # name -> (values, weights; None: those of the loss): averaged exactly, over ranks and the logging interval
    metrics: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    router_logits: Any = None  # router logits of each layer of a mixture of experts whose auxiliary loss is on
    predictions: Tensor | None = None  # what `compute_metrics` gets, [B, ...]; None: full logits and shift_labels
    labels: Tensor | None = None  # what it gets as label_ids, [B, ...]

    @property
    def summed(self) -> Tensor:
        """The losses of all units that count, a scalar. NaN at weight 0 shows: its gradient would be NaN too."""
        return (self.values * self.weights).sum()


def sum_and_count(values: Tensor, weights: Tensor) -> Tensor:
    """[sum of values x weights, sum of weights] of one shape; weight 0 leaves a value out even where it is NaN."""
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


class MetricAverager:
    """Named (sum, count) pairs. Every rank adds the same names in the same order; counts may be zero."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.largest: set[str] = set()

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values of any shape, weighted as in `sum_and_count`."""
        values = _exact(values.detach())
        weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
        self.add_pair(name, sum_and_count(values, weights))

    def add_losses(self, losses: Losses) -> None:
        """Add the metrics of a micro-batch."""
        for name, (values, weights) in losses.metrics.items():
            self.add(name, values, losses.weights if weights is None and values.ndim else weights)

    def add_pair(self, name: str, pair: Tensor) -> None:
        """Add [sum, count], as `sum_and_count` gives it."""
        pair = _exact(pair)
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def set_peak(self, name: str, value: Tensor) -> None:
        """Of this scalar, given once between two logs, the largest over the ranks counts, not the mean."""
        self.totals[name] = torch.stack([_exact(value), torch.ones_like(_exact(value))])
        self.largest.add(name)

    def averages(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Global means since the last call; a name that nothing was counted for is left out. Empties the meter."""
        if not self.totals:
            return {}
        totals = torch.stack(list(self.totals.values()))[None]  # [ranks, names, 2]
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.gather(totals)
        pairs = dict(zip(self.totals, totals.sum(0).tolist(), strict=True))
        peaks = dict(zip(self.totals, totals[:, :, 0].amax(0).tolist(), strict=True))
        self.totals = {}
        return {
            name: peaks[name] if name in self.largest else total / count
            for name, (total, count) in pairs.items()
            if count
        }


def _exact(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values.double() if values.device.type != "mps" else values.float()
