"""Draws charts with matplotlib: each as a small SVG for the pages, and all of a run in one picture, curves.png.

matplotlib's SVG has its own colours, fonts and ids, but a page has a style sheet for light and for dark. So each artist
that a page should show has a gid of CSS classes, such as ".line c0", and `svg` keeps shapes and classes of those alone.
"""

import math
from collections.abc import Iterator
from html import escape
from io import StringIO
from typing import Any
from xml.etree import ElementTree

from .charts import Chart, charts, number, smoothed, thinned
from .run_folder import Run

NAME = "curves.png"
WIDTH, HEIGHT = 400, 230
"""Of an SVG, in its own units, in which its letters are 12 high."""
COLUMNS = 3
POINTS, MARKED = 400, 30
"""Points of a line, at most; a line of at most so many is drawn with a mark at each."""
COLOURS = ("#1f5fbf", "#b8500b", "#1b7a52", "#8036b3")
INK, QUIET, GRID = "#1c2430", "#55606e", "#e2e6eb"
STYLE: Any = {
    "font.size": 9, "text.color": INK, "xtick.color": QUIET, "ytick.color": QUIET, "xtick.major.size": 0,
    "ytick.major.size": 0, "xtick.major.pad": 9, "ytick.major.pad": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.bottom": False, "axes.spines.left": False, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "axes.titlesize": 10, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8, "legend.loc": "lower left",
    "legend.columnspacing": 1.2, "legend.handlelength": 2.2, "legend.labelspacing": 0.25, "legend.borderpad": 0.3,
    "legend.borderaxespad": 0.1, "svg.fonttype": "none", "text.parse_math": False,  # names may have dollars
}  # fmt: skip


def svg(chart: Chart) -> str:
    """What belongs into an <svg viewBox="0 0 WIDTH HEIGHT">: paths, circles and texts with classes of style.css."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"font.size": 12}):
        figure, file = Figure(figsize=(WIDTH / 72, HEIGHT / 72)), StringIO()  # matplotlib's SVG has 72 units per inch
        axes = figure.add_subplot()
        _draw(chart, axes)
        left = max(48, 12 + 7 * max(len(label.get_text()) for label in axes.get_yticklabels()))
        figure.subplots_adjust(left / WIDTH, 26 / HEIGHT, 1 - 12 / WIDTH, 1 - 10 / HEIGHT)
        figure.savefig(file, format="svg")
    return "\n".join(_shapes(file.getvalue(), chart))


def _shapes(drawn: str, chart: Chart) -> Iterator[str]:
    """Of a chart as matplotlib's SVG: paths, marks and texts of the artists that have a gid, with its classes."""
    space = "{http://www.w3.org/2000/svg}"
    marks = iter([f"{line.label}, step {number(step)}: {number(value)}"
                  for line in chart.lines if _marked(line.series) for step, value in line.series.finite()])  # fmt: skip
    for group in ElementTree.fromstring(drawn).iter(f"{space}g"):
        if not (gid := group.get("id", "")).startswith("."):
            continue
        classes = gid[1:]
        for path in group.findall(f"{space}path"):  # M x y L x y L x y, in which the Ls may be left out
            course = (part if part == "M" else _rounded(part) for part in path.get("d", "").split() if part != "L")
            yield f'<path class="{classes}" d="{" ".join(course)}"/>'
        for mark in group.iter(f"{space}use"):
            at = f'cx="{_rounded(mark.attrib["x"])}" cy="{_rounded(mark.attrib["y"])}"'
            yield f'<circle class="{classes}" {at} r="2.5"><title>{escape(next(marks))}</title></circle>'
        for text in group.findall(f"{space}text"):
            at = f'x="{_rounded(text.attrib["x"])}" y="{_rounded(text.attrib["y"])}"'
            yield f'<text class="{classes}" {at}>{escape(text.text or "")}</text>'


def _rounded(number: str) -> str:
    return f"{round(float(number), 1):g}"


def write_picture(run: Run) -> None:
    """Write curves.png into the run's folder; nothing where nothing was logged."""
    import matplotlib
    from matplotlib.figure import Figure

    found = charts(run.history)
    if not found:
        return
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    width, height = 4.2 * columns, 2.7 * rows + 0.3  # inches, as all that follows
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(0.8 / width, 0.3 / height, 1 - 0.15 / width, 1 - 0.95 / height, 0.95 / 3.25, 0.95 / 1.75)
        title = f"{run.method.upper()}  {run.name}".strip()
        figure.text(0.15 / width, 1 - 0.12 / height, title, fontsize=12, fontweight="bold", va="top")
        cells = list(figure.subplots(rows, columns, squeeze=False).flat)
        for chart, axes in zip(found, cells, strict=False):
            _draw(chart, axes)
            legend_rows = math.ceil(len(chart.lines) / 2) if len(chart.lines) > 1 else 0
            axes.set_title(chart.title, pad=8 + 13 * legend_rows)
            if legend_rows:
                axes.legend(ncols=2, bbox_to_anchor=(-0.01, 1.0))  # above the lines, not on them
        for axes in cells[len(found) :]:
            axes.set_axis_off()
        figure.savefig(run.folder / NAME, dpi=120)


def _draw(chart: Chart, axes: Any) -> None:
    """Lines, grid and labels; of a long and noisy line the running mean, over what was logged in a faint colour."""
    for line in chart.lines:
        mean, colour = smoothed(line.series), COLOURS[line.colour % len(COLOURS)]
        if mean:
            faint: Any = {"linewidth": 0.8, "alpha": 0.35, "zorder": 1, "gid": f".faint {line.look}"}
            axes.plot(*thinned(line.series, POINTS), color=colour, **faint)
        axes.plot(*thinned(mean or line.series, POINTS), color=colour, linewidth=1.3, gid=f".line {line.look}",
                  linestyle=(0, (4, 2)) if line.dash else "-", label=line.label)  # fmt: skip
        if _marked(line.series):
            face = colour if line.dash == "dashed" else "white"
            axes.plot(*line.series, "o", color=colour, markersize=3.5, markerfacecolor=face, clip_on=False,
                      gid=f".mark {line.look}")  # fmt: skip
    _set_ticks(chart, axes)
    below: Any = {"xytext": (-22, -9), "textcoords": "offset points", "ha": "right", "va": "top", "color": QUIET}
    axes.annotate("step", (0, 0), xycoords="axes fraction", gid=".y", **below)


def _marked(series: Any) -> bool:
    return len(series.steps) <= MARKED


def _set_ticks(chart: Chart, axes: Any) -> None:
    """About five round numbers on each axis: from 0 to the last step, and around the values."""
    from matplotlib.ticker import MaxNLocator

    points = [point for line in chart.lines for point in line.series.finite()] or [(0.0, 0.0)]
    steps, values = zip(*points, strict=True)
    last, low, high = max(1.0, *steps), min(values), max(values)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant gets space around it
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    round_numbers = [1, 2, 2.5, 5, 10]
    up = MaxNLocator(nbins=5, steps=round_numbers).tick_values(low, high)
    across = MaxNLocator(nbins=5, steps=round_numbers, integer=True).tick_values(0, last)
    across = across[across <= last]
    axes.set(xlim=(0, last), ylim=(up[0], up[-1]))
    axes.set_xticks(across, _labels(across))
    axes.set_yticks(up, _labels(up))
    shown = {".grid": axes.get_ygridlines(), ".x": axes.get_xticklabels(), ".y": axes.get_yticklabels()}
    for gid, artists in shown.items():
        for artist in artists:
            artist.set(gid=gid, clip_on=False)


def _labels(ticks: Any) -> list[str]:
    """The shortest texts that tell the ticks apart: 0.25, 40k, 5e-4."""
    largest = max(map(abs, ticks))
    if largest >= 10_000:
        unit, name = (1e6, "M") if largest >= 2e6 else (1e3, "k")
        return [f"{tick / unit:.9g}{name}" if tick else "0" for tick in ticks]
    if largest < 1e-2:
        return [f"{tick:.9g}".replace("e-0", "e-") if tick else "0" for tick in ticks]
    decimals = next((n for n in range(9) if all(math.isclose(round(t, n), t, abs_tol=1e-9) for t in ticks)), 9)
    return [f"{tick:.{decimals}f}" for tick in ticks]
