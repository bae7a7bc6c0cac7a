"""What is told of a chat template: each family of templates has what is odd in it, and no more."""

import pytest
from templates_for_tests import FAMILIES, family_tokenizer

from hf_posttrain.data.template import switches
from hf_posttrain.data.template_report import traps

ODD = {
    "BOS": ("it writes the BOS", {"llama2", "llama3", "llama3.1", "mistral", "mistral7", "gemma", "gemma3", "gemma4",
                                  "deepseek3", "cohere", "cohere2", "olmo2", "lfm2"}),
    "eos": ("both end an answer", {"qwen2.5", "gemma", "gemma3", "gemma4", "phi3", "cohere2"}),
    "own text": ("a text of its own where no system turn is given: 'system\\nYou are helpful.'", {"qwen2.5"}),
    "no system": ("it refuses system turns", {"mistral", "gemma"}),
    "merged": ("a system turn becomes the beginning of the first question", {"llama2", "gemma3"}),
    "thinking": ("it reads reasoning as", {"qwen3", "gptoss"}),
    "dropped": ("it drops the reasoning of earlier turns", {"qwen3", "gptoss"}),
    "empty thought": ("it writes an empty thought", {"qwen3"}),
    "white space": ("it cuts white space around questions, answers", {"llama3", "llama3.1", "gemma", "gemma3"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def told():
    return {name: traps(family_tokenizer(family)) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("odd", ODD)
def test_each_oddity_is_told_of_the_families_that_have_it(told, odd):
    start, families = ODD[odd]
    assert {name for name, lines in told.items() if any(start in line for line in lines)} == families


def test_calls_that_a_family_does_not_write(told):
    found = {name for name, lines in told.items() if any("writes no calls" in line for line in lines)}
    assert found == {name for name, family in FAMILIES.items() if family.call is None}


def test_nothing_else_is_told(told):
    known = [start for start, _ in ODD.values()] + ["writes no calls", "it reads no reasoning"]
    assert not [line for lines in told.values() for line in lines if not any(start in line for start in known)]


def changed(template):
    tokenizer = family_tokenizer(FAMILIES["chatml"])
    tokenizer.chat_template = template
    return "\n".join(traps(tokenizer))


def test_a_template_that_opens_a_thought_writes_the_date_or_drops_turns():
    whole = FAMILIES["chatml"].template
    opened = whole.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert "begins within a thought" in changed(opened)
    assert "today's date, which is always 26 Jul 2024" in changed("{{ strftime_now('%d %b %Y') }}" + whole)
    assert "it drops system turns" in changed(whole.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}"))
    assert "does not write, a conversation" in changed("{{ messages[0].content }}")
    assert changed(None).startswith("it has none")


def test_switches_are_what_is_read_and_not_set():
    given = "{{ messages }}{{ bos_token }}{% set x = 1 %}{{ x }}"
    assert switches("{% if enable_thinking %}x{% endif %}" + given) == ["enable_thinking"]
    assert switches("{% if not day is defined %}{% set day = 'x' %}{% endif %}{{ day }}") == ["day"]
    assert switches("{% for m in messages %}{% if m %}{% set last = m %}{% endif %}{{ last }}{% endfor %}") == []
