"""An example as text: runs of tokens that are trained or not, and how a page tells them apart.

    Piece      a run of tokens of one kind
    pieces     a prepared row -> its runs, decoded
    branches   a prepared row -> role, ids and mask of each continuation
    marked     runs -> one text: what is trained is green, or in [[brackets]] where there is no colour
    printable  text with its control characters written out, and without its middle where it is long
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..data.kinds import Reader

LONGEST = 1500
"""Characters of a run that are shown."""
GREEN, PLAIN = "\033[1;32m", "\033[0m"


@dataclass
class Piece:
    """A run of tokens of one kind."""

    role: str
    """prompt, completion, chosen or rejected."""
    trained: bool
    """Is the loss of these tokens trained?"""
    text: str
    """What they say, special tokens included, as `printable` has it."""
    tokens: int = 0
    """How many they are; 0 for text that is not tokenised."""


def pieces(row: dict[str, Any], method: Reader, tokenizer: Any) -> list[Piece]:
    """The prompt of a prepared row (see `data.kinds`), then its branches."""
    runs = [("prompt", False, row["prompt_ids"])] if row["prompt_ids"] else []
    for role, ids, mask in branches(row, method):
        for trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
            runs.append((role, trained, [i for i, _ in run]))
    return [Piece(role, trained, printable(tokenizer.decode(ids)), len(ids)) for role, trained, ids in runs]


def branches(row: dict[str, Any], method: Reader) -> Iterator[tuple[str, list[int], list[int]]]:
    """(role, ids, mask of what is trained) of each branch; OPD trains none of them: the student samples its own."""
    for role in ("completion", "chosen", "rejected"):
        if ids := row.get(f"{role}_ids"):
            yield role, ids, row.get("completion_mask") or [int(not method.rows.sampled)] * len(ids)


def marked(runs: Iterable[Piece], colour: bool) -> str:
    """The text of all runs."""
    before, after = (GREEN, PLAIN) if colour else ("[[", "]]")
    return "".join(f"{before}{piece.text}{after}" if piece.trained else piece.text for piece in runs)


def printable(text: str) -> str:
    """Of a text longer than LONGEST, its beginning and its end."""
    half = LONGEST // 2
    text = text if len(text) <= LONGEST else f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
