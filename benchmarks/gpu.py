"""What only a GPU can tell of the parts that were built without one: are they right there, and which is quickest?

    python -m benchmarks.gpu [--shape qwen3-0.6b --device cuda --tokens 8192 --out outputs/gpu/kernels.json]

    head       the tiled head in bf16 against float64, with kernels and without: log-probabilities and both KL
               divergences, their gradients, over several tiles, kept and computed again
    tiles      its time by the number of tokens in a tile
    attention  a batch of pairs in pieces (varlen), in blocks (flex_attention) and with a mask (sdpa): time, equality
    shapes     a step with the same micro-batch again and again, and with another shape each time: time of a token

Prints a line for each, writes JSON; exits 1 where something is wrong. On CPU, for a test: what there is of it.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posttrain.losses import divergence
from hf_posttrain.scoring import attention, forward, head
from hf_posttrain.scoring.head import LogProb, TileFunction
from hf_posttrain.scoring.teacher_tiles import TeacherStates, dense

from . import flops
from .setting import SHAPES, check_device, configured, random_batch, random_model

TOLERANCE = 0.04
"""Of values and gradients in bf16 against float64, relative to their norm."""
LAYERS = 0.1
"""The same of a gradient through a whole model: rounding alone makes 0.02 to 0.05, another mask 1."""
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
    check_device(parser, given.device)
    results: dict[str, list[Found]] = {}
    wrong = []
    for part in (check_head, sweep_tiles, compare_attention, vary_shapes):
        name = part.__name__.partition("_")[2]
        results[name] = []
        try:
            for found in part(given):
                results[name].append(found)
        except Exception as error:  # what the other parts tell is not lost
            traceback.print_exc()
            results[name].append({"error": f"{type(error).__name__}: {error}", "right": False})
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
    """Hidden states [N, H], the head's weight [V, H] and targets [N], of which many are as likely as all others."""
    draw, size = torch.Generator().manual_seed(0), configured(given.shape, given.vocabulary).hidden_size
    weight = torch.randn(given.vocabulary, size, generator=draw) / size**0.5
    targets = torch.randint(given.vocabulary, (tokens,), generator=draw)
    hidden = math.log(given.vocabulary) * weight[targets] + torch.randn(tokens, size, generator=draw)
    made = [each.to(given.device, torch.bfloat16).to(dtype).requires_grad_() for each in (hidden, weight)]
    return made[0], made[1], targets.to(given.device)


def check_head(given: Any) -> Iterator[Found]:
    """Values and gradients of a few hundred tokens in bf16, against the plain softmax in float64."""
    count = min(given.tokens, 256)
    hidden, weight, targets = head_states(given, count, torch.float64)
    with torch.no_grad():  # a teacher to whom the id before is as likely
        other = (weight + torch.roll(weight, 1, dims=0)).to(torch.bfloat16)
        linear = torch.nn.Linear(other.shape[1], given.vocabulary, bias=False, device=given.device, dtype=other.dtype)
        linear.weight.copy_(other)
        p = torch.log_softmax(hidden @ other.double().T, -1)
    own = forward.LMHead(linear, linear.forward, head.LogitTransform())
    q = torch.log_softmax(hidden @ weight.T, -1)
    expected = {
        "log_prob": q.gather(-1, targets[:, None])[:, 0], "forward_kl": (p.exp() * (p - q)).sum(-1),
        "reverse_kl": (q.exp() * (q - p)).sum(-1),
    }  # fmt: skip
    exact = {
        name: (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight), retain_graph=True))
        for name, values in expected.items()
    }
    rows, kept = head.tile_rows, head.kept_logits
    try:
        with ways(given.device) as known:
            if given.device == "cuda" and "kernels" not in known:
                yield {"by": "kernels", "error": "Triton cannot be imported", "right": False}
            # the whole in one tile, as training takes so few tokens; and in several, recomputed in the backward
            for name, tiled, value in product(known, (False, True), exact):
                head.kernels = known[name]
                head.tile_rows = (lambda *_: 100) if tiled else rows
                head.kept_logits = (lambda *_: 0) if tiled else kept
                hidden, weight, targets = head_states(given, count, torch.bfloat16)
                weights = None if tiled else torch.ones(count, device=given.device)
                tile: TileFunction = LogProb(targets)
                if value != "log_prob":
                    states = TeacherStates(own, hidden.detach())
                    tile = dense(getattr(divergence, value), states, targets, 1.0, ce_coef=0.0)
                values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, tile, weights)
                found = (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight)))
                gaps = dict(zip(("values", "states", "weight"), map(gap, found, exact[value]), strict=True))
                yield {"by": name, "value": value, "tiled": tiled} | gaps | {"right": max(gaps.values()) <= TOLERANCE}
    finally:
        head.tile_rows, head.kept_logits = rows, kept


def sweep_tiles(given: Any) -> Iterator[Found]:
    """Forward and backward of the head by the size of a tile, whose values must not depend on it."""
    hidden, weight, targets = head_states(given, given.tokens, torch.bfloat16)
    chosen, weights, expected = head.tile_rows, torch.ones(given.tokens, device=given.device), None

    def run() -> Tensor:
        values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, LogProb(targets), weights)
        torch.autograd.grad(values.sum(), (hidden, weight))
        return values.detach()

    try:
        with ways(given.device) as known:
            for name, kernels in known.items():
                head.kernels = kernels
                own = chosen(given.vocabulary, head.memory(torch.device(given.device)))
                for rows in sorted({128, 512, 1024, 2048, 4096, own} if given.device == "cuda" else {own}):
                    head.tile_rows = lambda *_, rows=rows: rows
                    values, taken = run(), seconds(given, run)
                    expected = values if expected is None else expected
                    away = gap(values, expected)
                    rate = 6 * given.tokens * weight.numel() / taken / 1e12
                    yield {"by": name, "rows": rows, "ms": round(1e3 * taken, 1), "TFLOP/s": round(rate, 1),
                           "chosen": rows == own, "away": away, "right": away <= 1e-3}  # fmt: skip
    finally:
        head.tile_rows = chosen


# ---- attention


def pairs(count: int, seed: int = 0) -> list[list[int]]:
    """Tokens of `count` prompts and of the two answers of each."""
    draw = random.Random(seed)
    return [[draw.randrange(50, 300), draw.randrange(50, 400), draw.randrange(50, 400)] for _ in range(count)]


def compare_attention(given: Any) -> Iterator[Found]:
    """A whole pass, forward and backward, of 8 pairs by each form of attention; each against the mask's values and its
    gradient of the first layer's queries (a random model's values hardly depend on attention)."""
    device, lengths, expected = torch.device(given.device), pairs(8), None
    attention.avoid_cudnn(device)
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
        found = sums, model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        expected = found if expected is None else expected
        taken = seconds(given, partial(passed, model, batch))
        values, gradient = map(gap, found, expected)
        yield {"form": asked, "ms": round(1e3 * taken, 1), "tokens": batch["input_ids"].numel(), "values": values,
               "gradient": gradient, "right": values <= TOLERANCE and gradient <= LAYERS}  # fmt: skip


def passed(model: Any, batch: Found) -> Tensor:
    """Log-probabilities of the scored tokens, after their backward."""
    model.zero_grad()
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
