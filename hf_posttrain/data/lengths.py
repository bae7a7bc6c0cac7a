"""Prepared rows by their lengths: batches of like lengths, the longest rows, those too long for the model."""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..capabilities import Feature, conflict, option_features
from ..errors import InputError, shown
from .dataset_type import AnyDataset, AnyDatasets
from .packing import example_lengths, lengths_of

logger = logging.getLogger(__package__)
STREAM_HEAD = 1000
"""Rows of a stream that are read before training."""


class _ByLength(LengthGroupedSampler):
    """HF's sampler draws from the global generator, which gives another order on each rank and after a resume; and
    groups the rows that one process takes in a step, which gives another order where there are more processes.
    """

    def __init__(self, sampler: LengthGroupedSampler, rows_per_step: int, seed: int):
        self.__dict__ |= vars(sampler)
        self.batch_size = rows_per_step
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def seeded_sampler(sampler: Any, args: TrainingArguments, rows_per_step: int) -> Any:
    """A sampler by length whose order depends on (data_seed or seed, epoch) and the rows of an optimizer step on all
    ranks; any other as it is.
    """
    if not isinstance(sampler, LengthGroupedSampler):
        return sampler
    return _ByLength(sampler, rows_per_step, args.seed if args.data_seed is None else args.data_seed)


def with_lengths(rows: AnyDataset | None, args: TrainingArguments) -> Any:
    """Prepared rows with the tokens of each, where the sampler by length is asked for."""
    wanted = args.train_sampling_strategy == "group_by_length"
    if isinstance(rows, datasets.IterableDataset):
        logger.info("train: a stream is read in its own order: shuffle its file, or the stream, where that matters")
    if not wanted or not isinstance(rows, datasets.Dataset) or args.length_column_name in rows.column_names:
        return rows
    return rows.add_column(args.length_column_name, tokens_of(rows))


def check_length_known(rows: AnyDataset, args: TrainingArguments, training: bool) -> None:
    """Raise InputError for a stream of prepared rows if an option requires all of them beforehand.

    training: whether these are the rows to train on.
    """
    if not isinstance(rows, datasets.IterableDataset):
        return
    features = option_features(args)
    of_training = {Feature.GROUP_BY_LENGTH, Feature.FROZEN}
    # of rollouts the teacher scores none of the rows
    of_all = {Feature.REFERENCE_CACHE} if hasattr(args, "rollouts") else {Feature.REFERENCE_CACHE, Feature.PRECOMPUTE}
    for feature in features:
        if feature in of_all or (training and feature in of_training):
            raise InputError(conflict(feature, Feature.STREAM))


def check_fills_step(rows: AnyDataset, args: TrainingArguments) -> None:
    """Raise InputError if prepared training rows do not fill a batch that must be full, or if a stream of them has
    fewer rows than an optimizer step takes.

    The training itself reports it for processes that share rows, and for a stream that several processes read.
    """
    if args.parallelism_config is not None:
        return
    batch = args.per_device_train_batch_size * args.world_size
    drop_last = args.dataloader_drop_last
    if isinstance(rows, datasets.Dataset):
        if drop_last and len(rows) < batch:
            raise InputError(f"dataloader_drop_last: {len(rows)} rows do not fill a batch of {batch}: set it to false")
        return
    if args.world_size > 1:  # each process would read the rows of all
        return
    # only the last batch of a step may be short
    step = batch * args.gradient_accumulation_steps
    wanted = step if drop_last else step - batch + 1
    if (found := sum(1 for _ in rows.take(wanted))) < wanted:
        options = "per_device_train_batch_size x gradient_accumulation_steps"
        raise InputError(f"{options}: the stream has {found} rows, and a step takes {step}: lower one of them")


def tokens_of(rows: datasets.Dataset, columns: Sequence[str] = ()) -> np.ndarray:
    """Tokens of each prepared row, of all its examples, in `columns` or in all columns of ids: [rows]."""
    names = columns or [name for name in rows.column_names if name.endswith("_ids")]
    return np.sum([lengths_of(rows, name, of_rows=True) for name in names], axis=0)


def largest_id(rows: AnyDatasets | None) -> int:
    """The largest token id of prepared rows, or of a dict of them; -1 where it is not known, as of a stream."""
    if isinstance(rows, dict):
        return max(map(largest_id, rows.values()), default=-1)
    if not isinstance(rows, datasets.Dataset):
        return -1
    return max(pc.max(ids).as_py() or 0 for ids in flat_ids(rows))


def flat_ids(rows: datasets.Dataset) -> list[Any]:
    """All token ids of prepared rows, packed ones too: a flat Arrow array for each column."""
    columns = [rows.with_format("arrow")[name][:] for name in rows.column_names if name.endswith("_ids")]
    return [pc.list_flatten(column, recursive=True) for column in columns]


def planned_passes(rows: AnyDataset, args: TrainingArguments, rows_per_step: int) -> float:
    """How often a run sees prepared rows; 0 for a stream, whose length is not known."""
    if not isinstance(rows, datasets.Dataset):
        return 0.0
    if args.max_steps <= 0:
        return args.num_train_epochs
    return args.max_steps / max(len(rows) / rows_per_step, 1)  # a pass has a step at least


def first_rows(rows: datasets.IterableDataset, count: int = STREAM_HEAD) -> datasets.Dataset:
    """Return the first `count` prepared rows of a stream."""
    return datasets.Dataset.from_list(list(islice(rows, count)), features=rows.features)


def longest(rows: AnyDataset, count: int, columns: Sequence[str] = ()) -> datasets.Dataset:
    """The `count` prepared rows with the most tokens, in `columns` or in all, longest first; of a stream, of its first
    1000 rows.
    """
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows)
    return rows.select(np.argsort(-tokens_of(rows, columns), kind="stable")[:count])


def full_lengths(rows: datasets.Dataset, args: TrainingArguments) -> np.ndarray:
    """Of each example of prepared rows the tokens of its prompt and its longest answer; answers that are sampled while
    training may become as long as max_completion_length.
    """
    if longest := getattr(args, "max_completion_length", None):
        return lengths_of(rows, "prompt_ids") + longest
    branches = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in rows.column_names]
    return example_lengths(rows, branches)


def warn_if_too_long(rows: AnyDataset | None, config: PretrainedConfig, args: TrainingArguments) -> None:
    """Warn of prepared rows, not of a stream, that are longer than the positions that the model's config names."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or not isinstance(rows, datasets.Dataset):
        return
    lengths = full_lengths(rows, args)
    what = "are"
    remedy = f"set train.max_length={positions}"
    if getattr(args, "max_completion_length", None):
        section = "rounds" if getattr(args, "rounds", None) else "train"
        what = "may become"
        remedy = f"{remedy}, and {section}.max_completion_length below it"
    if positions > 0 and (count := int((lengths > positions).sum())):
        logger.warning(
            "train: %d examples %s longer than the model's %d positions (max_position_embeddings), up to %d tokens: %s",
            count,
            what,
            positions,
            lengths.max(),
            remedy,
        )


def check_answered(rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, why: str) -> None:
    """Raise InputError, with the reason, where prepared rows have no completion, or one that is labelled false.

    Of a stream its first rows are read.
    """
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows)
    lengths = lengths_of(rows, "completion_ids")
    if not lengths.all():
        asked = tokenizer.decode(rows[int(lengths.argmin())]["prompt_ids"], skip_special_tokens=True)
        count = f"{(lengths == 0).sum()} of {len(rows)} rows have none, or a wrong one"
        how = "leave them out" if lengths.any() else "name the column that has it, as in columns: {completion: answer}"
        raise InputError(f"{why}, and {count} (the first prompt: {shown(asked)}): {how}")


def warn_if_cut(rows: AnyDataset, longest: int) -> None:
    """Warn of completions that are trained on, and are cut at `longest` tokens. Of a stream nothing is known."""
    if not isinstance(rows, datasets.Dataset):
        return
    if count := int((lengths_of(rows, "completion_ids") > longest).sum()):
        said = "train: %d completions of the data are cut at max_completion_length %d, their ends with them"
        logger.warning(said, count, longest)
