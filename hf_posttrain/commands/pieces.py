"""A file of JSON lines that is written in pieces: after a kill the same command goes on behind the last whole piece."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError

END = "end_of_piece"


class PieceFile:
    """`out`, as OUT.part until it is whole. key: all that its rows depend on, by which an earlier try is known.

    Raises InputError where `out` is there already, cannot be written, or OUT.part is of another command.
    """

    def __init__(self, out: Path, key: dict[str, Any]):
        self.out, self.part = out, out.with_name(f"{out.name}.part")
        refuse_existing(out)
        head = json.dumps({"made_by": key}, ensure_ascii=False, sort_keys=True) + "\n"
        self.done = 0
        try:
            if self.part.exists():
                self.done = self._go_on(head)
            else:
                self.part.write_text(head, encoding="utf-8")
            self.file = self.part.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out: {out} cannot be written ({error.strerror})") from error

    def _go_on(self, head: str) -> int:
        """How many pieces an earlier try has written; what came after them is cut off."""
        whole = count = 0
        with self.part.open("rb") as file:
            first = file.readline()
            if first.decode("utf-8", "replace") != head:
                problem = "holds rows of another model, file or option"
                raise InputError(f"{self.part} {problem}: delete it, or name another --out")
            whole = len(first)
            for line in file:
                if line.startswith(f'{{"{END}"'.encode()) and line.endswith(b"\n"):
                    count, whole = count + 1, file.tell()
        os.truncate(self.part, whole)
        return count

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """One piece more."""
        for row in rows:
            print(json.dumps(row, ensure_ascii=False, default=str), file=self.file)
        print(json.dumps({END: self.done}), file=self.file, flush=True)
        self.done += 1

    def finish(self) -> Iterator[dict[str, Any]]:
        """Give the file its name; then all of its rows."""
        self.file.close()
        new = self.out.with_name(f"{self.out.name}.new")
        try:
            with self.part.open(encoding="utf-8") as written, new.open("w", encoding="utf-8") as file:
                next(written)
                file.writelines(line for line in written if not line.startswith(f'{{"{END}"'))
            new.rename(self.out)
            self.part.unlink()
        except OSError as error:  # of another command that writes the same file, for one
            raise InputError(f"--out: {self.out} cannot be written ({error.strerror})") from error
        with self.out.open(encoding="utf-8") as file:
            yield from map(json.loads, file)

    def __enter__(self) -> "PieceFile":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.file.close()
        if kind is not None and self.done == 0:  # nothing is lost
            self.part.unlink(missing_ok=True)
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt(f"{self.done} pieces are in {self.part}; the same command goes on")


def refuse_existing(out: Path) -> None:
    """Raises InputError where a file is there that would be written over."""
    if out.exists():
        raise InputError(f"--out: {out} is there already: name another file, or delete it")


def write_rows(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines, whole or not at all. Raises InputError where it is there already or cannot be written."""
    refuse_existing(out)
    new = out.with_name(f"{out.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        new.rename(out)
    except OSError as error:
        raise InputError(f"--out: {out} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
