"""What is told of a chat template: each family of templates has what is odd in it, and no more."""

import pytest
from templates_for_tests import FAMILIES, family_tokenizer

from hf_posttrain.data.template import find_template_options, first_referenced_key
from hf_posttrain.data.template_report import describe_template

ODD = {
    "BOS": ("it writes the BOS token", {"llama2", "llama3", "llama3.1", "mistral", "mistral7", "gemma", "gemma3",
                                        "gemma4", "deepseek3", "cohere", "cohere2", "olmo2", "lfm2"}),
    "eos": ("Both end an answer", {"qwen2.5", "gemma", "gemma3", "gemma4", "phi3", "cohere2"}),
    "own text": ("a default text where there is no system turn: 'system\\nYou are helpful.'", {"qwen2.5"}),
    "no system": ("it rejects system turns", {"mistral", "gemma"}),
    "merged": ("it writes a system turn at the beginning of the first user turn", {"llama2", "gemma3"}),
    "thinking": ("it reads reasoning from the key", {"qwen3", "gptoss"}),
    "dropped": ("it drops the reasoning of earlier turns", {"qwen3", "gptoss"}),
    "empty thought": ("it writes an empty thought", {"qwen3"}),
    "white space": ("it strips white space around questions, answers", {"llama3", "llama3.1", "gemma", "gemma3"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def told():
    return {name: describe_template(family_tokenizer(family)) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("odd", ODD)
def test_each_oddity_is_told_of_the_families_that_have_it(told, odd):
    start, families = ODD[odd]
    assert {name for name, lines in told.items() if any(start in line for line in lines)} == families


def test_calls_that_a_family_does_not_write(told):
    found = {name for name, lines in told.items() if any("writes no tool calls" in line for line in lines)}
    assert found == {name for name, family in FAMILIES.items() if family.call is None}


def test_nothing_else_is_told(told):
    known = [start for start, _ in ODD.values()] + ["writes no tool calls", "it reads no reasoning"]
    assert not [line for lines in told.values() for line in lines if not any(start in line for start in known)]


def changed(template):
    tokenizer = family_tokenizer(FAMILIES["chatml"])
    tokenizer.chat_template = template
    return "\n".join(describe_template(tokenizer))


def test_a_template_that_opens_a_thought_writes_the_date_or_drops_turns():
    whole = FAMILIES["chatml"].template
    opened = whole.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert "begins within a thought" in changed(opened)
    assert "today's date, which is always 26 Jul 2024" in changed("{{ strftime_now('%d %b %Y') }}" + whole)
    assert "it drops system turns" in changed(whole.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}"))
    assert "does not write, a conversation" in changed("{{ messages[0].content }}")
    assert changed(None).startswith("there is none")


def test_a_key_is_read_as_attribute_subscript_or_by_get_and_not_compared():
    names = ["thinking", "reasoning"]
    for read in ("message.thinking", "message['thinking']", "message.get('thinking')", "(message.x or m).thinking"):
        assert first_referenced_key(f"{{{{ {read} }}}}", names) == "thinking"
    for other in ("role == 'thinking'", "'thinking' in message", "m.get('x', 'thinking')", "m[1:]", "thinking"):
        assert first_referenced_key(f"{{% if {other} %}}{{% endif %}}", names) is None
    assert first_referenced_key("{% if role == 'thinking' %}{{ m.reasoning }}{% endif %}", names) == "reasoning"


def test_switches_are_what_is_read_and_not_set():
    given = "{{ messages }}{{ bos_token }}{% set x = 1 %}{{ x }}"
    assert find_template_options("{% if enable_thinking %}x{% endif %}" + given) == ["enable_thinking"]
    assert find_template_options("{% if not day is defined %}{% set day = 'x' %}{% endif %}{{ day }}") == ["day"]
    found = "{% for m in messages %}{% if m %}{% set last = m %}{% endif %}{{ last }}{% endfor %}"
    assert find_template_options(found) == []
