"""Tile functions of SFT that weight the log-probability of each token.

Legend: n tokens of one tile, V vocabulary.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from .head import LogProb, Tile

ENTROPY_TOKENS = 20
"""Most likely tokens from which `EntropyWeightedLogProb` computes the entropy."""


@dataclass(frozen=True)
class WeightedLogProb(LogProb):
    """Tile function: value = sg(p) log p for the probability p of the target, where sg stops the gradient.

    The statistic `student` is log p.
    """

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V]."""
        tile = super().__call__(logits, rows, need_grad, buffer)
        return tile.weighted(tile.value.exp())


@dataclass(frozen=True)
class EntropyWeightedLogProb(LogProb):
    """Tile function: value = sg(h) log p, where h in [0, 1] is the entropy of the 20 most likely tokens over ln 20.

    The probabilities of these tokens are scaled to sum 1, and sg stops the gradient. The statistic `student` is log p.
    """

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V]."""
        known = logits[:, : self.vocabulary]
        top = known.topk(min(ENTROPY_TOKENS, known.shape[-1])).values / self.temperature  # [n, 20]
        gaps = (top - top[:, :1]).clamp(min=-1e30)  # 0 x -inf would be NaN
        others = gaps[:, 1:].exp().sum(-1)  # sum of the odds against the most likely token
        entropy = others.log1p() - (gaps.exp() * gaps).sum(-1) / (1 + others)  # both terms are positive
        return super().__call__(logits, rows, need_grad, buffer).weighted(entropy / math.log(top.shape[-1]))
