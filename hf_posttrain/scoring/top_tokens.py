"""A teacher of whom only the top K tokens are kept: how they are found, and the divergence from them.

Legend: N scored tokens, n of one tile, V vocabulary, K top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.divergence import log_softmax, with_tail
from .head import Tile, TileFunction
from .teacher_tiles import at_temperature, differentiated, with_cross_entropy


@dataclass(frozen=True)
class TopTokens:
    """Tile function: the K largest log-probabilities at a temperature and their ids, as stats of [n, K]; its value is
    that of the targets, or of the largest.
    """

    k: int
    temperature: float
    vocabulary: int  # of the ids that both models have
    targets: Tensor | None = None  # [N]

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile."""
        logps = log_softmax(logits[:, : self.vocabulary] / self.temperature)
        top, ids = logps.topk(min(self.k, logps.shape[-1]), dim=-1)
        own = top[:, 0] if self.targets is None else logps.gather(-1, self.targets[rows, None])[:, 0]
        return Tile(own, None, {"logps": top, "ids": ids})


def top_k(
    function: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    logps: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int,
    *,
    ce_coef: float = 0.0,
    teacher: Tensor | None = None,
) -> TileFunction:
    """A divergence where all tokens outside the teacher's top K are one: a lower bound of that over all, never below 0.

    ids, logps: [N, K], the log-probabilities at this temperature; vocabulary: the number of ids that both models have;
    ce_coef: as in `with_cross_entropy`. stats: `divergence`; with `teacher` [N], its log-probabilities of the targets,
    also `student` and `teacher`.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        q = log_softmax(at_temperature(logits[:, :vocabulary], temperature))
        total = function(with_tail(q.gather(-1, ids[rows])), with_tail(logps[rows]))
        target = targets[rows, None]
        stats = {"divergence": total}
        if teacher is not None:
            stats |= {"student": q.gather(-1, target)[:, 0], "teacher": teacher[rows]}
        own = q if temperature == 1 and vocabulary >= logits.shape[-1] else None
        return with_cross_entropy(total, logits, own, target, ce_coef, stats)

    return differentiated(value)


def residual(
    ids: Tensor, logps: Tensor, targets: Tensor, temperature: float, vocabulary: int, *, teacher: Tensor
) -> TileFunction:
    """The reverse KL of sampled tokens y where the teacher's top K is known, S, and its log-probability of y, [N]:

        sum over S of q (ln q - ln p)  +  (ln q(y) - ln p(y) where y is not in S)

    Unbiased in value and gradient, for every K (ResOPD, arXiv 2610.04882); K = V is the dense loss. The gradient is
    sum over S of (ln q - ln p) dq + (ln q(y) - ln p(y)) d ln q(y): what is left out, the sum of all dq, is 0.
    stats: `divergence`, and `student` and `teacher`, the log-probabilities of y.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        q = log_softmax(at_temperature(logits[:, :vocabulary], temperature))
        top = q.gather(-1, ids[rows])
        own = q.gather(-1, targets[rows, None])[:, 0]
        known = (ids[rows] == targets[rows, None]).any(-1)
        rest = torch.where(known, 0.0, own - teacher[rows]).detach()
        apart = (top.clamp(min=-1e30) - logps[rows].clamp(min=-1e30)).detach()  # -inf less -inf would be NaN
        found = (top.exp() * apart).sum(-1) + rest
        moving = (top.exp() * apart).sum(-1) + rest * own
        stats = {"divergence": found, "student": own, "teacher": teacher[rows]}
        return moving + (found - moving).detach(), stats

    return differentiated(value)
