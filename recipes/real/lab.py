"""Runs and files of the experiments, each of which is made once, and the tables of their results."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_posttrain.commands.resumable_jsonl import write_rows
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.trainer.output_dir import lock_file, write_json

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
    "held-out pairs before training",
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
        bf16: Whether runs train and evaluate in bf16. `evaluate` uses the type of the saved weights, float32.
    """

    home: Path
    seeds: list[int]
    fast: bool = False
    bf16: bool = False

    def train(
        self,
        recipe: str,
        name: str,
        *overrides: str,
        full: bool = False,
        bf16: bool | None = None,
        measured: Iterable[Path] = (),
    ) -> Path:
        """Return the folder of a run of a recipe.

        Args:
            recipe: Name of a recipe of this folder.
            name: Name of the run's folder.
            overrides: Values that override those of the recipe.
            full: Whether all steps are run in a fast lab too.
            bf16: Whether the run is in bf16 (default: that of the lab).
            measured: Runs whose times determine an override.
        """
        file = HERE / f"{recipe}.yaml"
        options = [*overrides, f"train.output_dir={self.home / name}"]
        loaded = load_recipe(file)
        if self.fast and not full:
            options += FAST
            lengths = {"max_completion_length", "eval_max_completion_length"} & {*loaded.train}
            options += [f"train.{length}=8" for length in sorted(lengths)]
        options.append(f"train.bf16={str(self.bf16 if bf16 is None else bf16).lower()}")
        words = ["-m", "hf_posttrain.run", file, *options]
        self.make(self.home / name, *words, recipe=loaded.to_dict(), logged=True, also=measured)
        return self.home / name

    def train_trl(self, name: str, seed: int) -> Path:
        """Return the folder of a run of trl_lora.py."""
        options = ["--seed", seed, *(["--bf16"] if self.bf16 else []), *(["--max_steps", 2] if self.fast else [])]
        words = ["-m", "recipes.real.trl_lora", self.home / name, *options]
        self.make(self.home / name, *words, recipe=load_recipe(HERE / "gsm8k_lora.yaml").to_dict(), logged=True)
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
        chart.unlink(missing_ok=True)
        self.python("-m", "hf_posttrain.run", "compare", *runs, "--metrics", metric, "--output", chart)

    def write_rows(self, out: Path, rows: Iterable[Row], source: Path) -> None:
        """Write rows that were read from another file of the lab. They are made again whenever that file is."""
        out.unlink(missing_ok=True)
        write_rows(out, rows)
        shutil.copyfile(self.record(source), self.record(out))

    def make(
        self,
        out: Path,
        *words: object,
        recipe: Row | None = None,
        logged: bool = False,
        also: Iterable[Path] = (),
    ) -> str:
        """Make a file or folder by running Python, and return the output of the process.

        If it is complete, and its inputs were not made again since, nothing is run and the earlier output is returned.
        Inputs are the files and folders of the lab that `words` name. Another process that makes the same is waited
        for.

        Args:
            out: The file or folder. If it is incomplete, it is removed first.
            words: Arguments of Python.
            recipe: The recipe that is run.
            logged: Whether the output goes to the log instead.
            also: Inputs that `words` do not name.

        Raises:
            SystemExit: If the process fails, or if `out` was made with other words or another recipe.
        """
        record = self.record(out)
        record.parent.mkdir(parents=True, exist_ok=True)
        with only_one(record.with_suffix(".lock")) as lock:
            texts = [*map(str, words)]
            settings = {"words": texts, "recipe": json.loads(json.dumps(recipe))}
            inputs = self.inputs(out, [*texts, *map(str, also)])
            known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() and out.exists() else {}
            if known.get("inputs") == inputs:
                if any(known[name] != value for name, value in settings.items()):
                    raise SystemExit(
                        f"error: {out} was made with other settings. Delete it, or choose another folder with --output"
                    )
                return str(known["output"])
            record.unlink(missing_ok=True)
            if out.is_dir():
                shutil.rmtree(out)
            else:
                out.unlink(missing_ok=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            began = time.time()
            output = self.python(*words, logged=logged, lock=lock)
            made = {"made": began, "seconds": round(time.time() - began, 1), "output": output}
            write_json(record, settings | {"inputs": inputs} | made)
        return output

    def inputs(self, out: Path, words: Sequence[str]) -> dict[str, float]:
        """Return the files and folders of the lab, other than `out`, that some words name -> when they were made."""
        names = set(re.findall(re.escape(str(self.home)) + r"/([\w.-]+)", " ".join(words))) - {out.name}
        records = {name: self.record(self.home / name) for name in sorted(names)}
        return {
            name: json.loads(record.read_text(encoding="utf-8"))["made"]
            for name, record in records.items()
            if record.is_file()
        }

    def record(self, out: Path) -> Path:
        """Return the file that records how a file or folder was made. It exists if `out` is complete."""
        return self.home / "made" / f"{out.name}.json"

    def python(self, *words: object, logged: bool = False, lock: IO[str] | None = None) -> str:
        """Run Python in a process of its own, and return its output, or write it to the log.

        The process holds the lock until it ends, even if this one is killed.
        """
        print(time.strftime("%H:%M:%S"), *words, flush=True)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                stdout=log if logged else subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                pass_fds=[lock.fileno()] if lock else [],
            )
        if done.returncode:
            raise SystemExit(f"error: exit code {done.returncode}; see {self.home / 'log.txt'}")
        return done.stdout or ""

    def minutes(self, *runs: Path) -> dict[str, float]:
        """Return the columns with the minutes of a run, or of the runs that lead to a model, without evaluations.

        "minutes" are those of the processes, with the start of Python, a report, and scores of a teacher for a cache.
        """
        seconds = 0.0
        for run in runs:
            seconds += json.loads(self.record(run).read_text(encoding="utf-8"))["seconds"]
            seconds -= sum(log.get("eval_runtime", 0.0) for log in history(run))
        return {"minutes": seconds / 60, "minutes of training": sum(map(training_seconds, runs)) / 60}

    def limit(self, rows: int, fast: int = 8) -> int:
        """Return a number of rows, which is at most `fast` in a fast run."""
        return min(rows, fast) if self.fast else rows


class Table:
    """The results of an experiment, written to NAME.json and NAME.md whenever a row is added."""

    def __init__(self, lab: Lab, name: str, note: str = "") -> None:
        self.note = note
        self.page = lab.home / f"{name}.md"
        self.file = lab.home / f"{name}.json"
        self.rows: Rows = {}

    def add(self, title: str, values: dict[str, float], seed: int = 0) -> dict[str, float]:
        """Set the values of a row with one seed, and return them."""
        self.rows.setdefault(title, {})[str(seed)] = values
        write_json(self.file, self.rows)
        self.page.write_text(self.render(), encoding="utf-8")
        return values

    def render(self) -> str:
        """Return a page with the mean and the standard error of the seeds."""
        rows = self.rows
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


def training_seconds(run: Path) -> float:
    """Return the seconds of a run's training loop without evaluations."""
    seconds = 0.0
    for log in history(run):
        seconds -= log.get("eval_runtime", 0.0)
        if "train_runtime" in log:  # includes the evaluations before it, and not that of the final model
            return seconds + float(log["train_runtime"])
    raise SystemExit(f"error: {run} has not been trained to the end")


@contextmanager
def only_one(file: Path) -> Iterator[IO[str]]:
    """Lock a file, as soon as no other process has locked it, and yield it open."""
    with file.open("a", encoding="utf-8") as lock:
        while True:
            try:
                lock_file(lock)
                break
            except BlockingIOError:
                time.sleep(1)
        yield lock


def history(run: Path) -> list[Row]:
    """Return the log of a run."""
    logs: list[Row] = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return logs
