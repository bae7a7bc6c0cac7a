"""Do rounds help? The quickstart's student on its own judged answers: three rounds, one round, and OPD.

    python -m benchmarks.rounds [--seeds 0 1 2] [--out outputs/benchmark_rounds] [--jobs 2] [--fast]

Each setting trains from that seed's student (recipes/tiny/sft_student.yaml) on the same number of its own answers: 8 to
each of 1,024 problems in each of three rounds, or 24 in one of as many optimizer steps. The judge is exact match. OPD's
teacher (sft_teacher.yaml) corrects as many rollouts. Exact match is that of greedy answers to the 500 problems of
heldout.jsonl. Writes results.json and results.md; a run that is there is not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.opd import TINY, each, prepare, train

ROUNDS = 3
ANSWERS = 8
PASSES = 2
"""Rounds, answers to each problem in each, and passes over their rows."""
METHODS = {
    "SFT on the best answer": "",
    "DPO on pairs": "method=dpo train.beta=0.1 train.nll_coef=20 train.learning_rate=5e-4",
    "KTO on labeled answers": "method=kto train.beta=0.1 train.undesirable_weight=0.02 train.learning_rate=5e-4",
}
"""What is trained, and its overrides of recipes/tiny/rounds.yaml. They were chosen on seed 0, for three rounds."""
SHAPES = {
    f"{ROUNDS} rounds": f"rounds.count={ROUNDS} train.num_train_epochs={PASSES}",
    "1 round, as many answers": f"rounds.count=1 rounds.num_generations={ROUNDS * ANSWERS}"
    f" train.num_train_epochs={ROUNDS * PASSES}",
}
OPD_STEPS = ROUNDS * ANSWERS * 1024 // 64
Curve = list[tuple[int, float]]


def main() -> int:
    """Run what is not there yet, and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description="Experiments of rounds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark_rounds"), help="a folder for everything")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--fast", action="store_true", help="two steps a run: shows that everything runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, TINY / "make_data.py"], check=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        each(pool, lambda seed: prepare(given, seed, ""), [(seed,) for seed in given.seeds])
        runs = [(name, seed) for seed in given.seeds for name in settings()]
        each(pool, lambda name, seed: run(given, name, seed), runs)
    results = {name: [curve(folder_of(given, name, seed)) for seed in given.seeds] for name in settings()}
    page = "\n".join(table(results))
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "results.md").write_text(page + "\n", encoding="utf-8")
    print(page)
    return 0


def settings() -> dict[str, tuple[str, str]]:
    """Name -> (recipe of recipes/tiny, overrides)."""
    found = {
        f"{method}, {shape}": ("rounds", f"{how} {many}")
        for method, how in METHODS.items()
        for shape, many in SHAPES.items()
    }
    steps = f"train.max_steps={OPD_STEPS} train.eval_steps={OPD_STEPS // ROUNDS}"
    return found | {"OPD, as many answers": ("opd", steps)}


def folder_of(given: argparse.Namespace, name: str, seed: int) -> Path:
    """Where a run leaves its files."""
    return given.out / f"seed_{seed}" / "".join(c if c.isalnum() else "_" for c in name)


def run(given: argparse.Namespace, name: str, seed: int) -> None:
    """Train a setting with a seed, unless it is there."""
    home = given.out / f"models_{seed}"
    (recipe, overrides) = settings()[name]
    given_models = [f"model.name_or_path={home / 'student'}", f"train.seed={seed}"]
    given_models += [f"teacher.name_or_path={home / 'teacher'}"] if recipe == "opd" else []
    if given.fast and recipe == "rounds":
        given_models += ["rounds.pair.unfinished=true", "rounds.judge=benchmarks.rounds:odd_or_even"]
    train(given, recipe, folder_of(given, name, seed), [*overrides.split(), *given_models])


def odd_or_even(prompts: Sequence[str], completions: Sequence[str], references: Sequence[str | None]) -> list[float]:
    """A judge for --fast: models of two steps are never right."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def curve(folder: Path) -> Curve:
    """(step, exact match) of a run's evaluations."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [(log["step"], log["eval_exact_match"]) for log in state["log_history"] if "eval_exact_match" in log]


def table(results: dict[str, list[Curve]]) -> Iterator[str]:
    """A row for each setting: exact match before, after each third of its steps, and the spread of the last."""
    yield f"| setting | before | {' | '.join(f'after {n}/{ROUNDS}' for n in range(1, ROUNDS + 1))} | least to most |"
    yield f"|---|{'---|' * (ROUNDS + 2)}"
    for name, runs in results.items():
        columns: list[Any] = [*zip(*([value for _, value in run] for run in runs), strict=False)]
        last = columns[-1]
        means = [f"{statistics.fmean(column):.1%}" for column in columns]
        yield f"| {name} | {' | '.join(means)} | {min(last):.1%} to {max(last):.1%} |"


if __name__ == "__main__":
    sys.exit(main())
