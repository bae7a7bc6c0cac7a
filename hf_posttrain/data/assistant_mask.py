"""Mask of the tokens that the assistant wrote, which are trained with `assistant_only_loss`.

It comes from the {% generation %} tags of the chat template if it has them, otherwise from the rendered text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ..errors import InputError, short_repr
from . import chat
from .messages import Messages, call_names, text_of
from .template import GENERATION_TAG

MASK_OPTIONS = "train_on or assistant_only_loss"
"""The options that require this mask, for messages."""


def assistant_mask(
    template: chat.ChatTemplate, messages: Messages, full: str = "", chosen: Collection[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and a mask that is 1 for each assistant's content, calls and turn end.

    Turns without content and calls are not trained. Both lists end with the last 1 of the mask.

    Args:
        template: The chat template with its tokenizer.
        messages: The conversation.
        full: The rendered conversation, if it is known.
        chosen: Numbers of the assistant messages that are trained, or None for all of them.

    Returns:
        Token ids and mask, both [L].

    Raises:
        InputError: If no turn is trained, if the text before a turn differs from the text that generation would start
            from, or if a part of an assistant's message is not in its turn.
    """
    tokenizer = template.tokenizer
    end_id = chat.turn_end_id(tokenizer, template.kwargs)

    # 1. find the tokens of assistants
    full = full or template.render(messages)
    is_tagged = bool(GENERATION_TAG.search(template.text))
    if is_tagged:
        ids, mask, offsets = _tagged_mask(template, messages, end_id, full)
    if not is_tagged or chosen is not None:
        ids, rendered_mask, offsets = _rendered_mask(template, messages, end_id, full, chosen)
        # tags do not identify their message
        mask = [*map(min, mask, rendered_mask)] if is_tagged else rendered_mask

    # 2. exclude tokens after the end of each turn (a line break, a second end), and turns that consist of an end alone,
    # which would train empty answers. If a template writes no headers, consecutive assistant turns are one run
    end_counts = [0, *accumulate(int(i == end_id) for i in ids)]
    for _, turn in groupby(range(len(ids)), lambda n: (mask[n], end_counts[n])):
        positions = [*turn]
        start = positions[0]
        stop = positions[-1] + 1
        if not str(tokenizer.decode(ids[start:stop], skip_special_tokens=True)).strip():
            mask[start:stop] = [0] * (stop - start)
    runs = [[*run] for is_trained, run in groupby(range(len(ids)), mask.__getitem__) if is_trained]
    if not runs:
        hint = "" if chosen is None else ", or all that it wrote is excluded (weight: 0)"
        raise InputError(f"{MASK_OPTIONS}: no token of this conversation was written by an assistant{hint}")
    answers = {n for n, m in enumerate(messages) if m["role"] == "assistant" and (chosen is None or n in chosen)}
    rendered = _RenderedConversation(template, messages, end_id, full, ids, offsets)
    _check_coverage(rendered, answers, [(offsets[run[0]][0], offsets[run[-1]][1]) for run in runs])

    # 3. drop the tokens after the last trained token (a user's turn, a line break), and end an open last turn
    size = runs[-1][-1] + 1
    last = messages[-1]
    is_ended = ids[size - 1] in {end_id} | chat.special_ids(tokenizer)  # a call may have another end
    end = [end_id] if len(messages) - 1 in answers and text_of(last).strip() and not is_ended else []

    # 4. one BOS: it is written by some templates, and by the tokenizer for others
    prefix = chat.prefix_ids(tokenizer)
    prefix = [] if ids[: len(prefix)] == prefix else prefix
    return prefix + ids[:size] + end, [0] * len(prefix) + mask[:size] + [1] * len(end)


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
            if {*chat.plain_ids(tokenizer, [text])[0]} - chat.special_ids(tokenizer):
                problem = f"message {n} (assistant): {short_repr(text)} would not be trained"
                reason = "The chat template writes it outside of its turn, or its {% generation %} tags exclude it"
                raise InputError(f"{MASK_OPTIONS}: {problem}. {reason}")


def _occurrences(text: str, full: str) -> Iterator[int]:
    """Yield the positions of a text in another text."""
    position = full.find(text)
    while position >= 0:
        yield position
        position = full.find(text, position + 1)


_MaskedIds = tuple[list[int], list[int], list[tuple[int, int]]]
"""Token ids, mask, and (begin, end) of each token in the text."""


def _tagged_mask(template: chat.ChatTemplate, messages: Messages, end_id: int, full: str) -> _MaskedIds:
    """Return ids, mask and offsets from the generation tags of the template."""
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    options |= {"tokenizer_kwargs": {"return_offsets_mapping": True}}
    encoded = template.apply(messages, **options)
    ids = list(encoded["input_ids"])
    mask = list(encoded["assistant_masks"])
    offsets = encoded["offset_mapping"]
    if template.expansions:  # transformers has no expansions: map its token positions to the text with expansions
        begins = [begin for (begin, _), is_trained in zip(offsets, mask, strict=True) if is_trained]
        positions = template.expanded_positions(messages, begins)
        encoded = template.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        offsets = encoded["offset_mapping"]
        mask = [int(begin in positions) for begin, _ in offsets]
    for n in range(1, len(ids)):
        # the turn end right after a tagged span is also trained. If the last character of a span is split into several
        # tokens, transformers marks only the first of them, so the others are marked here
        ends_turn = ids[n] == end_id and ids[n - 1] != end_id
        if mask[n - 1] and (ends_turn or offsets[n][0] < offsets[n - 1][1]):
            mask[n] = 1

    # tags may include text that comes from the prompt of a turn, such as an empty thought, which no assistant wrote
    rendered = _RenderedConversation(template, messages, end_id, full, ids, offsets)
    for n in (n for n, message in enumerate(messages) if n and message["role"] == "assistant"):
        start = rendered.token_at(rendered.header_of(n))
        stop = rendered.token_at(rendered.begin_of(n))
        mask[start:stop] = [0] * (stop - start)
    return ids, mask, offsets


def _rendered_mask(
    template: chat.ChatTemplate, messages: Messages, end_id: int, full: str, chosen: Collection[int] | None
) -> _MaskedIds:
    """Return ids, mask and offsets from the rendered text.

    A turn begins where generation would have begun it, and ends with its end token.
    """
    encoded = template.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    rendered = _RenderedConversation(template, messages, end_id, full, encoded["input_ids"], encoded["offset_mapping"])
    # from the last turn to the first, since each must end before `limit`, the character where the next one begins
    mask = [0] * len(rendered.ids)
    limit = len(full)
    for n in (n for n in reversed(range(len(messages))) if messages[n]["role"] == "assistant"):
        begin = rendered.begin_of(n)
        start = rendered.token_at(begin)
        stop = rendered.stop_of(n, begin, limit) if text_of(messages[n]).strip() else start
        while stop > start and not full[rendered.offsets[stop - 1][0] : rendered.offsets[stop - 1][1]].strip():
            stop -= 1
        if stop <= start and messages[n]["content"].strip():
            raise InputError(f"{MASK_OPTIONS}: message {n} (assistant): the end of its turn cannot be determined")
        is_trained = chosen is None or n in chosen
        mask[start:stop] = [int(is_trained)] * (stop - start)
        limit = begin
    return rendered.ids, mask, rendered.offsets


class _RenderedConversation(NamedTuple):
    """A conversation with its rendering, and the tokens of the rendering with their positions in the text."""

    template: chat.ChatTemplate
    messages: Messages
    end_id: int
    full: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def token_at(self, position: int) -> int:
        """Return the first token that begins at this character or after it."""
        return bisect_left(self.offsets, position, key=itemgetter(0))

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
        for start in (0, *(match.end() for match in re.finditer(r"[\n>]", content))):
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
        special = chat.special_ids(self.template.tokenizer)
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
