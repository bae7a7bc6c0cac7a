"""Exceptions: a user's mistake, and a run that was ended; what messages say of values (`shown`) and names."""

import reprlib
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class InputError(ValueError):
    """A mistake in what the user gave: its message says what, where (file, line, row, key) and what to do.

    The command prints the message alone and exits with 2; in Python it is an ordinary `ValueError`.
    """


class LaunchError(InputError):
    """A mistake in how a run was launched, or in the engine it asks for: no line of the recipe is to blame."""


class RunStopped(Exception):
    """A warning that train.stop_on names has ended a run: its message says which, at which step, and what to do."""


def shown(value: Any) -> str:
    """A value as messages show it: one line of printable text, shortened, however large or deep the value is."""
    return _SHORT.repr(value)


def named(names: Iterable[str]) -> str:
    """Names of the user's as messages list them, with commas: on one line, control characters written out."""
    return ", ".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in str(name)) for name in names)
