"""Divergences between two next-token distributions, with one value per token.

q is the student's distribution, p the teacher's. Both arrive as log-probabilities [N, V] (`log_softmax` of the logits,
in fp32). The divergences are finite for logits of any size and for padded tokens, whose log-probability is -inf.
`names.py` lists the divergences that recipes can name.

Legend: N tokens, V vocabulary, K top tokens of the teacher.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, V] of logits [n, V], exact to float32's last digits for large vocabularies.

    On CPU `torch.log_softmax` sums a vocabulary sequentially: at 262k tokens all its values are off by 6e-5.
    """
    if logits.device.type != "cpu":
        return torch.log_softmax(logits, dim=-1)

    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()  # `logsumexp` would search for the largest once more


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p, q) = sum p (ln p - ln q), the distillation loss of Hinton et al. 2015 (arXiv 1503.02531). [N, V] -> [N]."""
    p = _finite(teacher)
    q = _finite(student)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(q, p) = sum q (ln q - ln p), the mode-seeking loss of MiniLLM (arXiv 2306.08543). [N, V] -> [N]."""
    return forward_kl(teacher, student)


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """JSD = beta KL(p, m) + (1-beta) KL(q, m), m = beta p + (1-beta) q: GKD eq. 1 (arXiv 2306.13649). [N, V] -> [N].

    The formula is 0 at beta 0 and 1. As in TRL's GKD, these return the forward and reverse KL instead.
    """
    if beta == 0:
        return forward_kl(student, teacher)
    if beta == 1:
        return reverse_kl(student, teacher)

    mixture = _mix(teacher, student, beta)
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)


def skew_forward_kl(student: Tensor, teacher: Tensor, alpha: float = 0.1) -> Tensor:
    """KL(p, alpha p + (1-alpha) q): skew KL of DistiLLM, eq. 4 (arXiv 2402.03898). [N, V] -> [N]."""
    return forward_kl(_mix(teacher, student, alpha), teacher)


def skew_reverse_kl(student: Tensor, teacher: Tensor, alpha: float = 0.1) -> Tensor:
    """KL(q, alpha q + (1-alpha) p): skew reverse KL of DistiLLM (arXiv 2402.03898). [N, V] -> [N]."""
    return skew_forward_kl(teacher, student, alpha)


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    """TVD = sum |p - q| / 2: total variation distance, f-distill (arXiv 2307.15190). [N, V] -> [N]."""
    return 0.5 * (teacher.exp() - student.exp()).abs().sum(-1)


def entropy_aware_kl(student: Tensor, teacher: Tensor, threshold: float = 0.8) -> Tensor:
    """KL(q, p), plus KL(p, q) where the entropy of p exceeds `threshold` nats: EOPD (arXiv 2603.07079). [N, V] -> [N].

    The paper computes KL(p, q) on the teacher's top k alone.
    """
    entropy = -(teacher.exp() * _finite(teacher)).sum(-1)
    return reverse_kl(student, teacher) + forward_kl(student, teacher).where(entropy > threshold, 0.0)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "tvd": tvd,
    "entropy_aware_kl": entropy_aware_kl,
}


def with_tail(top: Tensor) -> Tensor:
    """Append the log-probability of all other tokens to the log-probabilities of K tokens, [N, K] -> [N, K+1].

    With it any divergence can be computed from a teacher's top K alone. The result is exact if K is V-1 or V, except
    that the probability of the tail is at least 1e-7.
    """
    tail = torch.log(-torch.expm1(top.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))
    return torch.cat([top, tail], dim=-1)


def generalized_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """D(p, q) = sum p (ln p - ln q) - p + q: forward KL of the log-probabilities of K tokens, [N, K] -> [N].

    The probabilities need not sum to 1. Each token contributes at least 0, and exactly 0 where q = p, so that the sum
    over a part of the vocabulary is a lower bound of `forward_kl`. For distributions both are equal (I-divergence,
    Csiszar 1991, doi 10.1214/aos/1176348385).
    """
    return forward_kl(student, teacher) - teacher.exp().sum(-1) + student.exp().sum(-1)


def generalized_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """D(q, p) = sum q (ln q - ln p) - q + p: reverse KL of the log-probabilities of K tokens, [N, K] -> [N]."""
    return generalized_kl(teacher, student)


GENERALIZED: dict[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    forward_kl: generalized_kl,
    reverse_kl: generalized_reverse_kl,
}
"""Divergences of K tokens whose probabilities need not sum to 1, by the divergence of distributions."""


def _mix(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """Return ln(weight e^first + (1 - weight) e^second) of log-probabilities `first` and `second`, [N, V]."""
    return torch.logaddexp(_finite(first) + math.log(weight), _finite(second) + math.log1p(-weight))


def _finite(logps: Tensor) -> Tensor:
    """Replace -inf by -1e30, which is still probability 0, so that 0 * (ln p - ln q) is 0 and not NaN."""
    return logps.clamp(min=-1e30)
