"""Kinds of rows that methods train on: the columns of prepared rows, and the formats that they are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InputError


@dataclass(frozen=True)
class RowKind:
    """Columns of prepared rows, in addition to `index` (the number of the row), and the formats of raw rows.

    The fingerprints of cached rows depend on the names and values of these fields.
    """

    columns: tuple[str, ...]  # of prepared rows: ids of the prompt, ids of each answer, then other columns
    formats: tuple[str, ...]  # of raw rows, in order of preference: column names joined by " + "
    needs_prompt: bool = True  # whether each row has a prompt; otherwise the first token of a text serves as one
    sampled: bool = False  # whether answers are sampled during training, so that rows need none
    classified: bool = False  # whether a sequence classifier reads whole texts, as transformers tokenizes them

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of the columns with ids of an answer."""
        return tuple(name for name in self.columns if name.endswith("_ids") and name != "prompt_ids")

    @property
    def paired(self) -> bool:
        """Return whether each row has two answers, the better one first."""
        return len(self.answers) == 2

    @property
    def labeled(self) -> bool:
        """Return whether each answer has a label, good or bad."""
        return "label" in self.columns

    @property
    def masked(self) -> bool:
        """Return whether a mask selects the tokens of the answer that are trained."""
        return "completion_mask" in self.columns


SOURCE_COLUMN = "recipe_source"
"""Raw column with the name of the source of each row, by which the loss is logged."""
SPAN_COLUMN = "span_weights"
"""Raw column of spans {start, end, weight}, in characters of the completion or of the last assistant turn."""
MAX_GROUPS = 50
"""Largest number of values by which the loss is logged, each of which is a metric."""
OPTIONAL_COLUMNS = {"system", "tools", "input", "chat_template_kwargs"}
"""Raw columns that each row may have or lack."""


def is_weight(value: object) -> bool:
    """Return whether a value is a weight of tokens, a number from 0 to 1e6."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e6


class Reader(Protocol):
    """The name of a method, or of another consumer of rows, and the kind of rows that it reads."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def rows(self) -> RowKind:
        """The kind of rows."""
        ...


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
REWARD_PAIRS = RowKind((*PREFERENCE.columns, "margin"), PREFERENCE.formats, classified=True)
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
    """Return the weights of the two classes of labeled rows, with `auto` resolved.

    `auto` raises the weight of the rarer class until both classes have the same total weight.

    Args:
        desirable: Weight of rows that are labeled true, or "auto".
        undesirable: Weight of rows that are labeled false, or "auto".
        labels: The labels. Without labels (None), `auto` is 1.

    Raises:
        InputError: If a weight is `auto` and all labels are the same.
    """
    weights = [1.0 if weight == "auto" else float(weight) for weight in (desirable, undesirable)]
    if labels is None or "auto" not in (desirable, undesirable):
        return weights[0], weights[1]
    positives = sum(labels)
    counts = positives, len(labels) - positives
    if not all(counts):
        raise InputError(
            f"class weight `auto` requires rows of both labels, and {positives} of {len(labels)} rows are labeled true"
        )
    for this, other, weight in ((0, 1, desirable), (1, 0, undesirable)):
        if weight == "auto":
            weights[this] = max(1.0, weights[other] * counts[other] / counts[this])
    return weights[0], weights[1]
