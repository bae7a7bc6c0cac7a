"""Attention masks of a laid-out batch, for attention that does not take a row in pieces.

Legend: R rows, L row length.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batching.micro_batch import MicroBatch
from .flex import BLOCK, block_mask

BY_BLOCK = "flex_by_block"
"""Our implementation in place of transformers' flex_attention."""


def attention_masks(model: PreTrainedModel, batch: MicroBatch, images_in_all_layers: bool) -> Any:
    """Return the mask that a model takes, or the masks of its layers by their type.

    Args:
        images_in_all_layers: The tokens of an image attend to each other in all layers, not in sliding ones alone.
    """
    config: Any = model.config.get_text_config()
    implementation = config._attn_implementation or ""
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    sliding_window = getattr(config, "sliding_window", None)
    full_attention_batch = batch if images_in_all_layers else batch.replace(picture=None)

    def mask(window: int | None) -> Any:
        layer_batch = full_attention_batch if window is None else batch
        if implementation == BY_BLOCK and batch.segments and batch.input_ids.shape[1] % BLOCK == 0:
            return block_mask(layer_batch, window, lambda size, i, j: attends(layer_batch, size, 0, i, j))
        allows = allowed(layer_batch, window)[:, None]
        if implementation not in ("eager", "flex_attention"):  # these add theirs to the scores
            return allows
        return torch.zeros_like(allows, dtype=model.dtype).masked_fill(~allows, torch.finfo(model.dtype).min)

    if "sliding_attention" in layer_types:
        return {"full_attention": mask(None), "sliding_attention": mask(sliding_window)}
    return mask(None if layer_types else sliding_window)  # Mistral has a window and no layer types


def allowed(batch: MicroBatch, window: int | None = None) -> Tensor:
    """[R, L, L] bool, may query i see key j: j <= i, same document, and j in the prompt or in i's own branch.

    window: how many positions back a sliding layer sees, itself included. Every query sees at least itself.
    """
    row, place = (torch.arange(size, device=batch.input_ids.device) for size in batch.input_ids.shape)
    return attends(batch, window, row[:, None, None], place[:, None], place)


def attends(batch: MicroBatch, window: int | Tensor | None, r: Any, i: Tensor, j: Tensor) -> Tensor:
    """The rule of `allowed` for query i and key j of row r, indices of any shapes that broadcast."""
    document = batch.document
    branch = batch.branch
    position = batch.position_ids
    picture = batch.picture
    assert document is not None
    assert branch is not None
    own_branch = (branch[r, j] == 0) | (branch[r, j] == branch[r, i])
    seen = j <= i
    if picture is not None:
        seen = seen | ((picture[r, i] == picture[r, j]) & (picture[r, i] > 0))
    mask = seen & (document[r, i] == document[r, j]) & own_branch
    return mask if window is None else mask & (position[r, i] - position[r, j] < window)
