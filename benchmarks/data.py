"""Time and memory of data preparation against its lower bound and TRL, in one process on CPU.

    python -m benchmarks.data [--rows 2000 20000] [--formats chat pairs] [--against trl] [--tokenizer FOLDER]
        [--repeats 3] [--data FILE_OR_FOLDER] [--out build/data.json]

Three sides take turns, each run in a process of its own:

bound    renders each conversation once, and tokenizes all of them once, in batches, with the positions of the tokens
ours     builds a trainer of hf_posttrain
trl      builds a trainer of TRL, whose `assistant_only_loss` requires a template with {% generation %} tags

A trainer is built twice for a few rows first. The time and the memory of the second one are subtracted, so that
imports, the model and the probing of the template do not count. Times are CPU seconds of the process, which other
processes disturb less.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from .run import GSM8K, ROOT
from .setting import configured, read_rows, train_tokenizer

METHODS = {"chat": "sft", "prompt_completion": "sft", "plain": "sft", "pairs": "dpo", "unpaired": "kto"}
"""Format of the rows -> the method that reads them. `chat` is trained with assistant_only_loss."""
SOURCE_ROWS = 600
"""Number of rows of the file that are repeated."""
WARM_UP = 16
"""Number of rows of the trainer that is built first."""
BATCH = 1000
"""Number of rows that the lower bound tokenizes at once."""
MAX_LENGTH = 1024
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Run = dict[str, float]
"""Result of a process: seconds, peak (bytes)."""


def main() -> int:
    """Run what the command line asks for, print the table, and return the exit code."""
    given = arguments()
    if given.worker:
        print(json.dumps(measure(json.loads(given.worker))))
        return 0
    sides = ["bound", "ours", *(["trl"] if given.against == "trl" else [])]
    results: dict[str, dict[str, dict[int, list[Run]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch), given)
        for form in given.formats:
            results[form] = {side: {count: [] for count in given.rows} for side in sides}
            for count in given.rows:
                for _ in range(given.repeats):
                    for side in sides:
                        spec = {"side": side, "form": form, "rows": count, "folder": scratch}
                        results[form][side][count].append(run_process(spec))
            print("\n".join(table(form, results[form])), flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"written to {given.out}")
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description="Speed of data preparation.")
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 20000], help="numbers of rows")
    parser.add_argument("--formats", nargs="+", choices=[*METHODS], default=[*METHODS], help="formats of the rows")
    parser.add_argument("--against", choices=["trl", "none"], default="trl", help="the third side")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer and a chat template")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--data", type=Path, default=GSM8K, help="folder of GSM8K, or a file of questions and answers")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "data.json", help="file of the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.data.exists():
        parser.error(f"{given.data} does not exist. Set --data")
    return given


def write_files(folder: Path, given: argparse.Namespace) -> None:
    """Write a tokenizer, a config and a file of rows for each format and number of rows."""
    from transformers import AutoTokenizer

    if given.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    else:
        tokenizer = train_tokenizer(given.data)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    configured("tiny", len(tokenizer)).save_pretrained(folder)
    for form in given.formats:
        for count in {WARM_UP, *given.rows}:
            with (folder / f"{form}-{count}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in islice(rows_of(form, given.data), count))


def rows_of(form: str, data: Path) -> Iterator[dict[str, Any]]:
    """Yield rows without end. Each prompt begins with another number, so that no two rows are equal."""
    method = METHODS[form]
    source = read_rows(data, method, SOURCE_ROWS)
    number = 0
    while True:
        for row in source:
            number += 1
            row = row | {"prompt": f"{number}. {row['prompt']}"}
            if form != "plain":
                turn = [{"role": "user", "content": row["prompt"]}]
                answers: dict[str, Any] = {
                    name: [{"role": "assistant", "content": row[name]}]
                    for name in ("completion", "chosen", "rejected")
                    if name in row
                }
                row = {**row, "prompt": turn, **answers}
            yield {"messages": row["prompt"] + row["completion"]} if form == "chat" else row


def run_process(spec: dict[str, Any]) -> Run:
    """Return the result of a side in a process of its own."""
    variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.data", "--worker", json.dumps(spec)],
            cwd=ROOT,
            env={**os.environ, **variables, "HF_DATASETS_CACHE": cache},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"error: {spec}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(spec: dict[str, Any]) -> Run:
    """Return the CPU seconds and the peak of memory that the rows of a file require beyond those of a few rows."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(spec["folder"])
    prepare: Callable[..., object] = {"bound": prepare_bound, "ours": build_ours, "trl": build_trl}[spec["side"]]
    seconds = []
    peaks = []
    for count in (WARM_UP, WARM_UP, spec["rows"]):
        file = str(Path(spec["folder"], f"{spec['form']}-{count}.jsonl"))
        rows = datasets.load_dataset("json", data_files=file, split="train")
        start = time.process_time()
        kept = prepare(rows, tokenizer, spec)
        seconds.append(time.process_time() - start)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        del kept
    return {"seconds": seconds[2] - seconds[1], "peak": peaks[2] - peaks[1]}


def prepare_bound(rows: Any, tokenizer: Any, spec: dict[str, Any]) -> None:
    """Render and tokenize each conversation once."""
    for start in range(0, len(rows), BATCH):
        texts: list[str] = []
        for row in rows.select(range(start, min(start + BATCH, len(rows)))):
            prompt = row.get("messages") or row["prompt"]
            answers = [row[name] for name in ("completion", "chosen", "rejected") if name in row] or [[]]
            conversations = [prompt + answer for answer in answers]
            if isinstance(prompt, str):
                texts += conversations
            else:
                texts += tokenizer.apply_chat_template(conversations, tokenize=False)
        tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)


def options_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the options of both trainers."""
    options = {
        "output_dir": str(Path(spec["folder"], "out")),
        "max_length": MAX_LENGTH,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    return options | ({"assistant_only_loss": True} if spec["form"] == "chat" else {})


def build_ours(rows: Any, tokenizer: Any, spec: dict[str, Any]) -> object:
    """Build a trainer of hf_posttrain."""
    import hf_posttrain

    return build(hf_posttrain, rows, tokenizer, spec)


def build_trl(rows: Any, tokenizer: Any, spec: dict[str, Any]) -> object:
    """Build a trainer of TRL."""
    import trl

    return build(trl, rows, tokenizer, spec)


def build(library: ModuleType, rows: Any, tokenizer: Any, spec: dict[str, Any]) -> object:
    """Build a trainer of a library. Its reference scores no rows yet."""
    name = METHODS[spec["form"]].upper()
    given = {} if name == "SFT" else {"ref_model": tiny_model(spec)}
    options = options_of(spec) | ({} if name == "SFT" else {"precompute_ref_log_probs": False})
    args = getattr(library, f"{name}Config")(**options)
    trainer = getattr(library, f"{name}Trainer")
    return trainer(model=tiny_model(spec), args=args, train_dataset=rows, processing_class=tokenizer, **given)


def tiny_model(spec: dict[str, Any]) -> Any:
    """Return a model that takes no time to build."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(spec["folder"]))


def table(form: str, sides: dict[str, dict[int, list[Run]]]) -> Iterator[str]:
    """Yield the lines about a format: medians, ratios to the other sides, and the growth with the number of rows."""
    for side, by_count in sides.items():
        seconds = {count: statistics.median(run["seconds"] for run in runs) for count, runs in by_count.items()}
        peaks = {count: statistics.median(run["peak"] for run in runs) for count, runs in by_count.items()}
        for count in by_count:
            bound = statistics.median(run["seconds"] for run in sides["bound"][count])
            line = f"{form:18} {side:6} {count:8} rows  {count / seconds[count]:7.0f} rows/s"
            yield line + f"  {seconds[count] / bound:5.2f} x bound  peak +{peaks[count] / 2**20:.0f} MiB"
        counts = sorted(by_count)
        if len(counts) > 1:
            yield f"{form:18} {side:6} time grows as rows ** {growth(counts, seconds):.2f}"


def growth(counts: Sequence[int], seconds: dict[int, float]) -> float:
    """Return the exponent with which time grows from the smallest to the largest number of rows."""
    first, last = counts[0], counts[-1]
    return math.log(seconds[last] / seconds[first]) / math.log(last / first)


if __name__ == "__main__":
    raise SystemExit(main())
