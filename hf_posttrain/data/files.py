"""What the file system shows of a data source, found without `datasets`, whose import is slow."""

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import InputError, named, nearest_path

EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_INSTEAD = {
    ".gz": "unpack it first (gunzip)",
    ".zst": "unpack it first (unzstd)",
    ".zip": "unpack it first (unzip)",
    ".xz": "unpack it first (unxz)",
    ".bz2": "unpack it first (bunzip2)",
    ".xlsx": "save it as .csv",
    ".txt": 'write one JSON object a line, such as {"text": ...}, into a .jsonl',
    ".ndjson": "name it .jsonl",
}


def extension(path: Path) -> str:
    """The extension of a data file: of .jsonl.gz it is .jsonl."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def or_unreadable(problem_of: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Wraps a search for a path's problem: that the system does not let us look is a problem too."""

    def looked(path: Any) -> str | None:
        try:
            return problem_of(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"

    return looked


def with_home(path: str | Path) -> Path:
    """The path with `~` written out. Unlike Path.expanduser it leaves the name of an unknown user as it is."""
    return Path(os.path.expanduser(path))


@or_unreadable
def source_problem(source: str) -> str | None:
    """What is wrong with the path of a data source; None for a good one and for a name on the hub."""
    path = with_home(source)
    if path.is_file():
        if extension(path) not in EXTENSIONS:
            instead = f": {_INSTEAD[path.suffix]}" if path.suffix in _INSTEAD else ""
            return f"{path} has an unknown extension; known are {', '.join(EXTENSIONS)}{instead}"
        with path.open("rb") as file:
            head = file.read(4096)
            if not head.strip() and not any(line.strip() for line in file):
                return f"{path} is empty"
        # the first bytes tell files apart that have a name of another kind
        if head.startswith(b"version https://git-lfs"):
            return f"{path} is a pointer of Git LFS, not the data: git lfs pull"
        if path.suffix == ".parquet" and not head.startswith(b"PAR1"):
            return f"{path} is no Parquet file: it does not begin with PAR1"
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            return f"{path} is text in UTF-16: save it in UTF-8"
        return None
    home = with_home("~").resolve()
    if path.is_dir() and path.resolve() in (home, *home.parents):
        return f"{path} is the home folder or one above it: name the file, or the folder that has nothing but data"
    if path.is_dir():
        return None if any(path.iterdir()) else f"the folder {path} is empty"
    # what cannot be a name on the hub must be a path, and this one is missing
    if extension(path) in EXTENSIONS or path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        script = path.parent / "make_data.py"
        if script.is_file() and re.search(rf"\b{re.escape(path.name)}\b", script.read_text(encoding="utf-8")):
            return f"there is no file or folder {path} (python {script} makes it)"
        return f"there is no file or folder {path}{nearest_path(path, aside=True)}"
    return None


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl, .json, .csv or .tsv file (or .gz), with the values that stand there: cells of CSV are text,
    or None where they are empty. Raises InputError with the line that cannot be read.
    """
    separator = {".csv": ",", ".tsv": "\t"}.get(kind := extension(path))
    return _csv_rows(_lines(path), separator) if separator else _json_rows(path, kind)


def _lines(path: Path) -> Iterator[str]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"it is no whole gzip file ({error})") from error
    except UnicodeDecodeError as error:
        place = f"byte {line[error.start]:#x}, column {error.start + 1}"
        raise InputError(f"line {number} is not UTF-8 ({place}): save the file in UTF-8") from error


def _json_rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    # one object or one array of objects, over several lines, or an object a line: in .json and .jsonl files alike
    first = next((line.strip() for line in _lines(path) if line.strip()), "")
    whole = first[:1] == "[" or first == "{" or (kind == ".json" and first[-1:] != "}")
    for number, text in [(1, "".join(_lines(path)))] if whole else enumerate(_lines(path), 1):
        try:
            value = json.loads(text.rstrip()) if text.strip() else None
        except json.JSONDecodeError as error:
            place = f"line {number + error.lineno - 1}"
            hint = ": write one object a line" if error.msg == "Extra data" else ""
            raise InputError(f"{place} is not valid JSON ({error.msg}, column {error.colno}){hint}") from error
        except RecursionError as error:
            raise InputError(f"line {number}: a value is nested too deeply") from error
        if not text.strip():
            continue
        for row in value if whole and isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                found = json.dumps(row)[:40]
                raise InputError(f'line {number}: a row is an object such as {{"text": ...}}, not {found}')
            yield row


def _csv_rows(lines: Iterator[str], separator: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    line = 1
    try:
        header = [name or f"Unnamed: {n}" for n, name in enumerate(next(filter(None, reader), []))]
        if len(header) > len({*header}):
            raise InputError(f"several columns have one name: {named(header)}")
        line = reader.line_num + 1
        for row in reader:
            if len(row) > len(header):
                hint = f"a text that holds {'commas' if separator == ',' else 'tabs'} stands in double quotes"
                raise InputError(f"line {line} has {len(row)} fields, the first line {len(header)}: {hint}")
            if row:
                yield {name: cell or None for name, cell in zip_longest(header, row)}
            line = reader.line_num + 1
    except csv.Error as error:
        problem = "has double quotes that are not closed, or not doubled in a text"
        raise InputError(f"the row that begins in line {line} {problem}") from error
