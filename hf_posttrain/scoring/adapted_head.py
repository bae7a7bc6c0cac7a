"""The tiled head of a model whose head is no plain linear layer: an adapter on it, a quantised one, or own logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .head import TileFunction, tiles


def score_tokens_through(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tile: TileFunction, vocabulary: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """`head.score_tokens` for any function from hidden states [n, H] to logits [n, V]: each tile is checkpointed."""

    def value(part: Tensor, rows: slice, stats: dict[str, Tensor]) -> Tensor:
        return _TileValue.apply(logits_of(part), tile, rows, stats)

    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for rows in tiles(hidden, vocabulary):
        stats: dict[str, Tensor] = {}
        found.append((checkpoint(value, hidden[rows], rows, stats, use_reentrant=False), stats))
    values = torch.cat([value for value, _ in found])
    return values, {name: torch.cat([stats[name] for _, stats in found]) for name in found[0][1]}


class _TileValue(torch.autograd.Function):
    """A tile function as an autograd step from logits [n, V] to values [n]; its stats are left in a dictionary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tile: TileFunction, rows: slice, stats: dict[str, Tensor]) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            result = tile(logits.clone(), rows, ctx.needs_input_grad[0], torch.empty_like(logits))
        stats.update(result.stats)
        ctx.save_for_backward(result.grad)
        return result.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.saved_tensors[0] * grad[:, None], None, None, None
