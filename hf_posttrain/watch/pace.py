"""What each training log has besides losses and metrics: tokens a second and peak memory; and that the last step is
logged. Nothing here waits for the device between logs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import TrainerCallback

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
        # the count stays on the device; its sum over ranks is read with the metrics of the same log
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


class LogLastStep(TrainerCallback):
    """The last step is logged wherever `logging_steps` falls, so that a short run has a loss to show. Not with
    logging_strategy epoch or no."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After HF's own callback has decided about this step."""
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            control.should_log = True
