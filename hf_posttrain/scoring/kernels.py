"""Triton kernels of the tile functions, which read a tile of logits twice and write its gradient once.

In torch a softmax, its gradient and the statistics move about 65 bytes per logit through the memory of a GPU. These
kernels move 8 bytes and the gradient. They are used with Triton and CUDA. Otherwise, and as the reference in tests, the
torch functions of `head` and `teacher_tiles` compute the same.

Each program computes one row of n. It reads the vocabulary in blocks, once to normalize and once to write. The
normalization is the online softmax of arXiv 1805.02867: a sum is relative to the largest logit so far, and is rescaled
at each larger one.

Legend: n tokens of a tile, V vocabulary.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program reads at once
WARPS = 8  # warps of a program


LEAST = tl.constexpr(-1e30)  # replaces a logit of -inf, because 0 x -inf and -inf - -inf would be NaN


@triton.jit
def _load(logits, index, size, scale):
    # logits after `size` are -inf; NaN is kept, so that a broken model is noticed
    x = tl.load(logits + index, mask=index < size, other=0.0).to(tl.float32)
    return tl.where(index < size, tl.maximum(x * scale, LEAST, propagate_nan=tl.PropagateNan.ALL), -float("inf"))


@triton.jit
def _log_total(peak, total):
    # if all logits are -inf there is no distribution: NaN, as in torch
    return tl.where(peak > LEAST, tl.log(total), float("nan"))


@triton.jit
def _log_prob_of(logit, peak, log_total):
    return tl.where(logit == LEAST, -float("inf"), logit - peak) - log_total


@triton.jit
def _log_prob(
    logits,
    targets,
    values,
    entropies,
    correct,
    gradient,
    stride,
    vocabulary,
    padded,
    scale,
    min_top_logp,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    target = tl.load(targets + row)
    target_logit = _load(source, target, vocabulary, scale)
    # the largest x, the sum of e^(x - peak), and the sum of x e^(x - peak)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = _load(source, index, vocabulary, scale)
        higher = tl.maximum(peak, tl.max(x, 0))
        shrunk = tl.exp(peak - higher)
        e = tl.exp(x - higher)
        total = total * shrunk + tl.sum(e, 0)
        if STATS:
            weighted = weighted * shrunk + tl.sum(tl.where(e > 0, x * e, 0.0), 0)
        peak = higher
    log_total = _log_total(peak, total)
    tl.store(values + row, _log_prob_of(target_logit, peak, log_total))
    if STATS:
        tl.store(entropies + row, peak + log_total - weighted / total)
        best = (target_logit >= peak) & (-log_total > min_top_logp)  # if all logits are equal, none is the best
        tl.store(correct + row, best.to(tl.float32))
    if GRADIENT:
        output = gradient + row * padded
        for start in range(0, padded, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = _load(source, index, vocabulary, scale)
            g = (tl.where(index == target, 1.0, 0.0) - tl.exp(x - peak - log_total)) * scale
            tl.store(output + index, g.to(gradient.dtype.element_ty), mask=index < padded)


@triton.jit
def _kl(
    logits,
    teacher,
    targets,
    values,
    students,
    teachers,
    gradient,
    stride,
    teacher_stride,
    vocabulary,
    padded,
    scale,
    ce,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    teacher_source = teacher + row * teacher_stride
    target = tl.load(targets + row)
    # the largest logit of student z and teacher t, the sums of e^(x - largest), and the sum of (t - z) e^(...),
    # which is weighted by the student if REVERSE, else by the teacher
    z_peak = -float("inf")
    t_peak = -float("inf")
    z_total = 0.0
    t_total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK):
        index = start + tl.arange(0, BLOCK)
        zs = _load(source, index, vocabulary, scale)
        ts = _load(teacher_source, index, vocabulary, scale)
        z_higher = tl.maximum(z_peak, tl.max(zs, 0))
        t_higher = tl.maximum(t_peak, tl.max(ts, 0))
        z_shrunk = tl.exp(z_peak - z_higher)
        t_shrunk = tl.exp(t_peak - t_higher)
        q = tl.exp(zs - z_higher)
        p = tl.exp(ts - t_higher)
        z_total = z_total * z_shrunk + tl.sum(q, 0)
        t_total = t_total * t_shrunk + tl.sum(p, 0)
        if REVERSE:
            weighted = weighted * z_shrunk + tl.sum(tl.where(q > 0, q * (ts - zs), 0.0), 0)
        else:
            weighted = weighted * t_shrunk + tl.sum(tl.where(p > 0, p * (ts - zs), 0.0), 0)
        z_peak = z_higher
        t_peak = t_higher
    # ln p - ln q = t - z - offset
    z_log = _log_total(z_peak, z_total)
    t_log = _log_total(t_peak, t_total)
    offset = t_peak - z_peak + (t_log - z_log)
    kl = offset - weighted / z_total if REVERSE else weighted / t_total - offset
    tl.store(students + row, _log_prob_of(_load(source, target, vocabulary, scale), z_peak, z_log))
    tl.store(teachers + row, _log_prob_of(_load(teacher_source, target, vocabulary, scale), t_peak, t_log))
    tl.store(values + row, kl)
    if GRADIENT:  # gradient of (1 - ce) KL - ce ln q(target)
        output = gradient + row * padded
        for start in range(0, padded, BLOCK):
            index = start + tl.arange(0, BLOCK)
            zs = _load(source, index, vocabulary, scale)
            ts = _load(teacher_source, index, vocabulary, scale)
            q = tl.exp(zs - z_peak - z_log)
            g = q * (ce - (1 - ce) * (ts - zs - offset + kl)) if REVERSE else q - (1 - ce) * tl.exp(ts - t_peak - t_log)
            g = tl.where(index < vocabulary, (g - tl.where(index == target, ce, 0.0)) * scale, 0.0)
            tl.store(output + index, g.to(gradient.dtype.element_ty), mask=index < padded)


def log_prob(
    logits: Tensor, targets: Tensor, temperature: float, vocabulary: int, gradient: Tensor | None, stats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probability of the targets, and its gradient.

    Args:
        logits: [n, V].
        targets: [n].
        temperature: Divides the logits.
        vocabulary: Number of logits that count. The later ones are padding.
        gradient: Memory [n, V] for the gradient of the log-probability, or None.
        stats: Compute the statistics.

    Returns:
        The log-probability of the targets [n], the entropy [n], and 1 if the target is the argmax [n]. The last two are
        uninitialized without `stats`.
    """
    value, entropy, correct = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    min_top_logp = 1e-4 - math.log(vocabulary)
    out = logits if gradient is None else gradient
    _log_prob[(len(logits),)](
        logits,
        targets,
        value,
        entropy,
        correct,
        out,
        logits.stride(0),
        vocabulary,
        out.shape[-1],
        1 / temperature,
        min_top_logp,
        gradient is not None,
        stats,
        BLOCK,
        num_warps=WARPS,
    )
    return value, entropy, correct


def kl(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    temperature: float,
    reverse: bool,
    ce_coef: float,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a KL divergence over the ids that student q and teacher p have, and its gradient.

    Args:
        logits: Logits of the student, [n, V].
        teacher: Logits of the teacher, [n, V'].
        targets: [n].
        temperature: Divides the logits of both.
        reverse: Compute KL(q, p) instead of KL(p, q).
        ce_coef: Weight w of the cross-entropy in the gradient.
        gradient: Memory [n, V] for the gradient of (1 - w) KL - w ln q(target), or None.

    Returns:
        The divergence [n], and the log-probabilities of the targets under student and teacher, [n] each.
    """
    value, student_logps, teacher_logps = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    size = min(logits.shape[-1], teacher.shape[-1])
    out = logits if gradient is None else gradient
    _kl[(len(logits),)](
        logits,
        teacher,
        targets,
        value,
        student_logps,
        teacher_logps,
        out,
        logits.stride(0),
        teacher.stride(0),
        size,
        out.shape[-1],
        1 / temperature,
        ce_coef,
        reverse,
        gradient is not None,
        BLOCK,
        num_warps=WARPS,
    )
    return value, student_logps, teacher_logps
