"""Torch's attention kernel for pieces of any length in one row: where it runs, and what each release accepts."""

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any

import torch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]


def support(arguments: Collection[str]) -> tuple[bool, dict[str, Any]]:
    """Return whether `varlen_attn` can be used, and the options that grouped-query attention requires.

    Args:
        arguments: Argument names of torch's `varlen_attn`. Torch 2.10 has no scale and no sliding window. Torch 2.11
            accepts fewer key heads than query heads without `enable_gqa`, which torch 2.13 requires.
    """
    return {"scale", "window_size"} <= {*arguments}, {"enable_gqa": True} if "enable_gqa" in arguments else {}


INSTALLED, GQA = support(() if varlen_attn is None else inspect.signature(varlen_attn).parameters)


@torch.compiler.assume_constant_result  # traced, it would ask the driver, and warn of the cache
def has_varlen_kernel(device: torch.device) -> bool:
    """Return whether a device computes all pieces of a row in one call of `varlen_attn`, in half precision. NVIDIA's do
    from Ampere on; the meta device stands for them."""
    return _has_varlen_kernel(device)


@cache
def _has_varlen_kernel(device: torch.device) -> bool:
    if device.type == "meta" or not INSTALLED:
        return INSTALLED
    cuda = device.type == "cuda" and torch.cuda.is_available()
    return cuda and torch.cuda.get_device_capability(device) >= (8, 0)
