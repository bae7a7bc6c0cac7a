"""Selection of the attention implementation that is fastest for a model on a device."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from .attention import BY_SEGMENT, attend_by_segment
from .attention_masks import BY_BLOCK
from .flex import BLOCK, attend_by_block
from .varlen import has_varlen_kernel

logger = logging.getLogger(__name__)
ORIGINAL_ATTENTION = "_attention_before_ours"
"""Attribute of a model with the implementation that `choose_attention` replaced."""
ATTENTION_FUNCTIONS: dict[str, Callable[..., Any]] = {BY_SEGMENT: attend_by_segment, BY_BLOCK: attend_by_block}


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Set the fastest attention implementation of a causal LM on `device`. On a GPU the choice is logged."""
    implementation, reason = fastest_attention(model, device)
    current = model.config.get_text_config()._attn_implementation
    if implementation in ATTENTION_FUNCTIONS and current != implementation:
        AttentionInterface.register(implementation, ATTENTION_FUNCTIONS[implementation])
        AttentionMaskInterface.register(implementation, sdpa_mask)  # for rows without a layout, as in generation
        setattr(model, ORIGINAL_ATTENTION, current)
        model.set_attn_implementation(implementation)

    if device.type != "cpu":
        disable_cudnn_attention(device)
        logger.info("attention of %s: %s (%s)", type(model).__name__, implementation, reason)


def restore_attention(model: PreTrainedModel) -> bool:
    """Restore the implementation that `choose_attention` replaced, which takes a mask.

    Returns:
        False if `choose_attention` replaced nothing.
    """
    original = vars(model).pop(ORIGINAL_ATTENTION, None)
    if original:
        model.set_attn_implementation(original)
    return original is not None


def disable_cudnn_attention(device: torch.device) -> None:
    """Disable cuDNN as a backend of sdpa on a GPU.

    On Hopper cuDNN builds a plan for each shape, which takes 0.4 to 1 s each time. The environment variable
    TORCH_CUDNN_SDPA_ENABLED=1 keeps it enabled.
    """
    if device.type != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(os.environ.get("TORCH_CUDNN_SDPA_ENABLED") == "1")


def fastest_attention(model: PreTrainedModel, device: torch.device) -> tuple[str, str]:
    """Return the attention implementation that `choose_attention` sets, and the reason."""
    config: Any = model.config.get_text_config()
    current = config._attn_implementation or "eager"
    if current in ATTENTION_FUNCTIONS or not model._can_set_attn_implementation():
        return current, "it is already set or cannot be set"
    if current == "sdpa":
        return BY_SEGMENT, "each segment of a row separately" + ", in one varlen call" * has_varlen_kernel(device)
    if current == "flex_attention":
        return BY_BLOCK, "flex_attention was requested"

    softcap = getattr(config, "attn_logit_softcapping", None)
    dropout = getattr(config, "attention_dropout", 0)
    if current == "eager" and softcap and not dropout and device.type != "cpu" and model._supports_flex_attn:
        return BY_BLOCK, "the model caps its attention scores, which sdpa does not support"
    return current, "the model was loaded with it"


def row_multiple(models: Sequence[PreTrainedModel], device: torch.device | None = None) -> int | None:
    """Return the number of which the row length must be a multiple, if one row per micro-batch is best for all models.

    Args:
        models: Causal LMs that score the same batches.
        device: Device on which `choose_attention` will be called for the models. None if it has been called.

    Returns:
        The number, or None if a micro-batch should have several rows.
    """
    multiples = {BY_SEGMENT: 1, BY_BLOCK: 2 * BLOCK}  # a row of one block would be compiled separately
    multiples_of_models = []
    for model in models:
        current = model.config.get_text_config()._attn_implementation
        multiples_of_models.append(multiples.get(fastest_attention(model, device)[0] if device else current))
    return None if None in multiples_of_models else max(multiples_of_models)  # type: ignore[type-var]
