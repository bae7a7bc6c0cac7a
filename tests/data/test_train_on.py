"""Which turns of a conversation are trained: all, the assistant's, its last, and none that is marked."""

from itertools import groupby

import pytest
from masks_for_tests import assistant_mask
from templates_for_tests import FAMILIES, family_tokenizer
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import TABLE, every_other

from hf_posttrain.data.chat import ChatTemplate
from hf_posttrain.data.json_rows import from_rows
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import config_class

TURNS = [{"role": role, "content": f"{role} {n} says"} for n in range(3) for role in ("user", "assistant")]


def prepared(family, messages, tmp_path, method="sft", **options):
    config = config_class(TABLE[method])(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    tokenizer = family_tokenizer(FAMILIES[family])
    rows = from_rows([{"messages": messages}] * 2)
    return prepare(rows, TABLE[method], tokenizer, config, "train")[0], tokenizer


def trained(family, messages, tmp_path, **options):
    """The text of each run of trained tokens."""
    row, tokenizer = prepared(family, messages, tmp_path, **options)
    ids, mask = row["completion_ids"], row["completion_mask"]
    runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for on, run in runs if on]


def marked(*numbers, **mark):
    return [turn | (mark if n in numbers else {}) for n, turn in enumerate(TURNS)]


@pytest.mark.parametrize("family", every_other(FAMILIES))
def test_the_last_turn_and_turns_without_weight(family, tmp_path):
    """Each is what training all of the assistant's turns has there, and no more."""
    whole = trained(family, TURNS, tmp_path, assistant_only_loss=True)
    assert trained(family, TURNS, tmp_path, train_on="assistant") == whole
    said = lambda runs, n: any(f"assistant {n} says" in run for run in runs)  # noqa: E731
    last = trained(family, TURNS, tmp_path, train_on="last")
    assert [said(last, n) for n in range(3)] == [False, False, True]
    assert last[-1] in whole[-1]
    for mark in ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}):
        found = trained(family, marked(3, **mark), tmp_path, train_on="assistant")
        assert [said(found, n) for n in range(3)] == [True, False, True]
    first = trained(family, marked(3, 5, weight=0), tmp_path, train_on="assistant")
    assert [said(first, n) for n in range(3)] == [True, False, False]
    assert trained(family, marked(1, 3, weight=1), tmp_path, train_on="assistant") == whole


@pytest.mark.parametrize("method", ["sft", "kd"])
def test_all_is_the_default_and_goes_with_no_marks(method, tmp_path):
    every = prepared("chatml", TURNS, tmp_path, method)[0]
    assert prepared("chatml", TURNS, tmp_path, method, train_on="all")[0] == every
    with pytest.raises(InputError, match="train_on: assistant`, which excludes it"):
        prepared("chatml", marked(1, weight=0), tmp_path, method)


def test_nothing_left_is_told(tmp_path):
    for name, value, expected in (
        ("weight", 0.5, "0 or 1"), ("weight", "0", "0 or 1"), ("train", "false", "true or false"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"train, row 0: .*a turn has {name}: {value!r}, expected {expected}"):
            prepared("chatml", marked(1, **{name: value}), tmp_path, train_on="assistant")
    with pytest.raises(InputError, match=r"train, row 0: .*all that it wrote is excluded .weight: 0"):
        prepared("chatml", marked(1, 3, 5, weight=0), tmp_path, train_on="assistant")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "user"}, "train_on='user' is not one of all, assistant, last"),
        ({"train_on": "all", "assistant_only_loss": True}, "train_on: all cannot be combined with assistant_only_loss"),
    ],
)
def test_contradictions_are_refused(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        prepared("chatml", TURNS, tmp_path, **options)


def test_a_content_that_begins_with_the_turn_end_is_refused(tmp_path):
    """The turn would end at once, and what follows be trained as if it were another turn."""
    family = next(name for name in FAMILIES if "<|im_end|>" in family_tokenizer(FAMILIES[name]).get_vocab())
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<|im_end|>It is 4."}]
    with pytest.raises(InputError, match="would not be trained"):
        prepared(family, turns, tmp_path, assistant_only_loss=True)


THINKING = (
    "{% for m in messages %}{% if m.role == 'other' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""The generation prompt begins the thought, and other roles are refused."""
ANSWERS = [{"role": "assistant", "content": f"<think>\nhm {n}\n</think>\n\n{n}"} for n in range(2)]


@pytest.mark.parametrize(
    ("turns", "chosen", "expected"),
    [([0, "u", 1], None, [0, 1]), (["u", 0, "u", 1], {3}, [1]), (["u", 0, "u", 1], {1}, [0]), ([0], None, [0]),
     (["u", 0, "u", 0], {3}, [0])],
)  # fmt: skip
def test_the_beginning_of_an_answer_may_stand_in_the_generation_prompt(turns, chosen, expected):
    """Of the first message too, and where only some answers are trained."""
    messages = [{"role": "user", "content": "2+2?"} if turn == "u" else ANSWERS[turn] for turn in turns]
    tokenizer = byte_tokenizer(THINKING)
    ids, mask = assistant_mask(ChatTemplate(tokenizer), messages, chosen)
    text = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert text == "".join(f"hm {n}\n</think>\n\n{n}<|im_end|>" for n in expected)


def test_a_token_that_spans_the_end_of_the_generation_prompt_is_left_out():
    """As of Gemma 3, which has tokens of several line breaks."""
    tokenizer = byte_tokenizer(THINKING)
    tokenizer.add_tokens(["\n\n"])
    assert "\n\n" in tokenizer.convert_ids_to_tokens(tokenizer("a\n\nb", add_special_tokens=False)["input_ids"])
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\n\nhm\n</think>4"}]
    ids, mask = assistant_mask(ChatTemplate(tokenizer), turns)
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]).startswith("hm\n</think>4<|im_end|>")
