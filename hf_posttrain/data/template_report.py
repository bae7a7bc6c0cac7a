"""What a chat template adds, drops and moves, found by rendering small conversations with it."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, named, shown
from . import chat
from .messages import Messages
from .template import switches

_USER, _SECOND, _ANSWER, _LATER, _SYSTEM, _THOUGHT, _ARGUMENT = (f"sentinel{n}" for n in range(7))


def traps(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What to know of a tokenizer's chat template, a line each."""
    if not tokenizer.chat_template:
        return ["it has none: messages want model.chat_template, and plain text is trained as it is"]
    return [*_of_turns(tokenizer), *_of_reasoning(tokenizer), *_of_calls(tokenizer), *_of_text(tokenizer)]


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _written(tokenizer: PreTrainedTokenizerBase, *turns: dict[str, Any]) -> str | None:
    """What the template makes of turns; None: it refuses them."""
    messages: Messages = list(turns)
    try:
        return chat.ChatTemplate(tokenizer).render(messages)
    except InputError:
        return None


_TWO = _turn("user", _USER), _turn("assistant", _ANSWER), _turn("user", _SECOND), _turn("assistant", _LATER)


def _of_turns(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """BOS, ends, and system turns."""
    text = _written(tokenizer, *_TWO)
    if text is None or not all(turn["content"] in text for turn in _TWO):
        yield "it refuses, or does not write, a conversation of two questions and two answers"
        return
    before = text.partition(_USER)[0]
    bos = str(tokenizer.bos_token or "")
    if bos and before.startswith(bos):
        role = "which opens turns as well" if bos in text.removeprefix(bos) else "which stands there once"
        yield f"it writes the BOS {bos}, {role}"
        before = before.removeprefix(bos)
    end = chat.turn_end_id(tokenizer)
    eos = tokenizer.eos_token_id
    if end != eos:
        yield f"a turn ends in {tokenizer.decode([end])}, a plain text in {tokenizer.eos_token}: both end an answer"
    # what opens the second question opens the first one too; what stands before that is the template's own
    opens = text.partition(_ANSWER)[2].partition(_SECOND)[0]
    same = chat.shared_length(before[::-1], opens[::-1])
    own = before[: len(before) - same]
    opening = opens[len(opens) - same :]
    for token in tokenizer.convert_ids_to_tokens(sorted(chat.special_ids(tokenizer))):
        own = own.replace(token, "")
    if any(letter.isalpha() for letter in own):
        yield f"it begins with a text of its own where no system turn is given: {shown(own.strip())}"
    ruled = _written(tokenizer, _turn("system", _SYSTEM), *_TWO)
    if ruled is None:
        yield "it refuses system turns: begin the first question with them"
    elif _SYSTEM not in ruled:
        yield "it drops system turns: begin the first question with them"
    elif opening not in ruled.partition(_SYSTEM)[2].partition(_USER)[0]:
        yield "a system turn becomes the beginning of the first question"


def _of_reasoning(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Where thoughts stand, and what becomes of those that are given or not."""
    key = chat.reasoning_key(tokenizer.get_chat_template())
    if key:
        yield f"it reads reasoning as {key}: rows with another key or <think> tags want reasoning: keep"
    else:
        yield "it reads no reasoning: reasoning: keep writes it in <think> tags"
    given = {key: _THOUGHT} if key else {}
    content = _LATER if key else f"<think>\n{_THOUGHT}\n</think>\n\n{_LATER}"
    answer = _turn("assistant", content, **given)
    earlier = _written(tokenizer, _TWO[0], answer, *_TWO[2:])
    latest = _written(tokenizer, *_TWO[:3], answer)
    places = ("earlier turns", earlier), ("the last turn", latest)
    if dropped := [place for place, text in places if _THOUGHT not in (text or "")]:
        yield f"it drops the reasoning of {named(dropped)}"
    if "<think>" in (_written(tokenizer, *_TWO) or ""):
        yield "it writes an empty thought into an answer that has none"
    try:
        opened = chat.ChatTemplate(tokenizer).prompt_text(list(_TWO[:1])).rstrip()
    except InputError:
        return
    if opened.endswith("<think>"):
        yield "what is generated begins within a thought, and answers without reasoning do not continue that"


def _of_calls(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Calls of tools."""
    function = {"name": "look_up", "arguments": {"x": _ARGUMENT}}
    call = {"id": "call00001", "type": "function", "function": function}
    result = _turn("tool", "done", name="look_up", tool_call_id="call00001")
    text = _written(tokenizer, _TWO[0], _turn("assistant", "", tool_calls=[call]), result, _TWO[-1])
    if text is None or _ARGUMENT not in text:
        yield "it writes no calls of tools: rows that hold some are refused"


def _of_text(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """White space, dates and switches."""
    template = tokenizer.get_chat_template()
    text = _written(tokenizer, _turn("user", f"\n{_USER} \n"), _turn("assistant", f"\n{_ANSWER} \n"))
    cut = [role for role, part in (("questions", _USER), ("answers", _ANSWER)) if text and f"\n{part} \n" not in text]
    if cut:
        yield f"it cuts white space around {named(cut)}"
    if dates := chat.on_the_day(template)[1]:
        yield f"it writes today's date, which is always {min(dates)} here"
    if found := switches(template):
        yield f"it has switches for chat_template_kwargs: {named(found)}"
