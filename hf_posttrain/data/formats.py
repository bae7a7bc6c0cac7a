"""One raw row -> a `Sample`: a small reader for each format.

    Sample     a prompt and its branches, on their way from raw values to text to ids
    FORMATS    columns -> reader; which of them a method reads is in `kinds`
    detect     column names -> which of FORMATS this is

A value that is not what its column must hold raises `InputError` with the column and what was expected.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, error_context, named, nearest, shown
from . import chat
from .kinds import Reader
from .messages import Messages, check_unicode, clean_messages, without_none


class Sample(NamedTuple):
    """An example: first raw, then text, then ids. `prompt` None: the one branch is a whole text or conversation."""

    prompt: Any  # str | messages | list[int] | None
    branches: list  # [] | [completion] | [chosen, rejected], each of the prompt's kind
    label: bool | None = None
    mask: list[int] | None = None  # of the one branch, once it is ids
    tools: list | None = None


def _value(row: dict, column: str) -> str | Messages:
    value = row.get(column)
    if isinstance(value, str):
        check_unicode(value, f"column {column!r}")
        return value
    if not isinstance(value, list):
        raise InputError(f"column {column!r}: expected a string or a list of messages, found {shown(value)}")
    with error_context(f"column {column!r}"):
        return clean_messages(value)


def _completion(row: dict, column: str) -> str | Messages:
    value = _value(row, column)
    if isinstance(value, list) and value[-1]["role"] != "assistant":
        raise InputError(f"column {column!r}: the last turn is {shown(value[-1]['role'])}, expected 'assistant'")
    text = value if isinstance(value, str) else value[-1]["content"]
    if not text.strip() and (isinstance(value, str) or not value[-1].get("tool_calls")):
        raise InputError(f"column {column!r}: empty completion")
    return value


def _label(row: dict) -> bool:
    if not isinstance(row["label"], bool | int | np.bool_) or row["label"] not in (0, 1):
        raise InputError(f"column 'label': expected true or false (or 1, 0), found {shown(row['label'])}")
    return bool(row["label"])


def _tools(row: dict) -> list | None:
    tools = row.get("tools")
    try:
        tools = without_none(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        text = json.dumps(tools, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"column 'tools': not valid JSON ({error})") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f"column 'tools': expected a list of tools {{type, function}}, found {shown(tools)}")
    check_unicode(text, "column 'tools'")
    return tools


def _ids(row: dict, column: str) -> list[int]:
    value = row.get(column)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise InputError(f"column {column!r}: expected a list of token ids, found {shown(value)}")
    return value


def _read_text(row: dict) -> Sample:
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise InputError(f"column 'text': expected a text that is not empty, found {shown(row['text'])}")
    check_unicode(row["text"], "column 'text'")
    return Sample(None, [row["text"]])


def _read_messages(row: dict) -> Sample:
    column = "messages" if "messages" in row else "conversations"
    with error_context(f"column {column!r}"):
        return Sample(None, [clean_messages(row[column])], tools=_tools(row))


def _read_completion(row: dict) -> Sample:
    return Sample(_value(row, "prompt"), [_completion(row, "completion")], tools=_tools(row))


def _read_label(row: dict) -> Sample:
    return _read_completion(row)._replace(label=_label(row))


def _read_preference(row: dict) -> Sample:
    chosen, rejected = _completion(row, "chosen"), _completion(row, "rejected")
    if "prompt" not in row or (isinstance(row["prompt"], str) and isinstance(chosen, list)):
        return _shared_prompt(chosen, rejected)._replace(tools=_tools(row))  # a string beside whole conversations
    return Sample(_value(row, "prompt"), [chosen, rejected], tools=_tools(row))


def _shared_prompt(chosen: str | Messages, rejected: str | Messages) -> Sample:
    """The longest common beginning is the prompt: whole messages, or text up to a word or line boundary (a space
    belongs to the completions, a line break to the prompt). No branch is left empty."""
    n = min(chat.shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and isinstance(rejected, str):
        while n and chosen[n - 1] != "\n" and (chosen[n], rejected[n]) != (" ", " "):
            n -= 1
    elif n == 0:
        raise InputError("columns 'chosen' and 'rejected': the conversations share no first message to be the prompt")
    return Sample(chosen[:n], [chosen[n:], rejected[n:]])


def _read_prompt(row: dict) -> Sample:
    return Sample(_value(row, "prompt"), [], tools=_tools(row))


def _read_ids(row: dict) -> Sample:
    branches, mask = [_ids(row, "completion_ids")] if "completion_ids" in row else [], row.get("completion_mask")
    mask = _mask(mask, branches[0]) if mask is not None and branches else None
    return Sample(_ids(row, "prompt_ids"), branches, mask=mask)


def _read_label_ids(row: dict) -> Sample:
    return _read_ids(row)._replace(label=_label(row))


def _read_preference_ids(row: dict) -> Sample:
    return Sample(_ids(row, "prompt_ids"), [_ids(row, "chosen_ids"), _ids(row, "rejected_ids")])


def _read_input_ids(row: dict) -> Sample:
    ids, labels, mask = _ids(row, "input_ids"), row.get("labels"), row.get("completion_mask")
    if labels is not None:
        fitting = isinstance(labels, list) and len(labels) == len(ids)
        if not fitting or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
            raise InputError("column 'labels': expected -100 or the token of 'input_ids' at the same position")
        mask = [int(label != -100) for label in labels]
    return Sample([], [ids], mask=_mask([1] * len(ids) if mask is None else mask, ids))


def _mask(mask: Any, ids: list[int]) -> list[int]:
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise InputError(f"column 'completion_mask': expected {len(ids)} values 0 or 1, one for each token")
    return [int(m) for m in mask]


FORMATS: dict[str, Callable[[dict], Sample]] = {  # the name is the columns it needs
    "prompt_ids + completion_ids + label": _read_label_ids,
    "prompt_ids + chosen_ids + rejected_ids": _read_preference_ids,
    "prompt_ids + completion_ids": _read_ids,
    "prompt_ids": _read_ids,
    "input_ids": _read_input_ids,
    "prompt + completion + label": _read_label,
    "prompt + chosen + rejected": _read_preference,
    "chosen + rejected": _read_preference,
    "prompt + completion": _read_completion,
    "messages": _read_messages,
    "conversations": _read_messages,
    "text": _read_text,
    "prompt": _read_prompt,
}


def detect(columns: list[str], method: Reader) -> str:
    """Which of FORMATS `method` reads from these columns. Raises InputError listing what it could read."""
    for form in method.rows.formats:
        if {*form.split(" + ")} <= {*columns}:
            return form
    known = {c for form in method.rows.formats for c in form.split(" + ")}
    missing, others = sorted(known - {*columns}), {*columns} - known
    near = next((hint for c in missing if (hint := nearest(c, others, listed=False, aside=True))), "")
    raise InputError(
        f"columns {named(columns)} are none that {method.name} reads{near}: {' | '.join(method.rows.formats)}; "
        "rename yours with data.train.columns, for instance {prompt: question}"
    )
