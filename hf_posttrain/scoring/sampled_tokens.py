"""Student against teacher on the sampled tokens alone: OPD's policy gradient.

Legend: N scored tokens, n of one tile, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.divergence import discounted
from .head import LogProb, Tile


@dataclass(frozen=True)
class SampledPolicyGradient:
    """value = -sg(ln p - ln q) ln q of the sampled tokens, whose expected gradient is that of the reverse KL."""

    targets: Tensor
    """[N], the sampled tokens."""
    teacher: Tensor
    """[N], the teacher's log-probabilities of them at the same temperature."""
    temperature: float
    vocabulary: int
    """Of the ids that both models have."""

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile of [n]; stats `student`, `teacher`, `entropy`."""
        tile = LogProb(self.targets, self.temperature, True, self.vocabulary)(logits, rows, need_grad, buffer)
        advantage = self.teacher[rows] - tile.value
        stats = {"student": tile.value, "teacher": self.teacher[rows], "entropy": tile.stats["entropy"]}
        grad = None if tile.grad is None else tile.grad.mul_(-advantage[:, None])
        return Tile(-advantage * tile.value, grad, stats)


def credited(reward: Tensor, owner: Tensor, discount: float) -> Tensor:
    """Rewards [N] of tokens with those that follow in their rollout, discounted: [N]. owner [N]: whose token it is.

    Tokens of a rollout stand in order; they are laid out as [rollouts, longest] and back.
    """
    order, counts = torch.argsort(owner, stable=True), torch.bincount(owner)
    place = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    table = reward.new_zeros(len(counts), int(counts.max()))
    table[owner[order], place] = reward[order]
    result = torch.empty_like(reward)
    result[order] = discounted(table, discount)[owner[order], place]
    return result
