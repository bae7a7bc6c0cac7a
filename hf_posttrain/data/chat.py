"""Chat templates and token boundaries: messages are rendered as text, which is tokenized.

The boundary between prompt and completion comes from rendered text: the rendered prompt must be a prefix of the
rendered conversation. `assistant_mask` determines the tokens of the assistant. An `InputError` states the problem, and
the caller adds the file and row. `template_kwargs` are passed to the template.
"""

import datetime
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import meta
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from ..errors import InputError, error_context, join_names, name_hint, short_repr
from .images import MARK, get_image_reader
from .messages import REASONING, Messages, call_names, check_unicode
from .template import BUILTIN_NAMES, GENERATION_TAG, first_referenced_key, parse_template

logger = logging.getLogger(__package__)

_PROBE = "sentinel7391"
"""A text that no template writes on its own."""
_MAX_TAILS = 4
"""Maximum number of different ends of rendered prompts that are compared with the ids of whole texts."""
_PLAIN_KEYS = {"role", "content"}
_FIXED_DATE = datetime.date(2024, 7, 26)
"""The date that templates get as today's date, so that rows are the same on every day. It is Llama 3.1's default."""
_TODAY_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_RESERVED_OPTIONS = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    "messages",
} - {"documents"}
"""Options that this module sets for each rendering, so that `template_kwargs` must not contain them."""


class ChatTemplate(NamedTuple):
    """A tokenizer's chat template, with its inputs other than the messages."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    expansions: tuple[str, ...] = ()  # the text that replaces each image, in the order of `MARK` in the messages

    @property
    def text(self) -> str:
        """The source of the template. Of several templates it is the one for tools, if there are any."""
        return self.tokenizer.get_chat_template(tools=self.tools)

    def render(self, messages: Messages, **options: Any) -> str:
        """Render messages as text.

        Args:
            messages: The conversation.
            options: `add_generation_prompt` and `continue_final_message`.

        Raises:
            InputError: If the tokenizer has no chat template, or the template rejects the messages.
        """
        if not self.tokenizer.chat_template:
            fix = "Set model.chat_template (--chat_template) to a file, or use plain strings"
            raise InputError(f"messages require a chat template. {fix}")
        with _rejection(messages):
            text = self.apply(messages, **options)
        check_unicode(text, "the rendered conversation")
        return self._expand_images(text, messages) if self.expansions else text

    def _expand_images(self, text: str, messages: Messages) -> str:
        """Replace the image tokens of a rendering by the expansions of the images.

        Raises:
            InputError: If the template does not write one image token per image.
        """
        reader = get_image_reader(self.tokenizer)
        assert reader is not None  # it has created the expansions
        image_count = sum(message["content"].count(MARK) for message in messages)
        parts = text.split(reader.image_token)
        if len(parts) - 1 != image_count:
            problem = f"the chat template writes {len(parts) - 1} image tokens ({reader.image_token})"
            raise InputError(f"{problem} for {image_count} images. It must write one per image")
        expansions = (*self.expansions[:image_count], "")
        return "".join(part + expansion for part, expansion in zip(parts, expansions, strict=True))

    def render_with_spans(self, messages: Messages) -> tuple[str, list[tuple[int, int]] | None]:
        """Render messages as text, with the positions of its {% generation %} tags.

        Returns:
            The text, and the begin and end of each part of it within tags, or None for a template without them.

        Raises:
            InputError: As `render` does.
        """
        if not self.tokenizer.chat_template or not GENERATION_TAG.search(self.text) or self._has_own_rendering():
            return self.render(messages), None
        variables = {**self.tokenizer.special_tokens_map, **(self.kwargs or {})}
        with _rejection(messages):
            inputs, template = self._inputs(messages)
            rendered: Any = render_jinja_template(
                [inputs], self.tools, chat_template=template, return_assistant_tokens_mask=True, **variables
            )
        [text], [spans] = rendered
        check_unicode(text, "the rendered conversation")
        if not self.expansions:
            return text, spans
        reader = get_image_reader(self.tokenizer)
        assert reader is not None
        begins = [match.start() for match in re.finditer(re.escape(reader.image_token), text)]
        growths = [
            (begin, len(expansion) - len(reader.image_token))
            for begin, expansion in zip(begins, self.expansions, strict=False)
        ]

        def expanded(position: int) -> int:
            return position + sum(growth for begin, growth in growths if begin < position)

        return self._expand_images(text, messages), [(expanded(begin), expanded(end)) for begin, end in spans]

    def prompt_text(self, prompt: Messages) -> str:
        """Return the text that generation starts from. A final assistant turn (prefill) is left open."""
        is_prefill = prompt[-1]["role"] == "assistant"
        options = {"continue_final_message": True} if is_prefill else {"add_generation_prompt": True}
        return self.render(prompt, **options)

    def split(self, prompt: Messages, completions: Sequence[Messages], to_end: bool = False) -> list[tuple[str, str]]:
        """Return the prompt's text and the completion's text for each completion.

        Their concatenation is the rendering of both, up to its last visible character or, with `to_end`, its end.

        Raises:
            InputError: If that rendering does not begin with the prompt's (a template that drops or moves thinking).
        """
        start = self.prompt_text(prompt)
        rests = [text_after(start, self.render(join_messages(prompt, completion))) for completion in completions]
        return [(start, rest if to_end else rest.rstrip()) for rest in rests]

    def apply(self, messages: Messages, **options: Any) -> str:
        """Call `tokenizer.apply_chat_template` with a fixed date and with messages in the template's form."""
        messages, template = self._inputs(messages)
        has_inputs = bool(self.tools) or "documents" in (self.kwargs or ())
        is_plain = not has_inputs and not options.get("continue_final_message") and _are_plain(messages)
        if is_plain and not self._has_own_rendering():
            return self._apply_to_plain(messages, template, bool(options.get("add_generation_prompt")))
        options |= {"tools": self.tools, "chat_template": template, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(messages, **options, **(self.kwargs or {})))

    def _has_own_rendering(self) -> bool:
        """Return whether the class of the tokenizer has a rendering of its own, as remote code may have."""
        return type(self.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template

    def _inputs(self, messages: Messages) -> tuple[Messages, str]:
        """Return messages in the form that the template reads, and the template with a fixed date.

        Templates that only read content as a list of parts get parts, and templates that only read the arguments of
        calls as JSON text get text.
        """
        template, _ = pin_date(self.text)
        always_parts = _reads_parts(self.tokenizer, template)
        messages = [
            {**message, "content": _content_parts(message["content"])}
            if always_parts or MARK in message["content"]
            else message
            for message in messages
        ]
        if any("tool_calls" in message for message in messages) and _reads_text_arguments(self.tokenizer, template):
            messages = [_map_calls(message, _arguments_as_text) for message in messages]
        return messages, template

    def _apply_to_plain(self, messages: Messages, template: str, add_generation_prompt: bool) -> str:
        """Return what `apply_chat_template` returns for plain messages, in half of its time.

        Args:
            messages: Messages with a role and a content without images.
            template: The template with a fixed date.
            add_generation_prompt: Whether the beginning of an answer follows the messages.
        """
        kwargs = self.kwargs or {}
        variables = kwargs
        if template_variables(template) - BUILTIN_NAMES - kwargs.keys():  # such as bos_token
            variables = {**self.tokenizer.special_tokens_map, **kwargs}
        return _compile_jinja_template(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **variables
        )

    def find_unread(self, messages: Messages, full: str) -> list[str]:
        """Return the parts of the input that are missing from the rendering, although a template may omit them.

        These are keys of messages, tools, thinking of earlier turns, text next to a call, options of the template, and
        today's date.

        Args:
            messages: The conversation.
            full: Its rendering.

        Raises:
            InputError: If neither text nor calls of a message are rendered, for example for an unknown role, or if a
                call is lost.
        """
        template = self.text
        if not (self.tools or self.kwargs or pin_date(template)[1]) and _are_plain(messages):
            contents = [message["content"].strip() for message in messages]
            shape = tuple((m["role"], bool(content)) for m, content in zip(messages, contents, strict=True))
            if _writes_texts(self.tokenizer, template, shape) and all(_is_contained(text, full) for text in contents):
                return []

        probes = [_probe_message(message, n) for n, message in enumerate(messages)]
        if self.kwargs:
            check_template_options(self.tokenizer, self.kwargs)
        unread = [
            f"chat_template_kwargs {short_repr(key)}"
            for key in self.kwargs or ()
            if key not in template_variables(template)
        ]
        if any(date in full for date in pin_date(template)[1]):
            unread.append(f"today's date but always {_FIXED_DATE:%d %b %Y}")

        # the same conversation with probe texts shows which texts are rendered, unless the template rejects it
        try:
            probe_input = json.dumps([probes, self.tools, self.kwargs], default=str)
        except RecursionError:
            raise InputError("the chat template: a value of the messages or tools is nested too deeply") from None
        rendered = _render_probes(self.tokenizer, template, probe_input) or probe_input
        for n, (message, probe) in enumerate(zip(messages, probes, strict=True)):
            location = f"message {n} ({short_repr(message['role'])[1:-1]})"
            content = message["content"].strip()
            if any(text not in rendered for text in re.findall(rf"{_PROBE}\w+", str(probe.get("tool_calls")))):
                calls = join_names(call_names(message))
                raise InputError(f"{location}: the chat template does not write its call of {calls}")
            if not content or probe["content"] in rendered:
                is_complete = all(_is_contained(part.strip(), full) for part in content.split(MARK))
                unread += [f"a part of the text of {message['role']} turns"] * (not is_complete)
            elif not call_names(message):
                raise InputError(f"{location}: the chat template does not write its text, {short_repr(content)}")
            else:
                unread.append("text next to calls")
            for key, value in message.items():
                if key in ("role", "content", "tool_calls", "tool_call_id"):
                    continue
                if isinstance(value, str):
                    is_read = _is_contained(value.strip(), full)
                else:
                    is_read = bool(re.search(rf"\b{re.escape(key)}\b", template))
                if not is_read:
                    unread.append(f"key {short_repr(key)}")
        tools = [tool.get("function", tool) for tool in self.tools or []]
        if any(isinstance(tool, dict) and str(tool.get("name")) not in full for tool in tools):
            unread.append("column 'tools'")
        return sorted({*unread})


@contextmanager
def _rejection(messages: Messages) -> Iterator[None]:
    """Raise InputError for an exception of a template that renders messages."""
    try:
        yield
    except Exception as error:  # a template is a program, which may raise any exception
        roles = ", ".join(short_repr(message["role"])[1:-1] for message in messages[:20])
        problem = " ".join(str(error).split())[:300]
        raise InputError(f"the chat template rejects messages with roles [{roles}]: {problem}") from error


def _are_plain(messages: Messages) -> bool:
    """Return whether all messages have a role and a content without images, and nothing else."""
    return all(
        message.keys() == _PLAIN_KEYS and isinstance(message["content"], str) and MARK not in message["content"]
        for message in messages
    )


@lru_cache(maxsize=256)
def _writes_texts(tokenizer: PreTrainedTokenizerBase, template: str, shape: tuple[tuple[str, bool], ...]) -> bool:
    """Return whether a template writes the texts of all messages of such conversations.

    Args:
        tokenizer: The tokenizer.
        template: Its chat template, a key of the cache.
        shape: Role of each message, and whether it has a text.
    """
    messages = [{"role": role, "content": "x" if has_text else ""} for role, has_text in shape]
    probes = [_probe_message(message, n) for n, message in enumerate(messages)]
    rendered = _render_probes(tokenizer, template, json.dumps([probes, None, None]))
    return all(probe["content"] in rendered for probe in probes)


def _content_parts(content: str) -> list[dict[str, str]]:
    """Return a content as a list of parts, with an image part in place of each `MARK`."""
    parts = []
    for n, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if n else []
        parts += [{"type": "text", "text": text}] if text or MARK not in content else []
    return parts


def _map_calls(message: dict[str, Any], change: Callable[[Any, int], dict[str, Any]]) -> dict[str, Any]:
    """Return the message with updated calls.

    Args:
        message: The message.
        change: Function of the arguments of a call and its number, which returns the values to update in the call.
    """
    functions = [call.get("function", call) for call in message.get("tool_calls", [])]
    functions = [function | change(function.get("arguments"), k) for k, function in enumerate(functions)]
    pairs = zip(message.get("tool_calls", []), functions, strict=True)
    calls = [call | {"function": function} if "function" in call else function for call, function in pairs]
    return message | ({"tool_calls": calls} if calls else {})


def _arguments_as_text(arguments: object, number: int) -> dict[str, Any]:
    return {"arguments": json.dumps(arguments, ensure_ascii=False)}


def _probe_message(message: dict[str, Any], n: int) -> dict[str, Any]:
    """Return message n with unique probe texts in place of its texts and of the names and arguments of its calls."""
    prefix = f"{_PROBE}n{n}"
    preserved = ("role", "name", "tool_call_id")
    texts = {key: value for key, value in message.items() if isinstance(value, str) and key not in preserved}

    def probe_call(arguments: object, k: int) -> dict[str, Any]:
        return {"name": f"{prefix}f{k}z"} | ({"arguments": {"x": f"{prefix}a{k}z"}} if arguments else {})

    message = _map_calls(message, probe_call)
    return message | {key: f"{prefix}{key}z" if text.strip() else "" for key, text in texts.items()}


@lru_cache(maxsize=256)
def _render_probes(tokenizer: PreTrainedTokenizerBase, template: str, probe_input: str) -> str:
    """Return the rendering of probe messages, which are the same for many rows, or "" if the template rejects them.

    Args:
        tokenizer: The tokenizer.
        template: Its chat template, a key of the cache.
        probe_input: Messages, tools and options of the template, as JSON.
    """
    try:
        messages, tools, kwargs = json.loads(probe_input)
        return ChatTemplate(tokenizer, tools, kwargs).render(messages)
    except InputError:
        return ""


def _is_contained(text: str, full: str) -> bool:
    """Return whether a text is contained in another one: literally, inside JSON, or with different white space."""
    is_literal = text in full or json.dumps(text, ensure_ascii=False)[1:-1] in full
    return is_literal or "".join(text.split()) in "".join(full.split())


@lru_cache(maxsize=32)
def pin_date(template: str) -> tuple[str, frozenset[str]]:
    """Return the template with a fixed date in place of its calls for today's date, and the dates that it writes."""

    def date_literal(call: re.Match[str]) -> str:
        return repr(_FIXED_DATE.strftime(call[2]))

    dates = frozenset(_FIXED_DATE.strftime(call[2]) for call in _TODAY_CALL.finditer(template))
    return _TODAY_CALL.sub(date_literal, template), dates


@lru_cache(maxsize=32)
def reasoning_key(template: str) -> str | None:
    """Return the key of a message from which a template reads the assistant's reasoning, or None if there is none."""
    return first_referenced_key(template, REASONING)


@lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set itself."""
    return frozenset(meta.find_undeclared_variables(parse_template(template)))


@lru_cache(maxsize=32)
def _reads_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the template renders content that is a list of parts, and no content that is a string."""
    as_text = _try_render(tokenizer, template, [{"role": "user", "content": _PROBE}])
    as_parts = _try_render(tokenizer, template, [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
    return _PROBE in as_parts and _PROBE not in as_text


@lru_cache(maxsize=32)
def _reads_text_arguments(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the arguments of a call must be text.

    This is so if the template rejects a mapping or renders it as Python does.
    """
    renderings = []
    for arguments in ({"x": _PROBE}, json.dumps({"x": _PROBE})):
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: Messages = [{"role": "user", "content": "hello"}]
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "done"}]
        renderings.append(_try_render(tokenizer, template, turns))
    of_mapping, of_text = renderings
    return _PROBE in of_text and (_PROBE not in of_mapping or str({"x": _PROBE}) in of_mapping)


def _try_render(tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages) -> str:
    """Return the rendering of messages, or "" if the template rejects them."""
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:  # a template is a program, which may raise any exception
        return ""


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that ends plain text.

    Raises:
        InputError: If the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no eos_token, so a completion cannot be ended. Set one in its config")
    return tokenizer.eos_token_id


def has_template_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], template_kwargs: dict[str, Any] | None
) -> bool | None:
    """Return whether the ids of a prepared row contain special tokens of the chat template.

    Returns:
        None if it cannot be determined, because the template writes no special token that plain rows lack.
    """
    if not tokenizer.chat_template:
        return False
    template_ids = template_token_ids(tokenizer, template_kwargs)
    return not template_ids.isdisjoint(ids) if template_ids else None


def template_token_ids(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> set[int]:
    """Return the ids of special tokens that the chat template writes around a user's turn, and plain rows lack."""
    general = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    return template_special_ids(tokenizer, template_kwargs) - general


def template_special_ids(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> set[int]:
    """Return the ids of all special tokens that the chat template writes around a user's turn."""
    turn = ChatTemplate(tokenizer, None, template_kwargs).render([{"role": "user", "content": "hello"}])
    return {*plain_ids(tokenizer, [turn])[0]} & special_ids(tokenizer)


def check_reserved_options(template_kwargs: Iterable[str]) -> None:
    """Raise InputError for options of a template that this module sets for each rendering."""
    if names := join_names(key for key in template_kwargs if key in _RESERVED_OPTIONS):
        raise InputError(f"{names} cannot be set, because each rendering has its own value. Remove it")


def check_template_options(tokenizer: PreTrainedTokenizerBase, template_kwargs: Iterable[str]) -> None:
    """Raise InputError for an option that no template of the tokenizer reads and that resembles one that is read.

    Other options that are not read are reported by `find_unread`.
    """
    known = template_options(tokenizer)
    # a recipe for Qwen's models may be run with another model
    for key in sorted({*template_kwargs} - known - {"enable_thinking"}):
        if hint := name_hint(key, known - _RESERVED_OPTIONS, list_valid=False):
            raise InputError(f"chat_template_kwargs: the chat template does not know {short_repr(key)}{hint}")


def template_options(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the options that a chat template of the tokenizer reads; there may be several by name, or none."""
    chat_template: Any = tokenizer.chat_template
    templates = chat_template.values() if isinstance(chat_template, dict) else filter(None, [chat_template])
    return frozenset[str]().union(*map(template_variables, templates))


def turn_end_id(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> int:
    """Return the id that ends an assistant turn in training rows.

    It is the first special token that the template writes after the content. The tokens that end generation are
    determined by `models.policy.find_terminal_ids`. The eos of a base model is often another token (Qwen: the eos is
    <|endoftext|>, and turns end with <|im_end|>). Without a template, or if the template writes no special token, it is
    the eos.

    Raises:
        InputError: If there is neither.
    """
    if not tokenizer.chat_template:
        return eos_id(tokenizer)
    with error_context("chat_template_kwargs"):
        check_reserved_options(template_kwargs or {})
    probe = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    tail = ChatTemplate(tokenizer, None, template_kwargs).render(probe).rpartition(_PROBE)[2]
    check_template_options(tokenizer, template_kwargs or {})
    special = special_ids(tokenizer)
    ends = [i for i in plain_ids(tokenizer, [tail])[0] if i in special]
    return ends[0] if ends else eos_id(tokenizer)


def mark_turn_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends a turn special, if it was added to the tokenizer as an ordinary token.

    Answers are then decoded without it, both here and in transformers. A special token that the template writes only at
    the end of the conversation does not count. In Phi-3, for example, it follows the end of the last turn.
    """
    if not tokenizer.chat_template:
        return
    question = {"role": "user", "content": f"{_PROBE}x"}
    turns: Messages = [question, {"role": "assistant", "content": f"{_PROBE}y"}]
    template = ChatTemplate(tokenizer)
    try:
        last = template.render(turns)
        earlier = template.render([*turns, question])
    except InputError:
        return
    _, answer, tail = last.rpartition(f"{_PROBE}y")
    between = earlier.partition(f"{_PROBE}y")[2].partition(_PROBE)[0]
    if not answer:
        return

    special = special_ids(tokenizer)
    markers = marker_ids(tokenizer)
    tail_ids, between_ids = plain_ids(tokenizer, [tail, between])
    ends = [i for i in tail_ids if i in markers]
    # a special token after each turn ends it, whatever markup precedes it
    special_ends = [i for i in ends if i in special and i in between_ids]
    if not ends or ends[0] in special or special_ends:
        return
    token = tokenizer.added_tokens_decoder[ends[0]]
    token.special = True
    tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    logger.info("%s ends the turns of the chat template, so it was made a special token", token.content)


def marker_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens and of other added ones, except white space, which some tokenizers add."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return special_ids(tokenizer) | added


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens, which plain text never contains."""
    return {*tokenizer.all_special_ids, *_added_special_ids(tokenizer, len(tokenizer))}


@lru_cache(maxsize=32)
def _added_special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def join_messages(prompt: Messages, completion: Messages) -> Messages:
    """Return `prompt + completion`. A completion that continues a prefilled assistant turn is merged with it."""
    last = prompt[-1]
    first = completion[0]
    if (last["role"], first["role"]) != ("assistant", "assistant"):
        return prompt + completion
    return [*prompt[:-1], {**last, **first, "content": last["content"] + first["content"]}, *completion[1:]]


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two strings or lists."""
    if first == second[: len(first)]:  # the usual case, without a loop
        return len(first)
    for n, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return n
    return min(len(first), len(second))


def text_after(start: str, full: str) -> str:
    """Return the text that follows `start` in `full`.

    Raises:
        InputError: If `full` does not begin with `start`.
    """
    if full.startswith(start):
        return full[len(start) :]
    n = common_prefix_length(start, full)
    in_prompt, in_conversation = (text[max(0, n - 20) : n + 30] for text in (start, full))
    raise InputError(
        f"the rendered conversation does not begin with its rendered prompt. The prompt has {in_prompt!r}, and the"
        f" conversation has {in_conversation!r}. The template rewrites earlier turns or thinking. Set"
        " chat_template_kwargs (for example {enable_thinking: false}), or use a template for training, with"
        " {% generation %} tags around the text of assistants"
    )


def plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens that the tokenizer would add."""
    return tokenize(tokenizer, texts)["input_ids"]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    """Return the encodings of texts, without special tokens that the tokenizer would add."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer itself adds before any text, usually [] or [BOS]."""
    bare = plain_ids(tokenizer, ["x"])[0]
    full = tokenizer("x")["input_ids"]
    return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, plain or rendered.

    They begin with one BOS if the tokenizer adds one, and have no EOS that it would append.
    """
    return with_prefix(tokenizer, plain_ids(tokenizer, texts))


def with_prefix(tokenizer: PreTrainedTokenizerBase, id_lists: Iterable[list[int]]) -> list[list[int]]:
    """Return lists of ids that begin with one BOS if the tokenizer adds one."""
    # templates often write the BOS themselves, so the tokenizer's own is added only where it is missing
    prefix = prefix_ids(tokenizer)
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in id_lists]


def with_single_end(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], end_id: int, alternative_ends: Set[int]
) -> list[int]:
    """Return ids that end in exactly one `end_id`, without blank text and special tokens after it.

    `end_id` is appended if it is absent and the ids do not end in one of `alternative_ends`.
    """
    last = len(ids) - 1 - ids[::-1].index(end_id) if end_id in ids else -1
    rest = ids[last + 1 :]
    if last < 0 or (rest and str(tokenizer.decode(rest, skip_special_tokens=True)).strip()):
        return ids if ids and ids[-1] in alternative_ends else [*ids, end_id]
    while last and ids[last - 1] == end_id:
        last -= 1
    return ids[: last + 1]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    completions: list[str],
    end_id: int | None,
    alternative_ends: Set[int] = frozenset(),
) -> list[tuple[list[int], list[int]]]:
    """Tokenize pairs of a prompt and a completion, in a few calls for all pairs.

    The ids of a prompt are those that generation would use, so no token spans the boundary. If tokenizing the whole
    text merges across it, the completion is tokenized alone, to ids that decode to the same text after the prompt.

    Args:
        tokenizer: The tokenizer.
        prompts: Text of each prompt.
        completions: Text of each completion, which follows its prompt without a separator.
        end_id: The id that ends each completion, once. None adds and removes nothing.
        alternative_ends: Ids that may end a completion instead.

    Returns:
        Prompt ids and completion ids of each pair.
    """
    texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    encoded = tokenize(tokenizer, texts)
    full_ids = with_prefix(tokenizer, encoded["input_ids"])
    prompt_ids = with_prefix(tokenizer, ids_of_prompts(tokenizer, prompts, encoded))
    pairs = []
    for head, full, completion in zip(prompt_ids, full_ids, completions, strict=True):
        # after a prompt that ends in the unknown token an equal prefix proves nothing, since a token that merges across
        # the boundary would be unknown too
        is_ambiguous = head and head[-1] == tokenizer.unk_token_id
        is_prefix = full[: len(head)] == head and not is_ambiguous
        tail = full[len(head) :] if is_prefix else _completion_ids(tokenizer, head, full, completion)
        pairs.append((head, tail if end_id is None else with_single_end(tokenizer, tail, end_id, alternative_ends)))
    return pairs


def ids_of_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], encoded: BatchEncoding
) -> Iterator[list[int]]:
    """Return the ids of prompts, mostly without tokenizing them again.

    A fast tokenizer splits a text at its special tokens, and tokenizes each part without the others. So the ids of a
    prompt are those of its whole text up to the last special token of the prompt, and those of the part that begins
    there. In a chat template this part is the same for all prompts: it is tokenized once, and compared with the ids of
    each whole text.

    Args:
        tokenizer: The tokenizer.
        prompts: Text of each prompt.
        encoded: Encodings of texts that begin with the prompts.
    """
    ids_of: dict[str, list[int]] = {}
    pending = {prompt: number for number, prompt in enumerate(prompts)}  # prompt -> a text that begins with it
    special = special_ids(tokenizer)
    encodings = encoded.encodings or []  # a slow tokenizer has none
    for _ in range(_MAX_TAILS if encodings else 0):
        if not pending:
            break
        example = next(iter(pending))
        encoding = tokenize(tokenizer, [example])
        [ids] = encoding["input_ids"]
        ids_of[example] = ids
        del pending[example]
        start = next((n for n in reversed(range(len(ids))) if ids[n] in special), None)
        if start is None:
            continue
        tail = example[(encoding.encodings or [])[0].offsets[start][0] :]
        tail_ids = ids[start:]
        for prompt in [prompt for prompt in pending if prompt.endswith(tail)]:
            number = pending[prompt]
            first = encodings[number].char_to_token(len(prompt) - len(tail))
            whole = encoded["input_ids"][number]
            if first is not None and whole[first : first + len(tail_ids)] == tail_ids:
                ids_of[prompt] = whole[: first + len(tail_ids)]
                del pending[prompt]
    if pending:
        ids_of |= zip(pending, plain_ids(tokenizer, [*pending]), strict=True)
    return map(ids_of.__getitem__, prompts)


def _completion_ids(tokenizer: PreTrainedTokenizerBase, head: list[int], full: list[int], completion: str) -> list[int]:
    """Return ids of the completion that decode, after `head`, to the text of `full`."""
    candidates = continuation_ids(tokenizer, completion)
    text = tokenizer.decode(full)
    first = next(candidates)
    return next((ids for ids in chain([first], candidates) if tokenizer.decode(head + ids) == text), first)


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[list[int]]:
    """Yield tokenizations of a text that follows another text.

    The first one is of the text alone, and the others are of the text after characters that nothing merges with.
    SentencePiece tokenizers prepend a space to any text, which a continuation must not gain.
    """
    yield plain_ids(tokenizer, [text])[0]
    for anchor in ("\n", ".", "|"):
        anchor_ids, both = plain_ids(tokenizer, [anchor, anchor + text])
        if both[: len(anchor_ids)] == anchor_ids:
            yield both[len(anchor_ids) :]
