"""Short examples -> full rows, best-fit decreasing; each example stays its own attention document."""

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
    """Rows of at most `max_length` tokens, prompts and completions together, each a list of whole examples.

    Every column becomes a list, one entry an example; `index` numbers the packed rows, in the order of their first
    examples. Rows that are packed already are returned as they are. Raises InputError for an example that is too long.
    """
    if isinstance(rows.features["completion_ids"].feature, datasets.List):
        return rows
    lengths = example_lengths(rows, ["completion_ids"])
    if (longest := int(lengths.max())) > max_length:
        raise InputError(f"{name}, row {lengths.argmax()}: {longest} tokens do not fit into a row of {max_length}")
    bins = best_fit(lengths.tolist(), max_length)
    examples = rows.remove_columns("index")
    lists = {column: datasets.List(kind) for column, kind in examples.features.items()}
    features = datasets.Features({**lists, "index": datasets.Value("int64")})
    full = 100 * lengths.sum() / (len(bins) * max_length)
    logger.info("%s: %d examples packed into %d rows, %.1f %% full", name, len(rows), len(bins), full)
    given = {"rows": examples, "bins": tuple(bins)}  # `datasets` would take the parts of a list for shards
    return datasets.Dataset.from_generator(_gather, features=features, gen_kwargs=given)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the items in each bin: the longest first, each into the fullest bin that it fits into."""
    bins: list[list[int]] = []
    # an item costs one binary search, among what bins have left: distinct numbers, sorted
    sizes: list[int] = []
    bins_with: dict[int, list[int]] = defaultdict(list)  # what is left -> bins
    for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(sizes, lengths[item])
        if place == len(sizes):  # it fits nowhere: a new bin
            left = capacity
            chosen = len(bins)
            bins.append([])
        else:
            left = sizes[place]
            chosen = bins_with[left].pop()
            if not bins_with[left]:
                del sizes[place]
        bins[chosen].append(item)
        # the bin moves on to what it has left now
        left -= lengths[item]
        if not bins_with[left]:
            insort(sizes, left)
        bins_with[left].append(chosen)
    return sorted(sorted(items) for items in bins)


def lengths_of(rows: datasets.Dataset, column: str, of_rows: bool = False) -> np.ndarray:
    """Tokens in a column of ids: [examples] of each example, or [rows] of each row, which may hold several."""
    ids = rows.with_format("arrow")[column][:]
    if not isinstance(rows.features[column].feature, datasets.List):
        return np.asarray(pc.list_value_length(ids))
    lengths = np.asarray(pc.list_value_length(pc.list_flatten(ids)))
    return np.bincount(pc.list_parent_indices(ids), lengths, len(rows)).astype(int) if of_rows else lengths


def example_lengths(rows: datasets.Dataset, answers: Sequence[str]) -> np.ndarray:
    """Tokens of each example, its prompt and the longest of its answers, which are in these columns: [examples]."""
    prompts = lengths_of(rows, "prompt_ids")
    return prompts + np.max([lengths_of(rows, column) for column in answers], axis=0) if answers else prompts


def _gather(rows: datasets.Dataset, bins: tuple[list[int], ...]) -> Iterator[dict[str, Any]]:
    for index, items in enumerate(bins):
        yield {"index": index, **rows[items]}
