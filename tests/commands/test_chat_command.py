"""`hf-posttrain chat`: what the model is given, what it says and what stays of it, through a pipe and in a terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import CHATML, base_tokenizer, byte_tokenizer
from transformers import AutoModelForCausalLM
from vision_for_tests import seeing

from hf_posttrain.commands import chat
from hf_posttrain.commands.inference import InferenceModel
from hf_posttrain.data import chat as templates
from hf_posttrain.data.images import get_image_reader
from hf_posttrain.data.prepare import prepare
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.methods.sft import SFTConfig
from hf_posttrain.models.config import ModelSection
from hf_posttrain.recipe.sections import Source
from hf_posttrain.scoring.layouts import Prompt

ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, with the folders base and adapter, whose base it is."""
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("base")
    base_tokenizer().save_pretrained("base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained("base"), config).save_pretrained("adapter")
    return tmp_path


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(lines, *arguments) -> what is printed; 12 tokens an answer, and always the same."""

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, ""])))
        assert chat.main(["--max_new_tokens", "12", "--seed", "0", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def given(monkeypatch):
    """What the model was given for each answer, which is its number."""
    seen = []

    def answer(self, ids):
        seen.append(self.inference.tokenizer.decode(ids))
        return f"answer {len(seen)}"

    monkeypatch.setattr(chat.Conversation, "generate", answer)
    return seen


def saved(name="said.jsonl"):
    return [json.loads(line) for line in open(name, encoding="utf-8")]


def answers(row):
    return [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]


def test_answers_are_those_of_the_model_to_what_was_said(talk):
    talk(["Hi", "Yes?", "/save said.jsonl"], "base", "--temperature", "0", "--system", "Be brief.")
    [row] = saved()
    turns = row["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert [turns[n]["content"] for n in (0, 1, 3)] == ["Be brief.", "Hi", "Yes?"]
    model = InferenceModel(ModelSection("base"))
    for n in (2, 4):
        ids = templates.encode(model.tokenizer, [templates.ChatTemplate(model.tokenizer).prompt_text(turns[:n])])[0]
        assert turns[n]["content"] == model.text(model.generate([ids], 12)[0])


def test_a_seed_and_the_place_in_the_conversation_decide_what_is_drawn(talk):
    lines = ["Hi", "/retry", "/save said.jsonl", "/undo", "Hi", "/save said.jsonl"]
    first = talk(lines, "base")
    assert talk(lines, "base") == first
    assert talk(lines, "base", "--seed", "1") != first
    one, other, *_ = (answers(row) for row in saved())
    assert len(one) == len(other) == 1
    assert one != other


def test_an_adapter_is_compared_with_its_base_from_the_same_seed(talk):
    shown = talk(["Hi", "/save said.jsonl", "/compare", "Hi"], "adapter", "--compare")
    base, adapter = (talk(["Hi"], *model).splitlines()[1:-1] for model in (["base"], ["base", "--adapter", "adapter"]))
    assert base != adapter
    lines = shown.splitlines()
    [cut] = [
        n - 1
        for n, line in enumerate(lines)
        if line.startswith("(added to said.jsonl. Its answers that did not end (1)")
    ]
    assert lines[1:cut] == ["[without adapter]", *base, "[with adapter]", *adapter]
    assert "[" not in "".join(line[:1] for line in lines[cut + 1 :])
    talk(["Hi", "/save other.jsonl"], "adapter")
    assert saved() == saved("other.jsonl")  # the conversation goes on with the adapter's answer


def test_the_model_is_given_the_conversation_as_commands_change_it(talk, given):
    told = talk([
        "Hi", "", "More", "/undo", "Less", "/retry", "/system Be brief.", " /bin is", "/clear", "/system", "New",
        "/save said.jsonl", "/temperature 0.25", "/temperature x",
    ], "base")  # fmt: skip
    hi, system = ASKED.format("Hi"), "<|im_start|>system\nBe brief.<|im_end|>\n"
    then = hi + "answer 1<|im_end|>\n"
    last = then + ASKED.format("Less") + "answer 4<|im_end|>\n" + ASKED.format(" /bin is")
    assert given == [
        hi, then + ASKED.format("More"), *[then + ASKED.format("Less")] * 2, system + last, ASKED.format("New"),
    ]  # fmt: skip
    for line in (
        "(the last line and its answer were removed)",
        "(the system turn was set)",
        "(the conversation was cleared)",
        "(there is no system turn)",
        "(added to said.jsonl)",
    ):
        assert line in told.splitlines()
    assert told.count("The temperature is 0.25)\n") == 2


@pytest.mark.parametrize(("lines", "said"), [
    (["/hlep"], "(there is no command /hlep; did you mean '/help'?)"), (["/undo"], "(the conversation is empty)"),
    (["/retry"], "(the conversation is empty)"), (["/save x"], "(the conversation is empty)"),
    (["Hi", "/save"], "(/save requires a file"),
    (["Hi", "/save no/x"], "(no/x cannot be written: No such file or directory)"),
    (["/compare"], "(there is no adapter to compare with)"),
    (["/help"], " /temperature  X: Set the sampling temperature"),
    (["/exit now", "Hi"], "> \n"), (["/temperature hot"], "(hot is not a number of at least 0, such as 0.7. "),
    (["/temperature"], "(The temperature is 0.7)"),
    (["x" * 600], "(the prompt has 619 tokens, but the model has only 512 positions. Enter a shorter line)"),
])  # fmt: skip
def test_what_a_line_with_a_slash_cannot_do_is_said(lines, said, talk, given, folder):
    assert said in talk(lines, "base")
    assert len(given) == lines.count("Hi") * ("/exit now" not in lines)
    assert not (folder / "x").exists()


def test_the_oldest_exchanges_are_forgotten_where_the_model_has_no_positions_left(talk, given):
    texts = [f"{n}" + "x" * 130 for n in range(5)]
    told = talk([*texts, "y" * 600, "/save said.jsonl"], "base", "--system", "Be brief.")
    kept = [[turn[0] for turn in re.findall(r"user\n(.)", prompt)] for prompt in given]
    assert kept == [["0"], ["0", "1"], ["0", "1", "2"], ["1", "2", "3"], ["2", "3", "4"]]
    assert all(prompt.startswith("<|im_start|>system\nBe brief.") for prompt in given)
    assert told.count("(the conversation exceeds the model's 512 positions. The oldest 2 turns were dropped)") == 2
    assert "(the prompt has 6" in told
    assert [turn["content"][:1] for turn in saved()[0]["messages"]] == ["B", "2", "a", "3", "a", "4", "a"]


def test_a_refused_turn_is_taken_back(talk, given, folder):
    refusing = "{% if 'bad' in messages[-1].content %}{{ raise_exception('bad word') }}{% endif %}"
    (folder / "template.jinja").write_text(refusing + CHATML)
    told = talk(["Hi", "a bad one", "Bye"], "base", "--chat_template", "template.jinja")
    assert "(the chat template rejects messages with roles [user, assistant, user]: bad word)" in told
    assert given[1] == given[0] + "answer 1<|im_end|>\n" + ASKED.format("Bye")


def test_options_of_the_template_reach_it(talk, given, folder):
    (folder / "template.jinja").write_text(CHATML + "{{ mood }}")
    options = ["--chat_template", "template.jinja", "--chat_template_kwargs", '{"mood": "glad"}']
    talk(["Hi"], "base", *options)
    assert given == [ASKED.format("Hi") + "glad"]


def test_a_base_model_continues_each_line(talk, given):
    byte_tokenizer(None).save_pretrained("base")
    os.remove("base/chat_template.jinja")
    told = talk(["Once upon", "a time", "/system x"], "base")
    assert given == ["Once upon", "a time"]
    assert told.startswith("(the model has no chat template. It continues each line as plain text, as with ")
    assert told.endswith("(plain text has no system turn. A system turn requires a chat template)\n> \n")
    base_tokenizer().save_pretrained("base")
    assert not talk(["Once upon"], "base", "--plain").startswith("(")
    assert given[2:] == ["Once upon"]


def test_texts_are_saved_each_by_itself_and_rows_of_other_columns_are_kept_apart(talk, given):
    talk(["Once upon", "a time", "/save said.jsonl"], "base", "--plain")
    said = [
        {"prompt": "Once upon", "completion": "answer 1"}, {"prompt": "a time", "completion": "answer 2"},
    ]  # fmt: skip
    assert saved() == said
    told = talk(["Hi", "/save said.jsonl"], "base")
    assert "(said.jsonl does not have the columns {messages}. Choose another file)" in told
    Path("notes.txt").write_bytes(b"\xff\n")
    assert "(notes.txt cannot be written: 'utf-8' codec" in talk(["Hi", "/save notes.txt"], "base")
    for line in ("[1, 2]", "5", "null", "{"):
        Path("notes.txt").write_text(line)
        assert "(notes.txt does not have the columns" in talk(["Hi", "/save notes.txt"], "base")
    assert saved() == said
    Path("said.jsonl").write_text(json.dumps(said[0]))  # without a line break at its end
    talk(["Hi", "/save said.jsonl"], "base", "--plain")
    assert [row["prompt"] for row in saved()] == ["Once upon", "Hi"]


def test_ctrl_c_at_a_line_drops_it_and_ends_nothing(talk, given, monkeypatch):
    typed = iter(["Hi", KeyboardInterrupt, KeyboardInterrupt, "/save said.jsonl", EOFError])

    def line(prompt):
        if isinstance(one := next(typed), str):
            return one
        raise one

    monkeypatch.setattr("builtins.input", line)
    assert talk([], "base").count("(type /exit or press Ctrl-D to quit)") == 2
    assert answers(saved()[0]) == ["answer 1"]


def test_an_answer_that_was_cut_is_marked(talk):
    told = talk(["Hi"], "base", "--temperature", "0")
    [ids] = InferenceModel(ModelSection("base")).generate([Prompt(base_tokenizer().encode(ASKED.format("Hi")))], 12)
    assert ("(truncated after 12 tokens)" in told) == (len(ids) == 12)
    assert "(truncated after 3 tokens)" in talk(["Hi"], "base", "--temperature", "0", "--max_new_tokens", "3")


def test_a_saved_conversation_is_trained_on(talk):
    talk(["Hi", "More", "/save said.jsonl", "/clear", "Hi", "/save said.jsonl"], "base")
    rows = load(Source("said.jsonl"), "data")
    config = SFTConfig(output_dir="o", use_cpu=True, max_length=500)
    made = prepare(rows, METHODS["sft"], base_tokenizer(), config)
    assert [len(row["messages"]) for row in saved()] == [4, 2]
    assert len(made) == 2


def test_an_answer_is_shown_while_it_is_made_and_without_what_a_terminal_obeys(capsys):
    shown = []
    tokenizer = byte_tokenizer()
    screen = chat.AnswerStreamer(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    screen.put(torch.tensor([[72, 105]]))  # the prompt
    for token in [*"né\n\x1b[2J".encode(), 258]:
        screen.put(torch.tensor([token]))
        shown.append(capsys.readouterr().out)
    screen.end()
    assert shown == ["n", "", "é", "\n", "\\x1b", "[", "2", "J", ""]
    assert capsys.readouterr().out == "\n"
    assert screen.text == "né\n\x1b[2J"


def test_a_model_that_sees_talks_without_pictures(talk):
    model, tokenizer = seeing("qwen3_vl")
    model.save_pretrained("sees")
    get_image_reader(tokenizer).processor.save_pretrained("sees")
    talk(["Hi", "/save said.jsonl"], "sees")
    assert len(saved()) == 1


def test_logits_that_are_nan_are_told_in_a_line(talk):
    model = tiny_model()
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained("base")
    with pytest.raises(InputError, match="base: the model's logits are NaN or infinite"):
        talk(["Hi"], "base")


@pytest.mark.parametrize(("arguments", "said"), [
    (["bas"], "model bas: no such folder"), (["base", "--adapter", "adaptr"], "did you mean 'adapter'?"),
    (["adapter", "--adapter", "adapter"], "adapter is an adapter"), (["base", "--compare"], "--compare requires an"),
    (["base", "--temperature", "-1"], "--temperature: must be a number of at least 0"),
    (["base", "--temperature", "nan"], "--temperature: must be a number of at least 0"),
    (["base", "--max_new_tokens", "0"], "--max_new_tokens: must be"), (["base", "--seed", "-1"], "--seed: must be"),
    (["base", "--chat_template", "base/chat_template.jinj"], "did you mean 'base/chat_template.jinja'?"),
    (["base", "--chat_template_kwargs", "{x"], "expected a mapping of options"),
    (["base", "--chat_template_kwargs", "[1]"], "expected a mapping of options"),
    (["base", "--chat_template_kwargs", '{"x": "no"}'], "which templates treat as true"),
    (["base", "--plain", "--system", "x"], "--system requires a chat template"), (["base", "--sed", "1"], "--sed"),
    (["base", "--plain", "--chat_template_kwargs", '{"x": 1}'], "--chat_template_kwargs requires a chat template"),
    (["small", "--adapter", "adapter"], "adapter adapter was not trained on small. The base lacks"), ([], "MODEL"),
])  # fmt: skip
def test_what_cannot_be_talked_to_is_said_in_a_line(arguments, said):
    tiny_model("llama", num_hidden_layers=1).save_pretrained("small")
    base_tokenizer().save_pretrained("small")
    with pytest.raises(InputError) as caught:
        chat.main(arguments)
    assert said in str(caught.value)


def test_switches_that_the_template_does_not_read_are_named(talk):
    said = "(the chat template does not read effort of --chat_template_kwargs)"
    assert said in talk(["Hi"], "base", "--chat_template_kwargs", '{"effort": 1}')
    assert said not in talk(["Hi"], "base")


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(talk, monkeypatch):
    put, shown = chat.AnswerStreamer.put, []

    def stopped(self, ids):
        put(self, ids)
        if len(self.ids) == 3:
            shown.append(self.ids)
            raise KeyboardInterrupt

    monkeypatch.setattr(chat.AnswerStreamer, "put", stopped)
    talk(["Hi", "/save said.jsonl", "Yes?", "/save said.jsonl"], "adapter", "--compare")
    first, second = saved()
    assert second["messages"][:2] == first["messages"]
    assert answers(second) == [base_tokenizer().decode(ids, skip_special_tokens=True) for ids in shown[1::2]]
    assert len(shown) == 4  # of each answer, those without the adapter too


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *command):
        self.pid, self.screen = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that starts tests in the background ignores it
            os.execve(command[0], command, os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.screen)  # which ends a process that is still there

    def until(self, text):
        """What it shows, up to a text."""
        shown, end = b"", time.monotonic() + 50
        while text not in shown:
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, shown
            shown += os.read(self.screen, 1)
        return shown

    def type(self, text):
        os.write(self.screen, text)

    def wait(self):
        """Its exit code."""
        for _ in range(400):
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        raise AssertionError("it goes on")


@pytest.mark.slow
def test_in_a_terminal_tokens_come_one_by_one_and_ctrl_c_ends_an_answer_or_a_line(folder):
    """The answer would take hours: what is seen of it is shown before it is complete."""
    model = tiny_model(max_position_embeddings=10**9, tie_word_embeddings=False)
    model.lm_head.weight.data[256:] = 0  # that of an end is never the highest logit
    model.save_pretrained("base")
    options = ["base", "--temperature", "0", "--max_new_tokens", "9999999"]
    with Terminal(sys.executable, "-m", "hf_posttrain.run", "chat", *options) as terminal:
        terminal.until(b"> ")
        terminal.type(b"Hi\n")
        terminal.until(b"Hi\r\n")
        for _ in range(9):
            assert os.read(terminal.screen, 1)
        terminal.type(b"\x03")
        terminal.until(b"\r\n> ")
        terminal.type(b"/save said.jsonl\n")
        terminal.until(b"(added to said.jsonl. Its answers that did not end (1) would be trained as if they had)\r\n> ")
        terminal.type(b"half a line")
        time.sleep(1)  # readline misses a Ctrl-C while it shows the prompt
        terminal.type(b"\x03")
        terminal.until(b"(type /exit or press Ctrl-D to quit)\r\n> ")
        terminal.type(b"/exit\n")
        assert terminal.wait() == 0
    assert len(answers(saved()[0])[0]) > 1


def test_a_line_that_is_no_unicode_is_told_and_not_kept(talk, monkeypatch):
    """As a pipe gives it in a locale without UTF-8; with a template and without."""
    for plain in ([], ["--plain"]):
        monkeypatch.setattr(chat, "print_output", lambda text: print(text.encode("ascii", "replace")))
        shown = talk(["a \udce9", "/save said.jsonl"], "base", *plain)
        assert "half of a surrogate pair" in shown
        assert "the conversation is empty" in shown
