"""Questions to judges, the interface of a judge, and rows of judged answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ...generation.exact_match import correct_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """A prompt and the answers to it."""

    prompt: Any  # from the data: a text, or messages
    answers: Sequence[str]
    reference: str | None = None  # the right answer of the data, if there is one
    template_options: Mapping[str, Any] | None = None  # of the chat template: tools and the row's own options
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[Sequence[int]] = ()  # with terminal ids, if one model sampled the answers
    stopped: Sequence[bool] = ()  # whether each answer ended before it was truncated; empty if unknown

    @property
    def text(self) -> str:
        """The prompt as text: the content of a single message, and otherwise all messages with their roles."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return str(self.prompt[0].get("content") or "")
        return "\n\n".join(f"{turn.get('role')}: {turn.get('content') or ''}" for turn in self.prompt)


class Judge(Protocol):
    """Scores answers. It is on its device inside `with judge:`, and afterwards as well if `stays` is set."""

    stays: bool

    def key(self) -> str:
        """Return a key of everything besides the section that scores depend on.

        It is equal in two processes only if scores are.
        """
        ...

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """Return the scores of the answers to at least one question; None for an answer that is not judged."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


def make_question(
    row: Mapping[str, Any],
    answers: Sequence[list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    terminal_ids: list[int],
) -> Question:
    """Return the question about answers to a prompt.

    Args:
        row: Prepared row with `prompt_ids`, `completion_ids` of the data, and `asked`.
        answers: Ids of the answers, with their terminal ids.
        tokenizer: Tokenizer of the model that answered.
        terminal_ids: Ids that end an answer.
    """
    prompt, template_options = _prompt_of_row(row, tokenizer)
    texts: list[Any] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    stopped = [ids[-1] in terminal_ids for ids in answers]
    return Question(prompt, texts, _reference(row, tokenizer), template_options, row["prompt_ids"], answers, stopped)


def answer_row(
    row: Mapping[str, Any], ids: list[int], tokenizer: "PreTrainedTokenizerBase", terminal_ids: list[int]
) -> dict[str, Any]:
    """Return an answer to a prepared row as a row of a file.

    `prompt` and `completion` are texts with the special tokens of the template, without the terminal id of the answer,
    so that they can be trained on. Further columns are for judges, which read `asked` and `answered` if those texts
    differ.
    """
    stopped = ids[-1] in terminal_ids
    prompt, template_options = _prompt_of_row(row, tokenizer)
    columns = {
        "prompt": tokenizer.decode(row["prompt_ids"]),
        "completion": tokenizer.decode(ids[:-1] if stopped else ids),
        "stopped": stopped,
        **({} if isinstance(prompt, str) else {"messages": prompt, **template_options}),
    }
    if isinstance(prompt, str) and prompt != columns["prompt"]:
        columns["asked"] = prompt
    if (answer := tokenizer.decode(ids, skip_special_tokens=True)) != columns["completion"]:
        columns["answered"] = answer
    reference = _reference(row, tokenizer)
    return columns | ({} if reference is None else {"reference": reference})


def _prompt_of_row(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a prepared row as the data have it, a text or messages, and options of the template.

    The prompt of a row of ids is their text.
    """
    template_options = json.loads(row["asked"]) if row.get("asked") else {"prompt": None}
    original_prompt = template_options.pop("prompt")
    if original_prompt is None:
        original_prompt = tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
    return original_prompt, template_options


def _reference(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the right answer of a prepared row; None if it has no answer, or a wrong one."""
    ids = correct_answer(dict(row))
    return str(tokenizer.decode(ids, skip_special_tokens=True)) if ids else None
