"""One training run of one side, in a process of its own so that its peak memory is its own.

    python -m benchmarks.worker SPEC.json       the spec of `benchmarks.run`; the result is written to spec["result"]
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, TrainerCallback

from . import flops
from .setting import build_model
from .sides import SIDES

GB = 2**30


class Clock(TrainerCallback):
    """When the first and the last optimizer step ended, and the tokens that were trained between."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: list[float] = []
        self.tokens = 0
        self.steps = 0

    def watch(self, trainer: Any) -> None:
        """Count the tokens of each micro-batch on its way to the loss."""
        compute = trainer.compute_loss

        def counting(model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
            if self.steps:
                self.tokens += trained_tokens(inputs)
            return compute(model, inputs, *args, **kwargs)

        trainer.compute_loss = counting

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time; a device is waited for only where it counts."""
        self.steps += 1
        if self.steps == 1 or self.steps == state.max_steps:
            flops.wait(self.device)
            self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """From the end of the first step to the end of the last."""
        return self.times[-1] - self.times[0]


def trained_tokens(batch: dict[str, Any]) -> int:
    """Tokens that the loss of this batch is over."""
    if "completion_mask" in batch:
        return int(batch["completion_mask"].sum())
    return int((batch["shift_labels" if "shift_labels" in batch else "labels"] != -100).sum())


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Rates after the first step, and memory in GB: the peak, and how much of it came after the model."""
    rows = [json.loads(line) for line in Path(spec["rows"]).read_text(encoding="utf-8").splitlines()]
    device, clock = spec["device"], Clock(spec["device"])
    tokenizer, model = AutoTokenizer.from_pretrained(spec["folder"]), build_model(spec, seed=0)
    costs = flops.Costs.of(model.config, sum(weight.numel() for weight in model.parameters()), spec["lora"])
    before = memory(device)
    trainer = SIDES[spec["side"]](spec, rows, model=model, processing_class=tokenizer, callbacks=[clock])
    clock.watch(trainer)
    loss = trainer.train().training_loss
    if clock.steps < 2:
        raise SystemExit("error: all rows fit into one step, and rates are measured after the first: give more --rows")
    peak = peak_memory(device)
    count = spec["batch"] * (clock.steps - 1)
    useful = 0.0  # known from rows as ours prepares them
    if spec["side"] == "ours":
        useful = useful_flops(costs, spec, trainer.train_dataset, clock.tokens // count)
    return {
        "rows_per_second": count / clock.seconds,
        "tokens_per_second": clock.tokens / clock.seconds,
        "peak_gb": peak / GB,
        "added_gb": (peak - before) / GB,
        "loss": loss,
        "tokens": clock.tokens,
        "steps": clock.steps,
        "token_flops": useful / clock.tokens,
        "machine_flops": flops.machine_rate(device, torch.bfloat16 if spec["bf16"] else getattr(torch, spec["dtype"])),
    }


def useful_flops(costs: flops.Costs, spec: dict[str, Any], rows: Any, rollout: int) -> float:
    """Of all rows after the first step; a packed row is worth its examples."""
    rows = rows.select(range(spec["batch"], len(rows)))
    if spec["variant"] == "packed":
        pairs = (pair for row in rows for pair in zip(row["prompt_ids"], row["completion_ids"], strict=True))
        examples = [{"prompt_ids": prompt, "completion_ids": answer} for prompt, answer in pairs]
    else:
        examples = [row | {"completion": rollout} for row in rows]
    cached = spec["variant"] == "cached"
    return sum(flops.of_row(costs, spec["method"], example, cached) for example in examples)


def memory(device: str) -> int:
    """Bytes in use."""
    return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss


def peak_memory(device: str) -> int:
    """The most bytes that were in use: of the device, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(measure(given)), encoding="utf-8")
