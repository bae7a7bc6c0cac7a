"""One training run of one side, in a process of its own so that its peak memory is its own.

    python -m benchmarks.worker SPEC.json       the spec of `benchmarks.run`; the result is written to spec["result"]
"""

import json
import math
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
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Relative, of the first loss to the plain computation: in float32, and in bf16."""
PACKED_TOLERANCE = 5e-2
"""The same where packing puts other rows into the first step; weights are random, so that all rows are about alike."""


class Clock(TrainerCallback):
    """When the first and the last optimizer step ended, the tokens that were trained between, and the first loss."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: list[float] = []
        self.tokens = 0
        self.steps = 0
        self.first_loss: torch.Tensor | None = None

    def watch(self, trainer: Any) -> None:
        """Count the tokens of each micro-batch on its way to the loss."""
        compute = trainer.compute_loss

        def counting(model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
            if self.steps:
                self.tokens += trained_tokens(inputs)
            result = compute(model, inputs, *args, **kwargs)
            if self.first_loss is None:
                loss = result[0] if isinstance(result, tuple) else result
                self.first_loss = loss.detach().clone()
            return result

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


def measure(spec: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rates after the first step, and memory in GB: the peak, and how much of it came after the model.

    Raises RuntimeError where the first loss is not the one that the plain computation gives.
    """
    device, clock = spec["device"], Clock(spec["device"])
    tokenizer, model = AutoTokenizer.from_pretrained(spec["folder"]), build_model(spec, seed=0)
    costs = flops.Costs.of(model.config, sum(weight.numel() for weight in model.parameters()), spec["lora"])
    before = memory(device)
    trainer = SIDES[spec["side"]](spec, rows, model=model, processing_class=tokenizer, callbacks=[clock])
    clock.watch(trainer)
    begin = time.perf_counter()
    loss = trainer.train().training_loss
    if clock.steps < 2:
        raise SystemExit("error: all rows fit into one step, and rates are measured after the first: give more --rows")
    peak = peak_memory(device)
    assert clock.first_loss is not None
    first_loss = clock.first_loss.item()
    check_first_loss(spec, tokenizer, rows, first_loss)
    count = spec["batch"] * (clock.steps - 1)
    useful = 0.0  # known from rows as ours prepares them
    if spec["side"] == "ours":
        useful = useful_flops(costs, spec, trainer.train_dataset, clock.tokens // count)
    return {
        "rows_per_second": count / clock.seconds,
        "tokens_per_second": clock.tokens / clock.seconds,
        "peak_gb": peak / GB,
        "added_gb": (peak - before) / GB,
        "first_step_seconds": clock.times[0] - begin,
        "loss": loss,
        "first_loss": first_loss,
        "tokens": clock.tokens,
        "steps": clock.steps,
        "token_flops": useful / clock.tokens,
        "machine_flops": flops.machine_rate(device, torch.bfloat16 if spec["bf16"] else getattr(torch, spec["dtype"])),
    }


def check_first_loss(spec: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]], found: float) -> None:
    """Raises RuntimeError where a run's first loss is not that of the same rows by the models' own forwards."""
    expected = plain_loss(spec, tokenizer, rows[: spec["batch"]])
    half = spec["bf16"] or spec["dtype"] == "bfloat16"
    tolerance = PACKED_TOLERANCE if spec["variant"] == "packed" else HALF_TOLERANCE if half else TOLERANCE
    right = math.isfinite(found) if expected is None else abs(found - expected) <= tolerance * abs(expected)
    if not right:
        raise RuntimeError(f"the first loss is {found:.6g}, and the plain computation gives {expected}")


@torch.no_grad()
def plain_loss(spec: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]]) -> float | None:
    """The loss of rows before the first step, a row at a time by the models' own forwards.

    Returns None for rollouts, and for rows that are longer than `max_length`, which the sides truncate differently.
    """
    method = spec["method"]
    if method == "opd":
        return None
    if method in ("dpo", "kto"):  # the policy is its reference: -log sigmoid(0), and 1 - sigmoid(0)
        return math.log(2) if method == "dpo" else 0.5
    texts = [prompt_and_answer(row, tokenizer) for row in rows]
    if spec["max_length"] and any(len(prompt) + len(answer) > spec["max_length"] for prompt, answer in texts):
        return None
    models = [build_model(spec, seed=seed).eval() for seed in ((0, 1) if method == "kd" else (0,))]
    values = []
    for prompt, answer in texts:
        ids = torch.tensor([[*prompt, *answer]], device=spec["device"])
        with torch.autocast(spec["device"], torch.bfloat16, enabled=spec["bf16"]):
            logits = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1] for model in models]
        log_probs = [torch.log_softmax(each.float(), dim=-1) for each in logits]
        if method == "kd":
            student, teacher = log_probs
            values.append((teacher.exp() * (teacher - student)).sum(-1))
        else:
            values.append(-log_probs[0].gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(values).mean().item()


def prompt_and_answer(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a row; of a whole text the first one is the prompt."""
    if "prompt_ids" in row:
        return row["prompt_ids"], row["completion_ids"]
    if "text" in row:
        ids = tokenizer(row["text"]).input_ids
        return ids[:1], [*ids[1:], tokenizer.eos_token_id]
    answer = tokenizer(row["completion"]).input_ids
    return tokenizer(row["prompt"]).input_ids, [*answer, tokenizer.eos_token_id]


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
    prepared = [json.loads(line) for line in Path(given["rows"]).read_text(encoding="utf-8").splitlines()]
    Path(given["result"]).write_text(json.dumps(measure(given, prepared)), encoding="utf-8")
