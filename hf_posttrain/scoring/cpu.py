"""What is done in another way on CPU than on a GPU, because there it is faster; the numbers are the same.

Each buys what its docstring says, in rows a second on 2 cores: docs/benchmarks.md, "On CPU".
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BY_DOCUMENT = "sdpa_by_document"  # the attention implementation of models that run on CPU, in place of sdpa


class DocumentMask(Tensor):
    """A mask [R, 1, L, L] that knows its documents: (length, mask [1, 1, length, length], or None where it is plain
    causal) of each, over the flattened rows. The padding of a row is a document of its own."""

    documents: list[tuple[int, Tensor | None]] | None = None  # None where torch made it from another, as by slicing


def document_mask(mask: Tensor, document: Tensor) -> Tensor:
    """mask [R, 1, L, L] with its documents, from their numbers [R, L]: nobody sees beyond one."""
    found = []
    for row, numbers in enumerate(document):
        start = 0
        for size in numbers.unique_consecutive(return_counts=True)[1].tolist():
            own = mask[row : row + 1, :, start : start + size, start : start + size]
            causal = own.numpy().sum() == size * (size + 1) // 2
            found.append((size, None if causal else own))
            start += size
    known = mask.as_subclass(DocumentMask)
    known.documents = found
    return known


def sdpa_by_document(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa; with a DocumentMask each document alone. [R, heads, L, D] -> [R, L, heads, D].

    The fused kernel on CPU computes all L x L pairs of a masked row, whatever the mask forbids: 1.17x in DPO.
    """
    documents = getattr(attention_mask, "documents", None)
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


def attend_by_document(model: PreTrainedModel) -> None:
    """Let a causal LM that uses sdpa, and will run on CPU, attend document by document."""
    if model.config.get_text_config()._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        AttentionInterface.register(BY_DOCUMENT, sdpa_by_document)
        AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)
        model.set_attn_implementation(BY_DOCUMENT)


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """sum of p x over the vocabulary, [n, v] twice -> [n, 1]. On CPU 1.07x in KD."""
    if probs.device.type == "cpu":  # no product in memory; on a GPU this might round to TF32
        return torch.bmm(probs[:, None], values[:, :, None])[:, 0]
    return torch.linalg.vecdot(probs, values)[:, None]


def draw(probs: Tensor) -> Tensor:
    """One id a row from probabilities [n, V], by torch's global generator: [n]. Never one of probability 0.

    On CPU it takes one random number a row, where torch.multinomial takes V: 1.08x in OPD.
    """
    if probs.device.type != "cpu":
        return torch.multinomial(probs, 1).squeeze(-1)
    upto = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * upto[:, -1:]
    return torch.searchsorted(upto, drawn, right=True).squeeze(-1)


class FewRows(TorchFunctionMode):
    """On CPU a product of a few rows with a weight, in the order that is quick: MKL reads the weight once if it stands
    on the left. 1.32x in OPD, whose decoding is that; elsewhere it changes nothing."""

    MOST = 8  # rows, up to which it is quicker

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and len(args) == 3 and not torch.is_autocast_enabled("cpu"):
            rows, weight, bias = args
            plain = rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32
            if plain and 1 < rows.numel() // rows.shape[-1] <= self.MOST:
                found = torch.mm(weight, rows.reshape(-1, rows.shape[-1]).T).T.contiguous()
                return (found if bias is None else found + bias).view(*rows.shape[:-1], -1)
        return func(*args, **(kwargs or {}))
