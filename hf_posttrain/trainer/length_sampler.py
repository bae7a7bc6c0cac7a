"""Batches of rows of similar lengths, in an order that is reproducible."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler


class _SeededLengthSampler(LengthGroupedSampler):
    """Length-grouped sampler whose order is the same on all ranks, after a resume, and for any number of processes.

    The sampler of HF uses the global random generator, so that its order differs between ranks and after a resume. It
    also groups the rows that one process takes in a step, so that its order depends on the number of processes.
    """

    def __init__(self, sampler: LengthGroupedSampler, rows_per_step: int, seed: int) -> None:
        self.__dict__ |= vars(sampler)
        self.batch_size = rows_per_step
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order depends on. The data loader calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def seeded_sampler(sampler: Sampler[int] | None, args: TrainingArguments, rows_per_step: int) -> Sampler[int] | None:
    """Return a length-grouped sampler with a reproducible order, and any other sampler unchanged.

    Args:
        sampler: The sampler that Trainer made.
        args: The Config. The order depends on `data_seed`, or on `seed` without it, and on the epoch.
        rows_per_step: Number of rows of an optimizer step on all ranks, which the order depends on too.
    """
    if not isinstance(sampler, LengthGroupedSampler):
        return sampler
    return _SeededLengthSampler(sampler, rows_per_step, args.seed if args.data_seed is None else args.data_seed)
