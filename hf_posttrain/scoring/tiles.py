"""Tile functions: from a tile of logits to one value per token, and that value's gradient with respect to the logits.

    LogProb          log-probability of the target, differentiated by hand
    Differentiated   anything else, by autograd inside the tile: divergences from a teacher (`distill.py`)

Legend: n tokens of one tile, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tile:
    """What a tile function says of its n tokens."""

    value: Tensor
    """[n], the quantity to differentiate."""
    grad: Tensor | None
    """[n, V], d value / d logits, where it was asked for; the receiver may overwrite it."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """More [n] values, without gradient."""


TileFunction = Callable[[Tensor, slice, bool, Tensor], Tile]
"""(logits [n, V], which of the N tokens, is the gradient wanted, room [n, V] for it or for whatever else) -> Tile.

A fresh [n, V] costs more on CPU than the softmax that fills it. -inf among the logits may become -1e30, no more.
"""


def softmax(logits: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, v] -> probabilities, in the first v columns of `room` [n, V], with 0 behind them; the largest logit and the
    logarithm of its probability, [n, 1] each: their difference is the logsumexp."""
    size = logits.shape[-1]
    room[:, size:].zero_()
    probs = torch.softmax(logits, dim=-1, out=room[:, :size])
    return probs, logits.amax(-1, keepdim=True), probs.amax(-1, keepdim=True).log()


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """sum of p x over the vocabulary, [n, v] twice -> [n, 1]."""
    if probs.device.type == "cpu":  # no product in memory; on a GPU this might round to TF32
        return torch.bmm(probs[:, None], values[:, :, None])[:, 0]
    return torch.linalg.vecdot(probs, values)[:, None]


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

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, room: Tensor) -> Tile:
        """[n, V] -> Tile of [n]."""
        targets, logits = self.targets[rows, None], logits[:, : self.vocabulary]
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        probs, peak, log_top = softmax(logits, room)
        own = logits.gather(-1, targets)
        value, stats = (own - peak + log_top)[:, 0], {}
        if self.stats:
            entropy = peak - log_top - expectation(probs, logits.clamp_(min=-1e30))  # 0 x -inf would be NaN
            told_apart = log_top > 1e-4 - math.log(logits.shape[-1])  # a collapsed model finds all tokens as likely
            correct = (own >= peak) & told_apart
            stats = {"entropy": entropy[:, 0], "correct": correct[:, 0].float()}
        if not need_grad:
            return Tile(value, None, stats)
        grad = room.neg_().scatter_add_(-1, targets, torch.ones_like(own))  # one-hot - softmax
        return Tile(value, grad if self.temperature == 1.0 else grad.div_(self.temperature), stats)


@dataclass(frozen=True)
class Differentiated:
    """value = any function of the logits, differentiated by autograd inside the tile: divergences from a teacher."""

    function: Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
    """(logits [n, V], rows) -> (value [n], stats of [n])."""

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, room: Tensor) -> Tile:
        """[n, V] -> Tile of [n]."""
        with torch.set_grad_enabled(need_grad):
            leaf = logits.detach().requires_grad_(need_grad)
            value, stats = self.function(leaf, rows)
            grad = torch.autograd.grad(value.sum(), leaf)[0] if need_grad else None
        return Tile(value.detach(), grad, {name: stat.detach() for name, stat in stats.items()})
