"""Attention of one row with flex_attention, for models that cap their attention scores (Gemma 2), or on request.

The kernel receives the attention rule as a function, and skips blocks of BLOCK x BLOCK tokens without an allowed pair:
no mask of L x L is built.

Legend: R rows, L row length, D size of a head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from transformers.integrations.sdpa_attention import repeat_kv

from ..batching.micro_batch import MicroBatch
from ..errors import InputError

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(window, queries i, keys j) -> bool, whether each query may attend to its key."""
BLOCK = 128  # tokens


@cache
def _compiled() -> Callable[..., Any]:
    """Return flex_attention, compiled once for all models, layers and shapes.

    One compilation per shape would reach dynamo's limit of 8 recompilations. From there on flex_attention runs without
    compilation, in memory of heads x L x L.
    """
    return torch.compile(flex.flex_attention, dynamic=True)


@cache
def _softcapped(cap: float) -> Callable[..., Any]:
    """Return the function cap * tanh(score / cap), cached because dynamo compiles for each new function."""
    return lambda score, *_: cap * torch.tanh(score / cap)


def attend_by_block(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: flex.BlockMask | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one row with flex_attention, or in plain torch if the mask is not a BlockMask (generation).

    Args:
        module: The attention layer.
        query: [R, heads, L, D].
        key: [R, heads, L, D].
        value: [R, heads, L, D].
        attention_mask: BlockMask of `block_mask`, a bool mask, or None for plain causal attention.
        scaling: Factor of the attention scores.
        softcap: Cap of the attention scores, or None.
        dropout: Probability of dropout, which must be 0.
        kwargs: Further arguments of the layer.

    Returns:
        The outputs [R, L, heads, D].

    Raises:
        RuntimeError: If the model passes arguments that are not supported (gpt-oss).
        InputError: If the model has dropout.
    """
    if unsupported := [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise RuntimeError(f"{type(module).__name__} passes {unsupported[0]} to attention, which is not supported")
    if dropout:
        raise InputError(
            f"flex_attention does not support attention dropout, which is {dropout} in this model. "
            "Set another attn_implementation"
        )

    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if isinstance(attention_mask, flex.BlockMask):
        score_mod = _softcapped(softcap) if softcap else None
        output = _compiled()(query, key, value, score_mod, attention_mask, scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if attention_mask is None:  # plain causal
        attention_mask = torch.ones_like(scores, dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    weights = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def block_mask(batch: MicroBatch, window: int | None, rule: Rule) -> flex.BlockMask:
    """Return a BlockMask of `rule` for one row of whole blocks, without the blocks whose pairs are all forbidden.

    The smallest and largest document, branch and position of a block's tokens decide to which blocks it may attend.
    Nothing of size L x L is built, and nothing is read on the host.

    Args:
        batch: Laid-out batch of one row.
        window: Number of positions to which a sliding layer attends, or None.
        rule: Rule for single pairs of tokens.
    """
    assert batch.document is not None
    assert batch.branch is not None
    position = batch.position_ids.view(-1, BLOCK)
    blocks = (batch.document.view(-1, BLOCK), batch.branch.view(-1, BLOCK), position)
    (first, last), (low, high), (near, far) = (part.aminmax(dim=1) for part in blocks)

    number = torch.arange(len(first), device=first.device)
    visible = number[:, None] >= number
    if batch.image_numbers is not None:  # the tokens of an image attend to each other, in both directions
        first_image, last_image = batch.image_numbers.view(-1, BLOCK).aminmax(dim=1)
        visible |= (first_image[:, None] <= last_image) & (last_image[:, None] >= first_image) & (last_image > 0)
    visible &= (first[:, None] <= last) & (last[:, None] >= first)
    # two branches of one document do not attend to each other
    visible &= ~(
        (low > 0) & (low == high) & (low[:, None] == high[:, None]) & (low[:, None] > 0) & (low[:, None] != low)
    )
    if window is not None:
        visible &= near[:, None] - far < window
    order = visible.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    # always a tensor, also without a window, so that the kernel is compiled once for all layers
    window_size = torch.full((), position.numel() if window is None else window, device=position.device)

    def mask_mod(_row: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(window_size, i, j)

    counts = visible.sum(-1, dtype=torch.int32)
    return flex.BlockMask.from_kv_blocks(counts[None, None], order[None, None], BLOCK_SIZE=BLOCK, mask_mod=mask_mod)
