"""Rotary frequencies that depend on the length of a row (LongRoPE, dynamic NTK): each row gets those of its own.

transformers takes those of the longest row in the batch, and with dynamic NTK those of the longest so far. A row is
what the model reads: the last trained token is predicted and is no input.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def rope_switch(model: nn.Module) -> int | None:
    """Rows of more tokens than this get other frequencies than shorter ones; None where all get the same."""
    return min(filter(None, map(_switch_of, model.modules())), default=None)


def _switch_of(module: Any) -> int | None:
    """`rope_switch` of a rotary embedding, None of any other module."""
    kinds = getattr(module, "rope_type", None)
    if not {"longrope", "dynamic"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
        return None
    given = module.config.rope_parameters  # of the model, or of each kind of layer
    each = [part for part in (given, *given.values()) if isinstance(part, dict)]
    return min(filter(None, [module.original_max_seq_len, *(p.get("original_max_position_embeddings") for p in each)]))


def rotate_by_row(model: nn.Module) -> None:
    """Let rotary embeddings whose frequencies depend on lengths look at each row alone."""
    for module in model.modules():
        if _switch_of(module):
            module.forward = MethodType(_rotate, module)


def _rotate(module: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A rotary embedding's forward, in one call where no row is longer than the switch: position_ids [R, L]."""
    found = []
    switch = _switch_of(module)
    assert switch is not None
    for rows in position_ids.split(1) if position_ids.amax() >= switch else [position_ids]:
        # the longest so far is forgotten
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, 0)
        found.append(type(module).forward(module, x, rows, *args, **kwargs))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
