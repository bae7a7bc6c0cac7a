"""A teacher of whom only the top K tokens are kept: how they are found, and the divergence from them.

Legend: N scored tokens, n of one tile, V vocabulary, K top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.divergence import with_tail
from .head import Tile, TileFunction
from .teacher_tiles import at_temperature, differentiated, with_cross_entropy


@dataclass(frozen=True)
class TopTokens:
    """Tile function: the K largest log-probabilities at a temperature and their ids, as stats of [n, K]; no value."""

    k: int
    temperature: float
    vocabulary: int  # of the ids that both models have

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile."""
        logps = torch.log_softmax(logits[:, : self.vocabulary] / self.temperature, dim=-1)
        top, ids = logps.topk(min(self.k, logps.shape[-1]), dim=-1)
        return Tile(top[:, 0], None, {"logps": top, "ids": ids})


def top_k(
    function: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    logps: Tensor,
    targets: Tensor,
    temperature: float,
    ce_coef: float,
    vocabulary: int,
) -> TileFunction:
    """The same with a cached teacher: ids and logps [N, K] at this temperature, the rest of its mass in one bucket.

    vocabulary: the number of ids that both models have.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        q = torch.log_softmax(at_temperature(logits[:, :vocabulary], temperature), dim=-1)
        total = function(with_tail(q.gather(-1, ids[rows])), with_tail(logps[rows]))
        own = q if temperature == 1 and vocabulary >= logits.shape[-1] else None
        return with_cross_entropy(total, logits, own, targets[rows, None], ce_coef, {"divergence": total})

    return differentiated(value)
