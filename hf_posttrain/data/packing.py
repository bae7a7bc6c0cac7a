"""Short examples -> full rows, best-fit decreasing; each example stays its own attention document.

pack          prepared rows -> rows that are lists of examples
best_fit      lengths -> the bins they fall into
lengths_of    tokens of each example, packed or not
"""

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

    Every column becomes a list, one entry an example; `index` numbers the packed rows, which stand in the order of
    their first examples. Cached by `datasets`; logs one line. Rows that are packed already are returned as they are.
    Raises InputError for an example that is longer than `max_length`.
    """
    if isinstance(rows.features["completion_ids"].feature, datasets.List):
        return rows
    lengths = lengths_of(rows, "prompt_ids") + lengths_of(rows, "completion_ids")
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
    """Numbers of the items in each bin: the longest first, each into the fullest bin that has room for it.

    Bins wait under the room that they have left, so an item costs one search among the distinct rooms.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # distinct, sorted
    waiting: dict[int, list[int]] = defaultdict(list)  # room -> bins
    for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(rooms, lengths[item])
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = waiting[room].pop()
            if not waiting[room]:
                del rooms[place]
        bins[chosen].append(item)
        room -= lengths[item]
        if not waiting[room]:
            insort(rooms, room)
        waiting[room].append(chosen)
    return sorted(sorted(items) for items in bins)


def lengths_of(rows: datasets.Dataset, column: str) -> np.ndarray:
    """[examples] tokens of each example in a column of ids."""
    ids = rows.with_format("arrow")[column][:]
    packed = isinstance(rows.features[column].feature, datasets.List)
    return np.asarray(pc.list_value_length(pc.list_flatten(ids) if packed else ids))


def _gather(rows: datasets.Dataset, bins: tuple[list[int], ...]) -> Iterator[dict[str, Any]]:
    for index, items in enumerate(bins):
        yield {"index": index, **rows[items]}
