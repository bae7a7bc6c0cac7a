"""Losses of single labeled answers, such as KTO. Every function returns one value per answer, without reduction.

r = log_ratio [B] = log pi(answer) - log ref(answer), summed over its tokens. label [B] bool is true if the answer is
desirable. shift is a scalar: for kto the estimate of the KL, which is subtracted from r; for bco the delta, which is
subtracted from the reward beta r. s = sigmoid, ls = log sigmoid. UNPAIRED maps the names in recipes to the losses.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def kto(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """1 - s(beta (r - KL)) if desirable, 1 - s(beta (KL - r)) if not: KTO, Ethayarajh et al. eq. 8 (arXiv 2402.01306).

    `shift` is the clamped KL estimate. Returns [B], without the weights of the two classes.
    """
    x = beta * (log_ratio - shift)
    return 1 - torch.where(label, x, -x).sigmoid()


def apo_zero_unpaired(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """KTO with KL = 0: APO-zero on single answers (arXiv 2408.06266). Shapes as in `kto`."""
    return kto(log_ratio, label, torch.zeros_like(shift), beta)


def bco(log_ratio: Tensor, label: Tensor, shift: Tensor, beta: float) -> Tensor:
    """-ls(beta r - delta) if desirable, -ls(-(beta r - delta)) if not: BCO, Jung et al. 2024 (arXiv 2404.04656).

    `shift` is delta, the running mean of the rewards of all answers, of either class. Shapes as in `kto`.
    """
    x = beta * log_ratio - shift
    return -logsigmoid(torch.where(label, x, -x))


UNPAIRED: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
    "bco": bco,
}
