"""Nothing that was given is ignored in silence: columns, system turns and prompts that no format reads."""

import json
import logging
import re

import datasets
import pytest
from test_data import ASKED, END, REPLY, USER, WRONG, config, jsonl, prepare, source, texts
from tokenizers_for_tests import CHATML, CHATML_GENERATION, DEEPSEEK, QWEN3, byte_tokenizer

from hf_posttrain.commands import data as data_command
from hf_posttrain.data.audit import audit_datasets
from hf_posttrain.data.formats import read_format
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS

ANSWERS = {"chosen": "4", "rejected": "5"}
TURNS = {"chosen": [USER, REPLY], "rejected": [USER, WRONG]}
SYSTEM = {"role": "system", "content": "Be short."}
AFTER_SYSTEM = f"<|im_start|>system\nBe short.{END}\n{ASKED}"


@pytest.mark.parametrize(
    ("row", "method", "message"),
    [
        ({"question": "2+2?", **ANSWERS}, "dpo", r"'question' .* Set columns: {prompt: question}\. If it is not"),
        ({"system": "Add.", "question": "2+2?", **ANSWERS}, "dpo", r"Set columns: {prompt: question}"),
        ({"Question": "3+3?", **TURNS}, "dpo", r"column 'Question' seems to be a part of the prompt"),
        ({"system_prompt": "Add.", "messages": [USER, REPLY]}, "sft", r"Set columns: {system: system_prompt}"),
        ({"question": "2+2?", "text": "4"}, "sft", r"Set columns: {prompt: question, completion: text}"),
        ({"instruction": "Add.", "output": "4", "text": "### 4"}, "sft", r"Set columns: {unused: text}"),
        ({"context": "Sums.", "messages": [USER, REPLY]}, "opd", r"Put its text into the messages\. .*unused: context"),
        ({"prompt": "3+3?", **TURNS}, "dpo", r"row 0: column 'prompt': '3\+3\?' is not part of .* share, '2\+2\?'"),
    ],
)
def test_a_prompt_that_no_format_reads_stops_the_run(row, method, message):
    with pytest.raises(InputError, match=message):
        prepare([row], method)
    stream = datasets.Dataset.from_list([row]).to_iterable_dataset()
    with pytest.raises(InputError, match=message):
        list(prepare(stream, method))


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"question": "2+2?", **TURNS}, "dpo"),  # it is the first turn
        ({"source": "a web page", **TURNS}, "dpo"),
        ({"question": "2+2?", "chosen": "2+2? 4", "rejected": "2+2? 5"}, "dpo"),
        ({"prompt": "2+2?", "messages": [USER, REPLY]}, "sft"),
        ({"instruction": "Add.", "output": "4", "text": "### Add.\n4"}, "sft"),
        ({"system_prompt": None, "messages": [USER, REPLY]}, "sft"),
        ({"question": "2+2?", "input_ids": [1, 2]}, "sft"),
    ],
)
def test_what_repeats_the_prompt_is_no_loss(row, method):
    assert len(prepare([row], method)) == 1


def test_columns_that_are_not_read_are_named_once_in_a_run_and_in_a_check(caplog):
    row = {"id": 7, "messages": [USER, REPLY], "images": [], "tools": None, "source": "web"}
    told = "read as messages; columns not read: id, images, source"
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        prepare([row, row], "sft", assistant_only_loss=True)
    assert [text for text in caplog.messages if "not read" in text] == [f"train: {told}"]
    raw = {"train": datasets.Dataset.from_list([row])}
    audit = audit_datasets(raw, METHODS["sft"], byte_tokenizer(), config(assistant_only_loss=True))["train"]
    assert audit.notes == [told]
    assert f"  {told}" in audit.lines()
    audit = audit_datasets(raw, METHODS["sft"], byte_tokenizer(), config())["train"]
    assert "all turns are trained, including user turns" in audit.notes[1]


def test_a_part_of_the_prompt_beside_a_prompt_is_warned_of(caplog):
    prepare([{"prompt": "q", "completion": "a", "context": "a page of text"}], "sft")
    assert "column 'context' seems to be a part of the prompt, but prompt + completion does not read it" in caplog.text


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"prompt": [USER], "completion": [REPLY]}, "sft"),
        ({"messages": [USER, REPLY]}, "opd"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, "opd"),
        ({"prompt": [SYSTEM, USER], "completion": [REPLY]}, "sft"),
        (TURNS, "dpo"),
        ({"prompt": "2+2?", **TURNS}, "dpo"),
    ],
)
def test_a_system_column_is_the_first_turn(row, method):
    assert texts([{"system": "Be short.", **row}], method)[0][:2] == (AFTER_SYSTEM, "4" + END)
    assert texts([{"system": "", **row}], method) == texts([row], method)


def test_a_system_column_without_one_meaning_is_refused():
    with pytest.raises(InputError, match="column 'system': the messages have a system turn with another text, 'Be"):
        prepare([{"system": "Be long.", "prompt": [SYSTEM, USER], "completion": [REPLY]}], "sft")
    plain = [{"system": "Be short.", "prompt": "2+2?", "completion": "4"}]
    with pytest.raises(InputError, match=r"row 0: column 'system': requires messages, and the row is plain text\. Set"):
        prepare(plain, "sft")
    assert texts(plain, "sft", apply_chat_template=True)[0][0] == AFTER_SYSTEM


def test_sources_keep_the_tools_and_system_that_only_some_have(tmp_path, caplog):
    one = jsonl(tmp_path / "one.jsonl", [{"messages": [USER, REPLY], "system": "Be short.", "id": 1}])
    two = jsonl(tmp_path / "two.jsonl", [{"messages": [USER, REPLY], "tools": [{"name": "f"}]}])
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        rows = load([source(one), source(two)])
    assert (rows[0]["system"], rows[0]["tools"], rows[1]["tools"]) == ("Be short.", None, [{"name": "f"}])
    assert caplog.messages == [f"{one}, {two}: these columns are not in all sources, and are not read: id"]
    with pytest.raises(InputError, match="system, tools must be columns of all sources that are streams"):
        load([source(one, streaming=True), source(two, streaming=True)])


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_may_change_places(streaming, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "q"}])
    swapped = load(source(path, streaming=streaming, columns={"prompt": "completion", "completion": "prompt"}))
    assert list(swapped) == [{"prompt": "q", "completion": "a"}]


def test_prompts_that_are_rendered_already_do_not_go_through_the_template():
    rows = [{"prompt": ASKED, "completion": "4"}] * 3
    for method in ("sft", "opd"):
        with pytest.raises(
            InputError, match=r"the prompts contain '<\|im_start\|>', .* Set `apply_chat_template: false`"
        ):
            prepare(rows, method, apply_chat_template=True)
    # one prompt may speak of it
    assert len(prepare([*rows, {"prompt": "2+2=", "completion": "4"}], "sft", apply_chat_template=True)) == 4


# ---- messages


@pytest.mark.parametrize("role", ["asistant", "assisstant", "Assitant", "usr", "sytem", "tools", "bot"])
def test_a_misspelt_role_is_refused(role):
    rows = [{"messages": [USER, REPLY]}, {"messages": [USER, {"role": role, "content": "4"}, REPLY]}]
    for options in ({}, {"assistant_only_loss": True}):
        with pytest.raises(InputError, match=rf"row 1: column 'messages': message 1 has the role '{role}', expected '"):
            prepare(rows, "sft", **options)


def test_a_role_that_the_template_writes_is_read():
    assert "wizard\nhm" in texts([{"messages": [USER, {"role": "wizard", "content": "hm"}, REPLY]}], "sft")[0][1]


ONLY_KNOWN = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")


ADDS = {"role": "assistant", "content": "I add.", "tool_calls": [{"name": "add", "arguments": {"x": 2}}]}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([SYSTEM, USER, REPLY], r"message 0 \(system\): the chat template does not write its text, 'Be short.'"),
        ([USER, {"role": "wizard", "content": "4"}, REPLY], r"message 1 \(wizard\): .* does not write its text, '4'"),
        ([USER, {"role": "tool", "content": "2"}, REPLY], r"message 1 \(tool\)"),  # "2" is also in the question
        ([USER, {"role": "assistant", "tool_calls": [{"name": "add"}]}], r"message 1 .* not write its call of add"),
        ([{**USER, "content": "add 2+2?"}, ADDS, REPLY], r"message 1 .* not write its call of add"),
        ([SYSTEM, {**USER, "content": "Be short. 2+2?"}, REPLY], r"message 0 \(system\)"),
    ],
)
def test_a_message_that_the_template_drops_is_refused(turns, message):
    tokenizer = byte_tokenizer(ONLY_KNOWN)
    for row in ({"messages": turns}, {"prompt": turns, "completion": [REPLY]}):
        with pytest.raises(InputError, match="row 0: " + message):
            prepare([row], "sft", tokenizer)


CALLING = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>CALL</call>{% endfor %}"
)


@pytest.mark.parametrize("written", ["{{ (m.tool_calls | first).function | tojson }}", "{{ c.function.name }}"])
def test_a_call_of_which_a_part_is_dropped_is_refused(written):
    """The second call of the same function, and arguments, although both stand in the question."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": x}}} for x in (2, 3)]
    row = {"messages": [USER, {"role": "assistant", "content": "add x 2 3", "tool_calls": calls}]}
    assert '"x": 3' in texts([row], "sft", byte_tokenizer(CALLING.replace("CALL", "{{ c.function | tojson }}")))[0][1]
    with pytest.raises(InputError, match=r"message 1 \(assistant\): the chat template does not write its call of add"):
        prepare([row], "sft", byte_tokenizer(CALLING.replace("CALL", written)))
    row["messages"][1]["tool_calls"] = [{"function": "add"}]
    with pytest.raises(InputError, match=r"message 1 \(assistant\): a call is {'function': 'add'}, expected {f"):
        prepare([row], "sft", byte_tokenizer(CALLING))


def test_what_is_written_in_another_way_is_not_told(caplog):
    """Text with other white space or inside JSON, and the id that ties a result to its call."""
    turns = [{**USER, "content": 'one  "line"\n and\tmore'}, REPLY]
    for written in ("{{ m.content.split() | join(' ') }}", "{{ m.content | tojson }}"):
        tokenizer = byte_tokenizer(CHATML.replace("{{ m.content }}", written))
        prepare([{"messages": [*turns, {"role": "tool", "content": "4", "tool_call_id": "id1"}]}], "opd", tokenizer)
    assert caplog.messages == []


DATED = "Today: {{ date_string or strftime_now('%d %b %Y') }}\n" + CHATML


@pytest.mark.parametrize("template", [DATED, DATED + "{% generation %}{% endgeneration %}"])
def test_rows_are_the_same_on_every_day(template, caplog):
    """A template that writes today's date writes the same day in every row, or the one that it is given."""
    row = {"prompt": [USER], "completion": [REPLY]}
    for given, day in (({}, "26 Jul 2024"), ({"date_string": "1 May 2025"}, "1 May 2025")):
        caplog.clear()
        [(prompt, *_)] = texts([row], "sft", byte_tokenizer(template), chat_template_kwargs=given)
        assert prompt.startswith(f"Today: {day}\n")
        told = "the chat template does not use: today's date but always 26 Jul 2024 (in 1 example)"
        assert caplog.messages == [f"train: {told}"] * (not given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_thinkng": False}, "template does not know 'enable_thinkng'; did you mean 'enable_thinking'?"),
        ({"thinking": False}, "did you mean 'enable_thinking'?"),
        (
            {"add_generation_prompt": True},
            "add_generation_prompt cannot be set, because each rendering has its own value",
        ),
        ({"tools": [], "messages": []}, "tools, messages cannot be set"),
    ],
)
def test_switches_that_the_template_does_not_have_are_refused(given, message, caplog):
    with pytest.raises(InputError, match=rf"^train: chat_template_kwargs: .*{re.escape(message)}"):
        prepare([{"messages": [USER, REPLY]}], "sft", byte_tokenizer(QWEN3), chat_template_kwargs=given)
    # one that is nothing like those it has changes nothing, as with another model of the same recipe
    other = "{% if preserve_thinking %}{% endif %}" + CHATML
    for template, switch in ((CHATML, "effort"), (CHATML_GENERATION, "effort"), (other, "enable_thinking")):
        caplog.clear()
        prepare([{"messages": [USER, REPLY]}], "sft", byte_tokenizer(template), chat_template_kwargs={switch: False})
        told = f"the chat template does not use: chat_template_kwargs {switch!r} (in 1 example)"
        assert caplog.messages == [f"train: {told}"]


TOOLED = "{% if compact %}short{% endif %}" + QWEN3


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if compact is defined and compact %}{% endif %}", "compact"),
        ("{% if not compact is defined %}{% set compact = false %}{% endif %}", "compact"),
        ("{%- set compact = compact if compact is defined else false -%}{% if compact %}{% endif %}", "compact"),
        ("{% set compact = compact | default(true) %}", "compact"),
        ("{% macro head() %}{% if compact %}{% endif %}{% endmacro %}{{ head() }}", "compact"),
        ("{% if false %}{{ compact }}{% endif %}", "compact"),
        ("{% for m in messages %}{% if loop.first and compact %}{% endif %}{% endfor %}", "compact"),
        ("{% set ns = namespace(on=compact | default(false)) %}", "compact"),
        ("{{ bos_token if written else '' }}", "bos_token"),
    ],
)
def test_switches_that_a_template_reads_somewhere_are_not_reported(template, switch, caplog):
    row = {"messages": [USER, REPLY]}
    prepare([row], "sft", byte_tokenizer(template + CHATML), chat_template_kwargs={switch: ""})
    prepare([row | {"chat_template_kwargs": {switch: ""}}], "sft", byte_tokenizer(template + CHATML))
    assert caplog.messages == []


def test_switches_of_several_templates_by_name(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOLED}
    row = {"messages": [USER, REPLY]}
    prepare([row], "sft", tokenizer, chat_template_kwargs={"compact": True})  # of rows with tools
    told = "the chat template does not use: chat_template_kwargs 'compact' (in 1 example)"
    assert caplog.messages == [f"train: {told}"]
    with pytest.raises(InputError, match="does not know 'compct'; did you mean 'compact'"):
        prepare([row], "sft", tokenizer, chat_template_kwargs={"compct": True})


def test_switches_of_rows_are_checked_too(caplog):
    row = {"messages": [USER, REPLY], "chat_template_kwargs": {"enable_thinkng": False}}
    with pytest.raises(InputError, match=r"row 0: .*'enable_thinkng'; did you mean 'enable_thinking'"):
        prepare([row], "sft", byte_tokenizer(QWEN3))
    stream = datasets.Dataset.from_list([row | {"chat_template_kwargs": {"effort": 1}}] * 3).to_iterable_dataset()
    assert len(list(prepare(stream, "sft", byte_tokenizer(QWEN3)))) == 3
    said = "does not use: chat_template_kwargs 'effort' (row 0 of this stream, and maybe others)"
    assert [said in message for message in caplog.messages] == [True]


def test_rows_of_text_and_of_messages_are_not_mixed_beyond_a_batch_either(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}] * 1000 + [{"prompt": [USER], "completion": [REPLY]}]
    with pytest.raises(InputError, match="train, row 1000: some rows hold plain text and some hold messages"):
        prepare(load(source(jsonl(tmp_path / "rows.jsonl", rows))), "sft")


def test_a_conversation_without_an_answer_is_refused():
    with pytest.raises(InputError, match="row 1: column 'messages': there is no assistant turn, so there is no answer"):
        prepare([{"messages": [USER, REPLY]}, {"messages": [USER, USER]}], "sft")
    assert len(prepare([{"messages": [USER]}], "opd")) == 1


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_a_turn_that_is_not_to_be_trained_is_refused_where_it_would_be(mark):
    row = {"messages": [USER, {**REPLY, **mark}, USER, REPLY]}
    with pytest.raises(InputError, match="row 0: columns messages: a turn of 'assistant' has weight: 0 or"):
        prepare([row], "sft")
    assert len(prepare([row], "opd")) == 1
    assert len(prepare([{"prompt": row["messages"][:3], "completion": [REPLY]}], "sft")) == 1
    others = [{"messages": [{**USER, **mark}, REPLY]}]
    with pytest.raises(InputError, match=r"a turn of 'user' .* Set `train_on: assistant`, which excludes it"):
        prepare(others, "sft")
    assert len(prepare(others, "sft", assistant_only_loss=True)) == 1


LONG = "What is two and two?"


@pytest.mark.parametrize(
    ("rows", "method", "refused"),
    [
        ([{"prompt": LONG, "completion": f"{LONG} 4"}] * 2, "sft", True),
        ([{"prompt": f"{LONG}\n", "chosen": f"{LONG} 4", "rejected": f"{LONG} 5"}] * 2, "dpo", True),
        ([{"prompt": [{**USER, "content": LONG}], "completion": [{**REPLY, "content": f"{LONG} 4"}]}] * 2, "sft", True),
        ([{"prompt": LONG, "completion": f"{LONG} 4"}, {"prompt": LONG, "completion": "4"}], "sft", False),
        ([{"prompt": LONG, "completion": f"{LONG} 4"}], "sft", False),  # one says nothing of the others
        ([{"prompt": "Hi", "completion": "Hi there!"}] * 2, "sft", False),
        ([{"prompt": LONG, "completion": LONG}] * 2, "sft", False),  # a copy is a task
        ([{"prompt": LONG, "chosen": f"{LONG} 4", "rejected": "5"}] * 2, "dpo", False),
        ([{"prompt": LONG}] * 2, "opd", False),
    ],
)
def test_answers_that_hold_their_prompts_are_refused(rows, method, refused):
    if refused:
        with pytest.raises(
            InputError, match=r"^train: columns prompt .*: answers begin with the whole prompt. Remove "
        ):
            prepare(rows, method)
    else:
        assert len(prepare(rows, method)) == len(rows)


@pytest.mark.parametrize("write", [json.dumps, str])
def test_messages_that_are_written_as_text_are_refused(write):
    asked, answers = write([USER]), {name: write([{**REPLY, "content": name}]) for name in ("chosen", "rejected")}
    for row, method in [
        ({"prompt": "2+2?", **answers}, "dpo"), ({"prompt": asked, "completion": "4"}, "sft"), (answers, "kto"),
        ({"text": write([USER, REPLY])}, "sft"), ({"prompt": asked}, "opd"),
        ({"prompt": "2+2?", "completion": write([{"name": None, **REPLY}])}, "sft"),
        ({"prompt": write(USER), "completion": "4"}, "sft"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=r"is a list of messages as text. Convert it with json.loads"):
            prepare([row, row], method)
    for texts_of in (
        lambda text: (write([USER]), text),  # one answer that is such a text may be one
        lambda text: (write([{"from": "A", "to": "B"}]), write([{"from": "A", "value": 2}])),  # lists of other things
    ):
        assert len(prepare([{"prompt": "2+2?", "completion": text} for text in texts_of("4")], "sft")) == 2


@pytest.mark.parametrize("images", [["a.png"], "a.JPG", {"bytes": b"\x89PNG"}, [{"bytes": b"\x89PNG"}]])
def test_pictures_next_to_text_are_refused(images):
    """Those of TRL's vision data stand in a column, with no mark in the messages. None is decoded here."""
    rows = datasets.Dataset.from_list([{"images": images, "messages": [USER, REPLY]}])
    if "PNG" in str(images):
        kind = datasets.Image()
        rows = rows.cast_column("images", datasets.List(kind) if isinstance(images, list) else kind)
    problem = r"'images' holds images, which a text model cannot read\. .* with columns: {unused: images}"
    for given in (rows, rows.to_iterable_dataset()):
        with pytest.raises(InputError, match=problem):
            list(prepare(given, "sft"))
    rows = rows.remove_columns("images")
    for other in (rows.add_column("images", [None]), rows.add_column("image", ["ubuntu:20.04"])):
        assert len(prepare(other, "sft")) == 1


def test_a_row_may_have_template_options_of_its_own():
    """As in TRL: they come before those of all rows, and their nulls, which Arrow adds, are none."""
    thinks, quick = "", "<think>\n\n</think>\n\n"
    tokenizer = byte_tokenizer(QWEN3)
    for given, start in (
        ({"enable_thinking": False}, quick), (json.dumps({"enable_thinking": False}), quick), (None, thinks),
        ({"enable_thinking": None}, thinks), ({"enable_thinking": True}, thinks),
    ):  # fmt: skip
        row = {"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG], "chat_template_kwargs": given}
        [found] = prepare([row], "dpo", tokenizer, chat_template_kwargs={} if start else {"enable_thinking": True})
        assert tokenizer.decode(found["prompt_ids"]).endswith(f"assistant\n{start}")
        assert tokenizer.decode(found["chosen_ids"]) == ("" if start else quick) + f"4{END}".rstrip()
    for row, message in (
        ({"messages": [USER, REPLY], "chat_template_kwargs": "a"}, "row 0: column 'chat_template_kwargs': exp"),
        ({"messages": [USER, REPLY], "chat_template_kwargs": {"tokenize": 1}}, "tokenize cannot be set"),
        ({"messages": [USER, REPLY], "chat_template_kwargs": {"enable_thinking": "false"}}, "treat as true. Write"),
        ({"prompt": "2+2?", "completion": "4", "chat_template_kwargs": {"a": 1}}, "messages, and the row is plain"),
    ):
        with pytest.raises(InputError, match=message):
            prepare([row], "sft", tokenizer)


def test_tools_next_to_plain_text_are_refused():
    row = {"prompt": "2+2?", "completion": "4", "tools": [{"name": "add"}]}
    with pytest.raises(InputError, match=r"row 0: column 'tools': requires messages, and the row is plain text\. Set"):
        prepare([row], "sft")
    assert "add" in texts([row], "sft", apply_chat_template=True)[0][0]


def test_what_the_template_does_not_write_is_named_with_its_count(caplog):
    weighted, thought = {**REPLY, "weight": 1}, {"role": "assistant", "content": "hm</think>4"}
    asked = {**USER, "name": "Jo"}
    rows = [{"messages": [USER, weighted]}, {"messages": [USER, REPLY]}, {"messages": [asked, weighted]}]
    told = "the chat template does not use: key 'name' (in 1 example), key 'weight' (in 2 examples)"
    for _ in range(2):  # from the cache as well
        caplog.clear()
        prepare(rows, "sft")
        assert caplog.messages == [f"train: {told}"]
    raw = {"train": datasets.Dataset.from_list(rows)}
    audit = audit_datasets(raw, METHODS["sft"], byte_tokenizer(), config())["train"]
    assert f"train: {told}" in audit.warnings()
    caplog.clear()
    off = {"thinking": False}
    prepare([{"messages": [USER, thought]}], "sft", byte_tokenizer(DEEPSEEK), chat_template_kwargs=off)
    assert "a part of the text of assistant turns (in 1 example)" in caplog.text
    caplog.clear()
    prepare([{"messages": [USER, REPLY], "tools": [{"name": "add"}]}], "sft", byte_tokenizer(ONLY_KNOWN))
    assert caplog.messages == []
    without = ONLY_KNOWN.partition("{% endif %}")[2]
    prepare([{"messages": [USER, REPLY], "tools": [{"name": "add"}]}], "sft", byte_tokenizer(without))
    assert caplog.messages == ["train: the chat template does not use: column 'tools' (in 1 example)"]


def test_values_of_several_types_inside_tools_are_told(caplog):
    def row(value):
        return {"messages": [USER, REPLY], "tools": [{"name": "f", "parameters": {"x": {"default": value}}}]}

    rows = datasets.Dataset.from_list([row(1), row("1")], on_mixed_types="use_json")
    assert rows[1]["tools"][0]["parameters"]["x"]["default"] == 1  # what `datasets` makes of the text
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        prepare(rows, "sft", assistant_only_loss=True)
        assert "column 'tools' has values of several types, and the text '1' is read as 1" in caplog.text
        caplog.clear()
        prepare([row(1), row(2)], "sft", assistant_only_loss=True)
        assert "several types" not in caplog.text


def test_the_data_command_names_them_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "mine.jsonl", [{"id": 7, "messages": [USER, REPLY]}])
    assert data_command.main(["mine.jsonl"]) == 0
    assert "\nnot read: id\n" in capsys.readouterr().out
    jsonl(tmp_path / "mine.jsonl", [{"question": "2+2?", **ANSWERS}])
    assert data_command.main(["mine.jsonl", "--method", "dpo"]) == 1
    assert "columns: {prompt: question}" in capsys.readouterr().out
    jsonl(tmp_path / "mine.jsonl", [{"context": "Sums.", "messages": [USER, REPLY]}])
    assert data_command.main(["mine.jsonl"]) == 2
    assert (
        "sft: column 'context' seems to be a part of the prompt, but messages does not read it"
        in capsys.readouterr().out
    )


def test_answers_of_several_messages_keep_the_prompt_of_the_conversation():
    """An answer may hold a call and its result; a whole conversation begins as the prompt does."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    result = {"role": "tool", "content": "4"}
    answers = {name: [call, result, {"role": "assistant", "content": said}] for name, said in
               (("chosen", "It is 4."), ("rejected", "It is 5."))}  # fmt: skip
    for row in ({"messages": [USER], **answers}, {"messages": [USER], **{k: [USER, *v] for k, v in answers.items()}}):
        sample = read_format(row, "messages + chosen + rejected")
        assert sample.prompt[0] == {"role": "user", "content": USER["content"]}


def test_the_text_column_that_was_asked_for_is_the_one_that_is_read():
    [row] = prepare([{"content": "abc", "text": "zzz"}], "sft", dataset_text_field="content")
    ids = [*row["prompt_ids"], *row["completion_ids"]]
    assert byte_tokenizer().decode(ids, skip_special_tokens=True) == "abc"
    with pytest.raises(InputError, match="dataset_text_field: there is no column 'content'; did you mean 'contnt'"):
        prepare([{"contnt": "abc", "text": "zzz"}], "sft", dataset_text_field="content")
    for row in ({"messages": [USER, REPLY], "content": "abc"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(InputError, match="dataset_text_field: 'content' is not read, since the rows are "):
            prepare([row], "sft", dataset_text_field="content")


def test_turns_of_users_inside_answers_are_counted(caplog):
    """TRL scores them too; one answer behind a shared prompt has none."""
    long = [USER, REPLY, {**USER, "content": "And 3+3?"}, REPLY]
    rows = [{"chosen": long, "rejected": [USER, WRONG, USER, REPLY]}, {"chosen": long, "rejected": [*long[:3], WRONG]}]
    said = "examples have user or tool turns inside an answer, which are trained as a part of it, as in TRL"
    raw = {"train": datasets.Dataset.from_list(rows)}
    audit = audit_datasets(raw, METHODS["dpo"], byte_tokenizer(), config())["train"]
    for method, count in (("dpo", 1), ("cpo", 1), ("kto", 2)):
        caplog.clear()
        prepare(rows, method)
        assert f"train: {count} {said}. Write all turns but the last into the prompt" in caplog.messages
    assert any(line.startswith(f"train: 1 {said}") for line in audit.warnings())
    caplog.clear()
    row = {"prompt": long[:1], "completion": long[1:]}
    prepare([row], "sft")
    assert caplog.messages == [f"train: 1 {said}. Set assistant_only_loss: true to train only assistant turns"]
    caplog.clear()
    prepare([row], "sft", assistant_only_loss=True)
    prepare([row], "opd")
    assert caplog.messages == []


@pytest.mark.parametrize("column", ["labels", "completion_mask"])
def test_a_null_among_masks_of_ids_is_refused_and_nulls_in_all_rows_are_none(column, tmp_path):
    """Such a row would train all of its tokens."""
    rows = [{"input_ids": [1, 2, 3], column: [1, 1, 1] if column == "completion_mask" else [-100, 2, 3]}] * 1500
    rows += [{"input_ids": [1, 2, 3], column: None}] * 1500
    stream = source(jsonl(tmp_path / "rows.jsonl", rows), streaming=True)
    for data in (rows, datasets.Dataset.from_list(rows), load(stream)):
        with pytest.raises(InputError, match=f"row 1500: column '{column}': missing or null. This row has input_ids"):
            list(prepare(data, "sft"))
    assert len(prepare(rows[1500:], "sft")) == 1500


@pytest.mark.parametrize("label", [False, 0, 0.0, "false", "False", "0", None, True, 1, "true", "yes"])
def test_an_answer_that_is_labelled_false_is_no_right_one_where_prompts_are_read(label, caplog):
    rows = [{"prompt": "2+2?", "completion": "4", "label": label}]
    if label == "yes":
        with pytest.raises(InputError, match="row 0: column 'label': expected true or false"):
            prepare(rows, "opd")
        return
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        [row] = prepare(rows, "opd")
    assert bool(row["completion_ids"]) == (label is None or str(label).lower() in ("true", "1"))
    assert "not read" not in caplog.text
    raw = {"train": datasets.Dataset.from_list(rows)}
    audit = audit_datasets(raw, METHODS["opd"], byte_tokenizer(), config())["train"]
    assert not any("not read" in note for note in audit.notes)


def test_labels_that_number_classes_are_refused_unless_they_say_true():
    rows = datasets.Dataset.from_list([{"prompt": "2+2?", "completion": "4", "label": 0}])
    for names, refused in ((["good", "bad"], True), (["false", "true"], False)):
        labelled = rows.cast_column("label", datasets.ClassLabel(names=names))
        if refused:
            with pytest.raises(InputError, match=r"number classes \(good, bad\)"):
                prepare(labelled, "kto")
        else:
            assert prepare(labelled, "kto")[0]["label"] is False
    # where prompts are read, it says which answers are right ones
    with pytest.raises(InputError, match=r"number classes \(good, bad\)"):
        prepare(rows.cast_column("label", datasets.ClassLabel(names=["good", "bad"])), "opd")
    classed = datasets.Dataset.from_list([{"text": "abc", "label": 1}])
    assert len(prepare(classed.cast_column("label", datasets.ClassLabel(names=["a", "b"])), "sft")) == 1
