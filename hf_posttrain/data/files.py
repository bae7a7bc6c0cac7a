"""Checks and lossless readers of data files. They do not import `datasets`, which is slow to import."""

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import InputError, join_names, path_hint

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_FIXES = {
    ".gz": "Decompress it first (gunzip)",
    ".zst": "Decompress it first (unzstd)",
    ".zip": "Decompress it first (unzip)",
    ".xz": "Decompress it first (unxz)",
    ".bz2": "Decompress it first (bunzip2)",
    ".xlsx": "Save it as .csv",
    ".txt": 'Write one JSON object per line, such as {"text": ...}, to a .jsonl file',
    ".ndjson": "Rename it to .jsonl",
}
_PathT = TypeVar("_PathT", bound=str | Path)
_Options = ParamSpec("_Options")


def extension(path: Path) -> str:
    """Return the extension of a data file, which is .jsonl for .jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def report_unreadable(
    problem_of: Callable[Concatenate[_PathT, _Options], str | None],
) -> Callable[Concatenate[_PathT, _Options], str | None]:
    """Wrap a function that returns the problem of a path, so that it returns an OSError as a problem too."""

    def wrapped(path: _PathT, *args: _Options.args, **options: _Options.kwargs) -> str | None:
        try:
            return problem_of(path, *args, **options)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"

    return wrapped


def expand_home(path: str | Path) -> Path:
    """Return the path with `~` expanded. Unlike Path.expanduser, it keeps the name of an unknown user."""
    return Path(os.path.expanduser(path))


@report_unreadable
def source_problem(source: str) -> str | None:
    """Return the problem of a data source's path, or None if it is valid or may be a data set on the hub."""
    path = expand_home(source)
    if path.is_file():
        if extension(path) not in EXTENSIONS:
            fix = f". {_FIXES[path.suffix]}" if path.suffix in _FIXES else ""
            return f"{path} has an unknown extension. Supported are {', '.join(EXTENSIONS)}{fix}"
        with path.open("rb") as file:
            head = file.read(4096)
            if not head.strip() and not any(line.strip() for line in file):
                return f"{path} is empty"

        # the first bytes reveal files of another type than their extension
        if head.startswith(b"version https://git-lfs"):
            return f"{path} is a Git LFS pointer instead of the data. Run git lfs pull"
        if path.suffix == ".parquet" and not head.startswith(b"PAR1"):
            return f"{path} is not a Parquet file (it does not begin with PAR1)"
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            return f"{path} is encoded in UTF-16. Save it in UTF-8"
        return None

    home = expand_home("~").resolve()
    if path.is_dir() and path.resolve() in (home, *home.parents):
        return f"{path} is the home folder or a parent of it. Set the path of a file, or of a folder with data alone"
    if path.is_dir():
        return None if any(path.iterdir()) else f"the folder {path} is empty"

    # a source that cannot be a name on the hub must be a path, and this path is missing
    if extension(path) in EXTENSIONS or path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        script = path.parent / "make_data.py"
        if script.is_file() and re.search(rf"\b{re.escape(path.name)}\b", script.read_text(encoding="utf-8")):
            return f"there is no file or folder {path} (run python {script} to create it)"
        return f"there is no file or folder {path}{path_hint(path, in_brackets=True)}"
    return None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of a .jsonl, .json, .csv or .tsv file (or .gz), with unconverted values.

    CSV cells are text, or None if they are empty.

    Raises:
        InputError: If a line cannot be read. The message names the line.
    """
    file_type = extension(path)
    separator = {".csv": ",", ".tsv": "\t"}.get(file_type)
    return _csv_rows(_lines(path), separator) if separator else _json_rows(path, file_type)


def _lines(path: Path) -> Iterator[str]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"the gzip file is truncated or corrupt ({error})") from error
    except UnicodeDecodeError as error:
        position = f"byte {line[error.start]:#x}, column {error.start + 1}"
        raise InputError(f"line {number} is not UTF-8 ({position}). Save the file in UTF-8") from error


def _json_rows(path: Path, file_type: str) -> Iterator[dict[str, Any]]:
    # .json and .jsonl files may both hold an object or an array of objects over several lines, or an object per line
    first = next((line.strip() for line in _lines(path) if line.strip()), "")
    is_document = first[:1] == "[" or first == "{" or (file_type == ".json" and first[-1:] != "}")
    for number, text in [(1, "".join(_lines(path)))] if is_document else enumerate(_lines(path), 1):
        try:
            value = json.loads(text.rstrip()) if text.strip() else None
        except json.JSONDecodeError as error:
            location = f"line {number + error.lineno - 1}"
            fix = ". Write one object per line" if error.msg == "Extra data" else ""
            raise InputError(f"{location} is not valid JSON ({error.msg}, column {error.colno}){fix}") from error
        except RecursionError as error:
            raise InputError(f"line {number}: a value is nested too deeply") from error
        if not text.strip():
            continue
        for row in value if is_document and isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                value_text = json.dumps(row)[:40]
                raise InputError(f'line {number}: a row must be an object such as {{"text": ...}}, found {value_text}')
            yield row


def _csv_rows(lines: Iterator[str], separator: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    line = 1
    try:
        header = [name or f"Unnamed: {n}" for n, name in enumerate(next(filter(None, reader), []))]
        if len(header) == 1 and (other := next((mark for mark in _SEPARATORS if mark in header[0]), None)):
            problem = f"the columns {header[0]!r} are separated by {_SEPARATORS[other]}"
            raise InputError(f"{problem}, not by {_SEPARATORS[separator]}. Save the file with {_SEPARATORS[separator]}")
        if len(header) > len({*header}):
            raise InputError(f"several columns have the same name: {join_names(header)}")
        line = reader.line_num + 1
        for row in reader:
            if len(row) > len(header):
                fix = f"Put a text with {_SEPARATORS[separator]} in double quotes"
                raise InputError(f"line {line} has {len(row)} fields, but the header has {len(header)}. {fix}")
            if row:
                yield {name: cell or None for name, cell in zip_longest(header, row)}
            line = reader.line_num + 1
    except csv.Error as error:
        problem = "has an unclosed double quote, or a double quote inside a text that is not doubled"
        raise InputError(f"the row that begins in line {line} {problem}") from error
