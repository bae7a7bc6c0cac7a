"""Positions of tokens in their sequences, and padding of values of tokens to a table with a row per sequence.

Legend: N tokens.
"""

import torch
from torch import Tensor


def positions_in_sequence(owner: Tensor) -> Tensor:
    """Return the position of each token in its sequence, counted from 0, [N].

    Does not synchronize with the device.

    Args:
        owner: Sequence to which each token belongs, [N]. The tokens of a sequence are in order, and tokens of other
            sequences may lie between them.
    """
    order = torch.argsort(owner, stable=True)
    number = torch.arange(len(owner), device=owner.device)
    begins = owner[order] != owner[order].roll(1)

    positions = torch.empty_like(number)
    positions[order] = number - (number * begins).cummax(0).values
    return positions


def pad_by_sequence(values: Tensor, owner: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Arrange values [N] as a table with one row per sequence, padded with 0 on the right.

    Args:
        values: One value per token, [N].
        owner: As in `positions_in_sequence`, counted from 0.

    Returns:
        The table [sequences, longest sequence], and the indices of the N values in it.
    """
    indices = owner, positions_in_sequence(owner)
    table = values.new_zeros([int(part.max()) + 1 if len(part) else 0 for part in indices])
    table[indices] = values
    return table, indices
