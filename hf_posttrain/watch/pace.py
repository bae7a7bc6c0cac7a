"""Tokens a second and peak memory, read at log steps alone, without waiting for the device in between."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

GIB = 2**30


class Pace:
    """How fast a logging interval trained.

    Counted are the tokens that the policy reads with gradient, padding aside: a prompt once in the shared layout and
    once for each answer in others. KTO's passes for the KL estimate are not, nor are generated tokens as they are
    drawn, but their time is; that of evaluations and checkpoints is not.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.since = time.perf_counter()

    def count(self, weights: Tensor) -> None:
        """Add a micro-batch: `router_weights` [R, L], which are 0 for padding alone."""
        found = (weights > 0).sum()
        self.tokens = found if self.tokens is None else self.tokens + found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self, processes: int) -> tuple[Tensor, Tensor] | None:
        """([tokens, seconds / processes], whose sums over the ranks give tokens a second; GiB at the peak so far) of
        the interval since the last call; None where no token was counted."""
        now, tokens = time.perf_counter(), self.tokens
        seconds, self.tokens, self.since = (now - self.since) / processes, None, now
        if tokens is None:
            return None
        pair = torch.stack([tokens.float(), tokens.new_tensor(seconds, dtype=torch.float32)])
        return pair, tokens.new_tensor(peak_memory(tokens.device) / GIB, dtype=torch.float32)


def peak_memory(device: torch.device) -> int:
    """The most memory so far, in bytes: allocated on a CUDA device, or resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
