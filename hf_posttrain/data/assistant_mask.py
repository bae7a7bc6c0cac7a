"""Which tokens of a conversation the assistant wrote: what assistant_only_loss trains.

From the template's own {% generation %} tags where it has them, otherwise from the rendered text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from ..errors import InputError, shown
from . import chat
from .messages import Messages, call_names, text_of
from .template import GENERATION

ASKED = "train_on or assistant_only_loss"
"""The options that ask for it, for messages."""


def assistant_mask(
    template: chat.ChatTemplate, messages: Messages, full: str = "", chosen: Collection[int] | None = None
) -> tuple[list[int], list[int]]:
    """Ids of the conversation and a 0/1 mask of equal length: 1 for each assistant's content, calls and turn end.

    `full` is the conversation rendered, where that is known; `chosen` the numbers of the assistants' messages that are
    trained, None: all. Turns without any are not trained. Nothing follows the last 1. Raises InputError if there is no
    such turn, the text before a turn differs from what generation would see, or what an assistant wrote is not all in
    its turn.
    """
    tokenizer = template.tokenizer
    end_id = chat.turn_end_id(tokenizer, template.kwargs)
    # 1. where assistants wrote: from the template's own {% generation %} tags, otherwise from the rendered text
    full = full or template.render(messages)
    if tagged := bool(GENERATION.search(template.text)):
        ids, mask, offsets = _tagged_mask(template, messages, end_id, full)
    if not tagged or chosen is not None:
        ids, rendered, offsets = _rendered_mask(template, messages, end_id, full, chosen)
        # tags do not say which message they are of
        mask = [*map(min, mask, rendered)] if tagged else rendered
    # 2. of each turn, nothing behind its end (a line break, a second end); no turn that is an end alone, which would
    # teach empty answers. Where a template writes no headers, turns of assistants follow one another in one run
    ends = [0, *accumulate(int(i == end_id) for i in ids)]
    for _, turn in groupby(range(len(ids)), lambda n: (mask[n], ends[n])):
        first = (place := [*turn])[0]
        stop = place[-1] + 1
        if not str(tokenizer.decode(ids[first:stop], skip_special_tokens=True)).strip():
            mask[first:stop] = [0] * (stop - first)
    runs = [[*run] for trained, run in groupby(range(len(ids)), mask.__getitem__) if trained]
    if not runs:
        left = "" if chosen is None else ", or all that it wrote is left out (weight: 0)"
        raise InputError(f"{ASKED}: no token of this conversation was written by an assistant{left}")
    answers = {n for n, m in enumerate(messages) if m["role"] == "assistant" and (chosen is None or n in chosen)}
    given = _Rendered(template, messages, end_id, full, ids, offsets)
    _check_written(given, answers, [(offsets[run[0]][0], offsets[run[-1]][1]) for run in runs])
    # 3. drop what follows the last trained token (a user's turn, a line break), and close a last turn left open
    size = runs[-1][-1] + 1
    last = messages[-1]
    ended = ids[size - 1] in {end_id} | chat.special_ids(tokenizer)  # a call may have an end of its own
    end = [end_id] if len(messages) - 1 in answers and text_of(last).strip() and not ended else []
    # 4. BOS once: some templates write it, for others the tokenizer does
    prefix = chat.prefix_ids(tokenizer)
    prefix = [] if ids[: len(prefix)] == prefix else prefix
    return prefix + ids[:size] + end, [0] * len(prefix) + mask[:size] + [1] * len(end)


def _check_written(given: "_Rendered", answers: Collection[int], turns: list[tuple[int, int]]) -> None:
    """Raises InputError for a content or a call of an answer that the conversation has and no trained turn has (special
    tokens alone say nothing), and for a content of another message that stands in trained turns alone.

    answers: numbers of the trained messages. turns: where trained turns begin and end in the text.
    """
    messages = given.messages
    full = given.full
    tokenizer = given.template.tokenizer
    wrote = [full[begin:end] for begin, end in turns]
    trained = "\n".join(wrote)
    said = text_of([messages[n] for n in answers])
    for n, message in enumerate(messages):
        others = [other["content"] for other in messages if other is not message]
        content = message["content"].strip()
        inside = n not in answers and content and full.count(content) == trained.count(content)
        if inside and trained.count(content) > said.count(content):
            problem = f"the chat template writes message {n} ({message['role']}) inside a turn of the assistant's"
            raise InputError(f"{ASKED}: {problem}: {shown(content)} would be trained")
        for text in (content, *call_names(message)) if n in answers else ():
            elsewhere = sum(other.count(text) for other in others)
            if full.count(text) <= elsewhere or any(text in turn for turn in wrote):
                continue
            if given.begins_with(n, text, turns):
                continue
            if {*chat.plain_ids(tokenizer, [text])[0]} - chat.special_ids(tokenizer):
                problem = f"message {n} (assistant): {shown(text)} would not be trained"
                why = "the chat template writes it outside of its turn, or its {% generation %} tags leave it out"
                raise InputError(f"{ASKED}: {problem}: {why}")


def _places(text: str, full: str) -> Iterator[int]:
    """Yield where a text stands in another."""
    place = full.find(text)
    while place >= 0:
        yield place
        place = full.find(text, place + 1)


_Found = tuple[list[int], list[int], list[tuple[int, int]]]


def _tagged_mask(template: chat.ChatTemplate, messages: Messages, end_id: int, full: str) -> _Found:
    """Ids, mask and places in the text (begin, end), from the template's generation tags."""
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    options |= {"tokenizer_kwargs": {"return_offsets_mapping": True}}
    encoded = template.apply(messages, **options)
    ids = list(encoded["input_ids"])
    mask = list(encoded["assistant_masks"])
    offsets = encoded["offset_mapping"]
    if template.pictures:  # transformers knows nothing of their text: from its tokens to those of the whole text
        places = template.moved(messages, [begin for (begin, _), on in zip(offsets, mask, strict=True) if on])
        encoded = template.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        offsets = encoded["offset_mapping"]
        mask = [int(begin in places) for begin, _ in offsets]
    for n in range(1, len(ids)):
        # the turn end right after a tagged span is trained too; and where the last character of a span is split into
        # several tokens, transformers marks only the first: mark the rest
        ends_turn = ids[n] == end_id and ids[n - 1] != end_id
        if mask[n - 1] and (ends_turn or offsets[n][0] < offsets[n - 1][1]):
            mask[n] = 1
    # tags may be around text that the prompt of a turn supplies, as an empty thought, which no assistant wrote
    given = _Rendered(template, messages, end_id, full, ids, offsets)
    for n in (n for n, message in enumerate(messages) if n and message["role"] == "assistant"):
        first, stop = map(given.token_at, (given.header_of(n), given.begin_of(n)))
        mask[first:stop] = [0] * (stop - first)
    return ids, mask, offsets


def _rendered_mask(
    template: chat.ChatTemplate, messages: Messages, end_id: int, full: str, chosen: Collection[int] | None
) -> _Found:
    """Ids, mask and places from the text: a turn begins where generation would have begun it, and ends with its end."""
    encoded = template.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    given = _Rendered(template, messages, end_id, full, encoded["input_ids"], encoded["offset_mapping"])
    # from the last turn to the first, since each must end before `limit`, the character where the next one begins
    mask = [0] * len(given.ids)
    limit = len(full)
    for n in (n for n in reversed(range(len(messages))) if messages[n]["role"] == "assistant"):
        begin = given.begin_of(n)
        first = given.token_at(begin)
        stop = given.stop_of(n, begin, limit) if text_of(messages[n]).strip() else first
        while stop > first and not full[given.offsets[stop - 1][0] : given.offsets[stop - 1][1]].strip():
            stop -= 1
        if stop <= first and messages[n]["content"].strip():
            raise InputError(f"{ASKED}: message {n} (assistant): the end of its turn is not found")
        trained = chosen is None or n in chosen
        mask[first:stop] = [int(trained)] * (stop - first)
        limit = begin
    return given.ids, mask, given.offsets


class _Rendered(NamedTuple):
    """A conversation, its rendering, and the tokens of that with their places in the text."""

    template: chat.ChatTemplate
    messages: Messages
    end_id: int
    full: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def token_at(self, place: int) -> int:
        """The first token that begins at this character or behind it."""
        return bisect_left(self.offsets, place, key=lambda offset: offset[0])

    def header_of(self, n: int) -> int:
        """The character where what stands before message n ends, and the prompt of its turn begins."""
        return chat.shared_length(self.template.render(self.messages[:n]), self.full)

    def begin_of(self, n: int) -> int:
        """The character where generation would have begun message n."""
        if n:
            start = self.template.render(self.messages[:n], add_generation_prompt=True)
            return len(self.full) - len(chat.text_behind(start, self.full))
        # templates do not render an empty conversation: take the header that opens an answer to some other message
        probe = [{"role": "user", "content": "hello"}]
        bare = self.template._replace(tools=None)
        asked, opened = (bare.render(probe, add_generation_prompt=prompt) for prompt in (False, True))
        header = chat.text_behind(asked, opened)
        if header not in self.full or not header:
            raise InputError(f"{ASKED}: the assistant speaks first, and {header!r} does not open its turn")
        return self.full.find(header) + len(header)

    def begins_with(self, n: int, text: str, turns: list[tuple[int, int]]) -> bool:
        """Return whether the prompt of message n has the beginning of a text, and a trained turn the rest. White space
        between the two may be missing, where a token spans the end of the prompt.
        """
        ends = [
            (place, begin)
            for begin, end in turns
            for place in _places(text, self.full)
            if begin < place + len(text) <= end
        ]
        start = self.begin_of(n) if ends else 0
        return any(place < start <= begin and not self.full[start:begin].strip() for place, begin in ends)

    def stop_of(self, n: int, begin: int, limit: int) -> int:
        """The token behind the end of message n, which stands between the characters `begin` and `limit`."""
        behind = self.content_of(n, begin, limit)
        after = self.token_at(behind)
        stop = len(self.ids)
        later = self.messages[n + 1 :]
        ends_there = after < len(self.ids) and self.ids[after] == self.end_id
        if later and (self.messages[n].get("tool_calls") or not ends_there):
            # calls follow the content, or there is no end: the turn rendered as the last one shows how far it goes,
            # without the thinking (a key of its own) that a template writes of the last turn alone
            turn = self.messages[n]
            bare = {key: value for key, value in turn.items() if key in ("role", "content", "tool_calls")}
            whole = self.stop_as_last(n, after, turn) or self.stop_as_last(n, after, bare)
            stop = whole or self.stop_before(n, behind, limit)
        if self.end_id in self.ids[after:stop]:
            stop = self.ids.index(self.end_id, after) + 1
        return stop

    def content_of(self, n: int, begin: int, limit: int) -> int:
        """Where the content of message n ends, or what the template has kept of it: it may drop the thinking at its
        beginning. The content may hold the text of the turn end, so that is looked for behind it.
        """
        content = self.messages[n]["content"].strip()
        kept = (content[at:].lstrip() for at in (0, *(m.end() for m in re.finditer(r"[\n>]", content))))
        return next((at + len(text) for text in kept if (at := self.full.find(text, begin, limit)) >= 0), begin)

    def stop_as_last(self, n: int, after: int, turn: dict[str, Any]) -> int | None:
        """The token behind message n as far as the rendering of `turn` in its place, as the last one, is the beginning
        of the whole; None where a last turn is written otherwise.
        """
        alone = ""
        with suppress(InputError):  # a template may refuse a call that has no answer
            alone = self.template.render([*self.messages[:n], turn])
        stop = bisect_right(self.offsets, chat.shared_length(alone, self.full), key=lambda offset: offset[1])
        rest = alone[self.offsets[stop][0] :].strip() if stop < len(self.ids) else ""
        special = chat.special_ids(self.template.tokenizer)
        if stop < after or not {*chat.plain_ids(self.template.tokenizer, [rest])[0]} <= special:
            return None
        return stop + (bool(rest) and self.ids[stop] in special)  # another end than that of a last turn

    def stop_before(self, n: int, behind: int, limit: int) -> int:
        """The token where the next message begins, or where the content of message n ends if no end is before that."""
        following = self.messages[n + 1]["content"].strip()
        bound = self.full.find(following, behind, limit) if following else -1
        after = self.token_at(behind)
        stop = self.token_at(bound if bound >= 0 else limit)
        return stop if self.end_id in self.ids[after:stop] else after
