"""What is read at log steps alone, without waiting for the device in between.

sum_and_count the pair that a weighted mean is made of
Meter         exact global means from (sum, count) pairs, one reduction each time they are logged
Pace          tokens a second and peak memory
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

GIB = 2**30


def sum_and_count(values: Tensor, weights: Tensor) -> Tensor:
    """[sum of values x weights, sum of weights] of one shape; weight 0 leaves a value out even where it is NaN."""
    return torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])


class Meter:
    """Named (sum, count) pairs. Every rank adds the same names in the same order; counts may be zero."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.largest: set[str] = set()

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values of any shape, weighted as in `sum_and_count`."""
        values = _exact(values.detach())
        weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
        self.add_pair(name, sum_and_count(values, weights))

    def add_pair(self, name: str, pair: Tensor) -> None:
        """Add [sum, count], as `sum_and_count` gives it."""
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def peak(self, name: str, value: Tensor) -> None:
        """Of this scalar, given once between two logs, the largest over the ranks counts, not the mean."""
        self.totals[name] = torch.stack([_exact(value), torch.ones_like(_exact(value))])
        self.largest.add(name)

    def averages(self, accelerator=None) -> dict[str, float]:
        """Global means since the last call; a name that nothing was counted for is left out. Empties the meter."""
        if not self.totals:
            return {}
        totals = torch.stack(list(self.totals.values()))[None]  # [ranks, names, 2]
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.gather(totals)
        pairs = dict(zip(self.totals, totals.sum(0).tolist(), strict=True))
        peaks = dict(zip(self.totals, totals[:, :, 0].amax(0).tolist(), strict=True))
        self.totals = {}
        return {name: peaks[name] if name in self.largest else total / count
                for name, (total, count) in pairs.items() if count}  # fmt: skip


def _exact(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values.double() if values.device.type != "mps" else values.float()


class Pace:
    """How fast a logging interval trained, and how much memory the process has needed so far.

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
        """What happens meanwhile is not training."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def hand_over(self, meter: Meter, processes: int) -> None:
        """Add the interval to the meter: tokens_per_second of all ranks, peak_memory_gib of the rank with the most."""
        now = time.perf_counter()
        if self.tokens is not None:
            seconds = self.tokens.new_tensor((now - self.since) / processes, dtype=torch.float32)  # each rank adds its
            meter.add_pair("tokens_per_second", torch.stack([_exact(self.tokens), _exact(seconds)]))
            peak = peak_memory(self.tokens.device) / GIB
            meter.peak("peak_memory_gib", self.tokens.new_tensor(peak, dtype=torch.float32))
        self.tokens, self.since = None, now


def peak_memory(device: torch.device) -> int:
    """The most memory so far, in bytes: allocated on a CUDA device, or resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
