"""Tile function of a policy gradient on sampled tokens.

Legend: N scored tokens, n of one tile, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from .head import LogProb, Tile

MAX_IMPORTANCE_WEIGHT = 2.0
"""Largest importance weight of a token."""


@dataclass(frozen=True)
class SampledPolicyGradient:
    """Tile function: value = -sg(A) ln q of the sampled tokens, A = ln p - ln q + extra.

    Without `extra` its expected gradient is that of the reverse KL.
    """

    targets: Tensor  # [N], the sampled tokens
    teacher: Tensor  # [N], the teacher's log-probabilities of them at the same temperature
    temperature: float
    vocabulary: int  # number of ids that both models have
    extra: Tensor | None = None  # [N], a reward
    sampler: Tensor | None = None  # [N], see `importance_weight`

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V], with the statistics `student`, `teacher` and `entropy`."""
        tile = LogProb(self.targets, self.temperature, True, self.vocabulary)(logits, rows, need_grad, buffer)

        advantage = self.teacher[rows] - tile.value
        advantage = advantage if self.extra is None else advantage + self.extra[rows]
        advantage = advantage * importance_weight(tile.value, None if self.sampler is None else self.sampler[rows])

        stats = {"student": tile.value, "teacher": self.teacher[rows], "entropy": tile.stats["entropy"]}
        grad = None if tile.grad is None else tile.grad.mul_(-advantage[:, None])
        return Tile(-advantage * tile.value, grad, stats)


def importance_weight(student: Tensor, sampler: Tensor | None) -> Tensor | float:
    """Return the weight of tokens that an earlier policy has sampled: q / q_sampler, at most MAX_IMPORTANCE_WEIGHT.

    Args:
        student: ln q of the sampled tokens under the current policy, [n].
        sampler: ln q of the same tokens under the policy that sampled them, [n], NaN where it is unknown. None if the
            current policy sampled them.

    Returns:
        The weights [n], which are 1 where `sampler` is NaN, or 1.0 for all tokens.
    """
    if sampler is None:
        return 1.0
    return (student - sampler).exp().clamp(max=MAX_IMPORTANCE_WEIGHT).nan_to_num(nan=1.0)
