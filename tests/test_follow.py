"""report.follow: what a run keeps for its report while it trains, and that no number hangs on it."""

import copy
import json
import logging
import types
from functools import partial

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from peft import LoraConfig
from processes_for_tests import engine_arguments, on_two
from runs_for_tests import Page
from training_for_tests import LORA, METHODS, fake_generate, logs_and_weights, quick, token_rows, trainer_for
from transformers import TrainerCallback

from hf_posttrain import engine, report, rollout
from hf_posttrain.report import samples
from hf_posttrain.report.samples import questions, refusal


def left(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", quick("sft", "dpo", among=METHODS))
def test_no_number_hangs_on_it(method, tmp_path, monkeypatch):
    """Losses and weights bit for bit, with dropout drawn from the generators that are put aside."""
    if method == "opd":
        monkeypatch.setattr(rollout, "generate", fake_generate)
    second = tiny_model(seed=1) if method in ("kd", "opd") else None
    peft_config = LoraConfig(**LORA, lora_dropout=0.3)
    found = []
    for name in ("followed", "alone"):
        trainer = trainer_for(
            method, tiny_model(), token_rows(method), tmp_path / name, copy.deepcopy(second), peft_config=peft_config,
            disable_dropout=False, max_steps=3, learning_rate=1e-2, eval_rows=token_rows(method, 5, 1),
        )  # fmt: skip
        if name == "followed":
            report.follow(trainer)
        trainer.train()
        found.append(logs_and_weights(trainer, lora=True))
    (logs, weights), (logs_alone, weights_alone) = found
    assert logs == logs_alone
    assert all(torch.equal(weights[name], weights_alone[name]) for name in weights_alone)
    assert not (tmp_path / "alone" / "samples.json").exists()


def test_samples_are_greedy_answers_before_and_after(tmp_path):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=3, learning_rate=1e-2)
    asked = [row["prompt_ids"] for row in trainer.train_dataset.select([0, 2, 4, 6])]

    def answers():
        found = trainer.generate(asked, samples.LONGEST)
        texts = trainer.tokenizer.batch_decode(found, skip_special_tokens=True)
        ends = [ids[-1] in trainer.terminal_ids for ids in found]
        return [text if end else text + " …" for text, end in zip(texts, ends, strict=True)]

    report.follow(trainer)
    before = answers()
    trainer.train()
    after = answers()
    assert before != after
    found = left(tmp_path, "samples.json")
    assert [one["prompt"] for one in found] == [trainer.tokenizer.decode(ids) for ids in asked]
    assert [one["before"] for one in found] == before
    assert [one["after"] for one in found] == after


def test_a_resumed_run_keeps_its_first_answers_and_its_warnings(tmp_path):
    class Warn(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (1, 3):
                logging.getLogger("hf_posttrain.watch").warning("look at step %d", state.global_step)

    def run(steps, resume=None):
        trainer = trainer_for(
            "sft", tiny_model(), token_rows("sft"), tmp_path, callbacks=[Warn()], max_steps=steps, learning_rate=1e-2,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        report.follow(trainer)
        trainer.train(resume)
        return left(tmp_path, "samples.json"), left(tmp_path, "run.json")["warnings"]

    first, warnings = run(2)
    assert warnings == [{"step": 1, "message": "look at step 1"}]
    second, warnings = run(4, resume=True)
    assert [one["before"] for one in second] == [one["before"] for one in first]
    assert [one["after"] for one in second] != [one["after"] for one in first]
    assert [warning["step"] for warning in warnings] == [1, 3]
    (tmp_path / "samples.json").unlink()
    third, _ = run(6, resume=True)
    assert [one["before"] for one in third] == [None] * 4
    _, warnings = run(2)  # a fresh run
    assert [warning["step"] for warning in warnings] == [1]


def test_run_json_says_how_the_run_was_set_up(tmp_path):
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, peft_config=LoraConfig(**LORA), beta=0.25,
        per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    report.follow(trainer)
    trainer.train()
    run = left(tmp_path, "run.json")
    assert (run["method"], run["rows_per_step"], run["arguments"]["beta"]) == ("dpo", 4, 0.25)
    assert run["arguments"]["loss_type"] == ["sigmoid"]
    assert "output_dir" not in run["arguments"]
    assert run["lora"]["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert run["weights"] == {"all": sum(p.numel() for p in trainer.model.parameters()), "trained": trained}
    assert run["engine"].startswith("single, 1 process, 4 rows a step")
    assert run["versions"]["torch"] == torch.__version__


def test_from_python_without_a_recipe(tmp_path):
    """As README has it: follow, train, save, write."""
    trainer = trainer_for("kto", tiny_model(), token_rows("kto"), tmp_path, max_steps=2)
    report.follow(trainer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    report.write(trainer.args.output_dir)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Kahneman-Tversky" in page.words
    assert dict(page.table("Hyper-parameters"))["beta"] == "0.1"
    assert "ethayarajh2024kto" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("lora", [False, True])
def test_the_code_on_the_model_card_runs(lora, tmp_path, monkeypatch, capsys):
    base = tiny_model()
    if lora:
        base.save_pretrained(tmp_path / "base")
        base = type(base).from_pretrained(tmp_path / "base")
    peft_config = LoraConfig(**LORA, task_type="CAUSAL_LM") if lora else None
    trainer = trainer_for("sft", base, token_rows("sft"), tmp_path / "run", peft_config=peft_config)
    report.follow(trainer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    assert not lora or "[More Information Needed]" in (tmp_path / "run" / "README.md").read_text()  # PEFT's own
    report.write(tmp_path / "run")
    text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert ("AutoPeftModelForCausalLM" in code) is lora
    assert "[More Information Needed]" not in text
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "prompt", "expected"),
    [
        ({"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [1, 1]}, [1, 2], [3, 4]),
        ({"prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6], "completion_mask": [1, 1, 0, 1]}, [1, 2], [3, 4]),
        ({"prompt_ids": [1], "completion_ids": [2, 3, 4, 5], "completion_mask": [1] * 4}, [1, 2, 3], [4, 5]),
        ({"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}, [1, 2], [3]),
        ({"prompt_ids": [1, 2], "completion_ids": [3], "label": True}, [1, 2], [3]),
        ({"prompt_ids": [1, 2], "completion_ids": [3], "label": False}, [1, 2], []),
        ({"prompt_ids": [1, 2], "completion_ids": []}, [1, 2], []),
        ({"prompt_ids": [[1, 2], [9]], "completion_ids": [[3, 4], [9]], "index": 0}, [1, 2], [3, 4]),
    ],
)
def test_questions_of_every_kind_of_row(row, prompt, expected):
    assert questions(datasets.Dataset.from_list([row])) == [(prompt, expected)]


def test_questions_are_spread_over_a_data_set_and_taken_from_the_start_of_a_stream():
    rows = datasets.Dataset.from_list([{"prompt_ids": [n, n], "completion_ids": [n]} for n in range(10)])
    assert [expected for _, expected in questions(rows)] == [[0], [2], [5], [7]]
    assert [expected for _, expected in questions({"first": rows.select(range(2)), "second": rows})] == [[0], [1]]
    assert [expected for _, expected in questions(rows.to_iterable_dataset())] == [[0], [1], [2], [3]]
    assert questions(rows.select([])) == []


def test_sharded_models_are_asked_only_where_they_generate_anyway(monkeypatch):
    def trainer(parallelism_config=None, rows=(), **args):
        args = types.SimpleNamespace(parallelism_config=parallelism_config, **{"eval_exact_match": False} | args)
        return types.SimpleNamespace(args=args, accelerator=None, train_dataset=rows, eval_dataset=None)

    monkeypatch.setattr(engine, "shards", lambda accelerator: True)
    assert "would gather all weights on each device" in refusal(trainer())
    assert refusal(trainer(eval_exact_match=True)) is None
    assert refusal(trainer(rollout="transformers")) is None
    assert refusal(trainer(rollout="vllm")) is not None
    monkeypatch.setattr(engine, "shards", lambda accelerator: False)
    assert refusal(trainer()) is None
    assert refusal(trainer(rows=None)) == "there are no rows"
    assert "sequence parallelism" in refusal(trainer(types.SimpleNamespace(sp_size=2)))


def _followed(rank, engine_name, folder):
    """Two steps on two ranks; what was logged."""
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft"), folder, max_steps=2, learning_rate=1e-3, eval_exact_match=True,
        per_device_train_batch_size=2, **engine_arguments(engine_name),
    )  # fmt: skip
    report.follow(trainer)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.engines
@pytest.mark.parametrize("engine_name", quick("ddp", among=("ddp", "fsdp2", "zero2", "zero3")))
def test_two_processes_leave_the_samples_of_one(engine_name, tmp_path):
    one = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path / "one", max_steps=2, learning_rate=1e-3)
    report.follow(one)
    one.train()
    losses, others = on_two(partial(_followed), engine_name, engine_name, tmp_path / "two")
    assert losses == others
    assert losses == pytest.approx([log["loss"] for log in one.state.log_history if "loss" in log], rel=1e-4)
    assert left(tmp_path / "two", "samples.json") == left(tmp_path / "one", "samples.json")
    assert left(tmp_path / "two", "run.json")["weights"] == left(tmp_path / "one", "run.json")["weights"]
