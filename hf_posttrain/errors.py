"""Exceptions, and what messages say of places, values and unknown names."""

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class InputError(ValueError):
    """A mistake in what the user gave: its message, which the command prints alone, says what, where and what to do.

    Whatever it quotes, it is one line of printable text of at most LONGEST characters.
    """

    LONGEST = 1200

    def __init__(self, message: str):
        line = printable(" ".join(message.splitlines()))
        half = self.LONGEST // 2 - 10
        super().__init__(line if len(line) <= self.LONGEST else f"{line[:half]} [...] {line[-half:]}")


class LaunchError(InputError):
    """A mistake in how a run was launched, or in the engine it asks for: no line of the recipe is to blame."""


class RunStopped(Exception):
    """SIGTERM, or a warning that train.stop_on names, has ended a run: the message says which, when, and what to do."""


@contextmanager
def error_context(where: str) -> Iterator[None]:
    """Put `where` (a file and line, or a data set and row) in front of the message of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def shown(value: object) -> str:
    """A value as messages show it: one line of printable text, shortened, however large or deep the value is."""
    return _SHORT.repr(value)


def named(names: Iterable[str]) -> str:
    """Names of the user's as messages list them, with commas: on one line, control characters written out."""
    return ", ".join(printable(str(name)) for name in names)


def printable(text: str, kept: str = "") -> str:
    """The text with control characters written out, but for those that are `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def nearest(name: str, names: Iterable[str], listed: bool = True, aside: bool = False) -> str:
    """The end of a message about an unknown name: the nearest valid one (in brackets if the message goes on, `aside`)
    or, if `listed`, the few valid ones.
    """
    names = sorted(names)
    name = name.replace("-", "_").lower()
    begun = [each for each in names if len(name) > 2 and each.lower().startswith(name)]
    close = difflib.get_close_matches(name, names, n=1) or begun
    if close:
        return f" (did you mean {close[0]!r}?)" if aside else f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if listed and len(names) <= 12 else ""


def nearest_path(path: Path, aside: bool = False) -> str:
    """Return the end of a message about a missing path: "; did you mean 'folder/x'?" if its folder has something like
    it; of a path that exists, that it is a folder, or a file. aside: as in `nearest`.
    """
    if path.exists():
        return f": it is a {'folder' if path.is_dir() else 'file'}"
    hint = nearest(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], listed=False, aside=aside)
    return hint.replace("'", f"'{path.parent}/", 1) if hint and path.parent != Path(".") else hint
