"""What assistants thought, kept as the chat template reads it or dropped."""

import pytest
from templates_for_tests import FAMILIES, family_tokenizer
from test_train_on import prepared

from hf_posttrain.data.chat import reasoning_key
from hf_posttrain.errors import InputError

QUESTION, THOUGHT, ANSWER = {"role": "user", "content": "1 + 1?"}, "one and one", "it is 2"
KEYS = ("reasoning_content", "thinking", "reasoning")
INSIDE = {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
WAYS = [{"content": ANSWER, key: THOUGHT} for key in KEYS] + [INSIDE]


def text(family, answer, tmp_path, method="sft", **options):
    row, tokenizer = prepared(family, [QUESTION, {"role": "assistant"} | answer], tmp_path, method, **options)
    return tokenizer.decode(row["prompt_ids"] + row.get("completion_ids", []))


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_or_dropped_whatever_rows_call_it(family, tmp_path):
    plain = text(family, {"content": ANSWER}, tmp_path)
    for options in ({}, {"assistant_only_loss": True}):
        assert {text(family, way, tmp_path, reasoning="drop", **options) for way in WAYS} == {plain}
        assert text(family, {"content": ANSWER}, tmp_path, reasoning="keep", **options) == plain
        [kept] = {text(family, way, tmp_path, reasoning="keep", **options) for way in WAYS}
        assert kept.count(THOUGHT) == kept.count(ANSWER) == 1
        assert kept.index(THOUGHT) < kept.index(ANSWER)


@pytest.mark.parametrize(("family", "key"), [("chatml", None), ("qwen3", "reasoning_content"), ("gptoss", "thinking")])
def test_the_key_that_a_template_reads(family, key, tmp_path):
    assert reasoning_key(family_tokenizer(FAMILIES[family]).chat_template) == key
    kept = text(family, WAYS[0], tmp_path, reasoning="keep")
    assert ("<think>" in kept) is (family != "gptoss")
    if key:
        assert kept == text(family, {"content": ANSWER, key: THOUGHT}, tmp_path)
    else:
        assert kept == text(family, INSIDE, tmp_path)


def test_without_the_option_rows_are_as_they_were_written(tmp_path):
    assert THOUGHT not in text("chatml", WAYS[0], tmp_path)  # which `find_unread` tells
    assert "<think>" in text("gptoss", INSIDE, tmp_path)


def test_thoughts_of_users_stay_and_prompts_lose_theirs(tmp_path):
    turns = [{"role": "user", "content": "<think>mine</think> so?"}, {"role": "assistant"} | INSIDE, QUESTION]
    row, tokenizer = prepared("chatml", turns, tmp_path, "opd", reasoning="drop")
    found = tokenizer.decode(row["prompt_ids"])
    assert "mine" in found
    assert THOUGHT not in found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (INSIDE | {"thinking": "something else"}, r"message 1 \(assistant\) has two reasonings, 'one and one' and"),
        ({"content": ANSWER, "reasoning": [THOUGHT]}, r"message 1 \(assistant\): its reasoning is \['one and one'\]"),
    ],
)
def test_reasoning_that_is_no_text_or_two(answer, message, tmp_path):
    with pytest.raises(InputError, match=message):
        text("chatml", answer, tmp_path, reasoning="keep")


def test_another_word_is_refused(tmp_path):
    with pytest.raises(InputError, match="reasoning='yes' is not one of keep, drop"):
        text("chatml", INSIDE, tmp_path, reasoning="yes")
