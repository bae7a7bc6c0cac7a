"""Parts b, d, e and the trainers of part g: whole training runs, ours and TRL's, each in its own process.

A run's rate counts only if its first loss is that of the plain computation (`worker.check_first_loss`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from .. import flops
from ..setting import read_rows
from ..worker import measure
from .inputs import rows_file
from .settings import Settings
from .supervisor import Case, Record

METHODS = ("sft", "dpo", "kto", "kd", "opd")
RUN_SECONDS = 45
"""Limit of one run, so that one that hangs does not take the time of the whole part."""
LORA_BATCHES = {"qwen3-0.6b": 8, "qwen3-1.7b": 4, "qwen3-4b": 4, "qwen3-8b": 2}
"""Shape -> rows of 2,048 tokens per step, which fit into 80 GB without activation checkpointing."""
LONG_ROW = 8192
"""Tokens of a row in the memory measurements: half of them the prompt."""


def compare_methods(settings: Settings) -> list[Case]:
    """Part b: every method with the 0.6B shape, in turns with TRL. The second round runs if there is time."""
    sides = ("ours", "trl") if "trl" in settings.peers else ("ours",)
    found = []
    for repeat, method in product(range(2), METHODS):
        for side in sides if repeat == 0 else reversed(sides):
            run = partial(train, settings, side, method, repeat=repeat)
            found.append(Case(f"{method} {side}", run, RUN_SECONDS))
    return found


def lora(settings: Settings) -> list[Case]:
    """Part d: LoRA of rank 16 on packed rows of 2,048 tokens, by model size."""
    found = []
    for shape, batch in LORA_BATCHES.items():
        options: dict[str, Any] = {"shape": shape, "lora": True, "dtype": "bfloat16", "variant": "packed"}
        options |= {"max_length": settings.pick(2048, 128), "batch": settings.pick(batch, 2), "copies": 3}
        found.append(Case(shape, partial(train, settings, "ours", "sft", **options), RUN_SECONDS))
    return found


def acceleration(settings: Settings) -> list[Case]:
    """Part e: SFT with the 0.6B shape, with and without torch.compile and Liger's layer kernels."""
    with_liger = (False, True) if settings.liger else (False,)
    found = []
    for compiled, liger in product((False, True), with_liger):
        peers = settings.peers if liger else ()
        name = " + ".join(["plain"] * (not compiled and not liger) + ["liger"] * liger + ["compile"] * compiled)
        run = partial(train, replace(settings, peers=peers), "ours", "sft", compile=compiled)
        found.append(Case(name, run, RUN_SECONDS))
    return found


def long_rows(settings: Settings) -> list[Case]:
    """Part g: peak memory of full training in bf16 with rows of 8,192 tokens and activation checkpointing."""
    options: dict[str, Any] = {"shape": "gemma-3-1b", "dtype": "bfloat16", "checkpointing": True, "copies": 0}
    options["max_length"] = None
    return [
        Case(f"gemma {method}", partial(train, settings, "ours", method, batch=batch, **options), RUN_SECONDS)
        for method, batch in (("sft", 1), ("dpo", 1), ("kto", 2))
    ]


def train(
    settings: Settings,
    side: str,
    method: str,
    shape: str = "qwen3-0.6b",
    batch: int | None = None,
    copies: int = 1,
    repeat: int = 0,
    **options: Any,
) -> Iterator[Record]:
    """Train and yield rates and memory.

    Args:
        batch: Rows per step.
        copies: How often the rows are repeated; 0 for `token_rows`.
        repeat: Number of this run among runs of the same case.
        options: More of the spec of `worker.measure`.
    """
    batch = batch or settings.pick(8, 2)
    spec = {
        "side": side, "method": method, "variant": "", "shape": settings.shape(shape), "batch": batch,
        "folder": str(settings.folder / settings.shape(shape)), "device": settings.device, "dtype": "float32",
        "bf16": True, "lora": False, "liger": settings.liger, "compile": False,
        "attention": attention_of(settings, side), "max_length": settings.pick(1024, 256),
    } | options  # fmt: skip
    rows = training_rows(settings, method, batch, copies, spec)
    result = measure(spec, rows)
    record: Record = {"side": side, "method": method, "shape": spec["shape"], "repeat": repeat}
    names = ("tokens_per_second", "rows_per_second", "first_step_seconds", "first_loss", "token_flops", "steps")
    record |= {name: result[name] for name in names}
    record["peak_gib"] = result["peak_gb"]
    rate = result["token_flops"] * result["tokens_per_second"]
    record["busy"] = rate / result["machine_flops"]
    peak = flops.datasheet_rate(settings.device)
    yield record | {"mfu": rate / peak if peak else None, "right": True}


def attention_of(settings: Settings, side: str) -> str:
    """Return the attention implementation that is fastest for a side: for TRL FlashAttention where it is installed."""
    flash = side != "ours" and settings.device == "cuda" and "flash_attn" in settings.peers
    return "flash_attention_2" if flash else "sdpa"


def training_rows(settings: Settings, method: str, batch: int, copies: int, spec: dict[str, Any]) -> list[dict]:
    """Return the rows of a run: whole texts for LoRA, where every token is trained, otherwise prompts and answers."""
    if not copies:
        return token_rows(method, settings.pick(LONG_ROW, 64), 4 * batch)
    count = settings.pick(24 if method == "opd" else 64, 12)
    rows = read_rows(rows_file(settings, "rows"), method, count)
    if spec["lora"]:
        rows = [{"text": row["prompt"] + row["completion"]} for row in rows]
    return rows * copies


def token_rows(method: str, length: int, count: int) -> list[dict[str, Any]]:
    """Return tokenized rows of exactly `length` tokens, half of them the prompt. Only our trainers take them."""
    half = length // 2

    def ids(seed: int) -> list[int]:
        return [2 + (seed + 7 * n) % 200 for n in range(half)]

    if method == "dpo":
        return [{"prompt_ids": ids(n), "chosen_ids": ids(n + 1), "rejected_ids": ids(n + 2)} for n in range(count)]
    rows = [{"prompt_ids": ids(n), "completion_ids": ids(n + 1)} for n in range(count)]
    return [row | {"label": n % 2 == 0} for n, row in enumerate(rows)] if method == "kto" else rows
