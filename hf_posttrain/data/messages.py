"""What a data file holds -> messages for a chat template."""

import ast
import difflib
import json
import re
from contextlib import suppress
from typing import Any

from ..errors import InputError, shown

Messages = list[dict[str, Any]]

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_MISTAKEN = _ROLES | _OTHER_NAMES | {"bot": "assistant"}
"""What a role may have been meant to be, in small letters: the role that templates know."""
_SHAREGPT = _ROLES | _OTHER_NAMES | {"function_call": "assistant", "observation": "tool", "function_response": "tool"}
"""What `from` may be: the role."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys that rows and templates have for what an assistant thought before its answer."""
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)  # what prompts open is not in the answer
_WRITTEN = re.compile(r"""\s*[\[{].*["'](role|from)["']""", re.DOTALL)


def clean_messages(value: object) -> Messages:
    """Messages as templates expect them: from/value renamed, parts of text joined, absent (None) keys removed.

    Raises InputError for what is not a list of `{role, content}` or `{from, value}`, for roles by names that templates
    do not know, and for content that is no text.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"expected a list of messages {{role, content}}, found {shown(value)}")
    return [_clean_message(message, n) for n, message in enumerate(value)]


def role_of(message: object) -> str | None:
    """The role that a raw message will have once it is clean; None where it has none that is known."""
    if not isinstance(message, dict):
        return None
    name = message.get("role", message.get("from"))
    return (_ROLES if "role" in message else _SHAREGPT).get(name) if isinstance(name, str) else None


def are_written_messages(text: Any) -> bool:
    """Is it a list of messages, or one, by roles that are known, as JSON or as Python writes them?"""
    if not isinstance(text, str) or not _WRITTEN.match(text):
        return False
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = parse(text.strip())
            return {turn["role"] for turn in clean_messages([value] if isinstance(value, dict) else value)} <= {*_ROLES}
    return False


def _clean_message(message: object, n: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InputError(f"message {n} is {shown(message)}, expected {{role, content}}")
    message = _given(message)
    if "from" in message and "role" not in message:
        name = message.pop("from")
        if not isinstance(name, str) or name not in _SHAREGPT:
            raise InputError(f"message {n} is from {shown(name)}, expected one of {', '.join(_SHAREGPT)}")
        message = {"role": _SHAREGPT[name], "content": message.pop("value", None), **message}
    role = message.get("role")
    calls = message.pop("tool_calls", None)
    if not isinstance(role, str) or not role.strip():
        raise InputError(f"message {n} has no role, expected {{role, content}}; its keys are {shown([*message])}")
    # a role that a template does not know may be rendered as it is, or dropped: better refused here
    if role not in _ROLES and (close := difflib.get_close_matches(role.strip().lower(), _MISTAKEN, 1, 0.75)):
        raise InputError(f"message {n} has the role {shown(role)}, expected {_MISTAKEN[close[0]]!r}")
    check_unicode(role, f"message {n}: role")
    where = f"message {n} ({shown(role)[1:-1]})"
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InputError(f"{where}: tool_calls is {shown(calls)}, expected a list of calls")
    if calls:
        message["tool_calls"] = [_clean_call(_given(call), where) for call in calls]
    # a turn of calls alone needs no content; others have a string, or parts whose texts follow one another
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                sees = "; pictures want model.images: true" if is_picture(part) else ""
                expected = "expected {type: text, text: ...}"
                raise InputError(f"{where}: a part of the content is {shown(part)}, {expected}{sees}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"{where}: content is {shown(content)}, expected a string")
    check_unicode(content, f"{where}: content")
    return {**message, "content": content}


def is_picture(part: Any) -> bool:
    """Is a part of a content a picture, by transformers' or OpenAI's name?"""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _clean_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call whose arguments are a mapping: OpenAI has them as JSON text, which templates would encode once more."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a call is {shown(call)}, expected {{function: {{name, arguments}}}}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise InputError(f"{where}: the arguments of a call are no JSON: {shown(function['arguments'])}") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def call_names(message: dict[str, Any]) -> list[str]:
    """Names of the functions that a message calls."""
    return [call.get("function", call)["name"] for call in message.get("tool_calls", [])]


def with_reasoning(turns: Messages, wanted: str, key: str | None) -> Messages:
    """`turns` with the reasoning of each assistant's dropped, or kept as a template reads it: under its key, or in
    <think> tags before the content where it has no key. wanted: drop or keep.

    Raises InputError for reasoning that is no text, and for two of one turn.
    """
    return [
        _with_reasoning(turn, n, wanted, key) if turn["role"] == "assistant" else turn for n, turn in enumerate(turns)
    ]


def _with_reasoning(turn: dict[str, Any], n: int, wanted: str, key: str | None) -> dict[str, Any]:
    found = [turn[name] for name in REASONING if turn.get(name)]
    content = turn["content"]
    if inside := _THOUGHT.match(content):
        found = [*found, inside[1]]
        content = content[inside.end() :]
    if wrong := [thought for thought in found if not isinstance(thought, str)]:
        raise InputError(f"message {n} (assistant): its reasoning is {shown(wrong[0])}, expected a string")
    thoughts = {thought.strip() for thought in found} - {""}
    if len(thoughts) > 1:
        raise InputError(f"message {n} (assistant) has two reasonings, {' and '.join(map(shown, sorted(thoughts)))}")
    turn = {name: value for name, value in turn.items() if name not in REASONING} | {"content": content}
    if wanted == "drop" or not thoughts:
        return turn
    [thought] = thoughts
    return turn | ({key: thought} if key else {"content": f"<think>\n{thought}\n</think>\n\n{content}"})


def text_of(value: object) -> str:
    """All strings inside a value, on lines of their own: those of messages and lists too, but for names of roles."""
    if isinstance(value, dict):
        return "\n".join(text_of(item) for key, item in value.items() if key not in ("role", "from", "type"))
    if isinstance(value, list | tuple):
        return "\n".join(map(text_of, value))
    return value if isinstance(value, str) else ""


def check_unicode(text: str, what: str) -> None:
    """Raises InputError for half of a surrogate pair: JSON may hold it, tokenizers refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{what}: character {error.start} is {half!r}, half of a surrogate pair: mend it") from None


def _given(mapping: dict) -> dict:
    """A message or call without its keys that are None; what is inside, as arguments, stays as it is."""
    return {key: value for key, value in mapping.items() if value is not None}


def holds_null(value: object) -> bool:
    """Is a null inside tools, or inside the calls of messages?"""
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    inside = [part.get("tool_calls") if {"role", "from"} & {*part} else part for part in parts]
    return any(part != without_none(part) for part in inside)


def without_none(value: object) -> Any:
    """`value` without the None entries that Arrow adds where dictionaries differ in their keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
