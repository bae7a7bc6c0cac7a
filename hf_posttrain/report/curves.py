"""curves.png: all charts of a run as one picture, drawn by matplotlib."""

import math
from pathlib import Path
from typing import Any

from .charts import Chart, charts
from .history import smoothed, thinned
from .run_folder import Run

NAME = "curves.png"
COLOURS = ("#1f5fbf", "#b8500b", "#1b7a52", "#8036b3")
INK, QUIET, GRID = "#1c2430", "#55606e", "#e2e6eb"
COLUMNS, POINTS = 3, 1000
STYLE: Any = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": QUIET, "xtick.color": QUIET, "ytick.color": QUIET,
    "text.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "xtick.major.size": 0,
    "ytick.major.size": 0, "axes.formatter.useoffset": False, "text.parse_math": False,  # names may have dollars
}  # fmt: skip


def write(run: Run) -> Path | None:
    """Write it into the run's folder; None, and no file, where nothing was logged."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    found = charts(run.history)
    if not found:
        return None
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    with matplotlib.rc_context(STYLE):
        spacing = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
        figure = Figure(figsize=(4.2 * columns, 2.6 * rows + 0.5), layout=spacing)
        figure.suptitle(f"{run.method.upper()}  {run.name}".strip(), x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for chart, axis in zip(found, axes, strict=False):
            _draw(chart, axis)
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        figure.savefig(run.folder / NAME, dpi=120)
    return run.folder / NAME


def _draw(chart: Chart, axis: Any) -> None:
    for line in chart.lines:
        logged, mean, colour = thinned(line.series, POINTS), smoothed(line.series), COLOURS[line.colour]
        style: Any = {"linestyle": (0, (4, 2)), "clip_on": False} if line.dashed else {}
        if line.dashed and not mean:
            style |= {"marker": "o", "markersize": 3}
        if mean:
            axis.plot(logged.steps, logged.values, color=colour, linewidth=0.8, alpha=0.35)
            logged = thinned(mean, POINTS)
        axis.plot(logged.steps, logged.values, label=line.label, color=colour, linewidth=1.3, **style)
    axis.set_xlabel("step")
    axis.locator_params(nbins=5)
    axis.margins(x=0.02)
    axis.set_xlim(left=0)
    legend_rows = math.ceil(len(chart.lines) / 2) if len(chart.lines) > 1 else 0
    axis.set_title(chart.title, pad=8 + 13 * legend_rows)
    if legend_rows:  # above the lines, not on them
        above = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.1, "borderpad": 0.3}
        axis.legend(ncols=2, columnspacing=1.2, handlelength=2.2, labelspacing=0.25, **above)
