"""`hf-posttrain data FILE`: layouts that people have, what is said of each, and that what is written then loads."""

import json
import re
import shutil
import subprocess
import sys

import datasets
import pytest
import yaml
from tokenizers_for_tests import byte_tokenizer
from vision_for_tests import pictures, processor_of, seeing

from hf_posttrain.commands import data as describe
from hf_posttrain.data.column_inference import value_type
from hf_posttrain.data.encode import Plan, read
from hf_posttrain.data.formats import detect_format
from hf_posttrain.data.prepare import prepare
from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.sections import Source

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
ANSWERS = {"chosen": "4", "rejected": "5"}


def test_rows_with_pictures_are_shown_as_a_model_that_sees_reads_them(described, tmp_path):
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    row = {"prompt": [{"role": "user", "content": content}], **ANSWERS, "images": [pictures()[1]]}
    row["chosen"], row["rejected"] = ([{"role": "assistant", "content": text}] for text in ("4", "5"))
    code, text = described(row)
    assert code == 2
    assert "--images" in text
    code, text = described(row, "--images")
    assert code == 0
    assert "user: <image>What is it?" in text
    assert "rejected from rejected, images from images" in text
    assert "not read" not in text
    processor_of("qwen3_vl").save_pretrained(tmp_path / "sees")
    seeing("qwen3_vl")[0].config.save_pretrained(tmp_path / "sees")
    (tmp_path / "pictures").mkdir()
    shutil.copy(pictures()[1], tmp_path / "pictures" / "a.png")
    given = "--images", "--image_folder", "pictures", "--model", "sees"
    code, text = described(row | {"images": ["a.png"]}, *given)
    assert code == 0
    assert "x <|image_pad|>" in text


@pytest.fixture
def described(tmp_path, monkeypatch, capsys):
    """(rows, arguments) -> (exit code, printed text), of rows in mine.jsonl of the current directory."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *arguments, name="mine.jsonl"):
        rows = rows if isinstance(rows, list) else [rows, rows]
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = describe.main([name, *arguments])
        return code, capsys.readouterr().out

    return run


def readers(*kinds):
    """The methods that train on rows of these kinds, as a page lists them."""
    return ", ".join(name for name, method in METHODS.items() if method.rows in kinds)


READ = [  # row, {format: the kinds of rows that are made from it}, the first example
    ({"prompt": "2+2?", "completion": "4"}, {"prompt + completion": (SUPERVISED, PROMPTS)}, ["2+2?", "[[4]]"]),
    ({"text": "four"}, {"text": (SUPERVISED,)}, ["[[four]]"]),
    ({"messages": [USER, REPLY]}, {"messages": (SUPERVISED, PROMPTS)}, ["[[user: 2+2?", "assistant: 4]]"]),
    ({"conversations": SHARED}, {"messages": (SUPERVISED, PROMPTS)}, ["[[user: 2+2?", "assistant: 4]]"]),
    ({"prompt": "2+2?", **ANSWERS},
     {"prompt + chosen + rejected": (PREFERENCE, UNPAIRED, REWARD_PAIRS), "prompt": (PROMPTS,)},
     ["2+2?", "[[4]]", "[[5]]"]),
    ({"chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "5"}]},
     {"chosen + rejected": (PREFERENCE, UNPAIRED, REWARD_PAIRS)},
     ["user: 2+2?", "[[assistant: 4]]", "[[assistant: 5]]"]),
    ({"prompt": "2+2?", "completion": "4", "label": True},
     {"prompt + completion": (SUPERVISED, PROMPTS), "prompt + completion + label": (UNPAIRED,)}, ["2+2?", "[[4]]"]),
    ({"prompt": "2+2?"}, {"prompt": (PROMPTS,)}, ["2+2?", "(sampled by the student)"]),
    ({"prompt": "", "completion": "4"}, {"prompt + completion": (SUPERVISED, PROMPTS)}, ["[[4]]"]),
    ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": (SUPERVISED,)}, ["1[[2 3]]"]),
    ({"instruction": "Add", "input": "2, 2", "output": "4"}, {"instruction + output": (SUPERVISED, PROMPTS)},
     ["Add", "2, 2", "[[4]]"]),
    ({"messages": [USER, REPLY], "kto_tag": True},
     {"messages": (SUPERVISED, PROMPTS), "messages + label": (UNPAIRED,)}, ["user: 2+2?", "[[assistant: 4]]"]),
    ({"prompt": [USER], "completion": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"x": 2}}]}]},
     {"prompt + completion": (SUPERVISED, PROMPTS)},
     ["user: 2+2?", '[[assistant: {"name": "add", "arguments": {"x": 2}}]]']),
]  # fmt: skip


@pytest.mark.parametrize(("row", "formats", "example"), READ)
def test_layouts_that_are_read(described, row, formats, example):
    code, text = described(row)
    assert code == 0
    expected = [f"{form} ({readers(*kinds)})" for form, kinds in formats.items()]
    assert re.findall("^format: (.*)$", text, re.MULTILINE) == expected
    shown = [line.strip() for line in text.partition("first example")[2].splitlines()[1:]]
    assert [line for line in shown if not re.fullmatch(r"\w+:|\(with .*\)", line)] == example


def test_plain_text_is_shown_in_the_chat_template(described, tmp_path):
    byte_tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    chat = ("--model", "base", "--chat_template", "chat.jinja", "--apply_chat_template", "--method", "sft")
    code, text = described({"prompt": "2+2?", "completion": "4"}, *chat)
    assert code == 0
    assert "<user>2+2?" in text
    assert "[[<assistant>4" in text
    with pytest.raises(InputError, match="--apply_chat_template requires --model"):
        described({"prompt": "2+2?"}, "--apply_chat_template")


VALUES = {
    "prompt": "2+2?", "completion": "4", "chosen": "so 4", "rejected": "so 5", "label": True, "text": "four",
    "messages": [USER, REPLY], "prompt_ids": [65, 66], "completion_ids": [67],
    "chosen_ids": [67], "rejected_ids": [68], "input_ids": [65, 66, 67], "instruction": "2+2?", "output": "4",
}  # fmt: skip
"""Of the columns of all formats."""


@pytest.mark.parametrize(
    ("method", "form"), [(name, form) for name, method in METHODS.items() for form in method.rows.formats]
)
@pytest.mark.parametrize("tokens", [False, True])
def test_every_format_of_every_method(described, tmp_path, method, form, tokens):
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    row = {column: VALUES[column] for column in form.split(" + ")}
    if "chosen" in row:  # the answers to messages
        row |= {column: value[:1] for column, value in row.items() if column == "messages"}
    code, text = described(row, "--method", method, *(["--model", "tiny"] if tokens else []))
    assert code == 0
    assert f"\nformat: {form} ({method})\n" in text
    sampled = METHODS[method].rows.sampled
    assert ("(sampled by the student)" in text, "]]\n" in text) == (sampled, not sampled)


MAPPED = [  # row, the method whose recipe it goes into, the mapping
    ({"question": "2+2?", "answer": "4"}, "sft", "{prompt: question, completion: answer}"),
    ({"instruction": "2+2?", "response": "4"}, "sft", "{prompt: instruction, completion: response}"),
    ({"query": "2+2?", "response": "4", "id": 7}, "kd", "{prompt: query, completion: response}"),
    ({"Problem": "2+2?", "Solution": "4"}, "sft", "{prompt: Problem, completion: Solution}"),
    ({"prompt": "2+2?", "response": "4"}, "sft", "{completion: response}"),
    ({"content": "four"}, "sft", "{text: content}"),
    ({"dialogue": SHARED}, "sft", "{messages: dialogue}"),
    ({"conversation": [USER, REPLY]}, "opd", "{messages: conversation}"),
    ({"question": "2+2?", "preferred": "4", "worse": "5"}, "dpo",
     "{prompt: question, chosen: preferred, rejected: worse}"),
    ({"chosen_response": "q 4", "rejected_response": "q 5"}, "dpo",
     "{chosen: chosen_response, rejected: rejected_response}"),
    ({"question": "2+2?", "answer": "4", "is_correct": True}, "kto",
     "{prompt: question, completion: answer, label: is_correct}"),
    ({"tokens": [1, 2, 3]}, "sft", "{input_ids: tokens}"),
    ({"instruction": "Who?", "context": "A page.", "response": "He.", "category": "qa"}, "sft",
     "{input: context, output: response}"),  # Dolly
    ({"question": "Who?", "context": "A page.", "preferred": "He.", "worse": "She."}, "dpo",
     "{instruction: question, input: context, chosen: preferred, rejected: worse}"),
    ({"system_prompt": "Be short.", "conversations": [*SHARED]}, "sft", "{system: system_prompt}"),
    ({"question: one": "2+2?", "problem": "a", "answer": "4"}, "sft", "{prompt: problem, completion: answer}"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "method", "mapping"), MAPPED)
def test_columns_to_write_are_those_that_load(described, tmp_path, row, method, mapping):
    code, text = described(row)
    assert code == 1
    lines = text.partition("add to the recipe:\n")[2].splitlines()[:4]
    assert [line.strip() for line in lines] == ["data:", "train:", "path: mine.jsonl", f"columns: {mapping}"]
    teacher = "teacher: {name_or_path: tiny}\n" if METHODS[method].second == "teacher" else ""
    section = "\n".join(line.removeprefix("  ") for line in lines)
    (tmp_path / "recipe.yaml").write_text(f"method: {method}\nmodel: {{name_or_path: tiny}}\n{teacher}{section}\n")
    recipe = load_recipe("recipe.yaml")
    assert recipe.data.train.columns == yaml.safe_load(mapping)
    rows = load(recipe.data.train)
    assert len(prepare(rows, METHODS[method], byte_tokenizer(), None)) == 2
    pairs = [f"{ours}={theirs}" for ours, theirs in yaml.safe_load(mapping).items()]
    assert described(row, "--method", method, *pairs)[0] == 0  # and on this command line


REFUSED = [  # row, arguments, what to do
    ({"prompt": "2+2?", "completion": "4", "label": "yes"}, ["--method", "kto"],
     r"kto: row 0: column 'label': expected true or false.*found 'yes'; .*row\['label'\] = row\['label'\] == VALUE"),
    ({"prompt": "2+2?", "completion": "4", "score": 0.8}, ["--method", "kto"],
     r"column 'score' holds a score \(0.8\).*row\['label'\] = row\['score'\] >= threshold, or make pairs for DPO"),
    ({"question": "2+2?", "answer": "4", "liked": "no"}, ["--method", "kto"],
     "column 'liked' holds 'no', but labels for KTO must be true or false"),
    ([{"prompt": "q", "completion": "a", "label": label} for label in ("no", "yes", "no")], ["--method", "kto"],
     r"holds 'no', 'yes', but labels .* Set row\['label'\] = row\['label'\] == VALUE, with the value of good answers"),
    ({"chosen": "4", "rejected": "5"}, ["--method", "dpo"],
     "dpo: row 0: columns 'chosen' and 'rejected': the texts share no beginning that could be the prompt"),
    ({"prompt": "2+2?", "chosen": "4"}, ["--method", "dpo"],
     "most similar format is prompt . chosen . rejected: .*chosen could be chosen; there is no column for rejected\n"),
    ({"a": 1, "b": 2.5}, [], r"format: not supported\nsft reads .*\ndpo reads .*\nkto reads"),
    ({"id": "1", "system_prompt": "Be short.", "question": "2+2?", "response": "4"}, ["--method", "sft"],  # OpenOrca
     "columns: {system: system_prompt, prompt: question, completion: response}\nthen sft: row 0: column 'system':"
     " requires messages, and the row is plain text. Set `apply_chat_template: true`"),
    ({"messages": [{"speaker": "me", "text": "hi"}]}, ["--method", "sft"],
     r"sft: row 0: column 'messages': message 0 has no role, expected {role, content}"),
    ({"prompt": "Q: what is two and two?\nA:", "completion": "Q: what is two and two?\nA: 4"}, ["--method", "sft"],
     "sft: data: columns prompt . completion: answers begin with the whole prompt. Remove it"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "arguments", "message"), REFUSED)
def test_layouts_that_need_more_than_names(described, row, arguments, message):
    code, text = described(row, *arguments)
    assert code == 2
    assert re.search(message, text), text


def test_what_one_method_cannot_read_is_said_alongside_the_others(described):
    code, text = described({"prompt": "2+2?", "completion": "4", "label": "yes"})
    assert code == 0
    assert f"format: prompt + completion ({readers(SUPERVISED)})\n" in text
    for method in readers(UNPAIRED, PROMPTS).split(", "):
        assert f"not {method}: row 0: column 'label': expected true or false" in text


def test_in_tokens_of_a_model(described, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    code, text = described({"prompt": [USER], "completion": [REPLY]}, "--model", "tiny")
    assert code == 0
    assert text.endswith(
        "first example (sft), trained tokens in [[brackets]]:\n  prompt:\n    <|im_start|>user\n    2+2?<|im_end|>\n"
        "    <|im_start|>assistant\n    \n  completion:\n    [[4<|im_end|>]]\n"
        "chat template:\n  it reads no reasoning. With `reasoning: keep`, reasoning is written in <think> tags\n"
        "  it writes no tool calls. Rows with tool calls are rejected\n"
    )
    row = {"prompt_ids": [65, 66], "completion_ids": [67, 68, 69], "completion_mask": [1, 0, 1]}
    assert "  prompt:\n    AB\n  completion:\n    [[C]]D[[E]]\n" in described(row, "--model", "tiny")[1]


def test_terminals_get_colour_and_no_control_characters(described, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = described({"prompt": "a\x1b[2Jb", "completion": "4" * 5000})[1]
    assert "a\\x1b[2Jb" in text
    assert "\x1b[1;32m" + "4" * 750 + " ... 3500 characters ... " + "4" * 750 + "\x1b[0m" in text


ODD = "que\x1b[2Jst\nion"


@pytest.mark.parametrize("row", [
    {ODD: "2+2?", "answer": "4"}, {ODD: "2+2?"}, {ODD: "2+2?", "prompt": "2+2?", "completion": "4"},
    {ODD: "2+2?", "prompt": "2+2?", "completion": None},
])  # fmt: skip
def test_names_of_columns_are_on_one_line(described, row):
    _, text = described([row, row])
    assert "\x1b" not in text
    assert text.splitlines()[0] == "mine.jsonl: columns " + ", ".join(row).replace(ODD, "que\\x1b[2Jst\\nion")


def test_messages_about_columns_are_one_line(tmp_path):
    row = {ODD: "2+2?", "prompt": "2+2?", "completion": None}
    plan = Plan("sft", METHODS["sft"].rows, "prompt + completion", "train")
    datasets.Dataset.from_list([{ODD: "2+2?"}]).to_json(str(tmp_path / "rows.jsonl"))
    source = Source(str(tmp_path / "rows.jsonl"), columns={"prompt": "nothing"})
    for refused in (
        lambda: detect_format([ODD], METHODS["sft"]), lambda: read(row, plan),
        lambda: load(source, "train"),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            refused()
        assert "que\\x1b[2Jst\\nion" in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows.parquet", "saved"])
def test_other_files_and_folders(described, tmp_path, name):
    rows = datasets.Dataset.from_list([{"question": "2+2?", "answer": "four"}] * 3)
    write = {"rows.json": rows.to_json, "rows.csv": rows.to_csv, "rows.parquet": rows.to_parquet}
    write.get(name, rows.save_to_disk)(str(tmp_path / name), **({"lines": False} if name == "rows.json" else {}))
    code, text = described({}, name=name)
    assert (code, "columns: {prompt: question, completion: answer}" in text) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "no file or folder absent.jsonl"),
        (["mine.jsonl", "prompt"], "command line: 'prompt' must have the form NAME=COLUMN, such as prompt=question"),
        (["mine.jsonl", "prompt=qestion"], r"no column 'qestion' for 'prompt' \(did you mean 'question'\?\)"),
    ],
)
def test_mistakes(described, arguments, message):
    with pytest.raises(InputError, match=message):
        described({"question": "2+2?"}, *arguments[1:], name=arguments[0])


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        describe.main(["--help"])
    assert "exit code: 0 if the columns are read without changes; 1 if" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", "text"), (True, "flag"), (0, "flag"), (3, "number"), (0.5, "number"), ([USER], "messages"),
     (SHARED, "messages"), ([1, 2], "ids"), (["a"], "list"), ([], "list"), ({"a": 1}, "mapping"), (None, "nothing")],
)  # fmt: skip
def test_kinds(value, expected):
    assert value_type(value) == expected


def test_text_that_is_not_utf_8(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"prompt": "q", "completion": "b"}\n{"prompt": "café", "completion": "b"}\n'.encode("latin-1"))
    with pytest.raises(InputError, match=r"data: .*latin\.jsonl: line 2 is not UTF-8"):
        describe.main([str(file)])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "chosen": "a", "rejeted": "b"}, "a column 'rejeted'; did you mean 'rejected'?"),
        ({"promt": "q", "completion": "a"}, "a column 'promt'; did you mean 'prompt'?"),
        ({"prompt": "q", " completion": "a"}, "columns: {completion: ' completion'}"),
        ({"prompt": "q", "completion": ""}, "(the answer is empty. Such rows are dropped)"),
    ],
)
def test_what_is_nearly_right_is_told(described, row, said):
    assert said in described(row)[1]


@pytest.mark.slow
def test_a_pipe_that_is_closed_is_no_fault(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q" * 10**6, "completion": "a"}))
    command = f"{sys.executable} -m hf_posttrain.run data rows.jsonl | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "rows.jsonl: columns prompt, completion\n"
    assert "BrokenPipe" not in done.stderr
