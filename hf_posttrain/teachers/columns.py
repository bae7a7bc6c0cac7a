"""Precomputed scores of a teacher as columns of rows: its top k, or its hidden states.

Legend: N scored tokens of a batch, T of them in one answer, K top tokens, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from .signal import HiddenStates, TopK

CACHED_COLUMNS = ("teacher_ids", "teacher_logps", "teacher_own", "teacher_hidden")
"""Columns of an answer: top tokens [T][K], their log-probabilities [T][K], those of the targets [T], and hidden states
[T, H] as the bytes of a safetensors file."""


def to_columns(signal: TopK | HiddenStates, mask: Tensor) -> dict[str, Any]:
    """Return the columns of one answer.

    Args:
        signal: Scores of a batch.
        mask: Whether each scored token belongs to the answer, [N].
    """
    if isinstance(signal, HiddenStates):
        return {"teacher_hidden": save({"hidden": signal.hidden[mask].cpu().contiguous()})}
    columns = {"teacher_ids": signal.ids.int(), "teacher_logps": signal.logps.float()}
    if signal.targets is not None:
        columns["teacher_own"] = signal.targets.float()
    return {name: values[mask].cpu().numpy() for name, values in columns.items()}


def from_columns(
    answers: Sequence[Mapping[str, Any]], per_token: Callable[[list[Any]], Tensor]
) -> TopK | HiddenStates | None:
    """Return the signal of a batch, or None if its rows have no scores.

    Args:
        answers: The columns of each answer.
        per_token: Function of the values [T, ...] of each answer that returns those of all scored tokens, [N, ...].
    """
    names = [name for name in CACHED_COLUMNS if name in answers[0]]
    if not names:
        return None
    if "teacher_hidden" in names:
        return HiddenStates(per_token([load(answer["teacher_hidden"])["hidden"] for answer in answers]))
    return TopK(*(per_token([answer[name] for answer in answers]) for name in names))
