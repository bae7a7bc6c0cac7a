"""The language-model head in tiles: hidden states -> one value per token, never [B, T, V].

A `Head` is the last step of a causal LM: logits = softcap(scale * (h W^T + b)). `score_tokens` runs it over the N
trained positions, a tile of rows at a time, and asks a tile function (`tiles.py`) for one value per token and that
value's gradient with respect to the logits.

Cost in head GEMMs (one is N x V x H): forward alone 1; training with a frozen head 2; with a trained head 3 where the
token weights are known beforehand (SFT, KD, OPD) or the tiles are small enough to keep; 4 otherwise.

Legend: N scored tokens, n tokens of one tile, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .tiles import Tile, TileFunction

TILE_ELEMENTS = 2**23
"""Logits in one tile, n x V (32 MB in float32)."""
KEEP_ELEMENTS = 2**26
"""The logits' gradient is kept from forward to backward where N x V stays below this: it saves a GEMM."""


@dataclass(frozen=True)
class Finish:
    """What a model does to its lm_head's output: logits = softcap(scale * raw), in float32 (float64 stays)."""

    scale: float = 1.0
    """Cohere's logit_scale, or 1 / Granite's logits_scaling."""
    softcap: float | None = None
    """Gemma's final_logit_softcapping: cap * tanh(x / cap)."""

    @classmethod
    def of(cls, config) -> "Finish":
        """Read the model's config; what it does not name is left to the check of the first batch."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(float(scale), getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """[n, V] -> [n, V]."""
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def backward(self, logits: Tensor, grad: Tensor) -> Tensor:
        """d / d raw from d / d logits, both [n, V]; `grad` is overwritten."""
        if self.softcap is not None:
            grad = grad.mul_(1 - (logits / self.softcap) ** 2)
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


@dataclass(frozen=True)
class Head:
    """The plain linear head of a model and what follows it."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    """[V]."""
    finish: Finish = Finish()
    """Scale and softcap."""

    def logits(self, hidden: Tensor, room: Tensor | None = None) -> Tensor:
        """[n, H] -> [n, V], float32 or float64. room [n, V] of the head's dtype takes the product (no autograd)."""
        if room is None:
            return self.finish(nn.functional.linear(hidden, self.weight, self.bias))
        raw = torch.mm(hidden, self.weight.T, out=room)
        return self.finish(raw if self.bias is None else raw.add_(self.bias))

    def dtype_for(self, hidden: Tensor) -> torch.dtype:
        """The dtype in which `nn.Linear` would multiply here, autocast included."""
        device = hidden.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype

    def cast(self, hidden: Tensor, dtype: torch.dtype) -> tuple["Head", Tensor]:
        """Head and hidden states in `dtype`."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias, self.finish), hidden.to(dtype)


def tiles(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices of the N tokens, each with at most TILE_ELEMENTS logits (one token at least); one where N is 0."""
    rows = _tile_rows(vocabulary)
    return (slice(start, min(start + rows, tokens)) for start in range(0, max(tokens, 1), rows))


def _tile_rows(vocabulary: int) -> int:
    return max(1, TILE_ELEMENTS // vocabulary)


def score_tokens(
    head: Head, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One value per token through the head: hidden [N, H] -> (values [N], stats of [N]), float32 (float64 stays).

    The gradient flows to `hidden`, `head.weight` and `head.bias`.
    weights [N] is a promise: the final loss is a multiple of (weights * values).sum(), plus terms without `values`.
    The head's gradient is then taken in the forward, so no tile is computed twice. A broken promise is an error.
    """
    run = _Run(head, tile, weights)
    values = _ScoreTokens.apply(hidden, head.weight, head.bias, run)
    return values, run.stats


@dataclass
class _Run:
    """One pass over the head, and what its backward needs besides the saved tensors."""

    head: Head
    tile: TileFunction
    weights: Tensor | None
    dtype: torch.dtype = torch.float32
    """In which the forward multiplied: the backward runs outside autocast and must do the same."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)


class _ScoreTokens(torch.autograd.Function):
    """d value / d hidden is taken in the forward, always; the head's gradient by the cheapest way that is exact."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, run):
        run.dtype = run.head.dtype_for(hidden)
        head, cast = run.head.cast(hidden, run.dtype)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        needs_head = needs_weight or needs_bias
        keep = needs_head and run.weights is None and cast.shape[0] * weight.shape[0] <= KEEP_ELEMENTS
        grad_hidden = torch.zeros_like(cast) if needs_hidden else None
        head_grad = _HeadGradient(weight, bias) if needs_head and run.weights is not None else None
        rooms, done = _rooms(cast, weight.shape[0]), []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in tiles(cast.shape[0], weight.shape[0]):
                result, raw_grad = _run_tile(head, run.tile, cast, rows, needs_hidden or needs_head, rooms)
                done.append(Tile(result.value, None, result.stats))
                if grad_hidden is not None:
                    grad_hidden[rows] = raw_grad @ head.weight
                if head_grad is not None:
                    head_grad.add(raw_grad, run.weights[rows], cast[rows])
                elif keep:
                    run.kept.append(raw_grad)
                    rooms = rooms[0], torch.empty_like(rooms[1])
        run.stats.update({name: torch.cat([tile.stats[name] for tile in done]) for name in done[0].stats})
        ctx.save_for_backward(hidden, weight, bias, grad_hidden)
        ctx.run, ctx.head_grad = run, head_grad
        return torch.cat([tile.value for tile in done])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, grad_hidden = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad[:, None]).to(hidden.dtype)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_hidden, None, None, None
        if ctx.head_grad is not None:
            head_grad, ctx.head_grad = ctx.head_grad, None  # a second backward computes it again
            return grad_hidden, *head_grad.result(_promised_scale(grad, ctx.run.weights)), None
        return grad_hidden, *_late_head_gradient(ctx.run, hidden, weight, bias, grad).result(), None


class _HeadGradient:
    """Accumulates the gradient of weight [V, H] and bias [V] in float32 (float64 stays)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.dtype, self.exact = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        self.weight: Tensor | None = None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=self.exact)

    def add(self, raw_grad: Tensor, token_grad: Tensor, hidden: Tensor) -> None:
        """raw_grad [n, V], token_grad [n], hidden [n, H]."""
        scaled = hidden * token_grad[:, None].to(hidden.dtype)
        if self.weight is None:
            self.weight = (raw_grad.T @ scaled).to(self.exact)
        elif self.exact == raw_grad.dtype:
            self.weight.addmm_(raw_grad.T, scaled)
        else:
            self.weight += raw_grad.T @ scaled
        if self.bias is not None:
            self.bias += raw_grad.T.to(self.bias.dtype) @ token_grad.to(self.bias.dtype)

    def result(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The two gradients, times `scale`, in the parameters' dtype; they are given away."""
        assert self.weight is not None  # there is one tile at least
        found = [self.weight] if self.bias is None else [self.weight, self.bias]
        if scale is not None:
            torch._foreach_mul_(found, scale.to(self.exact))
        return found[0].to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _rooms(hidden: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Room for a tile's product with the head and for its gradient, taken by one tile after the other."""
    shape = min(len(hidden), _tile_rows(vocabulary)), vocabulary
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, torch.float32))


def _run_tile(
    head: Head, tile: TileFunction, hidden: Tensor, rows: slice, need_grad: bool, rooms: tuple[Tensor, Tensor]
) -> tuple[Tile, Tensor]:
    """The tile's values, and d value / d (hidden W^T + b) as [n, V] in the head's dtype (empty if not needed)."""
    part = hidden[rows]
    product, room = (each[: len(part)] for each in rooms)
    logits = head.logits(part, product)
    result = tile(logits, rows, need_grad, room)
    if result.grad is None:
        return result, logits.new_empty(0)
    return result, head.finish.backward(logits, result.grad).to(hidden.dtype)


def _late_head_gradient(run: _Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> _HeadGradient:
    """The head's gradient in the backward, from kept tiles or by computing each again; grad [N]."""
    head, hidden = Head(weight, bias, run.head.finish).cast(hidden, run.dtype)
    head_grad, rooms = _HeadGradient(weight, bias), _rooms(hidden, weight.shape[0])
    for i, rows in enumerate(tiles(hidden.shape[0], weight.shape[0])):
        raw_grad = run.kept[i] if run.kept else _run_tile(head, run.tile, hidden, rows, True, rooms)[1]
        head_grad.add(raw_grad, grad[rows], hidden[rows])
    return head_grad


def _promised_scale(grad: Tensor, weights: Tensor) -> Tensor:
    """The multiple s in grad = s * weights, checked without waiting for the device."""
    if not len(grad):
        return grad.sum()
    weights = weights.to(grad.dtype)
    scale = (grad * weights).sum() / (weights * weights).sum().clamp(min=1e-30)
    broken = (grad - scale * weights).abs().max() > 1e-3 * scale.abs() * weights.abs().max() + 1e-30
    torch._assert_async(~broken, "the loss is not a multiple of (weights * values).sum(), as score_tokens was promised")
    return scale


def score_tokens_through(
    module: Callable[[Tensor], Tensor], finish: Finish, hidden: Tensor, tile: TileFunction, vocabulary: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for a head that is no plain linear layer (an adapter on it, a quantised one): each tile checkpointed."""

    def run(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        box: dict[str, Tensor] = {}

        def one(part: Tensor) -> Tensor:
            return _TileValue.apply(finish(module(part)), tile, rows, box)

        return checkpoint(one, hidden[rows], use_reentrant=False), box

    results = [run(rows) for rows in tiles(hidden.shape[0], vocabulary)]
    values = torch.cat([value for value, _ in results])
    return values, {name: torch.cat([stats[name] for _, stats in results]) for name in results[0][1]}


class _TileValue(torch.autograd.Function):
    """A tile function as an autograd step from logits [n, V] to values [n]."""

    @staticmethod
    def forward(ctx, logits, tile, rows, box):
        with torch.autocast(logits.device.type, enabled=False):
            result = tile(logits.clone(), rows, ctx.needs_input_grad[0], torch.empty_like(logits))
        box.update(result.stats)
        ctx.save_for_backward(result.grad)
        return result.value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad[:, None], None, None, None
