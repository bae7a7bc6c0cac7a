"""Chat templates and token boundaries: messages -> text -> ids; `assistant_mask` says which the assistant wrote.

The boundary comes from rendered text: the rendered prompt must be the beginning of the rendered conversation. An
`InputError` names the problem; the caller adds file and row. `template_kwargs` go to the template.
"""

import datetime
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import lru_cache
from itertools import chain, takewhile
from typing import Any, NamedTuple

from jinja2 import meta
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, named, nearest, shown
from .images import MARK, read_by
from .messages import REASONING, Messages, call_names, check_unicode
from .template import named_in, parsed

logger = logging.getLogger(__package__)

_PROBE = "sentinel7391"
"""A text that no template writes of itself."""
_DAY = datetime.date(2024, 7, 26)
"""Today's date to templates that write one, so that rows are the same on every day: it is Llama 3.1's own default."""
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_OURS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"documents"}
"""What each rendering is given by us, and `template_kwargs` may not have."""


class ChatTemplate(NamedTuple):
    """A tokenizer's chat template with what it is given besides messages."""

    tokenizer: PreTrainedTokenizerBase
    tools: list | None = None
    kwargs: dict | None = None
    pictures: tuple[str, ...] = ()  # the text of each picture, in the order in which MARK stands in messages

    @property
    def text(self) -> str:
        """The template itself, of those that the tokenizer has the one for tools where there are any."""
        return self.tokenizer.get_chat_template(tools=self.tools)

    def render(self, messages: Messages, **options: Any) -> str:
        """`messages` as text; `options` are `add_generation_prompt` and `continue_final_message`.

        Raises InputError if the tokenizer has no chat template or the template refuses these messages.
        """
        if not self.tokenizer.chat_template:
            instead = "set model.chat_template (--chat_template) to a file, or give plain strings"
            raise InputError(f"messages need a chat template: {instead}")
        try:
            text = str(self.apply(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program, and raises what it likes
            roles = ", ".join(shown(message["role"])[1:-1] for message in messages[:20])
            problem = " ".join(str(error).split())[:300]
            raise InputError(f"the chat template refuses messages with roles [{roles}]: {problem}") from error
        check_unicode(text, "the rendered conversation")
        return self._with_pictures(text, messages) if self.pictures else text

    def _with_pictures(self, text: str, messages: Messages) -> str:
        """A rendering with the text of each picture in its place. Raises InputError where the template lacks places."""
        reader = read_by(self.tokenizer)
        wanted = sum(message["content"].count(MARK) for message in messages)
        assert reader is not None  # who else has expanded them?
        place = reader.place
        parts = text.split(reader.place)
        if len(parts) - 1 != wanted:
            raise InputError(f"the chat template writes {len(parts) - 1} places ({place}) for {wanted} pictures")
        return "".join(part + picture for part, picture in zip(parts, (*self.pictures[:wanted], ""), strict=True))

    def moved(self, messages: Messages, places: Sequence[int]) -> set[int]:
        """Where characters of a rendering without the text of pictures are in the rendering with it."""
        reader = read_by(self.tokenizer)
        assert reader is not None
        plain = self._replace(pictures=()).render(messages)
        begins = [match.start() for match in re.finditer(re.escape(reader.place), plain)]
        grown = [(begin, len(text) - len(reader.place)) for begin, text in zip(begins, self.pictures, strict=False)]
        return {place + sum(more for begin, more in grown if begin < place) for place in places}

    def prompt_text(self, prompt: Messages) -> str:
        """The text that generation starts from; a prompt that ends in an assistant turn (prefill) is left open."""
        prefill = prompt[-1]["role"] == "assistant"
        option = {"continue_final_message": True} if prefill else {"add_generation_prompt": True}
        return self.render(prompt, **option)

    def split(self, prompt: Messages, completion: Messages) -> tuple[str, str]:
        """(prompt text, completion text), which together are the rendering of both, up to its last visible character.

        Raises InputError if that does not begin with the prompt's (a template that drops or moves thinking).
        """
        start = self.prompt_text(prompt)
        full = self.render(join_messages(prompt, completion))
        return start, text_behind(start, full).rstrip()

    def apply(self, messages: Messages, **options: Any) -> Any:
        """`tokenizer.apply_chat_template` on the day _DAY, of contents as parts and arguments of calls as JSON text for
        the templates that write these alone.
        """
        template, _ = on_the_day(self.text)
        always = _reads_parts(self.tokenizer, template)
        messages = [{**m, "content": _parts(m["content"])} if always or MARK in m["content"] else m for m in messages]
        if any("tool_calls" in m for m in messages) and _reads_text_arguments(self.tokenizer, template):
            messages = [
                _with_calls(m, lambda arguments, _: {"arguments": json.dumps(arguments, ensure_ascii=False)})
                for m in messages
            ]
        options |= {"tools": self.tools, "chat_template": template}
        return self.tokenizer.apply_chat_template(messages, **options, **(self.kwargs or {}))

    def find_unread(self, messages: Messages, full: str) -> list[str]:
        """What of the messages is not in their rendering `full` although a template may well leave it out: keys that it
        does not write, tools, thinking of earlier turns, text next to a call, switches, today's date. Raises InputError
        for a message of which it writes neither text nor calls, as of an unknown role, and for a lost call.
        """
        template = self.text
        numbered = [_numbered(m, n) for n, m in enumerate(messages)]
        if self.kwargs:
            check_switches(self.tokenizer, self.kwargs)
        found = [f"chat_template_kwargs {shown(key)}" for key in self.kwargs or () if key not in variables(template)]
        if any(date in full for date in on_the_day(template)[1]):
            found.append(f"today's date but always {_DAY:%d %b %Y}")
        # the same conversation of numbered texts shows which of them are written, unless the template refuses it
        try:
            given = json.dumps([numbered, self.tools, self.kwargs], default=str)
        except RecursionError:
            raise InputError("the chat template: a value of the messages or tools is nested too deeply") from None
        probed = _render_probes(self.tokenizer, template, given) or given
        for n, (message, probe) in enumerate(zip(messages, numbered, strict=True)):
            where = f"message {n} ({shown(message['role'])[1:-1]})"
            content = message["content"].strip()
            if any(mark not in probed for mark in re.findall(rf"{_PROBE}\w+", str(probe.get("tool_calls")))):
                raise InputError(f"{where}: the chat template does not write its call of {named(call_names(message))}")
            if not content or probe["content"] in probed:
                whole = all(_stands_in(part.strip(), full) for part in content.split(MARK))
                found += [f"a part of the text of {message['role']} turns"] * (not whole)
            elif not call_names(message):
                raise InputError(f"{where}: the chat template does not write its text, {shown(content)}")
            else:
                found.append("text next to calls")
            for key, value in message.items():
                word = rf"\b{re.escape(key)}\b"
                written = _stands_in(value.strip(), full) if isinstance(value, str) else re.search(word, template)
                if key not in ("role", "content", "tool_calls", "tool_call_id") and not written:
                    found.append(f"key {shown(key)}")
        names = [tool.get("function", tool) for tool in self.tools or []]
        if any(isinstance(tool, dict) and str(tool.get("name")) not in full for tool in names):
            found.append("column 'tools'")
        return sorted({*found})


def _parts(content: str) -> list[dict[str, str]]:
    """A content as parts, with a picture in the place of each MARK."""
    found = []
    for n, text in enumerate(content.split(MARK)):
        found += [{"type": "image"}] if n else []
        found += [{"type": "text", "text": text}] if text or MARK not in content else []
    return found


def _with_calls(message: dict[str, Any], change: Callable[[Any, int], dict]) -> dict[str, Any]:
    """The message with other values in its calls: `change` has the arguments of a call and its number."""
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    functions = [function | change(function.get("arguments"), k) for k, function in enumerate(functions)]
    pairs = zip(message.get("tool_calls", []), functions, strict=True)
    calls = [call | {"function": function} if "function" in call else function for call, function in pairs]
    return message | ({"tool_calls": calls} if calls else {})


def _numbered(message: dict[str, Any], n: int) -> dict[str, Any]:
    """Message n with texts that stand nowhere else in place of its own and of the names and arguments of its calls."""
    mark = f"{_PROBE}n{n}"
    kept = ("role", "name", "tool_call_id")
    texts = {key: value for key, value in message.items() if isinstance(value, str) and key not in kept}
    message = _with_calls(
        message,
        lambda arguments, k: {"name": f"{mark}f{k}z"} | ({"arguments": {"x": f"{mark}a{k}z"}} if arguments else {}),
    )
    return message | {key: f"{mark}{key}z" if text.strip() else "" for key, text in texts.items()}


@lru_cache(maxsize=256)
def _render_probes(tokenizer: PreTrainedTokenizerBase, template: str, given: str) -> str:
    """What the template makes of numbered messages, which are the same for many rows, or "" where it refuses them."""
    try:
        messages, tools, kwargs = json.loads(given)
        return ChatTemplate(tokenizer, tools, kwargs).render(messages)
    except InputError:
        return ""


def _stands_in(text: str, full: str) -> bool:
    """Does the text stand there, as it is, inside JSON, or with other white space?"""
    inside = text in full or json.dumps(text, ensure_ascii=False)[1:-1] in full
    return inside or "".join(text.split()) in "".join(full.split())


@lru_cache(maxsize=32)
def on_the_day(template: str) -> tuple[str, frozenset[str]]:
    """The template with _DAY written where it asks for today's date, and in which words."""
    dates = frozenset(_DAY.strftime(call[2]) for call in _TODAY.finditer(template))
    return _TODAY.sub(lambda call: repr(_DAY.strftime(call[2])), template), dates


@lru_cache(maxsize=32)
def reasoning_key(template: str) -> str | None:
    """The key under which a template reads what an assistant thought; None: it has none."""
    return named_in(template, REASONING)


@lru_cache(maxsize=32)
def variables(template: str) -> frozenset[str]:
    """What a template reads and does not set itself."""
    return frozenset(meta.find_undeclared_variables(parsed(template)))


@lru_cache(maxsize=32)
def _reads_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Does the template write a content that is a list of parts, and none that is a string?"""
    contents: tuple = (_PROBE, [{"type": "text", "text": _PROBE}])
    as_text, as_parts = (_written(tokenizer, template, [{"role": "user", "content": content}]) for content in contents)
    return _PROBE in as_parts and _PROBE not in as_text


@lru_cache(maxsize=32)
def _reads_text_arguments(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Must the arguments of a call be text, since it refuses a mapping or writes it as Python does?"""
    found = []
    for arguments in ({"x": _PROBE}, json.dumps({"x": _PROBE})):
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: Messages = [{"role": "user", "content": "hello"}]
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "done"}]
        found.append(_written(tokenizer, template, turns))
    return _PROBE in found[1] and (_PROBE not in found[0] or str({"x": _PROBE}) in found[0])


def _written(tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages) -> str:
    """What the template makes of messages, "" where it refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:  # a template is a program, and raises what it likes
        return ""


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends plain text. Raises InputError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no eos_token, so a completion cannot be ended: set one in its config")
    return tokenizer.eos_token_id


def has_template_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], template_kwargs: dict | None
) -> bool | None:
    """Have these ids of a prepared row come through the chat template? None where it writes no token that tells."""
    if not tokenizer.chat_template:
        return False
    own = template_token_ids(tokenizer, template_kwargs)
    return not own.isdisjoint(ids) if own else None


def template_token_ids(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None) -> set[int]:
    """Ids of the special tokens that the chat template writes around a user's turn, and texts do not hold."""
    everyday = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    return written_special_ids(tokenizer, template_kwargs) - everyday


def written_special_ids(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None) -> set[int]:
    """Return the ids of all special tokens that the chat template writes around a user's turn."""
    turn = ChatTemplate(tokenizer, None, template_kwargs).render([{"role": "user", "content": "hello"}])
    return {*plain_ids(tokenizer, [turn])[0]} & special_ids(tokenizer)


def refuse_ours(template_kwargs: Iterable[str]) -> None:
    """Raises InputError for options of a template that each rendering is given by us."""
    if ours := named(key for key in template_kwargs if key in _OURS):
        raise InputError(f"{ours} cannot be given: each rendering has its own")


def check_switches(tokenizer: PreTrainedTokenizerBase, template_kwargs: Iterable[str]) -> None:
    """Raise InputError for an option that no template of the tokenizer reads and that resembles one that is read.

    Other options that are not read are reported by `find_unread`.
    """
    known = known_switches(tokenizer)
    # a recipe for Qwen's models may be run with another model
    for key in sorted({*template_kwargs} - known - {"enable_thinking"}):
        if near := nearest(key, known - _OURS, listed=False):
            raise InputError(f"chat_template_kwargs: the chat template does not know {shown(key)}{near}")


def known_switches(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the options that a chat template of the tokenizer reads; there may be several by name, or none."""
    given: Any = tokenizer.chat_template
    templates = given.values() if isinstance(given, dict) else filter(None, [given])
    return frozenset[str]().union(*map(variables, templates))


def turn_end_id(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None = None) -> int:
    """The id that ends an assistant turn in training rows: the first special token that the template writes after its
    content. What generation stops at: `models.policy.find_terminal_ids`.

    A base model's eos often differs (Qwen: eos <|endoftext|>, turns end with <|im_end|>). Without a template, or if
    the template writes none, it is the eos. Raises InputError if there is neither.
    """
    if not tokenizer.chat_template:
        return eos_id(tokenizer)
    with error_context("chat_template_kwargs"):
        refuse_ours(template_kwargs or {})
    probe = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    tail = ChatTemplate(tokenizer, None, template_kwargs).render(probe).rpartition(_PROBE)[2]
    check_switches(tokenizer, template_kwargs or {})
    special = special_ids(tokenizer)
    ends = [i for i in plain_ids(tokenizer, [tail])[0] if i in special]
    return ends[0] if ends else eos_id(tokenizer)


def mark_turn_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends a turn special where it was added to the tokenizer as an ordinary one.

    Answers are then decoded without it, here and with transformers. A special token that the template writes at the end
    of the conversation alone does not count: as in Phi-3, it follows the end of the last turn.
    """
    if not tokenizer.chat_template:
        return
    asked = {"role": "user", "content": f"{_PROBE}x"}
    turns: Messages = [asked, {"role": "assistant", "content": f"{_PROBE}y"}]
    template = ChatTemplate(tokenizer)
    try:
        last = template.render(turns)
        earlier = template.render([*turns, asked])
    except InputError:
        return
    _, written, tail = last.rpartition(f"{_PROBE}y")
    between = earlier.partition(f"{_PROBE}y")[2].partition(_PROBE)[0]
    if not written:
        return

    special = special_ids(tokenizer)
    markers = marker_ids(tokenizer)
    of_tail, of_turn = plain_ids(tokenizer, [tail, between])
    ends = [i for i in of_tail if i in markers]
    # a special token after each turn ends it, whatever markup stands before it
    special_ends = [i for i in ends if i in special and i in of_turn]
    if not ends or ends[0] in special or special_ends:
        return
    token = tokenizer.added_tokens_decoder[ends[0]]
    token.special = True
    tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    logger.info("%s ends the turns of the chat template: it is a special token from now on", token.content)


def marker_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens and of other added ones, except white space, which some tokenizers add."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return special_ids(tokenizer) | added


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, which plain text never becomes."""
    return {*tokenizer.all_special_ids, *_added_special_ids(tokenizer, len(tokenizer))}


@lru_cache(maxsize=32)
def _added_special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def join_messages(prompt: Messages, completion: Messages) -> Messages:
    """`prompt + completion`; a completion that continues a prefilled assistant turn is one turn with it."""
    last = prompt[-1]
    first = completion[0]
    if (last["role"], first["role"]) != ("assistant", "assistant"):
        return prompt + completion
    return [*prompt[:-1], {**last, **first, "content": last["content"] + first["content"]}, *completion[1:]]


def shared_length(first: Sequence, second: Sequence) -> int:
    """Length of the longest common prefix of two strings or lists."""
    if first == second[: len(first)]:  # at once, which is the usual case
        return len(first)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def text_behind(start: str, full: str) -> str:
    """What follows `start` in `full`. Raises InputError where `full` does not begin with it."""
    if full.startswith(start):
        return full[len(start) :]
    n = shared_length(start, full)
    here, there = (text[max(0, n - 20) : n + 30] for text in (start, full))
    raise InputError(
        f"the rendered conversation does not begin with its rendered prompt: the prompt has {here!r} where the"
        f" conversation has {there!r}; the template rewrites earlier turns or thinking. Set chat_template_kwargs (for"
        " instance {enable_thinking: false}) or a template made for training, with {% generation %} tags around what"
        " assistants write"
    )


def plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text, without anything that the tokenizer would add."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer itself writes before any text: usually [] or [BOS]."""
    bare = plain_ids(tokenizer, ["x"])[0]
    dressed = tokenizer("x")["input_ids"]
    return next((dressed[:n] for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare), [])


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text, plain or rendered: BOS once if the tokenizer writes one, and no EOS that it would append."""
    # templates often write the BOS themselves, so the tokenizer's own is added only where it is missing
    prefix = prefix_ids(tokenizer)
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in plain_ids(tokenizer, texts)]


def end_once(tokenizer: PreTrainedTokenizerBase, ids: list[int], end_id: int, others: Set[int]) -> list[int]:
    """`ids` ending in exactly one `end_id`: blank text and special tokens after it are dropped; appended if absent and
    `ids` do not end in one of `others`.
    """
    last = max((n for n, i in enumerate(ids) if i == end_id), default=None)
    if last is None or str(tokenizer.decode(ids[last + 1 :], skip_special_tokens=True)).strip():
        return ids if ids and ids[-1] in others else [*ids, end_id]
    while last and ids[last - 1] == end_id:
        last -= 1
    return ids[: last + 1]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    completions: list[str],
    end_id: int,
    others: Set[int] = frozenset(),
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of each pair, tokenised together in two calls.

    The prompt's ids are those that generation would see, so a token never spans the boundary: where tokenising the
    whole text merges across it, the completion is tokenised on its own, to ids that say the same text behind the
    prompt. Completions end with one `end_id`, or one of the `others`.
    """
    heads = encode(tokenizer, prompts)
    fulls = encode(tokenizer, [p + c for p, c in zip(prompts, completions, strict=True)])
    pairs = []
    for head, full, completion in zip(heads, fulls, completions, strict=True):
        # behind a prompt that ends in the unknown token equal beginnings prove nothing: a token merged across the
        # boundary would be unknown too
        hidden = head and head[-1] == tokenizer.unk_token_id
        split = full[: len(head)] == head and not hidden
        tail = full[len(head) :] if split else _ids_behind(tokenizer, head, full, completion)
        pairs.append((head, end_once(tokenizer, tail, end_id, others)))
    return pairs


def _ids_behind(tokenizer: PreTrainedTokenizerBase, head: list[int], full: list[int], completion: str) -> list[int]:
    """Ids of the completion that with `head` say what `full` says."""
    ways = ways_behind(tokenizer, completion)
    whole = tokenizer.decode(full)
    first = next(ways)
    return next((ids for ids in chain([first], ways) if tokenizer.decode(head + ids) == whole), first)


def ways_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[list[int]]:
    """Ids of a text that stands behind another: as it is alone, and behind characters that nothing merges with.

    A tokenizer in the manner of sentencepiece puts a space before any text, which one that goes on must not gain.
    """
    yield plain_ids(tokenizer, [text])[0]
    for anchor in ("\n", ".", "|"):
        before, both = plain_ids(tokenizer, [anchor, anchor + text])
        if both[: len(before)] == before:
            yield both[len(before) :]
