"""The hunt through chat templates: what is trained is exactly what the assistant wrote, and its end."""

import collections
import contextlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
from templates_for_tests import FAMILIES, Family, family_tokenizer
from test_data import config

from hf_posttrain.data import chat
from hf_posttrain.data.messages import clean_messages
from hf_posttrain.data.prepare import build_plan, tokenise
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Parisville"}}}
JSON_CALL = {**CALL, "function": {"name": "look_up", "arguments": '{"city": "Parisville"}'}}
SYSTEM, ONE, TWO = turn("system", "Rule zero."), turn("user", "Asked once?"), turn("user", "Asked twice?")
FIRST, SECOND = turn("assistant", "Answer alpha."), turn("assistant", "Answer beta.")
CALLED, RESULT = turn("assistant", "", tool_calls=[CALL]), turn("tool", "Result gamma.", name="look_up")
PLAIN = {  # chats of plain turns, whose trained spans are known exactly
    "one turn": [ONE, FIRST],
    "many turns": [ONE, FIRST, TWO, SECOND],
    "system": [SYSTEM, ONE, FIRST, TWO, SECOND],
    "the user has the last word": [ONE, FIRST, TWO],
    "parts": [turn("user", [{"type": "text", "text": text} for text in ("Asked ", "once?")]), FIRST, TWO, SECOND],
    "the same twice": [ONE, FIRST, TWO, FIRST],
    "no calls": [ONE, {**FIRST, "tool_calls": []}, TWO, SECOND],
    "text of an end": [ONE, turn("assistant", "Answer 4 é ✓."), TWO, SECOND],
}
TOOLS = {  # chats with calls
    "a call": [ONE, CALLED, RESULT, FIRST],
    "a call as OpenAI has it": [ONE, turn("assistant", None, tool_calls=[JSON_CALL]), RESULT, FIRST],
    "text and a call": [ONE, turn("assistant", "Let me look.", tool_calls=[CALL]), RESULT, FIRST],
    "a call at the end": [ONE, FIRST, TWO, CALLED],
    "two rounds": [ONE, CALLED, RESULT, FIRST, TWO, CALLED, RESULT, SECOND],
}


def made_of(tokenizer, messages):
    """(the texts of the trained runs, what the template does not write)."""
    plan = build_plan("messages", METHODS["sft"], tokenizer, config(assistant_only_loss=True), "hunt")
    made = tokenise({"messages": [messages]}, [0], tokenizer, plan)
    pairs = zip(*made["completion_ids"], *made["completion_mask"], strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for trained, run in runs if trained], made["unread"][0]


def spans(tokenizer, messages):
    """The texts of the trained runs."""
    return made_of(tokenizer, messages)[0]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_messages_are_rendered_as_transformers_does(name, opened):
    tokenizer = family_tokenizer(FAMILIES[name])
    options = {"enable_thinking": False}
    turns = [turn("user", " 2+2? "), turn("assistant", "4\n"), turn("user", "3+3?"), turn("assistant", "")]
    template = chat.ChatTemplate(tokenizer, None, options)
    expected = tokenizer.apply_chat_template(
        [t | {"content": [{"type": "text", "text": t["content"]}]} for t in turns] if name == "smolvlm" else turns,
        chat_template=chat.pin_date(template.text)[0],
        add_generation_prompt=opened,
        tokenize=False,
        **options,
    )
    assert template.render(turns, add_generation_prompt=opened) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_of_plain_turns_is_the_text_and_its_end(name):
    family, tokenizer = FAMILIES[name], family_tokenizer(FAMILIES[name])
    for what, messages in PLAIN.items():
        if what == "system" and not family.system:
            with pytest.raises(InputError, match="the chat template rejects messages with roles"):
                spans(tokenizer, messages)
            continue
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        wanted = [family.said.format(text) for text in texts]
        if messages[-1]["role"] == "assistant":
            wanted[-1] = (family.last or family.said).format(texts[-1])
        assert spans(tokenizer, messages) == wanted, what


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_has_the_same_ids_in_each_form_of_row(name):
    """Where the template writes no end of a turn, or blank text behind it, too."""
    tokenizer, forms = family_tokenizer(FAMILIES[name]), []
    row = {"messages": PLAIN["many turns"], "prompt": PLAIN["many turns"][:-1], "completion": PLAIN["many turns"][-1:]}
    for form, only in itertools.product(("messages", "prompt + completion"), (False, True)):
        plan = build_plan(form, METHODS["sft"], tokenizer, config(assistant_only_loss=only), "hunt")
        made = tokenise({column: [value] for column, value in row.items()}, [0], tokenizer, plan)
        forms.append(made["prompt_ids"][0] + made["completion_ids"][0])
    assert forms == [forms[0]] * 4


def outcome(family, messages):
    """equal: the spans have each text, call and argument of the assistant's, no other text, and end as they should;
    told: so they do, but for a text that is said to be left out; refused."""
    try:
        found, unread = made_of(family_tokenizer(family), messages)
    except InputError:
        return "refused"
    told = "text next to calls" in unread
    turns = [message for message in messages if message["role"] == "assistant"]
    assert len(found) == len(turns)
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    for text, message in zip(found, turns, strict=True):
        wrote = ["look_up", "Parisville"] if message.get("tool_calls") else []
        wrote += [message["content"] or ""] if not (wrote and told) else []
        assert all(word in text for word in wrote), (text, wrote)
        assert not any(other in text for other in others), (text, others)
        assert not text.endswith(("\n", " "))
        assert "\\\\" not in text  # arguments encoded twice
        if message.get("tool_calls"):
            assert text.endswith(family.call.replace("}}", "}")) or message is messages[-1], text
        elif message is messages[-1]:
            assert text == (family.last or family.said).format(message["content"])
    return "told" if told else "equal"


def test_what_is_trained_of_calls_is_the_text_the_call_and_its_end():
    counts = collections.Counter()
    for name, family in FAMILIES.items():
        for messages in TOOLS.values():
            found = outcome(family, messages)
            counts[found] += 1
            assert found != "refused" if family.call else found == "refused", name
    assert counts == {"equal": 42, "told": 3, "refused": 90}, counts  # refused: the families that write no calls


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.call])
def test_arguments_as_json_text_are_those_as_a_mapping(name):
    tokenizer = family_tokenizer(FAMILIES[name])
    as_text, as_mapping = (clean_messages(TOOLS[what]) for what in ("a call as OpenAI has it", "a call"))
    text = chat.ChatTemplate(tokenizer).render(as_text)
    assert text == chat.ChatTemplate(tokenizer).render(as_mapping)
    assert "Parisville" in text
    assert "{'" not in text
    assert json.dumps(json.dumps(CALL["function"]["arguments"])) not in text


def test_arguments_that_are_no_json_are_refused():
    call = {"function": {"name": "f", "arguments": "{city"}}
    with pytest.raises(InputError, match=r"message 0 \(assistant\): the arguments of a call are not valid JSON, '{c"):
        clean_messages([turn("assistant", "", tool_calls=[call])])


THINKING = [ONE, turn("assistant", "<think>\nhm one\n</think>\n\nAnswer alpha."), TWO, SECOND]


def test_thinking_that_a_template_drops_is_told_and_the_rest_is_trained():
    tokenizer = family_tokenizer(FAMILIES["qwen3"])
    found, unread = made_of(tokenizer, THINKING)
    assert found == ["Answer alpha.<|im_end|>", "<think>\n\n</think>\n\nAnswer beta.<|im_end|>"]
    assert unread == "a part of the text of assistant turns"
    reasoned = [ONE, {**FIRST, "reasoning_content": "hm one"}, TWO, {**SECOND, "reasoning_content": "hm two"}]
    found, unread = made_of(tokenizer, reasoned)
    assert found == ["Answer alpha.<|im_end|>", "<think>\nhm two\n</think>\n\nAnswer beta.<|im_end|>"]
    assert unread == "key 'reasoning_content'"


def test_turns_of_assistants_in_a_row_are_trained_each_with_its_end_and_empty_ones_not():
    """Where a template writes no headers of assistants, they are one run of trained tokens."""
    silent = turn("assistant", " ")
    for name, family in FAMILIES.items():
        said, last = family.said.format, (family.last or family.said).format
        chats = {"row": [ONE, FIRST, SECOND], "empty": [ONE, FIRST, silent, SECOND], "open": [ONE, FIRST, TWO, silent]}
        wanted = {what: [said(FIRST["content"]), last(SECOND["content"])] for what in ("row", "empty")}
        for what, messages in chats.items():
            with contextlib.suppress(InputError):  # the template refuses such turns, or rewrites earlier ones
                found = spans(family_tokenizer(family), messages)
                assert "".join(found) == "".join(wanted.get(what, [said(FIRST["content"])])), (name, what)


def test_text_of_the_system_that_a_template_writes_into_an_answer_is_refused():
    said = r"writes message 0 \(system\) inside a turn of the assistant, so that 'Rule zero.' would be trained"
    with pytest.raises(InputError, match=said):
        spans(family_tokenizer(FAMILIES["gemma3"]), [SYSTEM, FIRST, ONE, SECOND])
    assert len(spans(family_tokenizer(FAMILIES["gemma3"]), [SYSTEM, ONE, FIRST, turn("user", "Answer"), SECOND])) == 2


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.call])
def test_a_call_at_the_end_trains_the_end_that_the_template_gives_calls(name):
    tokenizer, end = family_tokenizer(FAMILIES[name]), FAMILIES[name].call.lstrip("]}")
    end += "<|endoftext|>" if end == "</tool_call>" else ""  # plain text, at which no generation stops
    plan = build_plan("prompt + completion", METHODS["sft"], tokenizer, config(), "hunt")
    made = tokenise({"prompt": [[ONE]], "completion": [[CALLED]]}, [0], tokenizer, plan)
    for trained in (spans(tokenizer, [ONE, CALLED])[-1], tokenizer.decode(made["completion_ids"][0])):
        assert trained.endswith(end)


GPT_OSS = [family_tokenizer(FAMILIES["gptoss"])]
if importlib.util.find_spec("trl"):
    shipped = Path(*importlib.util.find_spec("trl").submodule_search_locations, "chat_templates", "gptoss.jinja")
    GPT_OSS += [family_tokenizer(FAMILIES["gptoss"]._replace(template=shipped.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("tokenizer", GPT_OSS)
def test_earlier_answers_of_gpt_oss_train_end_and_the_last_return(tokenizer):
    """The analysis channel, which ends in <|end|> too, is written of the last turn alone."""
    final, analysis = "<|channel|>final<|message|>{}", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    first, second = ({**answer, "thinking": "hm"} for answer in (FIRST, SECOND))
    earlier, last = final.format("Answer alpha.<|end|>"), analysis + final.format("Answer beta.<|return|>")
    assert spans(tokenizer, [ONE, first, TWO, second]) == [earlier, last]
    assert spans(tokenizer, [ONE, first, TWO]) == [earlier]
    assert spans(tokenizer, [ONE, FIRST, second]) == [earlier, last]
    plan = build_plan("prompt + completion", METHODS["sft"], tokenizer, config(), "hunt")
    made = tokenise({"prompt": [[ONE, first, TWO]], "completion": [[second]]}, [0], tokenizer, plan)
    assert tokenizer.decode(made["completion_ids"][0]) == last


def test_an_answer_to_a_prompt_that_the_template_rewrites_is_refused_with_assistant_only_loss_too():
    tokenizer = family_tokenizer(FAMILIES["lfm2"])
    tokenizer.chat_template = tokenizer.chat_template.replace("{% else %}", "{% else %}{{ 'Now: ' if loop.last }}")
    plan = build_plan("prompt + completion", METHODS["sft"], tokenizer, config(assistant_only_loss=True), "hunt")
    with pytest.raises(InputError, match="does not begin with its rendered prompt"):
        tokenise({"prompt": [[ONE]], "completion": [[FIRST]]}, [0], tokenizer, plan)


# ---- templates that TRL ships, read where it is installed

TRL = importlib.util.find_spec("trl")
SHIPPED = sorted(Path(TRL.submodule_search_locations[0], "chat_templates").glob("*.jinja")) if TRL else []
MARK = re.compile(r"<\|[^|<> ]+\|>|<｜[^｜]+｜>|<[a-z]+_of_[a-z_]+>"
                  r"|<\|?[a-z_]*(?:turn|tool_call|tool_response|channel)\|?>"
                  r"|\[gMASK\]|<sop>|<\|[a-z\"]+\|?>|\[/?[A-Z_]+\]")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not SHIPPED, reason="trl is not installed")
def test_templates_that_trl_ships():
    counts = collections.Counter()
    chats = {**PLAIN, **TOOLS, "thinking": THINKING}
    for path, (what, messages) in itertools.product(SHIPPED, chats.items()):
        text = path.read_text(encoding="utf-8")
        family = Family(text, " ".join({*MARK.findall(text)}), "", "<|endoftext|>", bos="<bos>")
        tokenizer = family_tokenizer(family)
        try:
            found, unread = made_of(tokenizer, messages)
        except InputError:
            counts["refused"] += 1
            continue
        end = tokenizer.decode([chat.turn_end_id(tokenizer)])
        whole, other = "".join(found), [each["content"] for each in messages if each["role"] != "assistant"]
        for message in messages:
            if message["role"] == "assistant":
                texts = ["look_up", "Parisville"] if message.get("tool_calls") else []
                texts += [] if unread and texts else [(message["content"] or "").split("</think>")[-1].strip()]
                assert all(each in whole for each in texts), (path.name, what, found)
        assert not any(isinstance(each, str) and each in whole for each in other), (path.name, what, found)
        assert all(each.count(end) <= 1 for each in found), (path.name, what, found)
        assert '\\"' not in whole, (path.name, what, found)
        counts["equal"] += 1
    print(f"{len(SHIPPED)} templates, {len(chats)} chats of each: {dict(counts)}, 0 wrong")
    assert counts["equal"] > 2 * counts["refused"]


@pytest.mark.parametrize("tags", [False, True])
def test_a_tokenizer_with_a_rendering_of_its_own_is_asked(tags):
    """As remote code may have: no template is rendered past it."""
    tokenizer = family_tokenizer(FAMILIES["chatml"])

    class Loud(type(tokenizer)):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(conversation, **options).upper()

    if tags:
        tokenizer.chat_template += "{% generation %}{% endgeneration %}"
    tokenizer.__class__ = Loud
    messages = [{"role": "user", "content": "hello"}]
    text, _ = chat.ChatTemplate(tokenizer).render_with_spans(messages)
    assert "HELLO" in text
    assert chat.ChatTemplate(tokenizer).render(messages) == text
