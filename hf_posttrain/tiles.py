"""Tile functions: from a tile of logits to one value per token, and that value's gradient with respect to the logits.

    LogProb          log-probability of the target, differentiated by hand
    Differentiated   anything else, by autograd inside the tile: divergences from a teacher (`distill.py`)

Legend: n tokens of one tile, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Tile:
    """What a tile function says of its n tokens."""

    value: Tensor
    """[n], the quantity to differentiate."""
    grad: Tensor | None
    """[n, V], d value / d logits, where it was asked for; the receiver may overwrite it."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """More [n] values, without gradient."""


TileFunction = Callable[[Tensor, slice, bool], Tile]
"""(logits [n, V], which of the N tokens, is the gradient wanted) -> Tile."""


@dataclass(frozen=True)
class LogProb:
    """value = log softmax(logits / temperature)[target]."""

    targets: Tensor
    """[N]."""
    temperature: float = 1.0
    """Divides the logits."""
    stats: bool = False
    """Also return `entropy` and `correct` (1 where the target is the argmax)."""
    vocabulary: int | None = None
    """The ids that exist; logits behind them (padding of the vocabulary) count as -inf. None: all."""

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool) -> Tile:
        """[n, V] -> Tile of [n]."""
        targets, size = self.targets[rows, None], logits.shape[-1]
        if self.vocabulary is not None and self.vocabulary < size:
            logits = nn.functional.pad(logits[:, : self.vocabulary], (0, size - self.vocabulary), value=-torch.inf)
        logps = torch.log_softmax(logits if self.temperature == 1.0 else logits / self.temperature, dim=-1)
        value = logps.gather(-1, targets)
        if not self.stats and not need_grad:
            return Tile(value.squeeze(-1), None)
        correct = (value >= logps.amax(-1, keepdim=True)).squeeze(-1).float() if self.stats else None
        probs = logps.exp() if self.stats else logps.exp_()
        stats = {"entropy": entropy(probs, logps), "correct": correct} if correct is not None else {}
        if not need_grad:
            return Tile(value.squeeze(-1), None, stats)
        grad = probs.neg_().scatter_add_(-1, targets, torch.ones_like(value))  # one-hot - softmax
        return Tile(value.squeeze(-1), grad if self.temperature == 1.0 else grad.div_(self.temperature), stats)


def entropy(probs: Tensor, logps: Tensor) -> Tensor:
    """-sum p ln p of probabilities and their logarithms [n, V] -> [n]; -inf padding counts as 0. Overwrites `logps`."""
    return -torch.linalg.vecdot(probs, logps.clamp_(min=-1e30))


@dataclass(frozen=True)
class Differentiated:
    """value = any function of the logits, differentiated by autograd inside the tile: divergences from a teacher."""

    function: Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
    """(logits [n, V], rows) -> (value [n], stats of [n])."""

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool) -> Tile:
        """[n, V] -> Tile of [n]."""
        with torch.set_grad_enabled(need_grad):
            leaf = logits.detach().requires_grad_(need_grad)
            value, stats = self.function(leaf, rows)
            grad = torch.autograd.grad(value.sum(), leaf)[0] if need_grad else None
        return Tile(value.detach(), grad, {name: stat.detach() for name, stat in stats.items()})
