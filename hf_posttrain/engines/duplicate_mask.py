"""Mask of the rows that Accelerate repeats to complete the last batch of a pass, which must not count twice."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import GradientState

from ..batching.micro_batch import Batch


def mask_duplicate_rows(batch: Batch, accelerator: Accelerator) -> Batch:
    """Add `row_weights` [rows] to a batch, with 0 for the rows that Accelerate repeats, and 1 for all others.

    Accelerate repeats the first rows of a pass to complete its last batch for all ranks. The length of a stream is
    unknown, so all of its rows count.

    Args:
        batch: The batch, directly after the loader returned it. Batches that `sequence.shard_batch` has split have
            weights already, and are returned unchanged.
        accelerator: The accelerator of the run.
    """
    if batch.row_weights is not None:
        return batch
    state = accelerator.gradient_state
    size = len(batch.index)
    ranks = accelerator.num_processes
    unique_rows = 0  # in a last batch that was completed, over all ranks
    if ranks > 1 and state.end_of_dataloader:
        unique_rows = _rows_per_pass(state) % (size * ranks)
    # ranks take the rows of a global batch in order, and those from `unique_rows` on are repeated
    positions = torch.arange(size, device=batch.index.device) + size * accelerator.process_index
    return batch.replace(row_weights=(positions < (unique_rows or size * ranks)).float())


def _rows_per_pass(state: GradientState) -> int:
    """Return the number of rows in a pass of the active loader's sampler, which may differ from the data set's.

    It is 0 if no batch is completed, or if the number is unknown.
    """
    sampler: Any = getattr(state.active_dataloader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # wrappers for the share of a rank, or to skip batches of a resumed run
        sampler = sampler.batch_sampler
    if getattr(sampler, "drop_last", False):
        return 0
    try:
        return len(sampler.sampler)
    except (AttributeError, TypeError):  # a user's batch sampler, or a stream
        return max(0, state.remainder)
