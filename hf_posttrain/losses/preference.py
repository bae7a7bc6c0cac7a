"""Losses of preference pairs: DPO and its family. Every function returns one value per pair, without reduction.

Notation: a = log pi(chosen) - log ref(chosen), c = the same for the rejected answer, summed over the tokens of the
answer; D = f'(exp a) - f'(exp c), which is a - c for the reverse KL; s = sigmoid, ls = log sigmoid. B: number of pairs.

PAIRED maps the names in recipes to the losses. A new loss is a function and a line in that table, followed by the other
steps in docs/architecture.md, "Add a loss".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .names import DISCOPOP_TAU, SIMPO_GAMMA

# ---- f-divergences


def reverse_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """f'(t) = log t, up to a constant: the divergence of DPO."""
    return log_ratio


def forward_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """f'(t) = 1 - 1/t, up to a constant."""
    return -torch.expm1(-log_ratio)


def js_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """f'(t) = log(2t / (1 + t))."""
    return math.log(2) + logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """f'(t) = (t^(alpha - 1) - 1) / (alpha - 1), with the limit log t at alpha = 1."""
    if abs(alpha - 1) < 1e-6:
        return log_ratio
    # the exponent is limited, so that the result is finite in float32
    return torch.expm1(((alpha - 1) * log_ratio).clamp(max=80.0)) / (alpha - 1)


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
"""Derivatives f'(t) of f-divergences at t = exp(log_ratio), Wang et al. 2023, table 1 (arXiv 2309.16240)."""


# ---- pairs


@dataclass(frozen=True)
class Pairs:
    """B preference pairs; column 0 is the chosen answer, column 1 the rejected one."""

    logps: Tensor  # [B, 2] log pi(answer | prompt), summed over its trained tokens
    ref_logps: Tensor  # [B, 2] log ref(answer | prompt); zeros for reference-free losses
    lengths: Tensor  # [B, 2] trained tokens
    f_divergence: str = "reverse_kl"  # name in F_DIVERGENCES
    alpha: float = 0.5  # of alpha_divergence

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios a and c to the reference, [B] each."""
        a, c = (self.logps - self.ref_logps).unbind(1)
        return a, c

    @property
    def scores(self) -> Tensor:
        """Scores f'(exp a) and f'(exp c), [B, 2]; with the reverse KL they are the log-ratios."""
        return F_DIVERGENCES[self.f_divergence](self.logps - self.ref_logps, self.alpha)

    @property
    def margin(self) -> Tensor:
        """Margin D of the scores, [B]."""
        chosen, rejected = self.scores.unbind(1)
        return chosen - rejected

    @property
    def mean_margin(self) -> Tensor:
        """Margin of the scores per token, [B]."""
        chosen, rejected = (self.scores / self.lengths).unbind(1)
        return chosen - rejected

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
    discopop_tau: float = DISCOPOP_TAU  # DiscoPOP's temperature


def sigmoid(p: Pairs, o: PairedOptions) -> Tensor:
    """-(1-e) ls(beta D) - e ls(-beta D): DPO, Rafailov et al. 2023, eq. 7 (arXiv 2305.18290); e > 0: cDPO, eq. 3."""
    x = o.beta * p.margin
    e = o.label_smoothing
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def sigmoid_norm(p: Pairs, o: PairedOptions) -> Tensor:
    """-ls(beta (f'(exp a)/|chosen| - f'(exp c)/|rejected|)): DPO per token, as in Tulu 3, eq. 6 (arXiv 2411.15124)."""
    return -logsigmoid(o.beta * p.mean_margin)


def discopop(p: Pairs, o: PairedOptions) -> Tensor:
    """-(1-m) ls(x) + m exp(-x), x = beta D, m = s(x / tau): DiscoPOP, Lu et al. 2024, eq. 5 (arXiv 2406.08414)."""
    x = o.beta * p.margin
    modulated = x / o.discopop_tau
    # one exponential, because exp(-x) alone overflows where m is 0
    return -(-modulated).sigmoid() * logsigmoid(x) + torch.exp(logsigmoid(modulated) - x)


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
    return (p.mean_margin - 1 / (2 * o.beta)) ** 2


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
    "sigmoid_norm": sigmoid_norm,
    "discopop": discopop,
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
