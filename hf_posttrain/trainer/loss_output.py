"""Unreduced losses of a micro-batch, and exact averages of metrics.

A method returns one loss per unit, which is a token or an example, as `Losses`. Nothing is averaged twice: sums and
counts are accumulated over all ranks and the whole accumulation window or logging interval, and divided once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass
class Losses:
    """Losses and metrics of one micro-batch.

    Attributes:
        values: Unreduced loss of each token or example, [units].
        weights: `PostTrainer.weights`, [units]: 1, or 0 for a unit that does not count. A step divides by their sum.
        metrics: (values, weights) of each metric, averaged exactly over ranks and the logging interval. Weights of None
            are the weights of the loss.
        router_logits: Router logits of each layer of a mixture of experts whose auxiliary loss is enabled.
        predictions: Predictions for `compute_metrics`, [B, ...]. If None, it gets full logits and shift_labels.
        labels: The label_ids for `compute_metrics`, [B, ...].
    """

    values: Tensor
    weights: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    router_logits: Any = None
    predictions: Tensor | None = None
    labels: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Sum of the losses of all units that count, a scalar.

        A NaN at weight 0 makes the sum NaN, because its gradient would be NaN too.
        """
        return (self.values * self.weights).sum()


def sum_and_count(values: Tensor, weights: Tensor) -> Tensor:
    """Return [sum of values x weights, sum of weights] of tensors of one shape. Weight 0 ignores a value, also NaN."""
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


class MetricAverager:
    """Accumulator of named (sum, count) pairs.

    Every rank adds the same names in the same order. Counts may be zero.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.peaks: set[str] = set()

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
        """Add [sum, count], as `sum_and_count` returns it."""
        pair = _exact(pair)
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def set_peak(self, name: str, value: Tensor) -> None:
        """Set a scalar of which the maximum over the ranks is logged, not the mean. Called once between two logs."""
        self.totals[name] = torch.stack([_exact(value), torch.ones_like(_exact(value))])
        self.peaks.add(name)

    def averages(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Return the global means since the last call, without names whose count is zero, and reset the totals."""
        if not self.totals:
            return {}
        totals = torch.stack(list(self.totals.values()))[None]  # [ranks, names, 2]
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.gather(totals)
        pairs = dict(zip(self.totals, totals.sum(0).tolist(), strict=True))
        peaks = dict(zip(self.totals, totals[:, :, 0].amax(0).tolist(), strict=True))
        self.totals = {}
        return {
            name: peaks[name] if name in self.peaks else total / count
            for name, (total, count) in pairs.items()
            if count
        }


def _exact(values: Tensor) -> Tensor:
    """Return the values in float64, or float32 on MPS, which has no float64."""
    return values.double() if values.device.type != "mps" else values.float()
