"""What only a GPU can tell of the parts that were built without one: are they right there, and which is quickest?

    python -m benchmarks.gpu [--shape qwen3-0.6b --device cuda --tokens 8192 --out outputs/gpu/kernels.json]

    head       the tiled head in bf16 against float64, with kernels and without: values, gradients
    tiles      its time by the number of tokens in a tile
    attention  a batch of pairs in pieces (varlen), in blocks (flex_attention) and with a mask (sdpa): time, equality
    shapes     a step with the same micro-batch again and again, and with another shape each time: time of a token

Prints a line for each, writes JSON; exits 1 where something is wrong. On CPU, for a test: what there is of it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posttrain.scoring import attention, forward, head
from hf_posttrain.scoring.head import LogProb

from . import flops
from .setting import SHAPES, configured, random_batch, random_model

TOLERANCE = 0.02
"""Of values and gradients in bf16 against float64, relative to their norm."""
Found = dict[str, Any]


def main() -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Parts, on a GPU.")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=8192, help="of a pass through the head")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu/kernels.json"))
    given = parser.parse_args()
    results, wrong = {}, []
    for part in (check_head, sweep_tiles, compare_attention, vary_shapes):
        name = part.__name__.partition("_")[2]
        results[name] = list(part(given))
        for found in results[name]:
            print(f"{name:10s}", ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
            wrong += [found] if found.get("right") is False else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"setting": vars(given) | {"out": None}} | results, indent=1), encoding="utf-8")
    return int(bool(wrong))


def seconds(given: Any, run: Callable[[], Any]) -> float:
    """Of one call (median), after one that is not counted."""
    taken = []
    for _ in range(given.repeats + 1):
        flops.wait(given.device)
        start = time.perf_counter()
        run()
        flops.wait(given.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def gap(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, rounded for a table."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(f"{difference.item():.2g}")


# ---- the head


@contextmanager
def ways(device: str) -> Iterator[dict[str, Any]]:
    """How the tile functions can be computed here: in torch, and by kernels where there are any."""
    known = head.kernels
    found = {"torch": lambda _: None} | ({"kernels": known} if known(torch.empty(0, device=device)) else {})
    try:
        yield found
    finally:
        head.kernels = known


def head_states(given: Any, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, H], the head's weight [V, H] and targets [N], of which most are likely."""
    draw, size = torch.Generator().manual_seed(0), configured(given.shape, given.vocabulary).hidden_size
    weight = torch.randn(given.vocabulary, size, generator=draw) / size**0.5
    targets = torch.randint(given.vocabulary, (tokens,), generator=draw)
    hidden = 4 * weight[targets] + torch.randn(tokens, size, generator=draw)
    made = [each.to(given.device, torch.bfloat16).to(dtype).requires_grad_() for each in (hidden, weight)]
    return made[0], made[1], targets.to(given.device)


def check_head(given: Any) -> Iterator[Found]:
    """Log-probabilities and gradients of a few hundred tokens in bf16, against the plain softmax in float64."""
    hidden, weight, targets = head_states(given, min(given.tokens, 256), torch.float64)
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
    exact = (expected.detach(), *torch.autograd.grad(expected.sum(), (hidden, weight)))
    with ways(given.device) as known:
        for name, kernels in known.items():
            head.kernels = kernels
            for promised in (True, False):
                hidden, weight, targets = head_states(given, len(targets), torch.bfloat16)
                weights = torch.ones(len(targets), device=given.device) if promised else None
                values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, LogProb(targets), weights)
                found = (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight)))
                gaps = dict(zip(("values", "states", "weight"), map(gap, found, exact), strict=True))
                yield {"by": name, "promised": promised} | gaps | {"right": max(gaps.values()) <= TOLERANCE}


def sweep_tiles(given: Any) -> Iterator[Found]:
    """Forward and backward of the head by the size of a tile."""
    hidden, weight, targets = head_states(given, given.tokens, torch.bfloat16)
    chosen, weights = head.tile_rows, torch.ones(given.tokens, device=given.device)

    def run() -> None:
        values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, LogProb(targets), weights)
        values.sum().backward()

    try:
        with ways(given.device) as known:
            for name, kernels in known.items():
                head.kernels = kernels
                own = chosen(given.vocabulary, head.memory(torch.device(given.device)))
                for rows in sorted({128, 512, 1024, 2048, 4096, own} if given.device == "cuda" else {own}):
                    head.tile_rows = lambda *_, rows=rows: rows
                    taken = seconds(given, run)
                    rate = 6 * given.tokens * weight.numel() / taken / 1e12
                    yield {"by": name, "rows": rows, "ms": round(1e3 * taken, 1), "TFLOP/s": round(rate, 1),
                           "chosen": rows == own}  # fmt: skip
    finally:
        head.tile_rows = chosen


# ---- attention


def pairs(count: int, seed: int = 0) -> list[list[int]]:
    """Tokens of `count` prompts and of the two answers of each."""
    draw = random.Random(seed)
    return [[draw.randrange(50, 300), draw.randrange(50, 400), draw.randrange(50, 400)] for _ in range(count)]


def compare_attention(given: Any) -> Iterator[Found]:
    """A whole pass, forward and backward, of 8 pairs by each form of attention; each against the mask's values."""
    device, lengths, expected = torch.device(given.device), pairs(8), None
    for asked in ("mask", "pieces", "blocks"):
        if asked == "blocks" and given.device == "cpu":  # its kernel has no backward there
            continue
        name = "flex_attention" if asked == "blocks" else "sdpa"
        spec = {"device": given.device, "dtype": "bfloat16", "attention": name}
        model = random_model(configured(given.shape, given.vocabulary), spec)
        forward.enable_scoring(model)
        if asked != "mask":
            attention.choose_attention(model, device)
        batch = random_batch(lengths, given.vocabulary, "shared", given.device, attention.row_multiple([model]))
        sums = forward.per_branch(passed(model, batch), batch)
        expected = sums if expected is None else expected
        taken = seconds(given, partial(passed, model, batch))
        away = gap(sums, expected)
        yield {"form": asked, "ms": round(1e3 * taken, 1), "tokens": batch["input_ids"].numel(), "away": away,
               "right": away <= TOLERANCE}  # fmt: skip


def passed(model: Any, batch: Found) -> Tensor:
    """Log-probabilities of the scored tokens, after their backward."""
    values = forward.score(model, batch, LogProb(forward.targets(batch)))["value"]
    values.sum().backward()
    return values.detach()


def vary_shapes(given: Any) -> Iterator[Found]:
    """Microseconds a token of one micro-batch repeated, and of another shape each time: alike, or something is planned
    or compiled anew for each shape."""
    spec = {"device": given.device, "dtype": "bfloat16", "attention": "sdpa"}
    model = random_model(configured(given.shape, given.vocabulary), spec)
    forward.enable_scoring(model)
    attention.choose_attention(model, torch.device(given.device))
    count, found = 4 * given.repeats, {}
    for name, seeds in (("repeated", [0] * count), ("varied", [*range(count)])):
        made = [random_batch(pairs(4, seed), given.vocabulary, "shared", given.device, 1) for seed in seeds]
        passed(model, made[0])
        flops.wait(given.device)
        start = time.perf_counter()
        for batch in made:
            passed(model, batch)
        flops.wait(given.device)
        tokens = sum(batch["input_ids"].numel() for batch in made)
        found[name] = round(1e6 * (time.perf_counter() - start) / tokens, 2)
    ratio = found["varied"] / found["repeated"]
    yield found | {"ratio": round(ratio, 2), "right": ratio < 1.5 or given.device == "cpu"}


if __name__ == "__main__":
    sys.exit(main())
