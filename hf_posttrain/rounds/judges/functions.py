"""A judge that is a function: exact match with the data's answer, or one of the user's."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import xxhash

from ...generation.graders import load_grader, grade
from .question import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FunctionJudge:
    """Scores by a function."""

    stays = False

    def __init__(self, section: Any, tokenizer: "PreTrainedTokenizerBase | None" = None, device: object = None):
        self.name = section.name or section.by
        self.grader = load_grader(self.name)

    def key(self) -> str:
        """As `Judge`: a hash of the file that has the function."""
        with suppress(OSError, TypeError):  # one that has no file
            return xxhash.xxh3_64_hexdigest(inspect.getsource(inspect.getmodule(self.grader) or self.grader).encode())
        return self.name

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """As `Judge`; all questions in one call. Raises InputError for what `grade` refuses."""
        texts = [(q.text, answer, q.reference) for q in questions for answer in q.answers]
        prompts, completions, references = map(list, zip(*texts, strict=True))
        scores: Any = iter(grade(self.grader, f"judge {self.name}", prompts, completions, references, True))
        return [[next(scores) for _ in q.answers] for q in questions]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass
