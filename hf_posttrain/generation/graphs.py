"""Forwards of one token per row as CUDA graphs.

A forward of one token launches about 40 kernels per layer, which takes far longer than the kernels themselves: 27 ms
per token for a model of 0.6B parameters on an H200. A graph is one launch: 6 ms. It reads and writes the same memory at
each replay. Therefore keys and values have buffers of a fixed length, and the index of the next column is a tensor.

Shapes: n rows, L cached tokens, C columns of a buffer of fixed length, V vocabulary, D head dimension.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..scoring.forward import cache_argument

logger = logging.getLogger(__name__)
DISABLE_VARIABLE = "HF_POSTTRAIN_CUDA_GRAPHS"
"""Environment variable that disables CUDA graphs if it is 0."""
COLUMN_MULTIPLE = 16
"""The number of columns is a multiple of this, since attention kernels would pad another mask at each step."""
COLUMN_CHUNK = 512
"""Columns by which buffers grow. Attention reads all of them, and a longer buffer requires a new graph."""


def supports_cuda_graphs(model: PreTrainedModel) -> bool:
    """Return whether a forward of one token can be a CUDA graph.

    All keys and values must be kept, attention must take a prepared mask, and all weights must be on one GPU, not
    sharded by an engine. Whether the model reads values on the host is known only when it runs.
    """
    if model.device.type != "cuda" or os.environ.get(DISABLE_VARIABLE) == "0":
        return False
    weights = list(model.parameters())
    sharded = any(hasattr(weight, "ds_id") for weight in weights)
    # hooks of FSDP use other streams
    sharded = sharded or any(isinstance(module, FSDPModule) for module in model.modules())
    on_device = {weight.device for weight in weights} == {model.device}
    return on_device and not sharded and accepts_prepared_mask(model, DynamicCache(config=model.config))


def accepts_prepared_mask(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether all layers keep all keys and use sdpa, which takes a mask [n, 1, 1, L] unchanged."""
    keeps_all_keys = all(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers)
    return keeps_all_keys and "sdpa" in (model.config.get_text_config()._attn_implementation or "")


class FixedLayer(DynamicLayer):
    """Keys and values of a layer in buffers of a fixed length, [n, heads, C, D].

    Args:
        keys: The keys of the cached tokens, [n, heads, L, D].
        values: The values of the cached tokens, [n, heads, L, D].
        length: Length of the buffers.
        column: Index of the next column, [1].
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, length: int, column: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = (pad(states, (0, 0, 0, length - states.shape[2])) for states in (keys, values))
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, [n, heads, 1, D] each, and return the entire buffers."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.index_copy_(2, self.column, states.to(buffer.dtype))
        return self.keys, self.values


class FixedSteps:
    """Forwards on buffers of a fixed length: the first one without a graph, the others as replays of its graph.

    Without a GPU, and for a forward that waits for the GPU, no graph is used.

    Args:
        model: The causal LM.
        cache: The cache with the prompts.
        mask: Mask of the cached tokens, which is 0 for padding, [n, L].
        position: Position of the last token of each row, [n, 1].
        max_tokens: Maximum number of tokens that will be read.
    """

    shrinks_at = 0.5
    """Share of rows that have not ended at which the others are dropped. The new graph takes as long as some steps."""

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor, max_tokens: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.used = mask.shape[1]
        self.end = mask.shape[1] + max_tokens
        self.position = position + 1
        self.column = torch.full((1,), self.used, device=mask.device)
        self.mask = mask[:, None, None].bool()
        self.on_gpu = mask.device.type == "cuda"
        self.graph: Any = None
        self.tokens: Tensor
        self.logits: Tensor

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only, indices [kept]."""
        self.graph = None
        self.mask = self.mask[rows]
        self.position = self.position[rows]
        self.cache.batch_select_indices(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [n], and return the logits after it, [n, V]. The next forward overwrites them."""
        if self.used == self.mask.shape[-1]:
            self._lengthen()
        if self.graph is None:
            self.tokens = tokens[:, None].clone()
            self.logits = self._run_and_capture()
        else:
            self.tokens.copy_(tokens[:, None])
            self.graph.replay()
        self.used += 1
        return self.logits

    def _lengthen(self) -> None:
        self.graph = None
        length = -(-min(self.used + COLUMN_CHUNK, self.end) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self.mask = pad(self.mask, (0, length - self.used))
        layer: Any
        for n, layer in enumerate(self.cache.layers):  # one by one, so that only one layer exists twice in memory
            self.cache.layers[n] = FixedLayer(layer.keys, layer.values, length, self.column)

    def _run_and_capture(self) -> Tensor:
        """Run one forward and return its logits, and capture a graph for the following ones if that is possible.

        Raises:
            RuntimeError: If the capture fails, after which torch is not in a reliable state.
        """
        if not self.on_gpu or not getattr(self.model, "can_capture_graph", True) or self.used + 1 == self.end:
            return self._forward()
        try:
            with error_on_sync():
                logits = self._forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.model.can_capture_graph = False  # type: ignore[assignment]
            name = type(self.model).__name__
            first_line = (str(error).splitlines() or [""])[0]
            logger.info("%s decodes without CUDA graphs, which is slower: %s", name, first_line)
            return self._forward()  # overwrites what the failed forward wrote

        graph = torch.cuda.CUDAGraph()
        try:
            # threads of data loaders continue to run
            capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
            with torch.cuda.device(self.mask.device), without_autocast_cache(), capture:
                captured = self._forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"a forward of {type(self.model).__name__} cannot be a CUDA graph. Set {DISABLE_VARIABLE}=0 in the "
                "environment"
            ) from error
        self.graph = graph
        return captured.copy_(logits)

    def _forward(self) -> Tensor:
        self.mask.index_fill_(3, self.column, True)
        kwargs: dict[str, Any] = {"attention_mask": self.mask, "position_ids": self.position}
        kwargs |= {cache_argument(self.model): self.cache}
        logits = self.model(input_ids=self.tokens, use_cache=True, logits_to_keep=1, **kwargs).logits[:, -1]
        self.position.add_(1)
        self.column.add_(1)
        return logits


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Make autocast cast a weight at each use inside the context.

    Otherwise casts would be shared with code outside of the graph, which may free them before a replay, or read them
    before the first one.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def error_on_sync() -> Iterator[None]:
    """Raise RuntimeError for an operation that waits for the GPU, which cannot be part of a graph."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
