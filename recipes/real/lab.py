"""Runs and files of the experiments, each of which is made once, and the tables of their results."""

import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.trainer.output_dir import write_json

HERE = Path("recipes/real")
FAST = [
    "train.max_steps=2",
    "train.logging_steps=1",
    "data.eval.limit=8",
    "data.train.limit=64",
]
"""Overrides that only show that everything runs."""
SHARES = {
    "exact match",
    "well-formed answers",
    "answers that end",
    "held-out pairs",
    "held-out answers",
    "changed answers",
    "recovered",
}
"""Columns whose values are printed as percentages."""
Row = dict[str, Any]
Rows = dict[str, dict[str, dict[str, float]]]
"""Rows of a table: title -> seed -> column -> value."""


@dataclass
class Lab:
    """A folder of runs and files, each of which is made once.

    Args:
        home: The folder.
        seeds: Seeds of the experiment.
        fast: Whether runs have two steps.
        bf16: Whether models are trained in bf16. Evaluations are in the type of the weights, float32.
    """

    home: Path
    seeds: list[int]
    fast: bool = False
    bf16: bool = False

    def train(self, recipe: str, name: str, *overrides: str, full: bool = False) -> Path:
        """Return the folder of a run of a recipe with some overrides, all of whose steps are run if it is `full`."""
        file = HERE / f"{recipe}.yaml"
        options = [*overrides, f"train.output_dir={self.home / name}"]
        if self.fast and not full:
            options += FAST
            lengths = {"max_completion_length", "eval_max_completion_length"} & {*load_recipe(file).train}
            options += [f"train.{length}=8" for length in sorted(lengths)]
        options.append(f"train.bf16={str(self.bf16).lower()}")
        words = ["-m", "hf_posttrain.run", file, *options]
        self.make(self.home / name, *words, recipe=file.read_text(encoding="utf-8"), logged=True)
        return self.home / name

    def train_trl(self, name: str, seed: int) -> Path:
        """Return the folder of a run of trl_lora.py."""
        options = ["--seed", seed, *(["--bf16"] if self.bf16 else []), *(["--max_steps", 2] if self.fast else [])]
        self.make(self.home / name, "-m", "recipes.real.trl_lora", self.home / name, *options, logged=True)
        return self.home / name

    def write(self, command: str, *words: object, out: Path) -> Path:
        """Return the file or folder that a command of hf-posttrain writes."""
        target = [out] if command in ("merge", "prune") else ["--out", out]
        self.make(out, "-m", "hf_posttrain.run", command, *words, *target)
        return out

    def evaluate(self, model: Path, name: str, *options: object) -> dict[str, float]:
        """Return the metrics of `hf-posttrain eval` for a model. The name is that of the rows."""
        out = self.home / "evaluations" / f"{model.name}_{name}"
        limit = ["--limit", 2] if self.fast else []
        words = ["-m", "hf_posttrain.run", "eval", model, *options, "--output", out, "--json", *limit]
        metrics: dict[str, float] = json.loads(self.make(out, *words))[0]["metrics"]
        return metrics

    def draw(self, name: str, runs: Iterable[Path], metric: str) -> None:
        """Write the curves of a metric in some runs to NAME.svg."""
        chart = self.home / f"{name}.svg"
        self.make(chart, "-m", "hf_posttrain.run", "compare", *runs, "--metrics", metric, "--output", chart)

    def make(self, out: Path, *words: object, recipe: str = "", logged: bool = False) -> str:
        """Make a file or folder by running Python, unless it is complete, and return the output of the process.

        Args:
            out: The file or folder. If it is incomplete, it is removed first.
            words: Arguments of Python.
            recipe: Text of the recipe that is run.
            logged: Whether the output goes to the log instead.

        Raises:
            SystemExit: If the process fails, or if `out` was made with other words or another recipe.
        """
        record = self.record(out)
        settings = {"words": [*map(str, words)], "recipe": recipe}
        if record.is_file() and out.exists():
            known = json.loads(record.read_text(encoding="utf-8"))
            if any(known[name] != value for name, value in settings.items()):
                raise SystemExit(f"error: {out} was made with other settings. Choose another folder with --output")
            return str(known["output"])
        if out.is_dir():
            shutil.rmtree(out)
        else:
            out.unlink(missing_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        output = self.python(*words, logged=logged)
        seconds = round(time.perf_counter() - began, 1)
        write_json(record, settings | {"seconds": seconds, "output": output})
        return output

    def record(self, out: Path) -> Path:
        """Return the file that records how a file or folder was made. It exists if `out` is complete."""
        return self.home / "made" / f"{out.name}.json"

    def python(self, *words: object, logged: bool = False) -> str:
        """Run Python in a process of its own, and return its output, or write it to the log."""
        print(time.strftime("%H:%M:%S"), *words, flush=True)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                stdout=log if logged else subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"error: exit code {done.returncode}; see {self.home / 'log.txt'}")
        return done.stdout or ""

    def seconds(self, run: Path) -> float:
        """Return the seconds of a run's process without evaluations. They include scores of a teacher for a cache."""
        total: float = json.loads(self.record(run).read_text(encoding="utf-8"))["seconds"]
        return total - sum(log.get("eval_runtime", 0.0) for log in history(run))

    def minutes(self, *runs: Path) -> dict[str, float]:
        """Return the column with the minutes of a run, or of the runs that lead to a model, without evaluations."""
        return {"minutes": sum(map(self.seconds, runs)) / 60}

    def limit(self, rows: int, fast: int = 8) -> int:
        """Return a number of rows, which is at most `fast` in a fast run."""
        return min(rows, fast) if self.fast else rows


class Table:
    """The results of an experiment, written to NAME.json and NAME.md whenever a row is added.

    Rows of earlier calls stay in the table, so that a later call adds seeds.
    """

    def __init__(self, lab: Lab, name: str, note: str = "") -> None:
        self.note = note
        self.page = lab.home / f"{name}.md"
        self.file = lab.home / f"{name}.json"

    def add(self, title: str, values: dict[str, float], seed: int = 0) -> dict[str, float]:
        """Set the values of a row with one seed, and return them."""
        rows: Rows = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        rows.setdefault(title, {})[str(seed)] = values
        write_json(self.file, rows)
        self.page.write_text(self.render(rows), encoding="utf-8")
        return values

    def render(self, rows: Rows) -> str:
        """Return a page with the mean and the standard error of the seeds."""
        columns = list(dict.fromkeys(column for seeds in rows.values() for row in seeds.values() for column in row))
        lines = ["| | " + " | ".join([*columns, "seeds"]) + " |", "|" + "---|" * (len(columns) + 2)]
        for title, seeds in rows.items():
            cells = [cell(column, [row[column] for row in seeds.values() if column in row]) for column in columns]
            lines.append(f"| {title} | " + " | ".join([*cells, str(len(seeds))]) + " |")
        several = any(len(seeds) > 1 for seeds in rows.values())
        notes = ["After ± is the standard error of the seeds."] * several + [self.note] * bool(self.note)
        return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def cell(column: str, values: Sequence[float]) -> str:
    """Return the mean of the seeds, and its standard error if there are several."""
    if not values:
        return ""
    shown = "{:.1%}" if column in SHARES else "{:.3f}" if "loss" in column else "{:.2f}"
    mean = shown.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {shown.format(statistics.stdev(values) / math.sqrt(len(values)))}"


def history(run: Path) -> list[Row]:
    """Return the log of a run."""
    logs: list[Row] = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return logs
