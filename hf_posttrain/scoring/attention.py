"""Attention of a laid-out batch: the arguments with which each token attends to the tokens that its layout allows.

`attention_masks.allowed_pairs` defines these tokens. The rule reaches a model in one of three forms:

segments  one row in segments (a prompt, a branch), each with its queries and its keys. The keys of a branch are the
          keys of its prompt, gathered once more, and its own. There is no mask and no padding. On a GPU in half
          precision one call of a varlen kernel computes all segments; elsewhere sdpa computes one segment per call
blocks    one row for flex_attention, if the model caps its attention scores (Gemma 2)
a mask    [R, 1, L, L] in all other cases. FlashAttention, which takes no mask, gets the bounds of packed documents

The form depends on the model's attention implementation, which `attention_selection` sets.

Legend: R rows, L row length, D size of a head.
"""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..batching.micro_batch import MicroBatch, Segments
from .attention_masks import attention_masks
from .cpu import bf16_instructions
from .head import HALF_DTYPES
from .recurrent_segments import SegmentTables
from .varlen import GQA_OPTIONS, has_varlen_kernel, varlen_attn
from .vision_inputs import bidirectional_image_layers, token_type_arguments

BY_SEGMENT = "sdpa_by_segment"
"""Attention implementation of this module, which replaces sdpa of transformers."""
VARLEN_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of varlen kernels by their names in transformers: start of each document, and the longest document."""


def arguments(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model's forward that let each token attend to the tokens that the layout allows."""
    image_numbers = batch.image_numbers
    if batch.document is None:
        token_types = {}
        if image_numbers is not None:
            token_types = dict.fromkeys(token_type_arguments(model), (image_numbers > 0).long())
        return {"attention_mask": batch.attention_mask} | token_types

    implementation = model.config.get_text_config()._attn_implementation or ""
    segments = batch.segments
    ids = batch.input_ids
    recurrent = {}
    if segments and getattr(model, "has_recurrent_layers", False):
        recurrent["segment_tables"] = SegmentTables.from_sizes(segments["sizes"], ids.device)

    if "flash" in implementation and segments:
        bounds = {name: value for name, value in segments.items() if name in VARLEN_ARGUMENTS}
        return {"attention_mask": None} | bounds | recurrent

    images_in_all_layers = image_numbers is None or bidirectional_image_layers(model) == "all"
    if implementation == BY_SEGMENT and segments:
        images: dict[str, Any] = {}
        if image_numbers is not None:
            images = {"image_numbers": image_numbers[0], "images_in_all_layers": images_in_all_layers}
        # transformers uses a 4D mask as it is: with this one it builds none
        mask = ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        return {"attention_mask": mask, "segments": {**segments, **images}} | recurrent

    return {"attention_mask": attention_masks(model, batch, images_in_all_layers)}


# ---- segments


def find_segments(documents: Sequence[np.ndarray], length: int) -> Segments:
    """Return the segments of one row of `length` tokens. The padding is a segment too.

    Args:
        documents: For each document the branch of its tokens, 0 for the prompt.
        length: Length of the row in tokens, with padding.
    """
    sizes = []
    places = []
    start = 0
    for branch in (*documents, np.zeros(length - sum(map(len, documents)), dtype=np.int64)):
        prompt = np.empty(0, dtype=np.int64)
        bounds = [0, *(np.flatnonzero(np.diff(branch)) + 1).tolist(), len(branch)]
        for begin, end in pairwise(bounds):
            indices = np.arange(start + begin, start + end)
            if end > begin and branch[begin] == 0:
                prompt = keys = indices
            else:
                keys = np.concatenate([prompt, indices])
            if end > begin:
                sizes.append((len(indices), len(keys)))
                places.append(keys)
        start += len(branch)

    query_counts, key_counts = ([size[side] for size in sizes] for side in (0, 1))
    starts = (torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)) for counts in (query_counts, key_counts))
    return {
        "cu_seq_lens_q": next(starts),
        "cu_seq_lens_k": next(starts),
        "max_length_q": max(query_counts),
        "max_length_k": max(key_counts),
        "sizes": sizes,
        "gathered": torch.from_numpy(np.concatenate(places)) if query_counts != key_counts else None,
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
    """Compute attention of one row by segment, or with sdpa of transformers if there are no `segments`.

    In each segment the last query attends to all keys, the query before it to all keys but the last, and so on. With a
    window a query attends to the nearest keys alone. The fused kernel on CPU computes all pairs of a masked row, also
    those that are masked: segments give 1.17x in DPO.

    Args:
        module: The attention layer.
        query: [R, heads, L, D].
        key: [R, heads, L, D].
        value: [R, heads, L, D].
        attention_mask: The mask of `arguments`, or any mask of transformers if there are no `segments`.
        segments: `Segments` of the row, with the numbers of its images.
        scaling: Factor of the attention scores.
        dropout: Probability of dropout of attention weights.
        sliding_window: Number of keys to which a query of this layer attends, itself included.
        kwargs: Further arguments of the layer.

    Returns:
        The outputs [R, L, heads, D].

    Raises:
        RuntimeError: If the model does not pass the segments on, or passes arguments that are not supported.
    """
    if segments is None:
        # the mask of `arguments`, with which transformers builds none, requires segments
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            raise RuntimeError(f"{type(module).__name__} does not receive the segments with which its model is called")
        options: dict[str, Any] = kwargs | {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    if unsupported := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise RuntimeError(f"{type(module).__name__} passes {unsupported[0]} to attention, which is not supported")

    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # [L, heads, D]
    if segments["gathered"] is not None:
        k, v = (states.index_select(0, segments["gathered"]) for states in (k, v))
    use_images = sliding_window or segments.get("images_in_all_layers")
    image_numbers = segments.get("image_numbers") if use_images else None

    if not dropout and image_numbers is None and _supports_varlen(q, v):
        q = q.to(v.dtype)
        k = k.to(v.dtype)  # under autocast some norms return float32
        window = (sliding_window - 1 if sliding_window else -1, 0)
        bounds = [segments[name] for name in VARLEN_ARGUMENTS]
        output: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **GQA_OPTIONS)
        return output.unsqueeze(0), None

    images = None
    if image_numbers is not None:
        gathered = segments["gathered"]
        images = image_numbers, image_numbers if gathered is None else image_numbers[gathered]
    return _attend_each_segment(module, (q, k, v), segments["sizes"], sliding_window, scaling, dropout, images), None


@torch.compiler.disable  # it would be compiled again for each list of sizes
def _attend_each_segment(
    module: nn.Module,
    states: tuple[Tensor, ...],
    sizes: list[tuple[int, int]],
    window: int | None,
    scaling: float | None,
    dropout: float,
    images: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute each segment with sdpa. Segments of the same size are computed together.

    Args:
        module: The attention layer.
        states: Queries, gathered keys and gathered values, [L, heads, D] each.
        sizes: Number of queries and keys of each segment.
        window: Number of keys to which a query attends, or None without a limit.
        scaling: Factor of the attention scores.
        dropout: Probability of dropout of attention weights.
        images: Image number of each query and each key, 0 for text. The tokens of an image attend to each other.

    Returns:
        The outputs [1, L, heads, D].
    """
    # all states are cast at once, because autocast would cast each segment
    # a CPU without AMX is slower in bf16: float32 gives 1.05x in KTO
    output_dtype = dtype = states[2].dtype
    if dtype == torch.bfloat16 and states[2].device.type == "cpu" and bf16_instructions() != "amx_bf16":
        dtype = torch.float32
    queries, keys = map(list, zip(*sizes, strict=True))
    split_states = [part.to(dtype).split(lengths) for part, lengths in zip(states, (queries, keys, keys), strict=True)]
    split_images = None if images is None else (images[0].split(queries), images[1].split(keys))

    groups: dict[Hashable, list[int]] = {}
    for number, size in enumerate(sizes):
        groups.setdefault(size if images is None else number, []).append(number)

    outputs: dict[int, Tensor] = {}
    for numbers in groups.values():
        # a segment of its own is not copied
        stacked = (torch.stack([p[n] for n in numbers]) if numbers[1:] else p[numbers[0]][None] for p in split_states)
        q, k, v = (part.transpose(1, 2) for part in stacked)  # [segments, heads, length, D]
        same_image = None
        if split_images is not None:
            of_queries, of_keys = (part[numbers[0]] for part in split_images)
            same_image = (of_queries[:, None] == of_keys) & (of_queries[:, None] > 0)
        mask = _causal_mask(q.shape[2], k.shape[2], window, q.device, same_image)
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "is_causal": mask is None}
        with torch.autocast(q.device.type, enabled=False):
            computed, _ = sdpa_attention_forward(module, q, k, v, mask, **options)  # [segments, length, heads, D]
        outputs |= zip(numbers, computed, strict=True)
    return torch.cat([outputs[n] for n in range(len(sizes))])[None].to(output_dtype)


def _supports_varlen(query: Tensor, value: Tensor) -> bool:
    """Return whether `varlen_attn` supports states [L, heads, D] of this dtype, size and device."""
    size = query.shape[-1]
    fits = value.dtype in HALF_DTYPES and value.shape[-1] == size <= 256 and size % 8 == 0
    return fits and has_varlen_kernel(value.device)


def _causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device, same_image: Tensor | None = None
) -> Tensor | None:
    """Return a causal mask aligned at the last query and the last key, or None if plain causal attention is the same.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        window: Number of keys to which a query attends, or None without a limit.
        device: Device of the mask.
        same_image: Pairs that are allowed in both directions, [queries, keys].

    Returns:
        A bool tensor [1, 1, queries, keys], or None.
    """
    if same_image is None and queries == keys and (window is None or keys <= window):
        return None
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    mask = mask if same_image is None else mask | same_image
    return mask if window is None else mask.triu(keys - queries - window + 1)
