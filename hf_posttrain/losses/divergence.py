"""Distances between two next-token distributions, one value per token.

N: tokens, V: vocabulary, K: teacher's top tokens. q is the student's distribution, p the teacher's; both arrive as
log-probabilities [N, V] (`log_softmax` of the logits, in fp32), so logits of any size and -inf padding stay finite.
`names.py` lists those that recipes can name.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import names


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, V] of logits [n, V], exact to float32's last digits for large vocabularies.

    On CPU `torch.log_softmax` adds up a vocabulary in its order: at 262k tokens all its values are 6e-5 off.
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
    """Beta KL(p, m) + (1-beta) KL(q, m), m = beta p + (1-beta) q: GKD eq. 1 (arXiv 2306.13649). -> [N].

    The formula tends to 0 at both ends; as users of GKD expect, beta 0 gives forward KL and beta 1 reverse KL.
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
    """Sum |p - q| / 2: total variation distance, f-distill (arXiv 2307.15190). [N, V] -> [N]."""
    return 0.5 * (teacher.exp() - student.exp()).abs().sum(-1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {name: globals()[name] for name in names.DIVERGENCES}


def with_tail(top: Tensor) -> Tensor:
    """Log-probabilities of K tokens and, as one entry more, of all others, so that any divergence runs on a teacher's
    top K alone: [N, K] -> [N, K+1], exact where K is V-1 or V.
    """
    rest = torch.log(-torch.expm1(top.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))
    return torch.cat([top, rest], dim=-1)


def places(owner: Tensor) -> Tensor:
    """The place of each token in its rollout, from 0: [N]. owner [N]: whose token it is; a rollout's are in order, and
    those of others may stand between them. Nothing is read from the device.
    """
    order = torch.argsort(owner, stable=True)
    number = torch.arange(len(owner), device=owner.device)
    begins = owner[order] != owner[order].roll(1)
    found = torch.empty_like(number)
    found[order] = number - (number * begins).cummax(0).values
    return found


def by_rollout(values: Tensor, owner: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Values [N] as a table [rollouts, longest], 0 behind each, and where each of the N stands in it. owner: as
    `places`, from 0.
    """
    where = owner, places(owner)
    table = values.new_zeros([int(part.max()) + 1 if len(part) else 0 for part in where])
    table[where] = values
    return table, where


def _mix(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """ln(weight first + (1 - weight) second), [N, V]."""
    w = torch.tensor(weight, dtype=torch.float64)
    return torch.logaddexp(_finite(first) + w.log().item(), _finite(second) + torch.log1p(-w).item())


def _finite(logps: Tensor) -> Tensor:
    """-inf becomes -1e30: probability 0 all the same, and 0 times a difference is 0 instead of NaN."""
    return logps.clamp(min=-1e30)
