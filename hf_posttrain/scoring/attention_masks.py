"""Attention masks of a laid-out batch, for attention implementations that do not compute a row by segment.

Legend: R rows, L row length.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batching.micro_batch import MicroBatch
from .flex import BLOCK, block_mask

BY_BLOCK = "flex_by_block"
"""Attention implementation of `flex`, which replaces flex_attention of transformers."""


def attention_masks(model: PreTrainedModel, batch: MicroBatch, images_in_all_layers: bool) -> Any:
    """Return the mask for a model, or the masks of its layers by their type.

    Args:
        model: Causal LM.
        batch: Laid-out batch.
        images_in_all_layers: The tokens of an image attend to each other in all layers, not in sliding ones alone.
    """
    config: Any = model.config.get_text_config()
    implementation = config._attn_implementation or ""
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    sliding_window = getattr(config, "sliding_window", None)
    full_attention_batch = batch if images_in_all_layers else batch.replace(image_numbers=None)

    def mask(window: int | None) -> Any:
        layer_batch = full_attention_batch if window is None else batch
        if implementation == BY_BLOCK and batch.segments and batch.input_ids.shape[1] % BLOCK == 0:
            return block_mask(layer_batch, window, lambda size, i, j: attends(layer_batch, size, 0, i, j))
        pairs = allowed_pairs(layer_batch, window)[:, None]
        if implementation not in ("eager", "flex_attention"):  # these two add the mask to the scores
            return pairs
        return torch.zeros_like(pairs, dtype=model.dtype).masked_fill(~pairs, torch.finfo(model.dtype).min)

    if "sliding_attention" in layer_types:
        return {"full_attention": mask(None), "sliding_attention": mask(sliding_window)}
    return mask(None if layer_types else sliding_window)  # Mistral has a window and no layer types


def allowed_pairs(batch: MicroBatch, window: int | None = None) -> Tensor:
    """Return whether query i may attend to key j, [R, L, L] bool.

    It may if j <= i, both are in the same document, and j is in the prompt or in the branch of i.

    Args:
        batch: Laid-out batch.
        window: Number of positions to which a sliding layer attends, its own included. Each query attends at least to
            itself.
    """
    row, place = (torch.arange(size, device=batch.input_ids.device) for size in batch.input_ids.shape)
    return attends(batch, window, row[:, None, None], place[:, None], place)


def attends(batch: MicroBatch, window: int | Tensor | None, r: Tensor | int, i: Tensor, j: Tensor) -> Tensor:
    """Apply the rule of `allowed_pairs` to query i and key j of row r, indices of any shapes that broadcast."""
    document = batch.document
    branch = batch.branch
    position = batch.position_ids
    image = batch.image_numbers
    assert document is not None
    assert branch is not None

    own_branch = (branch[r, j] == 0) | (branch[r, j] == branch[r, i])
    visible = j <= i
    if image is not None:
        visible = visible | ((image[r, i] == image[r, j]) & (image[r, i] > 0))
    mask = visible & (document[r, i] == document[r, j]) & own_branch
    return mask if window is None else mask & (position[r, i] - position[r, j] < window)
