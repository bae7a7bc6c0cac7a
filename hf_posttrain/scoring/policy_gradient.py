"""Tile function of a policy gradient on sampled tokens.

Legend: N scored tokens, n of one tile, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from .head import LogProb, Tile

MAX_IMPORTANCE_WEIGHT = 2.0
"""Truncation of the per-token importance sampling ratio."""


@dataclass(frozen=True)
class SampledPolicyGradient:
    """Tile function: value = -sg(A) ln q of the sampled tokens, A = w (ln p - ln q + reward_advantage).

    The importance weight w multiplies the advantage. It is 1 without `sampler_logps`. If it is 1 and there is no
    `reward_advantage`, the expected gradient is that of the reverse KL. Truncating w biases the gradient.
    """

    targets: Tensor  # [N], the sampled tokens
    teacher_logps: Tensor  # [N], the teacher's log-probabilities of the targets at the same temperature
    temperature: float
    vocabulary: int  # number of ids that both models have
    reward_advantage: Tensor | None = None  # [N], advantage of a reward
    sampler_logps: Tensor | None = None  # [N], see `importance_weight`

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V], with the statistics `student`, `teacher` and `entropy`."""
        tile = LogProb(self.targets, self.temperature, True, self.vocabulary)(logits, rows, need_grad, buffer)

        advantage = self.teacher_logps[rows] - tile.value
        if self.reward_advantage is not None:
            advantage = advantage + self.reward_advantage[rows]
        if self.sampler_logps is not None:
            advantage = advantage * importance_weight(tile.value, self.sampler_logps[rows])

        stats = {"student": tile.value, "teacher": self.teacher_logps[rows], "entropy": tile.stats["entropy"]}
        grad = None if tile.grad is None else tile.grad.mul_(-advantage[:, None])
        return Tile(-advantage * tile.value, grad, stats)


def importance_weight(student_logps: Tensor, sampler_logps: Tensor) -> Tensor:
    """Return the weights q / q_sampler of tokens that an earlier policy has sampled, at most MAX_IMPORTANCE_WEIGHT.

    Args:
        student_logps: ln q of the sampled tokens under the current policy, [n].
        sampler_logps: ln q of the same tokens under the policy that sampled them, [n], NaN where it is unknown.

    Returns:
        The weights [n], which are 1 where `sampler_logps` is NaN.
    """
    return (student_logps - sampler_logps).exp().clamp(max=MAX_IMPORTANCE_WEIGHT).nan_to_num(nan=1.0)
