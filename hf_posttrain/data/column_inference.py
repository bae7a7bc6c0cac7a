"""Columns that no method reads -> the nearest format, and what to do about it."""

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

from ..errors import shown
from .messages import text_of
from .row_schema import OPTIONAL, Reader

_NAMES = yaml.safe_load(Path(__file__).with_name("usual_names.yaml").read_text(encoding="utf-8"))
_KINDS = {
    "label": "flag",
    "messages": "messages",
    "text": "text",
    "prompt_ids": "ids",
    "completion_ids": "ids",
    "input_ids": "ids",
    "instruction": "text",
    "input": "text",
    "system": "text",
}
_FORMS = (  # the ones that say more come first; `system` and `input` stand in columns that a format need not have
    "system + prompt + chosen + rejected",
    "instruction + input + chosen + rejected",
    "prompt + chosen + rejected",
    "chosen + rejected",
    "prompt + completion + label",
    "system + prompt + completion",
    "instruction + input + output",
    "prompt + completion",
    "system + messages",
    "messages",
    "prompt_ids + completion_ids",
    "input_ids",
    "text",
    "prompt",
)
_KNOWN = {*_NAMES, *OPTIONAL, "labels", "chosen_ids", "rejected_ids", "completion_mask", "assistant_masks", "kto_tag"}
_KNOWN -= {"asked"}
_WORDS = {"test", "next"}
"""Words of their own that are one letter away from a column of ours."""
PICTURES = {"image", "images"}
_SCORES = "score scores rating ratings reward rewards stars quality grade label"


class Suggestion(NamedTuple):
    """The nearest format: `columns` is {ours: theirs} of all that was found, `missing` what was not."""

    form: str
    methods: tuple[str, ...]
    columns: dict[str, str]
    missing: tuple[str, ...]


def asked(columns: Collection[str]) -> list[str]:
    """Those of the columns that have a usual name of what was asked."""
    return [column for column in columns if _plain(column) in _NAMES["asked"].split()]


def prompt_problem(rows: list[dict], aside: Collection[str], form: str) -> str | None:
    """What to do about the first of the columns `aside`, which `form` does not read, that says what was asked: it has a
    usual name for that, and text that stands nowhere in what is read. None where there is no such column.
    """

    def words(row: dict, columns: Collection[str]) -> str:
        return " ".join(text_of([row.get(column) for column in columns]).split())

    read = [column for column in rows[0] if column not in aside]
    lost = (column for column in asked(aside) if any(words(row, [column]) not in words(row, read) for row in rows))
    if "_ids" in form or (column := next(lost, None)) is None:
        return None
    alpaca = form.startswith("instruction") and "input" not in rows[0]
    ours = "prompt" if form in ("chosen + rejected", "text") else "input" if alpaca else ""
    if "system" in _plain(column):
        ours = "" if form == "text" else "system"
    both = {ours: column} | ({"completion": "text"} if form == "text" else {})
    if form == "text" and {"instruction", "output"} <= {*aside}:  # of Alpaca, and the whole prompt once more
        ours = "unused"
        both = {"unused": "text"}
    mend = f"write {columns_line(both)}" if ours else f"put its text into the {form.split(' + ')[0]}"
    return (
        f"column {column!r} says what was asked, and {form} does not read it: {mend}; if it is no part of the prompt, "
        f"give it another name, such as {columns_line({'unused': column})}"
    )


def picture_problem(rows: list[dict], aside: Collection[str]) -> str | None:
    """What to do about a column with pictures, `aside` from the text that is read; None where there is none."""

    def is_picture(value: object) -> bool:
        if isinstance(value, list):
            return any(map(is_picture, value))
        if isinstance(value, dict):
            return bool(value.get("bytes") or value.get("path"))
        named = isinstance(value, str) and value.lower().endswith((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"))
        return named or type(value).__module__.startswith("PIL.")

    for column in sorted(PICTURES & {*aside}):
        if any(is_picture(row.get(column)) for row in rows):
            meant = f"if that is meant, give it another name, such as {columns_line({'unused': column})}"
            how = (
                "a vision-language model reads them with model.images: true (of hf-posttrain data: --images; in Python"
                " with its processor as processing_class), a text model cannot"
            )
            return f"column {column!r} is vision-related, and text alone is trained: {how}; {meant}"
    return None


def columns_line(columns: dict[str, str]) -> str:
    """`columns: {ours: theirs}` as a recipe has it."""
    return yaml.safe_dump(
        {"columns": columns}, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None
    ).strip()


def _plain(column: str) -> str:
    return column.strip().lower().replace("-", "_").replace(" ", "_")


def kind(value: object) -> str:
    """Of a value: text, flag (true or false, 1 or 0), number, messages, ids, list, mapping or nothing."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return "flag"
    for name, types in {"text": str, "number": int | float, "mapping": dict}.items():
        if isinstance(value, types):
            return name
    if not isinstance(value, list):
        return "nothing"
    if value and all(isinstance(item, dict) and {*item} & {"role", "from"} for item in value):
        return "messages"
    return "ids" if value and all(type(item) is int for item in value) else "list"


def misspelt(columns: Iterable[str]) -> str | None:
    """What is wrong with the first of the names that is nearly one of ours, and none: nothing would read it."""
    for name in columns:
        plain = _plain(name)
        if name not in _KNOWN and (close := difflib.get_close_matches(plain, _KNOWN, 1, 0.8)):
            return f"no method reads a column {name!r}; did you mean {close[0]!r}?"
    return None


def misspelt_aside(aside: Iterable[str], columns: Collection[str], form: str, method: Reader) -> dict[str, str]:
    """Return the columns that `form` does not read and that are likely misspelt, each with the name that is meant.

    A name is meant if the data lack it and the method would read it: a column of a format that is preferred to `form`,
    or one that rows of `form` may have. The name of the column differs from it by one letter that is added, left out,
    replaced or exchanged with its neighbour. A plural or a singular is taken for another word.
    """
    preferred = method.rows.formats[: method.rows.formats.index(form)]
    formats = {name for one in preferred for name in one.split(" + ") if "_ids" not in one or "_ids" in form}
    optional: set[str] = set()
    if "_ids" not in form and form != "text":
        optional = OPTIONAL - (set() if "instruction" in form else {"input"})
    found = {}
    for column in aside:
        plain = _plain(column)
        other_words = {name for name in formats | optional if name.rstrip("s") == plain.rstrip("s")}
        wanted = (formats | optional) - other_words - {*columns}
        meant = sorted(name for name in wanted if _by_one_letter(plain, name))
        if meant and plain not in _WORDS:
            found[column] = meant[0]
    return found


def _by_one_letter(one: str, other: str) -> bool:
    """Return whether the names differ by one letter, or by two neighbours that changed places."""
    longer, shorter = sorted((one, other), key=len, reverse=True)
    if len(shorter) < 4 or len(longer) - len(shorter) > 1 or one == other:
        return False
    if len(longer) > len(shorter):
        if longer[-1].isdigit():  # numbered columns, such as prompt1 and prompt2
            return False
        return any(longer[:n] + longer[n + 1 :] == shorter for n in range(len(longer)))
    apart = [n for n, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    exchanged = len(apart) == 2 and apart[1] == apart[0] + 1 and one[apart[0]] == other[apart[1]]
    return len(apart) == 1 or (exchanged and one[apart[1]] == other[apart[0]])


def suggest(rows: list[dict], methods: Collection[Reader]) -> Suggestion | None:
    """The format that the rows come nearest to among those that `methods` read; None where no column is alike."""
    theirs = {_plain(column): column for column in rows[0]}
    kinds = {column: {kind(row[column]) for row in rows if row.get(column) is not None} for column in rows[0]}
    found = []
    for form in _FORMS:
        # each of our columns takes the first of theirs that has a usual name of it and fitting values
        columns: dict[str, str] = {}
        for ours in form.split(" + "):
            wanted = {_KINDS[ours]} if ours in _KINDS else {"text", "messages"}
            for column in filter(None, map(theirs.get, _NAMES[ours].split())):
                if column not in columns.values() and kinds[column] and kinds[column] <= wanted:
                    columns[ours] = column
                    break
        missing = tuple(ours for ours in form.split(" + ") if ours not in columns)
        form = form.removeprefix("system + ").replace(" + input", "")
        readers = tuple(method.name for method in methods if form in method.rows.formats)
        if columns and readers:
            found.append(Suggestion(form, readers, columns, missing))
    return min(found, key=lambda suggestion: len(suggestion.missing), default=None)


def no_mapping(rows: list[dict], nearest: Suggestion | None, methods: Collection[Reader]) -> str | None:
    """What to do with layouts that new names alone do not make readable; None where this is none that is known."""
    columns = rows[0]
    # answers with a column that grades them otherwise than by true and false
    if nearest and "label" in nearest.missing and {"prompt", "completion"} <= {*nearest.columns}:
        grades = (name for name in f"{_NAMES['label']} {_SCORES}".split() if name in columns)
        return next((label_advice(name, [row.get(name) for row in rows], methods) for name in grades), None)
    return None


def label_advice(column: str, values: list, methods: Collection[Reader]) -> str:
    """How to make labels of a column that holds scores or words, for those of `methods` that train on labels."""
    labelled = " or ".join(method.name.upper() for method in methods if method.rows.labelled)
    paired = " or ".join(method.name.upper() for method in methods if method.rows.paired)
    found = sorted({shown(value) for value in values if value is not None})
    if any(kind(value) == "number" for value in values):
        return (
            f"column {column!r} holds a score ({found[0]}), labels for {labelled} are true or false: choose a limit"
            f" and write row['label'] = row[{column!r}] >= limit; or make pairs for {paired} of two answers to a prompt"
        )
    return (
        f"column {column!r} holds {', '.join(found[:5])}, labels for {labelled} are true or false: write row['label'] ="
        f" row[{column!r}] == VALUE, with the value that good answers have"
    )
