"""Tile functions of KD and OPD, which compare student and teacher over the whole vocabulary.

`top_tokens` compares them over a teacher's most likely tokens, `policy_gradient` on the sampled tokens alone.

Student and teacher must have the same token ids. A divergence covers the ids that both heads have, including padding
that both have. A cross-entropy covers the whole head of the student. The logits of the teacher are computed from its
hidden states tile by tile, together with the student's, so that the logits of neither model exist in full.

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
from .head import LogProb, Tile, TileFunction, expectation, softmax, triton_kernels


def divergence_function(
    name: str, beta: float | None, entropy_threshold: float | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a divergence as a function of (student, teacher) log-probabilities [n, V] -> [n].

    Args:
        name: Name in `losses.names`.
        beta: Weight of `jsd` (0.5 by default), or alpha of the skew divergences (0.1 by default).
        entropy_threshold: Threshold of `entropy_aware_kl` in nats (0.8 by default).
    """
    if name == "jsd":
        return partial(DIVERGENCES[name], beta=0.5 if beta is None else beta)
    if name.startswith("skew"):
        return partial(DIVERGENCES[name], alpha=0.1 if beta is None else beta)
    if name == "entropy_aware_kl":
        return partial(DIVERGENCES[name], threshold=0.8 if entropy_threshold is None else entropy_threshold)
    return DIVERGENCES[name]


# ---- the whole vocabulary


class TeacherLogits(Protocol):
    """The logits of a teacher at the student's N scored tokens, computed tile by tile."""

    def logits(self, rows: slice) -> Tensor:
        """Return logits [n, V of the teacher] without gradient. The caller may overwrite them."""
        ...


def autograd_tile(function: Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]) -> TileFunction:
    """Return the tile function of any function (logits [n, V], rows) -> (value [n], stats [n]), with autograd."""

    def tile(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        with torch.set_grad_enabled(need_grad):
            leaf = logits.detach().requires_grad_(need_grad)
            value, stats = function(leaf, rows)
            grad = torch.autograd.grad(value.sum(), leaf)[0] if need_grad else None
        return Tile(value.detach(), grad, {name: stat.detach() for name, stat in stats.items()})

    return tile


def dense_divergence(
    function: Callable[[Tensor, Tensor], Tensor],
    teacher: TeacherLogits,
    targets: Tensor,
    temperature: float,
    ce_coef: float,
) -> TileFunction:
    """Return the tile function of w CE + (1 - w) D(student, teacher), w = ce_coef.

    The two KL divergences and JSD are differentiated by hand (`KL`), the others by autograd.

    Args:
        function: Divergence D of (student, teacher) log-probabilities [n, V] -> [n].
        teacher: Logits of the teacher.
        targets: [N].
        temperature: Divides the logits of both models in D, but not in CE.
        ce_coef: Weight w of the cross-entropy.

    Returns:
        The tile function, with the statistics `divergence`, `student` and `teacher` (log-probabilities of the target at
        the temperature), and `ce` if its weight is not 0.
    """

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        teacher_logits = teacher.logits(rows)
        size = min(logits.shape[-1], teacher_logits.shape[-1])
        target = targets[rows, None]
        q, p = (log_softmax(at_temperature(side[:, :size], temperature)) for side in (logits, teacher_logits))
        total = function(q, p)
        stats = {"divergence": total, "student": q.gather(-1, target)[:, 0], "teacher": p.gather(-1, target)[:, 0]}
        full_logps = q if temperature == 1 and size == logits.shape[-1] else None
        return with_cross_entropy(total, logits, full_logps, target, ce_coef, stats)

    tile = autograd_tile(value)
    beta = None
    if getattr(function, "func", None) is jsd and 0 < function.keywords["beta"] < 1:  # type: ignore[attr-defined]
        beta = function.keywords["beta"]  # type: ignore[attr-defined]
    elif function not in (forward_kl, reverse_kl):
        return tile
    return KL(function is reverse_kl, teacher, targets, temperature, ce_coef, tile, beta)


@dataclass(frozen=True)
class KL:
    """Tile function of `dense_divergence` for KL(p, q), KL(q, p) or JSD in closed form.

    It has a fifth of the memory traffic of autograd. z and t are the logits of student and teacher, each less its
    largest, d = t - z and c = ln sum e^z - ln sum e^t:

    KL(p, q) = sum p d + c, with gradient q - p.
    KL(q, p) = -sum q d - c, with gradient -q (d + c + KL).
    JSD = beta sum p (d + c - s) - (1 - beta) sum q s, with gradient (1 - beta) q (-s + sum q s), where
    m = beta p + (1 - beta) q and s = ln m - ln q = ln(beta e^(d + c) + 1 - beta). Terms with the change of m cancel.

    The difference d is computed before the sum. For two similar models the difference of two sums would be rounding
    noise.
    """

    reverse: bool  # KL(q, p), else KL(p, q)
    teacher: TeacherLogits
    targets: Tensor
    temperature: float
    ce_coef: float
    fallback: TileFunction  # the same with autograd, for a cross-entropy that needs another softmax
    beta: float | None = None  # weight of JSD; None for a KL divergence

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        """Return the Tile of logits [n, V], with the statistics of `dense_divergence`."""
        teacher_logits = self.teacher.logits(rows)
        size = min(logits.shape[-1], teacher_logits.shape[-1])
        target = self.targets[rows, None]
        if self.ce_coef and (self.temperature != 1 or size < logits.shape[-1]):
            return self.fallback(logits, rows, need_grad, buffer)
        w = self.ce_coef
        if self.beta is None and (fused := triton_kernels(logits)):
            out = buffer if need_grad else None
            kl, student, teacher = fused.kl(
                logits, teacher_logits, target[:, 0], self.temperature, self.reverse, w, out
            )
            stats = {"divergence": kl, "student": student, "teacher": teacher}
            if not w:  # 0 x -inf would be NaN
                return Tile(kl, out, stats)
            return Tile((1 - w) * kl - w * student, out, stats | {"ce": -student})

        # the buffer for a kernel has a smaller dtype
        buffer = buffer if buffer.dtype == logits.dtype else torch.empty_like(logits)
        z, t = (at_temperature(side[:, :size], self.temperature) for side in (logits, teacher_logits))
        q, z_peak, q_top = softmax(z, buffer)
        p, t_peak, p_top = softmax(t, torch.empty_like(t))
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
            q_dot_s = expectation(q, s)
            kl = b * expectation(p, ratio.sub_(s)) - (1 - b) * q_dot_s
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
            q.mul_((q_dot_s - s).mul_((1 - w) * (1 - self.beta)).add_(w))
        elif self.reverse:
            q.mul_(d.add_(c + kl).mul_(w - 1).add_(w))
        else:
            q.sub_(p, alpha=1 - w)
        grad = buffer.scatter_add_(-1, target, torch.full_like(value, -w)) if w else buffer
        return Tile(value[:, 0], grad if self.temperature == 1 else grad.div_(self.temperature), stats)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature, [n, V]."""
    return logits if temperature == 1 else logits / temperature


def with_cross_entropy(
    total: Tensor, logits: Tensor, logps: Tensor | None, target: Tensor, ce_coef: float, stats: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the cross-entropy over the student's full vocabulary to a divergence.

    Args:
        total: Divergence, [n].
        logits: Logits of the student, [n, V].
        logps: Their log-probabilities if these are already computed.
        target: [n, 1].
        ce_coef: Weight w of the cross-entropy.
        stats: Statistics of the divergence.

    Returns:
        w CE + (1 - w) x `total`, [n], and the statistics, with `ce` if its weight is not 0.
    """
    if ce_coef == 0:
        return total, stats
    logps = log_softmax(logits) if logps is None else logps
    ce = -logps.gather(-1, target)[:, 0]
    return ce_coef * ce + (1 - ce_coef) * total, stats | {"ce": ce}


def add_cross_entropy(tile: TileFunction, targets: Tensor, ce_coef: float) -> TileFunction:
    """Return the tile function of (1 - w) x the value of `tile` + w CE of the unscaled logits, w = ce_coef."""

    def mixed(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        log_prob = LogProb(targets)(logits, rows, need_grad, torch.empty_like(buffer))
        result = tile(logits, rows, need_grad, buffer)
        grad = None
        if result.grad is not None and log_prob.grad is not None:
            grad = result.grad.mul_(1 - ce_coef).sub_(log_prob.grad, alpha=ce_coef)
        value = (1 - ce_coef) * result.value - ce_coef * log_prob.value
        return Tile(value, grad, result.stats | {"ce": -log_prob.value})

    return mixed if ce_coef else tile
