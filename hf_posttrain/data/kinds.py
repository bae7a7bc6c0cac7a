"""The kinds of rows that methods train on: their columns once prepared, and the raw columns they come from."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RowKind:
    """What prepared rows of a kind hold, besides `index`, the number of the row."""

    columns: tuple[str, ...]
    """Of prepared rows: ids of the prompt, ids of each answer, then what else there is."""
    formats: tuple[str, ...]
    """The formats that such rows are made from, in order of preference: raw columns, joined by " + "."""
    needs_prompt: bool = True
    """Has each row a prompt? Otherwise the first token of a lone text takes its place."""
    sampled: bool = False
    """Are answers sampled while training, so that a row needs none?"""

    @property
    def answers(self) -> tuple[str, ...]:
        """The columns with the ids of an answer."""
        return tuple(name for name in self.columns if name.endswith("_ids") and name != "prompt_ids")

    @property
    def paired(self) -> bool:
        """Has each row two answers, the better one first?"""
        return len(self.answers) == 2

    @property
    def labelled(self) -> bool:
        """Is each answer labelled good or bad?"""
        return "label" in self.columns

    @property
    def masked(self) -> bool:
        """Does a mask say which tokens of the answer are trained?"""
        return "completion_mask" in self.columns


class Reader(Protocol):
    """What reads rows: a row of the table of methods."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> RowKind: ...


_PAIRS = ("prompt + chosen + rejected", "chosen + rejected")
SUPERVISED = RowKind(
    ("prompt_ids", "completion_ids", "completion_mask"),
    ("prompt_ids + completion_ids", "input_ids", "prompt + completion", "messages", "conversations", "text"),
    needs_prompt=False,
)
PREFERENCE = RowKind(("prompt_ids", "chosen_ids", "rejected_ids"), ("prompt_ids + chosen_ids + rejected_ids", *_PAIRS))
UNPAIRED = RowKind(
    ("prompt_ids", "completion_ids", "label", "prompt_key"),
    ("prompt_ids + completion_ids + label", "prompt + completion + label", *_PAIRS),
)
PROMPTS = RowKind(
    ("prompt_ids", "completion_ids"),
    ("prompt_ids", "prompt + completion", "prompt", "messages", "conversations"),
    sampled=True,
)
