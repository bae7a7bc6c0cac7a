"""Part g: how time and memory grow with the length of a row, with the 0.6B shape in bf16.

Forward and backward of one row, half of it the prompt, with activation checkpointing. The trainers of this part are in
`training.long_rows`.
"""

from collections.abc import Iterator
from functools import partial

import torch

from hf_posttrain.scoring import attention

from ..setting import random_batch
from .correctness import TOLERANCE, build, first_gradient, score_and_backward
from .settings import Settings, median_seconds, peak_gib, relative_error
from .supervisor import Case, Record

LENGTHS = (1024, 4096, 8192, 16_384, 32_768, 65_536)


def cases(settings: Settings) -> list[Case]:
    """One process for all lengths, the shortest first."""
    return [Case("lengths", partial(measure, settings))]


def measure(settings: Settings) -> Iterator[Record]:
    """Yield seconds and memory of each length. The shortest row is compared with a pass without checkpointing."""
    model = build(settings, "sdpa")
    attention.choose_attention(model, torch.device(settings.device))
    lengths = settings.pick(LENGTHS, (32, 64))
    for number, length in enumerate(lengths):
        batch = random_batch([[length // 2, length // 2]], settings.vocabulary, "shared", settings.device, 1)
        record: Record = {"length": length}
        if number == 0:
            expected = score_and_backward(model, batch), first_gradient(model).clone()
            model.gradient_checkpointing_enable()
            model.train()
            found = score_and_backward(model, batch), first_gradient(model)
            error = max(relative_error(*pair) for pair in zip(found, expected, strict=True))
            record |= {"gradient_error": error, "right": error <= TOLERANCE[torch.bfloat16]}
            if not record["right"]:
                yield record
                return
        run = partial(score_and_backward, model, batch)
        record["peak_gib"], record["added_gib"] = peak_gib(settings.device, run)
        seconds = median_seconds(settings.device, run, 1)
        yield record | {"ms": 1e3 * seconds, "tokens_per_second": length / seconds}
