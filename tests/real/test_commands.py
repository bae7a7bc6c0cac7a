"""Commands, checkpoints and complete outputs on two pretrained models.

The texts in `golden/` were read by a person. `HF_POSTTRAIN_WRITE_GOLDEN=1 make test-real` writes them again: read the
difference before you commit it.
"""

import io
import json
import os
import re
import sys
from pathlib import Path

import peft
import pytest
import torch
from on_real_models import NAMES, ROWS, found
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posttrain import run

pytestmark = pytest.mark.real
GOLDEN = Path(__file__).parent / "golden"
QUESTION = "What is the capital of France?"


@pytest.fixture(params=NAMES)
def model(request, tmp_path, monkeypatch):
    """The folder of a model; the current directory has rows.jsonl and recipe.yaml.

    SmolLM2 answers conversations. Gemma 3 is a base model and continues plain text.
    """
    folder = found(request.param)
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{question}\n", "completion": answer} for question, answer in ROWS]
    if folder.name == "smollm2":
        rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
                for question, answer in ROWS]  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("recipe.yaml").write_text(json.dumps({
        "method": "sft", "model": {"name_or_path": str(folder), "lora": {"r": 4}},
        "data": {"train": {"path": "rows.jsonl"}},
        "train": {
            "output_dir": "out", "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True,
            "bf16": False, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 128, "report_to": "none",
        },
    }), encoding="utf-8")  # fmt: skip
    return folder


def train(*changes):
    assert run.main(["recipe.yaml", *changes]) == 0


def without_machine(text, folder):
    """Return the text without paths and properties of the machine."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(folder), "MODEL")
    text = re.sub(r"^note: this processor.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ +an estimate of the tensors.*\n.*MALLOC.*\n", "", text, flags=re.MULTILINE)  # of glibc alone
    text, title, memory = text.partition("\nMemory")  # the estimate includes what the process holds already
    text += title + re.sub(r"\d+\.\d+", "N", memory)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


@pytest.mark.parametrize("command", ["data", "check", "probe"])
def test_the_output_is_the_one_that_was_reviewed(model, command, capsys):
    arguments = {
        "data": ["data", "rows.jsonl", "--model", str(model)],
        "check": ["recipe.yaml", "--check"],
        "probe": ["recipe.yaml", "--check", "--probe"],
    }[command]
    assert run.main(arguments) == 0
    page = without_machine(capsys.readouterr().out, model)
    if command == "probe":  # the rest is the page of --check
        page = re.sub(r"\d+\.\d+", "N", page[page.index("\nProbe") + 1 :])
    golden = GOLDEN / f"{model.name}_{command}.txt"
    if os.environ.get("HF_POSTTRAIN_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(page, encoding="utf-8")
    assert page == golden.read_text(encoding="utf-8")


def test_a_resumed_run_is_the_uninterrupted_one(model):
    options = ["train.max_steps=2", "train.save_steps=1", "train.lr_scheduler_type=constant"]
    train(*options, "train.output_dir=whole")
    train(*options, "train.output_dir=again", "train.max_steps=1")
    train(*options, "train.output_dir=again", "train.resume_from_checkpoint=true")
    weights, expected = (load_file(Path(name, "adapter_model.safetensors")) for name in ("again", "whole"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert run.main(["compare", "again", "whole", "--output", "page.html"]) == 0
    assert Path("page.html").stat().st_size > 1000


def test_eval_of_an_adapter_is_the_plain_computation(model, capsys):
    train("train.max_steps=1", "train.save_strategy=no")
    capsys.readouterr()
    assert run.main(["eval", "out", "--data", "rows.jsonl", "--max_completion_length", "4"]) == 0
    numbers = json.loads(Path("out", "all_results.json").read_text(encoding="utf-8"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained("out", dtype=torch.float64).eval()
    tokenizer, total, count = AutoTokenizer.from_pretrained("out"), 0.0, 0
    for row in map(json.loads, Path("rows.jsonl").read_text(encoding="utf-8").splitlines()):
        if "messages" in row:
            prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
            answer = row["messages"][1]["content"]
        else:
            prompt, answer = row["prompt"], row["completion"]
        start = tokenizer(prompt, add_special_tokens="messages" not in row)["input_ids"]
        ids = start + tokenizer(answer, add_special_tokens=False)["input_ids"]
        ends = [] if "messages" not in row else [tokenizer.eos_token_id]
        ids = torch.tensor([ids + (ends or [tokenizer.eos_token_id])])
        with torch.no_grad():
            logps = torch.log_softmax(adapted(ids).logits[0, len(start) - 1 : -1], -1)
        total -= logps.gather(-1, ids[0, len(start) :, None]).sum().item()
        count += ids.shape[1] - len(start)
    assert numbers["eval_rows_answer_nll"] == pytest.approx(total / count, rel=1e-4)


def test_sampled_rows_have_the_probabilities_of_the_plain_model(model):
    arguments = ["sample", str(model), "--prompts", "rows.jsonl", "--n", "2", "--max_completion_length", "6"]
    assert run.main([*arguments, "--seed", "1", "--out", "answers.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 2 * len(ROWS)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in rows[:4]:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logps = torch.log_softmax(plain(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].double(), -1)
        expected = logps.gather(-1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
        assert row["logps"] == pytest.approx(expected.tolist(), abs=2e-3)


def test_chat_answers_greedily_as_transformers_does(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n/save said.jsonl\n"))
    assert run.main(["chat", str(model), "--temperature", "0", "--max_new_tokens", "12"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:  # a base model continues the line
        inputs = tokenizer(QUESTION, return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = plain.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() in capsys.readouterr().out


def test_rounds_train_on_what_was_sampled(model):
    judge = Path("judge.py")
    judge.write_text("def shortest(completions, **_):\n    return [-float(len(text)) for text in completions]\n")
    sys.path.insert(0, str(judge.parent.resolve()))
    try:
        options = "{count: 1, num_generations: 2, max_completion_length: 8, judge: 'judge:shortest', "
        options += "pair: {unfinished: true}}"  # so short an answer rarely ends
        train(f"rounds={options}", "train.max_steps=2", "train.save_strategy=no")
    finally:
        sys.path.remove(str(judge.parent.resolve()))
        sys.modules.pop("judge", None)
    rows = [json.loads(line) for line in Path("out/_rounds/1.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 2 * len(ROWS)
    best = {}
    for row in rows:
        assert row["score"] == -len(row["completion"])
        best[row["prompt"]] = max(row["score"], best.get(row["prompt"], -1e9))
    assert {row["used"] for row in rows} == {0, 1}
    assert all(row["score"] == best[row["prompt"]] for row in rows if row["used"])
    weights = load_file("out/adapter_model.safetensors")
    assert any(weight.abs().sum() > 0 for name, weight in weights.items() if "lora_B" in name)
