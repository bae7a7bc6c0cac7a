"""Speed and memory against TRL on the same rows: random Qwen3 models on GSM8K, by default 44M in float32 on CPU.

    python -m benchmarks.run --method all --against trl [--rows 64 --batch 8 --repeats 3 --data FILE_OR_FOLDER]
        [--shots 3 | --answers 4] [--vocabulary 151936] [--precision both]
        [--shape qwen3-0.6b --device cuda --dtype bfloat16 --lora --liger --compile]

Each run is a process of its own (`worker.py`); the sides take turns, so that a busy machine hurts both. Rates are
measured after the first step; caching the reference is not part of them. `busy` is the share of the machine's matrix
rate, measured in each process, that went into useful arithmetic (`flops.py`). Prints a table, writes it and JSON.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .setting import BPE_VOCABULARY, SHAPES, check_device, read_rows, write_model

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CASES = {
    "sft": ("sft", "sft-packed"),
    "dpo": ("dpo", "dpo-cached"),
    "cpo": ("cpo",),
    "rm": ("rm",),
    "kto": ("kto", "kto-cached"),
    "kd": ("kd", "kd-cached"),
    "opd": ("opd",),
}
PACKED_BATCH = 2
SMALLEST = 258
"""Vocabulary: every byte, EOS and padding."""
HEADER = ("case", "side", "rows/s", "tokens/s", "busy", "peak GB", "ours: speed", "peak", "beyond model")
Runs = dict[str, list[dict[str, Any]]]
"""side -> the results of its processes."""


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    given = arguments()
    methods = CASES if given.method in ("all", "each") else [given.method]
    cases = [case for method in methods for case in CASES[method][: 1 if given.method == "each" else None]]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    failed = 0
    page = ""
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), given.data, given.shape, given.vocabulary)
        for case in cases:
            results[case], wrong = run_case(case, given, Path(scratch))
            failed += wrong
            # written after each case: a later one may not come to its end
            summaries = {case: summary(runs) for case, runs in results.items()}
            page = "\n".join(markdown(summaries))
            given.out.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
            given.out.write_text(json.dumps(report(given, results, summaries), indent=1) + "\n", encoding="utf-8")
    print(f"\n{page}\n\nwritten to {given.out}")
    return int(failed > 0)


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Speed and memory against TRL.")
    parser.add_argument("--method", choices=[*CASES, "each", "all"], default="all", help="all: with variants")
    parser.add_argument("--against", choices=["trl", "none"], default="trl", help="the other side")
    parser.add_argument("--rows", type=int, default=64, help="rows of one run")
    parser.add_argument("--batch", type=int, default=8, help="rows of one step")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--shape", choices=[*SHAPES], default="small", help="the model")
    parser.add_argument("--vocabulary", type=int, default=BPE_VOCABULARY, help="rows of its embedding")
    parser.add_argument("--shots", type=int, default=0, help="solved examples before each prompt: long prompts")
    parser.add_argument("--answers", type=int, default=1, help="answers joined into each: long answers")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--precision", choices=["float32", "bf16", "both"], default="float32", help="bf16: autocast")
    parser.add_argument("--attention", help="transformers' attn_implementation; by default each side's quickest")
    parser.add_argument("--liger", action="store_true", help="use_liger_kernel, on both sides")
    parser.add_argument("--compile", action="store_true", help="torch_compile in ours, of the layers")
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16 on all linear layers")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of each run")
    parser.add_argument("--data", type=Path, default=GSM8K, help="GSM8K's folder, or a file of question, answer rows")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark.json"), help="where the JSON goes")
    given = parser.parse_args()
    if given.against != "none" and find_spec(given.against) is None:
        parser.error(f"{given.against} is not installed: pip install -e '.[bench]', or --against none")
    check_device(parser, given.device)
    if given.liger and given.device == "cpu":
        parser.error("--liger needs --device cuda")
    for name in ("batch", "repeats", "answers", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(given, name)}")
    if given.vocabulary < SMALLEST:
        parser.error(f"--vocabulary must be at least {SMALLEST}, not {given.vocabulary}")
    if given.rows < 2 * given.batch or given.rows % given.batch:
        parser.error(f"--rows must be a multiple of --batch, two of them at least, not {given.rows}")
    if not given.data.exists():
        parser.error(f"no rows: there is no {given.data}; pass --data FILE.jsonl with question and answer")
    return given


def run_case(case: str, given: argparse.Namespace, scratch: Path) -> tuple[Runs, int]:
    """All runs of the sides, in turns, and how many sides failed; those are left out."""
    method, _, variant = case.partition("-")
    rows = scratch / f"{case}.jsonl"
    plain = read_rows(given.data, method, given.rows, given.shots, given.answers)
    rows.write_text("\n".join(map(json.dumps, plain)), encoding="utf-8")
    names = ("shape", "device", "dtype", "lora", "liger", "compile", "max_length")
    spec = {"method": method, "variant": variant, "rows": str(rows), "folder": str(scratch), "batch": given.batch}
    spec |= {name: getattr(given, name) for name in names}
    if variant == "packed":  # as many tokens in a step: a packed row is as long as max_length
        spec["batch"] = PACKED_BATCH
    sides = sides_of(given)
    runs: Runs = {side: [] for side in sides}
    for repeat in range(given.repeats):
        for side in [*runs] if repeat % 2 == 0 else [*reversed(runs)]:
            name, _, precision = side.partition(" ")
            low = precision == "bf16"
            own = {"side": name, "bf16": low, "attention": given.attention or quickest(name, given, low)}
            try:
                result = run_worker(spec | own, given.threads, scratch)
            except RuntimeError as error:
                print(f"{case}: {side} failed:\n{error}", file=sys.stderr, flush=True)
                del runs[side]
                continue
            runs[side].append(result)
            rates = f"{result['rows_per_second']:7.2f} rows/s, {result['tokens_per_second']:6.0f} tokens/s"
            told = f"peak {result['peak_gb']:.2f} GB, loss {result['loss']:.4f}, {result['tokens']} tokens"
            print(f"{case:11s} {side:9s} {rates}, {told}", flush=True)
    runs = {side: results for side, results in runs.items() if results}
    tokens = {side: results[0]["tokens"] for side, results in runs.items()}
    if method != "opd" and len(set(tokens.values())) > 1:  # rollouts differ
        print(f"{case}: the sides train different tokens: {tokens}", file=sys.stderr)
    return runs, len(sides) - len(runs)


def sides_of(given: argparse.Namespace) -> list[str]:
    """ours, trl, and each of them with bf16 behind it."""
    names = ["ours"] if given.against == "none" else ["ours", given.against]
    behind = {"float32": [""], "bf16": [" bf16"], "both": ["", " bf16"]}[given.precision]
    return [name + precision for precision in behind for name in names]


def quickest(side: str, given: argparse.Namespace, bf16: bool) -> str:
    """Ours takes sdpa in pieces; for the others FlashAttention where it is installed."""
    low = bf16 or given.dtype == "bfloat16"
    flash = side != "ours" and given.device == "cuda" and low and find_spec("flash_attn")
    return "flash_attention_2" if flash else "sdpa"


def run_worker(spec: dict[str, Any], threads: int, scratch: Path) -> dict[str, Any]:
    """One process with caches of its own. Raises RuntimeError with the end of its output where it fails."""
    with tempfile.TemporaryDirectory(dir=scratch) as home:
        spec = spec | {"result": f"{home}/result.json"}
        Path(home, "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HOME": home,
            "HF_DATASETS_CACHE": f"{home}/datasets",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if spec["device"] == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "benchmarks.worker", f"{home}/spec.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.splitlines()[-25:]))
        return json.loads(Path(spec["result"]).read_text(encoding="utf-8"))


def summary(runs: Runs) -> dict[str, dict[str, float]]:
    """side -> medians of its runs, the spread of rows_per_second, and `busy`."""
    found = {}
    for side, results in runs.items():
        numbers = [key for key, value in results[0].items() if isinstance(value, int | float)]
        medians = {key: statistics.median(run[key] for run in results) for key in numbers}
        rates = [run["rows_per_second"] for run in results]
        # ours counts them; OPD's rollouts are longer in one precision than in the other
        counted = runs.get(of_ours(side)) or results
        useful = counted[0]["token_flops"] * medians["tokens_per_second"]
        found[side] = medians | {"low": min(rates), "high": max(rates), "busy": useful / medians["machine_flops"]}
    return found


def of_ours(side: str) -> str:
    """Our side in the same precision."""
    return "ours" + side.removeprefix(side.split()[0])


def table(summaries: dict[str, dict[str, dict[str, float]]]) -> Iterator[tuple[str, ...]]:
    """The rows of the table, as text."""
    yield HEADER
    yield tuple("---" for _ in HEADER)
    for case, sides in summaries.items():
        for side, s in sides.items():
            rate = f"{s['rows_per_second']:.2f} ({s['low']:.2f}-{s['high']:.2f})"
            own = (rate, f"{s['tokens_per_second']:.0f}", f"{100 * s['busy']:.0f} %", f"{s['peak_gb']:.2f}")
            keys = ("tokens_per_second", "peak_gb", "added_gb")
            ours = sides.get(of_ours(side), s)
            ratios = ("",) * 3 if ours is s else (f"{ours[key] / s[key]:.2f}x" for key in keys)
            yield (case, side, *own, *ratios)


def markdown(summaries: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """The lines of the table, with aligned columns."""
    rows = list(table(summaries))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def report(given: argparse.Namespace, results: dict[str, Any], summaries: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds: settings, versions, medians, every run."""
    setting = {name: value for name, value in vars(given).items() if name not in ("data", "out")}
    others = [] if given.against == "none" else [given.against]
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", *others)}
    return {"setting": setting | {"cpus": os.cpu_count()}, "versions": packages, "summary": summaries, "runs": results}


if __name__ == "__main__":
    sys.exit(main())
