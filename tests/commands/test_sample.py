"""`hf-posttrain sample`: the rows that it writes, and what it refuses."""

import json
import os
from pathlib import Path

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from PIL import Image
from processes_for_tests import on_two
from tokenizers_for_tests import byte_tokenizer
from vision_for_tests import seeing

from hf_posttrain import run
from hf_posttrain.commands import sample
from hf_posttrain.commands.resumable_jsonl import ResumableFile
from hf_posttrain.data.images import get_image_reader, to_stored_image
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.methods.sft import SFTConfig
from hf_posttrain.rounds.judges.question import answer_row
from hf_posttrain.scoring.vision_inputs import VisionInputs

RECIPE = """
method: opd
model: {name_or_path: tiny}
teacher: {name_or_path: tiny}
data: {train: {path: rows.jsonl}}
train: {output_dir: out, max_length: 60, max_completion_length: 12, use_cpu: true, num_generations: 2}
"""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with recipe.yaml, three rows of two prompts, and a model."""
    tiny_model().save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    turns = [[{"role": "user", "content": text}] for text in ("Hi", "Yes?", "Hi")]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in turns])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sampled(*arguments, out="out.jsonl"):
    assert run.main(["sample", "recipe.yaml", "--out", out, *arguments]) == 0
    return [json.loads(line) for line in open(out, encoding="utf-8")]


@pytest.mark.parametrize("option", ["assistant_only_loss: true", "train_on: last", "train_on: assistant"])
def test_what_a_recipe_trains_of_a_conversation_is_no_matter_to_its_prompts(folder, option, capsys):
    """Of rows that `sample` and rounds read as prompts the last answer is left out, whatever would be trained."""
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    write_rows(folder / "rows.jsonl", [{"messages": turns}])
    train = f"{{output_dir: out, max_length: 60, use_cpu: true, {option}}}"
    text = RECIPE.replace("method: opd", "method: sft").replace("teacher: {name_or_path: tiny}\n", "")
    (folder / "recipe.yaml").write_text(text[: text.index("train: {output")] + f"train: {train}\n")
    rows = sampled("--n", "1", "--max_completion_length", "4")
    assert [row["prompt"] for row in rows] == ["<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"]
    rounds = "rounds={count: 1, num_generations: 2, max_completion_length: 4, judge: exact_match}"
    assert run.main(["recipe.yaml", "--check", rounds]) == 0, capsys.readouterr()


def test_answers_to_pictures_see_them(folder):
    """Two rows of the same tokens with other pictures are two prompts, and their rows name the pictures."""
    model, tokenizer = seeing("qwen3_vl", scale=3.0)
    model.save_pretrained("sees")
    get_image_reader(tokenizer).processor.save_pretrained("sees")
    paths = []
    for seed in (1, 2):
        paths.append(str(folder / f"{seed}.png"))
        Image.effect_noise((40, 40), 60 * seed).convert("RGB").save(paths[-1])
    asked = [{"role": "user", "content": "<image>What?"}]
    write_rows(folder / "rows.jsonl", [{"prompt": asked, "images": [path]} for path in (*paths, paths[0])])
    seen = ["model.name_or_path=sees", "model.images=true", "teacher.name_or_path=sees", "teacher.images=true"]
    rows = sampled(*seen, "--n", "1", "--temperature", "0")
    assert [row["images"] for row in rows] == [[path] for path in paths]
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        shown = VisionInputs.from_model(model, get_image_reader(tokenizer)).prompt_arguments(
            [to_stored_image(row["images"][0])], ids, model
        )
        with torch.no_grad():
            logps = model(input_ids=ids, **shown).logits[0, :, : len(tokenizer)].log_softmax(-1)
        expected = logps[len(row["prompt_ids"]) - 1 : -1].gather(-1, torch.tensor(row["completion_ids"])[:, None])
        assert row["logps"] == pytest.approx(expected[:, 0].tolist(), abs=1e-4)
    assert rows[0]["logps"] != rows[1]["logps"]


def test_rows_are_what_the_model_said_and_how_likely_that_was(folder):
    rows = sampled("train.temperature=0.7")
    assert [row["prompt"] for row in rows] == [rows[0]["prompt"]] * 2 + [rows[2]["prompt"]] * 2  # K of each, once
    assert rows[0]["completion_ids"] != rows[1]["completion_ids"]
    model, tokenizer = tiny_model(), byte_tokenizer()
    for row in rows:
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        assert tokenizer.decode(prompt) == row["prompt"]
        assert row["stopped"] == (answer[-1] in (256, 258))
        assert len(answer) <= 12
        assert tokenizer.decode(answer[:-1] if row["stopped"] else answer) == row["completion"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1, :259]
        logps = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert row["logps"] == pytest.approx(logps.tolist(), abs=1e-4)
    assert sampled("train.temperature=0.7", out="again.jsonl") == rows
    assert sampled("train.temperature=0.7", "train.seed=5", out="other.jsonl") != rows


def test_the_temperature_of_a_loss_is_not_that_of_sampling(folder):
    """KD divides the logits of its divergence by `temperature`, and has no rollouts. Rounds sample at their own."""
    write_rows(folder / "rows.jsonl", [{"prompt": "Hi", "completion": "Yes"}])
    method = "method=kd", "train={output_dir: out, use_cpu: true, max_length: 60, temperature: 2}"
    [row] = sampled(*method, "--max_completion_length", "4")
    [expected] = sampled(*method, "--max_completion_length", "4", "--temperature", "1", out="one.jsonl")
    assert row == expected
    [other] = sampled(*method, "--max_completion_length", "4", "--temperature", "2", out="two.jsonl")
    assert row["logps"] != other["logps"]
    rounds = "rounds={count: 1, num_generations: 2, temperature: 2, max_completion_length: 4, judge: exact_match}"
    sft = "method=sft", "teacher=null", "train={output_dir: out, use_cpu: true, max_length: 60}"
    rows = sampled(*sft, rounds, out="rounds.jsonl")
    assert rows == sampled(*sft, rounds, "--temperature", "2", out="rounds2.jsonl")
    assert rows != sampled(*sft, rounds, "--temperature", "1", out="rounds1.jsonl")


def test_a_greedy_answer_is_one_and_does_not_depend_on_the_seed(folder):
    rows = sampled("--temperature", "0", "--max_completion_length", "4")  # the recipe's num_generations is of sampling
    assert len(rows) == 2
    assert max(len(row["completion_ids"]) for row in rows) == 4
    assert sampled("--temperature", "0", "--max_completion_length", "4", "--seed", "7", out="again.jsonl") == rows


def test_answers_of_a_file_that_was_corrected_meanwhile_are_not_mixed(folder, monkeypatch, caplog):
    rows = [{"prompt": f"{n}?", "completion": f"{n}"} for n in (1, 2, 1)]
    write_rows(folder / "asked.jsonl", rows)
    monkeypatch.setattr(sample, "CHUNK_SIZE", 1)
    monkeypatch.setattr(ResumableFile, "finish", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    command = ["sample", "tiny", "--prompts", "asked.jsonl", "--max_completion_length", "3", "--out", "out.jsonl"]
    assert run.main(command) == 130
    assert "asked.jsonl: 1 duplicate prompt skipped" in caplog.text
    caplog.clear()
    assert run.main(command) == 130
    assert "sample: resuming after 2 of 2 chunks" in caplog.text
    write_rows(folder / "asked.jsonl", [rows[0], rows[1] | {"completion": "two"}])
    assert run.main(command) == 2


def test_the_right_answer_is_one_that_is_not_labelled_false(folder):
    turns = [{"role": "user", "content": "Hi"}]
    rows = [("no", False), ("Hello", True), ("Hey", True)]
    write_rows(folder / "labelled.jsonl", [{"prompt": turns, "completion": said, "label": good} for said, good in rows])
    write_rows(folder / "wrong.jsonl", [{"prompt": turns, "completion": "no", "label": False}])
    [row] = sampled("--prompts", "labelled.jsonl", "--n", "1")
    assert row["reference"] == "Hello"
    [row] = sampled("--prompts", "wrong.jsonl", "--n", "1", out="other.jsonl")
    assert "reference" not in row


def test_columns_and_the_template_of_a_model_are_given(folder):
    Path("asked.jsonl").write_text('{"question": "Hi"}\n')
    Path("template.jinja").write_text("{{ mood }}: {{ messages[0].content }}")
    template = "--apply_chat_template", "--chat_template", "template.jinja"
    options = "--prompts", "asked.jsonl", "--out", "new.jsonl", "--max_completion_length", "4"
    more = "--columns", "prompt=question", "--chat_template_kwargs", '{"mood": "glad"}'
    assert run.main(["sample", "tiny", *options, *template, *more]) == 0
    assert json.loads(Path("new.jsonl").read_text())["prompt"] == "glad: Hi"


def test_rows_are_trained_as_they_were_sampled(folder):
    rows = sampled("--temperature", "0.2")
    config = SFTConfig(output_dir="o", use_cpu=True, max_length=60)
    made = prepare(datasets.Dataset.from_list(rows), METHODS["sft"], byte_tokenizer(), config)
    assert [row["prompt_ids"] for row in made] == [row["prompt_ids"] for row in rows]
    assert [row["completion_ids"] for row in made] == [row["completion_ids"] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out"), (["--out", "rows.jsonl"], "rows.jsonl exists"),
        (["--out", "new", "--n", "0"], "--n: must be a whole number of at least 1"),
        (["--out", "new", "--split", "eval"], "--split eval requires data.eval"),
        (["--out", "new", "--temperature", "-1"], "--temperature"),
        (["--out", "new", "--columns", "prompt=x"], "--columns is only valid with --prompts"),
        (["--out", "new", "--columns", "prompt"], "'prompt' must have the form NAME=COLUMN"),
        (["--out", "new", "--chat_template", "x"], "--chat_template: there is no file x"),
        (["--out", "new", "--temperature", "0", "--n", "3"], "--n 3 cannot be combined with temperature 0"),
        (["--out", "new", "train.temprature=1"], "temperature"),
        (["--out", "new", "model.name_or_path=nowhere"], "nowhere"),
        (["--out", "no/such/place"], "no/such/place"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_said_in_a_line(arguments, said, folder, capsys):
    assert run.main(["sample", "recipe.yaml", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert not [*folder.glob("new*")]


def test_rows_of_labels_have_the_right_answer_and_tools_come_along(folder):
    turn, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "f"}}
    say = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = [{"prompt": turn, "completion": say(text), "label": right, "tools": [tool]}
            for text, right in (("wrong", False), ("right", True))]  # fmt: skip
    rows += [{"prompt": [{"role": "user", "content": "Ho"}], "completion": say("no"), "label": False}]
    write_rows(folder / "rows.jsonl", rows)
    rows = sampled("method=kto", "teacher=null", "train={output_dir: out, use_cpu: true, max_length: 60}",
                   "--max_completion_length", "4")  # fmt: skip
    assert [row.get("reference") for row in rows] == ["right", None]
    assert (rows[0]["messages"], rows[0]["tools"]) == (turn, [tool])
    write_rows(folder / "judged.jsonl", [rows[0] | {"score": n, "completion": str(n), "stopped": True} for n in (0, 1)])
    command = ["pair", "judged.jsonl", "--method", "dpo", "--unfinished", "--out", "pairs.jsonl"]
    assert run.main(command) == 0
    pair = json.loads((folder / "pairs.jsonl").read_text())
    assert pair == {"prompt": turn, "chosen": say("1"), "rejected": say("0"), "tools": [tool]}


def test_a_recipe_of_conversations_is_answered_at_their_ends_packed_or_not(folder):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    write_rows(folder / "rows.jsonl", [{"messages": turns}, {"messages": [*turns, {"role": "user", "content": "Ho"}]}])
    train = "train={output_dir: out, use_cpu: true, max_length: 60, packing: true}"
    rows = sampled("method=sft", "teacher=null", train, "--max_completion_length", "4")
    assert [row.get("reference") for row in rows] == ["Hello", None]
    assert [row["messages"] for row in rows] == [turns[:1], [*turns, {"role": "user", "content": "Ho"}]]


def test_special_tokens_are_in_what_is_trained_on_and_not_in_what_is_judged(folder):
    write_rows(folder / "rows.jsonl", [{"prompt": "Hi"}])
    [row] = sampled("--max_completion_length", "4", "--n", "1")
    tokenizer = byte_tokenizer()
    made = answer_row({"prompt_ids": [tokenizer.eos_token_id, 72], "completion_ids": [], "asked": '{"prompt": "H"}'},
                      [72, tokenizer.eos_token_id, 72], tokenizer, [])  # fmt: skip
    assert (made["asked"], made["answered"]) == ("H", tokenizer.decode([72, 72]))
    assert made["prompt"] != "H"
    assert "asked" not in row


def test_rows_without_prompts_are_refused(folder, capsys):
    write_rows(folder / "rows.jsonl", [{"text": "some"}] * 2)
    assert run.main(["sample", "recipe.yaml", "method=sft", "teacher=null", "train={output_dir: out, use_cpu: true}",
                     "--out", "new"]) == 2  # fmt: skip
    assert "error: recipe.yaml:5: rows.jsonl: columns text are not supported by sample" in capsys.readouterr().err


def error_of(rank, folder):
    os.chdir(folder)
    with pytest.raises(InputError) as caught:
        sample.main(["recipe.yaml", "--out", "new"])
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.engines
def test_several_processes_do_not_write_one_file(folder):
    assert on_two(error_of, "ddp", str(folder)) == [
        "sample must run in one process. Start it without a launcher"
    ] * 2  # fmt: skip
    assert not [*folder.glob("new*")]
