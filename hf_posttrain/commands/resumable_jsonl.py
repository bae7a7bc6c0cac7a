"""A file of JSON lines that is written in pieces: after a kill the same command goes on behind the last whole piece."""

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError

logger = logging.getLogger(__name__)
END = "end_of_piece"


class ResumableFile:
    """`out`, as OUT.part until it is whole, which no other process writes meanwhile. key: all that its rows depend on,
    by which an earlier try is known.

    Raises InputError where `out` is there already, cannot be written, or OUT.part is of another command.
    """

    def __init__(self, out: Path, key: dict[str, Any]):
        from ..trainer.output_dir import hold

        self.out = out
        self.part = out.with_name(f"{out.name}.part")
        check_new_file(out)
        try:
            self.file = self.part.open("a", encoding="utf-8")
            hold(self.file)
            self.done = self._go_on(key)
        except BlockingIOError:
            self.file.close()
            raise InputError(f"--out: another process writes {self.part}: wait for it, or name another file") from None
        except OSError as error:
            raise InputError(f"--out: {out} cannot be written ({error.strerror})") from error

    def _go_on(self, key: dict[str, Any]) -> int:
        """How many pieces an earlier try has written, whose last line may be cut off; of none, write the first line."""
        count = 0
        head = json.dumps({"made_by": key}, ensure_ascii=False, sort_keys=True) + "\n"
        with self.part.open("rb") as file:
            if (first := file.readline()) and first.decode("utf-8", "replace") != head:
                problem = f"is of an earlier command, with {_differing(first, key)}"
                raise InputError(f"{self.part} {problem}: give that again, delete it, or name another --out")
            whole = len(first)
            for line in file:
                if line.startswith(f'{{"{END}"'.encode()) and line.endswith(b"\n"):
                    count = count + 1
                    whole = file.tell()
        self.file.truncate(whole)
        if not whole:
            self.file.write(head)
            self.file.flush()
        return count

    def left(self, starts: Sequence[int], what: str) -> Iterator[int]:
        """Those of the numbers, one for each piece, whose pieces are not there; with a bar on a terminal, otherwise
        with a line now and then.
        """
        from ..monitoring.progress import TaskProgress

        if self.done:
            logger.info("%s: %d of %d pieces were done before", what, self.done, len(starts))
        with TaskProgress(len(starts), what, "piece", self.done) as steps:
            for start in starts[self.done :]:
                yield start
                steps.add()

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """One piece more."""
        for row in rows:
            print(json.dumps(row, ensure_ascii=False, default=str), file=self.file)
        print(json.dumps({END: self.done}), file=self.file, flush=True)
        self.done += 1

    def finish(self) -> Iterator[dict[str, Any]]:
        """Give the file its name; then all of its rows."""
        self.file.flush()
        new = self.out.with_name(f"{self.out.name}.new")
        try:
            with self.part.open(encoding="utf-8") as written, new.open("w", encoding="utf-8") as file:
                next(written)
                file.writelines(line for line in written if not line.startswith(f'{{"{END}"'))
            new.rename(self.out)
            self.part.unlink()
        except OSError as error:
            new.unlink(missing_ok=True)
            raise InputError(f"--out: {self.out} cannot be written ({error.strerror})") from error
        with self.out.open(encoding="utf-8") as file:
            yield from map(json.loads, file)

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.file.close()
        if kind is not None and self.done == 0:  # nothing is lost
            self.part.unlink(missing_ok=True)
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt(f"{self.done} pieces are in {self.part}; the same command goes on")


def _differing(first: bytes, key: dict[str, Any]) -> str:
    """What an earlier command was given otherwise, by the first line of its file."""
    try:
        before = json.loads(first)["made_by"]
        names = sorted(before.keys() | key.keys())
        return f"another {', '.join(name for name in names if before.get(name) != key.get(name))}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "other lines"


def check_new_file(out: Path) -> None:
    """Raises InputError where a file is there that would be written over, and where there is no folder for it."""
    if out.exists():
        raise InputError(f"--out: {out} is there already: name another file, or delete it")
    if not out.parent.is_dir():
        raise InputError(f"--out: {out} cannot be written: there is no folder {out.parent}")


def write_rows(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines, whole or not at all. Raises InputError where it is there already or cannot be written."""
    check_new_file(out)
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


class ResumableBatches:
    """Results of batches in a file beside other results, from which a command that was killed goes on.

    key: all that they depend on: results of another key are dropped. Without a file nothing is kept.
    """

    def __init__(self, file: Path | None, key: dict[str, Any]):
        self.file = file
        self.found = dict[int, Any]()
        head = json.dumps(key, sort_keys=True, ensure_ascii=False)
        if file is None:
            return
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        if lines[:1] != [head]:
            file.write_text(head + "\n", encoding="utf-8")
        for line in lines[1:] if lines[:1] == [head] else ():
            with contextlib.suppress(ValueError):  # the line at which the command was killed
                self.found |= {int(number): value for number, value in json.loads(line).items()}
        if self.found:
            logger.info("%d rows were done before: %s", len(self.found), file)

    def add(self, found: dict[int, Any]) -> None:
        """Keep the results of a batch, by the numbers of its rows."""
        self.found |= found
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                print("\n" + json.dumps(found), file=file, flush=True)
