"""Part c: the LM head and its cross-entropy alone, forward and backward, against full logits, TRL and Liger.

8,192 tokens in bf16. Each implementation's loss and gradients are compared with those of float32 before it is timed.
`products` are the three matrix products that any of them needs at least. `ours, 4096 rows` has larger tiles: each tile
reads and writes the weight's gradient in float32, which is 2.3 GiB at hidden size 4,096.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from hf_posttrain.scoring import head

from .correctness import patched_head
from .models import head_inputs
from .settings import Settings, measure_call, relative_error, within
from .supervisor import Case, Record

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], targets [N]) -> mean cross-entropy."""
HIDDEN_SIZES = (4096, 1024)
TRL_CHUNK = 32_768
"""Columns of a tile in TRL's trainers."""
TOLERANCE = 2e-2
"""Relative error of the loss and of both gradients in bf16, against float32."""


def cases(settings: Settings) -> list[Case]:
    """Every implementation at every hidden size. Published figures are for 4,096, which comes first."""
    names = ["products", "ours", "full logits"]
    names += ["TRL"] if "trl" in settings.installed else []
    names += ["Liger"] if settings.liger else []
    names += ["ours, 4096 rows"]
    sizes = settings.pick(HIDDEN_SIZES, (64, 32))
    return [Case(f"{name} H={size}", partial(measure, settings, name, size), 20) for size in sizes for name in names]


def measure(settings: Settings, name: str, size: int) -> Iterator[Record]:
    """Yield milliseconds and memory of one implementation at one hidden size."""
    tokens = settings.pick(8192, 64)
    hidden, weight, targets = head_inputs(settings, tokens, size, torch.bfloat16)
    record: Record = {"by": name, "hidden_size": size, "vocabulary": settings.vocabulary, "tokens": tokens}
    run: Callable[[], tuple[Tensor, ...]] = partial(products, hidden, weight)
    if name != "products":
        run = partial(with_gradients, LOSSES[name], hidden, weight, targets)
        exact_hidden, exact_weight = (each.detach().float().requires_grad_() for each in (hidden, weight))
        expected = with_gradients(full_logits, exact_hidden, exact_weight, targets)
        errors = [relative_error(*pair) for pair in zip(run(), expected, strict=True)]
        del exact_hidden, exact_weight, expected
        record |= {"loss_error": errors[0], "gradient_error": max(errors[1:]), "right": within(errors, TOLERANCE)}
        if not record["right"]:
            yield record
            return
    cost = measure_call(settings.device, run, settings.pick(7, 2))
    yield record | {"ms": 1e3 * cost.seconds, "peak_gib": cost.peak_gib, "added_gib": cost.added_gib}


def with_gradients(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and its gradients with respect to the hidden states and the weight."""
    value = loss(hidden, weight, targets)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def products(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, and the two products with a matrix of their size that the gradients are."""
    with torch.no_grad():
        logits = hidden @ weight.T
        return logits, logits @ weight, logits.T @ hidden


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy as transformers computes it: from all logits, in float32."""
    return cross_entropy(linear(hidden, weight).float(), targets)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of our tiled head, as SFT calls it."""
    weights = torch.full((len(hidden),), 1 / len(hidden), device=hidden.device)
    values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, head.LogProb(targets), weights)
    return -(values * weights).sum()


def ours_in_large_tiles(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of our head with tiles of 4,096 tokens."""
    with patched_head("kernels", rows=4096):
        return ours(hidden, weight, targets)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of TRL's fused head with the tiles of its trainers, without optional outputs."""
    from trl.kernels import ChunkedLogProbFunction

    return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ())[0].mean()


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return Liger's fused linear cross-entropy, with its defaults."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)


LOSSES: dict[str, Loss] = {
    "ours": ours,
    "ours, 4096 rows": ours_in_large_tiles,
    "full logits": full_logits,
    "TRL": trl,
    "Liger": liger,
}
