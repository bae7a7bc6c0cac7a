"""Tiled head of a model whose head is not a plain linear layer: with an adapter, quantized, or with own logits."""

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
    """Compute `head.score_tokens` for any function from hidden states to logits, with a checkpoint for each tile.

    Args:
        logits_of: Function from hidden states [n, H] to logits [n, V].
        hidden: Hidden states [N, H].
        tile: Tile function.
        vocabulary: Number of logits V.

    Returns:
        The values [N], and statistics [N] by name.
    """

    def tile_value(part: Tensor, rows: slice, stats: dict[str, Tensor]) -> Tensor:
        return _TileValue.apply(logits_of(part), tile, rows, stats)

    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for rows in tiles(hidden, vocabulary):
        stats: dict[str, Tensor] = {}
        results.append((checkpoint(tile_value, hidden[rows], rows, stats, use_reentrant=False), stats))
    values = torch.cat([value for value, _ in results])
    return values, {name: torch.cat([stats[name] for _, stats in results]) for name in results[0][1]}


class _TileValue(torch.autograd.Function):
    """Tile function as an autograd function from logits [n, V] to values [n]. It fills a dictionary of statistics."""

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
