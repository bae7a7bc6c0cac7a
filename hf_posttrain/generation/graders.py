"""Functions that grade answers: exact match with the answer of the data, or a function of the user."""

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
"""Takes the texts prompts, completions and references by keyword, and returns a number for each completion."""


def exact_match(prompts: list[str], completions: list[str], references: list[str | None]) -> list[float]:
    """Return 1 for each completion whose final answer is that of the data, and 0 for others.

    Raises:
        InputError: For a row without an answer.
    """
    if None in references:
        raise InputError("exact_match requires rows with an answer, but one has none")
    pairs = zip(completions, references, strict=True)
    return [float(final_answer(completion) == final_answer(str(reference))) for completion, reference in pairs]


def load_grader(name: str) -> Grader:
    """Return a function that grades answers.

    Args:
        name: `exact_match`, or a function of the user as package.module:name. Modules in the current folder are found.

    Raises:
        InputError: If there is no such function, or it does not take the arguments of a grader.
    """
    if name == "exact_match":
        return exact_match
    if os.getcwd() not in sys.path:  # `python -m` adds it, but the console script does not
        sys.path.append(os.getcwd())
    module, _, function = name.partition(":")
    try:
        grader = getattr(importlib.import_module(module), function)
        if not callable(grader):
            raise ValueError("it is not a function")
    except Exception as error:  # including errors of the user's module
        raise InputError(
            f"function {name!r} cannot be imported ({_describe(error)}). Use exact_match, or package.module:name of a "
            f"module in the current folder ({os.getcwd()}) or of an installed package"
        ) from error
    try:
        inspect.signature(grader).bind(prompts=[], completions=[], references=[])
    except TypeError as error:
        raise InputError(
            f"function {name!r}: {error}. It must take prompts, completions and references by keyword"
        ) from error
    except ValueError:  # functions in C have no signature
        pass
    return grader


def grade(
    grader: Grader,
    name: str,
    prompts: list[str],
    completions: list[str],
    references: list[str | None],
    abstain: bool = False,
) -> list[Any]:
    """Return the number that a grader gives to each completion.

    Args:
        grader: The grader.
        name: Name of the grader in messages.
        prompts: Texts of the prompts.
        completions: Texts of the completions.
        references: Answers of the data.
        abstain: Whether None is allowed, too.

    Raises:
        InputError: If the grader fails, or does not return a finite number for each completion.
    """
    try:
        returned = grader(prompts=prompts, completions=completions, references=references)
        returned = [*returned] if inspect.isgenerator(returned) else returned
    except InputError:
        raise
    except Exception as error:  # of the user's code
        raise InputError(f"{name} failed: {_describe(error)}") from error
    allowed = "a finite number or None" if abstain else "a finite number"
    fix = f"It must return {allowed} for each of {len(completions)} completions"
    try:
        grades = [None if abstain and value is None else float(value) for value in returned]
    except (TypeError, ValueError) as error:  # such as None, or texts
        raise InputError(f"{name} returned {short_repr(returned)}. {fix}") from error
    if len(grades) != len(completions):
        raise InputError(f"{name} returned {len(grades)} numbers. {fix}")
    invalid = next((n for n, value in enumerate(grades) if not (value is None or math.isfinite(value))), None)
    if invalid is not None:
        raise InputError(f"{name} returned {grades[invalid]} for {short_repr(completions[invalid])}. {fix}")
    return grades


def _describe(error: Exception) -> str:
    """Return an error of the user's code, with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    in_user_code = last.filename != __file__ and "<frozen" not in last.filename
    place = f" ({Path(last.filename).name}, line {last.lineno})" if in_user_code else ""
    return f"{type(error).__name__}: {error}{place}"
