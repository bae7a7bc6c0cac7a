"""Lengths of prepared rows: their column, the longest rows, and rows that are too long for the model."""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..capabilities import Feature, conflict_message, option_features
from ..errors import InputError, count_noun, short_repr
from .dataset_type import AnyDataset, AnyDatasets
from .packing import column_lengths, example_lengths

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import TrainingArguments  # its import takes seconds, which commands about data do without

logger = logging.getLogger(__package__)
STREAM_HEAD = 1000
"""Number of rows of a stream that are read before training."""


def add_length_column(rows: AnyDataset | None, args: "TrainingArguments") -> Any:
    """Return prepared rows with a column of their lengths in tokens, if the length-grouped sampler is selected."""
    groups_by_length = args.train_sampling_strategy == "group_by_length"
    if isinstance(rows, datasets.IterableDataset):
        logger.info(
            "train: a stream is read in its own order. Shuffle its file or the stream if the order should be random"
        )
    if not groups_by_length or not isinstance(rows, datasets.Dataset) or args.length_column_name in rows.column_names:
        return rows
    return rows.add_column(args.length_column_name, tokens_per_row(rows))


def check_length_known(rows: AnyDataset, args: "TrainingArguments", training: bool) -> None:
    """Raise InputError for a stream of prepared rows if an option requires all of them beforehand.

    Args:
        rows: Prepared rows.
        args: The Config.
        training: Whether these are the rows to train on.
    """
    if not isinstance(rows, datasets.IterableDataset):
        return
    features = option_features(args)
    training_only = {Feature.GROUP_BY_LENGTH, Feature.FROZEN, Feature.AUTO_WEIGHTS}
    # with rollouts, the teacher does not score the rows
    any_rows = {Feature.REFERENCE_CACHE} if hasattr(args, "rollouts") else {Feature.REFERENCE_CACHE, Feature.PRECOMPUTE}
    for feature in features:
        if feature in any_rows or (training and feature in training_only):
            raise InputError(conflict_message(feature, Feature.STREAM))


def check_fills_step(rows: AnyDataset, args: "TrainingArguments") -> None:
    """Raise InputError for too few prepared training rows.

    A data set must fill a batch with `dataloader_drop_last`, and a stream must fill an optimizer step. Training itself
    reports too few rows for processes that share rows, and for a stream that several processes read.
    """
    if args.parallelism_config is not None:
        return
    batch = args.per_device_train_batch_size * args.world_size
    drop_last = args.dataloader_drop_last
    if isinstance(rows, datasets.Dataset):
        if drop_last and len(rows) < batch:
            raise InputError(
                f"dataloader_drop_last: a batch of {batch} requires more rows than the data has ({len(rows)}). "
                "Set it to false, or lower per_device_train_batch_size"
            )
        return
    if args.world_size > 1:  # each process would read all rows
        return

    # only the last batch of a step may be short
    step = batch * args.gradient_accumulation_steps
    required = step if drop_last else step - batch + 1
    if (count := sum(1 for _ in rows.take(required))) < required:
        options = "per_device_train_batch_size x gradient_accumulation_steps"
        raise InputError(f"{options}: the stream has {count} rows, and a step takes {step}. Lower one of them")


def tokens_per_row(rows: datasets.Dataset, columns: Sequence[str] = ()) -> np.ndarray:
    """Return the number of tokens of each prepared row, summed over its examples: [rows].

    Args:
        rows: Prepared rows.
        columns: The columns that are counted; all columns of tokens by default.
    """
    names = columns or token_columns(rows)
    return np.sum([column_lengths(rows, name, per_row=True) for name in names], axis=0)


def token_columns(rows: datasets.Dataset) -> list[str]:
    """Return the columns of prepared rows with tokens, in contrast to the likely tokens of a teacher."""
    return [name for name in rows.column_names if name.endswith("_ids") and name != "teacher_ids"]


def largest_token_id(rows: AnyDatasets | None) -> int:
    """Return the largest token id of prepared rows, or of a dict of data sets; -1 if it is unknown, as for a stream."""
    if isinstance(rows, dict):
        return max(map(largest_token_id, rows.values()), default=-1)
    if not isinstance(rows, datasets.Dataset):
        return -1
    return max(pc.max(ids).as_py() or 0 for ids in flat_token_ids(rows))


def flat_token_ids(rows: datasets.Dataset) -> "list[pa.Array]":
    """Return all token ids of prepared rows, packed or not, as a flat Arrow array per column."""
    columns = [rows.with_format("arrow")[name][:] for name in rows.column_names if name.endswith("_ids")]
    return [pc.list_flatten(column, recursive=True) for column in columns]


def planned_epochs(rows: AnyDataset, args: "TrainingArguments", rows_per_step: int) -> float:
    """Return how many times a run trains on each prepared row, or 0 for a stream, whose length is unknown."""
    if not isinstance(rows, datasets.Dataset):
        return 0.0
    if args.max_steps <= 0:
        return args.num_train_epochs
    return args.max_steps / max(len(rows) / rows_per_step, 1)  # an epoch has at least one step


def first_rows(rows: datasets.IterableDataset, count: int = STREAM_HEAD) -> datasets.Dataset:
    """Return the first `count` prepared rows of a stream."""
    return datasets.Dataset.from_list(list(islice(rows, count)), features=rows.features)


def longest_rows(rows: AnyDataset, count: int, columns: Sequence[str] = ()) -> datasets.Dataset:
    """Return the prepared rows with the most tokens, longest first.

    Args:
        rows: Prepared rows. Of a stream, only the first `STREAM_HEAD` rows are read.
        count: Number of rows to return.
        columns: The columns of ids that are counted; all by default.
    """
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows)
    return rows.select(np.argsort(-tokens_per_row(rows, columns), kind="stable")[:count])


def max_example_lengths(rows: datasets.Dataset, args: "TrainingArguments") -> np.ndarray:
    """Return the maximum tokens of each example of prepared rows, its prompt plus its longest answer: [examples].

    Answers that are sampled during training are counted with `max_completion_length` tokens.
    """
    if max_completion_length := getattr(args, "max_completion_length", None):
        return column_lengths(rows, "prompt_ids") + max_completion_length
    branches = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in rows.column_names]
    return example_lengths(rows, branches)


def warn_if_too_long(rows: AnyDataset | None, config: PretrainedConfig, args: "TrainingArguments") -> None:
    """Log a warning for prepared rows, unless they are a stream, with more tokens than the model has positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or not isinstance(rows, datasets.Dataset):
        return
    lengths = max_example_lengths(rows, args)
    verb = "are"
    fix = f"Set train.max_length={positions}"
    if getattr(args, "max_completion_length", None):
        section = "rounds" if getattr(args, "rounds", None) else "train"
        verb = "may become"
        fix = f"{fix}, and {section}.max_completion_length below it"
    if positions > 0 and (count := int((lengths > positions).sum())):
        logger.warning(
            "train: %s %s longer than the model's %d positions (max_position_embeddings), up to %d tokens. %s",
            count_noun(count, "example"),
            "is" if (verb, count) == ("are", 1) else verb,
            positions,
            lengths.max(),
            fix,
        )


def check_completions(rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, reason: str) -> None:
    """Raise InputError if prepared rows have no completion, or one that is labeled false.

    Args:
        rows: Prepared rows. Of a stream, only the first `STREAM_HEAD` rows are read.
        tokenizer: Decodes the first prompt without a completion, for the message.
        reason: The beginning of the message, which states why completions are required.
    """
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows)
    lengths = column_lengths(rows, "completion_ids")
    if not lengths.all():
        prompt = tokenizer.decode(rows[int(lengths.argmin())]["prompt_ids"], skip_special_tokens=True)
        count = f"{(lengths == 0).sum()} of {len(rows)} rows have no completion, or a wrong one"
        fix = (
            "Remove these rows"
            if lengths.any()
            else "Name the column that has it, as in `columns: {completion: answer}`"
        )
        raise InputError(f"{reason}. {count} (the first prompt: {short_repr(prompt)}). {fix}")


def warn_if_truncated(rows: AnyDataset, max_completion_length: int) -> None:
    """Log a warning for completions of the data that are truncated for training. A stream is not checked."""
    if not isinstance(rows, datasets.Dataset):
        return
    if count := int((column_lengths(rows, "completion_ids") > max_completion_length).sum()):
        message = "train: %d completions of the data are truncated to max_completion_length %d, and lose their ends"
        logger.warning(message, count, max_completion_length)
