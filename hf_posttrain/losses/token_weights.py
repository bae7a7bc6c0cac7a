"""Which tokens of a rollout count how much: OPD's `token_weights`.

Each function takes the tokens of a window, on all ranks, and its options, and returns a weight for each token of this
rank; `weigh` makes their mean 1 over the window, so that a learning rate means the same. A is the advantage
ln p - ln q of a sampled token, of a teacher p and a student q.

To add one, write a function and a row in TOKEN_WEIGHTS here, its options as a class in rollouts/options.py, and its
definition in tests/losses/test_token_weights.py.

Legend: N tokens of this rank's rollouts in the window, M those of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from .divergence import by_rollout


@dataclass
class Tokens:
    """What weights may depend on, [N] each, and `everyone`, which gathers such values from all ranks: [N] -> [M]."""

    student: Tensor  # ln q of the sampled token, at the temperature of sampling; rounding may leave it just above 0
    teacher: Tensor  # ln p
    divergence: Tensor  # of the loss, over the whole vocabulary; the policy gradient has -A
    rollout: Tensor  # which rollout it belongs to; its tokens are in order
    counts: Tensor  # 1, or 0 for what only fills up a last batch
    everyone: Callable[[Tensor], Tensor] = lambda values: values

    @classmethod
    def of(cls, parts: Sequence["Tokens"], accelerator: Accelerator) -> "Tokens":
        """Those of several micro-batches, whose rollouts are numbered from 0 each."""
        ends = np.cumsum([0, *(int(part.rollout.max()) + 1 for part in parts)]).tolist()
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("student", "teacher", "counts")}
        rollout = torch.cat([part.rollout + start for part, start in zip(parts, ends, strict=False)])
        divergence = torch.cat([part.divergence for part in parts])
        return cls(rollout=rollout, divergence=divergence, everyone=partial(_gathered, accelerator), **joined)

    @property
    def advantage(self) -> Tensor:
        """A, [N]."""
        return self.teacher - self.student


def cumulative(tokens: Tokens, gain: float) -> Tensor:
    """1 + g (1 - C_{t-1} / C_T), C_t the sum of |A| up to t: early tokens count more (IW-OPD, arXiv 2606.22600)."""
    table, where = by_rollout(tokens.advantage.abs(), tokens.rollout)
    before = (table.cumsum(1) - table) / table.sum(1, keepdim=True).clamp(min=1e-30)
    return (1 + gain * (1 - before))[where]


def top_share(tokens: Tokens, share: float) -> Tensor:
    """1 for the share of tokens with the largest divergence, else 0 (TIP, arXiv 2604.14084)."""
    return (tokens.divergence >= _nth_largest(tokens.divergence, tokens, share)).to(tokens.divergence)


def extremes(tokens: Tokens, share: float) -> Tensor:
    """1 for the shares of tokens with the largest and with the smallest A, else 0 (arXiv 2609.04565)."""
    high, low = (_nth_largest(sign * tokens.advantage, tokens, share) for sign in (1, -1))
    return ((tokens.advantage >= high) | (-tokens.advantage >= low)).to(tokens.advantage)


def bounded(tokens: Tokens) -> Tensor:
    """|q - p| / (q + p) of the sampled token: what both models find alike counts little (IDA, arXiv 2608.29846)."""
    return (tokens.advantage / 2).tanh().abs()  # (e^A - 1) / (e^A + 1)


def sign(tokens: Tokens) -> Tensor:
    """C / |A|, so that the policy gradient has c x the sign of A, c the mean of |A| (TV-OPD, arXiv 2609.08341). An |A|
    below a thousandth counts as that: its sign is rounding.
    """
    return 1 / tokens.advantage.abs().clamp(min=1e-3)


TOKEN_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "cumulative": cumulative,
    "top_share": top_share,
    "extremes": extremes,
    "bounded": bounded,
    "sign": sign,
}


def weigh(tokens: Tokens, name: str, options: Mapping[str, float]) -> Tensor:
    """Return the weights, [N], with mean 1 over the tokens of the window that count. Weights of `sign` have no bound:
    there the mean of w |A| is that of |A|.
    """
    weights = TOKEN_WEIGHTS[name](tokens, **options)
    scale = tokens.advantage.abs() if name == "sign" else torch.ones_like(weights)
    sums = torch.stack([(scale * tokens.counts).sum(), (weights * scale * tokens.counts).sum()])[None]
    plain, weighted = tokens.everyone(sums).sum(0).unbind()
    return weights * (plain / weighted.clamp(min=1e-30))


def _gathered(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Values of all ranks, [N, ...] of any length each -> [M, ...]."""
    if accelerator.num_processes == 1:
        return values
    return torch.cat([part.to(values.device) for part in gather_object([values.cpu()])])


def _nth_largest(values: Tensor, tokens: Tokens, share: float) -> Tensor:
    """The smallest of the share of values [N] that are largest among those of all ranks; one value at least."""
    known = tokens.everyone(values[tokens.counts > 0])
    return known.topk(max(1, round(share * len(known)))).values[-1]
