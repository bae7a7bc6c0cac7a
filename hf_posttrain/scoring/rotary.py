"""Rotary frequencies that depend on the length of a row (LongRoPE, dynamic NTK), computed for each row separately.

transformers uses the frequencies of the longest row in the batch, or with dynamic NTK of the longest row so far.
The length of a row counts the tokens that the model reads. The last trained token is predicted and is not an input.

Legend: R rows, L row length.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def rope_switch_length(model: nn.Module) -> int | None:
    """Return the number of tokens above which a row has other rotary frequencies, or None if all rows have the same."""
    return min(filter(None, map(_switch_length, model.modules())), default=None)


def _switch_length(module: nn.Module) -> int | None:
    """Return `rope_switch_length` of a rotary embedding, and None for any other module."""
    rope_type = getattr(module, "rope_type", None)
    if not {"longrope", "dynamic"} & set(rope_type.values() if isinstance(rope_type, dict) else [rope_type]):
        return None
    embedding: Any = module
    parameters = embedding.config.rope_parameters  # of the model, or of each type of layer
    groups = [group for group in (parameters, *parameters.values()) if isinstance(group, dict)]
    original_lengths = (group.get("original_max_position_embeddings") for group in groups)
    return min(filter(None, [embedding.original_max_seq_len, *original_lengths]))


def enable_per_row_rope(model: nn.Module) -> None:
    """Let rotary embeddings whose frequencies depend on lengths compute each row separately."""
    for module in model.modules():
        if _switch_length(module):
            module.forward = MethodType(_rotate, module)


def _rotate(module: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Compute the forward of a rotary embedding for position_ids [R, L], in one call if no row exceeds the switch."""
    outputs = []
    switch_length = _switch_length(module)
    assert switch_length is not None
    for rows in position_ids.split(1) if position_ids.amax() >= switch_length else [position_ids]:
        # forget the longest row so far
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, 0)
        outputs.append(type(module).forward(module, x, rows, *args, **kwargs))
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
