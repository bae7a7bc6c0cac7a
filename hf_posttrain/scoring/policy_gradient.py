"""The tile function of a policy gradient on sampled tokens.

Legend: N scored tokens, n of one tile, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from .head import LogProb, Tile

IMPORTANCE = 2.0
"""Largest importance weight of a token."""


@dataclass(frozen=True)
class SampledPolicyGradient:
    """value = -sg(A) ln q of the sampled tokens, A = ln p - ln q + extra: with nothing extra its expected gradient is
    that of the reverse KL.
    """

    targets: Tensor  # [N], the sampled tokens
    teacher: Tensor  # [N], the teacher's log-probabilities of them at the same temperature
    temperature: float
    vocabulary: int  # of the ids that both models have
    extra: Tensor | None = None  # [N], a reward
    sampler: Tensor | None = None  # [N], of `importance`

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile of [n]; stats `student`, `teacher`, `entropy`."""
        tile = LogProb(self.targets, self.temperature, True, self.vocabulary)(logits, rows, need_grad, buffer)
        advantage = self.teacher[rows] - tile.value
        advantage = advantage if self.extra is None else advantage + self.extra[rows]
        advantage = advantage * importance(tile.value, None if self.sampler is None else self.sampler[rows])
        stats = {"student": tile.value, "teacher": self.teacher[rows], "entropy": tile.stats["entropy"]}
        grad = None if tile.grad is None else tile.grad.mul_(-advantage[:, None])
        return Tile(-advantage * tile.value, grad, stats)


def importance(student: Tensor, sampler: Tensor | None) -> Tensor | float:
    """Q / q of the sampler, at most IMPORTANCE: what a token counts that weights of before have sampled, [N]. sampler:
    ln q of it, NaN where that is not known; None: they are the weights of now.
    """
    if sampler is None:
        return 1.0
    return (student - sampler).exp().clamp(max=IMPORTANCE).nan_to_num(nan=1.0)
