"""Weights of the tokens of on-policy rollouts: the `token_weights` of OPD.

Each function takes the tokens of this rank in an optimizer step, and its options. It returns a weight for each of them.
`normalized_weights` scales them to mean 1 over the step, so that the size of a step does not depend on the scheme. A is
the advantage ln p - ln q of a sampled token, for a teacher p and a student q.

To add a scheme, write a function and a row in TOKEN_WEIGHTS here, its options as a class in rollouts/options.py, and
its definition in tests/losses/test_token_weights.py.

Legend: N tokens of this rank's rollouts in the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..batching.sequence_padding import pad_by_sequence


@dataclass
class Tokens:
    """Values of the sampled tokens on which weights may depend, [N] each."""

    student: Tensor  # ln q of the sampled token at the sampling temperature; rounding may leave it just above 0
    teacher: Tensor  # ln p of the sampled token
    divergence: Tensor  # divergence of the loss over the whole vocabulary; -A for the policy gradient
    rollout: Tensor  # rollout to which a token belongs; the tokens of a rollout are in order
    counts: Tensor  # 1, or 0 for tokens of rows that complete the last batch and are repeated
    accelerator: Accelerator | None = None  # of several ranks

    @classmethod
    def concat(cls, parts: Sequence["Tokens"], accelerator: Accelerator) -> "Tokens":
        """Concatenate the tokens of several micro-batches, each of which numbers its rollouts from 0."""
        offsets = np.cumsum([0, *(int(part.rollout.max()) + 1 for part in parts[:-1])]).tolist()
        return cls(
            student=torch.cat([part.student for part in parts]),
            teacher=torch.cat([part.teacher for part in parts]),
            divergence=torch.cat([part.divergence for part in parts]),
            rollout=torch.cat([part.rollout + offset for part, offset in zip(parts, offsets, strict=True)]),
            counts=torch.cat([part.counts for part in parts]),
            accelerator=accelerator,
        )

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate values of all ranks along the first dimension, in which their sizes may differ."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return values
        return torch.cat([part.to(values.device) for part in gather_object([values.cpu()])])

    @property
    def advantage(self) -> Tensor:
        """A = ln p - ln q of each token, [N]."""
        return self.teacher - self.student


def cumulative(tokens: Tokens, gain: float) -> Tensor:
    """1 + gain (1 - C_{t-1} / C_T): early tokens count more (IW-OPD, arXiv 2606.22600).

    C_t is the sum of |A| over the first t tokens of a rollout of T tokens.
    """
    table, indices = pad_by_sequence(tokens.advantage.abs(), tokens.rollout)
    before = (table.cumsum(1) - table) / table.sum(1, keepdim=True).clamp(min=1e-30)
    return (1 + gain * (1 - before))[indices]


def top_share(tokens: Tokens, share: float) -> Tensor:
    """1 for the share of tokens with the largest divergence and for ties with the last of them, else 0.

    Source: TIP (arXiv 2604.14084).
    """
    return (tokens.divergence >= _nth_largest(tokens.divergence, tokens, share)).to(tokens.divergence)


def extremes(tokens: Tokens, share: float) -> Tensor:
    """1 for the shares of tokens with the largest and with the smallest A, else 0 (arXiv 2609.04565)."""
    high, low = (_nth_largest(factor * tokens.advantage, tokens, share) for factor in (1, -1))
    return ((tokens.advantage >= high) | (-tokens.advantage >= low)).to(tokens.advantage)


def bounded(tokens: Tokens) -> Tensor:
    """|q - p| / (q + p) of the sampled token: tokens on which both agree count little (IDA, arXiv 2608.29846)."""
    return (tokens.advantage / 2).tanh().abs()  # (e^A - 1) / (e^A + 1)


def sign(tokens: Tokens) -> Tensor:
    """1 / |A|, so that the policy gradient is proportional to the sign of A (TV-OPD, arXiv 2609.08341).

    An |A| below 0.001 counts as 0.001, because rounding errors determine the sign of so small a value.
    """
    return 1 / tokens.advantage.abs().clamp(min=1e-3)


TOKEN_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "cumulative": cumulative,
    "top_share": top_share,
    "extremes": extremes,
    "bounded": bounded,
    "sign": sign,
}


def normalized_weights(tokens: Tokens, name: str, options: Mapping[str, float]) -> Tensor:
    """Return the weights [N], scaled to mean 1 over the tokens of the step that count.

    Since the weights of `sign` are unbounded, the mean of w |A| is scaled to the mean of |A| in this scheme.

    Args:
        tokens: Tokens of this rank in the step.
        name: Key of TOKEN_WEIGHTS.
        options: Keyword arguments of its function.
    """
    weights = TOKEN_WEIGHTS[name](tokens, **options)
    magnitudes = tokens.advantage.abs() if name == "sign" else torch.ones_like(weights)

    sums = torch.stack([(magnitudes * tokens.counts).sum(), (weights * magnitudes * tokens.counts).sum()])[None]
    unweighted, weighted = tokens.gather(sums).sum(0).unbind()
    return weights * (unweighted / weighted.clamp(min=1e-30))


def _nth_largest(values: Tensor, tokens: Tokens, share: float) -> Tensor:
    """Return the threshold that a share of the values of all ranks, and at least one of them, reach.

    Args:
        values: Values of this rank, [N].
        tokens: The tokens that they belong to.
        share: The share.
    """
    all_values = tokens.gather(values[tokens.counts > 0])
    return all_values.topk(max(1, round(share * len(all_values)))).values[-1]
