"""Selection of the layout of batches: layouts that a model's attention supports and that pass the parity check."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import InputError
from . import forward
from .attention import BY_SEGMENT
from .attention_masks import BY_BLOCK
from .attention_selection import restore_attention, row_multiple
from .parity_check import check_forward, passes_parity_check
from .recurrent_segments import stateful_layers, supports_segments
from .rotary import rope_switch_length
from .vision_inputs import VisionInputs

logger = logging.getLogger(__name__)


def choose_layout(
    models: Sequence[PreTrainedModel], layout: str, max_length: int | None = None, current: str | None = None
) -> str:
    """Return the layout for all of `models`.

    The choice for `auto` is logged, unless it is the current layout.

    Args:
        models: Causal LMs that score the same batches.
        layout: `auto` for the cheapest supported layout, or an explicit layout.
        max_length: Limit of row lengths in tokens, None without a limit.
        current: The layout so far.

    Raises:
        InputError: If a model does not support the explicit layout.
    """
    layouts, reason = supported_layouts(models, max_length)
    if layout == "auto":
        if layouts[0] != current:
            logger.info("layout: %s (%s)", layouts[0], reason)
        return layouts[0]
    if layout not in layouts:
        raise InputError(f"layout={layout!r} is not supported here ({reason}). Use layout={layouts[0]!r} or auto")
    return layout


def supported_layouts(models: Sequence[PreTrainedModel], max_length: int | None = None) -> tuple[list[str], str]:
    """Return the layouts that all of `models` support, the cheapest first, and the reason.

    Args:
        models: Causal LMs that score the same batches.
        max_length: Limit of row lengths in tokens, None without a limit.
    """
    results = [_layouts_of_model(model, max_length) for model in models]
    layouts = [name for name in ("shared", "packed", "padded") if all(name in supported for supported, _ in results)]
    reasons = [f"{type(model).__name__}: {reason}" for model, (_, reason) in zip(models, results, strict=True)]
    if layouts != ["padded"] and requires_segments(models, models[0].device):
        problem = "one model requires rows in segments, which the attention of another does not support"
        return ["padded"], f"{problem}: {', '.join(reasons)}"
    return layouts, "; ".join(dict.fromkeys(reasons))


def requires_segments(models: Sequence[PreTrainedModel], device: torch.device | None = None) -> bool:
    """Return whether a model with recurrent layers requires one row in segments while another model requires a mask.

    Args:
        models: Causal LMs that score the same batches.
        device: Device on which `choose_attention` will be called for the models. None if it has been called.
    """
    return any(map(stateful_layers, models)) and row_multiple(models, device) is None


def _layouts_of_model(model: PreTrainedModel, max_length: int | None) -> tuple[list[str], str]:
    """Return the layouts that a model supports, and the reason."""
    switch_length = rope_switch_length(model)
    adapters = getattr(model, "peft_config", {})
    if switch_length and (max_length is None or max_length > switch_length):
        return ["padded"], f"rows of more than {switch_length} tokens have other rotary frequencies"
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        return ["padded"], "activated LoRA is enabled once per row"

    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    layer_types = set(getattr(config, "layer_types", None) or ())
    has_recurrent_layers = bool(stateful_layers(model))
    if has_recurrent_layers and not supports_segments(model):
        return ["padded"], "the forward of its recurrent layers is unknown (see the tested versions of transformers)"
    if layer_types - {"full_attention", "sliding_attention"} and not has_recurrent_layers:
        return ["padded"], f"it has layers that do not support a custom mask: {', '.join(sorted(layer_types))}"
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_flex_attn", False):
        return ["padded"], "the architecture declares no attention that supports a custom mask"

    if "flash" in implementation:
        return ["packed", "padded"], "FlashAttention separates packed documents and does not support a custom mask"
    if has_recurrent_layers and implementation not in ("sdpa", BY_SEGMENT):
        return ["padded"], f"recurrent layers require sdpa for rows in segments, not {implementation}"
    if implementation in ("sdpa", BY_SEGMENT, "eager", "flex_attention", BY_BLOCK):
        name = {BY_SEGMENT: "sdpa", BY_BLOCK: "flex_attention"}.get(implementation, implementation)
        return ["shared", "packed", "padded"], f"{name} supports a custom mask, so a prompt is computed once"
    return ["padded"], f"attention implementation {implementation!r} is not known to support a custom mask"


def verified_layout(
    models: Sequence[nn.Module],
    layout: str,
    explicit: bool,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    vision_inputs: VisionInputs | None = None,
    teachers: Sequence[nn.Module] = (),
) -> str:
    """Return `layout` if all models pass the parity check in it, otherwise `padded`, with a warning.

    A model that fails even in `padded` computes something after its head that `LogitTransform` does not know. It is
    scored by its own logits instead, also with a warning.

    Args:
        models: Models after `enable_scoring`.
        layout: Layout to check.
        explicit: Whether the user chose the layout.
        device: Device of the batches.
        max_length: See `parity_error`.
        vision_inputs: See `parity_error`.
        teachers: The models in `models` from which divergences are computed.

    Raises:
        InputError: If the user's explicit layout fails, if a model fails even with its own logits, or if its weights or
            logits are not finite.
    """
    causal_lms = [forward.causal_lm(model) for model in models]
    for model in models:
        check_forward(model, any(model is teacher for teacher in teachers))
        inner = forward.causal_lm(model)
        name = type(inner).__name__.removeprefix("FSDP")
        passes = partial(
            passes_parity_check,
            model,
            device=device,
            max_length=max_length,
            vision_inputs=vision_inputs,
            other_models=causal_lms,
        )
        if passes(layout):
            continue

        if layout != "padded" and restore_attention(inner):
            logger.info("%s fails the parity check with a row in segments or blocks. Its attention gets a mask", name)
            if passes(layout):
                continue
        if layout != "padded" and passes("padded"):
            if explicit:
                raise InputError(
                    f"layout={layout!r} is not supported for {name}, because its scores differ from its own forward. "
                    "Use layout=padded"
                )
            logger.warning("the scores of %s differ from its own forward in layout %s. Using padded", name, layout)
            layout = "padded"
            continue

        setattr(inner, forward.USES_OWN_LOGITS, True)
        logger.warning(
            "the head of %s computes more than scale, softcap and bias. Its own forward is used, with all logits", name
        )
        if not passes(layout):
            if layout == "padded" or not passes("padded"):
                raise InputError(
                    f"{name} is not supported, because its scores in a batch differ from its scores of each row alone. "
                    "Use another model"
                )
            layout = "padded"

    if layout != "padded" and requires_segments(causal_lms):
        problem = "a model with recurrent layers requires rows in segments, and the attention of another gets a mask"
        if explicit:
            raise InputError(f"layout={layout!r} is not supported, because {problem}. Use layout=padded")
        logger.warning("layout %s is not supported, because %s. Using padded", layout, problem)
        layout = "padded"
    return layout
