"""Functions that grade answers: exact match with the data's answer, or one of the user's."""

import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, short_repr
from .final_answer import final_answer

Grader = Callable[..., Sequence[float]]
"""(prompts, completions, references: texts, by keyword) -> a number for each completion."""


def exact_match(prompts: list[str], completions: list[str], references: list[str | None]) -> list[float]:
    """1 where the final answer is that of the data, else 0. Raises InputError for a row without an answer."""
    if None in references:
        raise InputError("exact_match needs rows with an answer, and one has none")
    pairs = zip(completions, references, strict=True)
    return [float(final_answer(one) == final_answer(str(other))) for one, other in pairs]


def load_grader(name: str) -> Grader:
    """`exact_match`, or a function of the user's, as package.module:name; the current folder is looked in too. Raises
    InputError where there is none.
    """
    if name == "exact_match":
        return exact_match
    if os.getcwd() not in sys.path:  # as `python -m` has it, and the console script has not
        sys.path.append(os.getcwd())
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise ValueError("no function")
    except Exception as error:  # of the user's module, for one
        wanted = "exact_match, or package.module:name of a function that can be imported"
        raise InputError(f"function {name!r} ({_describe(error)}): {wanted}") from error
    try:
        inspect.signature(found).bind(prompts=[], completions=[], references=[])
    except TypeError as error:
        given = "it is given prompts, completions and references, by keyword"
        raise InputError(f"function {name!r}: {error}: {given}") from error
    except ValueError:  # of functions in C nothing is known
        pass
    return found


def grade(
    grader: Grader,
    name: str,
    prompts: list[str],
    completions: list[str],
    references: list[str | None],
    abstain: bool = False,
) -> list[Any]:
    """What the function says of each completion. Raises InputError where that is other than a finite number for each.
    name: for the message. abstain: None is allowed too.
    """
    try:
        given = grader(prompts=prompts, completions=completions, references=references)
        given = [*given] if inspect.isgenerator(given) else given
    except InputError:
        raise
    except Exception as error:  # of the user's code
        raise InputError(f"{name} failed: {_describe(error)}") from error
    wanted = f"a finite number for each of {len(completions)} completions is wanted"
    try:
        found = [None if abstain and value is None else float(value) for value in given]
    except (TypeError, ValueError) as error:  # such as None, or texts
        raise InputError(f"{name} gave {short_repr(given)}: {wanted}") from error
    if len(found) != len(completions):
        raise InputError(f"{name} gave {len(found)} numbers: {wanted}")
    wrong = next((n for n, value in enumerate(found) if not (value is None or math.isfinite(value))), None)
    if wrong is not None:
        raise InputError(f"{name} gave {found[wrong]} for {short_repr(completions[wrong])}: {wanted}")
    return found


def _describe(error: Exception) -> str:
    """An error of the user's code, and where in it that was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f" ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place * (last.filename != __file__ and '<frozen' not in last.filename)}"
