"""Who may look at whom: the masks of the layouts of `batch.py`, and which layout a model's attention can take.

    attention_mask    what a forward over a batch is given; on CPU its masks know where documents end
    by_document       sdpa for such a mask: each document alone, so that a row costs no more than its documents
    choose_layout     the cheapest layout that all models can take

Legend: R rows, L row length.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import InputError

logger = logging.getLogger(__name__)


def allowed(batch: dict[str, Tensor], window: int | None = None) -> Tensor:
    """[R, L, L] bool, may query i see key j: j <= i, same document, and j in the prompt or in i's own branch.

    window: how many positions back a sliding layer sees, itself included. Every query sees at least itself.
    """
    document, branch, position = batch["document"], batch["branch"], batch["position_ids"]
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    same_document = document[:, :, None] == document[:, None, :]
    visible_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    mask = causal & same_document & visible_branch
    return mask if window is None else mask & (position[:, :, None] - position[:, None, :] < window)


def attention_mask(model: PreTrainedModel, batch: dict[str, Tensor]) -> Any:
    """What to pass as `attention_mask`: None, the padding mask [R, L], or prepared masks by kind of layer."""
    if "document" not in batch:
        return batch.get("attention_mask")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    make = partial(_prepared_mask, batch, config._attn_implementation, model.dtype)
    if "sliding_attention" in kinds:
        return {"full_attention": make(None), "sliding_attention": make(window)}
    return make(None if kinds else window)  # Mistral has a window and no layer types


def _prepared_mask(batch: dict[str, Tensor], implementation: str, dtype: torch.dtype, window: int | None) -> Any:
    """A mask in the form of the attention kernel; transformers takes a prepared 4D mask as it is."""
    if implementation == "flex_attention":
        return flex_mask(batch, window)
    mask = allowed(batch, window)[:, None]
    if implementation == "sdpa":
        if mask.device.type == "cpu":
            mask.document_masks = document_masks(batch, mask)  # type: ignore[attr-defined]
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def document_masks(batch: dict[str, Tensor], mask: Tensor) -> list[tuple[int, Tensor | None]]:
    """(length, mask [1, 1, length, length] or None where it is plain causal) of each document in the flattened rows.

    mask [R, 1, L, L]: nobody sees beyond the document; the padding of a row is a document of its own.
    """
    found = []
    for row, document in enumerate(batch["document"]):
        start = 0
        for size in document.unique_consecutive(return_counts=True)[1].tolist():  # all on CPU
            own = mask[row : row + 1, :, start : start + size, start : start + size]
            causal = own.numpy().sum() == size * (size + 1) // 2
            found.append((size, None if causal else own))
            start += size
    return found


def by_document(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa; with `document_masks` on the mask each document alone. [R, heads, L, D] -> [R, L, heads, D].

    A fused kernel on CPU computes all L x L pairs of a masked row, whatever the mask forbids.
    """
    documents = getattr(attention_mask, "document_masks", None)
    if documents is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    sizes = [size for size, _ in documents]
    states = zip(*(states.transpose(1, 2).flatten(0, 1).split(sizes) for states in (query, key, value)), strict=True)
    found = []
    for (_, mask), parts in zip(documents, states, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)  # [1, heads, length, D]
        given = kwargs if mask is not None else kwargs | {"is_causal": True}
        found.append(sdpa_attention_forward(module, q, k, v, mask, **given)[0])
    return torch.cat(found, dim=1).unflatten(1, (query.shape[0], query.shape[2])).squeeze(0), None


AttentionInterface.register("sdpa", by_document)  # a mask without documents is computed as ever


def flex_mask(batch: dict[str, Tensor], window: int | None) -> Any:
    """The same rule as `allowed` as a BlockMask, which never exists as L x L (GPU)."""
    from torch.nn.attention.flex_attention import create_block_mask

    document, branch, position = batch["document"], batch["branch"], batch["position_ids"]

    def rule(r, _head, i, j):
        visible = (branch[r, j] == 0) | (branch[r, j] == branch[r, i])
        mask = (j <= i) & (document[r, i] == document[r, j]) & visible
        return mask if window is None else mask & (position[r, i] - position[r, j] < window)

    rows, length = document.shape
    return create_block_mask(rule, rows, None, length, length, device=str(document.device))


def choose_layout(models: Sequence[PreTrainedModel], layout: str) -> str:
    """The layout to use for all of `models`: an explicit one that they can take, or for `auto` the cheapest.

    That is logged unless it is what the models before the last one have already.
    Raises InputError where a model cannot take the explicit layout.
    """
    fitting, why = able(models)
    if layout == "auto":
        if len(models) == 1 or fitting[0] != able(models[:-1])[0][0]:
            logger.info("layout: %s (%s)", fitting[0], why)
        return fitting[0]
    if layout not in fitting:
        raise InputError(f"layout={layout!r} does not work here ({why}): use layout={fitting[0]!r} or auto")
    return layout


def able(models: Sequence[PreTrainedModel]) -> tuple[list[str], str]:
    """The layouts that all of `models` can take, the cheapest first, and why these."""
    found = [_able(model) for model in models]
    fitting = [name for name in ("shared", "packed", "padded") if all(name in theirs for theirs, _ in found)]
    reasons = [f"{type(model).__name__}: {reason}" for model, (_, reason) in zip(models, found, strict=True)]
    return fitting, "; ".join(dict.fromkeys(reasons))


def _able(model: PreTrainedModel) -> tuple[list[str], str]:
    """Layouts that work, and why."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return ["padded"], f"it has layers that take no custom mask: {', '.join(sorted(kinds))}"
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_flex_attn", False):
        return ["padded"], "the architecture declares no attention that takes a custom mask"
    if "flash" in implementation:
        return ["packed", "padded"], "FlashAttention keeps packed documents apart and takes no custom mask"
    if implementation in ("sdpa", "eager", "flex_attention"):
        return ["shared", "packed", "padded"], f"{implementation} takes a custom mask, so a prompt is computed once"
    return ["padded"], f"attention implementation {implementation!r} is not known to take a custom mask"
