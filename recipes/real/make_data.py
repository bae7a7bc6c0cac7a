"""Rows of the experiments on real models: `python -m recipes.real.make_data [--gsm8k FOLDER]`.

They come from GSM8K (grade-school problems, MIT license), from the manual that Python contains, and from additions of
two-digit numbers. FOLDER has train.jsonl and test.jsonl of https://github.com/openai/grade-school-math. Without it they
are downloaded.
"""

import argparse
import itertools
import json
import pydoc_data.topics
import random
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FOLDER = Path("outputs/real/data")
HELDOUT = 100
"""Number of problems of GSM8K that are evaluated and not trained on."""
SOLVED_CHARACTERS = 400
"""Longest problem of GSM8K, with its solution."""
PASSAGES = 32
"""Number of passages of general text."""
CHARACTERS = 1200
"""Longest passage of general text."""
ADDITIONS = {"heldout": 300, "train": 1536, "prompts": 1536, "judge": 384, "judge_heldout": 128}
"""Number of additions in each file. No addition, nor its mirror image (b+a), is in two of them."""


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write the rows of the experiments on real models.")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="folder with the files of GSM8K")
    folder = parser.parse_args().gsm8k
    FOLDER.mkdir(parents=True, exist_ok=True)

    write("gsm8k_train", short_problems(source(folder, "train.jsonl")))
    write("gsm8k_heldout", short_problems(source(folder, "test.jsonl"))[:HELDOUT])
    write("general", [{"text": passage} for passage in general_passages()])
    sums = additions()
    for name, count in ADDITIONS.items():
        write(f"sums_{name}", itertools.islice(sums, count))
    return 0


def source(folder: Path | None, name: str) -> list[Row]:
    """Return the rows of a file of GSM8K, which is downloaded unless a folder is given."""
    if folder is None:
        try:
            with urllib.request.urlopen(URL + name) as response:
                text = response.read().decode("utf-8")
        except OSError as error:
            problem = f"error: {URL}{name} cannot be downloaded ({error})"
            raise SystemExit(f"{problem}. Pass the folder of a copy: --gsm8k FOLDER (make: GSM8K=FOLDER)") from error
    else:
        text = (folder / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def short_problems(rows: Iterable[Row]) -> list[Row]:
    """Return the problems of GSM8K whose text and solution have few characters, a third of all."""
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    return [row for row in rows if len(row["prompt"]) + len(row["completion"]) <= SOLVED_CHARACTERS]


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


def additions() -> Iterator[Row]:
    """Yield all additions of two-digit numbers in random order, each in one of its two directions."""
    draw = random.Random(0)
    pairs = [*itertools.combinations_with_replacement(range(10, 100), 2)]
    draw.shuffle(pairs)
    for pair in pairs:
        first, second = draw.sample(pair, 2)
        yield {"prompt": f"{first}+{second}=", "completion": f"#### {first + second}"}


def write(name: str, rows: Iterable[Row]) -> None:
    """Write rows to a file of the folder."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{FOLDER / name}.jsonl: {len(lines):,} rows")


if __name__ == "__main__":
    raise SystemExit(main())
