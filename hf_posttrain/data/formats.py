"""One raw row -> a `Sample`, and which format a data set has.

A format is the columns that it needs, joined by " + ", such as "prompt + completion"; `kinds` says which formats each
kind of rows is made from.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, error_context, named, nearest, shown
from . import chat
from .kinds import Reader
from .messages import Messages, check_unicode, clean_messages, without_none

_PROMPTED = "prompt + chosen + rejected"


class Sample(NamedTuple):
    """An example: first raw, then text, then ids. `prompt` None: the one branch is a whole text or conversation."""

    prompt: Any  # str | messages | list[int] | None
    branches: list  # [] | [completion] | [chosen, rejected], each of the prompt's kind
    label: bool | None = None
    mask: list[int] | None = None  # of the one branch, once it is ids
    tools: list | None = None
    unread: tuple[str, ...] = ()  # what of its messages the chat template does not write

    @property
    def is_chat(self) -> bool:
        """Is it messages (or ids)? Otherwise text."""
        return isinstance(self.branches[0] if self.prompt is None else self.prompt, list)


def detect(columns: list[str], method: Reader) -> str:
    """The first format that `method` can read from these columns. Raises InputError listing what it could read."""
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


def our_name(column: str, columns: Collection[str]) -> str:
    """What we call a column that has another name in a format that is read as it is."""
    return "label" if column == "kto_tag" and "label" not in columns else column


def unread(columns: Iterable[str], form: str) -> list[str]:
    """Those of the columns that `read_format` makes no use of."""
    used = {*form.split(" + ")}
    if "input_ids" in used:
        used |= {"labels", "completion_mask"}
    elif "prompt_ids" in used:
        masked = form in ("prompt_ids", "prompt_ids + completion_ids")
        used |= {"completion_ids", "completion_mask"} if masked else set()
    elif form != "text":
        used |= {"system", "tools"} | ({"input"} if "instruction" in used else set())
    return [column for column in columns if column not in used]


def read_format(row: dict, form: str) -> Sample:
    """The raw sample of a row that has the columns of `form`. Raises InputError for a value of the wrong kind."""
    columns, label = form.split(" + "), None
    if "label" in columns:
        if not isinstance(row["label"], bool | int | np.bool_) or row["label"] not in (0, 1):
            raise InputError(f"column 'label': expected true or false (or 1, 0), found {shown(row['label'])}")
        label = bool(row["label"])
    # ids, which are taken as they are
    if form == "input_ids":
        ids, labels = _ids(row, "input_ids"), row.get("labels")
        if labels is None:
            return Sample([], [ids], mask=_mask(row.get("completion_mask"), ids))
        fitting = isinstance(labels, list) and len(labels) == len(ids)
        if not fitting or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
            raise InputError("column 'labels': expected -100 or the token of 'input_ids' at the same position")
        return Sample([], [ids], mask=[int(label != -100) for label in labels])
    if "prompt_ids" in columns:
        # a prompt alone may have an answer next to it, which on-policy methods keep for evaluation
        columns += ["completion_ids"] if form == "prompt_ids" and "completion_ids" in row else []
        branches = [_ids(row, column) for column in columns if column.endswith("_ids") and column != "prompt_ids"]
        mask = _mask(row.get("completion_mask"), branches[0]) if "completion_ids" in columns else None
        return Sample(_ids(row, "prompt_ids"), branches, label, mask)
    # a whole text or conversation
    if form == "text":
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise InputError(f"column 'text': expected a text that is not empty, found {shown(row['text'])}")
        check_unicode(row["text"], "column 'text'")
        return Sample(None, [row["text"]])
    if form in ("messages", "conversations"):
        with error_context(f"column {form!r}"):
            return Sample(None, [clean_messages(row[form])], tools=_tools(row))
    # a conversation whose last turn is labelled, or one that two single messages answer
    if chats := [column for column in columns if column in ("messages", "conversations")]:
        with error_context(f"column {chats[0]!r}"):
            turns = clean_messages(row[chats[0]])
        if "label" in columns:
            if turns[-1]["role"] != "assistant" or len(turns) == 1:
                raise InputError(f"column {chats[0]!r}: expected an answer of the assistant's behind other turns")
            return Sample(turns[:-1], [turns[-1:]], label, tools=_tools(row))
        row = {**row, "prompt": turns, **{name: _single(row[name]) for name in ("chosen", "rejected")}}
        # answers are whole conversations themselves where they do not begin with what an assistant says
        begins: list[Any] = [_value(row, name)[0] for name in ("chosen", "rejected") if isinstance(row[name], list)]
        whole = any(turn["role"] != "assistant" or turn == turns[0] for turn in begins)
        if turns[-1]["role"] == "assistant" and not whole:
            raise InputError(f"column {chats[0]!r}: ends with an answer, although chosen and rejected are the answers")
        return read_format({**row, "prompt": None} if whole else row, "chosen + rejected" if whole else _PROMPTED)
    if "instruction" in columns:
        row = {**row, "prompt": _instruction(row)}
    # a prompt, and answers to it
    answers = []
    for column in (name for name in columns if name not in ("prompt", "instruction", "label")):
        value = _value(row, column)
        if isinstance(value, list) and value[-1]["role"] != "assistant":
            raise InputError(f"column {column!r}: the last turn is {shown(value[-1]['role'])}, expected 'assistant'")
        text = value if isinstance(value, str) else value[-1]["content"]
        if not text.strip() and (isinstance(value, str) or not value[-1].get("tool_calls")):
            raise InputError(f"column {column!r}: empty completion")
        answers.append(value)
    # pairs without a prompt share their beginning; so do whole conversations next to a prompt that is text
    text_prompt = isinstance(row.get("prompt"), str)
    whole = text_prompt and any(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers)
    shared = "chosen" in columns and (row.get("prompt") is None or whole)
    if not shared:
        return Sample(_value(row, "prompt"), answers, label, tools=_tools(row))
    prompt, answers = _split_shared(*answers)
    if text_prompt:
        asked, said = row["prompt"].split(), " ".join(turn["content"] for turn in prompt).split()
        if " ".join(asked) not in " ".join(said) and " ".join(said) not in " ".join(asked):
            begin = f"column 'prompt': {shown(row['prompt'])} does not stand in what chosen and rejected share"
            raise InputError(f"{begin}, {shown(' '.join(said))}")
    return Sample(prompt, answers, label, tools=_tools(row))


def _single(answer: Any) -> Any:
    """An answer to messages as messages: it may be a text, or one message."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return [answer] if isinstance(answer, dict) else answer


def _instruction(row: dict) -> str:
    """The prompt of a row in Alpaca's columns: the instruction and, on a line of its own, the input if there is one."""
    parts = [row["instruction"], "" if row.get("input") is None else row["input"]]
    for column, text in zip(("instruction", "input"), parts, strict=True):
        if not isinstance(text, str):
            raise InputError(f"column {column!r}: expected a string, found {shown(text)}")
        check_unicode(text, f"column {column!r}")
    return "\n".join(part for part in parts if part)


def add_system(sample: Sample, text: Any) -> Sample:
    """`sample` with a system turn of this text, unless it begins with that. Raises InputError for another system turn
    there, for a sample of plain text, and for what is no text."""
    if not isinstance(text, str):
        raise InputError(f"expected a string, found {shown(text)}")
    if not text.strip():
        return sample
    check_unicode(text, "its text")
    turns = sample.branches[0] if sample.prompt is None else sample.prompt
    if not isinstance(turns, list):
        raise InputError("the row is plain text otherwise: set apply_chat_template: true, or write it into the prompt")
    if turns[0]["role"] == "system":
        if turns[0]["content"].strip() != text.strip():
            raise InputError(f"the messages have a system turn of another text, {shown(turns[0]['content'])}")
        return sample
    turns = [{"role": "system", "content": text}, *turns]
    return sample._replace(branches=[turns]) if sample.prompt is None else sample._replace(prompt=turns)


def _value(row: dict, column: str) -> str | Messages:
    value = row.get(column)
    if isinstance(value, str):
        check_unicode(value, f"column {column!r}")
        return value
    if not isinstance(value, list):
        raise InputError(f"column {column!r}: expected a string or a list of messages, found {shown(value)}")
    with error_context(f"column {column!r}"):
        return clean_messages(value)


def _split_shared(chosen: str | Messages, rejected: str | Messages) -> tuple[Any, list]:
    """(prompt, [chosen, rejected]): the longest common beginning is the prompt, in whole messages, or in text up to a
    word or line boundary (a space belongs to the completions, a line break to the prompt). No branch is left empty."""
    n = min(chat.shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    while is_text and n and chosen[n - 1] != "\n" and (chosen[n], rejected[n]) != (" ", " "):
        n -= 1
    if n == 0:
        lacking = "texts share no beginning" if is_text else "conversations share no first message"
        raise InputError(f"columns 'chosen' and 'rejected': the {lacking} to be the prompt")
    return chosen[:n], [chosen[n:], rejected[n:]]


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


def _mask(mask: Any, ids: list[int]) -> list[int] | None:
    if mask is None:
        return None
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise InputError(f"column 'completion_mask': expected {len(ids)} values 0 or 1, one for each token")
    return [int(m) for m in mask]
