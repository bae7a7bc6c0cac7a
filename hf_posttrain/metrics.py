"""Meter: exact global means from (sum, count) pairs on device, one reduction each time they are logged."""

import torch
from torch import Tensor


class Meter:
    """Named (sum, count) pairs. Every rank adds the same names in the same order; counts may be zero."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values of any shape, weighted; weight 0 leaves a value out even where it is NaN."""
        values = values.detach().double() if values.device.type != "mps" else values.detach().float()
        weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
        values = torch.where(weights == 0, 0.0, values * weights)
        pair = torch.stack([values.sum(), weights.sum()])
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
