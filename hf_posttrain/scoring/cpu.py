"""Operations that have a faster implementation on CPU, with the same results as on a GPU.

Each docstring has the speedup in rows per second on 2 cores. See docs/reference/benchmarks.md, "On CPU".
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn


def sample_ids(probs: Tensor) -> Tensor:
    """Sample one id per row from probabilities [n, V] with torch's global generator, never one of probability 0: [n].

    On CPU it takes one random number per row, where `exponential_race` takes V: 1.08x in OPD.
    """
    if probs.device.type != "cpu":
        return exponential_race(probs)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    thresholds = torch.rand(len(probs), 1, dtype=torch.float64) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)


def exponential_race(probs: Tensor) -> Tensor:
    """Sample one id per row from probabilities [n, V] without reading from the device: [n].

    Of exponential waiting times with rates `probs`, the shortest is that of id i with probability `probs[i]`.
    `torch.multinomial` samples in the same way, but before torch 2.13 it reads two values per call from the device.
    """
    waiting = torch.empty_like(probs).exponential_().clamp_(min=torch.finfo(probs.dtype).tiny)
    return waiting.reciprocal_().mul_(probs).argmax(-1)


@cache
def bf16_instructions() -> str | None:
    """Return the fast bf16 instructions of this processor: amx_bf16 (tiles), avx512_bf16, or None."""
    return next((name for name, has in _bf16_capabilities().items() if has), None)


def lacks_bf16_instructions() -> bool:
    """Return whether this is an x86 processor without bf16 instructions. False if that is not known."""
    capabilities = _bf16_capabilities()
    return bool(capabilities) and not any(capabilities.values())


def _bf16_capabilities() -> dict[str, Any]:
    """Return whether an x86 processor has each kind of bf16 instructions, fastest first. Empty for others."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return {name: capabilities[name] for name in ("amx_bf16", "avx512_bf16") if name in capabilities}


PACKED_ROWS = (8, 16, 32, 64)
"""Numbers of rows for which weights are packed. Fewer rows are padded, and more are multiplied as usual."""
MIN_PACKED_ROWS = 3
"""Number of rows from which a product with a packed weight is faster."""
PACKED_PADDING = 384
"""Output features that MKL adds to a packed weight: copies of 768 x 768 take 1.5 times as much, of 32000 x 768 1.01."""
PACKED_MEMORY_SHARE = 0.5
"""Largest share of the available memory that packed weights of all processes of a machine may take."""


def packable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weights can be packed: plain linear layers in float32. There are none without MKL."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return []
    layers = (layer for layer in model.modules() if type(layer) is nn.Linear)
    return [x for x in layers if type(x.weight) is nn.Parameter and x.weight.dtype == torch.float32]


def packed_bytes(layers: Sequence[nn.Linear], available: int, processes: int) -> int:
    """Return the memory of packed copies of the weights of layers, or 0 if that is too much and none is packed.

    Args:
        layers: Layers of `packable_layers`.
        available: Available bytes of the machine.
        processes: Number of processes on the machine.
    """
    size = sum((layer.out_features + PACKED_PADDING) * layer.in_features * layer.weight.itemsize for layer in layers)
    return size if size <= PACKED_MEMORY_SHARE * available / processes else 0


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let linear layers on CPU multiply a few float32 rows with weights in the order in which MKL reads them.

    A weight is packed at its first product with a few rows. Until the context ends, the copies take as much memory as
    the weights, or up to twice as much if these are small. Decoding, which reads all weights for each token, takes 0.6
    to 0.9 of the time. With gradients nothing is packed.
    """
    layers: list[nn.Linear] = []
    if not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled():
        on_cpu = (layer for layer in packable_layers(model) if layer.weight.device.type == "cpu")
        layers = [layer for layer in on_cpu if "forward" not in vars(layer)]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not packed_bytes(layers, psutil.virtual_memory().available, processes):
        layers = []

    for layer in layers:
        layer.forward = _PackedLinear(layer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _PackedLinear:
    """Forward of an nn.Linear that packs its weight for the number of rows."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.packed_rows = 0
        self.packed: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product of rows [..., H] and the weight, [..., out_features]."""
        weight, bias = self.layer.weight, self.layer.bias
        count = rows.numel() // rows.shape[-1]
        if torch.is_grad_enabled() or not MIN_PACKED_ROWS <= count <= PACKED_ROWS[-1]:
            return nn.functional.linear(rows, weight, bias)
        if count > self.packed_rows or 4 * count <= self.packed_rows > PACKED_ROWS[0]:
            self.packed_rows = next(size for size in PACKED_ROWS if count <= size)
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, self.packed_rows)
        padded = nn.functional.pad(rows.reshape(count, -1), (0, 0, 0, self.packed_rows - count))
        output: Tensor = torch.ops.mkl._mkl_linear(padded, self.packed, weight, bias, self.packed_rows)
        return output[:count].view(*rows.shape[:-1], -1)
