"""Mask of the tokens that the assistant wrote, which are trained with `assistant_only_loss`.

It comes from the {% generation %} tags of the chat template if it has them, otherwise from the rendered text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, short_repr
from . import chat
from .messages import Messages, call_names, text_of

MASK_OPTIONS = "train_on or assistant_only_loss"
"""The options that require this mask, for messages."""


class Conversation(NamedTuple):
    """A rendered conversation of which the tokens of assistants are trained.

    Attributes:
        template: The chat template with its tokenizer.
        messages: The messages.
        text: Their rendering.
        spans: Begin and end of each part of it within {% generation %} tags, or None for a template without them.
        chosen: Numbers of the assistant messages that are trained, or None for all of them.
        prompt: Rendered prompt of which no token is trained, or None.
    """

    template: chat.ChatTemplate
    messages: Messages
    text: str
    spans: Sequence[tuple[int, int]] | None = None
    chosen: Collection[int] | None = None
    prompt: str | None = None


def assistant_masks(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of each conversation, and a mask that is 1 for each assistant's content, calls and turn end.

    Turns without content and calls are not trained. Both lists end with the last 1 of the mask.

    Args:
        tokenizer: A fast tokenizer.
        conversations: Conversations that are rendered with this tokenizer.

    Yields:
        Token ids and mask, both [L].

    Raises:
        InputError: If no turn is trained, if the text before a turn differs from the text that generation would start
            from, or if a part of an assistant's message is not in its turn. For the first such conversation, in its
            place.
    """
    if not conversations:
        return
    encoded = chat.tokenize(tokenizer, [conversation.text for conversation in conversations])
    prompts = [conversation.prompt or "" for conversation in conversations]
    prompt_lengths = map(len, chat.with_prefix(tokenizer, chat.ids_of_prompts(tokenizer, prompts, encoded)))
    tokens = _Tokens(tokenizer)
    encodings: Any = encoded.encodings
    rows = zip(conversations, encoded["input_ids"], encodings, prompt_lengths, strict=True)
    for conversation, ids, encoding, prompt_length in rows:
        template, messages, text, spans, chosen, prompt = conversation
        full = text.rstrip()
        rendered = _RenderedConversation(template, messages, tokens.end_id(template), full, ids, encoding, tokens)
        ids, mask = _trained_tokens(rendered, chosen, spans)
        if prompt is not None:
            chat.text_after(prompt, full)  # checks that the answer begins after the tokens of the prompt
            mask = [0] * min(prompt_length, len(ids)) + mask[prompt_length:]
        yield ids, mask


class _Tokens:
    """Facts about a tokenizer, which are determined once for all conversations of a batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special = chat.special_ids(tokenizer)
        self.prefix = chat.prefix_ids(tokenizer)
        self._end_ids: dict[str, int] = {}  # by the options of the template
        self._visible: dict[int, bool] = {}

    def end_id(self, template: chat.ChatTemplate) -> int:
        """Return the id that ends an assistant turn."""
        key = repr(template.kwargs or None)
        if key not in self._end_ids:
            self._end_ids[key] = chat.turn_end_id(self.tokenizer, template.kwargs)
        return self._end_ids[key]

    def have_text(self, ids: Sequence[int]) -> bool:
        """Return whether ids have a text other than white space and special tokens."""
        return any(map(self._is_visible, ids)) or bool(self._text(ids))

    def _is_visible(self, token: int) -> bool:
        """Return whether a token is visible in each text. A part of a character is not known to be."""
        if token not in self._visible:
            text = self._text([token])
            self._visible[token] = bool(text) and "\N{REPLACEMENT CHARACTER}" not in text
        return self._visible[token]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*ids], skip_special_tokens=True)).strip()


def _trained_tokens(
    rendered: "_RenderedConversation", chosen: Collection[int] | None, spans: Sequence[tuple[int, int]] | None
) -> tuple[list[int], list[int]]:
    """Return ids and mask of a conversation.

    Args:
        rendered: The conversation.
        chosen: Numbers of the assistant messages that are trained, or None for all of them.
        spans: Begin and end of each text within {% generation %} tags, or None for a template without them.
    """
    ids, messages, end_id, tokens = rendered.ids, rendered.messages, rendered.end_id, rendered.tokens
    # 1. find the tokens of assistants
    if spans is None:
        mask = _rendered_mask(rendered, chosen)
    else:
        mask = _tagged_mask(rendered, spans)
        if chosen is not None:  # tags do not identify their message
            mask = bytearray(map(min, mask, _rendered_mask(rendered, chosen)))

    # 2. exclude tokens after the end of each turn (a line break, a second end), and turns that consist of an end alone,
    # which would train empty answers. If a template writes no headers, consecutive assistant turns are one run
    for start, stop in [*_runs(mask)]:
        while start < stop:
            piece_end = ids.index(end_id, start, stop) + 1 if end_id in ids[start:stop] else stop
            if not tokens.have_text(ids[start:piece_end]):
                mask[start:piece_end] = bytes(piece_end - start)
            start = piece_end
    runs = [*_runs(mask)]
    if not runs:
        hint = "" if chosen is None else ", or all that it wrote is excluded (weight: 0)"
        raise InputError(f"{MASK_OPTIONS}: no token of this conversation was written by an assistant{hint}")
    answers = {n for n, m in enumerate(messages) if m["role"] == "assistant" and (chosen is None or n in chosen)}
    _check_coverage(rendered, answers, [(rendered.span(start)[0], rendered.span(stop - 1)[1]) for start, stop in runs])

    # 3. drop the tokens after the last trained token (a user's turn, a line break), and end an open last turn
    size = runs[-1][-1]
    is_ended = ids[size - 1] == end_id or ids[size - 1] in tokens.special  # a call may have another end
    end = [end_id] if len(messages) - 1 in answers and text_of(messages[-1]).strip() and not is_ended else []

    # 4. one BOS: it is written by some templates, and by the tokenizer for others
    prefix = [] if ids[: len(tokens.prefix)] == tokens.prefix else tokens.prefix
    return prefix + ids[:size] + end, [0] * len(prefix) + [*mask[:size]] + [1] * len(end)


def _runs(mask: bytearray) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each run of 1 in a mask."""
    start = mask.find(1)
    while start >= 0:
        stop = mask.find(0, start)
        stop = len(mask) if stop < 0 else stop
        yield start, stop
        start = mask.find(1, stop)


def _check_coverage(rendered: "_RenderedConversation", answers: Collection[int], turns: list[tuple[int, int]]) -> None:
    """Check that the trained turns contain the trained messages and no others.

    Args:
        rendered: The conversation.
        answers: Numbers of the trained messages.
        turns: Begin and end of each trained turn in the text.

    Raises:
        InputError: If the conversation contains a content or a call of a trained message and no trained turn does
            (special tokens alone do not count), or if the content of another message occurs only in trained turns.
    """
    messages = rendered.messages
    full = rendered.full
    tokenizer = rendered.template.tokenizer
    turn_texts = [full[begin:end] for begin, end in turns]
    trained_text = "\n".join(turn_texts)
    answer_text = text_of([messages[n] for n in answers])
    for n, message in enumerate(messages):
        other_contents = [other["content"] for other in messages if other is not message]
        content = message["content"].strip()
        is_inside = n not in answers and content and full.count(content) == trained_text.count(content)
        if is_inside and trained_text.count(content) > answer_text.count(content):
            problem = f"the chat template writes message {n} ({message['role']}) inside a turn of the assistant"
            raise InputError(f"{MASK_OPTIONS}: {problem}, so that {short_repr(content)} would be trained")
        for text in (content, *call_names(message)) if n in answers else ():
            other_count = sum(other.count(text) for other in other_contents)
            if full.count(text) <= other_count or any(text in turn for turn in turn_texts):
                continue
            if rendered.begins_with(n, text, turns):
                continue
            if {*chat.plain_ids(tokenizer, [text])[0]} - rendered.tokens.special:
                problem = f"message {n} (assistant): {short_repr(text)} would not be trained"
                reason = "The chat template writes it outside of its turn, or its {% generation %} tags exclude it"
                raise InputError(f"{MASK_OPTIONS}: {problem}. {reason}")


def _occurrences(text: str, full: str) -> Iterator[int]:
    """Yield the positions of a text in another text."""
    position = full.find(text)
    while position >= 0:
        yield position
        position = full.find(text, position + 1)


def _tagged_mask(rendered: "_RenderedConversation", spans: Sequence[tuple[int, int]]) -> bytearray:
    """Return the mask from the generation tags of the template.

    Args:
        rendered: The conversation.
        spans: Begin and end of each text within the tags.
    """
    ids, offsets, end_id = rendered.ids, rendered.offsets, rendered.end_id
    mask = bytearray(len(ids))
    for begin, end in spans:
        start = bisect_right(offsets, begin, key=itemgetter(1))
        stop = max(start, rendered.token_at(end))
        # the turn end right after a tagged span is also trained, and all tokens of its last character
        while start < stop < len(ids) and (
            (ids[stop] == end_id and ids[stop - 1] != end_id) or offsets[stop][0] < offsets[stop - 1][1]
        ):
            stop += 1
        mask[start:stop] = b"\1" * (stop - start)

    # tags may include text that comes from the prompt of a turn, such as an empty thought, which no assistant wrote
    for n in (n for n, message in enumerate(rendered.messages) if n and message["role"] == "assistant"):
        stop = rendered.token_at(rendered.begin_of(n))
        if mask.rfind(1, 0, stop) >= 0:
            start = rendered.token_at(rendered.header_of(n))
            mask[start:stop] = bytes(max(0, stop - start))
    return mask


def _rendered_mask(rendered: "_RenderedConversation", chosen: Collection[int] | None) -> bytearray:
    """Return the mask from the rendered text.

    A turn begins where generation would have begun it, and ends with its end token.
    """
    messages, full = rendered.messages, rendered.full
    # from the last turn to the first, since each must end before `limit`, the character where the next one begins
    mask = bytearray(len(rendered.ids))
    limit = len(full)
    for n in (n for n in reversed(range(len(messages))) if messages[n]["role"] == "assistant"):
        begin = rendered.begin_of(n)
        start = rendered.token_at(begin)
        stop = rendered.stop_of(n, begin, limit) if text_of(messages[n]).strip() else start
        while stop > start and not full[slice(*rendered.span(stop - 1))].strip():
            stop -= 1
        if stop <= start and messages[n]["content"].strip():
            raise InputError(f"{MASK_OPTIONS}: message {n} (assistant): the end of its turn cannot be determined")
        if chosen is None or n in chosen:
            mask[start:stop] = b"\1" * max(0, stop - start)
        limit = begin
    return mask


@dataclass
class _RenderedConversation:
    """A conversation with its rendering, and the tokens of the rendering with their positions in the text."""

    template: chat.ChatTemplate
    messages: Messages
    end_id: int
    full: str
    ids: list[int]
    encoding: Encoding
    tokens: _Tokens

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Begin and end of each token in the text. The list takes a fifth of the time of the tokenization."""
        return self.encoding.offsets

    def span(self, token: int) -> tuple[int, int]:
        """Return the begin and end of a token in the text."""
        return self.encoding.token_to_chars(token) or self.offsets[token]

    def token_at(self, position: int) -> int:
        """Return the first token that begins at this character or after it."""
        token = self.encoding.char_to_token(position)
        if token is None:  # no token has the character
            return bisect_left(self.offsets, position, key=itemgetter(0))
        while token < len(self.ids) and self.span(token)[0] < position:
            token += 1
        return token

    def header_of(self, n: int) -> int:
        """Return the character where the text before message n ends and the prompt of its turn begins."""
        return chat.common_prefix_length(self.template.render(self.messages[:n]), self.full)

    def begin_of(self, n: int) -> int:
        """Return the character where generation would have begun message n."""
        if n:
            start = self.template.render(self.messages[:n], add_generation_prompt=True)
            return len(self.full) - len(chat.text_after(start, self.full))
        # templates do not render an empty conversation, so use the header that opens an answer to another message
        probe = [{"role": "user", "content": "hello"}]
        template = self.template._replace(tools=None)
        question = template.render(probe, add_generation_prompt=False)
        opened = template.render(probe, add_generation_prompt=True)
        header = chat.text_after(question, opened)
        if header not in self.full or not header:
            problem = f"the first message is the assistant's, and {header!r} does not begin its turn"
            raise InputError(f"{MASK_OPTIONS}: {problem}")
        return self.full.find(header) + len(header)

    def begins_with(self, n: int, text: str, turns: list[tuple[int, int]]) -> bool:
        """Return whether a text begins in the prompt of message n and continues in a trained turn.

        White space between the two may be missing, if a token spans the end of the prompt.
        """
        candidates = [
            (position, begin)
            for begin, end in turns
            for position in _occurrences(text, self.full)
            if begin < position + len(text) <= end
        ]
        start = self.begin_of(n) if candidates else 0
        return any(position < start <= begin and not self.full[start:begin].strip() for position, begin in candidates)

    def stop_of(self, n: int, begin: int, limit: int) -> int:
        """Return the token after the end of message n, which lies between the characters `begin` and `limit`."""
        content_end = self.content_end(n, begin, limit)
        next_token = self.token_at(content_end)
        stop = len(self.ids)
        has_later_messages = bool(self.messages[n + 1 :])
        ends_there = next_token < len(self.ids) and self.ids[next_token] == self.end_id
        if has_later_messages and (self.messages[n].get("tool_calls") or not ends_there):
            # calls follow the content, or there is no end: the extent of the turn is that of its rendering as the last
            # turn. The second attempt is without the thinking in a separate key, which some templates write only for
            # the last turn
            turn = self.messages[n]
            bare_turn = {key: value for key, value in turn.items() if key in ("role", "content", "tool_calls")}
            stop_as_last = self.stop_as_last(n, next_token, turn) or self.stop_as_last(n, next_token, bare_turn)
            stop = stop_as_last or self.stop_before_next(n, content_end, limit)
        if self.end_id in self.ids[next_token:stop]:
            stop = self.ids.index(self.end_id, next_token) + 1
        return stop

    def content_end(self, n: int, begin: int, limit: int) -> int:
        """Return the character where the content of message n ends, or the part of it that the template wrote.

        A template may drop the thinking at its beginning. The content may contain the text of the turn end, so the end
        of the turn is searched after the content.
        """
        content = self.messages[n]["content"].strip()
        for start in chain([0], (match.end() for match in re.finditer(r"[\n>]", content))):
            text = content[start:].lstrip()
            position = self.full.find(text, begin, limit)
            if position >= 0:
                return position + len(text)
        return begin

    def stop_as_last(self, n: int, next_token: int, turn: dict[str, Any]) -> int | None:
        """Return the token after message n, according to the rendering that ends with `turn` in its place.

        It is determined by the prefix that this rendering shares with the whole conversation.

        Args:
            n: Number of the message.
            next_token: The first token after its content.
            turn: The message, possibly without some of its keys.

        Returns:
            None if the template writes a last turn differently.
        """
        prefix = ""
        with suppress(InputError):  # a template may reject a call that has no answer
            prefix = self.template.render([*self.messages[:n], turn])
        size = chat.common_prefix_length(prefix, self.full)
        stop = bisect_right(self.offsets, size, key=itemgetter(1))
        rest = prefix[self.offsets[stop][0] :].strip() if stop < len(self.ids) else ""
        special = self.tokens.special
        if stop < next_token or not {*chat.plain_ids(self.template.tokenizer, [rest])[0]} <= special:
            return None
        return stop + (bool(rest) and self.ids[stop] in special)  # the turn has another end than a last turn

    def stop_before_next(self, n: int, content_end: int, limit: int) -> int:
        """Return the token where the next message begins, or where the content ends if no end precedes that."""
        next_content = self.messages[n + 1]["content"].strip()
        bound = self.full.find(next_content, content_end, limit) if next_content else -1
        next_token = self.token_at(content_end)
        stop = self.token_at(bound if bound >= 0 else limit)
        return stop if self.end_id in self.ids[next_token:stop] else next_token
