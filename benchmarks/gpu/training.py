"""Parts b, d, e and the trainers of part g: whole training runs, ours and TRL's, each in its own process.

A run's rate counts only if its first loss is that of the plain computation (`worker.check_first_loss`), and ours only
if the layout and the attention are the ones that are to be measured.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from hf_posttrain.scoring.attention import BY_SEGMENT

from .. import flops
from ..setting import read_rows
from ..worker import measure
from .inputs import rows_file
from .settings import Settings
from .supervisor import Case, Record

METHODS = ("sft", "dpo", "kto", "kd", "opd")
WARM_UP = 3
"""Optimizer steps that are not measured: kernels are compiled, and the allocator grows to the longest rows."""
RUN_SECONDS = 45
"""Limit of one run, so that one that hangs does not take the time of the whole part."""
COMPILE_SECONDS = 60
RECORDED = (
    "tokens_per_second",
    "rows_per_second",
    "first_step_seconds",
    "first_loss",
    "expected_loss",
    "tokens",
    "steps",
)
LORA_BATCHES = {"qwen3-8b": 2, "qwen3-0.6b": 8, "qwen3-4b": 4, "qwen3-1.7b": 4}
"""Shape -> rows of 2,048 tokens per step, which fit into 80 GB without activation checkpointing."""
FULL_BATCHES = {"qwen3-0.6b": 8}
"""The same where all weights are trained."""
LONG_ROW = 8192
"""Tokens of a row in the memory measurements: half of them the prompt."""


def compare_methods(settings: Settings) -> list[Case]:
    """Part b: every method with the 0.6B shape, in turns with TRL. The second round runs if there is time."""
    sides = ("ours", "trl") if "trl" in settings.installed else ("ours",)
    found = []
    for repeat, method in product(range(2), METHODS):
        # OPD generates 128 tokens for each step: a step takes seconds
        options = {"rows": 32, "warm_up": 1} if method == "opd" else {"copies": 2}
        for side in sides if repeat == 0 else reversed(sides):
            run = partial(train, settings, side, method, repeat=repeat, **options)
            found.append(Case(f"{method} {side}" + " again" * repeat, run, RUN_SECONDS))
    return found


def lora(settings: Settings) -> list[Case]:
    """Part d: packed rows of 2,048 tokens, by model size: LoRA of rank 16, and all weights in compiled layers."""
    wanted = {shape: packed_options(settings, shape, lora=True) for shape in LORA_BATCHES}
    wanted |= {f"full {shape}": packed_options(settings, shape, lora=False) for shape in FULL_BATCHES}
    return [
        Case(name, partial(train, settings, "ours", "sft", copies=3, **options), COMPILE_SECONDS)
        for name, options in wanted.items()
    ]


def packed_options(settings: Settings, shape: str, lora: bool) -> dict[str, Any]:
    """Return what part d adds to `spec_of`."""
    options: dict[str, Any] = {"shape": shape, "lora": lora, "variant": "packed"}
    options |= {"dtype": "bfloat16"} if lora else {}
    # an 8B model with adapters was not compiled within a minute on an H200. On CPU, where attention is a call
    # for each piece of a row, layers are compiled again at each step
    options |= {"compile": settings.pick(not lora, False), "liger": lora and settings.liger}
    batches = LORA_BATCHES if lora else FULL_BATCHES
    return options | {"max_length": settings.pick(2048, 128), "batch": settings.pick(batches[shape], 2)}


def acceleration(settings: Settings) -> list[Case]:
    """Part e: SFT with the 0.6B shape, as the model is written, with Liger's kernels, and with torch.compile."""
    wanted: list[tuple[str, str, dict[str, Any]]] = [("ours", "plain", {"liger": False})]
    wanted += [("ours", "liger", {"liger": True})] if settings.liger else []
    wanted += [(side, "compile", {"liger": False, "compile": True}) for side in ("ours", "trl")]
    return [
        Case(f"{side} {way}", partial(train, settings, side, "sft", copies=2, **options), COMPILE_SECONDS)
        for side, way, options in wanted
        if side == "ours" or side in settings.installed
    ]


def long_rows(settings: Settings) -> list[Case]:
    """Part g: peak memory of full training in bf16 with rows of 8,192 tokens and activation checkpointing."""
    options: dict[str, Any] = {"shape": "gemma-3-1b", "dtype": "bfloat16", "checkpointing": True, "copies": 0}
    options |= {"max_length": None, "warm_up": 1}
    return [
        Case(f"gemma {method}", partial(train, settings, "ours", method, batch=batch, **options), RUN_SECONDS)
        for method, batch in (("sft", 1), ("dpo", 1), ("kto", 2))
    ]


def train(
    settings: Settings, side: str, method: str, rows: int = 64, copies: int = 1, repeat: int = 0, **options: Any
) -> Iterator[Record]:
    """Train and yield rates and memory.

    Args:
        rows: Number of different rows.
        copies: How often they are repeated; 0 for `token_rows`.
        repeat: Number of this run among runs of the same case.
        options: More of the spec of `worker.measure`.
    """
    spec = spec_of(settings, side, method, **options)
    result = measure(spec, training_rows(settings, spec, rows, copies))
    record: Record = {"side": side, "method": method, "shape": spec["shape"], "repeat": repeat, "mfu": None}
    record |= {name: result[name] for name in RECORDED} | {"peak_gib": result["peak_gb"], "right": True}
    if side == "ours":
        useful = result["token_flops"] * result["tokens_per_second"]
        peak = flops.datasheet_rate(settings.device)
        record |= {"busy": useful / result["machine_flops"], "mfu": useful / peak if peak else None}
        record |= {"layout": result["layout"], "attention": result["attention"]}
        record["right"] = result["layout"] != "padded" and result["attention"] == BY_SEGMENT
    yield record


def spec_of(settings: Settings, side: str, method: str, **options: Any) -> dict[str, Any]:
    """Return the spec of `worker.measure` for a run with float32 weights under bf16 autocast, changed by `options`."""
    shape = settings.shape(options.pop("shape", "qwen3-0.6b"))
    flash = side == "trl" and settings.device == "cuda" and "flash_attn" in settings.installed
    return {
        "side": side,
        "method": method,
        "variant": "",
        "shape": shape,
        "folder": str(settings.folder / shape),
        "device": settings.device,
        "dtype": "float32",
        "bf16": True,
        "lora": False,
        "liger": settings.liger,
        "compile": False,
        "attention": "flash_attention_2" if flash else "sdpa",
        "batch": settings.pick(8, 2),
        "max_length": settings.pick(1024, 256),
        "warm_up": settings.pick(WARM_UP, 1),
    } | options


def training_rows(settings: Settings, spec: dict[str, Any], rows: int, copies: int) -> list[dict[str, Any]]:
    """Return the rows of a run: whole texts to pack, where every token is trained, otherwise prompts and answers."""
    if not copies:
        return token_rows(spec["method"], settings.pick(LONG_ROW, 64), 4 * spec["batch"])
    found = read_rows(rows_file(settings), spec["method"], settings.pick(rows, 12))
    if spec["variant"] == "packed":
        found = [{"text": row["prompt"] + row["completion"]} for row in found]
    return found * copies


def token_rows(method: str, length: int, count: int) -> list[dict[str, Any]]:
    """Return tokenized rows of exactly `length` tokens, half of them the prompt. Only our trainers take them."""
    half = length // 2

    def ids(seed: int) -> list[int]:
        return [2 + (seed + 7 * n) % 200 for n in range(half)]

    if method == "dpo":
        return [{"prompt_ids": ids(n), "chosen_ids": ids(n + 1), "rejected_ids": ids(n + 2)} for n in range(count)]
    rows = [{"prompt_ids": ids(n), "completion_ids": ids(n + 1)} for n in range(count)]
    return [row | {"label": n % 2 == 0} for n, row in enumerate(rows)] if method == "kto" else rows
