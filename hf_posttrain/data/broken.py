"""What is wrong with a data file that could not be read, and in which line.

broken      the first broken line of a file, or of the files of a folder
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path


def broken(path: Path) -> str | None:
    """The first line that is no UTF-8, no JSON object or (CSV) wider than the first; None where none is found.

    A folder is looked through file by file. All of a file is read.
    """
    if path.is_dir():
        found = ((file, broken(file)) for file in sorted(path.rglob("*")) if file.is_file())
        return next((f"{file.relative_to(path)}, {problem}" for file, problem in found if problem), None)
    if not path.is_file() or path.suffix not in _READERS:
        return None
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"byte {line[error.start]:#x}, column {error.start + 1}"
            return f"line {number} is not UTF-8 ({place}): save the file in UTF-8"
    return next(_READERS[path.suffix]([line.decode("utf-8-sig") for line in lines]), None)


def _jsonl(lines: list[str]) -> Iterator[str]:
    """A JSON object a line; or one array of them, over several lines too."""
    first = next((line.strip() for line in lines if line.strip()), "")
    if first in ("[", "{"):
        yield from _json(lines)
        return
    for number, line in enumerate(lines, 1):
        yield from _json([line], number)


def _json(lines: list[str], first: int = 1) -> Iterator[str]:
    """One JSON text, an object or an array of objects, that begins in line `first`."""
    try:
        value = json.loads("\n".join(lines) if any(map(str.strip, lines)) else "{}")
    except json.JSONDecodeError as error:
        yield f"line {first + error.lineno - 1} is not valid JSON ({error.msg}, column {error.colno})"
        return
    for row in value if isinstance(value, list) and len(lines) > 1 else [value]:
        if not isinstance(row, dict):
            yield f'line {first}: a row is an object such as {{"text": ...}}, not {json.dumps(row)[:40]}'


def _csv(lines: list[str]) -> Iterator[str]:
    """Rows no wider than the first, which names the columns, and their quotes closed."""
    reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    width, line = len(next(reader)), 2
    try:
        for row in reader:
            if len(row) > width:
                hint = "a text that holds commas stands in double quotes"
                yield f"line {line} has {len(row)} fields, the first line {width}: {hint}"
            line = reader.line_num + 1
    except csv.Error as error:
        if "limit" not in str(error):  # a long field is fine
            yield f"the row that begins in line {line} has double quotes that are not closed, or not doubled in a text"


_READERS: dict[str, Callable[[list[str]], Iterator[str]]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
