"""The rows, tokenizer and configs of the measurements, written once per run."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from ..setting import SHAPES, configured, train_tokenizer
from .settings import Settings
from .supervisor import Record

ROWS = {"rows": 680, "long": 5400}
"""File of rows -> most words of a question. An answer has at most half as many. A word is a token."""
TINY_ROWS = {"rows": 20, "long": 40}
COUNT = 64
WORDS = 5000
GEMMA_VOCABULARY = 262_144


def write_inputs(settings: Settings) -> Iterator[Record]:
    """Write the rows, and for each shape a folder with its config and the tokenizer, which all share."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(most // 2, most))) + " "

    settings.folder.mkdir(parents=True, exist_ok=True)
    for name, most in settings.pick(ROWS, TINY_ROWS).items():
        rows = [{"question": text(most), "answer": text(most // 2)} for _ in range(COUNT)]
        lines = "\n".join(map(json.dumps, rows))
        rows_file(settings, name).write_text(lines, encoding="utf-8")
    (settings.folder / "words.jsonl").write_text(json.dumps({"text": " " + " ".join(words)}), encoding="utf-8")
    tokenizer = train_tokenizer(settings.folder / "words.jsonl", settings.vocabulary)
    for shape in ["tiny"] if settings.tiny else SHAPES:
        tokenizer.save_pretrained(settings.folder / shape)
        configured(shape, vocabulary(settings, shape)).save_pretrained(settings.folder / shape)
    yield {"rows": COUNT}


def rows_file(settings: Settings, name: str) -> Path:
    """Return where rows of this name are."""
    return settings.folder / f"{name}.jsonl"


def vocabulary(settings: Settings, shape: str) -> int:
    """Return the rows of the embedding of a shape."""
    return GEMMA_VOCABULARY if shape.startswith("gemma") else settings.vocabulary
