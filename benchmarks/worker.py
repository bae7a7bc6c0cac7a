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

from hf_posttrain.scoring import forward
from hf_posttrain.scoring.attention_selection import disable_cudnn_attention

from . import flops
from .setting import PAIRED, build_model
from .sides import SIDES

GB = 2**30
TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-3
"""Relative, of the first loss to the plain computation: in float32, and in bf16. With random weights targets that are
shifted by one change the loss by 1.3e-3 or more, and bf16 by 2e-4."""
PREFERENCE_TOLERANCE = 2e-2
"""The same of preferences in bf16, whose losses depend on sums over an answer."""
PACKED_TOLERANCE = 5e-2
"""The same for packed rows of the other side, whose first step holds other rows."""
ANSWERS = ("completion", "chosen", "rejected")
CPO_BETA = 0.1
"""Default of both sides."""
Document = tuple[list[int], list[int]]
"""The token ids of a prompt and of its answer."""


class Clock(TrainerCallback):
    """When optimizer steps ended, the tokens that were trained after the warm-up, and the first loss.

    Nothing is read from the device before the end: a device is waited for after the steps whose time counts.
    """

    def __init__(self, device: str, warm_up: int) -> None:
        self.device = device
        self.warm_up = warm_up
        self.ends: dict[int, float] = {}
        self.tokens: torch.Tensor | int = 0
        self.steps = 0
        self.first_loss: torch.Tensor | None = None

    def watch(self, trainer: Any) -> None:
        """Count the tokens of each micro-batch on its way to the loss, and keep the first loss."""
        compute = trainer.compute_loss

        def counting(model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
            if self.steps >= self.warm_up:
                self.tokens = self.tokens + trained_tokens(inputs)
            result = compute(model, inputs, *args, **kwargs)
            if self.first_loss is None:
                loss = result[0] if isinstance(result, tuple) else result
                self.first_loss = loss.detach().clone()
            return result

        trainer.compute_loss = counting

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time of the first step, of the last one of the warm-up, and of the last one."""
        self.steps += 1
        if self.steps in (1, self.warm_up, state.max_steps):
            flops.wait(self.device)
            self.ends[self.steps] = time.perf_counter()

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the end of the last step."""
        return self.ends[self.steps] - self.ends[self.warm_up]


def trained_tokens(batch: dict[str, Any]) -> torch.Tensor | int:
    """The number of tokens that the loss of this batch is over, on its device. It is 0 for a batch without labels."""
    if "completion_mask" in batch:
        return batch["completion_mask"].sum()
    names = ["shift_labels"] if "shift_labels" in batch else [name for name in batch if name.endswith("labels")]
    return sum((batch[name] != -100).sum() for name in names)


def measure(spec: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates after the warm-up, and memory in GB: the peak, and how much of it came after the model.

    The spec's `warm_up` is a number of steps, by default one.

    Raises RuntimeError if the first loss is not the one that the plain computation gives.
    """
    device = spec["device"]
    clock = Clock(spec["device"], spec.get("warm_up", 1))
    disable_cudnn_attention(torch.device(device))  # for both sides: it plans attention anew for each shape
    tokenizer = AutoTokenizer.from_pretrained(spec["folder"])
    expected = None
    # on a GPU before Liger changes the models' classes; on CPU after the run, whose peak memory it would be
    if device == "cuda" and spec["variant"] != "packed":
        expected = plain_loss(spec, prompts_and_answers(rows[: spec["batch"]], tokenizer))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build_model(spec, seed=0)
    costs = flops.Costs.of(model.config, sum(weight.numel() for weight in model.parameters()), spec["lora"])
    before = memory(device)
    trainer = SIDES[spec["side"]](spec, rows, model=model, processing_class=tokenizer, callbacks=[clock])
    clock.watch(trainer)
    begin = time.perf_counter()
    loss = trainer.train().training_loss
    if clock.steps <= clock.warm_up:
        problem = f"all rows fit into {clock.steps} steps, and rates are measured after {clock.warm_up}"
        raise SystemExit(f"error: {problem}: give more --rows")
    peak = peak_memory(device)
    if device == "cpu" or spec["variant"] == "packed":
        expected = plain_loss(spec, first_batch(spec, trainer, rows, tokenizer))
    assert clock.first_loss is not None
    tokens = int(clock.tokens)
    if spec["method"] == "rm":  # whose batches have no labels
        trained = prompts_and_answers(rows[spec["batch"] * clock.warm_up :], tokenizer)
        tokens = sum(len(answer) for _, answer in trained)
    first_loss = clock.first_loss.item()
    check_first_loss(spec, first_loss, expected)
    count = spec["batch"] * (clock.steps - clock.warm_up)
    result = {
        "rows_per_second": count / clock.seconds,
        "tokens_per_second": tokens / clock.seconds,
        "peak_gb": peak / GB,
        "added_gb": (peak - before) / GB,
        "first_step_seconds": clock.ends[1] - begin,
        "loss": loss,
        "first_loss": first_loss,
        "expected_loss": expected,
        "tokens": tokens,
        "steps": clock.steps,
        "token_flops": 0.0,
        "machine_flops": flops.machine_rate(device, torch.bfloat16 if spec["bf16"] else getattr(torch, spec["dtype"])),
    }
    if spec["side"] == "ours":  # whose rows are known as they are prepared
        prepared = trainer.train_dataset.select(range(spec["batch"] * clock.warm_up, len(trainer.train_dataset)))
        result["token_flops"] = useful_flops(costs, spec, prepared, tokens // count) / tokens
        result["layout"] = trainer.data_collator.layout
        result["attention"] = forward.causal_lm(trainer.model).config.get_text_config()._attn_implementation
    return result


# ---- the first loss


def check_first_loss(spec: dict[str, Any], found: float, expected: float | None) -> None:
    """Raises RuntimeError if a run's first loss is not that of the same rows by the models' own forwards."""
    half = spec["bf16"] or spec["dtype"] == "bfloat16"
    tolerance = TOLERANCE
    if half:
        tolerance = PREFERENCE_TOLERANCE if spec["method"] in (*PAIRED, "kto") else HALF_TOLERANCE
    if spec["variant"] == "packed" and spec["side"] != "ours":
        tolerance = PACKED_TOLERANCE
    right = math.isfinite(found) if expected is None else abs(found - expected) <= tolerance * abs(expected)
    if not right:
        raise RuntimeError(f"the first loss is {found:.6g}, and the plain computation gives {expected}")


def first_batch(spec: dict[str, Any], trainer: Any, rows: list[dict[str, Any]], tokenizer: Any) -> list[Document]:
    """The documents of the first step: of packed rows as ours has packed them, otherwise the first rows."""
    if spec["variant"] != "packed" or spec["side"] != "ours":
        return prompts_and_answers(rows[: spec["batch"]], tokenizer)
    packed = trainer.train_dataset.select(range(spec["batch"]))
    return [pair for row in packed for pair in zip(row["prompt_ids"], row["completion_ids"], strict=True)]


@torch.no_grad()
def plain_loss(spec: dict[str, Any], documents: list[Document]) -> float | None:
    """The loss of documents before the first step, one at a time by the models' own forwards.

    Returns None for rollouts, and for rows that are longer than `max_length`, which the sides truncate differently.
    """
    method = spec["method"]
    limit = spec["max_length"]
    if method == "opd" or (limit and any(len(prompt) + len(answer) > limit for prompt, answer in documents)):
        return None
    if method in ("dpo", "kto"):  # the policy is its reference: -log sigmoid(0), and 1 - sigmoid(0)
        return math.log(2) if method == "dpo" else 0.5
    models = [build_model(spec, seed=seed).eval() for seed in ((0, 1) if method == "kd" else (0,))]
    values = []
    for prompt, answer in documents:
        ids = torch.tensor([[*prompt, *answer]], device=spec["device"])
        with torch.autocast(spec["device"], torch.bfloat16, enabled=spec["bf16"]):
            logits = [model(input_ids=ids).logits[0] for model in models]
        if method == "rm":  # the score of the last token
            values.append(logits[0].float())
            continue
        log_probs = [torch.log_softmax(each[len(prompt) - 1 : -1].float(), dim=-1) for each in logits]
        if method == "kd":
            student, teacher = log_probs
            values.append((teacher.exp() * (teacher - student)).sum(-1))
        else:
            values.append(-log_probs[0].gather(-1, ids[0, len(prompt) :, None])[:, 0])
    if method == "rm":
        return pair_loss(values, scale=1.0)
    if method == "cpo":
        # TRL averages over all tokens, and CPOTrainer here over the answers (docs/reference/cpo.md)
        chosen = values[::2] if spec["side"] == "trl" else [value.mean()[None] for value in values[::2]]
        return pair_loss([-value.sum() for value in values], scale=CPO_BETA) + torch.cat(chosen).mean().item()
    return torch.cat(values).mean().item()


def pair_loss(values: list[torch.Tensor], scale: float) -> float:
    """Return the mean of -log sigmoid(scale (chosen - rejected)). values: of chosen and rejected answers in turn."""
    pairs = zip(values[::2], values[1::2], strict=True)
    losses = [-torch.nn.functional.logsigmoid(scale * (chosen - rejected)) for chosen, rejected in pairs]
    return torch.stack(losses).mean().item()


def prompts_and_answers(rows: list[dict[str, Any]], tokenizer: Any) -> list[Document]:
    """Return the token ids of the prompt and answer of each row. A row with two answers gives two documents.

    The prompt of a plain text is its first token.
    """
    found = []
    for row in rows:
        if "text" in row:
            ids = tokenizer(row["text"]).input_ids
            found.append((ids[:1], [*ids[1:], tokenizer.eos_token_id]))
            continue
        answers = [tokenizer(row[name]).input_ids for name in ANSWERS if name in row]
        prompt = tokenizer(row["prompt"]).input_ids
        found += [(prompt, [*answer, tokenizer.eos_token_id]) for answer in answers]
    return found


def useful_flops(costs: flops.Costs, spec: dict[str, Any], rows: Any, rollout: int) -> float:
    """Of all rows after the warm-up; a packed row is worth its examples."""
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
