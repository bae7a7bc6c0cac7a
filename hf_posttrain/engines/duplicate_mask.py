"""Which of the rows that a loader has drawn count: all but those that Accelerate repeats."""

from typing import Any

import torch
from accelerate import Accelerator

from ..batching.micro_batch import Batch


def mask_duplicate_rows(batch: Batch, accelerator: Accelerator) -> Batch:
    """Add `row_weights` [rows], just after the batch was drawn, so that no row counts twice: 0 for the first rows of a
    pass, which Accelerate repeats to fill up its last batch for all ranks.

    What `sequence.shard_loader` cut was weighed before. The length of a stream is not known: its rows all count.
    """
    if batch.row_weights is not None:
        return batch
    drawn = accelerator.gradient_state
    size = len(batch.index)
    ranks = accelerator.num_processes
    last = 0  # rows in a last batch that was filled up, over all ranks
    if ranks > 1 and drawn.end_of_dataloader:
        last = _rows_of_pass(drawn) % (size * ranks)
    # ranks take the rows of a global batch in their order: those from `last` on are repeated
    place = torch.arange(size, device=batch.index.device) + size * accelerator.process_index
    return batch.replace(row_weights=(place < (last or size * ranks)).float())


def _rows_of_pass(drawn: Any) -> int:
    """How many rows the sampler of the active loader draws in a pass, which need not be those of the data; 0: no batch
    is filled up, or the number is not known.
    """
    sampler: Any = getattr(drawn.active_dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # around the loader's own: a rank's share, what a resumed run skips
        sampler = sampler.batch_sampler
    if getattr(sampler, "drop_last", False):
        return 0
    try:
        return len(sampler.sampler)
    except (AttributeError, TypeError):  # a batch sampler of the user's, a stream
        return max(0, drawn.remainder)
