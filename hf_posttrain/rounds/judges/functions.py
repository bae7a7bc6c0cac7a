"""A judge that is a function: exact match with the data's answer, or a function of the user."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import xxhash

from ...generation.graders import grade, load_grader
from .config import JudgeSection
from .question import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FunctionJudge:
    """Scores answers with a function."""

    stays = False

    def __init__(
        self, section: JudgeSection, tokenizer: "PreTrainedTokenizerBase | None" = None, device: object = None
    ) -> None:
        self.name = section.name or section.by
        self.grader = load_grader(self.name)

    def key(self) -> str:
        """Return a hash of the file that contains the function."""
        with suppress(OSError, TypeError):  # a function without a file
            return xxhash.xxh3_64_hexdigest(inspect.getsource(inspect.getmodule(self.grader) or self.grader).encode())
        return self.name

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """Return the scores of all answers, from one call of the function. Raises InputError as `grade` does."""
        texts = [(q.text, answer, q.reference) for q in questions for answer in q.answers]
        prompts, completions, references = map(list, zip(*texts, strict=True))
        scores: Any = iter(grade(self.grader, f"judge {self.name}", prompts, completions, references, True))
        return [[next(scores) for _ in q.answers] for q in questions]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
