"""JSON lines files that are written in chunks, so that an interrupted command resumes after the last complete chunk."""

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import InputError, count_noun

logger = logging.getLogger(__name__)
END = "end_of_piece"
"""Key of the line that ends a chunk."""


class ResumableFile:
    """A file that is named OUT.part until it is complete, and is locked against other processes.

    Args:
        out: The file to write, which must not exist.
        key: Everything that its rows depend on. A partial file is only continued if it has the same key.

    Raises:
        InputError: If `out` exists or cannot be written, or if OUT.part belongs to another command.
    """

    def __init__(self, out: Path, key: dict[str, Any]) -> None:
        from ..trainer.output_dir import lock_file

        self.out = out
        self.part = out.with_name(f"{out.name}.part")
        check_new_file(out)
        try:
            self.file = self.part.open("a", encoding="utf-8")
            lock_file(self.file)
            self.done = self._resume(key)
            """Number of complete chunks."""
        except BlockingIOError:
            self.file.close()
            problem = f"{self.part} is being written by another process"
            raise InputError(f"--out: {problem}. Wait for that process, or set another --out") from None
        except OSError as error:
            raise InputError(f"--out: {out} cannot be written ({error.strerror})") from error

    def _resume(self, key: dict[str, Any]) -> int:
        """Return the number of complete chunks in OUT.part, and truncate it after them.

        The last line may be incomplete. The header line is written if there are no complete chunks.
        """
        count = 0
        header = json.dumps({"made_by": key}, ensure_ascii=False, sort_keys=True) + "\n"
        with self.part.open("rb") as file:
            if (first := file.readline()) and first.decode("utf-8", "replace") != header:
                problem = f"{self.part} was written by an earlier command with {_describe_difference(first, key)}"
                raise InputError(f"{problem}. Run that command again, delete the file, or set another --out")
            size = len(first)
            for line in file:
                if line.startswith(f'{{"{END}"'.encode()) and line.endswith(b"\n"):
                    count = count + 1
                    size = file.tell()
        self.file.truncate(size)
        if not size:
            self.file.write(header)
            self.file.flush()
        return count

    def remaining(self, starts: Sequence[int], title: str) -> Iterator[int]:
        """Yield the start of each chunk that is not written yet, and report the progress.

        Args:
            starts: Start of every chunk of the file.
            title: Title of the progress bar, or of the log lines if the output is not a terminal.
        """
        from ..monitoring.progress import TaskProgress

        if self.done:
            logger.info("%s: resuming after %d of %d chunks", title, self.done, len(starts))
        with TaskProgress(len(starts), title, "chunk", self.done) as progress:
            for start in starts[self.done :]:
                yield start
                progress.add()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one chunk."""
        for row in rows:
            print(json.dumps(row, ensure_ascii=False, default=str), file=self.file)
        print(json.dumps({END: self.done}), file=self.file, flush=True)
        self.done += 1

    def finish(self) -> Iterator[dict[str, Any]]:
        """Give the file its final name, and yield all of its rows."""
        self.file.flush()
        new = self.out.with_name(f"{self.out.name}.new")
        try:
            with self.part.open(encoding="utf-8") as part, new.open("w", encoding="utf-8") as file:
                next(part)
                file.writelines(line for line in part if not line.startswith(f'{{"{END}"'))
            new.rename(self.out)
            self.part.unlink()
        except OSError as error:
            new.unlink(missing_ok=True)
            raise InputError(f"--out: {self.out} cannot be written ({error.strerror})") from error
        with self.out.open(encoding="utf-8") as file:
            yield from map(json.loads, file)

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close()
        if kind is not None and self.done == 0:  # no chunk is lost
            self.part.unlink(missing_ok=True)
        if kind is KeyboardInterrupt:
            message = f"complete chunks in {self.part}: {self.done}. Run the same command again to resume"
            raise KeyboardInterrupt(message)


def _describe_difference(header: bytes, key: Mapping[str, Any]) -> str:
    """Return the names of the values in which the header line of an earlier command differs from the key."""
    try:
        earlier = json.loads(header)["made_by"]
        names = sorted(earlier.keys() | key.keys())
        return f"other values of {', '.join(name for name in names if earlier.get(name) != key.get(name))}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "other contents"


def check_new_file(out: Path) -> None:
    """Raise InputError if a file would be overwritten, or if its folder does not exist."""
    if out.exists():
        raise InputError(f"--out: {out} exists. Set another --out, or delete the file")
    if not out.parent.is_dir():
        raise InputError(f"--out: {out} cannot be written. There is no folder {out.parent}")


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines atomically.

    Raises:
        InputError: If the file exists or cannot be written.
    """
    write_lines(out, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_lines(out: Path, lines: Iterable[str]) -> None:
    """Write a text file atomically.

    Raises:
        InputError: If the file exists or cannot be written.
    """
    check_new_file(out)
    new = out.with_name(f"{out.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        new.rename(out)
    except OSError as error:
        raise InputError(f"--out: {out} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


class ResumableBatches:
    """Results of batches in a file, from which an interrupted command resumes.

    Args:
        file: The file, or None to keep the results only in memory.
        key: Everything that the results depend on. Results with another key are discarded.
    """

    def __init__(self, file: Path | None, key: dict[str, Any]) -> None:
        self.file = file
        self.results = dict[int, Any]()
        """Row number -> result."""
        header = json.dumps(key, sort_keys=True, ensure_ascii=False)
        if file is None:
            return

        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        if lines[:1] != [header]:
            file.write_text(header + "\n", encoding="utf-8")
        for line in lines[1:] if lines[:1] == [header] else ():
            with contextlib.suppress(ValueError):  # the incomplete line of an interrupted command
                self.results |= {int(number): value for number, value in json.loads(line).items()}
        if self.results:
            logger.info("resuming after %s in %s", count_noun(len(self.results), "row"), file)

    def add(self, results: dict[int, Any]) -> None:
        """Store the results of a batch by row number."""
        self.results |= results
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                print("\n" + json.dumps(results), file=file, flush=True)
