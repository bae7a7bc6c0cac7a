"""Inference of the data format from column names and values, and advice on columns that no method reads."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import short_repr
from .messages import text_of
from .row_schema import OPTIONAL_COLUMNS, Reader

_NAMES = yaml.safe_load(Path(__file__).with_name("usual_names.yaml").read_text(encoding="utf-8"))
_VALUE_TYPES = {
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
"""Required type of the values of a column, see `value_type`. Other columns hold texts or messages."""
_FORMATS = (  # the most specific ones come first; `system` and `input` are columns that a format may lack
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
KNOWN_COLUMNS = {
    *_NAMES,
    *OPTIONAL_COLUMNS,
    "labels",
    "chosen_ids",
    "rejected_ids",
    "completion_mask",
    "assistant_masks",
    "kto_tag",
}
KNOWN_COLUMNS -= {"prompt_like"}
"""Raw columns that any method reads."""
_WORDS = {"test", "next"}
"""English words that differ by one letter from the name of a column that is read."""
IMAGE_COLUMNS = {"image", "images"}
_SCORES = "score scores rating ratings reward rewards stars quality grade label"


class Suggestion(NamedTuple):
    """The most similar format for a data set.

    Attributes:
        form: The format.
        methods: Names of the methods that read it.
        columns: The columns that were identified, {name in the format: column of the data}.
        missing: The columns of the format for which there is no column.
    """

    form: str
    methods: tuple[str, ...]
    columns: dict[str, str]
    missing: tuple[str, ...]


def prompt_like_columns(columns: Collection[str]) -> list[str]:
    """Return the columns whose name is usual for a prompt or a part of it."""
    return [column for column in columns if _normalize(column) in _NAMES["prompt_like"].split()]


def prompt_problem(rows: Sequence[dict[str, Any]], unread: Collection[str], form: str) -> str | None:
    """Return the problem of the first unread column that seems to be a part of the prompt, with a fix.

    Such a column has a usual name of a prompt, and text that occurs nowhere in the columns that are read.

    Args:
        rows: The first rows.
        unread: The columns that the format does not read.
        form: The format.

    Returns:
        None if there is no such column.
    """

    def words(row: dict[str, Any], columns: Collection[str]) -> str:
        return " ".join(text_of([row.get(column) for column in columns]).split())

    read = [column for column in rows[0] if column not in unread]
    lost_columns = (
        column
        for column in prompt_like_columns(unread)
        if any(words(row, [column]) not in words(row, read) for row in rows)
    )
    if "_ids" in form or (column := next(lost_columns, None)) is None:
        return None

    # the name under which the format reads the column
    is_alpaca = form.startswith("instruction") and "input" not in rows[0]
    target = "prompt" if form in ("chosen + rejected", "text") else "input" if is_alpaca else ""
    if "system" in _normalize(column):
        target = "" if form == "text" else "system"
    columns = {target: column} | ({"completion": "text"} if form == "text" else {})
    if form == "text" and {"instruction", "output"} <= {*unread}:  # Alpaca, with the whole prompt in another column
        target = "unused"
        columns = {"unused": "text"}
    fix = f"Set {format_columns(columns)}" if target else f"Put its text into the {form.split(' + ')[0]}"
    return (
        f"column {column!r} seems to be a part of the prompt, but {form} does not read it. {fix}. If it is not a part "
        f"of the prompt, rename it, for example with {format_columns({'unused': column})}"
    )


def image_problem(rows: Sequence[dict[str, Any]], unread: Collection[str]) -> str | None:
    """Return the problem of an unread column with images, with a fix, or None if there is no such column.

    Args:
        rows: The first rows.
        unread: The columns that are not read.
    """
    for column in sorted(IMAGE_COLUMNS & {*unread}):
        if any(_is_image(row.get(column)) for row in rows):
            fix = (
                "Set model.images: true to train a vision-language model (--images for hf-posttrain data, or its"
                " processor as processing_class in Python)"
            )
            rename = f"rename the column, for example with {format_columns({'unused': column})}"
            return f"column {column!r} holds images, which a text model cannot read. {fix}, or {rename}"
    return None


def _is_image(value: object) -> bool:
    """Return whether a value is an image, the name of an image file, or a list with an image."""
    if isinstance(value, list):
        return any(map(_is_image, value))
    if isinstance(value, dict):
        return bool(value.get("bytes") or value.get("path"))
    extensions = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
    is_file_name = isinstance(value, str) and value.lower().endswith(extensions)
    return is_file_name or type(value).__module__.startswith("PIL.")


def format_columns(columns: dict[str, str]) -> str:
    """Return `columns: {name in the format: column of the data}` as in a recipe."""
    return yaml.safe_dump(
        {"columns": columns}, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None
    ).strip()


def _normalize(column: str) -> str:
    return column.strip().lower().replace("-", "_").replace(" ", "_")


def value_type(value: object) -> str:
    """Return the type of a value.

    It is text, flag (true or false, 1 or 0), number, messages, ids, list, mapping or nothing.
    """
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


def misspelling_problem(columns: Iterable[str]) -> str | None:
    """Return the problem of the first column that no method reads and whose name resembles one that is read."""
    for name in columns:
        normalized = _normalize(name)
        if name not in KNOWN_COLUMNS and (similar := difflib.get_close_matches(normalized, KNOWN_COLUMNS, 1, 0.8)):
            return f"no method reads a column {name!r}; did you mean {similar[0]!r}?"
    return None


def misspelled_columns(unread: Iterable[str], columns: Collection[str], form: str, method: Reader) -> dict[str, str]:
    """Return the columns that `form` does not read and that are likely misspelled, each with the intended name.

    A name is intended if the data lack it and the method would read it: a column of a format that is preferred to
    `form`, or one that rows of `form` may have. The name of the column differs from it by one letter that is added,
    omitted, replaced or exchanged with its neighbor. A plural or a singular counts as another word.

    Args:
        unread: The columns that `form` does not read.
        columns: All columns of the data.
        form: The format of the data.
        method: The method that reads the data.
    """
    preferred = method.rows.formats[: method.rows.formats.index(form)]
    formats = {name for other in preferred for name in other.split(" + ") if "_ids" not in other or "_ids" in form}
    optional: set[str] = set()
    if "_ids" not in form and form != "text":
        optional = OPTIONAL_COLUMNS - (set() if "instruction" in form else {"input"})
    misspelled = {}
    for column in unread:
        normalized = _normalize(column)
        other_words = {name for name in formats | optional if name.rstrip("s") == normalized.rstrip("s")}
        candidates = (formats | optional) - other_words - {*columns}
        intended = sorted(name for name in candidates if _differ_by_one_letter(normalized, name))
        if intended and normalized not in _WORDS:
            misspelled[column] = intended[0]
    return misspelled


def _differ_by_one_letter(first: str, second: str) -> bool:
    """Return whether the names differ by one letter, or by two adjacent letters that are exchanged."""
    longer, shorter = sorted((first, second), key=len, reverse=True)
    if len(shorter) < 4 or len(longer) - len(shorter) > 1 or first == second:
        return False
    if len(longer) > len(shorter):
        if longer[-1].isdigit():  # numbered columns, such as prompt1 and prompt2
            return False
        return any(longer[:n] + longer[n + 1 :] == shorter for n in range(len(longer)))
    differences = [n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    if len(differences) == 1:
        return True
    if len(differences) != 2:
        return False
    i, j = differences
    return j == i + 1 and first[i] == second[j] and first[j] == second[i]


def suggest_format(rows: Sequence[dict[str, Any]], methods: Collection[Reader]) -> Suggestion | None:
    """Return the format that is most similar to the rows, among those that `methods` read.

    Returns:
        None if no column is similar to a column of a format.
    """
    data_columns = {_normalize(column): column for column in rows[0]}
    types = {column: {value_type(row[column]) for row in rows if row.get(column) is not None} for column in rows[0]}
    suggestions = []
    for form in _FORMATS:
        # each column of the format takes the first column of the data with a usual name for it and suitable values
        columns: dict[str, str] = {}
        for name in form.split(" + "):
            allowed = {_VALUE_TYPES[name]} if name in _VALUE_TYPES else {"text", "messages"}
            for column in filter(None, map(data_columns.get, _NAMES[name].split())):
                if column not in columns.values() and types[column] and types[column] <= allowed:
                    columns[name] = column
                    break
        missing = tuple(name for name in form.split(" + ") if name not in columns)
        form = form.removeprefix("system + ").replace(" + input", "")
        readers = tuple(method.name for method in methods if form in method.rows.formats)
        if columns and readers:
            suggestions.append(Suggestion(form, readers, columns, missing))
    return min(suggestions, key=lambda suggestion: len(suggestion.missing), default=None)


def layout_advice(
    rows: Sequence[dict[str, Any]], nearest: Suggestion | None, methods: Collection[Reader]
) -> str | None:
    """Return advice for a known layout that cannot be read by renaming columns, or None for other layouts.

    Args:
        rows: The first rows.
        nearest: The most similar format.
        methods: The methods that are considered.
    """
    columns = rows[0]
    # answers with a column of grades other than true and false
    if nearest and "label" in nearest.missing and {"prompt", "completion"} <= {*nearest.columns}:
        grades = (name for name in f"{_NAMES['label']} {_SCORES}".split() if name in columns)
        return next((label_advice(name, [row.get(name) for row in rows], methods) for name in grades), None)
    return None


def label_advice(column: str, values: Sequence[object], methods: Collection[Reader]) -> str:
    """Return advice on how to convert a column of scores or words to labels.

    Args:
        column: Name of the column.
        values: Its values in the first rows.
        methods: The methods that are considered, of which some train on labels.
    """
    labeled = " or ".join(method.name.upper() for method in methods if method.rows.labeled)
    paired = " or ".join(method.name.upper() for method in methods if method.rows.paired)
    examples = sorted({short_repr(value) for value in values if value is not None})
    if any(value_type(value) == "number" for value in values):
        return (
            f"column {column!r} holds a score ({examples[0]}), but labels for {labeled} must be true or false. Choose "
            f"a threshold and set row['label'] = row[{column!r}] >= threshold, or make pairs for {paired} of two "
            "answers to a prompt"
        )
    return (
        f"column {column!r} holds {', '.join(examples[:5])}, but labels for {labeled} must be true or false. Set "
        f"row['label'] = row[{column!r}] == VALUE, with the value of good answers"
    )
