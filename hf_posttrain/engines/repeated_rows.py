"""Which rows of a batch count: Accelerate repeats the first rows of a data set to fill up its last batch."""

from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler


def weigh_rows(batch: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Add `row_weights` [rows], just after the batch was drawn: 0 for rows that only fill up the last batch of a pass
    over the data, so that no row counts twice.

    What `sequence.split` cut was weighed before. The length of a stream is not known: its rows all count.
    """
    if "row_weights" in batch:
        return batch
    # rows in the last batch, over all ranks; 0 or less where it is full or not known
    drawn, size = accelerator.gradient_state, len(batch["index"])
    last = drawn.remainder if drawn.end_of_dataloader else 0
    sampler = getattr(drawn.active_dataloader, "batch_sampler", None)
    if drawn.end_of_dataloader and last < 0 and isinstance(sampler, SkipBatchSampler):
        # not known in the epoch that a resumed run begins in: the rank's own sampler tells the size of a global batch
        shard = sampler.batch_sampler
        if not shard.drop_last and getattr(shard, "batch_size", None) is not None:
            last = len(drawn.active_dataloader.dataset) % (shard.batch_size * getattr(shard, "num_processes", 1))
    # ranks take the rows of a global batch in their order: those from `last` on are repeated
    place = torch.arange(size) + size * accelerator.process_index
    return batch | {"row_weights": (place < (last if last > 0 else size * accelerator.num_processes)).float()}
