"""What a data file holds -> messages for a chat template.

    clean_messages   roles checked, ShareGPT's from/value renamed, parts of text joined, absent keys removed
    without_none     the same of any nested value
    check_unicode    refuses text that no tokenizer can read
"""

from typing import Any

from ..errors import InputError, shown

Messages = list[dict[str, Any]]

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {  # what `from` may be: our role
    **{role: role for role in _ROLES}, "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_MISTAKEN = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names that are given to roles, and that templates do not know: what they have instead."""


def clean_messages(value: Any) -> Messages:
    """Messages as templates expect them: roles checked, from/value renamed, absent (None) keys removed, text
    parts joined.

    Raises:
        InputError: not a list of `{role, content}` (or `{from, value}`), an unknown `from`, a role by another name than
            templates have for it, content that is missing, or parts of it that are no text.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"expected a list of messages {{role, content}}, found {shown(value)}")
    return [_clean_message(message, n) for n, message in enumerate(value)]


def _clean_message(message: Any, n: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InputError(f"message {n} is {shown(message)}, expected {{role, content}}")
    message = without_none(message)
    if "from" in message and "role" not in message:
        message = {"role": _role_from(message.pop("from"), n), "content": message.pop("value", None), **message}
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or not role.strip():
        raise InputError(f"message {n} has no role, expected {{role, content}}; its keys are {shown([*message])}")
    plain, where = role.strip().lower(), f"message {n} ({shown(role)[1:-1]})"
    if role not in _SHAREGPT and (known := plain if plain in _SHAREGPT else _NO_ROLES.get(plain)):
        raise InputError(f"message {n} has the role {shown(role)}, expected {known!r}")
    check_unicode(role, f"message {n}: role")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InputError(f"{where}: tool_calls is {shown(calls)}, expected a list of calls")
    if calls:
        message.setdefault("content", "")
    return {**message, "content": _text_of(message.get("content"), where)}


def _role_from(name: Any, n: int) -> str:
    if not isinstance(name, str) or name not in _ROLES:
        raise InputError(f"message {n} is from {shown(name)}, expected one of {', '.join(_ROLES)}")
    return _ROLES[name]


def _text_of(content: Any, where: str) -> str:
    """Content is a string, or a list of parts `{type: text, text}`, whose texts follow one another."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InputError(f"{where}: a part of the content is {shown(part)}, expected {{type: text, text: ...}}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"{where}: content is {shown(content)}, expected a string")
    check_unicode(content, f"{where}: content")
    return content


def check_unicode(text: str, what: str) -> None:
    """Raises InputError for half of a surrogate pair: JSON may hold it, tokenizers refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{what}: character {error.start} is {half!r}, half of a surrogate pair: mend it") from None


def without_none(value: Any) -> Any:
    """`value` without the None entries that Arrow adds where dictionaries differ in their keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
