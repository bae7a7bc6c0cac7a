"""What the measurements on a GPU have in common: device, sizes, timing, tolerances."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import flops

GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """Where to measure, and at which sizes.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        tiny: Use tiny models and few tokens, to see whether the commands run.
        folder: Where the rows and the models' configs and tokenizers are, written by `inputs.write_inputs`.
        installed: Which of `trl`, `liger_kernel` and `flash_attn` are installed.
        out: Where a part may leave files; `None`: nowhere.
    """

    device: str
    tiny: bool
    folder: Path
    installed: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels can run here."""
        return "liger_kernel" in self.installed and self.device == "cuda"

    def shape(self, name: str) -> str:
        """Return the shape to build in place of `name`."""
        return "tiny" if self.tiny else name

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding of Qwen3's shapes."""
        return 512 if self.tiny else 151_936

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return the value for this run's size."""
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Cost:
    """Median seconds of a call, and its peak memory in GiB (`None` on CPU): in all, and on top of what was there."""

    seconds: float
    peak_gib: float | None
    added_gib: float | None


def measure_call(device: str, run: Callable[[], Any], repeats: int, warm_up: bool = True) -> Cost:
    """Measure a call.

    Args:
        warm_up: Call once before, without measuring. `False` if the caller has called it already.
    """
    if warm_up:
        run()
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    taken = []
    for _ in range(repeats):
        flops.wait(device)
        start = time.perf_counter()
        run()
        flops.wait(device)
        taken.append(time.perf_counter() - start)
    seconds = statistics.median(taken)
    if device != "cuda":
        return Cost(seconds, None, None)
    peak = torch.cuda.max_memory_allocated()
    return Cost(seconds, peak / GIB, (peak - before) / GIB)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, in float64."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return difference.item()


def within(errors: Iterable[float], tolerance: float) -> bool:
    """Return whether all errors are at most the tolerance. NaN is not."""
    return all(error <= tolerance for error in errors)
