"""Part a: the ceilings of the machine, and whether layouts, attention and the LM head compute what they should on it.

Nothing here is a comparison with a peer. A record with `right: false` means that the times of the other parts are of a
wrong computation.
"""

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from hf_posttrain.losses import divergence
from hf_posttrain.scoring import attention, attention_selection, forward, head, teacher_tiles
from hf_posttrain.scoring.head import LogProb, TileFunction
from hf_posttrain.scoring.teacher_tiles import dense_divergence
from hf_posttrain.teachers.local import TeacherStates

from .. import flops
from ..setting import BPE_VOCABULARY, configured, random_batch, random_model
from .models import build, first_gradient, head_inputs, preference_lengths, score_and_backward
from .settings import Settings, measure_call, relative_error, within
from .supervisor import Case, Record

VALUES = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"""Tolerance of summed log-probabilities, relative to padded rows with eager attention in float32."""
GRADIENTS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Tolerance of a gradient through the whole model: bf16 rounding gives 0.02 to 0.05, a wrong mask 1."""
HEAD = 0.04
"""Tolerance of the LM head's values and gradients in bf16, relative to float64."""
TILES = 1e-2
"""Tolerance between sizes of a tile: of log-probabilities, and of the weight's gradient, which is rounded to bf16."""
VARIED_SHAPES = 1.5
"""Time per token with another shape in each step, relative to one shape. More means planning or compiling per shape."""
LAYOUT_LENGTHS = [[64, 103, 41], [20, 87, 118], [97, 22, 60], [113, 75, 33]]
"""Lengths of a prompt and its two answers, in tokens."""
PACKAGES = ("torch", "triton", "transformers", "accelerate", "datasets", "peft", "trl", "liger-kernel", "flash-attn")


def cases(settings: Settings) -> list[Case]:
    """The checks of part a, the most important first. Compiling flex_attention takes longest."""
    return [
        Case("ceilings", partial(measure_ceilings, settings), 20),
        Case("head", partial(check_head, settings), 20),
        Case("layouts", partial(check_layouts, settings), 20),
        Case("attention", partial(compare_attention, settings, ("mask", "varlen")), 20),
        Case("shapes", partial(vary_shapes, settings), 20),
        Case("tiles", partial(sweep_tiles, settings), 20),
        Case("flex_attention", partial(compare_attention, settings, ("mask", "flex"))),
    ]


def describe_machine(settings: Settings) -> Iterator[Record]:
    """The device and the versions. This runs before the parts, whichever are chosen."""
    versions = {name: version_of(name) for name in PACKAGES}
    threads = torch.get_num_threads()
    yield {
        "versions": versions,
        "python": platform.python_version(),
        "threads": threads,
        "tiny": settings.tiny,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if settings.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        yield {
            "name": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "capability": capability,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        yield {"driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()}


def measure_ceilings(settings: Settings) -> Iterator[Record]:
    """The highest rates that a copy and a matrix product reach."""
    source = torch.randn(settings.pick(2**31, 2**22) // 4, device=settings.device)
    target = torch.empty_like(source)
    seconds = measure_call(settings.device, partial(target.copy_, source), 10).seconds
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
    except PackageNotFoundError:
        return None


# ---- layouts


def check_layouts(settings: Settings) -> Iterator[Record]:
    """Log-probabilities and a gradient of shared, packed and padded rows, against padded rows with eager attention."""
    device = torch.device(settings.device)
    attention_selection.disable_cudnn_attention(device)
    spec = {"device": settings.device, "dtype": "float32", "attention": "eager"}
    model = random_model(configured(settings.shape("qwen3-0.6b"), BPE_VOCABULARY), spec)
    forward.enable_scoring(model)

    def score(layout: str) -> tuple[Tensor, Tensor]:
        multiple = attention_selection.row_multiple([model])
        batch = random_batch(LAYOUT_LENGTHS, BPE_VOCABULARY, layout, settings.device, multiple)
        sums = batch.per_branch(score_and_backward(model, batch))
        return sums.double(), first_gradient(model).double()

    expected = score("padded")
    for layout, implementation, dtype in layouts(settings.device):
        for weight in model.parameters():  # the frequencies of rotary embeddings stay float32
            weight.data = weight.data.to(dtype)
            weight.grad = None
        model.set_attn_implementation(implementation.replace("segments", "sdpa"))
        if implementation == "segments":
            attention_selection.choose_attention(model, device)
        values, gradient = (relative_error(*pair) for pair in zip(score(layout), expected, strict=True))
        right = within([values], VALUES[dtype]) and within([gradient], GRADIENTS[dtype])
        yield {
            "layout": layout,
            "attention": implementation,
            "dtype": str(dtype).removeprefix("torch."),
            "values": values,
            "gradient": gradient,
            "right": right,
        }


def layouts(device: str) -> list[tuple[str, str, torch.dtype]]:
    """Return (layout, attention, dtype) that this device can run, bf16 last. `segments` is our default attention."""
    found = [(layout, "sdpa", torch.float32) for layout in ("shared", "packed", "padded")]
    found += [(layout, "segments", torch.float32) for layout in ("shared", "packed")]
    found += [(layout, "segments", torch.bfloat16) for layout in ("shared", "packed", "padded")]
    if device == "cuda" and is_flash_attn_2_available():
        found += [(layout, "flash_attention_2", torch.bfloat16) for layout in ("packed", "padded")]
    return found


# ---- attention


def compare_attention(settings: Settings, forms: tuple[str, ...]) -> Iterator[Record]:
    """Forward and backward of 8 pairs by form of attention: a dense mask (sdpa), varlen, and flex_attention.

    Values and the gradient of the first layer's queries are compared with those of the first form. On a GPU `varlen` is
    right only if the varlen kernel was called.
    """
    expected = None
    for form in forms:
        if form == "flex" and settings.device == "cpu":
            continue  # its kernel for CPU has no backward
        model = build(settings, "flex_attention" if form == "flex" else "sdpa", ours=form != "mask")
        multiple = attention_selection.row_multiple([model])
        batch = random_batch(preference_lengths(8), settings.vocabulary, "shared", settings.device, multiple)
        run = partial(score_and_backward, model, batch)
        with counted_varlen() as calls:
            sums = batch.per_branch(run())
        found = sums, first_gradient(model).clone()
        expected = expected or found
        values, gradient = (relative_error(*pair) for pair in zip(found, expected, strict=True))
        right = within([values], HEAD) and within([gradient], GRADIENTS[torch.bfloat16])
        right = right and bool(calls) == (form == "varlen" and settings.device == "cuda")
        record: Record = {"form": form, "values": values, "gradient": gradient, "varlen_calls": len(calls)}
        if right:
            cost = measure_call(settings.device, run, settings.pick(5, 1), warm_up=False)
            record |= {"ms": 1e3 * cost.seconds, "tokens": batch["input_ids"].numel()}
        yield record | {"right": right}


@contextmanager
def counted_varlen() -> Iterator[list[None]]:
    """Inside, each call of the varlen kernel adds an item to the list."""
    kernel: Any = attention.varlen_attn
    calls: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return kernel(*args, **kwargs)

    attention.varlen_attn = counted
    try:
        yield calls
    finally:
        attention.varlen_attn = kernel


def vary_shapes(settings: Settings) -> Iterator[Record]:
    """Microseconds per token of one micro-batch repeated, and of micro-batches of different shapes."""
    model = build(settings)
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


def implementations(settings: Settings) -> list[str]:
    """Return the ways in which tile functions can be computed here: `torch`, and `kernels` of Triton on a GPU."""
    has_kernels = head.triton_kernels(torch.empty(0, device=settings.device)) is not None
    return ["torch", *(["kernels"] if has_kernels else [])]


@contextmanager
def patched_head(by: str, rows: int | None = None, recompute: bool = False) -> Iterator[None]:
    """Inside, the head computes in one way.

    Args:
        by: `torch` or `kernels`.
        rows: Tokens of a tile; `None` for the default.
        recompute: Compute each tile again in the backward instead of keeping its gradient.
    """
    names = {"triton_kernels": (head, teacher_tiles), "tile_rows": (head,), "max_kept_logits": (head,)}
    before = {name: getattr(head, name) for name in names}
    changed: dict[str, Any] = {"triton_kernels": lambda _: None} if by == "torch" else {}
    changed |= {} if rows is None else {"tile_rows": lambda *_: rows}
    changed |= {"max_kept_logits": lambda *_: 0} if recompute else {}
    for name, value in (before | changed).items():
        for module in names[name]:
            setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            for module in names[name]:
                setattr(module, name, value)


def check_head(settings: Settings) -> Iterator[Record]:
    """Values and gradients of 256 tokens in bf16, against the plain softmax in float64.

    In one tile with the gradient of the weight taken in the forward, as training takes so few tokens, and in several
    tiles that the backward computes again.
    """
    count = settings.pick(256, 64)
    size = configured(settings.shape("qwen3-0.6b"), settings.vocabulary).hidden_size
    hidden, weight, targets = head_inputs(settings, count, size, torch.float64)
    with torch.no_grad():  # a teacher to whom the previous id is as likely
        other = (weight + torch.roll(weight, 1, dims=0)).to(torch.bfloat16)
        linear = torch.nn.Linear(size, settings.vocabulary, False, device=other.device, dtype=other.dtype)
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
    known = implementations(settings)
    if settings.device == "cuda" and "kernels" not in known:
        yield {"by": "kernels", "error": "Triton cannot be imported", "right": False}
    for by, tiled, value in product(known, (False, True), exact):
        hidden, weight, targets = head_inputs(settings, count, size, torch.bfloat16)
        weights = None if tiled else torch.ones(count, device=settings.device)
        tile: TileFunction = LogProb(targets)
        if value != "log_prob":
            states = TeacherStates(teacher, hidden.detach())
            tile = dense_divergence(getattr(divergence, value), states, targets, 1.0, ce_coef=0.0)
        with patched_head(by, 100 if tiled else None, recompute=tiled):
            values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, tile, weights)
            found = (values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight)))
        names = ("values", "hidden_gradient", "weight_gradient")
        errors = dict(zip(names, map(relative_error, found, exact[value]), strict=True))
        yield {"by": by, "value": value, "tiled": tiled} | errors | {"right": within(errors.values(), HEAD)}


def sweep_tiles(settings: Settings) -> Iterator[Record]:
    """Forward and backward of the head by the number of tokens in a tile, on which the results must not depend."""
    tokens = settings.pick(8192, 64)
    size = configured(settings.shape("qwen3-0.6b"), settings.vocabulary).hidden_size
    hidden, weight, targets = head_inputs(settings, tokens, size, torch.bfloat16)
    weights = torch.ones(tokens, device=settings.device)

    def run() -> tuple[Tensor, Tensor]:
        values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, LogProb(targets), weights)
        return values.detach(), torch.autograd.grad(values.sum(), (hidden, weight))[1]

    default = head.tile_rows(settings.vocabulary, head.memory(torch.device(settings.device)))
    expected = None
    for by in reversed(implementations(settings)):
        for rows in sorted({512, 1024, 2048, 4096, default} if settings.device == "cuda" else {default, 16}):
            with patched_head(by, rows):
                found = run()
                expected = expected or found
                errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
                record: Record = {"by": by, "rows": rows, "default": rows == default, "tokens": tokens}
                record |= {"values": errors[0], "weight_gradient": errors[1], "right": within(errors, TILES)}
                if record["right"]:
                    cost = measure_call(settings.device, run, 3, warm_up=False)
                    record["ms"] = 1e3 * cost.seconds
                    record["tflop_per_s"] = 6 * tokens * weight.numel() / cost.seconds / 1e12
            yield record
