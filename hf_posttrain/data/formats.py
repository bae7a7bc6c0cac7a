"""Detection of a data set's format, and conversion of raw rows to `Sample`.

A format is the list of columns that it requires, joined by " + ", such as "prompt + completion". `row_schema` lists the
formats that each kind of rows is made from.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, error_context, join_names, short_repr
from . import chat
from .images import MARK
from .messages import Messages, check_unicode, clean_messages
from .row_schema import OPTIONAL_COLUMNS, Reader
from .template import string_boolean_problem

if TYPE_CHECKING:
    from .dataset_type import AnyDataset

_COLUMN_ALIASES = {"kto_tag": "label", "conversations": "messages", "assistant_masks": "completion_mask"}
"""Names of columns in other formats -> our names."""
_LABEL_TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Values of `label` as lower-case text -> the label."""


class Sample(NamedTuple):
    """An example, which is raw first, then text, then token ids.

    Without a prompt (None), the only branch is a whole text or conversation.
    """

    prompt: Any  # str | messages | list[int] | None
    branches: list  # [] | [completion] | [chosen, rejected], each of the prompt's type
    label: bool | None = None
    mask: list[int] | None = None  # of the only branch, once it is token ids
    tools: list | None = None
    template_kwargs: dict | None = None  # options for the chat template, in which the row replaces defaults
    unread: tuple[str, ...] = ()  # parts of the messages that the chat template does not write
    images: tuple[dict, ...] = ()  # as returned by `images.to_stored_image`, in the order of their places in the text
    expansions: tuple[str, ...] = ()  # the text that replaces each image
    margin: float = 0.0  # smallest difference between the rewards of a pair
    weights: list[float] | None = None  # of the tokens of the only branch; None: 1

    @property
    def is_chat(self) -> bool:
        """Return whether the sample consists of messages, rather than of text or token ids."""
        part = self.branches[0] if self.prompt is None else self.prompt
        return isinstance(part, list) and isinstance(next(iter(part), None), dict)


def detect_format(columns: list[str], method: Reader) -> str:
    """Return the first format that `method` can read from these columns.

    Raises:
        InputError: If there is none. The message names the missing column if a format lacks a single one, otherwise all
            formats of the method.
    """
    incomplete = []
    for form in method.rows.formats:
        missing = {*form.split(" + ")} - {*columns}
        if not missing:
            return form
        if len(missing) == 1 and missing != {form}:
            incomplete.append((form, *missing))

    if incomplete:
        form, missing_column = max(incomplete, key=lambda item: item[0].count(" + "))
        raise InputError(
            f"column {missing_column!r} is missing. {method.name} reads {form}, and the columns are "
            f"{join_names(columns)}. Rename a column with `data.train.columns` (`--columns` of commands), or run "
            "`hf-posttrain data FILE` to see which methods read the file"
        )
    example = next(form for form in method.rows.formats if "prompt" in form.split(" + "))
    renamed = ", ".join(f"{name}: COLUMN" for name in example.split(" + "))
    raise InputError(
        f"columns {join_names(columns)} are not supported by {method.name}, which reads "
        f"{' | '.join(method.rows.formats)}. Rename them with `data.train.columns` (`--columns` of commands), for "
        f"instance {{{renamed}}}, or run `hf-posttrain data FILE`"
    )


def canonical_name(column: str, columns: Collection[str]) -> str:
    """Return our name for a column that other formats call differently, unless `columns` has our name already."""
    alias_of = _COLUMN_ALIASES.get(column, column)
    return column if alias_of in columns else alias_of


def rename_columns(rows: "AnyDataset", names: Mapping[str, str]) -> Any:
    """Rename columns of a data set, {old: new}. Two columns may exchange their names."""
    changes = {old: new for old, new in names.items() if old != new}
    for step in (
        {old: f"{new} of {old}" for old, new in changes.items()},
        {f"{new} of {old}": new for old, new in changes.items()},
    ):
        rows = rows.rename_columns(step) if step else rows
    return rows


def unread_columns(columns: Iterable[str], form: str) -> list[str]:
    """Return the columns that `read_format` does not use."""
    used = {*form.split(" + ")}
    if "input_ids" in used:
        used |= {"labels", "completion_mask"}
    elif form in ("prompt_ids", "prompt_ids + completion_ids"):
        used |= {"completion_ids", "completion_mask"}
    elif "_ids" not in form and form != "text":
        used |= OPTIONAL_COLUMNS - (set() if "instruction" in used else {"input"})
    return [column for column in columns if column not in used]


def read_label(value: object) -> bool:
    """Return whether a label means a good answer. Raises InputError for a value that is not a label."""
    label = _LABEL_TEXTS.get(str(value).lower()) if isinstance(value, str | int | float) else None
    if label is None:
        raise InputError(f"column 'label': expected true or false (or 1, 0), found {short_repr(value)}")
    return label


def read_margin(value: object) -> float:
    """Return the margin of a pair, 0 for a missing one. Raises InputError for a value that is no finite number."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"column 'margin': expected a number, found {short_repr(value)}")
    return float(value)


def read_format(row: dict, form: str) -> Sample:
    """Return the raw sample of a row that has the columns of `form`. Raises InputError for a value of a wrong type."""
    columns = form.split(" + ")
    label = None
    if "label" in columns:
        label = read_label(row["label"])
    if "_ids" in form:
        return _read_token_ids(row, form, label)
    if form == "text":
        return Sample(None, [_read_string(row, "text")])

    # the prompt, and the answers to it
    prompt: Any = None
    if "messages" in columns:
        with error_context("column 'messages'"):
            prompt = turns = clean_messages(row["messages"])
        row = {**row, **{name: _as_messages(row[name]) for name in columns if name in ("chosen", "rejected")}}
    elif "instruction" in columns:  # Alpaca's format, in which the optional input follows on a separate line
        parts = [_read_string(row, name) for name in ("instruction", "input") if row.get(name) is not None]
        prompt = "\n".join(filter(None, parts))
    elif "prompt" in columns:
        prompt = _read_value(row, "prompt")
    answers: list = [
        _read_answer(row, name) for name in columns if name in ("completion", "output", "chosen", "rejected")
    ]
    tools = _read_tools(row)

    # `messages` is a whole conversation, one whose last turn is labeled, or the beginning of chosen and rejected
    if form == "messages":
        return Sample(None, [turns], tools=tools)
    if "messages" in columns and not answers:
        if turns[-1]["role"] != "assistant" or len(turns) == 1:
            raise InputError("column 'messages': the last turn must be an assistant turn that follows other turns")
        return Sample(turns[:-1], [turns[-1:]], label, tools=tools)
    if "messages" in columns:
        repeats_prompt = any(answer[0]["role"] != "assistant" or answer[0] == turns[0] for answer in answers)
        if turns[-1]["role"] == "assistant" and not repeats_prompt:
            raise InputError(
                "column 'messages': the last turn cannot be an assistant turn, since 'chosen' and 'rejected' are the "
                "answers. Remove that turn"
            )
        prompt = None if repeats_prompt else turns

    # pairs without a prompt share their beginning, and so do whole conversations next to a prompt that is text
    prompt_words = prompt.replace(MARK, " ").split() if isinstance(prompt, str) else None
    repeats_prompt = prompt_words is not None and any(
        isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers
    )
    if "chosen" not in columns or not (prompt is None or repeats_prompt):
        return Sample(prompt, answers, label, tools=tools)

    prompt, answers = _split_shared(*answers)
    if prompt_words is not None:
        prompt_text = " ".join(prompt_words)
        shared_text = " ".join(" ".join(turn["content"] for turn in prompt).replace(MARK, " ").split())
        if prompt_text not in shared_text and shared_text not in prompt_text:
            raise InputError(
                f"column 'prompt': {short_repr(prompt_text)} is not part of the turns that 'chosen' and 'rejected' "
                f"share, {short_repr(shared_text)}"
            )
    return Sample(prompt, answers, label, tools=tools)


def _read_token_ids(row: dict, form: str, label: bool | None) -> Sample:
    """Return the sample of a row of token ids, which are not changed.

    Raises InputError for padded and for packed rows, whose padding and neighbors would be trained on.
    """
    lists = {column: value if isinstance(value, list) else [] for column, value in row.items()}
    if len(lists.get("seq_lengths", [])) > 1 or lists.get("position_ids", []).count(0) > 1:
        raise InputError(
            f"columns {form}: several examples are packed in the row. Write one example per row, without padding, and "
            "set `packing: true` to pack them"
        )
    if 0 in lists.get("attention_mask", []):
        raise InputError(f"columns {form}: the row is padded. Write one example per row, without padding")

    if form == "input_ids":
        ids = _read_id_list(row, "input_ids")
        labels = row.get("labels")
        mask = _read_mask(row.get("completion_mask"), ids)
        if labels is None:
            return Sample([], [ids], mask=mask)
        labels = labels if isinstance(labels, list) else []
        if len(labels) != len(ids) or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
            raise InputError("column 'labels': expected -100 or the token of 'input_ids' at the same position")
        pairs = zip(labels, mask or [1] * len(ids), strict=True)
        return Sample([], [ids], mask=[int(label != -100 and trained) for label, trained in pairs])

    columns = form.split(" + ")
    # rows of prompts may have an answer too, which on-policy methods keep for evaluation
    columns += ["completion_ids"] if form == "prompt_ids" and row.get("completion_ids") else []
    branches = [_read_id_list(row, column) for column in columns if column.endswith("_ids") and column != "prompt_ids"]
    mask = _read_mask(row.get("completion_mask"), branches[0]) if "completion_ids" in columns else None
    return Sample(_read_id_list(row, "prompt_ids"), branches, label, mask)


def _read_answer(row: dict, column: str) -> str | Messages:
    """Return an answer, which may be empty: a text, or turns of which the last one is an assistant turn."""
    value = _read_value(row, column)
    if isinstance(value, list) and value[-1]["role"] != "assistant":
        role = short_repr(value[-1]["role"])
        raise InputError(f"column {column!r}: the last turn has the role {role}, expected 'assistant'")
    return value


def _as_messages(answer: object) -> Any:
    """Return an answer to messages as a list of messages. It may be a text, or a single message."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return [answer] if isinstance(answer, dict) else answer


def _read_string(row: dict, column: str) -> str:
    if not isinstance(row[column], str):
        raise InputError(f"column {column!r}: expected a string, found {short_repr(row[column])}")
    check_unicode(row[column], f"column {column!r}")
    return row[column]


def add_system_turn(sample: Sample, text: object) -> Sample:
    """Return `sample` with a system turn of this text, unless it begins with that turn.

    Raises:
        InputError: If the sample has a system turn with another text, if it is plain text, or if `text` is not a
            string.
    """
    if not isinstance(text, str):
        raise InputError(f"expected a string, found {short_repr(text)}")
    if not text.strip():
        return sample
    check_unicode(text, "its text")

    turns = sample.branches[0] if sample.prompt is None else sample.prompt
    if not isinstance(turns, list):
        raise InputError(
            "requires messages, and the row is plain text. Set `apply_chat_template: true`, or write the text into the "
            "prompt"
        )
    if turns[0]["role"] == "system":
        if turns[0]["content"].strip() != text.strip():
            raise InputError(f"the messages have a system turn with another text, {short_repr(turns[0]['content'])}")
        return sample
    turns = [{"role": "system", "content": text}, *turns]
    return sample._replace(branches=[turns]) if sample.prompt is None else sample._replace(prompt=turns)


def _read_value(row: dict, column: str) -> str | Messages:
    if isinstance(row[column], str):
        return _read_string(row, column)
    if not isinstance(row[column], list):
        raise InputError(f"column {column!r}: expected a string or a list of messages, found {short_repr(row[column])}")
    with error_context(f"column {column!r}"):
        return clean_messages(row[column])


def _split_shared(chosen: str | Messages, rejected: str | Messages) -> tuple[Any, list]:
    """Return (prompt, [chosen, rejected]), where the prompt is the longest beginning that both have in common.

    The prompt consists of whole messages, or of text up to a word or line boundary. A space at the boundary belongs to
    the completions, a line break to the prompt. Neither branch becomes empty.
    """
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    if is_text and not all(str(answer).strip() for answer in (chosen, rejected)):  # there is no pair
        return "", ["", ""]
    n = min(chat.common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while is_text and n and chosen[n - 1] != "\n" and (chosen[n], rejected[n]) != (" ", " "):
        n -= 1
    if n == 0:
        problem = "texts share no beginning" if is_text else "conversations share no first message"
        raise InputError(
            f"columns 'chosen' and 'rejected': the {problem} that could be the prompt. Add a column 'prompt'"
        )
    return chosen[:n], [chosen[n:], rejected[n:]]


def _read_tools(row: dict) -> list | None:
    tools = row.get("tools")
    try:
        tools = (json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        text = json.dumps(tools, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"column 'tools': not valid JSON ({error})") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f"column 'tools': expected a list of tools {{type, function}}, found {short_repr(tools)}")
    check_unicode(text, "column 'tools'")
    return tools


def read_template_kwargs(value: object) -> dict:
    """Return a row's options for the chat template, which are a mapping or the JSON text of one.

    Raises InputError for anything else.
    """
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise InputError(f"expected a mapping of options for the chat template, found {short_repr(value)}")
    chat.check_reserved_options(value)
    if problem := string_boolean_problem(value):
        raise InputError(problem)
    return {name: option for name, option in value.items() if option is not None}


def _read_id_list(row: dict, column: str) -> list[int]:
    value = row.get(column)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise InputError(f"column {column!r}: expected a list of token ids, found {short_repr(value)}")
    return value


def _read_mask(mask: object, ids: list[int]) -> list[int] | None:
    if mask is None:
        return None
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise InputError(f"column 'completion_mask': expected {len(ids)} values 0 or 1, one for each token")
    return [int(m) for m in mask]
