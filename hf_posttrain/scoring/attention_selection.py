"""The attention implementation of a model: the form of `attention` that is quickest on a device."""

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
BEFORE = "_attention_before_ours"
"""The attribute of a model that keeps what `choose_attention` replaced."""
FORMS: dict[str, Callable[..., Any]] = {BY_SEGMENT: attend_by_segment, BY_BLOCK: attend_by_block}


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Give a causal LM that will run on `device` the form that is quickest there; on a GPU it is logged, and why."""
    chosen, why = quickest(model, device)
    if chosen in FORMS and model.config.get_text_config()._attn_implementation != chosen:
        AttentionInterface.register(chosen, FORMS[chosen])
        AttentionMaskInterface.register(chosen, sdpa_mask)  # of rows that were not laid out here, as in generation
        setattr(model, BEFORE, model.config.get_text_config()._attn_implementation)
        model.set_attn_implementation(chosen)
    if device.type != "cpu":
        avoid_cudnn(device)
        logger.info("attention of %s: %s (%s)", type(model).__name__, chosen, why)


def undo_choice(model: PreTrainedModel) -> bool:
    """Give a model back what `choose_attention` replaced, which takes a mask. False where that was nothing."""
    before = vars(model).pop(BEFORE, None)
    if before:
        model.set_attn_implementation(before)
    return before is not None


def avoid_cudnn(device: torch.device) -> None:
    """On a GPU, no cuDNN as a backend of sdpa: on Hopper it plans anew for each shape, 0.4 to 1 s each time. The
    environment variable TORCH_CUDNN_SDPA_ENABLED=1 keeps it.
    """
    if device.type != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(os.environ.get("TORCH_CUDNN_SDPA_ENABLED") == "1")


def quickest(model: PreTrainedModel, device: torch.device) -> tuple[str, str]:
    """The attention implementation that `choose_attention` gives a model, and why."""
    config: Any = model.config.get_text_config()
    asked = config._attn_implementation or "eager"
    if asked in FORMS or not model._can_set_attn_implementation():
        return asked, "it is set already, or cannot be set"
    if asked == "sdpa":
        return BY_SEGMENT, "each piece of a row alone" + ", in one varlen call" * has_varlen_kernel(device)
    if asked == "flex_attention":
        return BY_BLOCK, "flex_attention was asked for"
    caps = getattr(config, "attn_logit_softcapping", None)
    dropout = getattr(config, "attention_dropout", 0)
    if asked == "eager" and caps and not dropout and device.type != "cpu" and model._supports_flex_attn:
        return BY_BLOCK, "the model caps its attention scores, which sdpa does not"
    return asked, "the model was loaded with it"


def row_multiple(models: Sequence[PreTrainedModel], device: torch.device | None = None) -> int | None:
    """Is a micro-batch of all these models best one row? Then what its length must be a multiple of, else None.

    device: for models that are yet to be given the form that is quickest there.
    """
    multiples = {BY_SEGMENT: 1, BY_BLOCK: 2 * BLOCK}  # a row of one block would be compiled for itself
    found = []
    for model in models:
        now = model.config.get_text_config()._attn_implementation
        found.append(multiples.get(quickest(model, device)[0] if device else now))
    return None if None in found else max(found)  # type: ignore[type-var]
