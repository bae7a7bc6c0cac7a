"""One forward of one token per row, over cached keys and values: as written, or replayed as a CUDA graph.

A forward of one token launches about 40 kernels per layer. On a GPU their launches take 10 times as long as the kernels
themselves: 27 ms per token for a model of 0.6B parameters on an H200, where a replayed graph is one launch. A graph reads
and writes the same memory each time, so that its keys and values have a fixed length, and its place in them is a tensor.

Shapes: n rows, L cached tokens, C columns of a buffer of fixed length, V vocabulary, D head dimension.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

logger = logging.getLogger(__name__)
CHUNK = 512
"""Columns that a buffer of fixed length gets at a time. Attention reads them all, and a longer buffer is a new graph."""


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache for decoding."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def can_replay(model: PreTrainedModel) -> bool:
    """Return whether a forward of one token can be a CUDA graph: all keys and values are kept, attention takes a mask, and
    all weights are on one GPU. Whether the model reads values on the host shows when it runs."""
    if model.device.type != "cuda" or not takes_mask(model, growing_cache(model)):
        return False
    weights = list(model.parameters())
    sharded = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in weights)
    return not sharded and {weight.device for weight in weights} == {model.device}


def takes_mask(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether the model's attention takes the prepared mask [n, 1, 1, L], from which transformers makes no other."""
    plain = all(type(layer) is GrowingLayer for layer in cache.layers)
    return plain and "sdpa" in (model.config.get_text_config()._attn_implementation or "")


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer in buffers with space for more tokens: a step does not copy all that came before."""

    SPARE = 128  # extra tokens that new buffers have space for; new ones are made when a step does not fit
    buffers: Sequence[Tensor] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[n, heads, new, D] twice -> all keys and all values, [n, heads, length, D], views of the buffers."""
        # rotary makes keys float32 under autocast, which attention would round at each token
        new, used = (key_states.to(value_states.dtype), value_states), self.get_seq_length()
        end = used + key_states.shape[-2]
        if not used:
            self.lazy_initialization(*new)
        if not self.buffers or self.buffers[0].shape[-2] < end:
            old = [buffer[:, :, :used] for buffer in self.buffers] or [states[:, :, :0] for states in new]
            self.buffers = [pad(states, (0, 0, 0, end - used + self.SPARE)) for states in old]
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, used:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, with the space behind them."""
        if length := self.get_seq_length():
            self.buffers = [buffer[indices] for buffer in self.buffers]
            self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


class GrowingSteps:
    """Forwards as they are written, on keys and values that grow.

    Args:
        model: The causal LM.
        cache: What the prompts left in it, from `growing_cache`.
        mask: Which of the cached tokens are no padding, [n, L].
        position: The position of each row's last token, [n, 1].
    """

    shrinks_at = 1.0
    """The share of rows that go on below which it pays to drop the others."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor):
        self.model, self.cache, self.mask, self.position = model, cache, mask, position
        self.prepares_mask = takes_mask(model, cache)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, indices [kept]."""
        self.mask, self.position = self.mask[rows], self.position[rows]
        self.cache.batch_select_indices(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [n], and return the logits after it, [n, V]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.position = self.position + 1
        # else transformers would make it at each token, and wait for the device to ask whether there is padding at all
        mask = self.mask[:, None, None].bool() if self.prepares_mask else self.mask
        return last_logits(self.model, tokens[:, None], mask, self.position, self.cache)


class FixedLayer(DynamicLayer):
    """Keys and values of a layer in buffers of a fixed length, [n, heads, C, D]. `column` [1] is where the next go."""

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
    """Forwards on buffers of fixed length: the first one as written, the others as a replay of its CUDA graph.

    Without a GPU, and where a forward cannot be captured, all of them run as written. The arguments are those of
    `GrowingSteps`, and `most`, the number of tokens that will be read at most.
    """

    shrinks_at = 0.5  # fewer rows are a new graph, which takes as long as some steps

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor, most: int):
        self.model, self.cache = model, cache
        self.used, self.end = mask.shape[1], mask.shape[1] + most
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
        self.mask, self.position = self.mask[rows], self.position[rows]
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
        length = min(self.used + CHUNK, self.end)
        self.mask = pad(self.mask, (0, length - self.used))
        for n, layer in enumerate(self.cache.layers):  # one after the other: there are two copies of one layer only
            self.cache.layers[n] = FixedLayer(layer.keys, layer.values, length, self.column)

    def _run_and_capture(self) -> Tensor:
        """Run one forward, and capture a graph of it where that is possible."""
        if not self.on_gpu or not getattr(self.model, "captures", True):
            return self._forward()
        try:
            with no_reads():
                logits = self._forward()
        except RuntimeError as error:
            self._give_up(error)
            return self._forward()  # what it wrote so far is written once more
        graph = torch.cuda.CUDAGraph()
        try:
            # threads of data loaders go on meanwhile
            with no_shared_casts(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = self._forward()
        except RuntimeError as error:
            self._give_up(error)
            return logits
        self.graph = graph
        return captured.copy_(logits)

    def _give_up(self, error: RuntimeError) -> None:
        self.model.captures = False  # type: ignore[assignment]
        name, why = type(self.model).__name__, (str(error).splitlines() or [""])[0]
        logger.info("%s decodes without CUDA graphs, more slowly: %s", name, why)

    def _forward(self) -> Tensor:
        self.mask.index_fill_(3, self.column, True)
        logits = last_logits(self.model, self.tokens, self.mask, self.position, self.cache)
        self.position.add_(1)
        self.column.add_(1)
        return logits


def last_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
    """Read `ids` [n, new] into the cache and return the logits after the last one, [n, V]."""
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=ids, attention_mask=mask, position_ids=position, **options).logits[:, -1]


@contextmanager
def no_shared_casts() -> Iterator[None]:
    """Inside, autocast casts a weight at each use. It would keep casts for later, which a graph cannot count on, and which
    are not there before a graph has run."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def no_reads() -> Iterator[None]:
    """Inside, an operation that waits for the GPU raises RuntimeError: it cannot be part of a graph."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
