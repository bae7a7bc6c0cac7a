"""The loss by the values of the column that `log_loss_by` names."""

from dataclasses import replace

import torch

from ..batching.micro_batch import MicroBatch
from .interface import TrainerInterface
from .loss_output import Losses


def with_group_metrics(trainer: TrainerInterface, losses: Losses, batch: MicroBatch) -> Losses:
    """Return the losses with a metric loss/VALUE for each value.

    Args:
        trainer: The trainer, which knows the values in all data.
        losses: Losses of the micro-batch.
        batch: The micro-batch, with `groups`.
    """
    assert batch.groups is not None
    values = batch.groups.items
    numbers = {group: number for number, group in enumerate(trainer.groups)}
    of_branches = torch.tensor([numbers.get(value, -1) for value in values], device=losses.values.device)
    by_example = trainer.method.unit == "examples"
    of_units = of_branches[:: len(values) // len(losses.values)] if by_example else of_branches[batch.owner]
    metrics = dict(losses.metrics)
    for group, number in numbers.items():
        metrics[f"loss/{group}"] = losses.values.detach(), losses.weights * (of_units == number)
    return replace(losses, metrics=metrics)
