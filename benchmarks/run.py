"""Speed and memory against TRL on the same rows: CPU, float32, a random Qwen3 of 44 million weights, GSM8K.

    python -m benchmarks.run --method all --against trl [--rows 64 --batch 8 --repeats 3 --data FILE_OR_FOLDER]

Each run is a process of its own (`worker.py`); the sides take turns, so that a busy machine hurts both. Rows per second
are measured after the first step; caching the reference is not part of them. Prints a table, writes JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .setting import read_rows, write_model

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CASES = {"sft": ("sft",), "dpo": ("dpo", "dpo-cached"), "kto": ("kto", "kto-cached"), "kd": ("kd",)}
HEADER = ("case", "ours rows/s", "theirs rows/s", "speed", "ours GB", "theirs GB", "peak", "beyond model")


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    given = arguments()
    cases = [case for method in (CASES if given.method == "all" else [given.method]) for case in CASES[method]]
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), given.data)
        results = {case: run_case(case, given, Path(scratch)) for case in cases}
    summaries = {case: summary(runs, given.against) for case, runs in results.items()}
    print_table(summaries)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report(given, results, summaries), indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {given.out}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Speed and memory against TRL.")
    parser.add_argument("--method", choices=[*CASES, "all"], default="all")
    parser.add_argument("--against", choices=["trl"], default="trl", help="the other side")
    parser.add_argument("--rows", type=int, default=64, help="rows of one run")
    parser.add_argument("--batch", type=int, default=8, help="rows of one step")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of each run")
    parser.add_argument("--data", type=Path, default=GSM8K, help="GSM8K's folder, or a file of question, answer rows")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark.json"), help="where the JSON goes")
    given = parser.parse_args()
    if given.rows < 2 * given.batch or given.rows % given.batch:
        parser.error(f"--rows must be a multiple of --batch, two of them at least, not {given.rows}")
    if not given.data.exists():
        parser.error(f"no rows: there is no {given.data}; pass --data FILE.jsonl with question and answer")
    return given


def run_case(case: str, given: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """All runs of both sides, in turns: side -> results."""
    method, _, variant = case.partition("-")
    rows = scratch / f"{case}.jsonl"
    rows.write_text("\n".join(map(json.dumps, read_rows(given.data, method, given.rows))), encoding="utf-8")
    spec = {"method": method, "cached": variant == "cached", "rows": str(rows), "batch": given.batch}
    runs: dict[str, list[dict[str, float]]] = {"ours": [], given.against: []}
    for repeat in range(given.repeats):
        for side in runs if repeat % 2 == 0 else reversed(runs):
            runs[side].append(run_worker(spec | {"side": side}, given.threads, scratch))
            result = runs[side][-1]
            print(f"{case:11s} {side:5s} {result['rows_per_second']:7.2f} rows/s, peak {result['peak_gb']:.2f} GB, "
                  f"loss {result['loss']:.4f}, {result['tokens']:.0f} tokens", flush=True)  # fmt: skip
    tokens = {side: results[0]["tokens"] for side, results in runs.items()}
    if len(set(tokens.values())) > 1:
        print(f"{case}: the sides train different tokens: {tokens}", file=sys.stderr)
    return runs


def run_worker(spec: dict[str, Any], threads: int, scratch: Path) -> dict[str, float]:
    """One process with caches of its own. Raises SystemExit with the end of its output where it fails."""
    with tempfile.TemporaryDirectory(dir=scratch) as home:
        spec = spec | {"folder": str(scratch), "result": f"{home}/result.json"}
        Path(home, "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "HF_HOME": home, "HF_DATASETS_CACHE": f"{home}/datasets",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.worker", f"{home}/spec.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {spec['side']} failed in {spec['method']}:\n{done.stderr[-4000:]}")
        return json.loads(Path(spec["result"]).read_text(encoding="utf-8"))


def summary(runs: dict[str, list[dict[str, float]]], against: str) -> dict[str, float]:
    """Medians with their spread, and ratios: speed is ours / theirs, memory too (below 1 is less)."""
    found: dict[str, float] = {}
    for side, name in (("ours", "ours"), (against, "theirs")):
        rates = [run["rows_per_second"] for run in runs[side]]
        found |= {f"{name}_rate": statistics.median(rates), f"{name}_low": min(rates), f"{name}_high": max(rates)}
        for key in ("peak_gb", "added_gb"):
            found[f"{name}_{key}"] = statistics.median(run[key] for run in runs[side])
    found["speed"] = found["ours_rate"] / found["theirs_rate"]
    for key in ("peak", "added"):
        found[key] = found[f"ours_{key}_gb"] / found[f"theirs_{key}_gb"]
    return found


def table(summaries: dict[str, dict[str, float]]) -> Iterator[tuple[str, ...]]:
    """The rows of the table, as text."""
    yield HEADER
    yield tuple("---" for _ in HEADER)
    for case, s in summaries.items():
        rates = [f"{s[f'{n}_rate']:.2f} ({s[f'{n}_low']:.2f}-{s[f'{n}_high']:.2f})" for n in ("ours", "theirs")]
        memory = [f"{s['ours_peak_gb']:.2f}", f"{s['theirs_peak_gb']:.2f}", f"{s['peak']:.2f}x", f"{s['added']:.2f}x"]
        yield (case, *rates, f"{s['speed']:.2f}x", *memory)


def print_table(summaries: dict[str, dict[str, float]]) -> None:
    """Markdown with aligned columns."""
    rows = list(table(summaries))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    print()
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def report(given: argparse.Namespace, results: dict[str, Any], summaries: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds: settings, versions, medians, every run."""
    setting = {name: getattr(given, name) for name in ("rows", "batch", "repeats", "threads", "against")}
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", given.against)}
    return {"setting": setting | {"cpus": os.cpu_count()}, "versions": packages, "summary": summaries, "runs": results}


if __name__ == "__main__":
    sys.exit(main())
