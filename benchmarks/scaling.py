"""How the cost of a training step grows: with row length, vocabulary, answers of a prompt, and rows.

    python -m benchmarks.scaling [--axis length --out outputs/scaling.json --shape small --device cpu --dtype float32]

Each point is a process of its own that takes forward and backward of one batch through the layers and the tiled head.
Writes JSON and, beside it, a plot with the slope fitted to each curve in log-log: 0 is flat, 1 linear, 2 quadratic.
Memory is what came on top of the model.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .setting import SHAPES, configured, random_batch, random_model

BASE = {"length": 512, "vocabulary": 32_768, "branches": 1, "rows": 4}
AXES = {
    "length": [256, 512, 1024, 2048],
    "vocabulary": [16_384, 32_768, 65_536, 131_072],
    "branches": [1, 2, 4, 8],
    "rows": [2, 4, 8, 16],
}
MEASURED = {"seconds": "seconds a step", "added_gb": "GB beyond the model"}


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    given = arguments()
    points = {axis: [point(given, axis, value) for value in values] for axis, values in chosen(given).items()}
    slopes = {axis: {name: slope(rows, name) for name in MEASURED} for axis, rows in points.items()}
    for axis, fitted in slopes.items():
        print(f"{axis:10s} " + ", ".join(f"{MEASURED[name]}: slope {value:.2f}" for name, value in fitted.items()))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    setting = {name: value for name, value in vars(given).items() if name not in ("out", "axis")}
    given.out.write_text(json.dumps({"setting": setting, "points": points, "slopes": slopes}, indent=1) + "\n")
    plot(points, slopes, given.out.with_suffix(".png"))
    print(f"written to {given.out} and {given.out.with_suffix('.png')}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="How costs grow.")
    parser.add_argument("--axis", choices=[*AXES, "all"], default="all")
    parser.add_argument("--points", type=int, default=4, help="of each curve, from its cheap end")
    parser.add_argument("--repeats", type=int, default=3, help="steps of which the median is taken")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=[*SHAPES], default="small", help="the model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--out", type=Path, default=Path("outputs/scaling.json"), help="where the JSON goes")
    given = parser.parse_args()
    if given.points < 2 or given.repeats < 1:
        parser.error("a slope needs --points of at least 2, and --repeats of at least 1")
    return given


def chosen(given: argparse.Namespace) -> dict[str, list[int]]:
    """The axes to run and their values."""
    return {axis: values[: given.points] for axis, values in AXES.items() if given.axis in (axis, "all")}


def point(given: argparse.Namespace, axis: str, value: int) -> dict[str, float]:
    """One measurement, in a fresh process."""
    size = BASE | {axis: value}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measure, (vars(given), size))
    print(f"{axis} {value}: {found['seconds']:.2f} s, {found['added_gb']:.2f} GB", flush=True)
    return {"value": value} | found


def measure(given: dict[str, Any], size: dict[str, int]) -> dict[str, float]:
    """Seconds of a forward and backward (median), and the memory that it added in GB."""
    import torch

    from hf_posttrain.scoring import forward
    from hf_posttrain.scoring.attention_selection import choose_attention, row_multiple
    from hf_posttrain.scoring.head import LogProb
    from hf_posttrain.scoring.layout_selection import choose_layout

    from .flops import wait
    from .worker import GB, memory, peak_memory

    torch.set_num_threads(given["threads"])
    model = random_model(configured(given["shape"], size["vocabulary"]), given)
    forward.enable_scoring(model)
    choose_attention(model, torch.device(given["device"]))
    lengths = [[size["length"] // 2] * (1 + size["branches"])] * size["rows"]
    layout = choose_layout([model], "auto")
    multiple = row_multiple([model])
    batch = random_batch(lengths, size["vocabulary"], layout, given["device"], multiple)
    weights = torch.ones(len(batch["scored"]), device=given["device"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = memory(given["device"])
    seconds = []
    for _ in range(given["repeats"] + 1):
        wait(given["device"])
        start = time.perf_counter()
        forward.score(model, batch, LogProb(batch.targets), weights).value.sum().backward()
        wait(given["device"])
        seconds.append(time.perf_counter() - start)
    added = peak_memory(given["device"]) - before
    return {"seconds": statistics.median(seconds[1:]), "added_gb": added / GB}


def slope(points: list[dict[str, float]], name: str) -> float:
    """d ln(cost) / d ln(value) of a least-squares line."""
    if len(points) < 2:
        return float("nan")
    value, cost = (np.log([max(point[key], 1e-9) for point in points]) for key in ("value", name))
    return float(np.polyfit(value, cost, 1)[0])


def plot(points: dict[str, list[dict[str, float]]], slopes: dict[str, dict[str, float]], file: Path) -> None:
    """A row of curves for each measure, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(MEASURED), len(points), figsize=(4 * len(points), 6), squeeze=False)
    for row, (name, title) in zip(axes, MEASURED.items(), strict=True):
        for cell, (axis, rows) in zip(row, points.items(), strict=True):
            cell.loglog([r["value"] for r in rows], [r[name] for r in rows], marker="o")
            cell.set_title(f"{title}, slope {slopes[axis][name]:.2f}", fontsize=9)
            cell.set_xlabel(axis)
            cell.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
