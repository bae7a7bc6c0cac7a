"""Losses of preference pairs: DPO and its family. Every function returns one value per pair, without reduction.

Notation: a = log pi(chosen) - log ref(chosen), c = the same for the rejected answer, D = a - c, all summed over the
tokens of the answer; s = sigmoid, ls = log sigmoid. B: number of pairs.

PAIRED maps the names in recipes to the losses. A new loss is a function and a line in that table, followed by the other
steps in docs/architecture.md, "Add a loss".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .names import SIMPO_GAMMA


@dataclass(frozen=True)
class Pairs:
    """B preference pairs; column 0 is the chosen answer, column 1 the rejected one."""

    logps: Tensor  # [B, 2] log pi(answer | prompt), summed over its trained tokens
    ref_logps: Tensor  # [B, 2] log ref(answer | prompt); zeros for reference-free losses
    lengths: Tensor  # [B, 2] trained tokens

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios a and c to the reference, [B] each."""
        a, c = (self.logps - self.ref_logps).unbind(1)
        return a, c

    @property
    def margin(self) -> Tensor:
        """Margin D = a - c of the log-ratios, [B]."""
        a, c = self.log_ratios
        return a - c

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Log pi per token of the chosen and of the rejected answer, [B] each."""
        chosen, rejected = (self.logps / self.lengths).unbind(1)
        return chosen, rejected


@dataclass(frozen=True)
class PairedOptions:
    """Scalars of the paired losses. Each loss reads the scalars that its paper defines."""

    beta: float = 0.1  # regularization strength (SimPO: reward scale; ORPO: weight of the odds ratio)
    label_smoothing: float = 0.0  # probability e that a preference label is flipped
    simpo_gamma: float = SIMPO_GAMMA  # SimPO's target reward margin


def sigmoid(p: Pairs, o: PairedOptions) -> Tensor:
    """-(1-e) ls(beta D) - e ls(-beta D): DPO, Rafailov et al. 2023, eq. 7 (arXiv 2305.18290); e > 0: cDPO, eq. 3."""
    x = o.beta * p.margin
    e = o.label_smoothing
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def robust(p: Pairs, o: PairedOptions) -> Tensor:
    """[-(1-e) ls(beta D) + e ls(-beta D)] / (1-2e): robust DPO, Chowdhury et al. 2024, eq. 11 (arXiv 2403.00409)."""
    x = o.beta * p.margin
    e = o.label_smoothing
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def exo_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """s(beta D) [ls(beta D) - ln(1-e)] + s(-beta D) [ls(-beta D) - ln e], e > 0: EXO, Ji et al. (arXiv 2402.00856)."""
    x = o.beta * p.margin
    e = torch.tensor(o.label_smoothing, dtype=torch.float64)
    keep = torch.log1p(-e).item()
    flip = torch.log(e).item()
    return x.sigmoid() * (logsigmoid(x) - keep) + (-x).sigmoid() * (logsigmoid(-x) - flip)


def hinge(p: Pairs, o: PairedOptions) -> Tensor:
    """max(0, 1 - beta D): SLiC, Zhao et al. 2023 (arXiv 2305.10425), on log-ratios as in RSO (arXiv 2309.06657)."""
    return torch.relu(1 - o.beta * p.margin)


def ipo(p: Pairs, o: PairedOptions) -> Tensor:
    """(a/|chosen| - c/|rejected| - 1/(2 beta))^2: IPO, Azar et al. 2023, eq. 17 (arXiv 2310.12036), length-averaged."""
    chosen, rejected = ((p.logps - p.ref_logps) / p.lengths).unbind(1)
    return (chosen - rejected - 1 / (2 * o.beta)) ** 2


def ipo_sum(p: Pairs, o: PairedOptions) -> Tensor:
    """(D - 1/(2 beta))^2: IPO as defined in its paper, eq. 17 (arXiv 2310.12036)."""
    return (p.margin - 1 / (2 * o.beta)) ** 2


def nca_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta a) - ls(-beta a)/2 - ls(-beta c)/2: NCA, Chen et al. 2024 (arXiv 2402.05369)."""
    a, c = (o.beta * ratio for ratio in p.log_ratios)
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-c)


def bco_pair(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta a) - ls(-beta c): BCO on pairs without a reward shift, Jung et al. 2024 (arXiv 2404.04656)."""
    a, c = p.log_ratios
    return -logsigmoid(o.beta * a) - logsigmoid(-o.beta * c)


def sppo_hard(p: Pairs, o: PairedOptions) -> Tensor:
    """(a - 1/(2 beta))^2 + (c + 1/(2 beta))^2: SPPO with hard labels, Wu et al. 2024, eq. 4.7 (arXiv 2405.00675)."""
    a, c = p.log_ratios
    half = 0.5 / o.beta
    return (a - half) ** 2 + (c + half) ** 2


def apo_zero(p: Pairs, o: PairedOptions) -> Tensor:
    """1 - s(beta a) + s(beta c): APO-zero, D'Oosterlinck et al. 2024 (arXiv 2408.06266)."""
    a, c = p.log_ratios
    return 1 - (o.beta * a).sigmoid() + (o.beta * c).sigmoid()


def apo_down(p: Pairs, o: PairedOptions) -> Tensor:
    """s(beta a) + 1 - s(beta D): APO-down, D'Oosterlinck et al. 2024 (arXiv 2408.06266)."""
    a, c = p.log_ratios
    return (o.beta * a).sigmoid() + 1 - (o.beta * (a - c)).sigmoid()


def sft(p: Pairs, o: PairedOptions) -> Tensor:
    """-log pi(chosen) / |chosen|: the chosen answer's NLL per token, as mixed in by MPO (arXiv 2411.10442)."""
    chosen, _ = p.means
    return -chosen


def simpo(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta (mean chosen - mean rejected) - gamma): SimPO, Meng et al. 2024, eq. 6 (arXiv 2405.14734)."""
    chosen, rejected = p.means
    return -logsigmoid(o.beta * (chosen - rejected) - o.simpo_gamma)


def orpo(p: Pairs, o: PairedOptions) -> Tensor:
    """-mean chosen - beta ls(log odds ratio): ORPO, Hong et al. 2024, eq. 6 and 7 (arXiv 2403.07691)."""
    chosen, rejected = p.means
    return -chosen - o.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean_logps: Tensor) -> Tensor:
    """Return log(P / (1 - P)) of mean log-probabilities per token, finite where P rounds to 1."""
    logps = mean_logps.clamp(max=-1e-6)
    return logps - torch.log(-torch.expm1(logps))


PAIRED: dict[str, Callable[[Pairs, PairedOptions], Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "ipo_sum": ipo_sum,
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "sft": sft,
    "simpo": simpo,
    "orpo": orpo,
}
