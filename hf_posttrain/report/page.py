"""report.html: a run as one page that needs nothing but itself.

    write(run)            into the run's folder
    rendered(name, ...)   a template of templates/, filled; everything is escaped
"""

from pathlib import Path
from typing import Any

from . import audit_tables, outcome
from .charts import Chart, charts
from .drawing import HEIGHT, RIGHT, WIDTH, Drawing, drawn
from .run_folder import Run

NAME = "report.html"
SHORT = 60
"""Letters of an answer that fits beside others in half of the page."""


def write(run: Run) -> Path:
    """Write the page; returns its path."""
    file = run.folder / NAME
    file.write_text(rendered("report.html", **_content(run)), encoding="utf-8")
    return file


def rendered(template: str, **content: Any) -> str:
    """A page from its template and what is to be shown."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["box"] = {"width": WIDTH, "height": HEIGHT, "right": WIDTH - RIGHT}
    environment.globals["averaged"] = averaged
    return environment.get_template(template).render(**content)


def by_group(found: list[Chart]) -> list[tuple[str, list[Drawing]]]:
    """Drawings under the headings of their charts, which keep their order."""
    groups: dict[str, list[Drawing]] = {}
    for chart in found:
        groups.setdefault(chart.group, []).append(drawn(chart))
    return list(groups.items())


def averaged(groups: list[tuple[str, list[Drawing]]]) -> bool:
    """Is there a line that is shown as its running mean?"""
    return any(curve.faint for _, drawings in groups for drawing in drawings for curve in drawing.curves)


def long_answers(samples: list[dict[str, Any]]) -> bool:
    """Do sample answers want the whole width?"""
    return any(len(sample.get(part) or "") > SHORT for sample in samples for part in ("before", "after", "expected"))


def _content(run: Run) -> dict[str, Any]:
    versions = run.record.get("versions", {})
    machine = [(name, run.record[name]) for name in ("engine", "device", "started") if run.record.get(name)]
    return {
        "run": run,
        "method": outcome.NAMES.get(run.method, ""),
        "facts": outcome.facts(run),
        "warnings": outcome.warnings(run),
        "groups": by_group(charts(run.history)),
        "long": long_answers(run.samples),
        "audit": audit_tables.tables(run.audit),
        "setup": outcome.setup(run),
        "finals": outcome.finals(run),
        "environment": machine + list(versions.items()),
    }
