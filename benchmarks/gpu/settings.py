"""What the measurements on a GPU have in common: device, sizes, timing."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import flops


@dataclass(frozen=True)
class Settings:
    """Where to measure, and at which sizes.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        tiny: Use tiny models and few tokens, to see whether the commands run.
        folder: Where the rows and the models' configs and tokenizers are, written by `inputs.write_inputs`.
        peers: Which of `trl` and `liger_kernel` are installed.
    """

    device: str
    tiny: bool
    folder: Path
    peers: tuple[str, ...] = ()

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels can run here."""
        return "liger_kernel" in self.peers and self.device == "cuda"

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


def median_seconds(device: str, run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a call, after one call that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        flops.wait(device)
        start = time.perf_counter()
        run()
        flops.wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def peak_gib(device: str, run: Callable[[], Any]) -> tuple[float | None, float | None]:
    """Return the peak memory of a call in GiB, and how much of it the call added. `None` on CPU."""
    if device != "cuda":
        run()
        return None, None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated()
    return peak / 2**30, (peak - before) / 2**30


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return difference.item()
