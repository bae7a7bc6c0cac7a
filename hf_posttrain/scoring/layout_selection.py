"""The layout of batches: which layouts the attention of a model supports, and which of them pass the parity check."""

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
from .attention_selection import row_multiple, undo_choice
from .parity_check import check_causal, check_finite, is_right
from .recurrent_segments import stateful_layers, takes_pieces
from .rotary import rope_switch
from .vision_inputs import VisionInputs

logger = logging.getLogger(__name__)


def choose_layout(models: Sequence[PreTrainedModel], layout: str, max_length: int | None = None) -> str:
    """The layout to use for all of `models`: an explicit one that they can take, or for `auto` the cheapest.

    max_length: of rows, None without a limit. The choice is logged unless the models before the last one have it too.
    Raises InputError where a model cannot take the explicit layout.
    """
    fitting, why = able(models, max_length)
    if layout == "auto":
        if len(models) == 1 or fitting[0] != able(models[:-1], max_length)[0][0]:
            logger.info("layout: %s (%s)", fitting[0], why)
        return fitting[0]
    if layout not in fitting:
        raise InputError(f"layout={layout!r} does not work here ({why}): use layout={fitting[0]!r} or auto")
    return layout


def able(models: Sequence[PreTrainedModel], max_length: int | None = None) -> tuple[list[str], str]:
    """The layouts that all of `models` can take, the cheapest first, and why these."""
    found = [_able(model, max_length) for model in models]
    fitting = [name for name in ("shared", "packed", "padded") if all(name in theirs for theirs, _ in found)]
    reasons = [f"{type(model).__name__}: {reason}" for model, (_, reason) in zip(models, found, strict=True)]
    if fitting != ["padded"] and wants_pieces(models, models[0].device):
        return ["padded"], f"one of {', '.join(reasons)} takes a row in pieces, which another's attention does not"
    return fitting, "; ".join(dict.fromkeys(reasons))


def wants_pieces(models: Sequence[PreTrainedModel], device: torch.device | None = None) -> bool:
    """Does a model keep a state, so that it wants one row in pieces, while another gets rows with a mask?

    device: for models that are yet to be given the attention that is quickest there.
    """
    return any(map(stateful_layers, models)) and row_multiple(models, device) is None


def _able(model: PreTrainedModel, max_length: int | None) -> tuple[list[str], str]:
    """Layouts that work, and why."""
    switch = rope_switch(model)
    adapters = getattr(model, "peft_config", {})
    if switch and (max_length is None or max_length > switch):
        return ["padded"], f"rows of more than {switch} tokens have other rotary frequencies"
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        return ["padded"], "activated LoRA is switched on once in a row"
    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    kinds = set(getattr(config, "layer_types", None) or ())
    keeps_state = bool(stateful_layers(model))
    if keeps_state and not takes_pieces(model):
        return ["padded"], "the forwards of its layers that keep a state have changed (see the tested transformers)"
    if kinds - {"full_attention", "sliding_attention"} and not keeps_state:
        return ["padded"], f"it has layers that take no custom mask: {', '.join(sorted(kinds))}"
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_flex_attn", False):
        return ["padded"], "the architecture declares no attention that takes a custom mask"
    if "flash" in implementation:
        return ["packed", "padded"], "FlashAttention keeps packed documents apart and takes no custom mask"
    if keeps_state and implementation not in ("sdpa", BY_SEGMENT):
        return ["padded"], f"layers that keep a state take the pieces of a row with sdpa, not {implementation}"
    if implementation in ("sdpa", BY_SEGMENT, "eager", "flex_attention", BY_BLOCK):
        name = {BY_SEGMENT: "sdpa", BY_BLOCK: "flex_attention"}.get(implementation, implementation)
        return ["shared", "packed", "padded"], f"{name} takes a custom mask, so a prompt is computed once"
    return ["padded"], f"attention implementation {implementation!r} is not known to take a custom mask"


def trusted_layout(
    models: Sequence[nn.Module],
    layout: str,
    explicit: bool,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    pictures: VisionInputs | None = None,
    teachers: Sequence[nn.Module] = (),
) -> str:
    """`layout` if every model scores in it as its own forward does; otherwise `padded`, said in the log.

    A model that is wrong even then does something behind its head that `LogitTransform` does not know: it is set to be
    scored by its own logits, said as well. Raises InputError where the layout was the user's explicit choice, and where
    a model is wrong even with its own logits, or computes no numbers. max_length, pictures: see `check`. teachers: the
    models of which divergences are computed.
    """
    beside = [forward.causal_lm(model) for model in models]
    for model in models:
        check_finite(model, any(model is teacher for teacher in teachers))
        check_causal(model)
        inner = forward.causal_lm(model)
        name = type(inner).__name__.removeprefix("FSDP")
        right = partial(is_right, model, device=device, max_length=max_length, pictures=pictures, beside=beside)
        if right(layout):
            continue
        if layout != "padded" and undo_choice(inner):
            logger.info("%s scores otherwise with a row in pieces or blocks: its attention gets a mask", name)
            if right(layout):
                continue
        if layout != "padded" and right("padded"):
            if explicit:
                raise InputError(
                    f"layout={layout!r} gives {name} other numbers than its own forward: use layout=padded"
                )
            logger.warning("%s scores wrongly in layout %s: using padded", name, layout)
            layout = "padded"
            continue
        setattr(inner, forward.OWN_LOGITS, True)
        said = "the head of %s does more than scale, softcap and bias: its own forward is used, with all logits"
        logger.warning(said, name)
        if not right(layout):
            if layout == "padded" or not right("padded"):
                raise InputError(f"{name} scores otherwise in batches than each row alone: it is not supported")
            layout = "padded"
    if layout != "padded" and wants_pieces(beside):
        what = "a model that keeps a state takes a row in pieces, which an attention that gets a mask does not"
        if explicit:
            raise InputError(f"layout={layout!r}: {what}: use layout=padded")
        logger.warning("layout %s: %s: using padded", layout, what)
        layout = "padded"
    return layout
