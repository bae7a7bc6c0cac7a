"""The language-model head in tiles: hidden states -> one value per token, never [B, T, V].

A `LinearHead` is the last step of a causal LM: logits = softcap(scale * (h W^T + b)). `score_tokens` runs it over the N
trained positions, a tile of rows at a time, and asks a tile function for one value per token and that value's gradient
with respect to the logits: `LogProb` here, comparisons with a teacher in `teacher_tiles`.

Cost in head GEMMs (one is N x V x H): forward alone 1; training with a frozen head 2; with a trained head 3 where the
token weights are known beforehand (SFT, KD, OPD) or the tiles are small enough to keep; 4 otherwise.

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

TILE_ELEMENTS = 2**23  # on CPU: logits in one tile, n x V (32 MB in float32)
KEEP_ELEMENTS = 2**26  # on CPU: the logits' gradient waits for the backward where N x V is below this: it saves a GEMM
WIDE = 2048  # on CPU: columns of a float32 product, which over a whole vocabulary takes 1.25 times as long
TILE_SHARE = 1 / 32
KEPT_SHARE = 1 / 16  # the same on a GPU, as shares of its memory
BYTES_PER_LOGIT = 16  # of a tile on a GPU: logits, gradient, the teacher's, and as much again where no kernel does them
LOW = (torch.bfloat16, torch.float16)
META_MEMORY = 80 * 2**30  # bytes of the meta device, which stands for a GPU in tests and estimates


# ---- what a device allows


def memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None on CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return META_MEMORY if device.type == "meta" else None


def tile_rows(vocabulary: int, memory: int | None) -> int:
    """Tokens of a tile, from a GPU's memory in bytes. Each tile reads the head's weights again: there few are better,
    up to 4096 tokens, in whole blocks of a matrix product. On CPU a tile should stay in the cache.
    """
    if memory is None:
        return max(1, TILE_ELEMENTS // vocabulary)
    return min(max(int(memory * TILE_SHARE) // (BYTES_PER_LOGIT * vocabulary) // 128 * 128, 128), 4096)


def kept_logits(memory: int | None, itemsize: int) -> int:
    """N x V up to which the logits' gradient waits for the backward. memory: a GPU's, in bytes."""
    return KEEP_ELEMENTS if memory is None else int(memory * KEPT_SHARE) // itemsize


def is_exact(states: Tensor) -> bool:
    """Is `product` of such states float32, though they are not? On a GPU it costs nothing. A bf16 logit of 20 is known
    to 0.06, which sums of log-probabilities and differences of two models feel.
    """
    return states.dtype in LOW and states.device.type in ("cuda", "meta")


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """A @ b, [n, k] and [k, m], without autograd."""
    if is_exact(a):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.shape[1] <= WIDE:
        return torch.mm(a, b, out=out)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    for start in range(0, b.shape[1], WIDE):
        torch.mm(a, b[:, start : start + WIDE], out=out[:, start : start + WIDE])
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Total += a @ b."""
    if is_exact(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def kernels(states: Tensor) -> ModuleType | None:
    """The Triton kernels of the tile functions, on a GPU that has Triton; not for float64, which they would round."""
    return _kernels() if states.is_cuda and states.dtype != torch.float64 else None


@cache
def _kernels() -> ModuleType | None:
    try:
        from . import kernels
    except ImportError:  # no Triton
        return None
    return kernels


# ---- tile functions


@dataclass
class Tile:
    """What a tile function says of its n tokens."""

    value: Tensor  # [n], the quantity to differentiate
    grad: Tensor | None  # [n, V], d value / d logits, where it was asked for; the receiver may overwrite it
    stats: dict[str, Tensor] = field(default_factory=dict)  # more [n] values, without gradient


TileFunction = Callable[[Tensor, slice, bool, Tensor], Tile]
"""(logits [n, V], which of the N tokens, is the gradient wanted, buffer [n, V] for it or for anything else) -> Tile.

The logits may be overwritten. A fresh [n, V] costs more on CPU than the softmax that fills it: hence the buffer.
"""


def softmax(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, v] -> probabilities, in the first v columns of `buffer` [n, V], with 0 behind them; the largest logit and the
    logarithm of its probability, [n, 1] each: their difference is the logsumexp.

    On CPU torch's softmax adds up a vocabulary in its order, so that probabilities of 152k tokens sum to 1 + 4e-5 in
    float32. `Tensor.sum` adds in pairs, and is right to 3e-7.
    """
    size = logits.shape[-1]
    buffer[:, size:].zero_()
    probs = torch.softmax(logits, dim=-1, out=buffer[:, :size])
    if probs.device.type == "cpu":
        probs.div_(probs.sum(-1, keepdim=True))
    return probs, logits.amax(-1, keepdim=True), probs.amax(-1, keepdim=True).log()


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p x over the vocabulary: [n, v] twice -> [n, 1].

    `torch.bmm` is wrong by up to 9e-4 in float32 here: it adds up 49k to 262k products in their order.
    """
    return torch.linalg.vecdot(probs, values)[:, None]


@dataclass(frozen=True)
class LogProb:
    """Tile function: value = log softmax(logits / temperature)[target], differentiated by hand."""

    targets: Tensor  # [N]
    temperature: float = 1.0  # divides the logits
    stats: bool = False  # also return `entropy` and `correct` (1 where the target is the argmax)
    vocabulary: int | None = None  # the ids that exist; logits behind them (padding) count as -inf. None: all

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile of [n]."""
        if fused := kernels(logits):
            size = self.vocabulary or logits.shape[-1]
            out = buffer if need_grad else None
            found = fused.log_prob(logits, self.targets[rows], self.temperature, size, out, self.stats)
            return Tile(found[0], out, dict(zip(("entropy", "correct"), found[1:], strict=True)) if self.stats else {})
        targets = self.targets[rows, None]
        logits = logits[:, : self.vocabulary]
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        probs, peak, log_top = softmax(logits, buffer)
        own = logits.gather(-1, targets)
        value = (own - peak + log_top)[:, 0]
        stats = {}
        if self.stats:
            # from the peak on: the difference of two numbers of 20 has no digit of an entropy of 1e-6
            entropy = -log_top - expectation(probs, logits.sub_(peak).clamp_(min=-1e30))  # 0 x -inf would be NaN
            told_apart = log_top > 1e-4 - math.log(logits.shape[-1])  # not all logits equal: no token is best
            correct = (own >= peak) & told_apart
            stats = {"entropy": entropy[:, 0], "correct": correct[:, 0].float()}
        if not need_grad:
            return Tile(value, None, stats)
        grad = buffer.neg_().scatter_add_(-1, targets, torch.ones_like(own))  # one-hot - softmax
        return Tile(value, grad if self.temperature == 1.0 else grad.div_(self.temperature), stats)


# ---- the head


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its lm_head's output: logits = softcap(scale * raw), in float32 (float64 stays)."""

    scale: float = 1.0  # Cohere's logit_scale, or 1 / Granite's logits_scaling
    softcap: float | None = None  # Gemma's final_logit_softcapping: cap * tanh(x / cap)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LogitTransform":
        """Read the model's config; what it does not name is left to the check of the first batch."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(float(scale), getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """[n, V] -> [n, V]."""
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return d logits / d raw: a new tensor [n, V], one number for all logits, or None where that number is 1."""
        if self.softcap is not None:
            return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


@dataclass(frozen=True)
class LinearHead:
    """The plain linear head of a model and what follows it."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    transform: LogitTransform = LogitTransform()  # scale and softcap

    def logits(self, hidden: Tensor, buffer: Tensor | None = None, exact: Tensor | None = None) -> Tensor:
        """[n, H] -> [n, V], float32 or float64, without autograd. buffer, exact [n, V]: see `_tile_buffers`."""
        raw = product(hidden, self.weight.T, buffer)
        raw = raw if self.bias is None else raw.add_(self.bias)
        return self.transform(raw if exact is None or raw.dtype == exact.dtype else exact.copy_(raw))

    def cast(self, hidden: Tensor, dtype: torch.dtype) -> tuple["LinearHead", Tensor]:
        """Head and hidden states as `nn.Linear` would multiply them."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return LinearHead(self.weight.to(dtype), bias, self.transform), hidden.to(dtype)

    def dtype(self, device: torch.device) -> torch.dtype:
        """In which `nn.Linear` would multiply here, autocast included."""
        kind = device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype


def tiles(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Slices of the N tokens of hidden states [N, H], a tile each; one where N is 0."""
    tokens = len(hidden)
    rows = tile_rows(vocabulary, memory(hidden.device))
    return (slice(start, min(start + rows, tokens)) for start in range(0, max(tokens, 1), rows))


def score_tokens(
    head: LinearHead, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One value per token through the head: hidden [N, H] -> (values [N], stats of [N]), float32 (float64 stays).

    The gradient flows to `hidden`, `head.weight` and `head.bias`.
    weights [N]: a promise that d loss / d values will be one constant times `weights`. The head's gradient is then
    taken in the forward, so no tile is computed twice; the backward checks the promise.
    """
    run = HeadPass(head, tile, weights)
    values = _ScoreTokens.apply(hidden, head.weight, head.bias, run)
    return values, run.stats


@dataclass
class HeadPass:
    """One pass over the head, and what its backward needs besides the saved tensors."""

    head: LinearHead
    tile: TileFunction
    weights: Tensor | None
    dtype: torch.dtype = torch.float32  # of the forward's products: the backward, outside autocast, must do the same
    stats: dict[str, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)  # of each tile d value / d (hidden W^T + b), [n, V], if kept


class _ScoreTokens(torch.autograd.Function):
    """d value / d hidden is computed in the forward; the head's gradient in one of three ways, all exact."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Any) -> Tensor:
        run.dtype = run.head.dtype(hidden.device)
        head, cast = run.head.cast(hidden, run.dtype)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        needs_head = needs_weight or needs_bias
        # The head's gradient is sum over tokens of d loss / d value x d value / d logits x hidden, and d loss / d value
        # is known only in the backward. Three ways: (1) `weights` are given, which are that factor but for a constant:
        # sum here, multiply later. (2) Few logits: keep every tile's gradient. (3) Otherwise the backward computes each
        # tile again.
        head_grad = _HeadGradient(weight, bias) if needs_head and run.weights is not None else None
        few = len(cast) * len(weight) <= kept_logits(memory(cast.device), cast.itemsize)
        keep = needs_head and run.weights is None and few
        grad_hidden = torch.zeros_like(cast) if needs_hidden else None
        buffers = _tile_buffers(cast, weight.shape[0])
        done = []
        with torch.autocast(hidden.device.type, enabled=False):  # everything is cast already
            for rows in tiles(cast, len(weight)):
                result, raw_grad = _run_tile(head, run.tile, cast, rows, needs_hidden or needs_head, buffers)
                done.append(Tile(result.value, None, result.stats))
                if grad_hidden is not None:
                    # each token's value has one hidden state, so this is exact whatever d loss / d value will be
                    grad_hidden[rows] = raw_grad @ head.weight
                if head_grad is not None:
                    head_grad.add(raw_grad, run.weights[rows], cast[rows])
                elif keep:
                    run.kept.append(raw_grad.clone())
        run.stats.update({name: torch.cat([tile.stats[name] for tile in done]) for name in done[0].stats})
        ctx.save_for_backward(hidden, weight, bias, grad_hidden)
        ctx.run = run
        ctx.head_grad = head_grad
        return torch.cat([tile.value for tile in done])

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
            return grad_hidden, *head_grad.result(_promised_scale(grad, ctx.run.weights)), None
        # no `weights`, or a second backward: the kept tiles, or each computed again
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
    """Accumulates the gradient of weight [V, H] and bias [V] in float32 (float64 stays)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.dtype = weight.dtype
        self.exact = torch.promote_types(weight.dtype, torch.float32)
        self.weight: Tensor | None = None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=self.exact)

    def add(self, raw_grad: Tensor, token_grad: Tensor, hidden: Tensor) -> None:
        """raw_grad [n, V], token_grad [n], hidden [n, H]."""
        scaled = hidden * token_grad[:, None].to(hidden.dtype)
        if self.weight is None:  # begins with the first tile: no [V, H] of zeros
            self.weight = product(raw_grad.T, scaled).to(self.exact)
        else:
            add_product(self.weight, raw_grad.T, scaled)
        if self.bias is not None:
            self.bias += raw_grad.T.to(self.bias.dtype) @ token_grad.to(self.bias.dtype)

    def result(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The two gradients, times `scale`, in the parameters' dtype; they are given away."""
        assert self.weight is not None  # there is one tile at least
        found = [self.weight] if self.bias is None else [self.weight, self.bias]
        if scale is not None:
            for gradient in found:
                gradient.mul_(scale.to(self.exact))
        return found[0].to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _tile_buffers(hidden: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Memory [n, V] for a tile's product with the head, for the logits where they are more exact, and for their
    gradient. One tile uses it after the other: on CPU fresh memory costs more than what fills it.
    """
    shape = min(len(hidden), tile_rows(vocabulary, memory(hidden.device))), vocabulary
    exact = torch.promote_types(hidden.dtype, torch.float32)
    gradient = hidden.dtype if kernels(hidden) else exact  # a kernel rounds it as it writes
    product = hidden.new_empty(shape, dtype=exact if is_exact(hidden) else hidden.dtype)
    logits = product if product.dtype == exact else hidden.new_empty(shape, dtype=exact)
    return product, logits, hidden.new_empty(shape, dtype=gradient)


def _run_tile(
    head: LinearHead, tile: TileFunction, hidden: Tensor, rows: slice, need_grad: bool, buffers: tuple[Tensor, ...]
) -> tuple[Tile, Tensor]:
    """The tile's values, and d value / d (hidden W^T + b) as [n, V] in the head's dtype (empty if not needed): the next
    tile overwrites it.
    """
    part = hidden[rows]
    product, exact, gradient = (each[: len(part)] for each in buffers)
    logits = head.logits(part, product, exact)
    slope = head.transform.slope(logits) if need_grad else None  # before the tile function overwrites the logits
    result = tile(logits, rows, need_grad, gradient)
    if result.grad is None:
        return result, logits.new_empty(0)
    raw_grad = result.grad if slope is None else result.grad.mul_(slope)
    if product.dtype == hidden.dtype != raw_grad.dtype:
        return result, product.copy_(raw_grad)
    return result, raw_grad.to(hidden.dtype)


_broken_promises: list[Tensor] = []
"""On a GPU, where nobody waits for the answer: was a promise of `weights` broken? One bool, if any was asked."""


def _promised_scale(grad: Tensor, weights: Tensor) -> Tensor:
    """The multiple s in grad = s * weights, checked: on CPU at once, on a GPU by the next `check_promises`."""
    if not len(grad):
        return grad.sum()
    weights = weights.to(grad.dtype)
    scale = (grad * weights).sum() / (weights * weights).sum().clamp(min=1e-30)
    broken = (grad - scale * weights).abs().max() > 1e-3 * scale.abs() * weights.abs().max() + 1e-30
    _broken_promises[:] = [broken | _broken_promises[0] if _broken_promises else broken]
    if broken.device.type == "cpu":
        check_promises()
    return scale


def check_promises() -> None:
    """Raises RuntimeError where a loss since the last call was not what `score_tokens` had been promised. Waits for the
    device: call it where that waits anyway, as a log does.
    """
    found = list(_broken_promises)
    _broken_promises[:] = []
    if any(flag.item() for flag in found if flag.device.type != "meta"):
        raise RuntimeError("the loss is not a multiple of (weights * values).sum(), as score_tokens was promised")
