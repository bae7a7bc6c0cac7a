"""audit.json as tables: what the data check found in each data set.

    tables(audit) -> [Table]; parts that are missing are left out
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .history import number

SPLITS = {"train": "Training data", "eval": "Evaluation data"}
QUANTILES = {"min": "least", "p50": "median", "p95": "95 %", "p99": "99 %", "max": "most", "mean": "mean"}
FINDINGS = {
    "stubs": "one trained token", "duplicates": "duplicates", "unknown": "with an unknown token",
    "conflicts": "under both labels", "identical": "chosen equal to rejected", "overlap": "also in train",
}  # fmt: skip
SHOWN_ROWS = 5
"""Row numbers of a finding, at most."""


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(audit: dict[str, Any]) -> list[Table]:
    """Counts and token lengths of each data set."""
    found: list[Table] = []
    for split, data in (audit.get("data") or {}).items():
        if data:
            found += _of_data(SPLITS.get(split, split), data)
    return found


def _of_data(title: str, data: dict[str, Any]) -> Iterator[Table]:
    wholes = {"rows read": data.get("rows_read"), "examples": data.get("examples")}
    counts = [[name, number(count), ""] for name, count in wholes.items() if count is not None]
    for kind in ("dropped", "truncated"):
        cuts = data.get(kind)
        counts += [[f"{kind}: {item['reason']}", *_count(item)] for item in cuts or []]
        counts += [[kind, "0", ""]] if cuts == [] else []
    counts += [[name, *_count(data[kind])] for kind, name in FINDINGS.items() if data.get(kind)]
    counts += [[name, number(count), ""] for name, count in (data.get("classes") or {}).items()]
    yield Table(title, ["what", "count", "first rows"], counts)
    lengths = {part: sizes for part, sizes in (data.get("lengths") or {}).items() if sizes}
    if lengths:
        rows = [[part, *(number(sizes.get(q)) for q in QUANTILES)] for part, sizes in lengths.items()]
        yield Table(f"{title}: tokens", ["part", *QUANTILES.values()], rows)


def _count(item: dict[str, Any]) -> tuple[str, str]:
    rows = [str(row) for row in item.get("first_rows") or []]
    return number(item["count"]), ", ".join(rows[:SHOWN_ROWS]) + (", …" if len(rows) > SHOWN_ROWS else "")
