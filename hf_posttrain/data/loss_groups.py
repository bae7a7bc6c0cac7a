"""Values of the column that `log_loss_by` names, by which the loss is logged: the column `group` of prepared rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError, short_repr
from .dataset_type import AnyDatasets
from .row_schema import MAX_GROUPS


def group_column(config: object) -> str | None:
    """Return the column by whose values a Config logs the loss, or None."""
    return getattr(config, "log_loss_by", None)


def read_group(row: Mapping[str, Any], column: str) -> str:
    """Return the value of a raw row.

    Raises:
        InputError: The value is not a text or an integer.
    """
    value = row.get(column)
    if not isinstance(value, str | int) or value == "":
        problem = f"column {column!r}: {short_repr(value)} is not a text or an integer"
        raise InputError(f"{problem}, as log_loss_by requires. Correct the row, or remove log_loss_by")
    return str(value)


def values_of_groups(*data: AnyDatasets | None) -> list[str]:
    """Return the values in all prepared data sets, sorted.

    Raises:
        InputError: There are more than MAX_GROUPS.
    """
    values: set[str] = set()
    for part in data:
        for rows in part.values() if isinstance(part, dict) else [part]:
            if isinstance(rows, datasets.Dataset) and "group" in rows.column_names:
                column: Any = rows.with_format("arrow")["group"][:]
                is_packed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
                values |= {*pc.unique(pc.list_flatten(column) if is_packed else column).to_pylist()}
    if len(values) > MAX_GROUPS:
        problem = f"log_loss_by: the column has {len(values)} values, such as {', '.join(sorted(values)[:3])}"
        raise InputError(f"{problem}. Name a column with at most {MAX_GROUPS}")
    return sorted(values)


def groups_of_branches(counts: Sequence[Sequence[int]], groups: Sequence[Any]) -> list[str]:
    """Return the value of each branch.

    Args:
        counts: Number of branches of each example of each row.
        groups: Value of each row, or a list of the values of its examples if the row is packed.
    """
    values = []
    for counts_of_row, group in zip(counts, groups, strict=True):
        values_of_row = group if isinstance(group, list) else [group] * len(counts_of_row)
        for count, value in zip(counts_of_row, values_of_row, strict=True):
            values += [value] * count
    return values
