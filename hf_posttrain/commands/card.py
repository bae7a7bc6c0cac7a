"""The command `hf-posttrain card ROWS`, which writes a dataset card in the format of the Hub next to rows.

ROWS is a file that `sample`, `judge` or `pair` wrote, or the folder of a run in rounds, whose rows are in `_rounds`.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.files import extension, read_rows
from ..errors import InputError, error_context
from ..recipe.cli import Parser, print_output
from ..report.page import describe_rounds, render
from ..report.run_folder import ROUNDS, Run, read_run
from .resumable_jsonl import check_new_file, write_lines

COLUMNS = {
    "prompt": "Prompt as the model reads it, with the special tokens of its chat template.",
    "completion": "Answer, without the terminal token.",
    "chosen": "The better answer.",
    "rejected": "The worse answer.",
    "label": "Whether the answer is good.",
    "score": "Score of the judge. Higher is better.",
    "judge": "Judge that gave the score.",
    "stopped": "Whether the answer ended with a terminal token.",
    "reference": "The right answer.",
    "messages": "The prompt as messages.",
    "asked": "Prompt without special tokens.",
    "answered": "Answer without special tokens.",
    "prompt_ids": "Token ids of the prompt.",
    "completion_ids": "Token ids of the answer.",
    "logps": "Log-probabilities of the tokens of the answer.",
    "used": "1 if the answer was trained as a good one, -1 as a bad one, 0 if it was not trained.",
}
SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
    100_000_000: "10M<n<100M",
}
"""Number of rows that is too large for a size category of the Hub -> the category."""
MAX_EXAMPLE_CHARACTERS = 2_000
"""Longest text of the example row."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the card, and return the exit code.

    Raises:
        InputError: For files that are not rows, runs without rounds, and a card that exists.
    """
    parser = Parser(
        prog="hf-posttrain card",
        description="Write a dataset card for rows of sample, judge, pair or rounds, to upload them to the Hub.",
        epilog="example:\n  hf-posttrain card rows/answers.jsonl --model Qwen/Qwen3-0.6B\n"
        "  hf upload NAME/ROWS rows --repo-type dataset",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", metavar="ROWS", type=Path, help="file of rows, or output_dir of a run in rounds")
    parser.add_argument("--model", metavar="NAME", help="model that sampled the answers (default: that of the run)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="file to write, which must not exist (default: README.md of the rows)"
    )
    arguments = parser.parse_args(argv)
    source: Path = arguments.rows
    run = read_run(source) if source.is_dir() else None
    files = list_files(source, run)
    out = arguments.out or files[0].parent / "README.md"
    check_new_file(out)
    write_lines(out, [render_card(files, arguments.model, run)])
    print_output(f"wrote {out}")
    return 0


def list_files(source: Path, run: Run | None) -> list[Path]:
    """Return the file of rows, or the files of all rounds of a run.

    Raises:
        InputError: If there is none.
    """
    if run is None:
        if not source.is_file():
            raise InputError(f"{source} does not exist. Give a file of rows, or the output_dir of a run in rounds")
        if extension(source) in (".csv", ".tsv"):
            raise InputError(f"{source} is a table. Give a file of JSON lines")
        return [source]
    folder = (source / ROUNDS).parent
    files = sorted(folder.glob("[0-9]*.jsonl"), key=lambda file: int(file.stem))
    if not files:
        raise InputError(f"{source} has no rows of rounds in {folder.name}. Give a file of rows")
    return files


def render_card(files: Sequence[Path], model: str | None, run: Run | None) -> str:
    """Return the card of files of rows.

    Args:
        files: The files.
        model: Model that sampled the answers.
        run: Run in rounds that wrote the files.

    Raises:
        InputError: For a line that is not a JSON object, and for a file without rows.
    """
    from huggingface_hub import DatasetCardData

    from ..report.card import is_hub_name

    rows: list[dict[str, Any]] = []
    for file in files:
        with error_context(str(file)):
            added = [*read_rows(file)]
        if not added:
            raise InputError(f"{file} has no rows")
        rows += added
    model = model or (run.base_model if run else None)
    size = next((name for limit, name in SIZES.items() if len(rows) < limit), "100M<n<1B")
    front_matter = DatasetCardData(
        task_categories=["text-generation"],
        size_categories=[size],
        tags=["hf_posttrain", "synthetic"],
        configs=[{"config_name": "default", "data_files": [file.name for file in files]}],
    ).to_yaml()
    scores = [row["score"] for row in rows if isinstance(row.get("score"), int | float)]
    stopped = [row["stopped"] for row in rows if "stopped" in row]
    facts = {
        "Rows": f"{len(rows):,}",
        "Prompts": f"{len({json.dumps(row.get('prompt')) for row in rows}):,}",
        "Mean score": f"{statistics.fmean(scores):.4g}" if scores else "",
        "Answers that ended": f"{statistics.fmean(stopped):.1%}" if stopped else "",
    }
    return render(
        "dataset_card.md",
        front_matter=front_matter,
        name=files[0].parent.resolve().name if run is None else f"Answers of {run.name}",
        files=[file.name for file in files],
        model=f"[{model}](https://huggingface.co/{model})" if model and is_hub_name(model) else model,
        rounds=describe_rounds(run) if run else "",
        facts={name: value for name, value in facts.items() if value},
        columns={name: COLUMNS.get(name, "") for name in dict.fromkeys(name for row in rows for name in row)},
        example=json.dumps(shorten(rows[0]), indent=1, ensure_ascii=False),
    )


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without lists of numbers, whose long texts end with "..."."""
    return {
        name: shorten_texts(value)
        for name, value in row.items()
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value)
    }


def shorten_texts(value: Any) -> Any:
    """Return a value of JSON whose long texts end with "..."."""
    if isinstance(value, str):
        return value if len(value) <= MAX_EXAMPLE_CHARACTERS else value[:MAX_EXAMPLE_CHARACTERS] + "..."
    if isinstance(value, list):
        return [shorten_texts(item) for item in value]
    if isinstance(value, dict):
        return {name: shorten_texts(item) for name, item in value.items()}
    return value
