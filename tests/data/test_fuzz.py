"""10,000 mutated rows through every method's data path: each is refused clearly, dropped and counted, or trained right.

CASES     a good row of each format of each method, in the layouts that readers, templates and masks tell apart
mutated   a row with one to three random changes: values of other kinds, control characters, broken nesting, huge things
expected  what a row must become, or that it must be refused: a second, plain reading of the README's table of formats,
          written without the library: a byte is a token, CHATML is a loop over messages

A row that the plain reading refuses must raise an InputError of one line that names row and column; one that it can
read must become exactly its prompt, its trained tokens and its state. Nothing else may happen to any of them.
"""

import copy
import difflib
import hashlib
import itertools
import json
import math
import random
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tokenizers_for_tests as tok
from rows_for_tests import methods_of
from test_data import source
from training_for_tests import quick

from hf_posttrain.data.encode import COMPLETION_TRUNCATED, NO_TARGET, PROMPT_TRUNCATED, VERSION
from hf_posttrain.data.formats import canonical_name, detect_format
from hf_posttrain.data.prepare import build_plan, prepare, tokenise
from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError, short_repr
from hf_posttrain.methods import METHODS

MUTATIONS = 10_000
"""Mutated rows in all, shared equally by CASES and by the methods of a kind; the seed of each is (case, number)."""
FILES = 300
"""Mutated rows that are also written to a file, and go through data.load and data.prepare."""
ROW = 7
END, START, PAD, BOS = "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<s>"

# ---- good rows

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}
MORE, LAST = {"role": "user", "content": "und 3+3?"}, {"role": "assistant", "content": "6 ✓"}
WRONG, SYSTEM = {"role": "assistant", "content": "5"}, {"role": "system", "content": "Short."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
CHAT = [SYSTEM, USER, REPLY, MORE, LAST]
SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, REPLY]
PLAIN = {"prompt": "2+2?\n", "completion": "It is 4."}
TURNS = {"prompt": [USER], "completion": [REPLY]}
PREFILLED = {"prompt": [USER, {"role": "assistant", "content": "It "}], "completion": [{**REPLY, "content": "is 4."}]}
PAIR = {"prompt": "2+2?\n", "chosen": "It is 4.", "rejected": "5"}
TURN_PAIR = {"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]}
IMPLICIT = {"chosen": "Q: 2+2?\nA: it is 4.", "rejected": "Q: 2+2?\nA: it was 5."}
TURN_IMPLICIT = {"chosen": [USER, REPLY], "rejected": [USER, WRONG]}
BESIDE = {"prompt": "2+2?", "chosen": [USER, REPLY], "rejected": [USER, WRONG]}
ALPACA = {"instruction": "Add.", "input": "2, 2"}
ONE_EACH = {"messages": [SYSTEM, USER], "chosen": REPLY, "rejected": [WRONG]}
SHARED_EACH = {"conversations": SHARED[:1], "chosen": {"from": "gpt", "value": "4"}, "rejected": "5"}
TOKENS = {"prompt_ids": [50, 43, 50], "completion_ids": [52, 46, 258]}
MASKED = {**TOKENS, "completion_mask": [1, 0, 1]}
LABELLED = {"input_ids": [50, 43, 50, 52, 258], "labels": [-100, -100, -100, 52, 258]}
WHOLE = {"input_ids": [50, 43, 50, 52, 258], "completion_mask": [0, 0, 0, 1, 1]}
TOKEN_PAIR = {"prompt_ids": [50, 43], "chosen_ids": [52, 258], "rejected_ids": [53, 54, 258]}
ASSISTANT, CUT, ALL = {"assistant_only_loss": True}, {"max_length": 12}, {"completion_only_loss": False}
OF_ANSWERS = [
    (PLAIN, {}), (PLAIN, CUT), (PLAIN, ALL), (PLAIN, {"apply_chat_template": True}), ({"text": "all of it"}, {}),
    ({"text": "all of it"}, {"max_length": 5}), (TURNS, {}), (TURNS, {"max_length": 40}), (TURNS, ASSISTANT),
    ({**TURNS, "tools": [TOOL]}, {}), ({**TURNS, "tools": json.dumps([TOOL])}, {}), (PREFILLED, {}),
    ({"messages": CHAT}, {}), ({"messages": CHAT}, ASSISTANT), ({"messages": CHAT}, {**ASSISTANT, "max_length": 60}),
    ({"conversations": SHARED}, {}), ({"conversations": SHARED}, ASSISTANT), ({"messages": PARTS}, ASSISTANT),
    ({"messages": CHAT, "tools": [TOOL]}, ASSISTANT), (TOKENS, {}), (MASKED, {}), (MASKED, {"max_length": 3}),
    (LABELLED, {}), (WHOLE, {}), ({**ALPACA, "output": "4"}, {}),
    ({**ALPACA, "output": "4"}, {"apply_chat_template": True}),
]  # fmt: skip
OF_PAIRS = [
    (PAIR, {}), (PAIR, CUT), (TURN_PAIR, {}), ({**TURN_PAIR, "tools": [TOOL]}, {}), (IMPLICIT, {}), (TURN_IMPLICIT, {}),
    (BESIDE, {}), ({**ALPACA, "chosen": "4", "rejected": "5"}, {}), (ONE_EACH, {}), (SHARED_EACH, {}),
]  # fmt: skip
ROWS = {  # of each kind of rows
    SUPERVISED: OF_ANSWERS,
    PREFERENCE: [*OF_PAIRS, (TOKEN_PAIR, {}), (TOKEN_PAIR, {"max_length": 3})],
    REWARD_PAIRS: [*OF_PAIRS, (TOKEN_PAIR | {"margin": 0.5}, {}), (PAIR | {"margin": 2}, {})],
    UNPAIRED: [
        *OF_PAIRS, ({**PLAIN, "label": True}, {}), ({**PLAIN, "label": False}, CUT), ({**TURNS, "label": 1}, {}),
        ({**TOKENS, "label": 0}, {}), ({**ALPACA, "output": "4", "label": True}, {}),
        ({"messages": CHAT, "label": False}, {}), ({"conversations": SHARED, "label": 1}, {}),
    ],
    PROMPTS: [
        ({"prompt": "2+2?"}, {}), ({"prompt": [USER]}, {}), (PLAIN, {"max_length": 12, "max_completion_length": 6}),
        (TURNS, {}), ({"messages": CHAT}, {}), ({"conversations": SHARED}, {}), ({"prompt_ids": [50, 43]}, {}),
        (TOKENS, {}), ({**ALPACA, "output": "4"}, {}), ({**PLAIN, "label": False}, {}),
        ({"prompt": [USER], "completion": "4"}, {}),
    ],
}  # fmt: skip
CASES = [(kind, row, options) for kind, rows in ROWS.items() for row, options in rows]

# ---- mutations


def deep():
    """A list nested beyond what Python recurses into."""
    value: list = []
    for _ in range(3000):
        value = [value]
    return value


STRANGE = [
    None, True, False, 0, 1, -1, 258, 259, 2**31, 2**63, 10**40, 0.5, 1.0, math.nan, math.inf, b"\xff\x00",
    "", " ", "\n\t ", "0", "yes", "null", "NaN", "[]", "{}", "x" * 30_000, "\x00\x01\x1b[31m", "\ud83d", "a\udc00b",
    "😀👩‍👩‍👧 é", "\u202eabc\u200b", END, f"a{END}", f"a{END}\n", f"{END}b", f"{START}user\n", PAD, BOS,
    f"{BOS}a</s>", "</s>", "[" * 3000, "[1]", '{"a": 1}', json.dumps([TOOL]), "9" * 5000, "user", "assistant", "human",
    "gpt", "User", "wizard", "tool",
    [], {}, [[]], [None], [{}], [""], [1.5], ["1"], [-1], [259], [2**40], [True], deep, lambda: [deep()],
    lambda: {"role": deep()}, {"role": "user"}, {"a": {"b": [1]}}, [USER], [REPLY], [USER, REPLY], USER,
    {"type": "image", "url": "x"}, [{"type": "text", "text": "hi"}], [{"type": "image"}], [{"type": "text"}],
]  # fmt: skip
KEYS = [
    "role", "content", "from", "value", "tool_calls", "name", "weight", "extra", "tools", "completion_mask", "labels",
    "text",
]  # fmt: skip


def strange(draw):
    value = draw.choice(STRANGE)
    return value() if callable(value) else copy.deepcopy(value)


def places(value, path=()):
    """The path of every value inside `value`, not below eight steps."""
    yield path
    if len(path) == 8:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def insert(holder, key, draw):
    """Something strange inside a string, an item of a list once more, a strange key of a dictionary, another number."""
    value = holder[key]
    if isinstance(value, str):
        at, text = draw.randrange(len(value) + 1), draw.choice([s for s in STRANGE if isinstance(s, str)])
        holder[key] = value[:at] + text + value[at:]
    elif isinstance(value, list):
        value.insert(draw.randrange(len(value) + 1), draw.choice(value or [None]))
    elif isinstance(value, dict):
        value[draw.choice(KEYS)] = strange(draw)
    elif type(value) is int:
        holder[key] = draw.choice([0, 1, 2, 97, 258, 259, -100])


def change(holder, key, draw):
    """One random change of `holder[key]`, half of them gentle."""
    value, what = holder[key], draw.randrange(12)
    if what < 6:
        insert(holder, key, draw)
    elif what == 6 and isinstance(holder, dict):
        holder[key] = None  # as Arrow has a key that only other rows have
    elif what == 7:
        del holder[key]
    elif what == 8:
        holder[key] = draw.choice([[value], {"value": value}])
    elif what == 9 and isinstance(value, list):
        draw.shuffle(value)
    else:
        holder[key] = strange(draw)


def mutated(row, draw):
    """A copy of `row` with one to three changes; a column that is gone is None, as where other rows have it."""
    row = copy.deepcopy(row)
    columns = list(row)
    if draw.random() < 0.05:
        row[draw.choice(KEYS)] = strange(draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        inside = [path for path in places(row) if path]
        if not inside:
            break
        *path, key = draw.choice(inside)
        holder = row
        for step in path:
            holder = holder[step]
        change(holder, key, draw)
    return {**dict.fromkeys(columns), **row}


# ---- the plain reading


class Refused(Exception):
    """The row is not what its format promises."""


def need(condition):
    if not condition:
        raise Refused


class Plain(NamedTuple):
    """A tokenizer and its template, as the plain reading has them."""

    tokenizer: Any
    special: dict[str, int]
    text_end: str = END
    begin: str = ""
    header: str = START + "{}\n"
    close: str = END + "\n"
    trims: bool = False
    writes_tools: bool = False

    def ids(self, text):
        text = text if text.startswith(self.begin) else self.begin + text
        return self.raw_ids(text)

    def raw_ids(self, text):
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [i for piece in pieces for i in ([self.special[piece]] if piece in self.special else piece.encode())]

    def ended(self, text, end):
        """Ids of a completion with exactly one end: what is blank or special behind an end is none of it."""
        specials = "|".join(map(re.escape, self.special))
        closed = re.sub(rf"({re.escape(end)})+(?!{re.escape(end)})((?!{re.escape(end)})({specials}|\s))*\Z", "", text)
        return [*self.raw_ids(closed), self.special[end]]

    def said(self, turn):
        return turn["content"].strip() if self.trims else turn["content"]

    def render(self, turns):
        return self.begin + "".join(self.header.format(t["role"]) + self.said(t) + self.close for t in turns)

    def opened(self, turns):
        """What generation starts from: an assistant turn at the end stays open."""
        if turns[-1]["role"] != "assistant":
            return self.render(turns) + self.header.format("assistant")
        text = self.render(turns).removesuffix(self.close)
        return text.rstrip() if self.trims else text


def string(value):
    need(isinstance(value, str) and not re.search("[\ud800-\udfff]", value))
    return value


def message(raw):
    need(isinstance(raw, dict))
    raw = {key: value for key, value in raw.items() if value is not None}
    raw = {key: value if key == "content" else copy.deepcopy(value) for key, value in raw.items()}  # RecursionError
    if "from" in raw and "role" not in raw:
        need(isinstance(raw["from"], str))
        known = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
        known |= {"tool": "tool"}
        need(raw["from"] in known)
        raw = {**raw, "content": raw.get("content", raw.get("value")), "role": known[raw["from"]]}
    role, calls, content = string(raw.get("role")), raw.get("tool_calls"), raw.get("content")
    ours = {"system", "user", "assistant", "tool"}
    others = [*ours, "human", "gpt", "chatgpt", "model", "bot"]
    need(role.strip() and (role in ours or not difflib.get_close_matches(role.strip().lower(), others, 1, 0.75)))
    need(calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)))
    functions = [call.get("function", call) for call in calls or []]
    need(all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions))
    content = "" if content is None and calls else content
    if isinstance(content, list):
        need(all(isinstance(part, dict) and part.get("type") == "text" for part in content))
        content = "".join(string(part.get("text")) for part in content)
    alongside = {key: value for key, value in raw.items() if key != "value"}
    return {**alongside, "role": role, "content": string(content), "calls": bool(calls)}


def messages(raw):
    need(isinstance(raw, list) and raw)
    return [message(each) for each in raw]


def tools_text(row):
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Refused from None
    if not tools:
        return ""
    need(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    try:
        return f"{START}system\nTools: {string(json.dumps(tools, ensure_ascii=False))}{END}\n"
    except (TypeError, ValueError):
        raise Refused from None


def answer(value):
    """A completion: a string, or messages that end with an assistant's."""
    value = string(value) if isinstance(value, str) else messages(value)
    need(isinstance(value, str) or value[-1]["role"] == "assistant")
    return value


def blank(value):
    """Is an answer empty, which drops its row?"""
    return not value.strip() if isinstance(value, str) else not (value[-1]["content"].strip() or value[-1].get("calls"))


def single(value):
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, dict) else value


def joined(prompt, completion):
    if (prompt[-1]["role"], completion[0]["role"]) != ("assistant", "assistant"):
        return prompt + completion
    merged = {**completion[0], "content": prompt[-1]["content"] + completion[0]["content"]}
    return [*prompt[:-1], merged, *completion[1:]]


def prompt_and_answers(row, columns):
    """(prompt, answers): strings or lists of messages, one kind."""
    answers = [answer(row[column]) for column in columns]
    prompt = row.get("prompt") if "prompt" in row else None
    prompt = string(prompt) if isinstance(prompt, str) else prompt
    whole = isinstance(prompt, str) and any(isinstance(a, list) and a[0]["role"] != "assistant" for a in answers)
    if "chosen" in columns and (prompt is None or whole):
        need(isinstance(answers[0], type(answers[1])))
        if isinstance(answers[0], str) and any(map(blank, answers)):
            return "", ["", ""]
        alike = [a == b for a, b in zip(*answers, strict=False)]
        n = min(([*alike, False]).index(False), *(len(each) - 1 for each in answers))
        if isinstance(answers[0], str):
            while n and answers[0][n - 1] != "\n" and any(each[n] != " " for each in answers):
                n -= 1
            need(n)
        else:
            need(n)
            if isinstance(prompt, str):
                said, asked = " ".join(turn["content"] for turn in answers[0][:n]).split(), prompt.split()
                need(" ".join(asked) in " ".join(said) or " ".join(said) in " ".join(asked))
        return answers[0][:n], [each[n:] for each in answers]
    return string(prompt) if isinstance(prompt, str) else messages(prompt), answers


def numbers(value, size):
    need(isinstance(value, list) and all(type(i) is int and 0 <= i < size for i in value))
    return value


def mask_of(value, ids):
    need(isinstance(value, list) and len(value) == len(ids) and all(m in (0, 1) for m in value))
    return [int(m) for m in value]


def assistants(plain, turns, tools, context):
    """Ids and mask of a conversation up to the last that an assistant wrote; of the first `context` ids none counts."""
    ids = plain.raw_ids(plain.begin + tools)
    mask, special = [0] * len(ids), "|".join(map(re.escape, plain.special))
    for turn in turns:
        head, rest = plain.raw_ids(plain.header.format(turn["role"])), plain.raw_ids(plain.close.removeprefix(END))
        ids, mask = ids + head, mask + [0] * len(head)
        parts = re.findall(f".*?{re.escape(END)}", plain.said(turn) + END, re.DOTALL)  # an end may stand in it
        words = [re.sub(special, "", part).strip() for part in parts]
        need(turn["role"] != "assistant" or not any(words) or all(words[:-1]))  # nothing of it is left out
        for part, own in zip(parts, words, strict=True):
            text = plain.raw_ids(part)
            ids, mask = ids + text, mask + [int(turn["role"] == "assistant" and own != "")] * len(text)
        ids, mask = ids + rest, mask + [0] * len(rest)
    mask = [m * (n >= context) for n, m in enumerate(mask)]
    need(any(mask))
    size = len(mask) - mask[::-1].index(1)
    return ids[:size], mask[:size]


def token_row(row, size, kind):
    """(prompt ids, [ids], mask) of a tokenised row."""
    if "input_ids" in row:
        ids, mask = numbers(row["input_ids"], size), row.get("completion_mask")
        if (labels := row.get("labels")) is not None:
            need(isinstance(labels, list) and len(labels) == len(ids))
            need(all(label in (-100, i) for label, i in zip(labels, ids, strict=True)))
            pairs = zip(labels, mask_of(mask, ids) if mask is not None else [1] * len(ids), strict=True)
            mask = [int(label != -100 and trained) for label, trained in pairs]
        return [], [ids], [1] * len(ids) if mask is None else mask_of(mask, ids)
    names = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in row]
    names = [name for name in names if row[name] or not kind.sampled]
    branches, mask = [numbers(row[name], size) for name in names], row.get("completion_mask")
    mask = mask_of(mask, branches[0]) if mask is not None and names == ["completion_ids"] else None
    return numbers(row["prompt_ids"], size), branches, mask


def text_row(plain, row, kind, form, options):
    """(prompt ids, [ids], mask) of a row of text or messages; of an empty answer the ids are []."""
    if form == "text":
        if blank(string(row["text"])):
            return [], [[]], None
        return plain.ids(""), [plain.ended(row["text"].removeprefix(plain.begin), plain.text_end)], None
    tools = tools_text(row) * plain.writes_tools

    def with_tools(text):
        return plain.begin + tools + text.removeprefix(plain.begin)

    first = form.split(" + ")[0]
    if first == "instruction":
        parts = [string(row["instruction"]), string("" if row.get("input") is None else row["input"])]
        row = {**row, "prompt": "\n".join(part for part in parts if part)}
    if first != form and first == "messages":
        turns, pair = messages(row[first]), [row.get("chosen"), row.get("rejected")]
        begins = [messages(single(each))[0] for each in pair if each is not None and not isinstance(each, str)]
        if "label" in form:
            need(len(turns) > 1 and turns[-1]["role"] == "assistant")
            prompt, answers = turns[:-1], [turns[-1:]]
        elif any(turn["role"] != "assistant" or turn == turns[0] for turn in begins):
            whole = {name: single(row[name]) for name in ("chosen", "rejected")}
            prompt, answers = prompt_and_answers(whole, [*whole])
        else:
            need(turns[-1]["role"] != "assistant")
            prompt, answers = turns, [answer(single(each)) for each in pair]
    elif form == "messages":
        turns = messages(row[form])
        if not kind.sampled:
            said = [not blank([turn]) for turn in turns if turn["role"] == "assistant"]
            need(said)
            trained = [turn for turn in turns if turn["role"] == "assistant" or not options.get("assistant_only_loss")]
            need(all(turn.get("weight") != 0 for turn in trained) and all(map(whole_weight, turns)))
            if not any(said):
                return [], [[]], None
            if options.get("assistant_only_loss"):
                ids, mask = assistants(plain, turns, tools, 0)
                return [], [ids], mask
            return plain.ids(""), [plain.ended(with_tools(plain.render(turns)).removeprefix(plain.begin), END)], None
        answered = len(turns) > 1 and turns[-1]["role"] == "assistant"
        prompt, answers = (turns[:-1], [turns[-1:]]) if answered else (turns, [])
    else:
        answering = [c for c in form.split(" + ") if c not in ("prompt", "instruction", "label")]
        prompt, answers = prompt_and_answers(row, answering)
    begins_as_text = isinstance(prompt, str)
    if options.get("apply_chat_template") and begins_as_text:
        prompt = [{"role": "user", "content": prompt}]
    if (options.get("apply_chat_template") and begins_as_text) or (kind.sampled and isinstance(prompt, list)):
        answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    need(all(isinstance(each, type(prompt)) for each in answers))
    if isinstance(prompt, str):
        need(not tools_text(row))
        need(not options.get("assistant_only_loss"))
        if any(map(blank, answers)) and not (kind.labeled and len(answers) == 2):
            return [], [[] for _ in answers], None
        if not prompt:  # the BOS that an answer to nothing begins with is that of the row
            answers = [each.removeprefix(plain.begin) for each in answers]
        return plain.ids(prompt), [[] if blank(each) else plain.ended(each, plain.text_end) for each in answers], None
    need(all(each[0]["role"] == "assistant" for each in answers))
    need(kind.sampled or all(turn.get("weight") != 0 and whole_weight(turn) for each in answers for turn in each))
    if (answers and all(map(blank, answers))) or (any(map(blank, answers)) and not kind.labeled):
        return [], [[] for _ in answers], None
    start = with_tools(plain.opened(prompt))
    if options.get("assistant_only_loss"):
        ids, mask = assistants(plain, joined(prompt, answers[0]), tools, len(plain.ids(start)))
        return [], [ids], mask
    fulls = [with_tools(plain.render(joined(prompt, each))) for each in answers]
    rests = [full[len(start) :] for full in fulls]
    ended = [plain.raw_ids(rest) if kind.classified else plain.ended(rest, END) for rest in rests]
    return plain.ids(start), [[] if blank(a) else ids for a, ids in zip(answers, ended, strict=True)], None


def expected(plain, kind, form, row, options):
    """[(prompt ids, [branch ids], mask, label)] before they are cut, None for an example with an empty answer. Raises
    Refused, or RecursionError."""
    need(all(row.get(column) is not None for column in form.split(" + ")))
    label = None
    if form.endswith(" + label"):
        need(type(row["label"]) in (bool, int, float, str))
        text = str(row["label"]).lower()
        need(text in ("true", "1", "1.0", "false", "0", "0.0"))
        label = text in ("true", "1", "1.0")
    if kind.classified and (margin := row.get("margin")) is not None:
        need(type(margin) in (int, float) and math.isfinite(margin))
    tokenised = "_ids" in form
    size = max(plain.special.values()) + 1
    prompt, branches, mask = token_row(row, size, kind) if tokenised else text_row(plain, row, kind, form, options)
    if kind.sampled and row.get("label") is not None:
        said = str(row["label"]).lower()
        need(said in ("true", "1", "1.0", "false", "0", "0.0"))
        branches, mask = (branches, mask) if said in ("true", "1", "1.0") else ([], None)  # not the right answer
    ends = [] if tokenised else [[plain.special[end]] for end in (END, plain.text_end)]
    branches = [[] if branch in ends else branch for branch in branches]
    if kind.labeled and len(branches) == 2:
        need(prompt or not any(branches))
        examples = [(prompt, [branch], None, label) for branch, label in zip(branches, (True, False), strict=True)]
        return [example if example[1][0] else None for example in examples]
    if not all(branches):
        return [None]
    if kind.masked:
        every = options.get("completion_only_loss") is False
        ids, mask = prompt + branches[0], [int(every)] * len(prompt) + (mask or [1] * len(branches[0]))
        n = len(prompt) if prompt and not every else max(1, mask.index(1) if 1 in mask else 1)
        return [(ids[:n], [ids[n:]], mask[n:], None)]
    need(prompt)
    return [(prompt, branches, None, label)]


def last(ids, size, bos):
    while len(ids) > size:
        ids = ids[:1] + ids[2:] if ids[0] == bos and size > 1 else ids[1:]
    return ids


def cut(prompt, branches, mask, label, kind, options, bos=None):
    """(prompt, branches, mask, label, bits) as max_length leaves them."""
    branches = branches or [[]]
    limit = options.get("max_length")
    if limit and kind.sampled:
        kept, ends = last(prompt, limit - options["max_completion_length"], bos), branches
    elif limit:
        kept = last(prompt, max(1, limit // 2, limit - max(map(len, branches))), bos)
        ends = [branch[: limit - len(kept)] for branch in branches]
    else:
        kept, ends = prompt, branches
    mask = None if mask is None else mask[: len(ends[0])]
    lost = not kind.sampled and not (all(ends) and (mask is None or any(mask)))
    bits = PROMPT_TRUNCATED * (len(kept) < len(prompt)) + COMPLETION_TRUNCATED * (ends != branches) + NO_TARGET * lost
    return kept, ends, mask, label, bits


# ---- the tests


CHATML = Plain(tok.byte_tokenizer(), {PAD: 256, START: 257, END: 258}, writes_tools=True)
TAGGED = CHATML._replace(tokenizer=tok.byte_tokenizer(tok.CHATML_GENERATION), writes_tools=False)
LLAMA_SPECIAL = {BOS: 256, "</s>": 257, START: 258, END: 259}
LLAMA = Plain(tok.bos_tokenizer(), LLAMA_SPECIAL, "</s>", BOS, START + "{}\n\n", END, trims=True)
TOKENIZERS = (CHATML, LLAMA, TAGGED)


def settings(options):
    known = {"max_length": None, "dataset_num_proc": None, "chat_template_kwargs": None}
    return SimpleNamespace(**(known | options))


def whole_weight(turn):
    return turn.get("weight") is None or turn["weight"] in (0, 1)


def check_message(error, form, where=f"fuzz, row {ROW}: "):
    text = str(error)
    text.encode()
    assert text.startswith(where), text
    assert "\n" not in text, text
    assert len(text) < 600, text
    about = [*form.split(" + "), "input", "tools", "label", "margin", "completion_", "chat template", "rendered"]
    about += ["assistant_only_loss"]
    assert any(name in text for name in about), text


def as_trained(out):
    """[(prompt, branches, mask, label, bits)] from the columns that `tokenise` gives."""
    names = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in out]
    masks, labels = (out.get(name, [None] * len(out["row"])) for name in ("completion_mask", "label"))
    rows = zip(out["prompt_ids"], zip(*(out[n] for n in names), strict=True), masks, labels, out["state"], strict=True)
    return [(prompt, list(branches), mask, label, bits & 7) for prompt, branches, mask, label, bits in rows]


def strip_end(ids, pad):
    """The ids without the padding at their end."""
    return strip_end(ids[:-1], pad) if ids and ids[-1] == pad else ids


def outcome(plain, method, row, options, form):
    """What became of the row: "refused", "dropped" or "trained". Fails where it is not what the plain reading says."""
    kind = METHODS[method].rows
    plan = build_plan(form, METHODS[method], plain.tokenizer, settings(options), "fuzz")
    row = {canonical_name(column, row): value for column, value in row.items()}
    batch = {column: [value] for column, value in row.items()}
    try:
        whole = expected(plain, kind, form, row, options)
    except (Refused, RecursionError):
        with pytest.raises(InputError) as raised:
            tokenise(batch, [ROW], plain.tokenizer, plan)
        check_message(raised.value, form)
        return "refused"
    if kind.classified and "_ids" not in form:  # transformers reads the score before padding, also if that is the EOS
        pad = plain.tokenizer.pad_token_id
        whole = [e and (e[0], [strip_end(ids, pad) for ids in e[1]], *e[2:]) for e in whole]
    examples = [example and cut(*example, kind, options, plain.tokenizer.bos_token_id) for example in whole]
    made = as_trained(tokenise(batch, [ROW], plain.tokenizer, plan))
    lost = [example is None and bits & NO_TARGET for example, (*_, bits) in zip(examples, made, strict=True)]
    assert [None if gone else example for gone, example in zip(lost, made, strict=True)] == examples
    return "dropped" if all(example is None or example[-1] & NO_TARGET for example in examples) else "trained"


def form_of(kind, row):
    return detect_format([canonical_name(column, row) for column in row], SimpleNamespace(name="any", rows=kind))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_good_rows_are_trained(case):
    kind, row, options = CASES[case]
    for method in methods_of(kind):
        assert outcome(CHATML, method, row, options, form_of(kind, row)) == "trained"


@pytest.mark.parametrize("method", quick("dpo", "kd", among=METHODS))
def test_mutated_rows(method):
    """MUTATIONS of them in all methods together: those of a kind take turns, so that a new one costs no time."""
    outcomes = {"refused": 0, "dropped": 0, "trained": 0}
    sharing = methods_of(METHODS[method].rows)
    for case, (kind, row, options) in enumerate(CASES):
        numbers = range(case, MUTATIONS, len(CASES)) if kind == METHODS[method].rows else ()
        for n in numbers[sharing.index(method) :: len(sharing)]:
            changed = mutated(row, random.Random(f"{case} {n}"))
            try:
                outcomes[outcome(TOKENIZERS[n % 3], method, changed, options, form_of(kind, row))] += 1
            except Exception as error:
                error.add_note(f"{method}, {options}, mutation {n}: {short_repr(changed)}")
                raise
    assert min(outcomes["refused"], outcomes["trained"]) > sum(outcomes.values()) / 4  # both sides are looked at


def test_all_kinds_and_formats_are_mutated():
    assert sum(len(range(case, MUTATIONS, len(CASES))) for case in range(len(CASES))) == MUTATIONS == 10_000
    assert {method.rows for method in METHODS.values()} == {*ROWS}
    for kind in ROWS:
        assert {form_of(of, row) for of, row, _ in CASES if of == kind} == {*kind.formats}


IDS = (13, "690a872ffa0c8395")
"""encode.VERSION, and the digest of what it makes of all ROWS."""


def test_other_ids_have_another_version():
    """Where it fails on purpose, raise VERSION, or users train on rows that older code has cached; set IDS to both."""
    digest = hashlib.sha256()
    tokenizers = [plain.tokenizer for plain in TOKENIZERS] + [tok.byte_tokenizer(tok.QWEN3), tok.base_tokenizer()]
    for (kind, rows), tokenizer in itertools.product(ROWS.items(), tokenizers):
        for row, options in rows:
            reader = SimpleNamespace(name="any", rows=kind)
            plan = build_plan(form_of(kind, row), reader, tokenizer, settings(options), "fuzz")
            batch = {canonical_name(column, row): [value] for column, value in row.items()}
            made = tokenise(batch, [ROW], tokenizer, plan)
            digest.update(json.dumps(made, sort_keys=True).encode())
    assert (VERSION, digest.hexdigest()[:16]) == IDS


def prepared_file(path, method, options):
    """The examples of a file, or the message that refuses it."""
    try:
        rows = prepare(load(source(path), "fuzz"), METHODS[method], CHATML.tokenizer, settings(options), "fuzz")
    except InputError as error:
        return str(error)
    columns = rows.to_dict() | {"row": rows["index"], "state": [0] * len(rows)}
    return [example[:4] for example in as_trained(columns)]


def wanted_of(rows, kind, form, options):
    """The examples that the plain reading keeps of all rows; None where it refuses one."""
    try:
        rows = [{canonical_name(column, row): value for column, value in row.items()} for row in rows]
        whole = [example for row in rows for example in expected(CHATML, kind, form, row, options)]
    except (Refused, RecursionError):
        return None
    examples = [cut(*example, kind, options) for example in whole if example]
    return [example[:4] for example in examples if not example[4] & NO_TARGET]


def test_mutated_files(tmp_path):
    """A good row and a mutated one, in FILES files: the same outcomes. A row that could be read may be refused since it
    makes a column of two kinds, and a file whose rows `datasets` cannot read is named, not the row."""
    outcomes = {"refused": 0, "trained": 0, "of two kinds": 0}
    for n in range(FILES):
        kind, row, options = CASES[n % len(CASES)]
        sharing = methods_of(kind)
        method = sharing[n // len(CASES) % len(sharing)]
        draw, form, lines = random.Random(f"file {n}"), form_of(kind, row), []
        while not lines:
            changed = mutated(row, draw)
            with suppress(TypeError, ValueError, RecursionError):  # JSON has no bytes, NaN, and not any depth
                lines = [json.dumps(row), json.dumps(changed, allow_nan=False)]
        path = tmp_path / f"{n}.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        wanted = wanted_of((row, changed), kind, form, options)
        found = prepared_file(path, method, options)
        if isinstance(found, str):
            assert re.fullmatch(r"fuzz(, row [01]|: column '\w+'|: cannot read \S+): [^\n]+", found)
            outcomes["refused" if wanted is None else "of two kinds"] += 1
        else:
            assert found == wanted, lines[1]
            outcomes["trained"] += 1
    assert sum(outcomes.values()) == FILES
    assert min(outcomes["refused"], outcomes["trained"]) > FILES / 4 > 4 * outcomes["of two kinds"]
