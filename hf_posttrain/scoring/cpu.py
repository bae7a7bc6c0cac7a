"""What is done in another way on CPU than on a GPU, because there it is faster; the numbers are the same.

Each buys what its docstring says, in rows a second on 2 cores: docs/benchmarks.md, "On CPU".
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """sum of p x over the vocabulary, [n, v] twice -> [n, 1]. On CPU 1.07x in KD."""
    if probs.device.type == "cpu":  # no product in memory; on a GPU this might round to TF32
        return torch.bmm(probs[:, None], values[:, :, None])[:, 0]
    return torch.linalg.vecdot(probs, values)[:, None]


def draw(probs: Tensor) -> Tensor:
    """One id a row from probabilities [n, V], by torch's global generator: [n]. Never one of probability 0.

    On CPU it takes one random number a row, where torch.multinomial takes V: 1.08x in OPD.
    """
    if probs.device.type != "cpu":
        return torch.multinomial(probs, 1).squeeze(-1)
    upto = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * upto[:, -1:]
    return torch.searchsorted(upto, drawn, right=True).squeeze(-1)


class FewRows(TorchFunctionMode):
    """On CPU a product of a few rows with a weight, in the order that is quick: MKL reads the weight once if it stands
    on the left. 1.32x in OPD, whose decoding is that; elsewhere it changes nothing."""

    MOST = 8  # rows, up to which it is quicker

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and len(args) == 3 and not torch.is_autocast_enabled("cpu"):
            rows, weight, bias = args
            plain = rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32
            if plain and 1 < rows.numel() // rows.shape[-1] <= self.MOST:
                found = torch.mm(weight, rows.reshape(-1, rows.shape[-1]).T).T.contiguous()
                return (found if bias is None else found + bias).view(*rows.shape[:-1], -1)
        return func(*args, **(kwargs or {}))
