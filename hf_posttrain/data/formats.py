"""One raw row -> a `Sample`, and which format a data set has.

A format is the columns that it needs, joined by " + ", such as "prompt + completion"; `kinds` says which formats each
kind of rows is made from.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, error_context, named, shown
from . import chat
from .images import MARK
from .messages import Messages, check_unicode, clean_messages
from .row_schema import OPTIONAL, Reader
from .template import switch_problem

if TYPE_CHECKING:
    from .dataset_type import AnyDataset

_OTHER_NAMES = {"kto_tag": "label", "conversations": "messages", "assistant_masks": "completion_mask"}
"""What columns are called in formats of others: what we call them."""
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""What `label` may be, as text."""


class Sample(NamedTuple):
    """An example: first raw, then text, then ids. `prompt` None: the one branch is a whole text or conversation."""

    prompt: Any  # str | messages | list[int] | None
    branches: list  # [] | [completion] | [chosen, rejected], each of the prompt's kind
    label: bool | None = None
    mask: list[int] | None = None  # of the one branch, once it is ids
    tools: list | None = None
    template_kwargs: dict | None = None  # what the template gets: the row's options over those of all rows
    unread: tuple[str, ...] = ()  # what of its messages the chat template does not write
    pictures: tuple[dict, ...] = ()  # as `images.stored`, in the order in which they stand in its text
    expansions: tuple[str, ...] = ()  # the text that stands for each

    @property
    def is_chat(self) -> bool:
        """Is it messages? Otherwise text, or ids."""
        part = self.branches[0] if self.prompt is None else self.prompt
        return isinstance(part, list) and isinstance(next(iter(part), None), dict)


def detect(columns: list[str], method: Reader) -> str:
    """Return the first format that `method` can read from these columns.

    Raises InputError: with the column that is missing if a format lacks a single one, else with all formats.
    """
    nearly = []
    for form in method.rows.formats:
        missing = {*form.split(" + ")} - {*columns}
        if not missing:
            return form
        if len(missing) == 1 and missing != {form}:
            nearly.append((form, *missing))
    if nearly:
        form, missing_one = max(nearly, key=lambda one: one[0].count(" + "))
        raise InputError(
            f"column {missing_one!r} is missing: {method.name} reads {form}, and the columns are {named(columns)}; "
            "rename a column with data.train.columns (--columns of commands), or see with hf-posttrain data FILE which "
            "method reads them"
        )
    raise InputError(
        f"columns {named(columns)} are none that {method.name} reads: {' | '.join(method.rows.formats)}; "
        "rename yours with data.train.columns (--columns of commands), for instance {prompt: question}"
    )


def our_name(column: str, columns: Collection[str]) -> str:
    """What we call a column that has another name in a format that is read as it is."""
    ours = _OTHER_NAMES.get(column, column)
    return column if ours in columns else ours


def renamed(rows: "AnyDataset", names: Mapping[str, str]) -> Any:
    """The rows of a data set with other names for columns, {old: new}; two may change places."""
    moved = {old: new for old, new in names.items() if old != new}
    for step in (
        {old: f"{new} of {old}" for old, new in moved.items()},
        {f"{new} of {old}": new for old, new in moved.items()},
    ):
        rows = rows.rename_columns(step) if step else rows
    return rows


def unread(columns: Iterable[str], form: str) -> list[str]:
    """Those of the columns that `read_format` makes no use of."""
    used = {*form.split(" + ")}
    if "input_ids" in used:
        used |= {"labels", "completion_mask"}
    elif form in ("prompt_ids", "prompt_ids + completion_ids"):
        used |= {"completion_ids", "completion_mask"}
    elif "_ids" not in form and form != "text":
        used |= OPTIONAL - (set() if "instruction" in used else {"input"})
    return [column for column in columns if column not in used]


def read_label(value: object) -> bool:
    """Is an answer good? Raises InputError for what says neither."""
    label = _LABELS.get(str(value).lower()) if isinstance(value, str | int | float) else None
    if label is None:
        raise InputError(f"column 'label': expected true or false (or 1, 0), found {shown(value)}")
    return label


def read_format(row: dict, form: str) -> Sample:
    """The raw sample of a row that has the columns of `form`. Raises InputError for a value of the wrong kind."""
    columns = form.split(" + ")
    label = None
    if "label" in columns:
        label = read_label(row["label"])
    if "_ids" in form:
        return _read_ids(row, form, label)
    if form == "text":
        return Sample(None, [_string(row, "text")])
    # what was asked, and what was answered
    prompt: Any = None
    if "messages" in columns:
        with error_context("column 'messages'"):
            prompt = turns = clean_messages(row["messages"])
        row = {**row, **{name: _single(row[name]) for name in columns if name in ("chosen", "rejected")}}
    elif "instruction" in columns:  # of Alpaca: the input, if there is one, is on a line of its own
        parts = [_string(row, name) for name in ("instruction", "input") if row.get(name) is not None]
        prompt = "\n".join(filter(None, parts))
    elif "prompt" in columns:
        prompt = _value(row, "prompt")
    answers: list = [_answer(row, name) for name in columns if name in ("completion", "output", "chosen", "rejected")]
    tools = _tools(row)
    # a whole conversation, one whose last turn is labelled, or one that two others answer or begin as
    if form == "messages":
        return Sample(None, [turns], tools=tools)
    if "messages" in columns and not answers:
        if turns[-1]["role"] != "assistant" or len(turns) == 1:
            raise InputError("column 'messages': expected an answer of the assistant's behind other turns")
        return Sample(turns[:-1], [turns[-1:]], label, tools=tools)
    if "messages" in columns:
        whole = any(answer[0]["role"] != "assistant" or answer[0] == turns[0] for answer in answers)
        if turns[-1]["role"] == "assistant" and not whole:
            raise InputError("column 'messages': ends with an answer, although chosen and rejected are the answers")
        prompt = None if whole else turns
    # pairs without a prompt share their beginning; so do whole conversations next to a prompt that is text
    asked = prompt.replace(MARK, " ").split() if isinstance(prompt, str) else None
    whole = asked is not None and any(isinstance(each, list) and each[0]["role"] != "assistant" for each in answers)
    if "chosen" not in columns or not (prompt is None or whole):
        return Sample(prompt, answers, label, tools=tools)
    prompt, answers = _split_shared(*answers)
    if asked is not None:
        said = " ".join(turn["content"] for turn in prompt).replace(MARK, " ").split()
        if " ".join(asked) not in " ".join(said) and " ".join(said) not in " ".join(asked):
            begin = f"column 'prompt': {shown(' '.join(asked))} does not stand in what chosen and rejected share"
            raise InputError(f"{begin}, {shown(' '.join(said))}")
    return Sample(prompt, answers, label, tools=tools)


def _read_ids(row: dict, form: str, label: bool | None) -> Sample:
    """Ids, which are taken as they are. Raises InputError for padding and packed rows, which would be trained so."""
    lists = {column: value if isinstance(value, list) else [] for column, value in row.items()}
    packed = len(lists.get("seq_lengths", [])) > 1 or lists.get("position_ids", []).count(0) > 1
    if packed or 0 in lists.get("attention_mask", []):
        what = "several examples are packed in the row (packing: true does that)" if packed else "the row is padded"
        raise InputError(f"columns {form}: {what}: give each example a row of its own, without padding")
    if form == "input_ids":
        ids = _ids(row, "input_ids")
        labels = row.get("labels")
        mask = _mask(row.get("completion_mask"), ids)
        if labels is None:
            return Sample([], [ids], mask=mask)
        labels = labels if isinstance(labels, list) else []
        if len(labels) != len(ids) or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
            raise InputError("column 'labels': expected -100 or the token of 'input_ids' at the same position")
        both = zip(labels, mask or [1] * len(ids), strict=True)
        return Sample([], [ids], mask=[int(label != -100 and trained) for label, trained in both])
    columns = form.split(" + ")
    # a prompt alone may have an answer next to it, which on-policy methods keep for evaluation
    columns += ["completion_ids"] if form == "prompt_ids" and row.get("completion_ids") else []
    branches = [_ids(row, column) for column in columns if column.endswith("_ids") and column != "prompt_ids"]
    mask = _mask(row.get("completion_mask"), branches[0]) if "completion_ids" in columns else None
    return Sample(_ids(row, "prompt_ids"), branches, label, mask)


def _answer(row: dict, column: str) -> str | Messages:
    """An answer: a text, or turns that end with an assistant's. It may be empty."""
    value = _value(row, column)
    if isinstance(value, list) and value[-1]["role"] != "assistant":
        raise InputError(f"column {column!r}: the last turn is {shown(value[-1]['role'])}, expected 'assistant'")
    return value


def _single(answer: Any) -> Any:
    """An answer to messages as messages: it may be a text, or one message."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return [answer] if isinstance(answer, dict) else answer


def _string(row: dict, column: str) -> str:
    if not isinstance(row[column], str):
        raise InputError(f"column {column!r}: expected a string, found {shown(row[column])}")
    check_unicode(row[column], f"column {column!r}")
    return row[column]


def add_system(sample: Sample, text: Any) -> Sample:
    """`sample` with a system turn of this text, unless it begins with that. Raises InputError for another system turn
    there, for a sample of plain text, and for what is no text.
    """
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
    if isinstance(row[column], str):
        return _string(row, column)
    if not isinstance(row[column], list):
        raise InputError(f"column {column!r}: expected a string or a list of messages, found {shown(row[column])}")
    with error_context(f"column {column!r}"):
        return clean_messages(row[column])


def _split_shared(chosen: str | Messages, rejected: str | Messages) -> tuple[Any, list]:
    """(prompt, [chosen, rejected]): the longest common beginning is the prompt, in whole messages, or in text up to a
    word or line boundary (a space belongs to the completions, a line break to the prompt). No branch is left empty.
    """
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    if is_text and not all(str(each).strip() for each in (chosen, rejected)):  # there is no pair
        return "", ["", ""]
    n = min(chat.shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while is_text and n and chosen[n - 1] != "\n" and (chosen[n], rejected[n]) != (" ", " "):
        n -= 1
    if n == 0:
        lacking = "texts share no beginning" if is_text else "conversations share no first message"
        raise InputError(f"columns 'chosen' and 'rejected': the {lacking} to be the prompt")
    return chosen[:n], [chosen[n:], rejected[n:]]


def _tools(row: dict) -> list | None:
    tools = row.get("tools")
    try:
        tools = (json.loads(tools) if isinstance(tools, str) and tools else tools) or None
        text = json.dumps(tools, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"column 'tools': not valid JSON ({error})") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f"column 'tools': expected a list of tools {{type, function}}, found {shown(tools)}")
    check_unicode(text, "column 'tools'")
    return tools


def read_template_kwargs(value: object) -> dict:
    """A row's own options for the chat template, which may be JSON text. Raises InputError for what is no mapping."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise InputError(f"expected a mapping of options for the chat template, found {shown(value)}")
    chat.refuse_ours(value)
    if problem := switch_problem(value):
        raise InputError(problem)
    return {name: option for name, option in value.items() if option is not None}


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
