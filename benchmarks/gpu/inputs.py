"""The rows, tokenizer and configs of the measurements, written once per run."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from ..setting import SHAPES, configured, train_tokenizer
from .settings import Settings
from .supervisor import Record

MOST_WORDS = 680
TINY_WORDS = 20
"""The longest question. An answer has at most half as many words, and a word is a token."""
COUNT = 64
WORDS = 5000
GEMMA_VOCABULARY = 262_144


def write_inputs(settings: Settings) -> Iterator[Record]:
    """Write the rows, and for each shape a folder with its config and the tokenizer, which all share.

    Every text begins with a space and ends without one, so that a prompt and its answer are the same tokens whether
    they are tokenized together or apart.
    """
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [" " + "".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]

    def text(most: int) -> str:
        return "".join(draw.choices(words, k=draw.randint(most // 2, most)))

    settings.folder.mkdir(parents=True, exist_ok=True)
    most = settings.pick(MOST_WORDS, TINY_WORDS)
    rows = [{"question": text(most), "answer": text(most // 2)} for _ in range(COUNT)]
    rows_file(settings).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (settings.folder / "words.jsonl").write_text(json.dumps({"text": "".join(words)}), encoding="utf-8")
    tokenizer = train_tokenizer(settings.folder / "words.jsonl", settings.vocabulary)
    for shape in ["tiny"] if settings.tiny else SHAPES:
        tokenizer.save_pretrained(settings.folder / shape)
        configured(shape, vocabulary(settings, shape)).save_pretrained(settings.folder / shape)
    yield {"rows": COUNT}


def rows_file(settings: Settings) -> Path:
    """Return the file of question and answer rows."""
    return settings.folder / "rows.jsonl"


def vocabulary(settings: Settings, shape: str) -> int:
    """Return the rows of the embedding of a shape."""
    return GEMMA_VOCABULARY if shape.startswith("gemma") else settings.vocabulary
