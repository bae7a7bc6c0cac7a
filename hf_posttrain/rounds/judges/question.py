"""What judges are asked, what all of them do, and a judged answer as a row of a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...generation.exact_match import correct_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """A prompt and what was answered."""

    prompt: Any  # as the data have it: a text, or messages
    answers: Sequence[str]
    reference: str | None = None  # the right answer of the data, where they have one
    more: Mapping[str, Any] | None = None  # arguments of the chat template: tools and the row's own options
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[Sequence[int]] = ()  # where the answers are one model's tokens, with their ends
    stopped: Sequence[bool] = ()  # did they end by themselves? Where that is known

    @property
    def text(self) -> str:
        """The prompt as a text: of messages the last user's turn alone where there is no other, else all of them."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return str(self.prompt[0].get("content") or "")
        return "\n\n".join(f"{turn.get('role')}: {turn.get('content') or ''}" for turn in self.prompt)


class Judge(Protocol):
    """What all judges do. Inside `with judge:` it is on its device, and where `stays` is set also afterwards."""

    stays: bool

    def key(self) -> str:
        """What its scores depend on besides the section: the same in two processes only where it scores alike."""
        ...

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """Of each question, of which there are some, the scores of its answers; None where it could not judge."""
        ...

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> None: ...


def make_question(
    row: Mapping[str, Any], answers: Sequence[Sequence[int]], tokenizer: Any, ends: list[int]
) -> Question:
    """A prepared row (`prompt_ids`, `completion_ids` of the data, `asked`) with answers as ids, of which some end."""
    prompt, more = _asked(row, tokenizer)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    stopped = [ids[-1] in ends for ids in answers]
    return Question(prompt, texts, _reference(row, tokenizer), more, row["prompt_ids"], answers, stopped)


def answer_row(
    row: Mapping[str, Any], ids: list[int], tokenizer: "PreTrainedTokenizerBase", ends: list[int]
) -> dict[str, Any]:
    """An answer to a prepared row as files have it: texts with the template's special tokens, without the one that ends
    the answer, which are rows to train on; and what a judge wants to know, which reads them as `asked` and `answered`
    where that is another text.
    """
    stopped = ids[-1] in ends
    (prompt, more) = _asked(row, tokenizer)
    made = {
        "prompt": tokenizer.decode(row["prompt_ids"]),
        "completion": tokenizer.decode(ids[:-1] if stopped else ids),
        "stopped": stopped,
        **({} if isinstance(prompt, str) else {"messages": prompt, **more}),
    }
    if isinstance(prompt, str) and prompt != made["prompt"]:
        made["asked"] = prompt
    if (answer := tokenizer.decode(ids, skip_special_tokens=True)) != made["completion"]:
        made["answered"] = answer
    reference = _reference(row, tokenizer)
    return made | ({} if reference is None else {"reference": reference})


def _asked(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, dict[str, Any]]:
    """The prompt of a prepared row as its file had it, a text or messages, and arguments of the template; of rows of
    ids, their text.
    """
    asked = json.loads(row["asked"]) if row.get("asked") else {"prompt": None}
    prompt = asked.pop("prompt")
    return (tokenizer.decode(row["prompt_ids"], skip_special_tokens=True) if prompt is None else prompt), asked


def _reference(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """The right answer of a prepared row; None where it has none, or a wrong one."""
    right = correct_answer(dict(row))
    return tokenizer.decode(right, skip_special_tokens=True) if right else None
