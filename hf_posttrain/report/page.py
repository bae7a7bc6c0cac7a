"""Writes report.html: a run as one page that needs no other file. Fills the templates of `compare` and card.py too."""

from collections.abc import Iterator
from typing import Any

from . import charts, outcome
from .charts import format_number
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
    environment = machine | run.record.get("versions", {})
    text = render("report.html", run=run, audit=list(_tabulate_audit(run.audit)), environment=environment)
    (run.folder / NAME).write_text(text, encoding="utf-8")


def render(template: str, **content: Any) -> str:
    """A file of templates/, filled; in HTML everything is escaped. They call charts.py and outcome.py."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__package__), undefined=StrictUndefined, autoescape=select_autoescape(),
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"charts": charts, "outcome": outcome, "has_long_answers": has_long_answers}
    return environment.get_template(template).render(**content)


def has_long_answers(samples: list[dict[str, Any]]) -> bool:
    """Do sample answers need the whole width?"""
    return any(len(sample.get(part) or "") > SHORT for sample in samples for part in ("before", "after", "expected"))


def _tabulate_audit(audit: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """audit.json as tables, (title, columns, rows): what the data check found in each data set, and its lengths."""
    for split, data in (audit.get("data") or {}).items():
        title = SPLITS.get(split, split)
        if data:
            yield title, ["what", "count", "first rows"], list(_tabulate_counts(data))
            lengths = {part: sizes for part, sizes in (data.get("lengths") or {}).items() if sizes}
            rows = [[part, *(format_number(sizes.get(q)) for q in QUANTILES)] for part, sizes in lengths.items()]
            if rows:
                yield f"{title}: tokens", ["part", *QUANTILES.values()], rows


def _tabulate_counts(data: dict[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of a data set; parts that the audit lacks are left out."""
    counts = {"rows read": data.get("rows_read"), "examples": data.get("examples")}
    found = [{"name": name, "count": count} for name, count in counts.items() if count is not None]
    for kind in ("dropped", "truncated"):
        items = data.get(kind)
        found += [item | {"name": f"{kind}: {item['reason']}"} for item in items or []]
        found += [{"name": kind, "count": 0}] if items == [] else []
    found += [data[kind] | {"name": name} for kind, name in FINDINGS.items() if data.get(kind)]
    found += [{"name": name, "count": count} for name, count in (data.get("classes") or {}).items()]
    for item in found:
        rows = [str(row) for row in item.get("first_rows") or []]
        more = ", …" if len(rows) > SHOWN_ROWS else ""
        yield [item["name"], format_number(item["count"]), ", ".join(rows[:SHOWN_ROWS]) + more]
