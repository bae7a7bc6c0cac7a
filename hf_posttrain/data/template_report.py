"""Report of the text that a chat template adds, drops and moves, found by rendering small conversations."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, join_names, short_repr
from . import chat
from .messages import Messages
from .template import find_template_options

_USER, _SECOND, _ANSWER, _LATER, _SYSTEM, _THOUGHT, _ARGUMENT = (f"sentinel{n}" for n in range(7))
_MERGE_SYSTEM = "Write their text at the beginning of the first user turn"


def describe_template(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the properties of a tokenizer's chat template that affect training, one line each."""
    if not tokenizer.chat_template:
        return ["there is none. Messages require `model.chat_template`, and plain text is trained unchanged"]
    return [
        *_describe_turns(tokenizer),
        *_describe_reasoning(tokenizer),
        *_describe_calls(tokenizer),
        *_describe_text(tokenizer),
    ]


def _turn(role: str, content: str, **keys: object) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def _render(tokenizer: PreTrainedTokenizerBase, *turns: dict[str, Any]) -> str | None:
    """Return turns as the template renders them, or None if it rejects them."""
    messages: Messages = list(turns)
    try:
        return chat.ChatTemplate(tokenizer).render(messages)
    except InputError:
        return None


_DIALOGUE = _turn("user", _USER), _turn("assistant", _ANSWER), _turn("user", _SECOND), _turn("assistant", _LATER)


def _describe_turns(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield properties of the BOS token, of the ends of turns, and of system turns."""
    text = _render(tokenizer, *_DIALOGUE)
    if text is None or not all(turn["content"] in text for turn in _DIALOGUE):
        yield "it rejects, or does not write, a conversation of two questions and two answers"
        return

    before = text.partition(_USER)[0]
    bos = str(tokenizer.bos_token or "")
    if bos and before.startswith(bos):
        position = "which also begins turns" if bos in text.removeprefix(bos) else "once"
        yield f"it writes the BOS token {bos}, {position}"
        before = before.removeprefix(bos)
    end = chat.turn_end_id(tokenizer)
    eos = tokenizer.eos_token_id
    if end != eos:
        end_token = tokenizer.decode([end])
        yield f"a turn ends with {end_token}, and plain text with {tokenizer.eos_token}. Both end an answer"

    # the first and the second question have the same opening; any text before the first opening is the template's
    between = text.partition(_ANSWER)[2].partition(_SECOND)[0]
    shared = chat.common_prefix_length(before[::-1], between[::-1])
    default_text = before[: len(before) - shared]
    opening = between[len(between) - shared :]
    for token in tokenizer.convert_ids_to_tokens(sorted(chat.special_ids(tokenizer))):
        default_text = default_text.replace(token, "")
    if any(letter.isalpha() for letter in default_text):
        yield f"it writes a default text where there is no system turn: {short_repr(default_text.strip())}"

    with_system = _render(tokenizer, _turn("system", _SYSTEM), *_DIALOGUE)
    if with_system is None:
        yield f"it rejects system turns. {_MERGE_SYSTEM}"
    elif _SYSTEM not in with_system:
        yield f"it drops system turns. {_MERGE_SYSTEM}"
    elif opening not in with_system.partition(_SYSTEM)[2].partition(_USER)[0]:
        yield "it writes a system turn at the beginning of the first user turn"


def _describe_reasoning(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the place of reasoning, and properties of turns with and without it."""
    key = chat.reasoning_key(tokenizer.get_chat_template())
    if key:
        yield f"it reads reasoning from the key {key}. Rows with another key or <think> tags require `reasoning: keep`"
    else:
        yield "it reads no reasoning. With `reasoning: keep`, reasoning is written in <think> tags"

    keys = {key: _THOUGHT} if key else {}
    content = _LATER if key else f"<think>\n{_THOUGHT}\n</think>\n\n{_LATER}"
    answer = _turn("assistant", content, **keys)
    earlier = _render(tokenizer, _DIALOGUE[0], answer, *_DIALOGUE[2:])
    latest = _render(tokenizer, *_DIALOGUE[:3], answer)
    renderings = ("earlier turns", earlier), ("the last turn", latest)
    if dropped := [place for place, text in renderings if _THOUGHT not in (text or "")]:
        yield f"it drops the reasoning of {join_names(dropped)}"
    if "<think>" in (_render(tokenizer, *_DIALOGUE) or ""):
        yield "it writes an empty thought into answers without reasoning"

    try:
        prompt = chat.ChatTemplate(tokenizer).prompt_text(list(_DIALOGUE[:1])).rstrip()
    except InputError:
        return
    if prompt.endswith("<think>"):
        yield "generation begins within a thought, which answers without reasoning do not continue"


def _describe_calls(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a line if the template does not write tool calls."""
    function = {"name": "look_up", "arguments": {"x": _ARGUMENT}}
    call = {"id": "call00001", "type": "function", "function": function}
    result = _turn("tool", "done", name="look_up", tool_call_id="call00001")
    text = _render(tokenizer, _DIALOGUE[0], _turn("assistant", "", tool_calls=[call]), result, _DIALOGUE[-1])
    if text is None or _ARGUMENT not in text:
        yield "it writes no tool calls. Rows with tool calls are rejected"


def _describe_text(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield properties of white space, dates and options."""
    template = tokenizer.get_chat_template()
    text = _render(tokenizer, _turn("user", f"\n{_USER} \n"), _turn("assistant", f"\n{_ANSWER} \n"))
    stripped = [
        role for role, part in (("questions", _USER), ("answers", _ANSWER)) if text and f"\n{part} \n" not in text
    ]
    if stripped:
        yield f"it strips white space around {join_names(stripped)}"
    if dates := chat.pin_date(template)[1]:
        yield f"it writes today's date, which is always {min(dates)} here"
    if template_options := find_template_options(template):
        yield f"it reads these options from `chat_template_kwargs`: {join_names(template_options)}"
