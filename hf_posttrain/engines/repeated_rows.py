"""Which rows of a batch count: Accelerate repeats the first rows of a data set to fill up its last batch."""

from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler


def weigh_rows(batch: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Add `row_weights` [rows], just after the batch was drawn: 0 for rows that only fill up the last batch of a pass
    over the data (accelerate repeats the first ones there, `even_batches`), so that no row counts twice.

    What `sequence.split` cut was weighed before. The length of a stream is not known: its rows all count.
    """
    if "row_weights" in batch:
        return batch
    # ranks take the rows of a global batch in their order: those from `last` on are repeated
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
    # around the sampler of a resumed epoch: the rank's own one tells the size of a global batch
    shard = sampler.batch_sampler
    if shard.drop_last or getattr(shard, "batch_size", None) is None:
        return 0
    return len(drawn.active_dataloader.dataset) % (shard.batch_size * getattr(shard, "num_processes", 1))
