"""What is read at log steps alone, without waiting for the device in between.

sum_and_count the pair that a weighted mean is made of
Meter         exact global means from (sum, count) pairs, one reduction each time they are logged
FiniteWatch   the first step whose loss was not finite
"""

import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def sum_and_count(values: Tensor, weights: Tensor) -> Tensor:
    """[sum of values x weights, sum of weights] of one shape; weight 0 leaves a value out even where it is NaN."""
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


class Meter:
    """Named (sum, count) pairs. Every rank adds the same names in the same order; counts may be zero."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values of any shape, weighted as in `sum_and_count`."""
        values = values.detach().double() if values.device.type != "mps" else values.detach().float()
        weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
        pair = sum_and_count(values, weights)
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def averages(self, accelerator=None) -> dict[str, float]:
        """Global means since the last call; a name that nothing was counted for is left out. Empties the meter."""
        if not self.totals:
            return {}
        totals = torch.stack(list(self.totals.values()))  # [names, 2]
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.reduce(totals, "sum")
        pairs = dict(zip(self.totals, totals.tolist(), strict=True))
        self.totals = {}
        return {name: total / count for name, (total, count) in pairs.items() if count}


class FiniteWatch:
    """Remembers, on the device, the first step whose loss was not finite, and names it once."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.named = False

    def note(self, loss: Tensor, step: int) -> None:
        """Look at the loss (a scalar) of a step."""
        bad = torch.where(torch.isfinite(loss), torch.inf, float(step))
        self.first = bad if self.first is None else torch.minimum(self.first, bad)

    def report(self, accelerator: Any) -> None:
        """Warn, once, if there was such a step on any rank."""
        if self.first is None or self.named:
            return
        step = accelerator.gather(self.first).min().item()
        if step < float("inf"):
            self.named = True
            logger.warning("the loss was not finite at step %d; lower the learning rate or look at its batch", step)
