"""Top-K teachers: selection of the top tokens, and divergences from a teacher of which only these are known.

Legend: N scored tokens, n of one tile, V vocabulary, K top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.divergence import GENERALIZED, log_softmax, with_tail
from .head import Tile, TileFunction
from .teacher_tiles import at_temperature, autograd_tile, with_cross_entropy


@dataclass(frozen=True)
class TopTokens:
    """Tile function: the K largest log-probabilities at a temperature and their ids, as statistics [n, K].

    Its value is the log-probability of the targets, or the largest one without targets.
    """

    k: int
    temperature: float
    vocabulary: int  # number of ids that both models have
    targets: Tensor | None = None  # [N]

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V]."""
        logps = log_softmax(logits[:, : self.vocabulary] / self.temperature)
        top, ids = logps.topk(min(self.k, logps.shape[-1]), dim=-1)
        value = top[:, 0] if self.targets is None else logps.gather(-1, self.targets[rows, None])[:, 0]
        return Tile(value, None, {"logps": top, "ids": ids})


def top_k_divergence(
    function: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    logps: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int,
    *,
    ce_coef: float = 0.0,
    teacher: Tensor | None = None,
    tail: bool = True,
) -> TileFunction:
    """Return the tile function of a divergence in which all tokens outside the teacher's top K count as one token.

    It is a lower bound of the divergence over all tokens, and never below 0. So is the generalized KL of the top K
    tokens alone, which is not larger.

    Args:
        function: Divergence of (student, teacher) log-probabilities [n, K+1] -> [n].
        ids: The teacher's top tokens, [N, K].
        logps: Their log-probabilities at the temperature, [N, K].
        targets: [N].
        temperature: Divides the logits of the student.
        vocabulary: Number of ids that both models have.
        ce_coef: See `with_cross_entropy`.
        teacher: The teacher's log-probabilities of the targets, [N].
        tail: Whether to count the other tokens as one token. If false, they are ignored, and `function` must be
            `forward_kl` or `reverse_kl`, whose generalized form is used.

    Returns:
        The tile function, with the statistic `divergence`, and with `teacher` also `student` and `teacher`.
    """

    def of_top(student: Tensor, teacher: Tensor) -> Tensor:
        return function(with_tail(student), with_tail(teacher)) if tail else GENERALIZED[function](student, teacher)

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        q = log_softmax(at_temperature(logits[:, :vocabulary], temperature))
        total = of_top(q.gather(-1, ids[rows]), logps[rows])
        target = targets[rows, None]
        stats = {"divergence": total}
        if teacher is not None:
            stats |= {"student": q.gather(-1, target)[:, 0], "teacher": teacher[rows]}
        full_logps = q if temperature == 1 and vocabulary >= logits.shape[-1] else None
        return with_cross_entropy(total, logits, full_logps, target, ce_coef, stats)

    return autograd_tile(value)


def residual_reverse_kl(
    ids: Tensor, logps: Tensor, targets: Tensor, temperature: float, vocabulary: int, *, teacher: Tensor
) -> TileFunction:
    """Return the tile function of the reverse KL of sampled tokens y, for a teacher with known top K tokens S.

    The value is  sum over S of q (ln q - ln p)  +  (ln q(y) - ln p(y) if y is not in S).  It is unbiased in value and
    gradient for each K (ResOPD, arXiv 2610.04882). K = V is the dense loss. The gradient is the sum over S of
    (ln q - ln p) dq + (ln q(y) - ln p(y)) d ln q(y). The omitted term, the sum of all dq, is 0.

    Args:
        ids: The teacher's top tokens S, [N, K].
        logps: Their log-probabilities at the temperature, [N, K].
        targets: Sampled tokens y, [N].
        temperature: Divides the logits of the student.
        vocabulary: Number of ids that both models have.
        teacher: The teacher's log-probabilities of y, [N].

    Returns:
        The tile function, with the statistics `divergence`, and `student` and `teacher`, the log-probabilities of y.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        q = log_softmax(at_temperature(logits[:, :vocabulary], temperature))
        top = q.gather(-1, ids[rows])
        target_logps = q.gather(-1, targets[rows, None])[:, 0]
        in_top = (ids[rows] == targets[rows, None]).any(-1)
        tail = torch.where(in_top, 0.0, target_logps - teacher[rows]).detach()
        log_ratio = (top.clamp(min=-1e30) - logps[rows].clamp(min=-1e30)).detach()  # -inf less -inf would be NaN

        divergence = (top.exp() * log_ratio).sum(-1) + tail
        surrogate = (top.exp() * log_ratio).sum(-1) + tail * target_logps  # with the gradient of the docstring
        stats = {"divergence": divergence, "student": target_logps, "teacher": teacher[rows]}
        return surrogate + (divergence - surrogate).detach(), stats

    return autograd_tile(value)
