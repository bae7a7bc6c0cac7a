"""What assistants thought, kept as the chat template reads it or dropped."""

import datasets
import pytest
from templates_for_tests import FAMILIES, family_tokenizer
from test_train_on import prepared
from tokenizers_for_tests import byte_tokenizer, merging_tokenizer
from training_for_tests import every_other

from hf_posttrain import SFTConfig
from hf_posttrain.data.chat import reasoning_key
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS

QUESTION, THOUGHT, ANSWER = {"role": "user", "content": "1 + 1?"}, "one and one", "it is 2"
KEYS = ("reasoning_content", "thinking", "reasoning")
INSIDE = {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
WAYS = [{"content": ANSWER, key: THOUGHT} for key in KEYS] + [INSIDE]


def text(family, answer, tmp_path, method="sft", **options):
    row, tokenizer = prepared(family, [QUESTION, {"role": "assistant"} | answer], tmp_path, method, **options)
    return tokenizer.decode(row["prompt_ids"] + row.get("completion_ids", []))


@pytest.mark.parametrize("family", every_other(FAMILIES))
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


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
THINKING = (
    HEAD + "{% if m.role == 'assistant' %}BEGIN{% set c = m.content %}"
    "{% set r = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last or r %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}<|im_end|>END"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)
TAGS = {"tags": ("{% generation %}", "{% endgeneration %}"), "no tags": ("", "")}
OPENED = {"nothing": "", "a thought": "<think>\n", "an empty thought": "<think>\n\n</think>\n\n"}
QUESTION = {"role": "user", "content": "q"}
ANSWERS = {
    "plain": {"content": "4"}, "tagged": {"content": "<think>\nhm\n</think>\n\n4"},
    "by key": {"content": "4", "reasoning_content": "hm"},
    "thought and answer alike": {"content": "<think>\n4\n</think>\n\n4"},
}  # fmt: skip


def made(rows, tokenizer, config):
    return prepare(datasets.Dataset.from_list(rows), METHODS["sft"], tokenizer, config)


@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("tags", TAGS)
def test_trained_is_what_follows_the_generation_prompt(tags, opened, answer, make):
    """Whatever the tags are around, and whether or not the prompt begins with what the content holds."""
    begin, end = TAGS[tags]
    template = THINKING.replace("BEGIN", begin).replace("END", end).replace("OPENED", OPENED[opened])
    tokenizer, turns = make(template), [QUESTION, {"role": "assistant"} | ANSWERS[answer]]
    full = tokenizer.apply_chat_template(turns, tokenize=False)
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    config = SFTConfig(output_dir="o", use_cpu=True, assistant_only_loss=True)
    if not full.startswith(prompt):  # the thought that a server would not write
        with pytest.raises(InputError, match="does not begin with its rendered prompt"):
            made([{"messages": turns}], tokenizer, config)
        return
    [row] = made([{"messages": turns}], tokenizer, config)
    trained = [token for token, on in zip(row["completion_ids"], row["completion_mask"], strict=True) if on]
    assert tokenizer.decode(trained) == full[len(prompt) :].rstrip("\n")
    pair = [{"prompt": turns[:1], "completion": turns[1:]}]
    [as_pair] = made(pair, tokenizer, SFTConfig(output_dir="o", use_cpu=True))
    assert [*row["prompt_ids"], *row["completion_ids"]] == [*as_pair["prompt_ids"], *as_pair["completion_ids"]]


@pytest.mark.parametrize("tags", TAGS)
def test_an_earlier_turn_that_a_prompt_would_write_otherwise_is_refused(tags):
    begin, end = TAGS[tags]
    template = THINKING.replace("BEGIN", begin).replace("END", end).replace("OPENED", OPENED["a thought"])
    turns = [QUESTION, {"role": "assistant", "content": "1"}, QUESTION, {"role": "assistant", "content": "2"}]
    config = SFTConfig(output_dir="o", use_cpu=True, assistant_only_loss=True)
    with pytest.raises(InputError, match="does not begin with its rendered prompt"):
        made([{"messages": turns}], byte_tokenizer(template), config)
