"""What is done in another way on CPU than on a GPU, because there it is faster; the numbers are the same.

Each buys what its docstring says, in rows a second on 2 cores: docs/reference/benchmarks.md, "On CPU".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def draw(probs: Tensor) -> Tensor:
    """One id a row from probabilities [n, V], by torch's global generator: [n]. Never one of probability 0.

    On CPU it takes one random number a row, where `race` takes V: 1.08x in OPD.
    """
    if probs.device.type != "cpu":
        return race(probs)
    upto = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * upto[:, -1:]
    return torch.searchsorted(upto, drawn, right=True).squeeze(-1)


def race(probs: Tensor) -> Tensor:
    """Sample one id per row from probabilities [n, V] without reading from the device: [n].

    Of exponential waiting times with rates `probs`, the shortest is that of id i with probability `probs[i]`.
    `torch.multinomial` samples in the same way, but before torch 2.13 it reads two values per call from the device.
    """
    waiting = torch.empty_like(probs).exponential_().clamp_(min=torch.finfo(probs.dtype).tiny)
    return waiting.reciprocal_().mul_(probs).argmax(-1)


@cache
def multiplies_bf16() -> str | None:
    """What of this processor multiplies bf16 quickly: amx_bf16 (tiles), avx512_bf16, or nothing."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
    return next((name for name in ("amx_bf16", "avx512_bf16") if known.get(name)), None)


MOST_ROWS = 8
"""Up to which the weight is better on the left."""


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """Inside, linear layers on CPU multiply a few float32 rows in the order that is quick: MKL reads the weight once if
    it stands on the left. 1.32x in OPD, whose decoding is that.
    """
    chosen = []
    if not torch.is_autocast_enabled("cpu"):
        for layer in model.modules():
            plain = type(layer) is nn.Linear and "forward" not in vars(layer)  # nobody's hook or own forward
            if plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
                chosen.append(layer)
    for layer in chosen:
        layer.forward = MethodType(_weight_first, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward


def _weight_first(layer: nn.Linear, rows: Tensor) -> Tensor:
    """nn.Linear's forward of rows [..., H]."""
    if not 1 < rows.numel() // rows.shape[-1] <= MOST_ROWS:
        return nn.functional.linear(rows, layer.weight, layer.bias)
    found = torch.mm(layer.weight, rows.reshape(-1, rows.shape[-1]).T).T.contiguous()
    return (found if layer.bias is None else found + layer.bias).view(*rows.shape[:-1], -1)
