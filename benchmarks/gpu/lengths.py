"""Part g: how time and memory grow with the length of a row, with the 0.6B shape in bf16.

Forward and backward of one row, half of it the prompt, with activation checkpointing. The trainers of this part are in
`training.long_rows`.
"""

from collections.abc import Iterator
from functools import partial

import torch

from ..setting import random_batch
from .correctness import GRADIENTS, VALUES
from .models import build, first_gradient, score_and_backward
from .settings import Settings, measure_call, relative_error, within
from .supervisor import Case, Record

LENGTHS = (1024, 8192, 16_384, 32_768, 65_536)


def cases(settings: Settings) -> list[Case]:
    """One process for all lengths, the shortest first."""
    return [Case("lengths", partial(measure, settings))]


def measure(settings: Settings) -> Iterator[Record]:
    """Yield milliseconds and memory of each length.

    The shortest row is compared with a pass without checkpointing. The others must give finite numbers.
    """
    model = build(settings)
    for number, length in enumerate(settings.pick(LENGTHS, (32, 64))):
        batch = random_batch([[length // 2, length // 2]], settings.vocabulary, "shared", settings.device, 1)
        run = partial(score_and_backward, model, batch)
        if number == 0:
            expected = run(), first_gradient(model).clone()
            model.gradient_checkpointing_enable()
            model.train()
        found = run(), first_gradient(model)
        record: Record = {"length": length, "right": all(bool(each.isfinite().all()) for each in found)}
        if number == 0:
            values, gradient = (relative_error(*pair) for pair in zip(found, expected, strict=True))
            record |= {"values": values, "gradient": gradient}
            record["right"] = within([values], VALUES[torch.bfloat16]) and within([gradient], GRADIENTS[torch.bfloat16])
        if record["right"]:
            cost = measure_call(settings.device, run, 1, warm_up=False)
            record |= {"ms": 1e3 * cost.seconds, "tokens_per_second": length / cost.seconds}
            record |= {"peak_gib": cost.peak_gib, "added_gib": cost.added_gib}
        yield record
