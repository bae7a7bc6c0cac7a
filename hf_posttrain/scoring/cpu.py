"""Operations that have a faster implementation on CPU, with the same results as on a GPU.

Each docstring has the speedup in rows per second on 2 cores. See docs/reference/benchmarks.md, "On CPU".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

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
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
    return next((name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)), None)


MAX_SMALL_BATCH = 8
"""Number of rows up to which a product is faster with the weight as its left factor."""


@contextmanager
def fast_small_batches(model: nn.Module) -> Iterator[None]:
    """Let linear layers on CPU multiply a few float32 rows with the weight as the left factor.

    In this order MKL reads the weight once: 1.32x in OPD, whose decoding consists of such products.
    """
    layers = []
    if not torch.is_autocast_enabled("cpu"):
        for layer in model.modules():
            plain = type(layer) is nn.Linear and "forward" not in vars(layer)  # without a replaced forward
            if plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
                layers.append(layer)

    for layer in layers:
        layer.forward = MethodType(_weight_first, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _weight_first(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Compute the forward of nn.Linear for rows [..., H]."""
    if not 1 < rows.numel() // rows.shape[-1] <= MAX_SMALL_BATCH:
        return nn.functional.linear(rows, layer.weight, layer.bias)
    output = torch.mm(layer.weight, rows.reshape(-1, rows.shape[-1]).T).T.contiguous()
    return (output if layer.bias is None else output + layer.bias).view(*rows.shape[:-1], -1)
