"""Part a: the ceilings of the machine, and whether layouts, attention and the LM head compute what they should on it.

Nothing here is a comparison with a peer. A record with `right: false` means that the times of the other parts are of a
wrong computation.
"""

import math
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from hf_posttrain.losses import divergence
from hf_posttrain.scoring import attention, forward, head
from hf_posttrain.scoring.head import LogProb, TileFunction
from hf_posttrain.scoring.teacher_tiles import TeacherStates, dense

from .. import flops
from ..setting import BPE_VOCABULARY, configured, random_batch, random_model
from .settings import Settings, median_seconds, relative_error
from .supervisor import Case, Record

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error of log-probabilities and gradients of a whole model, against padded rows and eager attention."""
HEAD_TOLERANCE = 0.04
"""Relative error of the LM head's values and gradients in bf16, against float64."""
GRADIENT_TOLERANCE = 0.1
"""Relative error of a gradient through a whole model in bf16: rounding alone gives 0.02 to 0.05, a wrong mask 1."""
SAME_VALUES = 1e-3
"""Relative difference of log-probabilities between sizes of a tile."""
VARIED_SHAPES = 1.5
"""Time per token with another shape in each step, relative to one shape. More means planning or compiling per shape."""
LAYOUT_LENGTHS = [[64, 103, 41], [20, 87, 118], [97, 22, 60], [113, 75, 33]]
"""Lengths of a prompt and its two answers, in tokens."""
PACKAGES = ("torch", "triton", "transformers", "accelerate", "datasets", "peft", "trl", "liger-kernel", "flash-attn")


def cases(settings: Settings) -> list[Case]:
    """The checks of part a, the most important first. Compiling flex_attention takes longest."""
    return [
        Case("device", partial(describe_device, settings)),
        Case("head", partial(check_head, settings), 30),
        Case("layouts", partial(check_layouts, settings), 30),
        Case("attention", partial(check_attention, settings, ("mask", "varlen")), 20),
        Case("shapes", partial(vary_shapes, settings), 20),
        Case("tiles", partial(sweep_tiles, settings), 20),
        Case("flex_attention", partial(check_attention, settings, ("mask", "flex"))),
    ]


def describe_device(settings: Settings) -> Iterator[Record]:
    """The machine, the versions, and the highest rates that a copy and a matrix product reach."""
    found = {name: version_of(name) for name in PACKAGES}
    threads = torch.get_num_threads()
    yield {"versions": found, "python": platform.python_version(), "threads": threads, "tiny": settings.tiny}
    if settings.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        capability = f"{properties.major}.{properties.minor}"
        yield {"name": properties.name, "memory_gib": properties.total_memory / 2**30, "capability": capability,
               "driver": driver, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # fmt: skip
    source = torch.randn(settings.pick(2**31, 2**22) // 4, device=settings.device)
    target = torch.empty_like(source)
    seconds = median_seconds(settings.device, partial(target.copy_, source), 10)
    yield {"copy_tb_per_s": 2 * source.nbytes / seconds / 1e12}
    del source, target
    for dtype in (torch.bfloat16, torch.float32):
        size = settings.pick(8192, 256)
        rate = flops.machine_rate(settings.device, dtype, size)
        yield {"dtype": str(dtype).removeprefix("torch."), "matmul_tflop_per_s": rate / 1e12, "size": size}


def version_of(package: str) -> str | None:
    """Return the installed version, or `None`."""
    try:
        return version(package)
    except ImportError:
        return None


# ---- layouts


def check_layouts(settings: Settings) -> Iterator[Record]:
    """Log-probabilities and a gradient of shared, packed and padded rows, against padded rows with eager attention."""
    expected = score_layout(settings, "padded", "eager", torch.float32)
    for layout, implementation, dtype in layouts(settings.device):
        found = score_layout(settings, layout, implementation, dtype)
        errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
        yield {"layout": layout, "attention": implementation, "dtype": str(dtype).removeprefix("torch."),
               "values": errors[0], "gradient": errors[1], "right": max(errors) <= TOLERANCE[dtype]}  # fmt: skip


def layouts(device: str) -> list[tuple[str, str, torch.dtype]]:
    """Return (layout, attention implementation, dtype) that this device can run. `segments` is our default."""
    found = [(layout, "sdpa", torch.float32) for layout in ("shared", "packed", "padded")]
    found += [(layout, "segments", torch.float32) for layout in ("shared", "packed")]
    if device == "cuda":
        found += [(layout, "segments", torch.bfloat16) for layout in ("shared", "packed", "padded")]
        if is_flash_attn_2_available():
            found += [(layout, "flash_attention_2", torch.bfloat16) for layout in ("packed", "padded")]
    return found


def score_layout(settings: Settings, layout: str, implementation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of each answer, and the gradient of the first layer's query projection."""
    name = implementation.replace("segments", "sdpa")
    spec = {"device": settings.device, "dtype": "float32", "attention": name}
    model = random_model(configured(settings.shape("qwen3-0.6b"), BPE_VOCABULARY), spec).to(dtype)
    forward.enable_scoring(model)
    if implementation == "segments":
        attention.choose_attention(model, torch.device(settings.device))
    multiple = attention.row_multiple([model])
    batch = random_batch(LAYOUT_LENGTHS, BPE_VOCABULARY, layout, settings.device, multiple)
    sums = forward.per_branch(score_and_backward(model, batch), batch)
    return sums.float().cpu(), first_gradient(model).float().cpu()


def score_and_backward(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the log-probabilities of the scored tokens, [N], after the backward of their sum."""
    model.zero_grad()
    values = forward.score(model, batch, LogProb(forward.targets(batch)))["value"]
    values.sum().backward()
    return values.detach()


def first_gradient(model: Any) -> Tensor:
    """Return a gradient that depends on attention in all layers."""
    return model.model.layers[0].self_attn.q_proj.weight.grad


# ---- attention


def preference_lengths(count: int, seed: int = 0) -> list[list[int]]:
    """Return the lengths of `count` prompts and of two answers to each."""
    draw = random.Random(seed)
    return [[draw.randrange(50, 300), draw.randrange(50, 400), draw.randrange(50, 400)] for _ in range(count)]


def check_attention(settings: Settings, forms: tuple[str, ...]) -> Iterator[Record]:
    """Forward and backward of 8 pairs by form of attention: a dense mask (sdpa), varlen, and flex_attention.

    Values and the gradient of the first layer's queries are compared with those of the first form.
    """
    device = torch.device(settings.device)
    attention.avoid_cudnn(device)
    expected = None
    for form in forms:
        if form == "flex" and settings.device == "cpu":
            continue  # its kernel for CPU has no backward
        implementation = "flex_attention" if form == "flex" else "sdpa"
        model = build(settings, implementation)
        if form != "mask":
            attention.choose_attention(model, device)
        multiple = attention.row_multiple([model])
        batch = random_batch(preference_lengths(8), settings.vocabulary, "shared", settings.device, multiple)
        sums = forward.per_branch(score_and_backward(model, batch), batch)
        found = sums, first_gradient(model).clone()
        expected = expected or found
        values, gradient = (relative_error(*pair) for pair in zip(found, expected, strict=True))
        right = values <= HEAD_TOLERANCE and gradient <= GRADIENT_TOLERANCE
        record: Record = {"form": form, "values": values, "gradient": gradient, "right": right}
        if right:
            seconds = median_seconds(settings.device, partial(score_and_backward, model, batch), settings.pick(5, 1))
            record |= {"ms": 1e3 * seconds, "tokens": batch["input_ids"].numel()}
        yield record


def build(settings: Settings, implementation: str, dtype: str = "bfloat16") -> Any:
    """Return a model of the 0.6B shape that takes a scorer."""
    spec = {"device": settings.device, "dtype": dtype, "attention": implementation}
    model = random_model(configured(settings.shape("qwen3-0.6b"), settings.vocabulary), spec)
    forward.enable_scoring(model)
    return model


def vary_shapes(settings: Settings) -> Iterator[Record]:
    """Microseconds per token of one micro-batch repeated, and of micro-batches of different shapes."""
    model = build(settings, "sdpa")
    attention.choose_attention(model, torch.device(settings.device))
    count = settings.pick(20, 3)
    taken = {}
    for name, seeds in (("repeated", [0] * count), ("varied", range(count))):
        batches = [
            random_batch(preference_lengths(4, seed), settings.vocabulary, "shared", settings.device, 1)
            for seed in seeds
        ]
        score_and_backward(model, batches[0])
        flops.wait(settings.device)
        start = time.perf_counter()
        for batch in batches:
            score_and_backward(model, batch)
        flops.wait(settings.device)
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        taken[name] = 1e6 * (time.perf_counter() - start) / tokens
    ratio = taken["varied"] / taken["repeated"]
    yield taken | {"ratio": ratio, "right": ratio < VARIED_SHAPES or settings.device == "cpu"}


# ---- the LM head


@contextmanager
def implementations(device: str) -> Iterator[dict[str, Any]]:
    """The ways in which tile functions can be computed here: in torch, and by Triton kernels on a GPU."""
    known = head.kernels
    found: dict[str, Any] = {"torch": lambda _: None}
    if known(torch.empty(0, device=device)):
        found["kernels"] = known
    try:
        yield found
    finally:
        head.kernels = known


def head_inputs(settings: Settings, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [N, H], the head's weight [V, H] and targets [N], of which many are likely."""
    size = configured(settings.shape("qwen3-0.6b"), settings.vocabulary).hidden_size
    torch.manual_seed(0)
    device = torch.device(settings.device)
    weight = torch.randn(settings.vocabulary, size, device=device) / size**0.5
    targets = torch.randint(settings.vocabulary, (tokens,), device=device)
    hidden = math.log(settings.vocabulary) * weight[targets] + torch.randn(tokens, size, device=device)
    rounded = [each.to(torch.bfloat16).to(dtype).requires_grad_() for each in (hidden, weight)]
    return rounded[0], rounded[1], targets


def check_head(settings: Settings) -> Iterator[Record]:
    """Values and gradients of 256 tokens in bf16, against the plain softmax in float64.

    In one tile with the gradient of the weight taken in the forward, as training takes so few tokens, and in several
    tiles that the backward computes again.
    """
    count = settings.pick(256, 64)
    hidden, weight, targets = head_inputs(settings, count, torch.float64)
    with torch.no_grad():  # a teacher to whom the previous id is as likely
        other = (weight + torch.roll(weight, 1, dims=0)).to(torch.bfloat16)
        out_features, in_features = other.shape
        linear = torch.nn.Linear(in_features, out_features, False, device=other.device, dtype=other.dtype)
        linear.weight.copy_(other)
        p = torch.log_softmax(hidden @ other.double().T, -1)
    teacher = forward.LMHead(linear, linear.forward, head.LogitTransform())
    q = torch.log_softmax(hidden @ weight.T, -1)
    expected = {
        "log_prob": q.gather(-1, targets[:, None])[:, 0],
        "forward_kl": (p.exp() * (p - q)).sum(-1),
        "reverse_kl": (q.exp() * (q - p)).sum(-1),
    }
    exact = {
        name: (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight), retain_graph=True))
        for name, values in expected.items()
    }
    tile_rows, kept_logits = head.tile_rows, head.kept_logits
    try:
        with implementations(settings.device) as known:
            if settings.device == "cuda" and "kernels" not in known:
                yield {"by": "kernels", "error": "Triton cannot be imported", "right": False}
            for name, tiled, value in product(known, (False, True), exact):
                head.kernels = known[name]
                head.tile_rows = (lambda *_: 100) if tiled else tile_rows
                head.kept_logits = (lambda *_: 0) if tiled else kept_logits
                hidden, weight, targets = head_inputs(settings, count, torch.bfloat16)
                weights = None if tiled else torch.ones(count, device=settings.device)
                tile: TileFunction = LogProb(targets)
                if value != "log_prob":
                    states = TeacherStates(teacher, hidden.detach())
                    tile = dense(getattr(divergence, value), states, targets, 1.0, ce_coef=0.0)
                values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, tile, weights)
                found = (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight)))
                names = ("values", "hidden_gradient", "weight_gradient")
                errors = dict(zip(names, map(relative_error, found, exact[value]), strict=True))
                right = max(errors.values()) <= HEAD_TOLERANCE
                yield {"by": name, "value": value, "tiled": tiled} | errors | {"right": right}
    finally:
        head.tile_rows, head.kept_logits = tile_rows, kept_logits


def sweep_tiles(settings: Settings) -> Iterator[Record]:
    """Forward and backward of the head by the number of tokens in a tile, on which values must not depend."""
    tokens = settings.pick(8192, 64)
    hidden, weight, targets = head_inputs(settings, tokens, torch.bfloat16)
    weights = torch.ones(tokens, device=settings.device)
    chosen, expected = head.tile_rows, None

    def run() -> Tensor:
        values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, LogProb(targets), weights)
        torch.autograd.grad(values.sum(), (hidden, weight))
        return values.detach()

    default = chosen(settings.vocabulary, head.memory(torch.device(settings.device)))
    try:
        with implementations(settings.device) as known:
            for name, kernels in reversed(known.items()):
                head.kernels = kernels
                for rows in sorted({512, 1024, 2048, 4096, default} if settings.device == "cuda" else {default}):
                    head.tile_rows = lambda *_, rows=rows: rows
                    values = run()
                    expected = values if expected is None else expected
                    error = relative_error(values, expected)
                    right = error <= SAME_VALUES
                    record: Record = {"by": name, "rows": rows, "default": rows == default, "tokens": tokens}
                    record["error_to_first"] = error
                    if right:
                        seconds = median_seconds(settings.device, run, 3)
                        rate = 6 * tokens * weight.numel() / seconds / 1e12
                        record |= {"ms": 1e3 * seconds, "tflop_per_s": rate}
                    yield record | {"right": right}
    finally:
        head.tile_rows = chosen
