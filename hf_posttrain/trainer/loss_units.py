"""What a loss is averaged over: the units of a micro-batch, each counted once or not at all.

    Losses     what a method says of a micro-batch: a loss for each unit, a token or an example
    weigh      which rows count: not those that only fill up the last batch of a pass over the data
    weights    the same for each unit
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler
from torch import Tensor


@dataclass
class Losses:
    """What a method says of one micro-batch."""

    values: Tensor
    """[units] loss of each token or example, not reduced."""
    weights: Tensor
    """[units] 1, or 0 for what must not count: `weights`."""
    metrics: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """name -> (values, weights; None: those of the loss): averaged exactly, over ranks and the logging interval."""
    router_logits: Any = None
    """Router logits of each layer of a mixture of experts whose auxiliary loss is on."""
    predictions: Tensor | None = None
    """What `compute_metrics` gets as predictions, [B, ...]."""
    labels: Tensor | None = None
    """What it gets as label_ids, [B, ...]."""


def weigh(batch: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Add `row_weights` [rows], just after the batch was drawn: 0 for rows that only fill up the last batch of a pass
    over the data (accelerate repeats the first ones there, `even_batches`), so that no row counts twice.

    What `sequence.split` cut was weighed before. The length of a stream is not known: its rows all count.
    """
    if "row_weights" in batch:
        return batch
    drawn, size = accelerator.gradient_state, len(batch["index"])
    last = _remainder(drawn) if drawn.end_of_dataloader else 0
    place = torch.arange(size) + size * accelerator.process_index
    return batch | {"row_weights": (place < (last if last > 0 else size * accelerator.num_processes)).float()}


def _remainder(drawn: Any) -> int:
    """Rows in the last batch of a pass over the data, over all ranks; 0 or less where it is full or not known.

    drawn: accelerate's GradientState, which does not know it in the epoch that a resumed run begins in.
    """
    sampler = getattr(drawn.active_dataloader, "batch_sampler", None)
    if drawn.remainder >= 0 or not isinstance(sampler, SkipBatchSampler):
        return drawn.remainder
    shard = sampler.batch_sampler
    if shard.drop_last or getattr(shard, "batch_size", None) is None:
        return 0
    return len(drawn.active_dataloader.dataset) % (shard.batch_size * getattr(shard, "num_processes", 1))


def row_weights(batch: dict[str, Any]) -> Tensor:
    """1 or 0 for each row: [rows], on the batch's device; 1 for a batch that was not weighed."""
    given = batch.get("row_weights")
    return (torch.ones(len(batch["index"])) if given is None else given).to(batch["index"].device)


def weights(batch: dict[str, Any], unit: str) -> Tensor:
    """The same for each unit, "tokens" or "examples": [units]."""
    rows = row_weights(batch)
    return rows if unit == "examples" else rows[batch["row"]][batch["owner"]]
