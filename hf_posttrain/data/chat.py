"""Chat templates and token boundaries: messages -> text -> ids, and which ids the assistant wrote.

The boundary comes from rendered text: the rendered prompt must be the beginning of the rendered conversation. An
`InputError` names the problem; the caller adds file and row. `template_kwargs` go to the template.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, shown
from .messages import Messages, check_unicode


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: list | None = None,
           template_kwargs: dict | None = None, **options: Any) -> str:  # fmt: skip
    """`messages` as text; `options` are `add_generation_prompt` and `continue_final_message`.

    Raises InputError if the tokenizer has no chat template or the template refuses these messages.
    """
    if not tokenizer.chat_template:
        raise InputError("messages need a chat template: set model.chat_template to a file, or give plain strings")
    options = {**(template_kwargs or {}), **options}
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))
    except Exception as error:  # a template is a program, and raises what it likes
        roles = ", ".join(shown(message["role"])[1:-1] for message in messages[:20])
        problem = " ".join(str(error).split())[:300]
        raise InputError(f"the chat template refuses messages with roles [{roles}]: {problem}") from error
    check_unicode(text, "the rendered conversation")
    return text


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends plain text. Raises InputError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no eos_token, so a completion cannot be ended: set one in its config")
    return tokenizer.eos_token_id


def turn_end_id(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None = None) -> int:
    """The id that ends an assistant turn in training rows: the first special token that the template writes after its
    content. What generation stops at: `models.prepare.find_terminal_ids`.

    A base model's eos often differs (Qwen: eos <|endoftext|>, turns end with <|im_end|>). Without a template, or if
    the template writes none, it is the eos. Raises InputError if there is neither.
    """
    if not tokenizer.chat_template:
        return eos_id(tokenizer)
    probe = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "sentinel7391"}]
    tail = render(tokenizer, probe, None, template_kwargs).rpartition("sentinel7391")[2]
    ends = [i for i in _plain_ids(tokenizer, [tail])[0] if i in special_ids(tokenizer)]
    return ends[0] if ends else eos_id(tokenizer)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, which plain text never becomes."""
    return {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Messages, tools: list | None = None,
                template_kwargs: dict | None = None) -> str:  # fmt: skip
    """The text that generation starts from; a prompt that ends in an assistant turn (prefill) is left open."""
    prefill = prompt[-1]["role"] == "assistant"
    option = {"continue_final_message": True} if prefill else {"add_generation_prompt": True}
    return render(tokenizer, prompt, tools, template_kwargs, **option)


def join_messages(prompt: Messages, completion: Messages) -> Messages:
    """`prompt + completion`; a completion that continues a prefilled assistant turn is one turn with it."""
    last, first = prompt[-1], completion[0]
    if (last["role"], first["role"]) != ("assistant", "assistant"):
        return prompt + completion
    return [*prompt[:-1], {**last, **first, "content": last["content"] + first["content"]}, *completion[1:]]


def split_chat(tokenizer: PreTrainedTokenizerBase, prompt: Messages, completion: Messages, tools: list | None = None,
               template_kwargs: dict | None = None) -> tuple[str, str]:  # fmt: skip
    """(prompt text, completion text): their concatenation is the full render of both.

    Raises InputError if the full render does not begin with the prompt's (a template that drops or moves thinking).
    """
    start = prompt_text(tokenizer, prompt, tools, template_kwargs)
    full = render(tokenizer, join_messages(prompt, completion), tools, template_kwargs)
    return start, _after(start, full)


def shared_length(first: Sequence, second: Sequence) -> int:
    """Length of the longest common prefix of two strings or lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _after(start: str, full: str) -> str:
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


def _plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer itself writes before any text: usually [] or [BOS]."""
    bare, dressed = _plain_ids(tokenizer, ["x"])[0], tokenizer("x")["input_ids"]
    return next((dressed[:n] for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare), [])


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text, plain or rendered: BOS once if the tokenizer writes one, and no EOS that it would append."""
    # templates often write the BOS themselves, so the tokenizer's own is added only where it is missing
    prefix = _prefix_ids(tokenizer)
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in _plain_ids(tokenizer, texts)]


def end_once(tokenizer: PreTrainedTokenizerBase, ids: list[int], end_id: int) -> list[int]:
    """`ids` ending in exactly one `end_id`: blank text and special tokens after it are dropped; appended if absent."""
    last = max((n for n, i in enumerate(ids) if i == end_id), default=None)
    if last is None or str(tokenizer.decode(ids[last + 1 :], skip_special_tokens=True)).strip():
        return [*ids, end_id]
    while last and ids[last - 1] == end_id:
        last -= 1
    return ids[: last + 1]


def encode_pairs(tokenizer: PreTrainedTokenizerBase, prompts: list[str], completions: list[str],
                 end_id: int) -> list[tuple[list[int], list[int]]]:  # fmt: skip
    """(prompt ids, completion ids) of each pair, tokenised together in two calls.

    The prompt's ids are those that generation would see, so a token never spans the boundary: where tokenising the
    whole text merges across it, the completion is tokenised on its own. Completions end with one `end_id`.
    """
    heads = encode(tokenizer, prompts)
    fulls = encode(tokenizer, [p + c for p, c in zip(prompts, completions, strict=True)])
    pairs = []
    for head, full, completion in zip(heads, fulls, completions, strict=True):
        # behind a prompt that ends in the unknown token equal beginnings prove nothing: a token merged across the
        # boundary would be unknown too
        hidden = head and head[-1] == tokenizer.unk_token_id
        split = full[: len(head)] == head and not hidden
        tail = full[len(head) :] if split else _plain_ids(tokenizer, [completion])[0]
        pairs.append((head, end_once(tokenizer, tail, end_id)))
    return pairs


def assistant_mask(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: list | None = None,
                   template_kwargs: dict | None = None) -> tuple[list[int], list[int]]:  # fmt: skip
    """Ids of the conversation and a 0/1 mask of equal length: 1 for each assistant's content and its turn end.

    Turns without content are not trained. Nothing follows the last 1. Raises InputError if there is no assistant turn,
    or the text before a turn differs from what generation would see.
    """
    end_id = turn_end_id(tokenizer, template_kwargs)
    # 1. where assistants wrote: from the template's own {% generation %} tags, otherwise from the rendered text
    template = tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else ""
    tagged = re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", template)
    ids, mask = (_tagged_mask if tagged else _rendered_mask)(tokenizer, messages, tools, template_kwargs, end_id)
    # 2. do not train a repeated end token, nor a turn that is an end token alone: they would teach empty answers
    once = [m and not (n and ids[n] == ids[n - 1] == end_id) for n, m in enumerate(mask)]
    mask = []
    for is_turn, pairs in groupby(zip(once, ids, strict=True), key=lambda pair: bool(pair[0])):
        turn = [i for _, i in pairs]
        wrote = is_turn and str(tokenizer.decode(turn, skip_special_tokens=True)).strip()
        mask += [int(bool(wrote))] * len(turn)
    if not any(mask):
        raise InputError("assistant_only_loss: no token of this conversation was written by an assistant")
    # 3. drop what follows the last trained token (a user's turn, a line break), and close a last turn left open
    size = len(mask) - mask[::-1].index(1)
    end = [end_id] if messages[-1]["role"] == "assistant" and ids[size - 1] != end_id else []
    # 4. BOS once: some templates write it, for others the tokenizer does
    prefix = _prefix_ids(tokenizer)
    prefix = [] if ids[: len(prefix)] == prefix else prefix
    return prefix + ids[:size] + end, [0] * len(prefix) + mask[:size] + [1] * len(end)


def _tagged_mask(tokenizer, messages, tools, template_kwargs, end_id) -> tuple[list[int], list[int]]:
    """Ids and mask from the template's generation tags."""
    render(tokenizer, messages, tools, template_kwargs)  # its errors are the clear ones
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    options |= {"tokenizer_kwargs": {"return_offsets_mapping": True}}
    encoded = tokenizer.apply_chat_template(messages, tools=tools, **options, **(template_kwargs or {}))
    ids, mask, offsets = list(encoded["input_ids"]), list(encoded["assistant_masks"]), encoded["offset_mapping"]
    for n in range(1, len(ids)):
        # the turn end right after a tagged span is trained too; and where the last character of a span is split into
        # several tokens, transformers marks only the first: mark the rest
        ends_turn = ids[n] == end_id and ids[n - 1] != end_id
        if mask[n - 1] and (ends_turn or offsets[n][0] < offsets[n - 1][1]):
            mask[n] = 1
    return ids, mask


def _rendered_mask(tokenizer, messages, tools, template_kwargs, end_id) -> tuple[list[int], list[int]]:
    """Ids and mask from the text: a turn begins where generation would have begun it, and ends with its turn end."""
    full = render(tokenizer, messages, tools, template_kwargs)
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    # from the last turn to the first, since each must end before `limit`, the character where the next one begins
    mask, limit = [0] * len(ids), len(full)
    for n in (n for n in reversed(range(len(messages))) if messages[n]["role"] == "assistant"):
        if n:
            start = render(tokenizer, messages[:n], tools, template_kwargs, add_generation_prompt=True)
            begin = len(full) - len(_after(start, full))
        else:
            # templates do not render an empty conversation: take the header that opens an answer to some other message
            probe = [{"role": "user", "content": "hello"}]
            asked = render(tokenizer, probe, None, template_kwargs)
            header = _after(asked, render(tokenizer, probe, None, template_kwargs, add_generation_prompt=True))
            begin = full.find(header) + len(header)
            if header not in full or not header:
                how = f"the assistant speaks first, and {header!r} does not open its turn"
                raise InputError(f"assistant_only_loss: {how}")
        # The content may hold the text of the turn end, so the end is looked for after the content, if the template has
        # kept that unchanged, else from the turn's start. Without an end, all that follows is trained in the last turn,
        # and the content alone in an earlier one.
        content = messages[n]["content"].strip()
        found = full.find(content, begin, limit)
        after = bisect_left(starts, found + len(content) if found >= 0 else begin)
        ends = (k + 1 for k in range(after, bisect_left(starts, limit)) if ids[k] == end_id)
        first, stop = bisect_left(starts, begin), next(ends, after if messages[n + 1 :] else len(ids))
        mask[first:stop], limit = [1] * (stop - first), begin
    return ids, mask
