"""The kinds of rows that methods train on: their columns once prepared, and the raw columns they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InputError


@dataclass(frozen=True)
class RowKind:
    """What prepared rows of a kind hold, besides `index`, the number of the row."""

    columns: tuple[str, ...]  # of prepared rows: ids of the prompt, ids of each answer, then what else there is
    formats: tuple[str, ...]  # that such rows are made from, in order of preference: raw columns, joined by " + "
    needs_prompt: bool = True  # has each row a prompt? Otherwise the first token of a lone text takes its place
    sampled: bool = False  # are answers sampled while training, so that a row needs none?

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


OPTIONAL_COLUMNS = {"system", "tools", "input", "chat_template_kwargs"}
"""Raw columns that a row may have or lack."""


class Reader(Protocol):
    """What reads rows: a row of the table of methods."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> RowKind: ...


_PAIRS = (
    "prompt + chosen + rejected",
    "instruction + chosen + rejected",
    "messages + chosen + rejected",
    "chosen + rejected",
)
SUPERVISED = RowKind(
    ("prompt_ids", "completion_ids", "completion_mask"),
    ("prompt_ids + completion_ids", "input_ids", "prompt + completion", "messages", "text", "instruction + output"),
    needs_prompt=False,
)
PREFERENCE = RowKind(("prompt_ids", "chosen_ids", "rejected_ids"), ("prompt_ids + chosen_ids + rejected_ids", *_PAIRS))
UNPAIRED = RowKind(
    ("prompt_ids", "completion_ids", "label", "prompt_key"),
    (
        "prompt_ids + completion_ids + label",
        "prompt + completion + label",
        "instruction + output + label",
        "messages + label",
        *_PAIRS,
    ),
)
PROMPTS = RowKind(
    ("prompt_ids", "completion_ids"),
    ("prompt_ids", "prompt + completion", "messages", "instruction + output", "prompt"),
    sampled=True,
)


def class_weights(
    desirable: float | str, undesirable: float | str, labels: Sequence[bool] | None
) -> tuple[float, float]:
    """Weights of labelled rows with `auto` resolved: the rarer class is raised until both weigh the same in total.

    Without labels, auto is 1. Raises InputError for auto on labels of one class.
    """
    known = [1.0 if weight == "auto" else float(weight) for weight in (desirable, undesirable)]
    if labels is None or "auto" not in (desirable, undesirable):
        return known[0], known[1]
    good = sum(labels)
    counts = good, len(labels) - good
    if not all(counts):
        raise InputError(f"class weight auto needs both labels, the data has {good} desirable of {len(labels)} rows")
    for one, other, weight in ((0, 1, desirable), (1, 0, undesirable)):
        if weight == "auto":
            known[one] = max(1.0, known[other] * counts[other] / counts[one])
    return known[0], known[1]
