"""Chat templates: turn ends, boundaries, BOS and EOS exactly once, assistant masks.

With `byte_tokenizer` an id below 256 is a byte, so expected ids are written as text: `ids("<|im_end|>")`.
"""

import pytest
import tokenizers_for_tests as tok
from masks_for_tests import assistant_mask
from models_for_tests import tiny_model
from transformers import AutoTokenizer

from hf_posttrain.data import chat
from hf_posttrain.data.messages import clean_messages
from hf_posttrain.errors import InputError
from hf_posttrain.models import policy as policy

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MORE, LAST = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}
# a template that never marks the end of a turn
BARE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pair(tokenizer, prompt, completion, **options) -> tuple[str, str]:
    """Both sides of a chat pair after tokenisation, decoded."""
    start, rest = chat.ChatTemplate(tokenizer, **options).split(prompt, [completion])[0]
    end = chat.turn_end_id(tokenizer, options.get("kwargs"))
    left, right = chat.encode_pairs(tokenizer, [start], [rest], end)[0]
    return tokenizer.decode(left), tokenizer.decode(right)


def trained(tokenizer, messages, **options) -> list[str]:
    """The texts under the ones of the assistant mask."""
    row, mask = assistant_mask(chat.ChatTemplate(tokenizer, **options), messages)
    assert len(row) == len(mask)
    spans, previous = [], 0
    for token, one in zip(row, mask, strict=True):
        if one and not previous:
            spans.append([])
        if one:
            spans[-1].append(token)
        previous = one
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("template", [tok.CHATML, tok.CHATML_GENERATION, tok.QWEN3, tok.DEEPSEEK])
def test_turn_end_comes_from_the_template_not_from_eos(template):
    tokenizer = tok.base_tokenizer(template)
    assert tokenizer.decode([tokenizer.eos_token_id, chat.turn_end_id(tokenizer)]) == "<|endoftext|><|im_end|>"


def test_turn_end_without_template_or_mark_is_eos():
    assert chat.turn_end_id(tok.words_tokenizer()) == 258
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert chat.turn_end_id(tok.byte_tokenizer(bare)) == 258
    tokenizer = tok.words_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no eos_token"):
        chat.turn_end_id(tokenizer)


def test_turn_end_survives_saving(tmp_path):
    tokenizer = tok.base_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert chat.turn_end_id(AutoTokenizer.from_pretrained(tmp_path)) == chat.turn_end_id(tokenizer) == 258


@pytest.mark.parametrize("own", [2, [258, 2, 9999], None])
def test_a_config_of_another_tokenizer_ends_no_answer(own):
    """As a Llama config with eos 2 alongside a tokenizer whose id 2 is an ordinary byte."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = own
    assert policy.find_terminal_ids(model, tok.base_tokenizer(), None) == [258, 256]
    ends = policy.find_terminal_ids(model, tok.base_tokenizer(), None)
    policy.align_generation(model, tok.base_tokenizer(), ends)
    assert policy.set_generation_config(model, []).eos_token_id == [258, 256]


def test_special_ends_of_the_generation_config_are_kept():
    model = tiny_model()
    model.generation_config.eos_token_id = [257, 258]
    assert policy.find_terminal_ids(model, tok.byte_tokenizer(), None) == [258, 257]


def test_chat_pair_ends_with_its_turn_end_and_nothing_after():
    prompt, completion = pair(tok.byte_tokenizer(), [USER], [REPLY])
    assert prompt == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert completion == "4<|im_end|>"  # the template's "\n" after it is dropped


def test_turn_end_is_appended_where_the_template_writes_none():
    assert pair(tok.byte_tokenizer(BARE), [USER], [REPLY]) == ("[user]2+2?[assistant]", "4<|im_end|>")


def test_prefilled_assistant_turn_is_continued():
    prefill = {"role": "assistant", "content": "The sum"}
    prompt, completion = pair(tok.byte_tokenizer(), [USER, prefill], [{"role": "assistant", "content": " is 4"}])
    assert prompt.endswith("<|im_start|>assistant\nThe sum")
    assert completion == " is 4<|im_end|>"


def test_tools_and_template_kwargs_reach_the_template():
    prompt, _ = pair(tok.byte_tokenizer(), [USER], [REPLY], tools=[{"name": "add"}])
    assert prompt.startswith('<|im_start|>system\nTools: [{"name": "add"}]<|im_end|>\n')
    off = {"enable_thinking": False}
    assert pair(tok.byte_tokenizer(tok.QWEN3), [USER], [REPLY], kwargs=off)[1] == "4<|im_end|>"


def test_thinking_written_by_the_template_belongs_to_the_completion():
    prompt, completion = pair(tok.byte_tokenizer(tok.QWEN3), [USER, REPLY, MORE], [LAST])
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "<think>" not in prompt
    assert completion == "<think>\n\n</think>\n\n6<|im_end|>"


def test_prompt_that_is_no_prefix_raises_and_shows_where():
    tokenizer = tok.byte_tokenizer(tok.DEEPSEEK)
    with pytest.raises(InputError, match=r"(?s)prompt has '.*<think>.*conversation has '.*4.*chat_template_kwargs"):
        chat.ChatTemplate(tokenizer).split([USER], [[REPLY]])[0]
    assert pair(tokenizer, [USER], [REPLY], kwargs={"thinking": False})[1] == "4<|im_end|>"


def test_boundary_merge_keeps_the_prompt_as_generation_sees_it():
    tokenizer = tok.words_tokenizer()  # "ab" is one token, 256
    assert ids(tokenizer, "xab") == [ord("x"), 256]
    [(prompt, completion)] = chat.encode_pairs(tokenizer, ["xa"], ["bcd"], 258)
    assert prompt == [ord("x"), ord("a")]
    assert completion == [ord("b"), 257, 258]  # "b", "cd", </s>


def test_bos_exactly_once():
    tokenizer = tok.bos_tokenizer()
    bos, end = 256, 259
    chat_prompt, chat_completion = chat.ChatTemplate(tokenizer).split([USER], [[REPLY]])[0]
    assert chat_prompt.startswith("<s>")  # this template writes it
    prompts = [chat_prompt, chat_prompt.removeprefix("<s>"), "q", "<s>q", ""]
    for prompt, completion in chat.encode_pairs(tokenizer, prompts, [chat_completion] * 2 + ["a"] * 3, end):
        assert (prompt + completion).count(bos) == 1
        assert prompt[0] == bos
    assert chat.encode(tokenizer, ["q", "<s>q"]) == [[bos, ord("q")]] * 2
    assert chat.encode(tok.byte_tokenizer(), ["q"]) == [[ord("q")]]
    for template in (tok.LLAMA, tok.CHATML, tok.CHATML_GENERATION):
        row, mask = assistant_mask(chat.ChatTemplate(tok.bos_tokenizer(template)), [USER, REPLY])
        assert (row[0], row.count(bos), mask[0]) == (bos, 1, 0)


def test_eos_of_the_tokenizer_itself_is_removed_from_prompts():
    tokenizer = tok.bos_tokenizer(add_eos=True)
    assert tokenizer("q")["input_ids"] == [256, ord("q"), 257]
    assert chat.encode_pairs(tokenizer, ["q"], ["a"], 257) == [([256, ord("q")], [ord("a"), 257])]


@pytest.mark.parametrize("tail", ["", "<|im_end|>", "<|im_end|>\n", "<|im_end|>\n<|endoftext|>", 2 * "<|im_end|>"])
def test_end_token_exactly_once(tail):
    assert chat.encode_pairs(tok.byte_tokenizer(), ["q"], ["a" + tail], 258) == [([ord("q")], [ord("a"), 258])]


def test_end_token_inside_the_text_does_not_count():
    assert chat.encode_pairs(tok.byte_tokenizer(), ["q"], ["a<|im_end|>b"], 258)[0][1] == [97, 258, 98, 258]


@pytest.mark.parametrize("template", [tok.CHATML, tok.CHATML_GENERATION])
def test_assistant_mask_is_the_same_with_and_without_tags(template):
    conversation = [{"role": "system", "content": "Be short."}, USER, REPLY, MORE, LAST]
    assert trained(tok.byte_tokenizer(template), conversation) == ["4<|im_end|>", "6<|im_end|>"]
    assert trained(tok.base_tokenizer(template), conversation) == ["4<|im_end|>", "6<|im_end|>"]


def test_assistant_mask_exact_positions():
    row, mask = assistant_mask(chat.ChatTemplate(tok.byte_tokenizer()), [USER, REPLY, MORE])
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert row == ids(tok.byte_tokenizer(), before + "4<|im_end|>")  # nothing after the last trained token
    assert mask == [0] * (len(row) - 2) + [1, 1]


@pytest.mark.parametrize("tagged", [False, True], ids=["untagged", "generation tags"])
def test_a_tools_turn_stays_out_of_what_is_trained(tagged):
    """A call, the tool's result and the answer: the assistant's pieces with their ends, nothing of the tool."""
    said = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    said = "{% generation %}" + said + "<|im_end|>{% endgeneration %}" if tagged else said + "<|im_end|>"
    template = (
        "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
        "{% if m.role == 'assistant' %}" + said + "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>"
        "<|im_end|>{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    turns = [USER, call, {"role": "tool", "content": "4"}, REPLY, MORE, LAST]
    found = trained(tok.byte_tokenizer(template), turns)
    assert found == ['<call>{"name": "add"}</call><|im_end|>', "4<|im_end|>", "6<|im_end|>"]


def test_no_assistant_turn_or_unfit_template_raises():
    for template in (tok.CHATML, tok.CHATML_GENERATION):
        with pytest.raises(InputError, match="no token of this conversation was written by an assistant"):
            assistant_mask(chat.ChatTemplate(tok.byte_tokenizer(template)), [USER])
    with pytest.raises(InputError, match="does not begin with its rendered prompt"):
        assistant_mask(chat.ChatTemplate(tok.byte_tokenizer(tok.DEEPSEEK)), [USER, REPLY])


def test_which_rows_came_through_the_template_is_told_by_its_own_tokens():
    tokenizer = tok.byte_tokenizer(tok.CHATML)
    rendered, plain = (chat.plain_ids(tokenizer, [text])[0] for text in ("<|im_start|>user", "user<|im_end|>"))
    assert chat.has_template_tokens(tokenizer, rendered, None) is True
    assert chat.has_template_tokens(tokenizer, plain, None) is False  # an end alone, which plain rows have too
    tokenizer.pad_token = "<|im_start|>"  # where every unknown letter is that, it tells nothing
    assert chat.has_template_tokens(tokenizer, plain, None) is None


def test_assistant_mask_of_thinking_templates():
    assert trained(tok.byte_tokenizer(tok.QWEN3), [USER, REPLY, MORE, LAST]) == [
        "4<|im_end|>",
        "<think>\n\n</think>\n\n6<|im_end|>",
    ]
    kept = {"thinking": False}  # the history drops "hm</think>", and the mask follows the text that is there
    thought = {"role": "assistant", "content": "hm</think>4"}
    tokenizer = tok.byte_tokenizer(tok.DEEPSEEK)
    assert trained(tokenizer, [USER, thought, MORE, LAST], kwargs=kept) == ["4<|im_end|>", "6<|im_end|>"]


def test_assistant_mask_with_repeated_and_multibyte_content():
    same = {"role": "assistant", "content": "user é 🎉"}
    assert trained(tok.byte_tokenizer(), [USER, same, MORE, same]) == ["user é 🎉<|im_end|>"] * 2


@pytest.mark.parametrize("template", [tok.CHATML, tok.CHATML_GENERATION])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, {**REPLY, "content": "4 ✓"}], ["4 ✓<|im_end|>"]),  # a character of three tokens
        ([REPLY, MORE, LAST], ["4<|im_end|>", "6<|im_end|>"]),  # the assistant speaks first
        ([USER, {**REPLY, "content": " "}, MORE, LAST], ["6<|im_end|>"]),  # nothing is said
        ([USER, {**REPLY, "content": "4<|im_end|>"}], ["4<|im_end|>"]),  # an end in the data
    ],
)
def test_assistant_mask_of_turns_that_mislead(messages, expected, template):
    assert trained(tok.byte_tokenizer(template), messages) == expected


def test_assistant_mask_without_turn_end_in_the_template():
    assert trained(tok.byte_tokenizer(BARE), [USER, REPLY, MORE, LAST]) == ["4", "6<|im_end|>"]
    assert trained(tok.byte_tokenizer(BARE), [USER, REPLY, MORE]) == ["4"]
    tagged = BARE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert trained(tok.byte_tokenizer(tagged), [REPLY]) == ["4<|im_end|>"]


def test_messages_are_cleaned():
    rows = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho", "weight": None}]
    assert clean_messages(rows) == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made = {"name": "f", "arguments": {"x": 1, "y": None}}  # what is inside arguments is what was called
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": None, **made}]}
    assert clean_messages([call])[0] == {"role": "assistant", "content": "", "tool_calls": [made]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hi", "expected a list of messages"),
        ([], "expected a list of messages"),
        (["hi"], "message 0 is 'hi'"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([USER, {"role": "assistant", "content": None}], r"message 1 \(assistant\): content is None"),
        ([{"from": "alien", "value": "hi"}], "message 0 is from 'alien', expected one of"),
    ],
)
def test_wrong_messages_say_which_and_why(value, message):
    with pytest.raises(InputError, match=message):
        clean_messages(value)


def test_render_errors():
    with pytest.raises(InputError, match=r"model\.chat_template"):
        chat.ChatTemplate(tok.words_tokenizer()).render([USER])
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"\[user\]: roles must alternate"):
        chat.ChatTemplate(tok.byte_tokenizer(refusing)).render([USER])
