"""Number of rows that a GPU generates at once."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..scoring.forward import cache_argument

LOGIT_BYTES = 20
"""Bytes of a logit while a token is sampled: itself, in float32, its probability, and sums in float64."""
CACHE_MEMORY_SHARE = 0.5
"""Share of a GPU's free memory for the keys and values of a batch if no batch size is set."""


def max_generation_batch(model: PreTrainedModel, cache: DynamicCache, count: int, length: int) -> int:
    """Return the number of rows to generate at once.

    Rows are split into even batches whose keys and values take at most `CACHE_MEMORY_SHARE` of the GPU's free memory.

    Args:
        model: The causal LM, on a GPU.
        cache: An empty cache.
        count: Number of rows.
        length: Length of a row, in tokens.
    """
    free = torch.cuda.mem_get_info(model.device)[0]
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    logits = LOGIT_BYTES * model.config.get_text_config().vocab_size
    row_bytes = length * cache_bytes_per_token(model, cache) + logits
    return even_batch_size(count, int(CACHE_MEMORY_SHARE * free) // row_bytes)


def even_batch_size(count: int, limit: int) -> int:
    """Return the size of even batches of `count` rows, at least 1, for the fewest batches of at most `limit` rows."""
    batches = -(-max(count, 1) // max(limit, 1))
    return -(-max(count, 1) // batches)


def cache_bytes_per_token(model: PreTrainedModel, cache: DynamicCache) -> int:
    """Return the measured bytes of one token's keys and values in all layers. Some models share them among layers."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=token, **options)
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
