"""report.follow: what a run keeps for its report while it trains, and that no number depends on it."""

import copy
import gc
import json
import logging
import os
import re
import types
import weakref
from functools import partial
from importlib.metadata import version

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from peft import LoraConfig
from processes_for_tests import engine_arguments, on_two
from runs_for_tests import Page
from tokenizers_for_tests import QWEN3, byte_tokenizer
from training_for_tests import (
    LORA,
    METHODS,
    as_reward_model,
    fake_generate,
    logs_and_weights,
    quick,
    second_model,
    token_rows,
    train_with_report,
    trainer_for,
)
from transformers import AutoModelForSequenceClassification, TrainerCallback, TrainerState

from hf_posttrain import report
from hf_posttrain.engines import engine
from hf_posttrain.generation import rollout
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.models.config import ModelSection
from hf_posttrain.models.load import load_model
from hf_posttrain.report import callbacks, compare
from hf_posttrain.report.callbacks import describe_run, find_obstacle, pick_prompts
from hf_posttrain.report.run_folder import read_run
from hf_posttrain.rollouts.options import SAMPLERS


class Warn(TrainerCallback):
    """Warns after steps 1 and 3, and then fails in step `fails`."""

    def __init__(self, fails=None):
        self.fails = fails

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, 3):
            logging.getLogger("hf_posttrain.monitoring").warning("look at step %d", state.global_step)
        if state.global_step == self.fails:
            raise RuntimeError("lost")


def left(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", quick("sft", "dpo", among=METHODS))
def test_no_number_depends_on_it(method, tmp_path, monkeypatch):
    """Losses and weights bit for bit, with dropout drawn from the generators, whose state is restored."""
    if TABLE[method].rows.sampled:
        monkeypatch.setattr(rollout, "generate", fake_generate)
    second = second_model(method, seed=1)
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
        found = trainer.generate(asked, callbacks.MAX_NEW_TOKENS)
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
    started = left(tmp_path, "run.json")["started"]
    second, warnings = run(4, resume=True)
    assert left(tmp_path, "run.json")["started"] == started
    assert [one["before"] for one in second] == [one["before"] for one in first]
    assert [one["after"] for one in second] != [one["after"] for one in first]
    assert [warning["step"] for warning in warnings] == [1, 3]
    (tmp_path / "samples.json").unlink()
    third, _ = run(6, resume=True)
    assert [one["before"] for one in third] == [None] * 4
    _, warnings = run(2)  # a fresh run
    assert [warning["step"] for warning in warnings] == [1]


def sft(folder, *callbacks, **config):
    """A trainer that is followed."""
    config = {"max_steps": 3, "learning_rate": 1e-2} | config
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), folder, callbacks=[*callbacks], **config)
    report.follow(trainer)
    return trainer


@pytest.mark.parametrize("from_step", [0, 1])
def test_a_model_that_cannot_be_asked_is_trained_all_the_same(tmp_path, caplog, from_step):
    """It fails before the first step and is not asked again, or after the last."""
    trainer, calls = sft(tmp_path), []
    generate = trainer.generate

    def failing(*args, **kwargs):
        calls.append(trainer.state.global_step)
        if trainer.state.global_step >= from_step:
            raise torch.OutOfMemoryError("no room")
        return generate(*args, **kwargs)

    trainer.generate = failing
    trainer.train()
    assert trainer.state.global_step == 3
    assert calls == ([0] if from_step == 0 else [0, 3])
    assert "sample answers are missing: OutOfMemoryError: no room" in caplog.text
    [warning] = left(tmp_path, "run.json")["warnings"] if from_step == 0 else [None]
    assert warning is None or "no room" in warning["message"]
    assert from_step == 0 or all(one["after"] is None for one in left(tmp_path, "samples.json"))


def test_where_other_ranks_wait_an_error_is_one(tmp_path, monkeypatch):
    """Of generation; a file that cannot be written is a warning of the rank that writes."""
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, eval_exact_match=True)
    callback = callbacks.SampleCallback(trainer)
    monkeypatch.setattr(engine, "shards_weights", lambda accelerator: True)
    (tmp_path / "samples.json").mkdir()
    callback.on_train_begin(trainer.args, TrainerState(is_world_process_zero=True), None)
    assert len(callback.prompts) == len(callback.samples) == 4
    trainer.generate = lambda *args, **kwargs: 1 / 0
    for event in (callback.on_train_end, callback.on_train_begin):
        with pytest.raises(ZeroDivisionError):
            event(trainer.args, TrainerState(is_world_process_zero=True), None)


@pytest.mark.parametrize("name", ["samples.json", "run.json"])
def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, caplog, name):
    (tmp_path / name / "x").mkdir(parents=True)
    trainer = sft(tmp_path, Warn())
    trainer.train()
    assert trainer.state.global_step == 3
    consequence = {"samples.json": "sample answers are missing", "run.json": "run.json is missing"}[name]
    assert f"{consequence}: " in caplog.text
    assert {"samples.json": "run.json", "run.json": "samples.json"}[name] in {path.name for path in tmp_path.iterdir()}


def test_a_disk_that_fills_up_later_ends_no_run(tmp_path, capsys):
    class Fill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (tmp_path / "run.json").unlink()
                (tmp_path / "run.json").mkdir()

    trainer = sft(tmp_path, Fill(), Warn())
    trainer.train()
    assert trainer.state.global_step == 3
    assert "Error" in capsys.readouterr().err  # logging's own report of what a handler could not do


@pytest.mark.parametrize("broken", ["{", '{"started": 1}'])
def test_files_that_a_resumed_run_cannot_read_begin_anew(tmp_path, caplog, broken):
    sft(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    for name in ("run.json", "samples.json"):
        (tmp_path / name).write_text(broken)
    sft(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    assert "run.json lacks the start and the warnings of the resumed run" in caplog.text
    assert "sample answers from before training are missing" in caplog.text
    assert left(tmp_path, "run.json")["method"] == "sft"
    assert [one["before"] for one in left(tmp_path, "samples.json")] == [None] * 4
    assert None not in [one["after"] for one in left(tmp_path, "samples.json")]


def test_a_trainer_that_trains_twice_asks_as_often(tmp_path):
    trainer = sft(tmp_path)
    trainer.train()
    first = left(tmp_path, "samples.json")
    trainer.train()
    second = left(tmp_path, "samples.json")
    assert len(first) == len(second) == 4
    assert [one["before"] for one in second] == [one["after"] for one in first]


def test_a_run_that_failed_hears_no_later_warnings_and_is_not_kept_alive(tmp_path):
    trainer = sft(tmp_path / "failed", Warn(fails=2))
    with pytest.raises(RuntimeError, match="lost"):
        trainer.train()
    record = (tmp_path / "failed" / "run.json").read_text()
    assert len(json.loads(record)["warnings"]) == 1
    sft(tmp_path / "next", Warn()).train()  # it warns of step 3 as well
    assert (tmp_path / "failed" / "run.json").read_text() == record
    assert len(left(tmp_path / "next", "run.json")["warnings"]) == 2

    trainer = sft(tmp_path / "again", Warn(fails=2))
    with pytest.raises(RuntimeError, match="lost"):
        trainer.train()
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None
    logging.getLogger("hf_posttrain").warning("nobody listens")


def test_a_run_in_the_folder_of_an_earlier_one_is_not_told_as_that(tmp_path, monkeypatch):
    """From Python, without questions, and never evaluated: what the first left is not the second's."""
    first = sft(tmp_path)
    first.train()
    first.save_metrics("eval", {"eval_loss": 7.0})
    (tmp_path / "recipe.yaml").write_text("method: dpo\n")
    os.utime(tmp_path / "recipe.yaml", (1000, 1000))
    monkeypatch.setattr(callbacks, "find_obstacle", lambda trainer: "it may not")
    second = sft(tmp_path)
    second.save_metrics("train", second.train().metrics)
    second.save_state()
    run = read_run(tmp_path)
    assert (run.method, run.recipe, run.samples) == ("sft", {}, [])
    assert "train_loss" in run.results
    assert "eval_loss" not in run.results


@pytest.mark.slow
def test_runs_from_python_have_their_best_step_and_what_differs(tmp_path):
    """Options that only transformers has, adapters and rows, which no recipe names."""
    lora = {"q": LoraConfig(**LORA), "r": LoraConfig(**LORA | {"r": 2}, use_rslora=True)}
    for name, config, n in (("q", {}, 8), ("r", {"adam_epsilon": 0.1, "hub_token": "secret"}, 4)):
        rows = token_rows("sft")
        trainer = trainer_for(
            "sft", tiny_model(), rows.select(range(n)), tmp_path / name, eval_rows=rows, peft_config=lora[name],
            max_steps=3, learning_rate=1e-2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, greater_is_better=True, **config,
        )  # fmt: skip
        report.follow(trainer)
        trainer.train()
        trainer.save_model()
        trainer.save_state()
        report.write(tmp_path / name)
        best = {entry["eval_loss"]: entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry}
        run = read_run(tmp_path / name)
        assert run.best_step == best[max(best)] == 1
        assert run.last["eval_loss"] == max(best)
        assert "The weights are from step 1" in (tmp_path / name / "README.md").read_text()
    assert "secret" not in (tmp_path / "r" / "run.json").read_text()
    assert compare.main([str(tmp_path / "q"), str(tmp_path / "r"), "--output", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    rows = {row[0]: row[1:] for row in page.table("Settings")}
    assert rows["train.adam_epsilon"] == ["not set", "0.1"]
    assert (rows["model.lora.r"], rows["model.lora.use_rslora"]) == (["4", "2"], ["not set", "true"])
    assert [cell.split(" (")[0] for cell in rows["data.train"]] == ["8 rows", "4 rows"]


def test_an_optimizer_and_an_evaluation_of_the_users_are_told_as_they_are(tmp_path):
    """Options that no optimizer reads are none, and metrics by a prefix of their own are no training's."""
    model, rows = tiny_model(), token_rows("sft")
    trainer = trainer_for("sft", model, rows, tmp_path, learning_rate=0.5)
    trainer = type(trainer)(
        model, trainer.args, None, rows, rows, trainer.tokenizer,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.125), None),
    )  # fmt: skip
    report.follow(trainer)
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(rows, metric_key_prefix="test")
    trainer.save_state()
    given = left(tmp_path, "run.json")["arguments"]
    assert (given["optim"], given["learning_rate"]) == ("SGD", 0.125)
    assert not {"adam_beta1", "weight_decay"} & given.keys()
    run = read_run(tmp_path)
    assert run.last["eval_test_loss"] == pytest.approx(run.last["eval_loss"])
    assert not [key for key in run.last if key.startswith("test")]


def test_weights_of_4_bits_are_counted_one_by_one(tmp_path):
    pytest.importorskip("bitsandbytes")
    whole = tiny_model(hidden_size=64, intermediate_size=128, head_dim=16)
    whole.save_pretrained(tmp_path)
    model = load_model(ModelSection(str(tmp_path), quantization="4bit", lora={}))
    trainer = trainer_for("sft", model, token_rows("sft"), tmp_path, peft_config=LoraConfig(**LORA))
    counts = describe_run(trainer)["weights"]
    assert counts["all"] - counts["trained"] == sum(weight.numel() for weight in whole.parameters())


def test_run_json_says_how_the_run_was_set_up(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "train.hub_token=secret", "--api_key", "secret", "a b"])
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
    # the frozen copy of an adapter that is continued is no weight of the model
    again = trainer_for("dpo", trainer.model, token_rows("dpo"), tmp_path)
    assert sum(p.numel() for p in again.model.parameters()) > run["weights"]["all"]
    assert describe_run(again)["weights"] == run["weights"]
    again.eval_dataset = [{"prompt": "raw", "chosen": "a", "rejected": "b"}]  # which evaluation prepares itself
    assert describe_run(again)["eval_rows"] is None
    assert run["engine"].startswith("single, 1 process, 4 rows a step")
    assert run["versions"]["torch"] == version("torch")
    assert run["command"] == "train.py train.hub_token=<hidden> --api_key <hidden> 'a b'"
    assert run["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", run["commit"])
    monkeypatch.chdir(tmp_path)
    assert callbacks.find_commit() is None


def test_from_python_without_a_recipe(tmp_path):
    """As README has it: follow, train, save, write."""
    trainer = trainer_for("kto", tiny_model(), token_rows("kto"), tmp_path, max_steps=2)
    card = train_with_report(trainer)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Kahneman-Tversky" in page.words
    assert dict(page.table("Hyper-parameters"))["beta"] == "0.1"
    assert "ethayarajh2024kto" in card


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
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


@pytest.mark.parametrize("lora", [False, True])
def test_the_code_on_the_card_of_a_reward_model_scores(lora, tmp_path, monkeypatch):
    """As the trained model does, for an answer in the template."""
    as_reward_model(tiny_model()).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    row = {"prompt": turns[:1], "chosen": turns[1:], "rejected": [turns[1] | {"content": "5"}]}
    trainer = trainer_for(
        "rm", model, datasets.Dataset.from_list([row] * 2), tmp_path / "run", tokenizer=byte_tokenizer(QWEN3),
        peft_config=LoraConfig(**LORA, task_type="SEQ_CLS") if lora else None, learning_rate=1e-2,
    )  # fmt: skip
    text = train_with_report(trainer)
    code = text.partition("```python\n")[2].partition("```")[0].replace("What is 2 + 2?", "2+2?")
    assert ("AutoPeftModelForSequenceClassification" in code) is lora
    assert "pipeline_tag: text-classification" in text
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    [reward, _] = trainer.predict(trainer.train_dataset).predictions[0]
    assert names["model"](**names["inputs"]).logits[0, 0].item() == pytest.approx(reward.item(), rel=1e-4)


@pytest.mark.parametrize(("chats", "packing"), [(True, False), (False, False), (True, True)])
def test_the_card_prompts_a_model_as_it_was_trained(chats, packing, tmp_path):
    """Rows of plain text, though the tokenizer has a template; a template's own options."""
    sides = {"prompt": "2+2?", "completion": "4"}
    if chats:
        sides = {side: [{"role": role, "content": sides[side]}]
                 for side, role in (("prompt", "user"), ("completion", "assistant"))}  # fmt: skip
    trainer = trainer_for(
        "sft", tiny_model(), datasets.Dataset.from_list([sides] * 2), tmp_path, packing=packing,
        chat_template_kwargs={"enable_thinking": False}, tokenizer=byte_tokenizer(QWEN3),
    )  # fmt: skip
    report.follow(trainer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    report.write(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("add_generation_prompt=True, enable_thinking=False, return_dict=True" in text) is chats
    assert ('tokenizer("A prompt in the format of the training data' in text) is not chats


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
    assert pick_prompts(datasets.Dataset.from_list([row])) == [(prompt, expected)]


def test_questions_are_spread_over_a_data_set_and_taken_from_the_start_of_a_stream():
    rows = datasets.Dataset.from_list([{"prompt_ids": [n, n], "completion_ids": [n]} for n in range(10)])
    assert [expected for _, expected in pick_prompts(rows)] == [[0], [2], [5], [7]]
    assert [expected for _, expected in pick_prompts({"first": rows.select(range(2)), "second": rows})] == [[0], [1]]
    assert [expected for _, expected in pick_prompts(rows.to_iterable_dataset())] == [[0], [1], [2], [3]]
    assert pick_prompts(rows.select([])) == []


def test_sharded_models_are_asked_only_where_they_generate_anyway(monkeypatch):
    def trainer(parallelism_config=None, rows=(), method="sft", **args):
        args = types.SimpleNamespace(parallelism_config=parallelism_config, **{"eval_exact_match": False} | args)
        data = {"train_dataset": rows, "eval_dataset": None}
        return types.SimpleNamespace(args=args, method=TABLE[method], accelerator=None, **data)

    monkeypatch.setattr(engine, "shards_weights", lambda accelerator: True)
    assert "would gather all weights on each device" in find_obstacle(trainer())
    assert find_obstacle(trainer(eval_exact_match=True)) is None
    assert find_obstacle(trainer(sampler=SAMPLERS.build("sampler", "policy"))) is None
    assert find_obstacle(trainer(sampler=SAMPLERS.build("sampler", "vllm_colocate"))) is not None
    monkeypatch.setattr(engine, "shards_weights", lambda accelerator: False)
    assert find_obstacle(trainer()) is None
    assert find_obstacle(trainer(rows=None)) == "there are no rows"
    assert find_obstacle(trainer(method="rm")) == "a reward model generates no answers"
    assert "sequence parallelism" in find_obstacle(trainer(types.SimpleNamespace(sp_size=2)))


def _followed(rank, engine_name, folder):
    """Two steps on two ranks; what was logged."""
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft"), folder, max_steps=2, learning_rate=1e-3, eval_exact_match=True,
        per_device_train_batch_size=2, **engine_arguments(engine_name),
    )  # fmt: skip
    report.follow(trainer)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
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
