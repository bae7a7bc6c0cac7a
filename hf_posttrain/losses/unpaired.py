"""Losses of single labelled answers, such as KTO. Every function returns one value per answer; nothing is reduced.

log_ratio [B] = log pi(answer) - log ref(answer), summed over its tokens; label [B] bool, is the answer desirable?
shift is a scalar: what the log-ratio is compared with. s = sigmoid, ls = log sigmoid. UNPAIRED names the losses as
recipes do.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


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
    "kto": kto,
    "apo_zero_unpaired": apo_zero_unpaired,
    "bco": bco,
}
