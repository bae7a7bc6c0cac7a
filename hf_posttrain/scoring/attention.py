"""The arguments by which each token of a laid-out batch attends to what its layout allows.

The rule is `attention_masks.allowed`. It reaches a model in one of three forms:

segments  one row in pieces (a prompt, a branch), each with its queries and its keys: a branch's keys are its prompt's,
          gathered once more, and its own. No mask, no padding. On a GPU in half precision one call of a varlen kernel
          does all pieces; elsewhere each is one of sdpa
blocks    one row for flex_attention, where the model caps its attention scores (Gemma 2)
a mask    [R, 1, L, L] for anything else; FlashAttention, which takes none, gets the bounds of packed documents

The form depends on the model's attention implementation, which `attention_selection` sets.

Legend: R rows, L row length, D size of a head.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..batching.micro_batch import MicroBatch, Segments
from .attention_masks import attention_masks
from .cpu import multiplies_bf16
from .head import LOW
from .recurrent_segments import SegmentTables
from .varlen import GQA, has_varlen_kernel, varlen_attn
from .vision_inputs import names_of_kinds, sees_whole_pictures

BY_SEGMENT = "sdpa_by_segment"
"""Our implementation in place of transformers' sdpa."""
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What kernels of documents in one row read, by transformers' names: where each begins, and the longest."""


def arguments(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model's forward that let each token attend to what the batch's layout allows."""
    picture = batch.picture
    if batch.document is None:
        kinds_of_tokens = {} if picture is None else dict.fromkeys(names_of_kinds(model), (picture > 0).long())
        return {"attention_mask": batch.attention_mask} | kinds_of_tokens
    implementation = model.config.get_text_config()._attn_implementation or ""
    segments = batch.segments
    ids = batch.input_ids
    pieces = {}
    if segments and getattr(model, "keeps_state", False):
        pieces["pieces"] = SegmentTables.of(segments["sizes"], ids.device)
    if "flash" in implementation and segments:
        bounds = {name: value for name, value in segments.items() if name in VARLEN}
        return {"attention_mask": None} | bounds | pieces
    images_in_all_layers = picture is None or sees_whole_pictures(model) == "all"
    if implementation == BY_SEGMENT and segments:
        whole_images = {} if picture is None else {"picture": picture[0], "in_all": images_in_all_layers}
        # transformers takes a 4D mask as it is: with this one it makes none
        mask = ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        return {"attention_mask": mask, "segments": {**segments, **whole_images}} | pieces
    return {"attention_mask": attention_masks(model, batch, images_in_all_layers)}


# ---- segments


def find_segments(documents: Sequence[np.ndarray], length: int) -> Segments:
    """Return the pieces of one row of `length` tokens. Padding is a piece of its own.

    documents: for each document the branch of its tokens, 0 for the prompt.
    """
    sizes = []
    places = []
    start = 0
    for branch in (*documents, np.zeros(length - sum(map(len, documents)), dtype=np.int64)):
        prompt = np.empty(0, dtype=np.int64)
        bounds = [0, *(np.flatnonzero(np.diff(branch)) + 1).tolist(), len(branch)]
        for begin, end in pairwise(bounds):
            own = np.arange(start + begin, start + end)
            if end > begin and branch[begin] == 0:
                prompt = keys = own
            else:
                keys = np.concatenate([prompt, own])
            if end > begin:
                sizes.append((len(own), len(keys)))
                places.append(keys)
        start += len(branch)
    queries, seen = ([size[side] for size in sizes] for side in (0, 1))
    starts = (torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)) for counts in (queries, seen))
    return {
        "cu_seq_lens_q": next(starts),
        "cu_seq_lens_k": next(starts),
        "max_length_q": max(queries),
        "max_length_k": max(seen),
        "sizes": sizes,
        "gathered": torch.from_numpy(np.concatenate(places)) if queries != seen else None,
    }


def attend_by_segment(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: dict[str, Any] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one row in pieces; without `segments`, transformers' sdpa. [R, heads, L, D] -> [R, L, heads, D].

    In each piece a query sees all keys but those behind it: the last query sees all, the one before all but one, and
    with a window only the nearest. The fused kernel on CPU computes all pairs of a masked row, whatever it forbids:
    1.17x in DPO. Raises RuntimeError where the model does not pass the pieces on, or wants what they cannot give.
    """
    if segments is None:
        # is it the mask of `arguments`, for which transformers makes none?
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            raise RuntimeError(f"{type(module).__name__} does not get what its model was called with")
        given: dict[str, Any] = kwargs | {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise RuntimeError(f"{type(module).__name__} attends with {unknown[0]}")
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # [L, heads, D]
    if segments["gathered"] is not None:
        k, v = (states.index_select(0, segments["gathered"]) for states in (k, v))
    picture = segments.get("picture") if sliding_window or segments.get("in_all") else None
    if not dropout and picture is None and _takes_varlen(q, v):
        q = q.to(v.dtype)
        k = k.to(v.dtype)  # under autocast some norms leave float32
        window = (sliding_window - 1 if sliding_window else -1, 0)
        bounds = [segments[name] for name in VARLEN]
        found: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **GQA)
        return found.unsqueeze(0), None
    seen = None
    if picture is not None:
        seen = picture, picture if segments["gathered"] is None else picture[segments["gathered"]]
    return _attend_one_by_one(module, (q, k, v), segments["sizes"], sliding_window, scaling, dropout, seen), None


@torch.compiler.disable  # it would be compiled anew for each list of sizes
def _attend_one_by_one(
    module: nn.Module,
    states: tuple[Tensor, ...],
    sizes: list[tuple[int, int]],
    window: int | None,
    scaling: float | None,
    dropout: float,
    picture: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sdpa of each piece: queries, gathered keys and values [L, heads, D] -> [1, L, heads, D]. picture: of each query
    and key the number of its picture, where their tokens see each other.
    """
    found: list[Tensor] = []
    # in one dtype, at once: autocast would cast each piece; without AMX a CPU is slower in bf16, 1.05x in KTO
    kind = dtype = states[2].dtype
    if dtype == torch.bfloat16 and states[2].device.type == "cpu" and multiplies_bf16() != "amx_bf16":
        dtype = torch.float32
    states = tuple(each.to(dtype) for each in states)
    queries, keys = map(list, zip(*sizes, strict=True))
    pieces = zip(states[0].split(queries), states[1].split(keys), states[2].split(keys), strict=True)
    of_pictures = None if picture is None else [*zip(picture[0].split(queries), picture[1].split(keys), strict=True)]
    for n, parts in enumerate(pieces):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)  # [1, heads, length, D]
        same = None
        if of_pictures is not None:
            mine, theirs = of_pictures[n]
            same = (mine[:, None] == theirs) & (mine[:, None] > 0)
        mask = _behind(q.shape[2], k.shape[2], window, q.device, same)
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "is_causal": mask is None}
        with torch.autocast(q.device.type, enabled=False):
            found.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
    return torch.cat(found, dim=1).to(kind)


def _takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Can `varlen_attn` compute with states [L, heads, D] like these?"""
    size = query.shape[-1]
    fits = value.dtype in LOW and value.shape[-1] == size <= 256 and size % 8 == 0
    return fits and has_varlen_kernel(value.device)


def _behind(
    queries: int, keys: int, window: int | None, device: torch.device, same: Tensor | None = None
) -> Tensor | None:
    """[1, 1, queries, keys] bool, which keys are not behind a query, the last of which sees all; None: plain causal.
    same [queries, keys]: those that are seen behind it too.
    """
    if same is None and queries == keys and (window is None or keys <= window):
        return None
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    seen = seen if same is None else seen | same
    return seen if window is None else seen.triu(keys - queries - window + 1)
