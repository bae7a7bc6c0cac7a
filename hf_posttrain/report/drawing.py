"""A chart as plain geometry, for the template that writes it as inline SVG (templates/parts.html).

    drawn(chart) -> Drawing: ticks, paths and marks in a box of WIDTH x HEIGHT, and what the chart says in words

The page's own style sheet colours the lines, in light and dark; that is why this is not matplotlib's SVG, whose ticks
it uses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .charts import Chart, Line
from .history import Series, number, smoothed, thinned

WIDTH, HEIGHT = 400, 230
RIGHT, TOP, BOTTOM = 12, 10, 26
"""Room around the lines, for the labels of the axes."""
LEFT, LETTER = 48, 7
"""Room at the left, at least, and of a letter of the labels there."""
POINTS = 400
"""Points of a line, at most."""
ROWS = 60
"""Rows that a line brings to the table of numbers, at most."""
MARKED = 30
"""A line of so few points shows each of them."""


Place: TypeAlias = Callable[[float, float], tuple[float, float]]
"""(step, value) -> (x, y)."""


@dataclass(frozen=True)
class Tick:
    """A label and where it stands."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """A line as it is drawn; `marks` are (x, y, words)."""

    label: str
    colour: int
    dashed: bool
    path: str
    """The line, or its running mean where there is one."""
    faint: str
    """The line as logged, where `path` is its mean; otherwise empty."""
    marks: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Table:
    """The numbers behind a chart: one row a step, "" where a line has none."""

    columns: list[str]
    rows: list[list[str]]
    whole: bool
    """Is every logged number there?"""


@dataclass(frozen=True)
class Drawing:
    """A chart, ready to be written."""

    chart: Chart
    left: int
    """Where the lines begin."""
    x: list[Tick]
    y: list[Tick]
    curves: list[Curve]
    words: str
    table: Table


def drawn(chart: Chart) -> Drawing:
    """The geometry of a chart; one without a finite value has axes and no lines."""
    points = [point for line in chart.lines for point in line.series.finite()] or [(0.0, 0.0)]
    steps, values = zip(*points, strict=True)
    low_x, high_x = min(0.0, *steps), max(1.0, *steps)
    x_ticks, y_ticks = _ticks(low_x, high_x, whole=True), _ticks(min(values), max(values))
    low_y, high_y = min(y_ticks[0], min(values)), max(y_ticks[-1], max(values))
    x_labels, y_labels = _labels(x_ticks), _labels(y_ticks)
    left = max(LEFT, 12 + LETTER * max(map(len, y_labels)))

    def place(step: float, value: float) -> tuple[float, float]:
        right = left + (step - low_x) / (high_x - low_x) * (WIDTH - left - RIGHT)
        down = TOP + (high_y - value) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(right, 1), round(down, 1)

    return Drawing(
        chart,
        left,
        [Tick(place(at, low_y)[0], text) for at, text in zip(x_ticks, x_labels, strict=True) if low_x <= at <= high_x],
        [Tick(place(low_x, at)[1], text) for at, text in zip(y_ticks, y_labels, strict=True)],
        [_curve(line, place) for line in chart.lines],
        " ".join(_words(line) for line in chart.lines),
        _table(chart),
    )


def _curve(line: Line, place: Place) -> Curve:
    """A line with marks where its points are few, or with its running mean where they are many."""
    mean = smoothed(line.series)
    logged = _path(thinned(line.series, POINTS), place)
    few = line.series.finite() if len(line.series.steps) <= MARKED else []
    marks = [(*place(step, value), f"{line.label}, step {number(step)}: {number(value)}") for step, value in few]
    main, faint = (_path(thinned(mean, POINTS), place), logged) if mean else (logged, "")
    return Curve(line.label, line.colour, line.dashed, main, faint, marks)


def _path(series: Series, place: Place) -> str:
    """SVG's path through the points, broken where a value is not finite."""
    parts, pen = [], "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            parts.append("{}{} {}".format(pen, *place(step, value)))
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers from below `low` to above `high`, with room around a constant."""
    from matplotlib.ticker import MaxNLocator

    if high - low <= 1e-6 * max(abs(low), abs(high)):
        room = abs(low) / 2 or 1.0
        low, high = low - room, high + room
    found = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    return [float(tick) for tick in found]


def _labels(ticks: list[float]) -> list[str]:
    """The shortest texts that tell the ticks apart: 0.25, 40k, 5e-4."""
    largest = max(map(abs, ticks))
    if largest >= 10_000:
        unit, name = (1e6, "M") if largest >= 2e6 else (1e3, "k")
        return [f"{tick / unit:g}{name}" if tick else "0" for tick in ticks]
    if largest < 1e-2:
        return [f"{tick:.2g}".replace("e-0", "e-") if tick else "0" for tick in ticks]
    decimals = next((n for n in range(9) if all(math.isclose(round(t, n), t, abs_tol=1e-9) for t in ticks)), 9)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def _words(line: Line) -> str:
    """What a line does, for those who do not see it."""
    series, finite = line.series, line.series.finite()
    if not finite:
        return f"{line.label}: no finite value."
    (first_step, first), (last_step, last) = finite[0], finite[-1]
    lowest, highest = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
    missing = len(series.steps) - len(finite)
    said = [f"from {number(first)} at step {number(first_step)}", f"to {number(last)} at step {number(last_step)}"]
    said += [f"{name} {number(v)} at step {number(s)}" for name, (s, v) in (("lowest", lowest), ("highest", highest))]
    said += [f"{missing} values not finite"] if missing else []
    return f"{line.label}: {', '.join(said)}."


def _table(chart: Chart) -> Table:
    few = [thinned(line.series, ROWS) for line in chart.lines]
    found = [dict(zip(series.steps, series.values, strict=True)) for series in few]
    rows = [
        [number(step), *(number(values[step]) if step in values else "" for values in found)]
        for step in sorted({step for values in found for step in values})
    ]
    whole = all(len(kept.steps) == len(line.series.steps) for kept, line in zip(few, chart.lines, strict=True))
    return Table(["step", *(line.label for line in chart.lines)], rows, whole)
