"""Merging of several EOS ids into one outcome.

A base student may end an answer with one id and its instruct teacher with another. A divergence then penalizes the end
of an answer, because the probability of the student is on one id and that of the teacher on the other. Nothing raises
the id of the teacher, to which the student assigns almost no probability, and answers grow to the maximum length.
Therefore the EOS ids E of both models count as one outcome in all comparisons of student and teacher. Its probability
is q_E = sum of q over E, and p_E likewise (arXiv 2609.20511).

In logits z at a temperature T the first id of E gets T ln sum over E of e^(z / T), and the others get -inf.

Legend: n tokens of a tile, V vocabulary, E EOS ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..scoring.head import Tile, TileFunction


@dataclass(frozen=True)
class MergedEOS:
    """EOS ids that count as one outcome. Fewer than two ids change nothing."""

    ids: Tensor  # [E]
    temperature: float = 1.0

    def __bool__(self) -> bool:
        return len(self.ids) > 1

    def merge_ids(self, tokens: Tensor) -> Tensor:
        """Return token ids of any shape, in which the first EOS id replaces the others."""
        return tokens.where(torch.isin(tokens, self.ids, invert=True), self.ids[0]) if self else tokens

    def merge_logits(self, logits: Tensor) -> Tensor:
        """Merge the EOS ids in logits [n, V], in place. Return the share of each id in the outcome, [n, E]."""
        scaled = logits[:, self.ids] / self.temperature
        logits[:, self.ids] = -torch.inf
        # index with a tensor of size one, because a number would have to be copied from the device
        logits[:, self.ids[:1]] = scaled.logsumexp(-1, keepdim=True) * self.temperature
        return scaled.softmax(-1)

    def contains(self, tokens: Tensor) -> Tensor:
        """Return whether each token is one of the merged ids, bool of the shape of `tokens`."""
        return torch.isin(tokens, self.ids) if self else torch.zeros_like(tokens, dtype=torch.bool)

    def wrap(self, tile: TileFunction) -> TileFunction:
        """Return the tile function on merged logits, whose gradient is that of the logits before merging."""

        def merged(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            shares = self.merge_logits(logits)
            result = tile(logits, rows, need_grad, buffer)
            if result.grad is not None:  # the derivative of ln sum e^z by z is the share
                result.grad[:, self.ids] = (result.grad[:, self.ids[:1]] * shares).to(result.grad.dtype)
            return result

        return merged if self else tile
