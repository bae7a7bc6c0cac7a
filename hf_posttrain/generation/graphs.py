"""Forwards of one token per row as CUDA graphs.

A forward of one token launches about 40 kernels per layer, which takes far longer than the kernels themselves: 27 ms
per token for a model of 0.6B parameters on an H200. A graph is one launch: 6 ms. It reads and writes the same memory at
each replay, so that keys and values have buffers of a fixed length, and the next column in them is a tensor.

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
"""Environment variable; 0: no graphs."""
COLUMN_MULTIPLE = 16
"""Of which the number of columns is a multiple, since attention kernels would pad another mask at each step."""
COLUMN_CHUNK = 512
"""Columns that buffers get at a time. Attention reads all of them, and a longer buffer is a new graph."""


def supports_cuda_graphs(model: PreTrainedModel) -> bool:
    """Return whether a forward of one token can be a CUDA graph: all keys and values are kept, attention takes a
    prepared mask, and all weights are on one GPU, where no engine has cut them. Whether the model reads values on the
    host shows when it runs.
    """
    if model.device.type != "cuda" or os.environ.get(DISABLE_VARIABLE) == "0":
        return False
    weights = list(model.parameters())
    cut = any(hasattr(weight, "ds_id") for weight in weights)
    cut = cut or any(isinstance(module, FSDPModule) for module in model.modules())  # whose hooks use other streams
    here = {weight.device for weight in weights} == {model.device}
    return here and not cut and accepts_prepared_mask(model, DynamicCache(config=model.config))


def accepts_prepared_mask(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether all layers keep all keys, and attend by sdpa: a mask [n, 1, 1, L] is then taken as it is."""
    kept = all(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers)
    return kept and "sdpa" in (model.config.get_text_config()._attn_implementation or "")


class FixedLayer(DynamicLayer):
    """Keys and values of a layer in buffers of a fixed length, [n, heads, C, D]. `column` [1] is where the next go."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, length: int, column: Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = (pad(states, (0, 0, 0, length - states.shape[2])) for states in (keys, values))
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[n, heads, 1, D] twice -> the whole buffers."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.index_copy_(2, self.column, states.to(buffer.dtype))
        return self.keys, self.values


class FixedSteps:
    """Forwards on buffers of a fixed length: the first one as written, the others as replays of its graph.

    Without a GPU, and where a forward waits for the GPU, all of them run as written.

    Args:
        model: The causal LM.
        cache: What the prompts left in it.
        mask: Which of the cached tokens are no padding, [n, L].
        position: The position of each row's last token, [n, 1].
        most: Number of tokens that will be read at most.
    """

    shrinks_at = 0.5  # fewer rows are a new graph, which takes as long as some steps

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor, most: int):
        self.model = model
        self.cache = cache
        self.used = mask.shape[1]
        self.end = mask.shape[1] + most
        self.position = position + 1
        self.column = torch.full((1,), self.used, device=mask.device)
        self.mask = mask[:, None, None].bool()
        self.on_gpu = mask.device.type == "cuda"
        self.graph: Any = None
        self.tokens: Tensor
        self.logits: Tensor

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, indices [kept]."""
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
        for n, layer in enumerate(self.cache.layers):  # one after the other: there are two copies of one layer only
            self.cache.layers[n] = FixedLayer(layer.keys, layer.values, length, self.column)

    def _run_and_capture(self) -> Tensor:
        """Run one forward, and capture a graph of it for those that follow, where that is possible.

        Raises RuntimeError if the capture fails, after which torch cannot be relied on.
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
            why = (str(error).splitlines() or [""])[0]
            logger.info("%s decodes without CUDA graphs, more slowly: %s", name, why)
            return self._forward()  # what it wrote so far is written once more
        graph = torch.cuda.CUDAGraph()
        try:
            # threads of data loaders go on
            capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
            with torch.cuda.device(self.mask.device), without_autocast_cache(), capture:
                captured = self._forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            problem = f"a forward of {type(self.model).__name__} cannot be a CUDA graph"
            raise RuntimeError(f"{problem}: set {DISABLE_VARIABLE}=0 in the environment") from error
        self.graph = graph
        return captured.copy_(logits)

    def _forward(self) -> Tensor:
        self.mask.index_fill_(3, self.column, True)
        given: dict[str, Any] = {"attention_mask": self.mask, "position_ids": self.position}
        given |= {cache_argument(self.model): self.cache}
        logits = self.model(input_ids=self.tokens, use_cache=True, logits_to_keep=1, **given).logits[:, -1]
        self.position.add_(1)
        self.column.add_(1)
        return logits


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Inside, autocast casts a weight at each use. It would share casts with code outside of the graph, which may free
    them before a replay, or read them before the first one.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def error_on_sync() -> Iterator[None]:
    """Inside, an operation that waits for the GPU raises RuntimeError: it cannot be part of a graph."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
