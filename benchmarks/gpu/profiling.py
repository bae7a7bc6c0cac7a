"""Part h: what one optimizer step of DPO, OPD and LoRA spends its time on, and where it waits for the device."""

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, TrainerCallback

from .. import flops
from ..setting import build_model
from ..sides import ours
from .settings import Settings
from .supervisor import Case, Record
from .training import packed_options, spec_of, training_rows

MOST = 20
"""Operations that are listed."""
TIMED = 3
PROFILED = 4
"""The optimizer steps that are timed without the profiler, and profiled."""
LORA_SHAPE = "qwen3-8b"
LORA_COPIES = 4
"""The shape of the profiled LoRA run, and how often its rows are repeated: a packed row takes several of them."""
NEW_TOKENS = 16
"""Longest rollout of OPD. Each token is 10,000 events of the profiler."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations that read a value from the device."""


def cases(settings: Settings) -> list[Case]:
    """One step of DPO and of OPD, and of LoRA at the size of part d that is the largest."""
    return [Case(name, partial(measure, settings, name), 40) for name in ("dpo", "opd", "lora")]


class Steps(TrainerCallback):
    """Time one step, and profile the next one: each from the end of an optimizer step to the end of the next."""

    def __init__(self, device: str):
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
        self.device = device
        self.profiler = profile(activities=activities)
        self.ends: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds of the timed step."""
        return self.ends[TIMED] - self.ends[TIMED - 1]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock, and start or stop the profiler."""
        if state.global_step == PROFILED:
            self.warn("default")
        flops.wait(self.device)
        self.ends[state.global_step] = time.perf_counter()
        if state.global_step == PROFILED - 1:
            self.profiler.start()
            self.warn("warn")
        elif state.global_step == PROFILED:
            self.profiler.stop()

    def warn(self, mode: str) -> None:
        """Let torch warn, or no longer, of each operation that waits for the GPU."""
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


def measure(settings: Settings, name: str) -> Iterator[Record]:
    """Yield the most expensive operations and the number of host synchronisations of one step."""
    method, options = (name, {}) if name != "lora" else ("sft", packed_options(settings, LORA_SHAPE, lora=True))
    spec = spec_of(settings, "ours", method, **options) | {"new_tokens": NEW_TOKENS}
    rows = training_rows(settings, spec, rows=spec["batch"] * PROFILED, copies=1 if name != "lora" else LORA_COPIES)
    steps = Steps(settings.device)
    model = build_model(spec, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(spec["folder"])
    trainer = ours(spec, rows, model=model, processing_class=tokenizer, callbacks=[steps])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    places = Counter(place_of(each) for each in caught if "called a synchronizing" in str(each.message))
    record = summarise(steps, settings.device) | {"method": name, "new_tokens": NEW_TOKENS}
    for operation, milliseconds, count in record["operations"]:
        print(f"{name} {milliseconds:9.2f} ms {count:6d}x {operation}")
    for place, count in places.most_common(MOST):
        print(f"{name} waits {count:6d}x at {place}")
    if settings.out is not None:
        steps.profiler.export_chrome_trace(str(settings.out / f"trace-{name}.json.gz"))
    yield record | {"places": places.most_common(MOST)}


def place_of(warning: Any) -> str:
    """Return the file and line that a warning names."""
    path = Path(warning.filename)
    return f"{os.path.join(*path.parts[-2:])}:{warning.lineno}"


def summarise(steps: Steps, device: str) -> Record:
    """Return the figures of both steps: times in milliseconds, and counts.

    The operations are kernels on a GPU, which torch lists again under the operators that launched them, and operators
    on CPU.
    """
    averages = steps.profiler.key_averages()
    counts = {each.key: each.count for each in averages}
    host = operations(averages, DeviceType.CPU, "self_cpu_time_total")
    ran = operations(averages, DeviceType.CUDA, "self_device_time_total") if device == "cuda" else host
    return {
        "step_ms": 1e3 * steps.seconds,
        "device_ms": sum(milliseconds for _, milliseconds, _ in ran),
        "launches": sum(count for name, count in counts.items() if "LaunchKernel" in name),
        "waits": sum(counts.get(name, 0) for name in WAITS),
        "reads": sum(counts.get(name, 0) for name in READS),
        "operations": ran[:MOST],
        "host_operations": host[:MOST],
    }


def operations(averages: Any, kind: DeviceType, field: str) -> list[tuple[str, float, int]]:
    """Return the name, milliseconds and count of every operation of one kind of device, the most expensive first."""
    found = [each for each in averages if each.device_type == kind and not each.is_user_annotation]
    found.sort(key=lambda each: -getattr(each, field))
    return [(each.key[:60], getattr(each, field) / 1e3, each.count) for each in found]
