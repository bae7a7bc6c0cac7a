"""Short examples -> full rows, best-fit decreasing; each example stays its own attention document.

    pack        prepared rows -> rows that are lists of examples
    best_fit    lengths -> the bins they fall into
"""

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np

from ..errors import InputError

logger = logging.getLogger(__package__)
_CHUNK = 100  # bins that are read together


def pack(rows: datasets.Dataset, max_length: int, name: str = "train") -> datasets.Dataset:
    """Rows of at most `max_length` tokens, prompts and completions together, each a list of whole examples.

    Every column of ids becomes a list of such lists; `index` numbers the packed rows. Their order follows their first
    example. Logs one line, cached by `datasets`. Raises InputError for an example that is longer than `max_length`.
    """
    lengths = sum(_lengths(rows, column) for column in ("prompt_ids", "completion_ids"))
    if (longest := int(lengths.max())) > max_length:
        raise InputError(f"{name}, row {lengths.argmax()}: {longest} tokens do not fit into packed rows of {max_length}")
    bins = best_fit(lengths.tolist(), max_length)
    columns = [column for column in rows.column_names if column != "index"]
    features = datasets.Features({column: datasets.List(rows.features[column]) for column in columns})
    features["index"] = datasets.Value("int64")
    packed = datasets.Dataset.from_generator(
        _gather, features=features, gen_kwargs={"rows": rows.select_columns(columns), "bins": [bins]}
    )
    share = 100 * lengths.sum() / (len(bins) * max_length)
    logger.info("%s: %d examples packed into %d rows of max_length %d, %.1f %% full",
                name, len(rows), len(bins), max_length, share)  # fmt: skip
    return packed


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


def _lengths(rows: datasets.Dataset, column: str) -> np.ndarray:
    return np.array([len(ids) for ids in rows[column]])


def _gather(rows: datasets.Dataset, bins: list[list[list[int]]]) -> Iterator[dict[str, Any]]:
    """The packed rows; `bins` comes inside a list of one, which keeps `datasets` from sharing it out."""
    [bins] = bins
    yield {}
