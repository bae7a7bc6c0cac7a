"""Best-fit decreasing packing of short examples into full rows, where each example stays a separate document."""

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from ..errors import InputError

logger = logging.getLogger(__package__)


def pack(rows: datasets.Dataset, max_length: int, name: str = "train") -> datasets.Dataset:
    """Pack prepared examples into rows of at most `max_length` tokens, prompts and completions together.

    Args:
        rows: Prepared rows. Rows that are packed already are returned unchanged.
        max_length: Maximum number of tokens of a packed row.
        name: Name of the data set in messages.

    Returns:
        A data set in which every column is a list with one entry per example. `index` numbers the packed rows, which
        are in the order of their first examples.

    Raises:
        InputError: If an example is longer than `max_length`, or if there are no rows.
    """
    if isinstance(rows.features["completion_ids"].feature, datasets.List):
        return rows
    if not len(rows):
        raise InputError(f"{name}: the data set has no rows to pack")
    lengths = example_lengths(rows, ["completion_ids"])
    if (longest := int(lengths.max())) > max_length:
        raise InputError(f"{name}, row {lengths.argmax()}: {longest} tokens do not fit into a row of {max_length}")
    bins = best_fit(lengths.tolist(), max_length)

    examples = rows.remove_columns("index")
    lists = {column: datasets.List(kind) for column, kind in examples.features.items()}
    features = datasets.Features({**lists, "index": datasets.Value("int64")})
    fill_percent = 100 * lengths.sum() / (len(bins) * max_length)
    logger.info("%s: %d examples packed into %d rows, %.1f %% full", name, len(rows), len(bins), fill_percent)
    arguments = {
        "rows": examples,
        # tuple: `datasets` would shard a list across workers
        "bins": tuple(bins),
    }
    return datasets.Dataset.from_generator(_gather, features=features, gen_kwargs=arguments)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the item numbers of each bin. Items are placed longest first, each into the fullest bin with enough space.

    Each item takes one binary search among the distinct amounts of free space.
    """
    bins: list[list[int]] = []
    distinct_free_space: list[int] = []  # of all bins, sorted
    bins_by_free: dict[int, list[int]] = defaultdict(list)  # free space -> bins
    for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        position = bisect_left(distinct_free_space, lengths[item])
        if position == len(distinct_free_space):  # no bin has enough space
            free = capacity
            chosen = len(bins)
            bins.append([])
        else:
            free = distinct_free_space[position]
            chosen = bins_by_free[free].pop()
            if not bins_by_free[free]:
                del distinct_free_space[position]
        bins[chosen].append(item)

        free -= lengths[item]
        if not bins_by_free[free]:
            insort(distinct_free_space, free)
        bins_by_free[free].append(chosen)
    return sorted(sorted(items) for items in bins)


def column_lengths(rows: datasets.Dataset, column: str, per_row: bool = False) -> np.ndarray:
    """Return the number of tokens in a column of ids.

    Args:
        rows: Prepared rows, which hold several examples each if they are packed.
        column: Name of the column.
        per_row: Whether to sum over the examples of a row.

    Returns:
        Tokens of each example, [examples], or of each row, [rows].
    """
    ids = rows.with_format("arrow")[column][:]
    if not isinstance(rows.features[column].feature, datasets.List):
        return np.asarray(pc.list_value_length(ids))
    lengths = np.asarray(pc.list_value_length(pc.list_flatten(ids)))
    return np.bincount(pc.list_parent_indices(ids), lengths, len(rows)).astype(int) if per_row else lengths


def example_lengths(rows: datasets.Dataset, answers: Sequence[str]) -> np.ndarray:
    """Return the tokens of each example, its prompt plus its longest answer: [examples].

    Args:
        rows: Prepared rows.
        answers: The columns with ids of an answer.
    """
    prompts = column_lengths(rows, "prompt_ids")
    return prompts + np.max([column_lengths(rows, column) for column in answers], axis=0) if answers else prompts


# `datasets` caches packed rows by the name and the parameters of this function. Rename it when its output changes, or
# stale caches are reused.
def _gather(rows: datasets.Dataset, bins: tuple[list[int], ...]) -> Iterator[dict[str, Any]]:
    for index, items in enumerate(bins):
        yield {"index": index, **rows[items]}
