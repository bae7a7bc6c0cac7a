"""Weights of the tokens of on-policy rollouts: the `token_weights` of OPD.

Each function takes the tokens of an optimizer step on all ranks, and its options. It returns a weight for each token of
this rank. `normalized_weights` scales them to mean 1 over the step, so that a learning rate keeps its meaning. A is the
advantage ln p - ln q of a sampled token, for a teacher p and a student q.

To add a scheme, write a function and a row in TOKEN_WEIGHTS here, its options as a class in rollouts/options.py, and
its definition in tests/losses/test_token_weights.py.

Legend: N tokens of this rank's rollouts in the step, M tokens of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
    counts: Tensor  # 1, or 0 for tokens that only fill the last batch
    gather: Callable[[Tensor], Tensor] = lambda values: values  # gathers values from all ranks, [N] -> [M]

    @classmethod
    def concat(cls, parts: Sequence["Tokens"], accelerator: Accelerator) -> "Tokens":
        """Concatenate the tokens of several micro-batches, each of which numbers its rollouts from 0."""
        ends = np.cumsum([0, *(int(part.rollout.max()) + 1 for part in parts)]).tolist()
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("student", "teacher", "counts")}
        rollout = torch.cat([part.rollout + start for part, start in zip(parts, ends, strict=False)])
        divergence = torch.cat([part.divergence for part in parts])
        gather = partial(_gather_from_all_ranks, accelerator)
        return cls(rollout=rollout, divergence=divergence, gather=gather, **joined)

    @property
    def advantage(self) -> Tensor:
        """A = ln p - ln q of each token, [N]."""
        return self.teacher - self.student


def cumulative(tokens: Tokens, gain: float) -> Tensor:
    """1 + g (1 - C_{t-1} / C_T), C_t the sum of |A| up to t: early tokens count more (IW-OPD, arXiv 2606.22600)."""
    table, indices = pad_by_sequence(tokens.advantage.abs(), tokens.rollout)
    before = (table.cumsum(1) - table) / table.sum(1, keepdim=True).clamp(min=1e-30)
    return (1 + gain * (1 - before))[indices]


def top_share(tokens: Tokens, share: float) -> Tensor:
    """1 for the share of tokens with the largest divergence, else 0 (TIP, arXiv 2604.14084)."""
    return (tokens.divergence >= _nth_largest(tokens.divergence, tokens, share)).to(tokens.divergence)


def extremes(tokens: Tokens, share: float) -> Tensor:
    """1 for the shares of tokens with the largest and with the smallest A, else 0 (arXiv 2609.04565)."""
    high, low = (_nth_largest(sign * tokens.advantage, tokens, share) for sign in (1, -1))
    return ((tokens.advantage >= high) | (-tokens.advantage >= low)).to(tokens.advantage)


def bounded(tokens: Tokens) -> Tensor:
    """|q - p| / (q + p) of the sampled token: tokens on which both agree count little (IDA, arXiv 2608.29846)."""
    return (tokens.advantage / 2).tanh().abs()  # (e^A - 1) / (e^A + 1)


def sign(tokens: Tokens) -> Tensor:
    """Weights c / |A|, c the mean of |A|: the policy gradient has c x the sign of A (TV-OPD, arXiv 2609.08341).

    An |A| below a thousandth counts as a thousandth, because its sign is rounding noise.
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
    """Return the weights [N], with mean 1 over the tokens of the step that count.

    Weights of `sign` are unbounded. There the mean of w |A| equals the mean of |A| instead.

    Args:
        tokens: Tokens of this rank in the step.
        name: Key of TOKEN_WEIGHTS.
        options: Keyword arguments of its function.
    """
    weights = TOKEN_WEIGHTS[name](tokens, **options)
    scale = tokens.advantage.abs() if name == "sign" else torch.ones_like(weights)

    sums = torch.stack([(scale * tokens.counts).sum(), (weights * scale * tokens.counts).sum()])[None]
    plain, weighted = tokens.gather(sums).sum(0).unbind()
    return weights * (plain / weighted.clamp(min=1e-30))


def _gather_from_all_ranks(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Gather values [N, ...] from all ranks, whose lengths may differ, -> [M, ...]."""
    if accelerator.num_processes == 1:
        return values
    return torch.cat([part.to(values.device) for part in gather_object([values.cpu()])])


def _nth_largest(values: Tensor, tokens: Tokens, share: float) -> Tensor:
    """Return the smallest value within the largest share of values [N] on all ranks, of at least one value."""
    all_values = tokens.gather(values[tokens.counts > 0])
    return all_values.topk(max(1, round(share * len(all_values)))).values[-1]
