"""All ids that end an answer as one outcome.

A base student ends with one id, its instruct teacher with another. To stop at both is not enough: at an end the student
has its mass on its own id, the teacher on the other, so a divergence punishes ending, and nothing raises the teacher's
id, of which the student has next to none. Lengths then run to the limit. Hence E, the terminal ids of both models, is
one outcome wherever student and teacher are compared: q_E = sum over E of q, and p_E likewise (arXiv 2609.20511).

In logits z at a temperature T: the first of E gets T ln sum over E of e^(z / T), the others none.

Legend: n tokens of a tile, V vocabulary, E terminal ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .head import Tile, TileFunction


@dataclass(frozen=True)
class StopOutcome:
    """Which ids are one outcome. Fewer than two: nothing changes, bit for bit."""

    ids: Tensor  # [E]
    temperature: float = 1.0

    def __bool__(self) -> bool:
        return len(self.ids) > 1

    def of(self, tokens: Tensor) -> Tensor:
        """Token ids of any shape, the first of E in place of any of E."""
        return tokens.where(torch.isin(tokens, self.ids, invert=True), self.ids[0]) if self else tokens

    def merge(self, logits: Tensor) -> Tensor:
        """Merge E into one outcome in logits [n, V], in place. Return the share of each id in it, [n, E]."""
        scaled = logits[:, self.ids] / self.temperature
        logits[:, self.ids] = -torch.inf
        # indexed by a tensor of one: a number would be read from the device
        logits[:, self.ids[:1]] = scaled.logsumexp(-1, keepdim=True) * self.temperature
        return scaled.softmax(-1)

    def __call__(self, tile: TileFunction) -> TileFunction:
        """The tile function over merged logits; its gradient is with respect to the logits as they were."""

        def merged(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            shares = self.merge(logits)
            found = tile(logits, rows, need_grad, buffer)
            if found.grad is not None:  # d ln sum e^z / d z is the share
                found.grad[:, self.ids] = (found.grad[:, self.ids[:1]] * shares).to(found.grad.dtype)
            return found

        return merged if self else tile
