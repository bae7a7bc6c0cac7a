"""A reward beside OPD's teacher: rollouts of one prompt are graded, and each token of a better one is credited.

    r - (mean r of the prompt's K rollouts), times coef, is added to A = ln p - ln q of each of its tokens

when `with`: in all steps. `after`: the first share of the steps, `start`, has the teacher alone, and the rest the
reward alone; one after the other is better than both at once (arXiv 2609.04108).
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..generation.final_answer import final_answer

Grader = Callable[..., Sequence[float]]
"""(prompts, completions, references: texts) -> a number for each completion; as TRL's reward functions, by keyword."""


def exact_match(prompts: list[str], completions: list[str], references: list[str | None]) -> list[float]:
    """1 where the final answer is that of the data, else 0. Raises InputError for a row without an answer."""
    if None in references:
        raise InputError("reward: exact_match needs rows with an answer")
    pairs = zip(completions, references, strict=True)
    return [float(final_answer(one) == final_answer(str(other))) for one, other in pairs]


def find_grader(name: str) -> Grader:
    """`exact_match`, or a function of the user's, as package.module:name; the current folder is looked in too. Raises
    InputError where there is none."""
    if name == "exact_match":
        return exact_match
    if os.getcwd() not in sys.path:  # as `python -m` has it, and the console script has not
        sys.path.append(os.getcwd())
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise ValueError("no function")
    except (ImportError, AttributeError, ValueError) as error:
        wanted = "exact_match, or package.module:name of a function that can be imported"
        raise InputError(f"reward: function {name!r} ({error}): {wanted}") from error
    return found


@dataclass
class Reward:
    """The option `reward`, with its defaults."""

    function: str
    coef: float = 1.0
    when: str = "with"
    start: float = 0.5  # of when: after, the share of steps before it

    def __post_init__(self) -> None:
        self.grade = find_grader(self.function)

    def shares(self, progress: float) -> tuple[float, float]:
        """What the teacher and the reward count at this share of all steps."""
        if self.when == "with":
            return 1.0, self.coef
        return (1.0, 0.0) if progress < self.start else (0.0, self.coef)

    def grades(self, tokenizer: Any, rows: Sequence[dict], answered: Sequence[tuple]) -> Tensor:
        """[prompts, K], of the rollouts of each row's prompt. Raises InputError where the function gives other than a
        finite number for each."""
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        texts = [
            (decode(prompt), decode(ids), decode(row["completion_ids"]) if row.get("completion_ids") else None)
            for row, (prompt, rollouts) in zip(rows, answered, strict=True) for ids in rollouts
        ]  # fmt: skip
        prompts, completions, references = map(list, zip(*texts, strict=True)) if texts else ([], [], [])
        given = list(self.grade(prompts=prompts, completions=completions, references=references))
        try:
            found = torch.as_tensor(given, dtype=torch.float)
        except (TypeError, ValueError):  # such as None, or texts
            found = torch.empty(0)
        if found.shape != (len(texts),) or not found.isfinite().all():
            problem = f"reward: {self.function} gave {given!r:.80} for {len(texts)} completions"
            raise InputError(f"{problem}: a finite number for each is wanted")
        return found.view(len(rows), -1)


def group_advantage(grades: Tensor) -> Tensor:
    """r less the mean of its prompt, [prompts, K]."""
    return grades - grades.mean(1, keepdim=True)
