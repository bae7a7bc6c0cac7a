"""Tiled head that is not a linear layer: with an adapter, quantized, or with model-specific logit processing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .head import TileFunction, tiles


def score_tokens_checkpointed(
    compute_logits: Callable[[Tensor], Tensor], hidden: Tensor, tile: TileFunction, vocabulary: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Equivalent of `score_tokens` for an arbitrary differentiable head. Each tile is gradient-checkpointed.

    Args:
        compute_logits: Function from hidden states [n, H] to logits [n, V].
        hidden: Hidden states [N, H].
        tile: Tile function.
        vocabulary: Number of logits V.

    Returns:
        The values [N], and statistics [N] by name.
    """

    def tile_value(states: Tensor, run: _TileRun) -> Tensor:
        return _TileValue.apply(compute_logits(states), run)

    runs = [_TileRun(tile, rows) for rows in tiles(hidden, vocabulary)]
    values = torch.cat([checkpoint(tile_value, hidden[run.rows], run, use_reentrant=False) for run in runs])
    return values, {name: torch.cat([run.stats[name] for run in runs]) for name in runs[0].stats}


def _unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


@dataclass
class _TileRun:
    """One tile, which its checkpoint computes in the forward and again in the backward."""

    tile: TileFunction
    rows: slice
    stats: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0  # how often the tile was computed


class _TileValue(torch.autograd.Function):
    """Tile function as an autograd function from logits [n, V] to values [n]. It fills the statistics of the run."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, run: _TileRun) -> Tensor:
        run.count += 1
        # The checkpoint discards what the forward saves. Only the computation in the backward requires the gradient.
        need_grad = ctx.needs_input_grad[0] and run.count > 1
        # The checkpoint must not count the tensors that a tile function with its own autograd saves, because they are
        # saved only with gradient.
        own_tensors = saved_tensors_hooks(_unchanged, _unchanged)
        with torch.autocast(logits.device.type, enabled=False), own_tensors:
            # tile functions overwrite their input, and autograd may have saved the logits
            result = run.tile(logits.clone(), run.rows, need_grad, torch.empty_like(logits))
        run.stats.update(result.stats)
        # The checkpoint compares the shapes and dtypes that both computations save.
        ctx.save_for_backward(logits.new_empty(()).expand_as(logits) if result.grad is None else result.grad)
        return result.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad[:, None], None
