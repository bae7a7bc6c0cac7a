"""flex_attention of one row, for models that cap their attention scores (Gemma 2), or where it is asked for.

The rule of who sees whom goes into the kernel as a function, and blocks of BLOCK x BLOCK tokens of which no pair is
seen are left out: a mask of L x L never exists.
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
"""(window, queries i, keys j) -> bool, whether each pair is seen."""
BLOCK = 128  # tokens


@cache
def _compiled() -> Callable[..., Any]:
    """flex_attention, compiled once for all models, layers and shapes: one for each shape would run into dynamo's limit
    of 8 recompilations, and then without compilation in memory of heads x L x L.
    """
    return torch.compile(flex.flex_attention, dynamic=True)


@cache
def _softcapped(cap: float) -> Callable[..., Any]:
    """Cap * tanh(score / cap), the same function for the same cap: dynamo compiles for each anew."""
    return lambda score, *_: cap * torch.tanh(score / cap)


def attend_by_block(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """flex_attention of one row; with a mask that is none of its own (in generation), attention written out.
    [R, heads, L, D] -> [R, L, heads, D]. Raises RuntimeError where the model wants what it does not compute (gpt-oss),
    InputError for dropout.
    """
    if unknown := [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise RuntimeError(f"{type(module).__name__} attends with {unknown[0]}")
    if dropout:
        raise InputError(f"flex_attention has no dropout, the model's is {dropout}: choose another attn_implementation")
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if isinstance(attention_mask, flex.BlockMask):
        change = _softcapped(softcap) if softcap else None
        found = _compiled()(query, key, value, change, attention_mask, scaling, enable_gqa=True)
        return found.transpose(1, 2).contiguous(), None
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if attention_mask is None:  # plain causal
        attention_mask = torch.ones_like(scores, dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    weights = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def block_mask(batch: MicroBatch, window: int | None, rule: Rule) -> flex.BlockMask:
    """`rule` for one row of whole blocks, without those whose pairs are all forbidden.

    What a block may see is known from the least and largest document, branch and position of its tokens: nothing of
    size L x L is made, and nothing read on the host.
    """
    assert batch.document is not None
    assert batch.branch is not None
    position = batch.position_ids.view(-1, BLOCK)
    blocks = (batch.document.view(-1, BLOCK), batch.branch.view(-1, BLOCK), position)
    (first, last), (low, high), (near, far) = (part.aminmax(dim=1) for part in blocks)
    later = torch.arange(len(first), device=first.device)
    seen = later[:, None] >= later
    if batch.picture is not None:  # whose tokens see each other, in both directions
        few, many = batch.picture.view(-1, BLOCK).aminmax(dim=1)
        seen |= (few[:, None] <= many) & (many[:, None] >= few) & (many > 0)
    seen &= (first[:, None] <= last) & (last[:, None] >= first)
    # two branches of one document do not see each other
    seen &= ~((low > 0) & (low == high) & (low[:, None] == high[:, None]) & (low[:, None] > 0) & (low[:, None] != low))
    if window is not None:
        seen &= near[:, None] - far < window
    order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    # a tensor, and one without a window too: the kernel is compiled once for all layers
    within = torch.full((), position.numel() if window is None else window, device=position.device)

    def sees(_row: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(within, i, j)

    counts = seen.sum(-1, dtype=torch.int32)
    return flex.BlockMask.from_kv_blocks(counts[None, None], order[None, None], BLOCK_SIZE=BLOCK, mask_mod=sees)
