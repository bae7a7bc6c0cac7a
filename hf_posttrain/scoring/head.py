"""Tiled language-model head: hidden states become one value per token, without a tensor of [B, T, V].

A `LinearHead` is the last step of a causal LM: logits = softcap(scale * (h W^T + b)). `score_tokens` computes it for
the N trained positions, one tile of rows after the other. For each tile it calls a tile function, which returns one
value per token, and the gradient of that value with respect to the logits: `LogProb` in this module, comparisons with a
teacher in `teacher_tiles`.

Cost in head GEMMs (one is N x V x H): 1 for the forward alone; 2 for training with a frozen head; 3 with a trained head
if the token weights are known beforehand (SFT, KD, OPD) or the tiles are small enough to keep; otherwise 4.

Legend: N scored tokens, n tokens of one tile, V vocabulary, H hidden size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

TILE_ELEMENTS = 2**23
"""Logits in one tile on CPU, n x V (32 MB in float32), unless MIN_TILE_ROWS needs more."""
MIN_TILE_ROWS = 128
"""Rows of a tile on CPU. With 262k ids, 128 rows took 0.4 times as long as 32."""
MAX_KEPT_ELEMENTS = 2**26
"""N x V on CPU up to which the gradient of the logits is kept for the backward, which saves a GEMM."""
PRODUCT_COLUMNS = 2048
"""Columns of one float32 product on CPU. A product over a whole vocabulary takes 1.25 times as long."""
TILE_MEMORY_SHARE = 1 / 32
"""Share of the memory of a GPU for one tile."""
KEPT_MEMORY_SHARE = 1 / 16
"""Share of the memory of a GPU for the gradient of the logits that is kept for the backward."""
BYTES_PER_LOGIT = 16
"""Bytes per logit of a tile on a GPU: logits, gradient, logits of the teacher, and the same again without kernels."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
META_MEMORY = 80 * 2**30
"""Bytes of the meta device, which represents a GPU in tests and estimates."""


# ---- limits of a device


def memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes, or None for CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return META_MEMORY if device.type == "meta" else None


def tile_rows(vocabulary: int, memory: int | None) -> int:
    """Return the number of tokens of a tile.

    Each tile reads the weights of the head again. On a GPU it has up to 4096 tokens, in whole blocks of a matrix
    product. On CPU it should fit in the cache, if the vocabulary is small enough.

    Args:
        vocabulary: Number of logits per token.
        memory: Memory of the GPU in bytes, or None for CPU.
    """
    if memory is None:
        return max(MIN_TILE_ROWS, TILE_ELEMENTS // vocabulary)
    return min(max(int(memory * TILE_MEMORY_SHARE) // (BYTES_PER_LOGIT * vocabulary) // 128 * 128, 128), 4096)


def max_kept_logits(memory: int | None, itemsize: int) -> int:
    """Return the N x V up to which the gradient of the logits is kept for the backward.

    Args:
        memory: Memory of the GPU in bytes, or None for CPU.
        itemsize: Bytes per element of the gradient.
    """
    return MAX_KEPT_ELEMENTS if memory is None else int(memory * KEPT_MEMORY_SHARE) // itemsize


def has_float32_product(states: Tensor) -> bool:
    """Return whether `product` returns float32 for states of a half-precision dtype.

    On a GPU float32 products have no extra cost. A bf16 logit of 20 has a precision of 0.06, which matters in sums of
    log-probabilities and in differences between two models.
    """
    return states.dtype in HALF_DTYPES and states.device.type in ("cuda", "meta")


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b for [n, k] and [k, m], without autograd."""
    if has_float32_product(a):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.shape[1] <= PRODUCT_COLUMNS:
        return torch.mm(a, b, out=out)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    for start in range(0, b.shape[1], PRODUCT_COLUMNS):
        torch.mm(a, b[:, start : start + PRODUCT_COLUMNS], out=out[:, start : start + PRODUCT_COLUMNS])
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in place."""
    if has_float32_product(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def triton_kernels(states: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels, or None without a GPU or Triton, or for float64, which they would round."""
    return _triton_kernels() if states.is_cuda and states.dtype != torch.float64 else None


@cache
def _triton_kernels() -> ModuleType | None:
    """Import the kernels. Return None if Triton is not installed."""
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels


# ---- tile functions


@dataclass
class Tile:
    """Result of a tile function for its n tokens."""

    value: Tensor  # [n], quantity to differentiate
    grad: Tensor | None  # [n, V], d value / d logits, if requested; the receiver may overwrite it
    stats: dict[str, Tensor] = field(default_factory=dict)  # further values [n] without gradient

    def weighted(self, weights: Tensor) -> "Tile":
        """Return the tile times constant weights [n], with its value before as the statistic `student`."""
        grad = None if self.grad is None else self.grad.mul_(weights[:, None])
        return Tile(weights * self.value, grad, self.stats | {"student": self.value})


TileFunction = Callable[[Tensor, slice, bool, Tensor], Tile]
"""(logits [n, V], slice of the N tokens, whether the gradient is needed, buffer [n, V]) -> Tile.

The function may overwrite the logits, and may use the buffer for the gradient or for any other purpose. The buffer
exists because on CPU a new tensor [n, V] costs more than the softmax that fills it.
"""


def softmax(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax of logits [n, v] in `buffer`.

    On CPU torch's softmax sums a vocabulary sequentially, so that probabilities of 152k tokens sum to 1 + 4e-5 in
    float32. `Tensor.sum` uses pairwise summation, and is accurate to 3e-7.

    Args:
        logits: [n, v].
        buffer: [n, V] with V >= v. Its columns after the first v become 0.

    Returns:
        The probabilities [n, v] as a view of `buffer`, the largest logit [n, 1], and the logarithm of its probability
        [n, 1]. The difference of the last two is the logsumexp.
    """
    size = logits.shape[-1]
    buffer[:, size:].zero_()
    probs = torch.softmax(logits, dim=-1, out=buffer[:, :size])
    if probs.device.type == "cpu":
        probs.div_(probs.sum(-1, keepdim=True))
    return probs, logits.amax(-1, keepdim=True), probs.amax(-1, keepdim=True).log()


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p x over the vocabulary for probabilities and values [n, v], -> [n, 1].

    `torch.bmm` has errors of up to 9e-4 in float32 here, because it sums 49k to 262k products sequentially.
    """
    return torch.linalg.vecdot(probs, values)[:, None]


@dataclass(frozen=True)
class LogProb:
    """Tile function: value = log softmax(logits / temperature)[target], differentiated by hand."""

    targets: Tensor  # [N]
    temperature: float = 1.0  # divides the logits
    stats: bool = False  # also return `entropy` and `correct` (1 if the target is the argmax)
    vocabulary: int | None = None  # number of existing ids; later logits (padding) count as -inf; None for all
    collision: bool = False  # also return `log_collision`, the log of the sum of p^2 over the vocabulary

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V]."""
        if not self.collision and (fused := triton_kernels(logits)):
            size = self.vocabulary or logits.shape[-1]
            out = buffer if need_grad else None
            results = fused.log_prob(logits, self.targets[rows], self.temperature, size, out, self.stats)
            names = ("entropy", "correct")
            return Tile(results[0], out, dict(zip(names, results[1:], strict=True)) if self.stats else {})

        targets = self.targets[rows, None]
        logits = logits[:, : self.vocabulary]
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        probs, peak, log_top = softmax(logits, buffer)
        target_logits = logits.gather(-1, targets)
        value = (target_logits - peak + log_top)[:, 0]

        stats = {}
        if self.collision:
            stats["log_collision"] = expectation(probs, probs)[:, 0].log()
        if self.stats:
            # relative to the peak, because the difference of two numbers near 20 has no digit of an entropy of 1e-6
            entropy = -log_top - expectation(probs, logits.sub_(peak).clamp_(min=-1e30))  # 0 x -inf would be NaN
            has_best = log_top > 1e-4 - math.log(logits.shape[-1])  # if all logits are equal, no token is the best
            correct = (target_logits >= peak) & has_best
            stats |= {"entropy": entropy[:, 0], "correct": correct[:, 0].float()}
        if not need_grad:
            return Tile(value, None, stats)
        grad = buffer.neg_().scatter_add_(-1, targets, torch.ones_like(target_logits))  # one-hot - softmax
        return Tile(value, grad if self.temperature == 1.0 else grad.div_(self.temperature), stats)


@dataclass(frozen=True)
class Reward:
    """Tile function: value = logits[0], the only output of a score layer."""

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, 1]."""
        return Tile(logits[:, 0].clone(), buffer.fill_(1.0) if need_grad else None)


# ---- the head


@dataclass(frozen=True)
class LogitTransform:
    """Transform of the output of a model's lm_head: logits = softcap(scale * raw), in float32 (or float64)."""

    scale: float = 1.0  # Cohere's logit_scale, or 1 / Granite's logits_scaling
    softcap: float | None = None  # Gemma's final_logit_softcapping: cap * tanh(x / cap)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "LogitTransform":
        """Read the transform from a model's config. The parity check of the first batch finds any other transform."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(float(scale), getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the logits [n, V] of the raw outputs [n, V]."""
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return d logits / d raw: a new tensor [n, V], one number for all logits, or None if that number is 1."""
        if self.softcap is not None:
            return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


@dataclass(frozen=True)
class LinearHead:
    """Linear head of a model, with the transform of its output."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    transform: LogitTransform = LogitTransform()  # scale and softcap

    def logits(self, hidden: Tensor, buffer: Tensor | None = None, exact: Tensor | None = None) -> Tensor:
        """Return logits [n, V] of hidden states [n, H] in float32 or float64, without autograd.

        Args:
            hidden: [n, H].
            buffer: [n, V], memory for the product. See `_tile_buffers`.
            exact: [n, V], memory for the logits if their dtype is not that of the product. See `_tile_buffers`.
        """
        raw = product(hidden, self.weight.T, buffer)
        raw = raw if self.bias is None else raw.add_(self.bias)
        return self.transform(raw if exact is None or raw.dtype == exact.dtype else exact.copy_(raw))

    def cast(self, hidden: Tensor, dtype: torch.dtype) -> tuple["LinearHead", Tensor]:
        """Return the head and the hidden states in the dtype of the product."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return LinearHead(self.weight.to(dtype), bias, self.transform), hidden.to(dtype)

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype in which `nn.Linear` would multiply here, with autocast considered."""
        kind = device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype


def tiles(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Return the slice of each tile of hidden states [N, H]: at least one, also if N is 0."""
    tokens = len(hidden)
    rows = tile_rows(vocabulary, memory(hidden.device))
    return (slice(start, min(start + rows, tokens)) for start in range(0, max(tokens, 1), rows))


def score_tokens(
    head: LinearHead, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute one value per token through the head, in float32 (or float64).

    The gradient flows to `hidden`, `head.weight` and `head.bias`.

    Args:
        head: Linear head.
        hidden: Hidden states [N, H].
        tile: Tile function.
        weights: Weights [N] of which d loss / d values will be a constant multiple, if they are known. The gradient of
            the head is then computed in the forward, so that no tile is computed twice. The backward checks them.

    Returns:
        The values [N], and statistics [N] by name.
    """
    run = HeadPass(head, tile, weights)
    values = _ScoreTokens.apply(hidden, head.weight, head.bias, run)
    return values, run.stats


@dataclass
class HeadPass:
    """One pass over the head, with the state that its backward needs in addition to the saved tensors."""

    head: LinearHead
    tile: TileFunction
    weights: Tensor | None
    dtype: torch.dtype = torch.float32  # of the products, in the forward and in the backward, which has no autocast
    stats: dict[str, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)  # d value / d (hidden W^T + b) of each tile, [n, V], if kept


class _ScoreTokens(torch.autograd.Function):
    """Values of tokens, with d value / d hidden computed in the forward. The gradient of the head is always exact."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: HeadPass) -> Tensor:
        run.dtype = run.head.dtype(hidden.device)
        head, states = run.head.cast(hidden, run.dtype)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        needs_head = needs_weight or needs_bias

        # The gradient of the head is the sum over tokens of d loss / d value x d value / d logits x hidden, and
        # d loss / d value is known only in the backward. There are three methods: (1) With `weights`, which are that
        # factor up to a constant, sum here and multiply in the backward. (2) With few logits, keep the gradient of each
        # tile. (3) Otherwise the backward computes each tile again.
        head_grad = _HeadGradient(weight, bias) if needs_head and run.weights is not None else None
        has_few_logits = len(states) * len(weight) <= max_kept_logits(memory(states.device), states.itemsize)
        keep = needs_head and run.weights is None and has_few_logits
        grad_hidden = torch.zeros_like(states) if needs_hidden else None
        buffers = _tile_buffers(states, weight.shape[0])
        tile_results = []
        with torch.autocast(hidden.device.type, enabled=False):  # all tensors already have their dtype
            for rows in tiles(states, len(weight)):
                result, raw_grad = _run_tile(head, run.tile, states, rows, needs_hidden or needs_head, buffers)
                tile_results.append(Tile(result.value, None, result.stats))
                if grad_hidden is not None:
                    # each value depends on one hidden state, so this is exact for any d loss / d value
                    grad_hidden[rows] = raw_grad @ head.weight
                if head_grad is not None:
                    head_grad.add(raw_grad, run.weights[rows], states[rows])  # type: ignore[index]
                elif keep:
                    run.kept.append(raw_grad.clone())

        run.stats.update(
            {name: torch.cat([tile.stats[name] for tile in tile_results]) for name in tile_results[0].stats}
        )
        ctx.save_for_backward(hidden, weight, bias, grad_hidden)
        ctx.run = run
        ctx.head_grad = head_grad
        return torch.cat([tile.value for tile in tile_results])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias, grad_hidden = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad[:, None]).to(hidden.dtype)

        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_hidden, None, None, None
        if ctx.head_grad is not None:
            head_grad = ctx.head_grad
            ctx.head_grad = None  # a second backward computes it again
            return grad_hidden, *head_grad.result(_checked_scale(grad, ctx.run.weights)), None

        # without `weights`, or in a second backward, use the kept tiles or compute each again
        run = ctx.run
        gradient = _HeadGradient(weight, bias)
        head = LinearHead(weight, bias, run.head.transform)
        hidden = hidden.to(run.dtype)
        if not run.kept:
            head = head.cast(hidden, run.dtype)[0]
            buffers = _tile_buffers(hidden, len(weight))
        for i, rows in enumerate(tiles(hidden, len(weight))):
            raw_grad = run.kept[i] if run.kept else _run_tile(head, run.tile, hidden, rows, True, buffers)[1]
            gradient.add(raw_grad, grad[rows], hidden[rows])
        return grad_hidden, *gradient.result(), None


class _HeadGradient:
    """Gradient of weight [V, H] and bias [V], accumulated in float32 (or float64)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype = weight.dtype
        self.exact = torch.promote_types(weight.dtype, torch.float32)
        self.weight: Tensor | None = None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=self.exact)

    def add(self, raw_grad: Tensor, token_grad: Tensor, hidden: Tensor) -> None:
        """Add a tile: raw_grad [n, V], token_grad [n], hidden [n, H]."""
        scaled = hidden * token_grad[:, None].to(hidden.dtype)
        if self.weight is None:  # the first tile, so that no [V, H] of zeros is needed
            self.weight = product(raw_grad.T, scaled).to(self.exact)
        else:
            add_product(self.weight, raw_grad.T, scaled)
        if self.bias is not None:
            self.bias += raw_grad.T.to(self.bias.dtype) @ token_grad.to(self.bias.dtype)

    def result(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients times `scale` in the dtype of the parameters. The accumulators are overwritten."""
        assert self.weight is not None  # there is at least one tile
        gradients = [self.weight] if self.bias is None else [self.weight, self.bias]
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale.to(self.exact))
        return gradients[0].to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _tile_buffers(hidden: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Return memory [n, V] for the product of a tile, for its logits if they are wider, and for their gradient.

    All tiles use the same memory, because on CPU new memory costs more than the computation that fills it.
    """
    shape = min(len(hidden), tile_rows(vocabulary, memory(hidden.device))), vocabulary
    exact = torch.promote_types(hidden.dtype, torch.float32)
    gradient = hidden.dtype if triton_kernels(hidden) else exact  # a kernel rounds the gradient when it writes it
    product = hidden.new_empty(shape, dtype=exact if has_float32_product(hidden) else hidden.dtype)
    logits = product if product.dtype == exact else hidden.new_empty(shape, dtype=exact)
    return product, logits, hidden.new_empty(shape, dtype=gradient)


def _run_tile(
    head: LinearHead, tile: TileFunction, hidden: Tensor, rows: slice, need_grad: bool, buffers: tuple[Tensor, ...]
) -> tuple[Tile, Tensor]:
    """Return the result of a tile, and d value / d (hidden W^T + b), [n, V], in the dtype of the head.

    The gradient is empty if it is not needed. The next tile overwrites it.
    """
    part = hidden[rows]
    product, exact, gradient = (buffer[: len(part)] for buffer in buffers)
    logits = head.logits(part, product, exact)
    slope = head.transform.slope(logits) if need_grad else None  # before the tile function overwrites the logits
    result = tile(logits, rows, need_grad, gradient)
    if result.grad is None:
        return result, logits.new_empty(0)
    raw_grad = result.grad if slope is None else result.grad.mul_(slope)
    if product.dtype == hidden.dtype != raw_grad.dtype:
        return result, product.copy_(raw_grad)
    return result, raw_grad.to(hidden.dtype)


_weight_violations: list[Tensor] = []
"""Whether `weights` have been violated on a GPU, where the result is not awaited: one bool, if there was any check."""


def _checked_scale(grad: Tensor, weights: Tensor) -> Tensor:
    """Return the factor s in grad = s * weights.

    The equation is checked at once on CPU, and by the next call of `check_score_weights` on a GPU.
    """
    if not len(grad):
        return grad.sum()
    weights = weights.to(grad.dtype)
    scale = (grad * weights).sum() / (weights * weights).sum().clamp(min=1e-30)
    violated = (grad - scale * weights).abs().max() > 1e-3 * scale.abs() * weights.abs().max() + 1e-30
    _weight_violations[:] = [violated | _weight_violations[0] if _weight_violations else violated]
    if violated.device.type == "cpu":
        check_score_weights()
    return scale


def check_score_weights() -> None:
    """Raise RuntimeError if a loss since the last call did not match the `weights` of `score_tokens`.

    The function waits for the device. Call it where the host waits anyway, for example when metrics are logged.
    """
    flags = list(_weight_violations)
    _weight_violations[:] = []
    if any(flag.item() for flag in flags if flag.device.type != "meta"):
        raise RuntimeError(
            "the loss does not match the `weights` of score_tokens. It must be a multiple of (weights * values).sum()"
        )
