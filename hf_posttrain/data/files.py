"""What the file system shows of a data source, found without `datasets`, whose import is slow."""

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import nearest

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Extension of a data file -> its reader in `datasets`."""
_INSTEAD = {
    ".gz": "unpack it first (gunzip)", ".zst": "unpack it first (unzstd)", ".zip": "unpack it first (unzip)",
    ".xz": "unpack it first (unxz)", ".bz2": "unpack it first (bunzip2)",
    ".xlsx": "save it as .csv", ".txt": 'write one JSON object a line, such as {"text": ...}, into a .jsonl',
    ".ndjson": "name it .jsonl",
}  # fmt: skip


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
        if extension(path) not in BUILDERS:
            instead = f": {_INSTEAD[path.suffix]}" if path.suffix in _INSTEAD else ""
            return f"{path} has an unknown extension; known are {', '.join(BUILDERS)}{instead}"
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
    if path.is_dir():
        return None if any(path.iterdir()) else f"the folder {path} is empty"
    # what cannot be a name on the hub must be a path, and this one is missing
    if extension(path) in BUILDERS or path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        script = path.parent / "make_data.py"
        if script.is_file() and re.search(rf"\b{re.escape(path.name)}\b", script.read_text(encoding="utf-8")):
            return f"there is no file or folder {path} (python {script} makes it)"
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"there is no file or folder {path}{nearest(path.name, siblings, listed=False, aside=True)}"
    return None


def broken(path: Path) -> str | None:
    """The first line, of a file or all files of a folder, that is not UTF-8, not a JSON object or (CSV) too wide."""
    if path.is_dir():
        found = ((file, broken(file)) for file in sorted(path.rglob("*")) if file.is_file())
        return next((f"{file.relative_to(path)}, {problem}" for file, problem in found if problem), None)
    kind = extension(path)
    if not path.is_file() or kind not in (".jsonl", ".json", ".csv", ".tsv"):
        return None
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = file.read().split(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"it is no whole gzip file ({error})"
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"byte {line[error.start]:#x}, column {error.start + 1}"
            return f"line {number} is not UTF-8 ({place}): save the file in UTF-8"
    texts = [line.decode("utf-8-sig") for line in lines]
    separator = {".csv": ",", ".tsv": "\t"}.get(kind)
    return next(_csv_problems(texts, separator) if separator else _json_problems(texts, kind), None)


def _json_problems(lines: list[str], suffix: str) -> Iterator[str]:
    # one object or one array of objects, over several lines, or an object a line: in .json and .jsonl files alike
    first = next((line.strip() for line in lines if line.strip()), "")
    whole = first in ("[", "{") or (suffix == ".json" and first[:1] + first[-1:] != "{}")
    for number, text in [(1, "\n".join(lines))] if whole else enumerate(lines, 1):
        try:
            value = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError as error:
            yield f"line {number + error.lineno - 1} is not valid JSON ({error.msg}, column {error.colno})"
            continue
        for row in value if whole and isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                yield f'line {number}: a row is an object such as {{"text": ...}}, not {json.dumps(row)[:40]}'


def _csv_problems(lines: list[str], separator: str) -> Iterator[str]:
    reader, line = csv.reader((f"{line}\n" for line in lines), delimiter=separator, strict=True), 1
    try:
        width, line = len(next(reader)), 2
        for row in reader:
            if len(row) > width:
                hint = f"a text that holds {'commas' if separator == ',' else 'tabs'} stands in double quotes"
                yield f"line {line} has {len(row)} fields, the first line {width}: {hint}"
            line = reader.line_num + 1
    except csv.Error as error:
        if "limit" not in str(error):  # a long field is fine
            yield f"the row that begins in line {line} has double quotes that are not closed, or not doubled in a text"
