"""A judge from the quickstart's student: a reward model on its right and wrong answers, and what it is good for.

    python -m recipes.tiny.judge [--seeds 0 1 2] [--output FOLDER] [--fast]        from the root of the repository

For each seed:

    1  student and teacher, SFT from scratch                                       sft_student.yaml, sft_teacher.yaml
    2  the student answers 11,264 problems 4 times; each wrong answer is a pair with the solution   sample, judge, pair
    3  reward models, from the teacher's weights, on the pairs of rm.jsonl, and on these pairs too  rm.yaml
    4  they compare pairs of answers to the 500 held-out problems                  eval
    5  the second one selects one of the student's 8 answers to each of them                   sample, judge
    6  the student is trained in rounds, judged by it and by exact match           rounds.yaml

Problems of the rounds (sums.jsonl) are not among those of stage 2. What is there already is not computed again. Writes
results.json and results.md.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hf_posttrain import run
from hf_posttrain.generation.final_answer import final_answer
from recipes.tiny.make_data import solution

HERE = Path(__file__).parent
ANSWERS = 4
TRIES = 8
"""Answers to each problem of stage 2, and to each held-out problem."""
LONGEST = 16
"""Tokens of an answer."""
ROUNDS = {
    "exact match": [],
    "reward model": ["rounds.judge={{by: model, name: {home}/judge, batch_size: 256}}"],
    "reward model, answers with a reward above 0": [
        "rounds.judge={{by: model, name: {home}/judge, batch_size: 256}}",
        "rounds.pair.threshold=0",
    ],
}
"""Judge of the rounds -> overrides of rounds.yaml."""
FAST = ["train.max_steps=2", "train.eval_steps=1"]
FAST_ROUNDS = ["rounds.judge=benchmarks.rounds:odd_or_even", "rounds.pair={unfinished: true}", "data.train.limit=64"]
"""Overrides that only show that everything runs: models of two steps are never right."""
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and write the table."""
    parser = argparse.ArgumentParser(description="A reward model as a judge of small additions.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("outputs/judge"), help="default: outputs/judge")
    parser.add_argument("--fast", action="store_true", help="two steps a run: shows that everything runs")
    arguments = parser.parse_args(argv)
    subprocess.run([sys.executable, HERE / "make_data.py"], check=True)

    results = [results_of(arguments.output / f"seed_{seed}", seed, arguments.fast) for seed in arguments.seeds]
    page = "\n".join(table(results))
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "results.md").write_text(page + "\n", encoding="utf-8")
    print(page)
    return 0


def results_of(home: Path, seed: int, fast: bool) -> dict[str, float]:
    """Return the results of a seed by the names of the table's rows."""
    for name in ("student", "teacher"):
        train(f"sft_{name}", home / name, seed, fast)
    problems = read(HERE / "train.jsonl") + [solved(row["prompt"]) for row in read(HERE / "prompts.jsonl")[1024:]]
    write(home / "problems.jsonl", problems[: 64 if fast else None])
    pairs = own_pairs(home, "train", home / "problems.jsonl", ANSWERS, seed)
    heldout = own_pairs(home, "heldout", HERE / "heldout.jsonl", TRIES, seed)
    first = f"model.name_or_path={home / 'teacher'}"
    train("rm", home / "judge_of_slips", seed, fast, [first])
    train("rm", home / "judge", seed, fast, [first, data(pairs, heldout)])

    slips = evaluate(home / "judge_of_slips", HERE / "heldout.jsonl", "--columns", "chosen=completion")
    results = {"rm.jsonl alone: pair_accuracy on made-up errors": slips["pair_accuracy"]}
    own = evaluate(home / "judge_of_slips", heldout)
    results["rm.jsonl alone: pair_accuracy on own answers"] = own["pair_accuracy"]
    results |= {"pairs of own answers": float(len(read(pairs)))} | evaluate(home / "judge", heldout)
    results |= best_of(home)
    for name, overrides in ROUNDS.items():
        folder = home / "".join(c if c.isalnum() else "_" for c in f"rounds {name}")
        options = [f"model.name_or_path={home / 'student'}", *(text.format(home=home) for text in overrides)]
        options += FAST_ROUNDS if fast else []
        train("rounds", folder, seed, fast, options)
        curve = [log["eval_exact_match"] for log in history(folder) if "eval_exact_match" in log]
        results["rounds: before"] = curve[0]
        results[f"rounds: {name}"] = curve[-1]
    return results


def data(pairs: Path, heldout: Path) -> str:
    """Return the override of rm.yaml that adds the pairs of own answers."""
    return f"data={{train: [{{path: {HERE / 'rm.jsonl'}}}, {{path: {pairs}}}], eval: {{path: {heldout}}}}}"


def evaluate(model: Path, pairs: Path, *options: object) -> dict[str, float]:
    """Return the metrics of a reward model on pairs."""
    printed = command("eval", model, "--data", pairs, "--batch_size", 256, "--json", *options)
    metrics: dict[str, float] = json.loads(printed)[0]["metrics"]
    return metrics


def own_pairs(home: Path, name: str, problems: Path, count: int, seed: int) -> Path:
    """Return the file with pairs of the solution of a problem and each of the student's wrong answers."""
    answers, judged, pairs = (home / f"{name}_{what}.jsonl" for what in ("answers", "judged", "pairs"))
    if not pairs.exists():
        options = ["--n", count, "--max_completion_length", LONGEST, "--seed", seed]
        command("sample", home / "student", "--prompts", problems, *options, "--out", answers)
        # the data's solution is one more answer; an answer that did not end is none
        rows = [{name: row[name] for name in ("prompt", "completion", "reference")}
                for row in read(answers) if row["stopped"]]  # fmt: skip
        rows += [{"prompt": row["prompt"], "completion": row["completion"], "reference": row["completion"]}
                 for row in read(problems)]  # fmt: skip
        write(home / f"{name}_all.jsonl", rows)
        command("judge", home / f"{name}_all.jsonl", "--by", "exact_match", "--out", judged)
        command("pair", judged, "--method", "rm", "--take", "all", "--out", pairs)
    return pairs


def best_of(home: Path) -> dict[str, float]:
    """Return the exact match of the student's held-out answers: one, the most frequent, the judge's, and any.

    A judge gives equal answers the same reward. Without information it selects one of the different answers.
    """
    judged = home / "heldout_by_model.jsonl"
    if not judged.exists():
        options = ["--by", "model", home / "judge", "--batch_size", 256]
        command("judge", home / "heldout_answers.jsonl", *options, "--out", judged)
    groups: dict[str, list[Row]] = {}
    for row in read(judged):
        groups.setdefault(row["prompt"], []).append(row)

    found: dict[str, list[float]] = {}
    for rows in groups.values():
        finals = [final_answer(row["completion"]) for row in rows]
        right = [final == final_answer(rows[0]["reference"]) for final in finals]
        [(most, _)] = Counter(finals).most_common(1)
        best = max(range(len(rows)), key=lambda n: rows[n]["score"])
        different = dict(zip((row["completion"] for row in rows), right, strict=True))
        values = {"one answer": statistics.fmean(right)}
        values |= {"one of the different answers": statistics.fmean(different.values())}
        values |= {f"majority of {TRIES}": right[finals.index(most)]}
        values |= {f"best of {TRIES} by the reward model": right[best], f"any of {TRIES}": any(right)}
        for name, value in values.items():
            found.setdefault(name, []).append(float(value))
    return {name: statistics.fmean(values) for name, values in found.items()}


# ---- commands and files


def train(recipe: str, folder: Path, seed: int, fast: bool, overrides: Sequence[str] = ()) -> None:
    """Run a recipe of this folder into `folder`, unless it is there."""
    if not (folder / "all_results.json").exists():
        more = [*(FAST if fast else []), f"train.seed={seed}", f"train.output_dir={folder}"]
        command(HERE / f"{recipe}.yaml", *overrides, *more)


def command(*words: object) -> str:
    """Run a command of hf-posttrain in this process, and return its output."""
    print("hf-posttrain", *words, flush=True)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = run.main([*map(str, words)])
    if code:
        raise SystemExit(code)
    return output.getvalue()


def solved(problem: str) -> Row:
    """Return a problem with its solution."""
    a, b = problem.rstrip("=").split("+")
    return solution(int(a), int(b))


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def history(folder: Path) -> list[Row]:
    """Return the log of a run."""
    found: list[Row] = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return found


def table(results: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table with the mean of each result and its lowest and highest seed."""
    yield "| result | mean | lowest to highest |"
    yield "|---|---|---|"
    for name in results[0]:
        values = [result[name] for result in results]
        form = (
            "{:,.0f}"
            if name.startswith("pairs")
            else "{:.3f}"
            if name.endswith(("nll", "error", "reward"))
            else "{:.1%}"
        )
        mean, low, high = (form.format(value) for value in (statistics.fmean(values), min(values), max(values)))
        yield f"| {name} | {mean} | {low} to {high} |"


if __name__ == "__main__":
    raise SystemExit(main())
