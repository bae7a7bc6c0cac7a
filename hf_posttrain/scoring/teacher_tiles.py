"""Student against teacher, tile by tile: the tile functions of KD and OPD.

Over the whole vocabulary here; over a teacher's most likely tokens: `top_tokens`; of the sampled tokens alone:
`policy_gradient`.

Student and teacher must have the same token ids. A divergence is over those that both heads have, padding that both
have among them; a cross-entropy is over the student's whole head. The teacher's logits come from its hidden states tile
by tile, alongside the student's, so neither model's logits exist in full.

Legend: N scored tokens, n of one tile, V vocabulary, H hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..losses.divergence import DIVERGENCES, forward_kl, jsd, log_softmax, reverse_kl
from .head import LogProb, Tile, TileFunction, expectation, kernels, softmax


def divergence(name: str, beta: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of (student, teacher) log-probabilities [n, V] -> [n]."""
    if name == "jsd":
        return partial(DIVERGENCES[name], beta=0.5 if beta is None else beta)
    if name.startswith("skew"):
        return partial(DIVERGENCES[name], alpha=0.1 if beta is None else beta)
    return DIVERGENCES[name]


# ---- the whole vocabulary


class TeacherLogits(Protocol):
    """The logits of a teacher at the student's N scored tokens, computed tile by tile."""

    def logits(self, rows: slice) -> Tensor:
        """Return logits [n, V of the teacher] without gradient. The caller may overwrite them."""
        ...


def differentiated(function: Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]) -> TileFunction:
    """Tile function: any function (logits [n, V], rows) -> (value [n], stats of [n]), differentiated by autograd."""

    def tile(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        with torch.set_grad_enabled(need_grad):
            leaf = logits.detach().requires_grad_(need_grad)
            value, stats = function(leaf, rows)
            grad = torch.autograd.grad(value.sum(), leaf)[0] if need_grad else None
        return Tile(value.detach(), grad, {name: stat.detach() for name, stat in stats.items()})

    return tile


def dense(
    function: Callable[[Tensor, Tensor], Tensor],
    teacher: TeacherLogits,
    targets: Tensor,
    temperature: float,
    ce_coef: float,
) -> TileFunction:
    """Value = (1 - w) CE + w D(student, teacher), w = 1 - ce_coef; temperature divides both logits in D alone.

    stats: `divergence`, `student` and `teacher` (log-probabilities of the target at the temperature), and `ce`.
    The two KL divergences and JSD are differentiated by hand (`KL`), the others by autograd.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        theirs = teacher.logits(rows)
        size = min(logits.shape[-1], theirs.shape[-1])
        target = targets[rows, None]
        q, p = (log_softmax(at_temperature(side[:, :size], temperature)) for side in (logits, theirs))
        total = function(q, p)
        stats = {"divergence": total, "student": q.gather(-1, target)[:, 0], "teacher": p.gather(-1, target)[:, 0]}
        own = q if temperature == 1 and size == logits.shape[-1] else None
        return with_cross_entropy(total, logits, own, target, ce_coef, stats)

    tile = differentiated(value)
    beta = None
    if getattr(function, "func", None) is jsd and 0 < function.keywords["beta"] < 1:  # type: ignore[attr-defined]
        beta = function.keywords["beta"]  # type: ignore[attr-defined]
    elif function not in (forward_kl, reverse_kl):
        return tile
    return KL(function is reverse_kl, teacher, targets, temperature, ce_coef, tile, beta)


@dataclass(frozen=True)
class KL:
    """`dense` for KL(p, q), KL(q, p) or JSD, in closed form: a fifth of the memory traffic of autograd.

    With logits z and t of student and teacher, each less its largest, d = t - z and c = ln sum e^z - ln sum e^t:
    KL(p, q) = sum p d + c, of gradient q - p;  KL(q, p) = -sum q d - c, of gradient -q (d + c + KL).
    d is taken before it is summed: of two close models the two sums would leave rounding alone.
    JSD with m = beta p + (1 - beta) q, and s = ln m - ln q = ln(beta e^(d + c) + 1 - beta): beta sum p (d + c - s) -
    (1 - beta) sum q s, of gradient (1 - beta) q (-s + sum q s): what depends on m's own change cancels out.
    """

    reverse: bool  # KL(q, p), else KL(p, q)
    teacher: TeacherLogits
    targets: Tensor
    temperature: float
    ce_coef: float
    plain: TileFunction  # the same by autograd, for a cross-entropy that needs another softmax
    beta: float | None = None  # of JSD; None: a KL divergence

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """[n, V] -> Tile of [n]; stats as `dense`."""
        theirs = self.teacher.logits(rows)
        size = min(logits.shape[-1], theirs.shape[-1])
        target = self.targets[rows, None]
        if self.ce_coef and (self.temperature != 1 or size < logits.shape[-1]):
            return self.plain(logits, rows, need_grad, buffer)
        w = self.ce_coef
        if self.beta is None and (fused := kernels(logits)):
            out = buffer if need_grad else None
            kl, student, teacher = fused.kl(logits, theirs, target[:, 0], self.temperature, self.reverse, w, out)
            stats = {"divergence": kl, "student": student, "teacher": teacher}
            if not w:  # 0 x -inf would be NaN
                return Tile(kl, out, stats)
            return Tile((1 - w) * kl - w * student, out, stats | {"ce": -student})
        buffer = buffer if buffer.dtype == logits.dtype else torch.empty_like(logits)  # a kernel's is smaller
        z, t = (at_temperature(side[:, :size], self.temperature) for side in (logits, theirs))
        (q, z_peak, q_top) = softmax(z, buffer)
        (p, t_peak, p_top) = softmax(t, torch.empty_like(t))
        student = z.gather(-1, target) - z_peak + q_top
        teacher = t.gather(-1, target) - t_peak + p_top
        z = z.clamp_(min=-1e30)
        t = t.clamp_(min=-1e30)  # 0 x -inf would be NaN
        c = p_top - q_top
        d = t.sub_(z).sub_(t_peak - z_peak)
        if self.beta is not None:
            ratio = d.add_(c)
            b = self.beta
            s = torch.logaddexp(ratio + math.log(b), ratio.new_full((), math.log1p(-b)))
            of_mixture = expectation(q, s)
            kl = b * expectation(p, ratio.sub_(s)) - (1 - b) * of_mixture
        else:
            kl = -expectation(q, d) - c if self.reverse else expectation(p, d) + c
        stats = {"divergence": kl[:, 0], "student": student[:, 0], "teacher": teacher[:, 0]}
        value = kl
        if w:
            value = (1 - w) * kl - w * student
            stats = stats | {"ce": -student[:, 0]}
        if not need_grad:
            return Tile(value[:, 0], None, stats)
        if self.beta is not None:
            q.mul_((of_mixture - s).mul_((1 - w) * (1 - self.beta)).add_(w))
        elif self.reverse:
            q.mul_(d.add_(c + kl).mul_(w - 1).add_(w))
        else:
            q.sub_(p, alpha=1 - w)
        grad = buffer.scatter_add_(-1, target, torch.full_like(value, -w)) if w else buffer
        return Tile(value[:, 0], grad if self.temperature == 1 else grad.div_(self.temperature), stats)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits / temperature, [n, V]."""
    return logits if temperature == 1 else logits / temperature


def with_cross_entropy(
    total: Tensor, logits: Tensor, own: Tensor | None, target: Tensor, ce_coef: float, stats: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mix in the cross-entropy of the student's own full vocabulary; `own`: its log-probabilities where at hand."""
    if ce_coef == 0:
        return total, stats
    logps = log_softmax(logits) if own is None else own
    ce = -logps.gather(-1, target)[:, 0]
    return ce_coef * ce + (1 - ce_coef) * total, stats | {"ce": ce}


def beside_cross_entropy(tile: TileFunction, targets: Tensor, ce_coef: float) -> TileFunction:
    """Tile function: (1 - w) x the value of `tile` + w CE of the logits as they are, w = ce_coef."""

    def mixed(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        own = LogProb(targets)(logits, rows, need_grad, torch.empty_like(buffer))
        found = tile(logits, rows, need_grad, buffer)
        grad = None
        if found.grad is not None and own.grad is not None:
            grad = found.grad.mul_(1 - ce_coef).sub_(own.grad, alpha=ce_coef)
        return Tile((1 - ce_coef) * found.value - ce_coef * own.value, grad, found.stats | {"ce": -own.value})

    return mixed if ce_coef else tile
