"""Part h: what one optimizer step of DPO and of OPD spends its time on, and where it waits for the device."""

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, TrainerCallback

from .. import flops
from ..setting import build_model, read_rows
from ..sides import ours
from .inputs import rows_file
from .settings import Settings
from .supervisor import Case, Record

MOST = 20
"""Operations that are listed."""
WARM_UP = 2
"""Optimizer steps before the one that is profiled."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations that read a value from the device."""


def cases(settings: Settings) -> list[Case]:
    """One step of each method."""
    return [Case(method, partial(measure, settings, method), 40) for method in ("dpo", "opd")]


class OneStep(TrainerCallback):
    """Profile the step after WARM_UP, from the end of one optimizer step to the end of the next, rollouts included."""

    def __init__(self, device: str):
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
        self.device = device
        self.profiler = profile(activities=activities)
        self.begin = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start or stop the profiler."""
        if state.global_step == WARM_UP:
            flops.wait(self.device)
            self.profiler.start()
            self.begin = time.perf_counter()
            set_sync_warnings(self.device, "warn")
        elif state.global_step == WARM_UP + 1:
            set_sync_warnings(self.device, "default")
            flops.wait(self.device)
            self.seconds = time.perf_counter() - self.begin
            self.profiler.stop()


def set_sync_warnings(device: str, mode: str) -> None:
    """Let torch warn, or no longer, of each operation that waits for the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def measure(settings: Settings, method: str) -> Iterator[Record]:
    """Yield the most expensive operations and the number of host synchronisations of one step."""
    shape, batch = settings.shape("qwen3-0.6b"), settings.pick(8, 2)
    spec = {
        "method": method, "variant": "", "folder": str(settings.folder / shape), "batch": batch, "bf16": True,
        "device": settings.device, "dtype": "float32", "lora": False, "liger": settings.liger, "compile": False,
        "attention": "sdpa", "max_length": settings.pick(1024, 256),
    }  # fmt: skip
    rows = read_rows(rows_file(settings, "rows"), method, batch * (WARM_UP + 1))
    step = OneStep(settings.device)
    model, tokenizer = build_model(spec, seed=0), AutoTokenizer.from_pretrained(spec["folder"])
    trainer = ours(spec, rows, model=model, processing_class=tokenizer, callbacks=[step])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    places = Counter(place_of(each) for each in caught if "synchroniz" in str(each.message))
    yield summarise(step, method, settings.device) | {"places": places.most_common(MOST)}


def place_of(warning: Any) -> str:
    """Return the file and line that a warning names."""
    path = Path(warning.filename)
    return f"{os.path.join(*path.parts[-2:])}:{warning.lineno}"


def summarise(step: OneStep, method: str, device: str) -> Record:
    """Return the figures of a profiled step: times in milliseconds, and counts."""
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    averages = sorted(step.profiler.key_averages(), key=lambda each: -getattr(each, field))
    counts = {each.key: each.count for each in averages}
    operations = [[each.key[:60], getattr(each, field) / 1e3, each.count] for each in averages[:MOST]]
    for name, milliseconds, count in operations:
        print(f"{method} {milliseconds:9.2f} ms {count:6d}x {name}", file=sys.stderr)
    return {
        "method": method, "step_ms": 1e3 * step.seconds,
        "device_ms": sum(getattr(each, field) for each in averages) / 1e3,
        "launches": sum(count for name, count in counts.items() if "LaunchKernel" in name),
        "waits": sum(counts.get(name, 0) for name in WAITS), "reads": sum(counts.get(name, 0) for name in READS),
        "operations": operations,
    }  # fmt: skip
