"""Charts of what runs logged, as matplotlib draws them for a page (SVG) or a picture, and in words and numbers.

templates/charts.yaml says which metrics share one; any other (of compute_metrics, say) gets its own at the end.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import yaml

from .run_folder import History, Run, Series

NAME = "curves.png"
TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 400
HEIGHT = 230  # of an SVG, in its own units, in which its letters are 12 high
COLUMNS = 3  # of the picture
SMOOTHED_FROM = 150
STRETCHES = 40  # points from which a series may get a running mean, and how many windows it has
POINTS = 400
MARKED = 30  # points of a line, at most; a line of at most so many is drawn with a mark at each
TABLE_ROWS = 60  # rows that a line adds to the table of numbers, at most
NOT_CHARTED = ("logprob/gap", "distill/advantage", "rounds/round")  # differences of other metrics, and what counts


class Kind(NamedTuple):
    """Metrics that share a chart, under the heading `group`; `note` says what to look for."""

    group: str
    title: str
    metrics: list[str]
    note: str = ""


_GROUPS = yaml.safe_load((TEMPLATES / "charts.yaml").read_text(encoding="utf-8"))
KINDS = [Kind(group, **kind) for group, kinds in _GROUPS.items() for kind in kinds]
TITLES = {"score": "Score"} | {kind.metrics[0]: kind.title for kind in KINDS if len(kind.metrics) == 1}


class Line(NamedTuple):
    """One curve of a chart."""

    label: str  # its name in the legend
    colour: int
    series: Series
    dash: str = ""  # class in style.css: "dashed" for evaluation, d0 to d3 to tell runs apart without colours

    @property
    def css_class(self) -> str:
        return f"c{self.colour % 8} {self.dash}".strip()  # its classes in style.css


class Chart(NamedTuple):
    """Lines over optimizer steps, under the heading `group`; `note` says what to look for."""

    group: str
    title: str
    note: str
    lines: list[Line]


def make_charts(histories: Mapping[str, History]) -> list[Chart]:
    """Charts of one run: training solid, evaluation dashed in the same colour. Of several: one for each metric and
    split, with a line for each run. histories: name of a run -> what it logged.
    """
    known = {metric for kind in KINDS for metric in kind.metrics} | {*NOT_CHARTED}
    others = [name for name in list_metrics(*histories.values()) if name not in known]
    found: dict[tuple[str, str, str], list[Line]] = {}
    for kind in [*KINDS, *(Kind("Other metrics", name, [name]) for name in others)]:
        for colour, metric in enumerate(kind.metrics):
            # A lone metric needs no label, since the title has its name.
            label = metric.rpartition("/")[2] if len(kind.metrics) > 1 else ""
            for split, key, dash in (("training", metric, ""), ("evaluation", f"eval_{metric}", "dashed")):
                for number, (name, history) in enumerate(histories.items()):
                    if key not in history:
                        continue
                    title = kind.title
                    line = Line(", ".join(filter(None, (label, split))), colour, history[key], dash)
                    if len(histories) > 1:
                        title = ", ".join(filter(None, (title, label))) + f" ({split})"
                        line = Line(name, number, history[key], f"d{number % 4}")
                    found.setdefault((kind.group, title, kind.note), []).append(line)
    return [Chart(*heading, lines) for heading, lines in found.items()]


def list_metrics(*histories: History) -> list[str]:
    """Names of all metrics, without eval_, the loss first."""
    names = {key.removeprefix("eval_") for history in histories for key in history}
    return sorted(names, key=lambda name: (name != "loss", name))


def thin(series: Series, limit: int) -> Series:
    """At most `limit` points, all of them logged: the first, the last, and of each stretch between them its least and
    greatest, so that a spike stays. What is not finite counts as the greatest.
    """
    count = len(series.steps)
    if count <= limit:
        return series
    # Two points a stretch, so that there are half as many stretches as points
    order = np.nan_to_num(np.array(series.values), nan=math.inf, neginf=math.inf)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(1, count - 1), (limit - 2) // 2):
        kept |= {int(stretch[order[stretch].argmin()]), int(stretch[order[stretch].argmax()])}
    return Series(*zip(*((series.steps[i], series.values[i]) for i in sorted(kept)), strict=True))


def smooth(series: Series) -> Series | None:
    """The mean of the finite values around each point; None for a series that is short, or has no noise to take out."""
    count = len(series.values)
    finite = np.isfinite(series.values)
    known = np.where(finite, series.values, 0.0)
    # Noise: the curve turns at a quarter of its points or more.
    directions = np.sign(np.diff(known))
    if count < SMOOTHED_FROM or (directions[1:] * directions[:-1] < 0).sum() < count / 4:
        return None
    # Sums over the window, divided by the number of finite values in it
    window = np.ones(2 * (count // (2 * STRETCHES)) + 1)
    sums = np.convolve(known, window, "same")
    counts = np.convolve(finite, window, "same")
    means = np.divide(sums, counts, out=np.full(count, math.nan), where=counts > 0)
    return Series(series.steps, tuple(means.tolist()))


def any_smoothed(found: Iterable[Chart]) -> bool:
    """Is there a line that is drawn as its running mean?"""
    return any(smooth(line.series) for chart in found for line in chart.lines)


def draw_svg(chart: Chart) -> str:
    """What belongs into an <svg viewBox="0 0 WIDTH HEIGHT">: paths, circles and texts with classes of style.css."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context([TEMPLATES / "charts.mplstyle", {"font.size": 12}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        file = StringIO()  # matplotlib's SVG has 72 units per inch
        axes = figure.add_subplot()
        _draw(chart, axes)
        # Margins are fixed but on the left, which has the labels of the y axis.
        left = max(48, 12 + 7 * max(len(label.get_text()) for label in axes.get_yticklabels()))
        figure.subplots_adjust(left / WIDTH, 26 / HEIGHT, 1 - 12 / WIDTH, 1 - 10 / HEIGHT)
        figure.savefig(file, format="svg")
    return "\n".join(_take_shapes(file.getvalue(), chart))


def _take_shapes(drawn: str, chart: Chart) -> Iterator[str]:
    """Of a chart as matplotlib's SVG: the shapes of artists whose gid is a CSS class, without colours, fonts and ids,
    since the page's style sheet colours them, for light and for dark.
    """
    svg = "{http://www.w3.org/2000/svg}"
    # What the marks say, in the order in which they are drawn
    marks = (
        f"{line.label}, step {format_number(step)}: {format_number(value)}"
        for line in chart.lines
        if len(line.series.steps) <= MARKED
        for step, value in line.series.finite()
    )
    for group in ElementTree.fromstring(drawn).iter(f"{svg}g"):
        if not (gid := group.get("id", "")).startswith("."):
            continue
        classes = gid[1:]
        # A path is M x y L x y L x y, in which the Ls may be left out.
        for path in group.findall(f"{svg}path"):
            course = (part if part == "M" else _round(part) for part in path.get("d", "").split() if part != "L")
            yield f'<path class="{classes}" d="{" ".join(course)}"/>'
        for mark in group.iter(f"{svg}use"):
            at = f'cx="{_round(mark.attrib["x"])}" cy="{_round(mark.attrib["y"])}"'
            yield f'<circle class="{classes}" {at} r="2.5"><title>{escape(next(marks))}</title></circle>'
        for text in group.findall(f"{svg}text"):
            at = f'x="{_round(text.attrib["x"])}" y="{_round(text.attrib["y"])}"'
            yield f'<text class="{classes}" {at}>{escape(text.text or "")}</text>'


def _round(coordinate: str) -> str:
    return f"{round(float(coordinate), 1):g}"


def write_image(run: Run) -> None:
    """Write curves.png into the run's folder; nothing where nothing was logged."""
    from matplotlib import style
    from matplotlib.figure import Figure

    found = make_charts({run.name: run.history})
    if not found:
        return
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    with style.context(TEMPLATES / "charts.mplstyle"):
        figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.3), layout="constrained")
        figure.suptitle(f"{run.method.upper()}  {run.name}".strip(), x=0.02, ha="left", fontsize=12, fontweight="bold")
        for position, chart in enumerate(found, 1):
            axes = figure.add_subplot(rows, columns, position)
            _draw(chart, axes)
            legend_rows = math.ceil(len(chart.lines) / 2) if len(chart.lines) > 1 else 0
            axes.set_title(chart.title, pad=8 + 13 * legend_rows)
            if legend_rows:
                axes.legend(ncols=2, bbox_to_anchor=(-0.01, 1.0))  # above the lines, not on them
        figure.savefig(run.folder / NAME, dpi=120)


def _draw(chart: Chart, axes: Any) -> None:
    """Lines, grid and labels; of a long and noisy line the running mean, over what was logged in a faint colour."""
    from matplotlib.artist import setp
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        mean = smooth(line.series)
        colour = f"C{line.colour}"
        if mean:
            axes.plot(
                *thin(line.series, POINTS), color=colour, alpha=0.35, lw=0.8, zorder=1, gid=f".faint {line.css_class}"
            )
        axes.plot(
            *thin(mean or line.series, POINTS),
            "--" if line.dash else "-",
            color=colour,
            label=line.label,
            gid=f".line {line.css_class}",
        )
        if len(line.series.steps) <= MARKED:
            face = colour if line.dash == "dashed" else "white"
            axes.plot(
                *line.series, "o", color=colour, markerfacecolor=face, clip_on=False, gid=f".mark {line.css_class}"
            )
    below: Any = {"xytext": (-22, -9), "textcoords": "offset points", "ha": "right", "va": "top", "color": "#55606e"}
    axes.annotate("step", (0, 0), xycoords="axes fraction", gid=".y", **below)
    # About five round numbers on each axis: from 0 to the last step, and around the values
    points = [point for line in chart.lines for point in line.series.finite()] or [(0.0, 0.0)]
    steps, values = zip(*points, strict=True)
    last = max(1.0, *steps)
    low = min(values)
    high = max(values)
    # A constant gets space around it.
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low = low - (abs(low) / 2 or 1)
        high = high + (abs(high) / 2 or 1)
    round_numbers = [1, 2, 2.5, 5, 10]
    up = MaxNLocator(nbins=5, steps=round_numbers).tick_values(low, high)
    across = MaxNLocator(nbins=5, steps=round_numbers, integer=True).tick_values(0, last)
    across = across[across <= last]
    axes.set(xlim=(0, last), ylim=(up[0], up[-1]))
    axes.set_xticks(across, _label_ticks(across))
    axes.set_yticks(up, _label_ticks(up))
    # The gids by which _take_shapes finds them
    setp(axes.get_ygridlines(), gid=".grid", clip_on=False)
    setp(axes.get_xticklabels(), gid=".x", clip_on=False)
    setp(axes.get_yticklabels(), gid=".y", clip_on=False)


def _label_ticks(ticks: Any) -> list[str]:
    """The shortest texts that tell the ticks apart: 0.25, 40k, 5e-4."""
    largest = max(map(abs, ticks))
    if largest >= 10_000:
        unit, name = (1e6, "M") if largest >= 2e6 else (1e3, "k")
        return [f"{tick / unit:.9g}{name}" if tick else "0" for tick in ticks]
    if largest < 1e-2:
        return [f"{tick:.9g}".replace("e-0", "e-") if tick else "0" for tick in ticks]
    decimals = next((n for n in range(9) if all(math.isclose(round(t, n), t, abs_tol=1e-9) for t in ticks)), 9)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def tabulate(chart: Chart) -> tuple[list[list[str]], bool]:
    """(rows of a table: the step, then each line's value there or ""; are all logged values in it?)."""
    found = [dict(zip(*thin(line.series, TABLE_ROWS), strict=True)) for line in chart.lines]
    rows = [
        [format_number(step), *(format_number(values[step]) if step in values else "" for values in found)]
        for step in sorted({step for values in found for step in values})
    ]
    return rows, all(len(line.series.steps) <= TABLE_ROWS for line in chart.lines)


def format_number(value: float | None) -> str:
    """A value as the pages print it, with four significant digits: 0.4312, 1,234, 5e-07; None is "none"."""
    if value is None:
        return "none"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
