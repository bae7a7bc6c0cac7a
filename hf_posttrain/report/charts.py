"""Charts of logged metrics, rendered by matplotlib as SVG for a page or as an image, and their numbers.

templates/charts.yaml defines which metrics share a chart. Other metrics, such as the results of compute_metrics, get
their own charts at the end.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import yaml

from .run_folder import History, Series

NAME = "curves.png"
TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 400
"""Width of an SVG in its own units, in which the font size is 12."""
HEIGHT = 230
"""Height of an SVG in its own units."""
COLUMNS = 3
"""Maximum number of charts per row of the image."""
MIN_SMOOTHED_POINTS = 150
"""Minimum number of points of a series that gets a running mean."""
WINDOWS = 40
"""Number of windows of a running mean in a series."""
MAX_POINTS = 400
"""Maximum number of points of a line."""
MAX_MARKED_POINTS = 30
"""Maximum number of points of a line that has a marker at each of them."""
TABLE_ROWS = 60
"""Maximum number of rows that a line adds to the table of numbers."""
NOT_CHARTED = ("logprob/gap", "distill/advantage", "rounds/round")
"""Differences of other metrics, and counters."""


class Kind(NamedTuple):
    """Metrics that share a chart."""

    group: str
    """Heading above the chart."""
    title: str
    metrics: list[str]
    note: str = ""
    """Hint on how to read the chart."""


_GROUPS = yaml.safe_load((TEMPLATES / "charts.yaml").read_text(encoding="utf-8"))
KINDS = [Kind(group, **kind) for group, kinds in _GROUPS.items() for kind in kinds]
TITLES = {"score": "Score"} | {kind.metrics[0]: kind.title for kind in KINDS if len(kind.metrics) == 1}


class Line(NamedTuple):
    """A line of a chart."""

    label: str
    """Name in the legend."""
    color: int
    series: Series
    dash: str = ""
    """Class in style.css: "dashed" for evaluation, or d0 to d3 to distinguish runs without colors."""

    @property
    def css_class(self) -> str:
        """Classes of the line in style.css."""
        return f"c{self.color % 8} {self.dash}".strip()


class Chart(NamedTuple):
    """Lines over optimizer steps, with the fields of a Kind."""

    group: str
    title: str
    note: str
    lines: list[Line]


def make_charts(histories: Mapping[str, History]) -> list[Chart]:
    """Return the charts of one or several runs.

    In charts of one run, training is solid and evaluation is dashed in the same color. Charts of several runs have one
    metric and split, with a line for each run.

    Args:
        histories: Name of a run -> its logged values.
    """
    known = {metric for kind in KINDS for metric in kind.metrics} | {*NOT_CHARTED}
    others = [name for name in list_metrics(*histories.values()) if name not in known]
    losses = [name for name in others if name.startswith("loss/")]  # of each source or value of a column
    loss_kind = Kind(KINDS[0].group, "Loss by source or value", losses)
    other_kinds = [Kind("Other metrics", name, [name]) for name in others if name not in losses]
    lines: dict[tuple[str, str, str], list[Line]] = {}
    for kind in [KINDS[0], loss_kind, *KINDS[1:], *other_kinds]:
        for color, metric in enumerate(kind.metrics):
            # a single metric needs no label, since the title is its name
            label = metric.rpartition("/")[2] if len(kind.metrics) > 1 else ""
            for split, key, dash in (("training", metric, ""), ("evaluation", f"eval_{metric}", "dashed")):
                for number, (name, history) in enumerate(histories.items()):
                    if key not in history:
                        continue
                    title = kind.title
                    line = Line(", ".join(filter(None, (label, split))), color, history[key], dash)
                    if len(histories) > 1:
                        title = ", ".join(filter(None, (title, label))) + f" ({split})"
                        line = Line(name, number, history[key], f"d{number % 4}")
                    lines.setdefault((kind.group, title, kind.note), []).append(line)
    return [Chart(*heading, chart_lines) for heading, chart_lines in lines.items()]


def list_metrics(*histories: History) -> list[str]:
    """Return the names of all metrics without eval_, with the loss first."""
    names = {key.removeprefix("eval_") for history in histories for key in history}
    return sorted(names, key=lambda name: (name != "loss", name))


class Summary(NamedTuple):
    """Points of a series, each as (step, value), and the number of its values that are not finite."""

    first: tuple[float, float]
    last: tuple[float, float]
    lowest: tuple[float, float]
    highest: tuple[float, float]
    nonfinite: int


def summarize(series: Series) -> Summary | None:
    """Return the summary of a series, or None if it has no finite value."""
    points = series.finite_points()
    if not len(points):
        return None
    indices = (0, len(points) - 1, int(points[:, 1].argmin()), int(points[:, 1].argmax()))
    first, last, lowest, highest = ((float(points[i, 0]), float(points[i, 1])) for i in indices)
    return Summary(first, last, lowest, highest, nonfinite=len(series.steps) - len(points))


def thin(series: Series, limit: int) -> Series:
    """Reduce a series to at most `limit` logged points.

    These are the first and the last point, and the minimum and the maximum of each interval between them, so that
    spikes are kept. Non-finite values count as maxima.
    """
    count = len(series.steps)
    if count <= limit:
        return series
    # there are two points per interval
    order = np.nan_to_num(np.array(series.values), nan=math.inf, neginf=math.inf)
    points = {0, count - 1}
    for interval in np.array_split(np.arange(1, count - 1), (limit - 2) // 2):
        points |= {int(interval[order[interval].argmin()]), int(interval[order[interval].argmax()])}
    return Series(*zip(*((series.steps[i], series.values[i]) for i in sorted(points)), strict=True))


def smooth(series: Series) -> Series | None:
    """Return the running mean of the finite values, or None for a series that is short or not noisy."""
    count = len(series.values)
    finite = np.isfinite(series.values)
    values = np.where(finite, series.values, 0.0)
    # a noisy series changes its direction at a quarter of its points or more
    directions = np.sign(np.diff(values))
    if count < MIN_SMOOTHED_POINTS or (directions[1:] * directions[:-1] < 0).sum() < count / 4:
        return None
    # sums over the window, divided by the number of finite values in it
    window = np.ones(2 * (count // (2 * WINDOWS)) + 1)
    sums = np.convolve(values, window, "same")
    counts = np.convolve(finite, window, "same")
    means = np.divide(sums, counts, out=np.full(count, math.nan), where=counts > 0)
    return Series(series.steps, tuple(means.tolist()))


def any_smoothed(charts: Iterable[Chart]) -> bool:
    """Return whether a line is replaced by its running mean."""
    return any(smooth(line.series) for chart in charts for line in chart.lines)


def draw_svg(chart: Chart) -> str:
    """Return the content of an <svg viewBox="0 0 WIDTH HEIGHT">: paths, circles and texts with classes of style.css."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context([TEMPLATES / "charts.mplstyle", {"font.size": 12}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        file = StringIO()  # matplotlib's SVG has 72 units per inch
        axes = figure.add_subplot()
        _draw(chart, axes)
        # margins are fixed, except for the left one with the labels of the y axis
        left = max(48, 12 + 7 * max(len(label.get_text()) for label in axes.get_yticklabels()))
        figure.subplots_adjust(left / WIDTH, 26 / HEIGHT, 1 - 12 / WIDTH, 1 - 10 / HEIGHT)
        figure.savefig(file, format="svg")
    return "\n".join(_take_shapes(file.getvalue(), chart))


def _take_shapes(matplotlib_svg: str, chart: Chart) -> Iterator[str]:
    """Yield the shapes of matplotlib's SVG whose gid is a CSS class, without colors, fonts and ids.

    The style sheet of the page defines their colors for light and dark mode.
    """
    svg = "{http://www.w3.org/2000/svg}"
    # texts of the markers, in drawing order
    marks = (
        f"{line.label}, step {format_number(step)}: {format_number(value)}"
        for line in chart.lines
        if len(line.series.steps) <= MAX_MARKED_POINTS
        for step, value in line.series.finite()
    )
    for group in ElementTree.fromstring(matplotlib_svg).iter(f"{svg}g"):
        if not (gid := group.get("id", "")).startswith("."):
            continue
        classes = gid[1:]
        # a path has the form M x y L x y L x y, where L is optional
        for path in group.findall(f"{svg}path"):
            points = (part if part == "M" else _round(part) for part in path.get("d", "").split() if part != "L")
            yield f'<path class="{classes}" d="{" ".join(points)}"/>'
        for mark in group.iter(f"{svg}use"):
            position = f'cx="{_round(mark.attrib["x"])}" cy="{_round(mark.attrib["y"])}"'
            yield f'<circle class="{classes}" {position} r="2.5"><title>{escape(next(marks))}</title></circle>'
        for text in group.findall(f"{svg}text"):
            position = f'x="{_round(text.attrib["x"])}" y="{_round(text.attrib["y"])}"'
            yield f'<text class="{classes}" {position}>{escape(text.text or "")}</text>'


def _round(coordinate: str) -> str:
    return f"{round(float(coordinate), 1):g}"


def write_image(file: Path, title: str, histories: Mapping[str, History]) -> bool:
    """Write the charts of one or several runs as an image.

    Args:
        file: Image, whose suffix is its format: .png or .svg.
        title: Text above the charts.
        histories: Name of a run -> its logged values.

    Returns:
        Whether there is a chart. Without one, nothing is written.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    charts = make_charts(histories)
    if not charts:
        return False
    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    with style.context(TEMPLATES / "charts.mplstyle"):
        figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.3), layout="constrained")
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
        for position, chart in enumerate(charts, 1):
            axes = figure.add_subplot(rows, columns, position)
            _draw(chart, axes)
            legend_rows = math.ceil(len(chart.lines) / 2) if len(chart.lines) > 1 else 0
            axes.set_title(chart.title, pad=8 + 13 * legend_rows)
            if legend_rows:
                axes.legend(ncols=2, bbox_to_anchor=(-0.01, 1.0))  # above the plot
        figure.savefig(file, dpi=120)
    return True


def _draw(chart: Chart, axes: Any) -> None:
    """Draw lines, grid and labels on matplotlib's axes.

    A long and noisy line shows its running mean, with the logged values in a faint color.
    """
    from matplotlib.artist import setp
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        mean = smooth(line.series)
        color = f"C{line.color}"
        if mean:
            axes.plot(
                *thin(line.series, MAX_POINTS),
                color=color,
                alpha=0.35,
                lw=0.8,
                zorder=1,
                gid=f".faint {line.css_class}",
            )
        axes.plot(
            *thin(mean or line.series, MAX_POINTS),
            "--" if line.dash else "-",
            color=color,
            label=line.label,
            gid=f".line {line.css_class}",
        )
        if len(line.series.steps) <= MAX_MARKED_POINTS:
            face = color if line.dash == "dashed" else "white"
            axes.plot(
                *line.series, "o", color=color, markerfacecolor=face, clip_on=False, gid=f".mark {line.css_class}"
            )
    below: Any = {"xytext": (-22, -9), "textcoords": "offset points", "ha": "right", "va": "top", "color": "#55606e"}
    axes.annotate("step", (0, 0), xycoords="axes fraction", gid=".y", **below)

    # about five round numbers on each axis, from 0 to the last step and around the values
    points = np.concatenate([line.series.finite_points() for line in chart.lines])
    last = points[:, 0].max(initial=1.0)
    low, high = (points[:, 1].min(), points[:, 1].max()) if len(points) else (0.0, 0.0)
    # add space around a constant
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low = low - (abs(low) / 2 or 1)
        high = high + (abs(high) / 2 or 1)
    round_numbers = [1, 2, 2.5, 5, 10]
    y_ticks = MaxNLocator(nbins=5, steps=round_numbers).tick_values(low, high)
    x_ticks = MaxNLocator(nbins=5, steps=round_numbers, integer=True).tick_values(0, last)
    x_ticks = x_ticks[x_ticks <= last]
    axes.set(xlim=(0, last), ylim=(y_ticks[0], y_ticks[-1]))
    axes.set_xticks(x_ticks, _label_ticks(x_ticks))
    axes.set_yticks(y_ticks, _label_ticks(y_ticks))

    # gids by which _take_shapes finds the shapes
    setp(axes.get_ygridlines(), gid=".grid", clip_on=False)
    setp(axes.get_xticklabels(), gid=".x", clip_on=False)
    setp(axes.get_yticklabels(), gid=".y", clip_on=False)


def _label_ticks(ticks: Sequence[float]) -> list[str]:
    """Return the shortest labels that distinguish the ticks, such as 0.25, 40k and 5e-4."""
    largest = max(map(abs, ticks))
    if largest >= 10_000:
        unit, name = (1e6, "M") if largest >= 2e6 else (1e3, "k")
        return [f"{tick / unit:.9g}{name}" if tick else "0" for tick in ticks]
    if largest < 1e-2:
        return [f"{tick:.9g}".replace("e-0", "e-") if tick else "0" for tick in ticks]
    decimals = next((n for n in range(9) if all(math.isclose(round(t, n), t, abs_tol=1e-9) for t in ticks)), 9)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def tabulate(chart: Chart) -> tuple[list[list[str]], bool]:
    """Return the rows of a table, and whether it contains all logged values.

    A row consists of the step and the value of each line at this step, or "" if there is none.
    """
    lines = [dict(zip(*thin(line.series, TABLE_ROWS), strict=True)) for line in chart.lines]
    rows = [
        [format_number(step), *(format_number(values[step]) if step in values else "" for values in lines)]
        for step in sorted({step for values in lines for step in values})
    ]
    return rows, all(len(line.series.steps) <= TABLE_ROWS for line in chart.lines)


def format_number(value: float | None) -> str:
    """Format a value with four significant digits, such as 0.4312, 1,234 and 5e-07. None is "none"."""
    if value is None:
        return "none"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
