"""Triton kernels of the tile functions: a tile of logits is read twice, and its gradient written once.

In torch a softmax, its gradient and the statistics move some 65 bytes a logit through a GPU's memory; here it is 8 and
the gradient. They are used where Triton and CUDA are; elsewhere, and in the tests as the oracle, the torch functions of
`head` and `teacher_tiles` do the same.

Each program has one row of n, and walks over its vocabulary in blocks: once to normalise (the online softmax of
arXiv 1805.02867: a sum is kept relative to the largest logit so far, and scaled when a larger one comes), once to
write.

Legend: n tokens of a tile, V vocabulary.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8  # logits that a program reads at once, and by how many warps


LEAST = tl.constexpr(-1e30)  # a logit of -inf becomes this: 0 x -inf and -inf - -inf would be NaN


@triton.jit
def _load(logits, place, size, scale):
    # those behind `size` are -inf; NaN stays, so that a broken model is seen
    x = tl.load(logits + place, mask=place < size, other=0.0).to(tl.float32)
    return tl.where(place < size, tl.maximum(x * scale, LEAST, propagate_nan=tl.PropagateNan.ALL), -float("inf"))


@triton.jit
def _log_total(peak, total):
    # where every logit is -inf there is no distribution: NaN, as in torch
    return tl.where(peak > LEAST, tl.log(total), float("nan"))


@triton.jit
def _log_prob_of(own, peak, log_total):
    return tl.where(own == LEAST, -float("inf"), own - peak) - log_total


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
    told_apart,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    target = tl.load(targets + row)
    own = _load(source, target, vocabulary, scale)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0  # the largest x, sum of e^(x - peak), sum of x e^(x - peak)
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = _load(source, place, vocabulary, scale)
        higher = tl.maximum(peak, tl.max(x, 0))
        shrunk = tl.exp(peak - higher)
        e = tl.exp(x - higher)
        total = total * shrunk + tl.sum(e, 0)
        if STATS:
            weighted = weighted * shrunk + tl.sum(tl.where(e > 0, x * e, 0.0), 0)
        peak = higher
    log_total = _log_total(peak, total)
    tl.store(values + row, _log_prob_of(own, peak, log_total))
    if STATS:
        tl.store(entropies + row, peak + log_total - weighted / total)
        best = (own >= peak) & (-log_total > told_apart)  # where all are equal, none is best
        tl.store(correct + row, best.to(tl.float32))
    if GRADIENT:
        written = gradient + row * padded
        for start in range(0, padded, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = _load(source, place, vocabulary, scale)
            g = (tl.where(place == target, 1.0, 0.0) - tl.exp(x - peak - log_total)) * scale
            tl.store(written + place, g.to(gradient.dtype.element_ty), mask=place < padded)


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
    theirs,
    vocabulary,
    padded,
    scale,
    ce,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    other = teacher + row * theirs
    target = tl.load(targets + row)
    # of student z and teacher t: the largest, the sum of e^(x - largest), and sum of (t - z) e^(...) by who weighs
    z_peak = -float("inf")
    t_peak = -float("inf")
    z_total = 0.0
    t_total = 0.0
    moved = 0.0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        zs = _load(own, place, vocabulary, scale)
        ts = _load(other, place, vocabulary, scale)
        z_higher = tl.maximum(z_peak, tl.max(zs, 0))
        t_higher = tl.maximum(t_peak, tl.max(ts, 0))
        z_shrunk = tl.exp(z_peak - z_higher)
        t_shrunk = tl.exp(t_peak - t_higher)
        q = tl.exp(zs - z_higher)
        p = tl.exp(ts - t_higher)
        z_total = z_total * z_shrunk + tl.sum(q, 0)
        t_total = t_total * t_shrunk + tl.sum(p, 0)
        if REVERSE:
            moved = moved * z_shrunk + tl.sum(tl.where(q > 0, q * (ts - zs), 0.0), 0)
        else:
            moved = moved * t_shrunk + tl.sum(tl.where(p > 0, p * (ts - zs), 0.0), 0)
        z_peak = z_higher
        t_peak = t_higher
    # ln p - ln q = t - z - away
    z_log = _log_total(z_peak, z_total)
    t_log = _log_total(t_peak, t_total)
    away = t_peak - z_peak + (t_log - z_log)
    kl = away - moved / z_total if REVERSE else moved / t_total - away
    tl.store(students + row, _log_prob_of(_load(own, target, vocabulary, scale), z_peak, z_log))
    tl.store(teachers + row, _log_prob_of(_load(other, target, vocabulary, scale), t_peak, t_log))
    tl.store(values + row, kl)
    if GRADIENT:  # of (1 - ce) KL - ce ln q(target)
        written = gradient + row * padded
        for start in range(0, padded, BLOCK):
            place = start + tl.arange(0, BLOCK)
            zs = _load(own, place, vocabulary, scale)
            ts = _load(other, place, vocabulary, scale)
            q = tl.exp(zs - z_peak - z_log)
            g = q * (ce - (1 - ce) * (ts - zs - away + kl)) if REVERSE else q - (1 - ce) * tl.exp(ts - t_peak - t_log)
            g = tl.where(place < vocabulary, (g - tl.where(place == target, ce, 0.0)) * scale, 0.0)
            tl.store(written + place, g.to(gradient.dtype.element_ty), mask=place < padded)


def log_prob(
    logits: Tensor, targets: Tensor, temperature: float, vocabulary: int, gradient: Tensor | None, stats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V], of which the first `vocabulary` count -> log-probability of the targets [n], entropy, and 1 where
    the target is the argmax (both unset without `stats`). gradient [n, V] is overwritten with that of the first.
    """
    value, entropy, correct = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    told_apart = 1e-4 - math.log(vocabulary)
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
        told_apart,
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
    """Logits of student [n, V] and teacher [n, V'], over the ids that both have -> KL(q, p) or KL(p, q), and the
    log-probabilities of the targets by each, [n]. gradient [n, V] is overwritten with that of (1 - w) KL - w ln q.
    """
    value, student, theirs = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    size = min(logits.shape[-1], teacher.shape[-1])
    out = logits if gradient is None else gradient
    _kl[(len(logits),)](
        logits,
        teacher,
        targets,
        value,
        student,
        theirs,
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
    return value, student, theirs
