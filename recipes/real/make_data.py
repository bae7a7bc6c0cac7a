"""Rows of the experiments on real models: `python -m recipes.real.make_data [--gsm8k FOLDER]`.

They come from GSM8K (grade-school problems, MIT license), from the manual that Python contains, and from
recipes/tiny/make_data.py. FOLDER has train.jsonl and test.jsonl of https://github.com/openai/grade-school-math, and
example_model_solutions.jsonl or preference.jsonl. Without it they are downloaded.
"""

import argparse
import json
import pydoc_data.topics
import random
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FOLDER = Path("outputs/real/data")
HELDOUT = 100
"""Number of problems of GSM8K, and of pairs, that are evaluated and not trained on."""
PASSAGES = 64
"""Number of passages of general text."""
CHARACTERS = 1200
"""Longest passage of general text."""


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write the rows of the experiments on real models.")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="folder with the files of GSM8K")
    folder = parser.parse_args().gsm8k
    FOLDER.mkdir(parents=True, exist_ok=True)

    problems = [solved_problem(row) for row in source(folder, "train.jsonl")]
    write("gsm8k_train", problems)
    write("gsm8k_heldout", [solved_problem(row) for row in source(folder, "test.jsonl")][:HELDOUT])
    pairs = preference_pairs(folder)
    write("pairs_train", pairs[HELDOUT:])
    write("pairs_heldout", pairs[:HELDOUT])
    write("answers_train", [answer for pair in pairs[HELDOUT:] for answer in labeled_answers(pair)])
    write("general", [{"text": passage} for passage in general_passages()])
    return 0


def source(folder: Path | None, name: str) -> list[Row]:
    """Return the rows of a file of GSM8K, which is downloaded unless a folder is given."""
    if folder is None:
        with urllib.request.urlopen(URL + name) as response:
            text = response.read().decode("utf-8")
    else:
        text = (folder / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def solved_problem(row: Row) -> Row:
    """Return a problem of GSM8K with its solution."""
    return {"prompt": row["question"], "completion": row["answer"]}


def preference_pairs(folder: Path | None) -> list[Row]:
    """Return a correct and an incorrect solution of each problem of the test set for which models wrote both."""
    if folder is not None and (folder / "preference.jsonl").is_file():
        return source(folder, "preference.jsonl")
    pairs = []
    draw = random.Random(0)
    for row in source(folder, "example_model_solutions.jsonl"):
        solutions = [value for value in row.values() if isinstance(value, dict)]
        right = [solution["solution"] for solution in solutions if solution["is_correct"]]
        wrong = [solution["solution"] for solution in solutions if not solution["is_correct"]]
        if right and wrong:
            pairs.append({"prompt": row["question"], "chosen": draw.choice(right), "rejected": draw.choice(wrong)})
    return pairs


def labeled_answers(pair: Row) -> list[Row]:
    """Return the two answers of a pair as rows with labels."""
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for name in ("chosen", "rejected")
    ]


def general_passages() -> list[str]:
    """Return different passages of Python's manual. They depend on the minor version of Python."""
    passages = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        passage = ""
        for paragraph in text.split("\n\n"):
            if len(passage) + len(paragraph) > CHARACTERS:
                break
            passage += paragraph + "\n\n"
        if len(passage) > CHARACTERS // 2:
            passages.append(passage.strip())
    return list(dict.fromkeys(passages))[:PASSAGES]  # some topics have the same text


def write(name: str, rows: Iterable[Row]) -> None:
    """Write rows to a file of the folder."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{FOLDER / name}.jsonl: {len(lines):,} rows")


if __name__ == "__main__":
    raise SystemExit(main())
