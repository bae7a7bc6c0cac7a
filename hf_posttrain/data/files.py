"""What the file system shows of a data source, told before anything slow is imported."""

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TypeVar

from ..errors import nearest

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Extension of a data file: what reads it in `datasets`."""
_INSTEAD = {
    ".gz": "unpack it first (gunzip)", ".zst": "unpack it first (unzstd)", ".zip": "unpack it first (unzip)",
    ".xz": "unpack it first (unxz)", ".bz2": "unpack it first (bunzip2)", ".tsv": "save it as .csv, with commas",
    ".xlsx": "save it as .csv", ".txt": 'write one JSON object a line, such as {"text": ...}, into a .jsonl',
    ".ndjson": "name it .jsonl",
}  # fmt: skip
_HEAD = 4096
"""Bytes that are looked at in the beginning of a data file."""


Named = TypeVar("Named", str, Path)


def or_unreadable(problem_of: Callable[[Named], str | None]) -> Callable[[Named], str | None]:
    """For what looks for a problem of a path: that the system refuses to say is one as well."""

    @wraps(problem_of)
    def looked(path: Named) -> str | None:
        try:
            return problem_of(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"

    return looked


@or_unreadable
def source_problem(source: str) -> str | None:
    """What is wrong with a data source: a missing path, an unknown extension, an empty or quite different file."""
    path = Path(source).expanduser()
    if path.is_file():
        return _file_problem(path)
    if path.is_dir():
        return None if any(path.iterdir()) else f"the folder {path} is empty"
    if path.suffix in BUILDERS or path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = _made_by(path) or nearest(path.name, beside, listed=False, aside=True)
        return f"there is no file or folder {path}{hint}"
    return None


def _made_by(path: Path) -> str:
    """The end of a message about a missing data file: the make_data.py of its folder, if that names the file."""
    script = path.parent / "make_data.py"
    if script.is_file() and re.search(rf"\b{re.escape(path.name)}\b", script.read_text(encoding="utf-8")):
        return f" (python {script} makes it)"
    return ""


def _file_problem(path: Path) -> str | None:
    if path.suffix not in BUILDERS:
        instead = f": {_INSTEAD[path.suffix]}" if path.suffix in _INSTEAD else ""
        return f"{path} has an unknown extension; known are {', '.join(BUILDERS)}{instead}"
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if not head.strip() and not any(line.strip() for line in file):
            return f"{path} is empty"
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a pointer of Git LFS, not the data: git lfs pull"
    if path.suffix == ".parquet" and not head.startswith(b"PAR1"):
        return f"{path} is no Parquet file: it does not begin with PAR1"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"{path} is text in UTF-16: save it in UTF-8"
    return None
