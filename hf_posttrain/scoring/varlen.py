"""Torch's attention kernel for segments of any length in one row: supported devices, and options by torch version."""

import inspect
from functools import cache
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

GQA_OPTIONS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Options of `varlen_attn` for fewer key heads than query heads. Torch 2.11 needs none, torch 2.13 `enable_gqa`."""


@torch.compiler.assume_constant_result  # a traced call would query the driver, and warn of the cache
def has_varlen_kernel(device: torch.device) -> bool:
    """Return whether a device computes all segments of a row in one call of `varlen_attn`, in half precision.

    NVIDIA GPUs do from Ampere on. The meta device represents such a GPU.
    """
    return _has_varlen_kernel(device)


@cache
def _has_varlen_kernel(device: torch.device) -> bool:
    if device.type == "meta":
        return True
    cuda = device.type == "cuda" and torch.cuda.is_available()
    return cuda and torch.cuda.get_device_capability(device) >= (8, 0)
