"""Writes report.html: a run as one page that needs no other file. Fills the templates of `compare` and card.py too."""

from collections.abc import Iterator
from typing import Any

from . import charts, drawing, outcome
from .run_folder import Run

NAME = "report.html"
SHORT = 60
"""Letters of an answer that fits next to others in half of the page."""
SPLITS = {"train": "Training data", "eval": "Evaluation data"}
QUANTILES = {"min": "least", "p50": "median", "p95": "95 %", "p99": "99 %", "max": "most", "mean": "mean"}
FINDINGS = {
    "stubs": "one trained token", "duplicates": "duplicates", "unknown": "with an unknown token",
    "conflicts": "under both labels", "identical": "chosen equal to rejected", "overlap": "also in train",
}  # fmt: skip
SHOWN_ROWS = 5
"""Row numbers of a finding of the data audit, at most."""


def write(run: Run) -> None:
    """Write the page into the run's folder."""
    machine = {name: run.record[name] for name in ("engine", "device", "started") if run.record.get(name)}
    text = rendered(
        "report.html",
        run=run,
        method=outcome.title(run.method),
        drawn=charts.charts(run.history),
        audit=audit_tables(run.audit),
        environment=[*machine.items(), *run.record.get("versions", {}).items()],
        long=long_answers(run.samples),
    )
    (run.folder / NAME).write_text(text, encoding="utf-8")


def rendered(template: str, **content: Any) -> str:
    """A file of templates/, filled; in HTML everything is escaped. They call charts.py, drawing.py and outcome.py."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__package__), undefined=StrictUndefined, autoescape=select_autoescape(),
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"charts": charts, "drawing": drawing, "outcome": outcome}
    return environment.get_template(template).render(**content)


def long_answers(samples: list[dict[str, Any]]) -> bool:
    """Do sample answers need the whole width?"""
    return any(len(sample.get(part) or "") > SHORT for sample in samples for part in ("before", "after", "expected"))


def audit_tables(audit: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """audit.json as tables, (title, columns, rows): what the data check found in each data set, and its lengths."""
    found = []
    for split, data in (audit.get("data") or {}).items():
        title = SPLITS.get(split, split)
        if data:
            found.append((title, ["what", "count", "first rows"], list(_counts(data))))
        lengths = {part: sizes for part, sizes in ((data or {}).get("lengths") or {}).items() if sizes}
        if lengths:
            rows = [[part, *(charts.number(sizes.get(q)) for q in QUANTILES)] for part, sizes in lengths.items()]
            found.append((f"{title}: tokens", ["part", *QUANTILES.values()], rows))
    return found


def _counts(data: dict[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of a data set; parts that the audit lacks are left out."""
    for name, key in {"rows read": "rows_read", "examples": "examples"}.items():
        if data.get(key) is not None:
            yield [name, charts.number(data[key]), ""]
    for kind in ("dropped", "truncated"):
        yield from ([f"{kind}: {item['reason']}", *_count(item)] for item in data.get(kind) or [])
        if data.get(kind) == []:
            yield [kind, "0", ""]
    yield from ([name, *_count(data[kind])] for kind, name in FINDINGS.items() if data.get(kind))
    yield from ([name, charts.number(count), ""] for name, count in (data.get("classes") or {}).items())


def _count(item: dict[str, Any]) -> tuple[str, str]:
    rows = [str(row) for row in item.get("first_rows") or []]
    return charts.number(item["count"]), ", ".join(rows[:SHOWN_ROWS]) + (", …" if len(rows) > SHOWN_ROWS else "")
