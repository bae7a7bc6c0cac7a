"""Conversion of the messages of a data file into messages for a chat template."""

import ast
import difflib
import json
import re
from contextlib import suppress
from typing import Any

from ..errors import InputError, short_repr

Messages = list[dict[str, Any]]

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLE_ALIASES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_CORRECTED_ROLES = _ROLES | _ROLE_ALIASES | {"bot": "assistant"}
"""Lower-case names that a misspelled role may resemble -> the role that templates know."""
_SHAREGPT_ROLES = (
    _ROLES | _ROLE_ALIASES | {"function_call": "assistant", "observation": "tool", "function_response": "tool"}
)
"""Values of `from` in ShareGPT's format -> the role."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message, in rows and in templates, for an assistant's reasoning before its answer."""
_THINK_BLOCK = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)  # a prompt may hold the opening tag
_SERIALIZED = re.compile(r"""\s*[\[{].*["'](role|from)["']""", re.DOTALL)


def clean_messages(value: object) -> Messages:
    """Return messages in the form that chat templates expect.

    `from` and `value` are renamed, parts of text are joined, and keys that are None are removed.

    Raises:
        InputError: If `value` is not a list of `{role, content}` or `{from, value}`, if a role has a name that
            templates do not know, or if a content is not text.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"expected a list of messages {{role, content}}, found {short_repr(value)}")
    return [_clean_message(message, n) for n, message in enumerate(value)]


def role_of(message: object) -> str | None:
    """Return the role that a raw message has after `clean_messages`, or None without a known role."""
    if not isinstance(message, dict):
        return None
    name = message.get("role", message.get("from"))
    return (_ROLES if "role" in message else _SHAREGPT_ROLES).get(name) if isinstance(name, str) else None


def is_serialized_messages(text: object) -> bool:
    """Return whether a text is a list of messages, or a single one, written as JSON or as Python prints it."""
    if not isinstance(text, str) or not _SERIALIZED.match(text):
        return False
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = parse(text.strip())
            return {turn["role"] for turn in clean_messages([value] if isinstance(value, dict) else value)} <= {*_ROLES}
    return False


def _clean_message(message: object, n: int) -> dict[str, Any]:
    """Return message number `n` of a conversation as `clean_messages` does."""
    if not isinstance(message, dict):
        raise InputError(f"message {n} is {short_repr(message)}, expected {{role, content}}")
    message = _drop_nulls(message)
    if "from" in message and "role" not in message:
        name = message.pop("from")
        if not isinstance(name, str) or name not in _SHAREGPT_ROLES:
            raise InputError(f"message {n} is from {short_repr(name)}, expected one of {', '.join(_SHAREGPT_ROLES)}")
        message = {"role": _SHAREGPT_ROLES[name], "content": message.pop("value", None), **message}

    role = message.get("role")
    calls = message.pop("tool_calls", None)
    if not isinstance(role, str) or not role.strip():
        raise InputError(f"message {n} has no role, expected {{role, content}}; its keys are {short_repr([*message])}")
    # a template may render or drop a role that it does not know, so a misspelled one is rejected here
    if role not in _ROLES and (close := difflib.get_close_matches(role.strip().lower(), _CORRECTED_ROLES, 1, 0.75)):
        raise InputError(f"message {n} has the role {short_repr(role)}, expected {_CORRECTED_ROLES[close[0]]!r}")
    check_unicode(role, f"message {n}: role")
    location = f"message {n} ({short_repr(role)[1:-1]})"
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InputError(f"{location}: tool_calls is {short_repr(calls)}, expected a list of calls")
    if calls:
        message["tool_calls"] = [_clean_call(_drop_nulls(call), location) for call in calls]

    # a turn with calls may lack a content; any other content is a string, or parts whose texts are joined
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                hint = ". Images require `model.images: true`" if is_image_part(part) else ""
                expected = "expected {type: text, text: ...}"
                raise InputError(f"{location}: a part of the content is {short_repr(part)}, {expected}{hint}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"{location}: content is {short_repr(content)}, expected a string")
    check_unicode(content, f"{location}: content")
    return {**message, "content": content}


def is_image_part(part: object) -> bool:
    """Return whether a part of a content is an image, in the format of transformers or of OpenAI."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _clean_call(call: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a call whose arguments are a mapping.

    In OpenAI's format they are JSON text, which templates would encode a second time.
    """
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{location}: a call is {short_repr(call)}, expected {{function: {{name, arguments}}}}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments_text = short_repr(function["arguments"])
        raise InputError(f"{location}: the arguments of a call are not valid JSON, {arguments_text}") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def call_names(message: dict[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [call.get("function", call)["name"] for call in message.get("tool_calls", [])]


def normalize_reasoning(turns: Messages, action: str, key: str | None) -> Messages:
    """Return `turns` with the reasoning of assistant turns dropped, or kept in the form that a template reads.

    Args:
        turns: The messages. Their reasoning is under one of the keys `REASONING`, or in <think> tags.
        action: "drop" or "keep".
        key: The template's key for reasoning. None writes it in <think> tags before the content.

    Raises:
        InputError: If reasoning is not text, or if a turn has two different ones.
    """
    return [
        _normalize_turn(turn, n, action, key) if turn["role"] == "assistant" else turn for n, turn in enumerate(turns)
    ]


def _normalize_turn(turn: dict[str, Any], n: int, action: str, key: str | None) -> dict[str, Any]:
    values = [turn[name] for name in REASONING if turn.get(name)]
    content = turn["content"]
    if block := _THINK_BLOCK.match(content):
        values = [*values, block[1]]
        content = content[block.end() :]
    if invalid := [value for value in values if not isinstance(value, str)]:
        raise InputError(f"message {n} (assistant): its reasoning is {short_repr(invalid[0])}, expected a string")
    thoughts = {value.strip() for value in values} - {""}
    if len(thoughts) > 1:
        listing = " and ".join(map(short_repr, sorted(thoughts)))
        raise InputError(f"message {n} (assistant) has two reasonings, {listing}. Remove one of them")
    turn = {name: value for name, value in turn.items() if name not in REASONING} | {"content": content}
    if action == "drop" or not thoughts:
        return turn
    [thought] = thoughts
    return turn | ({key: thought} if key else {"content": f"<think>\n{thought}\n</think>\n\n{content}"})


def text_of(value: object) -> str:
    """Return all strings inside a value, including messages and lists, one per line. Names of roles are left out."""
    if isinstance(value, dict):
        return "\n".join(text_of(item) for key, item in value.items() if key not in ("role", "from", "type"))
    if isinstance(value, list | tuple):
        return "\n".join(map(text_of, value))
    return value if isinstance(value, str) else ""


def check_unicode(text: str, location: str) -> None:
    """Raise InputError for half of a surrogate pair, which JSON can hold and tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(
            f"{location}: character {error.start} is {half!r}, half of a surrogate pair. Correct the text"
        ) from None


def _drop_nulls(mapping: dict) -> dict:
    """Return a message or a call without its keys that are None. Nested values, such as arguments, are not changed."""
    return {key: value for key, value in mapping.items() if value is not None}


def has_nested_null(value: object) -> bool:
    """Return whether there is a null inside tools, or inside the calls of messages."""
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    nested = [part.get("tool_calls") if {"role", "from"} & {*part} else part for part in parts]
    return any(part != without_none(part) for part in nested)


def without_none(value: object) -> Any:
    """Return `value` without the None entries that Arrow adds where dictionaries differ in their keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
