"""How many rows a GPU generates at once."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..scoring.forward import cache_argument

LOGIT_BYTES = 20
"""Of a logit while a token is drawn: itself, in float32, its probability, sums in float64."""
CACHE_MEMORY_SHARE = 0.5
"""Share of a GPU's free memory that the keys and values of a batch may take where no batch size is given."""


def max_generation_batch(model: PreTrainedModel, cache: DynamicCache, count: int, length: int) -> int:
    """Return how many of `count` rows to generate at once: even parts of them whose keys and values take at most
    `CACHE_MEMORY_SHARE` of the GPU's free memory.

    Args:
        model: The causal LM, on a GPU.
        cache: An empty cache.
        count: Number of rows.
        length: Tokens that a row has space for.
    """
    free = torch.cuda.mem_get_info(model.device)[0]
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    logits = LOGIT_BYTES * model.config.get_text_config().vocab_size
    return even_batch_size(count, int(CACHE_MEMORY_SHARE * free) // (length * cache_bytes_per_token(model, cache) + logits))


def even_batch_size(count: int, most: int) -> int:
    """Return the size of parts of `count`: as few parts as can be with at most `most` each, and one at least."""
    parts = -(-max(count, 1) // max(most, 1))
    return -(-max(count, 1) // parts)


def cache_bytes_per_token(model: PreTrainedModel, cache: DynamicCache) -> int:
    """Return the bytes of one token's keys and values in all layers. They are measured, since layers may share them."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=token, **options)
    kept = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in kept if tensor is not None)
