"""Exceptions of the package, and helpers that format values, names and hints in their messages."""

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class InputError(ValueError):
    """A mistake in the user's input. The message states the problem, its location and the fix.

    The command line prints the message without a traceback. Whatever a message quotes, it is one line of printable
    text of at most `MAX_LENGTH` characters.
    """

    MAX_LENGTH = 1200

    def __init__(self, message: str) -> None:
        line = printable(" ".join(message.splitlines()))
        half = self.MAX_LENGTH // 2 - 10
        super().__init__(line if len(line) <= self.MAX_LENGTH else f"{line[:half]} [...] {line[-half:]}")


class LaunchError(InputError):
    """A mistake in how a run was launched, or in its engine. It is not attributed to a line of the recipe."""


class RunStopped(Exception):
    """The end of a run by SIGTERM or by a warning in `train.stop_on`.

    The message states the reason, the step and how to continue.
    """


@contextmanager
def error_context(location: str) -> Iterator[None]:
    """Prefix the message of an InputError that is raised inside with a location.

    Args:
        location: File and line, or data set and row.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{location}: {error}") from error


def short_repr(value: object) -> str:
    """Return a shortened representation of a value: one line of printable text, however large or deep the value is."""
    return _SHORT.repr(value)


def join_names(names: Iterable[str]) -> str:
    """Join names from user input with commas, on one line with control characters escaped."""
    return ", ".join(printable(str(name)) for name in names)


def count_noun(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun in the singular or plural, such as "1 row" and "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def printable(text: str, keep: str = "") -> str:
    """Return the text with its control characters escaped, except for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def name_hint(name: str, names: Iterable[str], list_valid: bool = True, in_brackets: bool = False) -> str:
    """Return the end of a message about an unknown name: the most similar valid name, or the few valid ones.

    Args:
        name: The unknown name.
        names: The valid names.
        list_valid: Whether to list the valid names if none of them is similar and there are at most 12.
        in_brackets: Whether to put the similar name in brackets, for a message that continues after the hint.

    Returns:
        For example "; did you mean 'sigmoid'?", or an empty string.
    """
    names = sorted(names)
    name = name.replace("-", "_").lower()
    completions = [valid for valid in names if len(name) > 2 and valid.lower().startswith(name)]
    similar = difflib.get_close_matches(name, names, n=1) or completions
    if similar:
        return f" (did you mean {similar[0]!r}?)" if in_brackets else f"; did you mean {similar[0]!r}?"
    return f"; valid: {', '.join(names)}" if list_valid and len(names) <= 12 else ""


def path_hint(path: Path, in_brackets: bool = False) -> str:
    """Return the end of a message about a path that does not exist or has the wrong type.

    Args:
        path: The path.
        in_brackets: As in `name_hint`.

    Returns:
        "; did you mean 'folder/x'?" if the folder of the path has a similar entry. For a path that exists, a statement
        that it is a folder, or a file. Otherwise an empty string.
    """
    if path.exists():
        return f": it is a {'folder' if path.is_dir() else 'file'}"
    entries = os.listdir(path.parent) if path.parent.is_dir() else []
    hint = name_hint(path.name, entries, list_valid=False, in_brackets=in_brackets)
    return hint.replace("'", f"'{path.parent}/", 1) if hint and path.parent != Path(".") else hint
