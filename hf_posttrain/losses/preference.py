"""Preference losses. Every function returns one value per example; nothing here is reduced.

Notation: a = log pi(chosen) - log ref(chosen), c = the same of the rejected answer, D = a - c, all summed over the
tokens of the answer; s = sigmoid, ls = log sigmoid. B: number of pairs (or of labelled answers).

PAIRED and UNPAIRED name the losses as recipes do. A new loss is one small function and one line in a table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """Summed log-probabilities and trained lengths of B preference pairs, all [B]."""

    chosen: Tensor
    """log pi(chosen | prompt)."""
    rejected: Tensor
    """log pi(rejected | prompt)."""
    ref_chosen: Tensor
    """The reference's log-probability of the chosen answer (zeros for reference-free losses)."""
    ref_rejected: Tensor
    """The reference's log-probability of the rejected answer."""
    chosen_length: Tensor
    """Trained tokens of the chosen answer."""
    rejected_length: Tensor
    """Trained tokens of the rejected answer."""

    @property
    def a(self) -> Tensor:
        """Log-ratio of the chosen answer, [B]."""
        return self.chosen - self.ref_chosen

    @property
    def c(self) -> Tensor:
        """Log-ratio of the rejected answer, [B]."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """D = a - c, [B]."""
        return self.a - self.c

    @property
    def chosen_mean(self) -> Tensor:
        """log pi(chosen) per token, [B]."""
        return self.chosen / self.chosen_length

    @property
    def rejected_mean(self) -> Tensor:
        """log pi(rejected) per token, [B]."""
        return self.rejected / self.rejected_length


@dataclass(frozen=True)
class PairedOptions:
    """The scalars of the paired losses; each loss reads those of its paper."""

    beta: float = 0.1
    """Strength of the pull to the reference (SimPO: reward scale; ORPO: weight of the odds-ratio term)."""
    label_smoothing: float = 0.0
    """Probability e that a preference label is flipped."""
    simpo_gamma: float = 0.5
    """SimPO's target reward margin."""


def sigmoid(p: Pairs, o: PairedOptions) -> Tensor:
    """-(1-e) ls(beta D) - e ls(-beta D): DPO, Rafailov et al. 2023, eq. 7 (arXiv 2305.18290); e > 0: cDPO, eq. 3."""
    x, e = o.beta * p.margin, o.label_smoothing
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def robust(p: Pairs, o: PairedOptions) -> Tensor:
    """[-(1-e) ls(beta D) + e ls(-beta D)] / (1-2e): robust DPO, Chowdhury et al. 2024, eq. 11 (arXiv 2403.00409)."""
    x, e = o.beta * p.margin, o.label_smoothing
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def exo_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """s(beta D) [ls(beta D) - ln(1-e)] + s(-beta D) [ls(-beta D) - ln e], e > 0: EXO, Ji et al. (arXiv 2402.00856)."""
    x, e = o.beta * p.margin, torch.tensor(o.label_smoothing, dtype=torch.float64)
    keep, flip = torch.log1p(-e).item(), torch.log(e).item()
    return x.sigmoid() * (logsigmoid(x) - keep) + (-x).sigmoid() * (logsigmoid(-x) - flip)


def hinge(p: Pairs, o: PairedOptions) -> Tensor:
    """max(0, 1 - beta D): SLiC, Zhao et al. 2023 (arXiv 2305.10425), on log-ratios as in RSO (arXiv 2309.06657)."""
    return torch.relu(1 - o.beta * p.margin)


def ipo(p: Pairs, o: PairedOptions) -> Tensor:
    """(a/|chosen| - c/|rejected| - 1/(2 beta))^2: IPO, Azar et al. 2023, eq. 17 (arXiv 2310.12036), length-averaged."""
    return (p.a / p.chosen_length - p.c / p.rejected_length - 1 / (2 * o.beta)) ** 2


def ipo_sum(p: Pairs, o: PairedOptions) -> Tensor:
    """(D - 1/(2 beta))^2: IPO as its paper writes it, eq. 17 (arXiv 2310.12036)."""
    return (p.margin - 1 / (2 * o.beta)) ** 2


def nca_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta a) - ls(-beta a)/2 - ls(-beta c)/2: NCA, Chen et al. 2024 (arXiv 2402.05369)."""
    a, c = o.beta * p.a, o.beta * p.c
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-c)


def bco_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta a) - ls(-beta c): BCO on pairs without a reward shift, Jung et al. 2024 (arXiv 2404.04656)."""
    return -logsigmoid(o.beta * p.a) - logsigmoid(-o.beta * p.c)


def sppo_hard(p: Pairs, o: PairedOptions) -> Tensor:
    """(a - 1/(2 beta))^2 + (c + 1/(2 beta))^2: SPPO with hard labels, Wu et al. 2024, eq. 4.7 (arXiv 2405.00675)."""
    half = 0.5 / o.beta
    return (p.a - half) ** 2 + (p.c + half) ** 2


def apo_zero(p: Pairs, o: PairedOptions) -> Tensor:
    """1 - s(beta a) + s(beta c): APO-zero, D'Oosterlinck et al. 2024 (arXiv 2408.06266)."""
    return 1 - (o.beta * p.a).sigmoid() + (o.beta * p.c).sigmoid()


def apo_down(p: Pairs, o: PairedOptions) -> Tensor:
    """s(beta a) + 1 - s(beta D): APO-down, D'Oosterlinck et al. 2024 (arXiv 2408.06266)."""
    return (o.beta * p.a).sigmoid() + 1 - (o.beta * p.margin).sigmoid()


def sft(p: Pairs, o: PairedOptions) -> Tensor:
    """-log pi(chosen) / |chosen|: the chosen answer's NLL per token, as mixed in by MPO (arXiv 2411.10442)."""
    return -p.chosen_mean


def simpo(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta (mean chosen - mean rejected) - gamma): SimPO, Meng et al. 2024, eq. 6 (arXiv 2405.14734)."""
    return -logsigmoid(o.beta * (p.chosen_mean - p.rejected_mean) - o.simpo_gamma)


def orpo(p: Pairs, o: PairedOptions) -> Tensor:
    """-mean chosen - beta ls(log odds ratio): ORPO, Hong et al. 2024, eq. 6 and 7 (arXiv 2403.07691)."""
    log_odds = _log_odds(p.chosen_mean) - _log_odds(p.rejected_mean)
    return -p.chosen_mean - o.beta * logsigmoid(log_odds)


def _log_odds(mean_logps: Tensor) -> Tensor:
    """log(P / (1 - P)) of per-token mean log-probabilities, kept finite where P rounds to 1."""
    logps = mean_logps.clamp(max=-1e-6)
    return logps - torch.log(-torch.expm1(logps))


PAIRED: dict[str, Callable[[Pairs, PairedOptions], Tensor]] = {
    "sigmoid": sigmoid, "ipo": ipo, "ipo_sum": ipo_sum, "hinge": hinge, "robust": robust, "exo_pair": exo_pair,
    "nca_pair": nca_pair, "bco_pair": bco_pair, "sppo_hard": sppo_hard, "apo_zero": apo_zero, "apo_down": apo_down,
    "sft": sft, "simpo": simpo, "orpo": orpo,
}  # fmt: skip
REFERENCE_FREE = {"simpo", "orpo", "sft"}


def kto(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """1 - s(beta (r - KL)) if desirable, 1 - s(beta (KL - r)) if not: KTO, Ethayarajh et al. eq. 8 (arXiv 2402.01306).

    log_ratio [B], label [B] bool, shift: the clamped KL estimate, a scalar; returns [B], weights not applied.
    """
    x = beta * (log_ratio - shift)
    return 1 - torch.where(label, x, -x).sigmoid()


def apo_zero_unpaired(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """KTO with KL = 0: APO-zero on single answers (arXiv 2408.06266). Shapes as in `kto`."""
    return kto(log_ratio, label, torch.zeros_like(shift), beta)


def bco(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """-ls(beta r - delta) if desirable, -ls(-(beta r - delta)) if not: BCO, Jung et al. 2024 (arXiv 2404.04656).

    `shift` is delta, the running mean of the rewards of both classes. Shapes as in `kto`.
    """
    x = beta * log_ratio - shift
    return -logsigmoid(torch.where(label, x, -x))


UNPAIRED: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "kto": kto, "apo_zero_unpaired": apo_zero_unpaired, "bco": bco,
}  # fmt: skip
