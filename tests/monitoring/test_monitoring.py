"""Warnings while a run trains: each symptom fires on logs that show it and on nothing else; stop_on ends a run.

histories.json: what runs of recipes/tiny logged (every 5 steps, on 2026-11-21, after the quickstart). `dpo`, `kto` and
`opd` are the recipes as they are, and end at an exact match of 87, 85 and 82 %; `dpo_sick` is without nll_coef and
`kto_sick` with undesirable_weight=1: these fall from 82 % to 34 % and 5 %.
"""

import copy
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import on_two
from training_for_tests import METHODS, fix_rollouts, quick, second_model, token_rows, trainer_for

from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.monitoring import anomaly_monitor
from hf_posttrain.monitoring import symptoms as watch
from hf_posttrain.monitoring.threads import oversubscription_hint
from hf_posttrain.trainer.base import PostTrainer
from hf_posttrain.trainer.rules import stop_on_problems

RUNS = json.loads(Path(__file__).with_name("histories.json").read_text())
REPOSITORY = Path(__file__).parents[2]


def history(logs=12, every=10, rows=16, epoch=0.01, **columns):
    """`logs` logs, one every `every` steps of `rows` rows; a column is a value, or a function of the log's number."""
    columns = {"learning_rate": 1e-5, **columns}
    return [
        {"step": every * (n + 1), "rows": every * (n + 1) * rows, "epoch": epoch * (n + 1)}
        | {name.replace("__", "/"): value(n) if callable(value) else value for name, value in columns.items()}
        for n in range(logs)
    ]


def recorded(name):
    """A run of histories.json, as `look` sees it."""
    run = RUNS[name]
    columns = run["logs"]
    return [
        {key: values[n] for key, values in columns.items()} | {"rows": run["rows_per_step"] * step}
        for n, step in enumerate(columns["step"])
    ], run["method"]


def preference(chosen=0.0, change=0.0, margin=0.0, accuracy=0.7, **columns):
    return history(
        logps__chosen=chosen, logps__chosen_change=change, rewards__margins=margin, rewards__accuracies=accuracy,
        **{"rewards__chosen": 0.1, "rewards__rejected": -0.1} | columns,
    )  # fmt: skip


def kto(kl, clamped, **columns):
    return history(kl=kl, kl_clamped=clamped, rewards__chosen=0.1, logps__chosen_change=1.0, **columns)


def rollouts(length, stopped, **columns):
    return history(generation__length=length, generation__stopped=stopped, **columns)


# ---- logs that show a symptom, and logs that nearly do

RISING, FALLING = (lambda n: 0.1 * n), (lambda n: -1.0 * n)
SICK = {
    "chosen falls from -20 to -31": ("chosen_falling", "dpo", preference(lambda n: -20.0 - n, FALLING, RISING)),
    "the same of desirable answers": ("chosen_falling", "kto", preference(lambda n: -20.0 - n, FALLING, RISING)),
    "every window is clamped": ("kl_zero", "kto", kto(-0.3, 1.0)),
    "the KL is exactly 0": ("kl_zero", "kto", kto(0.0, 0.0)),
    "rewards are nothing": ("no_learning", "dpo", preference(rewards__chosen=1e-5, rewards__rejected=-2e-5)),
    "one class alone, after a warm-up": (
        "no_learning", "kto",
        history(rewards__chosen=1e-5, logps__chosen_change=1e-4, learning_rate=lambda n: 1e-7 * min(n, 4)),
    ),
    "all rollouts are cut": ("clipped_rollouts", "opd", rollouts(64.0, 0.01)),
    "none ends": ("no_eos", "opd", rollouts(64.0, 0.0)),
    "the same with a log a step": ("clipped_rollouts", "opd", rollouts(64.0, 0.01, rows=8, every=1)),
    "one row a step, none ends": ("no_eos", "opd", rollouts(64.0, 0.0, rows=1, every=1, logs=140)),
    "every window is clamped, a log a step": ("kl_zero", "kto", kto(-0.3, 1.0, every=1, logs=60)),
    "they are empty": ("empty_rollouts", "opd", rollouts(1.02, 1.0)),
    "all right from the second log": ("label_leak", "dpo", preference(accuracy=lambda n: 1.0 if n else 0.9)),
    "so too with KTO": ("label_leak", "kto", preference(accuracy=1.0)),
}  # fmt: skip
WELL = {
    "chosen falls by a fiftieth": ("dpo", preference(lambda n: -500.0 - n, FALLING, RISING)),
    "chosen falls by half a nat": ("dpo", preference(lambda n: -1.0 - 0.04 * n, lambda n: -0.04 * n, RISING)),
    "chosen falls and the margin does not rise": ("dpo", preference(lambda n: -20.0 - n, FALLING, 0.5)),
    "two logs of fallen answers": ("dpo", preference(-20.0, lambda n: -8.0 if n in (8, 9) else -0.5, RISING)),
    "too few logs to say": ("dpo", preference(lambda n: -20.0 - 9 * n, lambda n: -9.0 * n, RISING)[:5]),
    "one window in ten is not clamped": ("kto", kto(-0.3, lambda n: 0.9 if n == 5 else 1.0)),
    "ten steps are clamped": ("kto", kto(-0.3, 1.0, every=1)),
    "bco has no KL": ("kto", history(rewards__chosen=0.1, delta=0.0)),
    "a long warm-up": (
        "dpo", preference(rewards__chosen=1e-5, rewards__rejected=1e-5, learning_rate=lambda n: 1e-8 * n),
    ),
    "learning_rate is 0": ("dpo", preference(rewards__chosen=0.0, rewards__rejected=0.0, learning_rate=0.0)),
    "one class moves": ("dpo", preference(rewards__chosen=1e-5, rewards__rejected=-0.02)),
    "half of the rollouts end": ("opd", rollouts(40.0, 0.5)),
    "one log of cut rollouts": ("opd", rollouts(64.0, lambda n: 0.0 if n == 11 else 0.9)),
    "a dozen rollouts in all": ("opd", rollouts(64.0, 0.0, rows=1, every=1)),
    "answers of two tokens": ("opd", rollouts(2.0, 1.0)),
    "rollouts are cut after one token": ("opd", rollouts(1.0, 0.1)),
    "lmbda: 0 samples nothing": ("opd", history(loss=1.0)),
    "99 % right": ("dpo", preference(accuracy=0.99)),
    "few rows": ("dpo", preference(accuracy=1.0, rows=1)),
    "rows seen before": ("dpo", preference(accuracy=lambda n: 1.0 if n > 3 else 0.7, epoch=0.5)),
    "a loss that is not a number": ("dpo", preference(*[float("nan")] * 4, rewards__chosen=float("nan"))),
    "sft knows none of them": ("sft", preference(-99.0, -99.0, RISING, 1.0)),
    "nothing logged yet": ("kto", []),
}  # fmt: skip


@pytest.mark.parametrize("case", SICK)
def test_a_symptom_is_seen_with_its_figures_and_a_key_to_change(case):
    name, method, logs = SICK[case]
    found = watch.find_symptoms(logs, TABLE[method].symptoms)
    assert name in found
    assert found.keys() <= {name, "clipped_rollouts"}  # rollouts that never end are clipped as well
    assert found[name].startswith(f"step {logs[-1]['step']}: ")
    assert "(" in found[name]
    assert any(word in found[name] for word in ("train.", "data.", "model."))


@pytest.mark.parametrize("case", WELL)
def test_nothing_is_seen_where_nothing_is_wrong(case):
    method, logs = WELL[case]
    for end in range(len(logs) + 1):
        assert watch.find_symptoms(logs[:end], TABLE[method].symptoms) == {}


@pytest.mark.parametrize(
    ("run", "expected"),
    [("dpo", {}), ("kto", {}), ("opd", {}), ("dpo_sick", {"chosen_falling": 30}), ("kto_sick", {"chosen_falling": 30})],
)
def test_real_runs_are_told_apart(run, expected):
    """Every prefix of the logs is looked at, as while the run trains: the step of each first warning."""
    logs, method = recorded(run)
    seen = {}
    for end in range(1, len(logs) + 1):
        for name in watch.find_symptoms(logs[:end], TABLE[method].symptoms):
            seen.setdefault(name, logs[end - 1]["step"])
    assert seen == expected


def test_a_loss_that_means_to_lower_chosen_answers_may():
    _, _, logs = SICK["chosen falls from -20 to -31"]
    assert watch.find_symptoms(logs, TABLE["dpo"].symptoms, ["apo_down"]) == {}
    assert watch.find_symptoms(logs, TABLE["dpo"].symptoms, ["sigmoid"])


class Seen(list):
    """Logs that count how often one is looked at."""

    count = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        Seen.count += len(found) if isinstance(where, slice) else 1
        return Seen(found) if isinstance(where, slice) else found

    def __iter__(self):
        Seen.count += len(self)
        return super().__iter__()


def guarded(method, logs, monkeypatch):
    """(an AnomalyMonitor that has seen the logs as they came, name -> step of its first warning)."""
    monkeypatch.setattr(anomaly_monitor, "broadcast_object_list", lambda found: found)
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(stop_on=None), method=TABLE[method], get_total_train_batch_size=lambda args: 16
    )
    watcher, first = anomaly_monitor.AnomalyMonitor(trainer), {}
    monkeypatch.setattr(watcher, "_nonfinite", dict)
    for log in logs:
        state = types.SimpleNamespace(log_history=[log], is_world_process_zero=True, global_step=log["step"])
        watcher.on_log(trainer.args, state, types.SimpleNamespace(), logs=log)
        first |= dict.fromkeys(watcher.warned - first.keys(), log["step"])
    return watcher, first


@pytest.mark.parametrize("told", [(), ("chosen_falling", "label_leak")])
def test_a_hundred_thousand_logs_cost_little(told, monkeypatch):
    """Each log is looked at some 5 times by each detector, at most 800 logs at a time: not all logs at each."""
    logs = [{**log, "loss": 0.5} for log in preference(logs=100_000, every=1, margin=lambda n: n % 3)]
    looked = []

    def counted(history, *args):
        assert len(history) <= 4 * watch.HISTORY_ENDS
        looked.append(args[-1])
        return {}

    monkeypatch.setattr(watch, "find_symptoms", counted)
    watcher, _ = guarded("dpo", logs, monkeypatch)
    assert len(looked) == 100_000
    assert watcher.history[0]["step"] == 1
    assert watcher.history[-1]["step"] == 100_000
    monkeypatch.undo()
    Seen.count = 0
    watch.find_symptoms(Seen(watcher.history), TABLE["dpo"].symptoms, (), told)
    assert 0 < Seen.count < 5 * 4 * watch.HISTORY_ENDS
    assert watch.find_symptoms(Seen(watcher.history), TABLE["dpo"].symptoms, (), tuple(watch.SYMPTOMS)) == {}


LATE = {
    "rewards rest behind a warm-up of 2000 logs": ("dpo", preference(
        logs=3000, rewards__chosen=lambda n: 0.1 if n < 2000 else 1e-5, rewards__rejected=1e-5, every=1,
        learning_rate=lambda n: 1e-9 * min(n, 2000),
    ), {"no_learning": 2051}),
    "rewards have moved, and fall back long after": ("dpo", preference(
        logs=3000, rewards__chosen=lambda n: 0.1 if n == 1100 else 1e-5, rewards__rejected=1e-5, every=1,
        learning_rate=lambda n: 1e-9 * (n if n < 1090 else 1090 - n / 100),
    ), {}),
    "accuracy is perfect but for an early log": ("dpo", preference(
        logs=3000, accuracy=lambda n: 0.9 if n == 5 else 1.0, epoch=1e-4, every=1,
    ), {}),
    "answers begin to fall late": ("dpo", preference(
        lambda n: -20.0 - max(n - 2000, 0), lambda n: -1.0 * max(n - 2000, 0), lambda n: 0.1 + n, logs=3000, every=1,
    ), {"chosen_falling": 2007}),
    "rollouts end no more": ("opd", rollouts(64.0, lambda n: 0.9 * (n < 2000), logs=3000), {"clipped_rollouts": 20030}),
    "the KL sinks": ("kto", kto(lambda n: 0.1 - 0.4 * (n > 2000), lambda n: n > 2000, logs=3000), {"kl_zero": 20110}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LATE)
def test_thinned_logs_show_what_all_of_them_do(case, monkeypatch):
    method, logs, expected = LATE[case]
    logs = [{**log, "loss": 0.5} for log in logs]
    watcher, first = guarded(method, logs, monkeypatch)
    assert first == expected
    assert len(watcher.history) < 4 * watch.HISTORY_ENDS


def test_thinning_keeps_all_that_is_little():
    logs = history(logs=2 * watch.HISTORY_ENDS)
    assert watch.thin_history(logs) == logs
    assert watch.thin_history([]) == []


# ---- names


def test_names_are_checked_without_torch():
    imports = (
        "import sys; from hf_posttrain.methods import METHODS; from hf_posttrain.trainer.rules import stop_on_problems"
    )
    code = f"{imports}; list(stop_on_problems('nan', METHODS['sft'])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "False"
    assert watch.as_list(None) == []
    assert watch.as_list("nan") == ["nan"]
    assert list(stop_on_problems(["nan", "kl_zero"], TABLE["kto"])) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [("nam", "stop_on: 'nam' is not a warning; did you mean 'nan'"),
     (["nan", "label_leek"], "did you mean 'label_leak'"),
     ("kl_zero", "stop_on: kl_zero is not a warning of method dpo. Use nan, no_learning, label_leak, chosen_falling")],
)  # fmt: skip
def test_names_that_do_not_exist_are_refused(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, stop_on=given)


# ---- a loss that is not finite


def spoil(trainer, from_step, rank=0):
    """From this step on (1 is the first), the losses of this rank are NaN."""
    real = trainer.losses

    def losses(model, batch):
        found = real(model, batch)
        if trainer.state.global_step + 1 >= from_step and trainer.accelerator.process_index == rank:
            found.values = found.values * float("nan")
        return found

    trainer.losses = losses
    return trainer


@pytest.mark.parametrize("kept", [1, 3, 32])
@pytest.mark.parametrize("method", quick("kto", "opd", among=METHODS))
def test_the_batch_of_the_first_bad_step_is_saved(method, kept, tmp_path, monkeypatch, caplog):
    """Rows 4 to 7 are those of step 3 (2 micro-batches of 1 row): row 4 is in the first."""
    monkeypatch.setattr(anomaly_monitor, "MAX_PENDING", kept)
    fix_rollouts(monkeypatch)
    rows = token_rows(method, 12)
    trainer = spoil(trainer_for(
        method, tiny_model(), rows, tmp_path, second_model(method, seed=9), max_steps=5,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=5, layout="padded",
    ), 3)  # fmt: skip
    trainer.train()
    assert caplog.text.count("not finite at step 3") == 1
    assert f"{tmp_path}/nonfinite_step_3_rank_0.pt" in caplog.text
    saved = torch.load(tmp_path / "nonfinite_step_3_rank_0.pt")
    assert saved["step"] == 3
    assert saved["loss"] != saved["loss"]
    if not TABLE[method].rows.sampled:  # sampled rows change places within a step: micro-batches of about one length
        assert saved["rows"] == [4]
    ids = rows[saved["rows"][0]]["prompt_ids"]
    assert saved["batch"]["input_ids"][0, : len(ids)].tolist() == ids
    assert saved["text"][0].startswith(trainer.tokenizer.decode(ids))
    assert trainer.state.global_step == 5
    assert trainer.stopped is None


@pytest.mark.parametrize("config", [{"logging_steps": 2}, {"logging_steps": 100}, {"logging_strategy": "no"}])
def test_stop_on_nan_leaves_good_checkpoints_alone(config, tmp_path, caplog):
    """Checkpoints of steps 1 and 2; step 3 is bad. Where no log comes before the next, it is looked at all the same."""
    trainer = spoil(trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=6, save_strategy="steps", save_steps=1,
        save_total_limit=2, learning_rate=1e-3, stop_on="nan", eval_rows=token_rows("sft", 3), **config,
    ), 3)  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert trainer.stopped.startswith("stopped at step 3 (stop_on: nan): the loss was not finite at step 3; its batch")
    assert caplog.text.count("not finite") == 1
    assert "train.learning_rate" in trainer.stopped


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_stop_on_nan_at_an_epochs_end(strategy, tmp_path):
    """Two steps an epoch; the last step of the second is bad."""
    trainer = spoil(trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, num_train_epochs=3, max_steps=-1, save_strategy="epoch",
        logging_strategy=strategy, eval_strategy="epoch", eval_rows=token_rows("sft", 3), stop_on=["nan"],
        learning_rate=1e-3,
    ), 4)  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 4
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.stopped
    if strategy == "epoch":  # otherwise it is known only once the run is over
        assert sum("eval_loss" in log for log in trainer.state.log_history) == 1


def test_stop_on_nan_comes_before_the_best_checkpoint(tmp_path):
    """An evaluation is behind each step, a log behind the last alone. Broken weights would never be the best, so the
    metric is one that any evaluation improves."""
    trainer = spoil(trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=6, save_strategy="best", eval_strategy="steps",
        eval_steps=1, metric_for_best_model="eval_count", greater_is_better=True, logging_steps=100, stop_on="nan",
        eval_rows=token_rows("sft", 3), learning_rate=1e-3,
    ), 3)  # fmt: skip
    real, evaluations = trainer.evaluate, []

    def evaluate(*args, **kwargs):
        evaluations.append(trainer.state.global_step)
        return real(*args, **kwargs) | {"eval_count": float(len(evaluations))}

    trainer.evaluate = evaluate
    trainer.train()
    assert trainer.stopped.startswith("stopped at step 3 (stop_on: nan)")
    assert evaluations == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("failed writing file\nhere")])
def test_a_batch_that_cannot_be_kept_is_no_end(error, tmp_path, monkeypatch, caplog):
    def full(saved, path):
        Path(path).write_bytes(b"half")
        raise error

    trainer = spoil(trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=3, logging_steps=1), 2)
    monkeypatch.setattr(anomaly_monitor.torch, "save", full)
    trainer.train()
    reason = "No space left on device" if isinstance(error, OSError) else "failed writing file"
    file = tmp_path / "nonfinite_step_2_rank_0.pt"
    assert f"not finite at step 2; {file} could not be written ({reason}). If its batch" in caplog.text
    assert "its batch is in" not in caplog.text
    assert not file.exists()
    assert trainer.state.global_step == 3


def test_a_second_training_begins_anew(tmp_path, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=2, stop_on="nan")
    losses, weights = trainer.losses, copy.deepcopy(trainer.model.state_dict())
    spoil(trainer, 1).train()
    assert trainer.stopped
    trainer.losses, trainer.optimizer, trainer.lr_scheduler = losses, None, None
    trainer.model.load_state_dict(weights)
    trainer.train()
    assert trainer.stopped is None
    assert trainer.state.global_step == 2


def on_ranks(rank, folder, where):
    trainer = spoil(trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), folder, max_steps=8, per_device_train_batch_size=2, logging_steps=2,
        save_strategy="steps", save_steps=2, stop_on="nan",
    ), 3, rank=where)  # fmt: skip
    trainer.train()
    return trainer.state.global_step, trainer.stopped


def on_a_full_disk(rank, folder):
    """The bad batch is that of rank 1, which cannot write it."""

    def full(saved, path):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anomaly_monitor.torch, "save", full)
        patch.setattr(PostTrainer, "_save_checkpoint", lambda *args: None)  # on the same disk
        return on_ranks(rank, folder, 1)


@pytest.mark.slow
def test_ranks_stop_together_where_one_has_a_full_disk(tmp_path):
    (step, said), other = on_two(on_a_full_disk, "ddp", str(tmp_path))
    assert (step, said) == other
    assert step == 4
    assert "nonfinite_step_3_rank_1.pt could not be written (No space left on device)" in said


@pytest.mark.slow
def test_ranks_stop_together_and_name_the_one_that_had_the_batch(tmp_path):
    (step, said), other = on_two(on_ranks, "ddp", str(tmp_path), 1)
    assert (step, said) == other
    assert step == 4  # the next log
    assert "not finite at step 3" in said
    assert [path.name for path in tmp_path.glob("nonfinite*")] == ["nonfinite_step_3_rank_1.pt"]
    assert "nonfinite_step_3_rank_1.pt" in said
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


# ---- whole trainings


def warned(caplog):
    """The names of the symptoms in the log, each as often as it was said."""
    return [name for name, symptom in watch.SYMPTOMS.items() for line in caplog.messages if symptom.description in line]


@pytest.mark.parametrize("method", quick("dpo", "opd", among=METHODS))
def test_healthy_trainings_are_left_alone(method, tmp_path, monkeypatch, caplog):
    fix_rollouts(monkeypatch)
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 80), tmp_path, second_model(method, seed=9),
        max_steps=60, learning_rate=1e-4, logging_steps=5, stop_on=["nan"],
    )  # fmt: skip
    trainer.train()
    assert warned(caplog) == []
    assert trainer.stopped is None
    assert trainer.state.global_step == 60


def test_a_leaked_label_ends_a_real_dpo_run(tmp_path, caplog):
    """Chosen answers are made of one token, rejected ones of another."""
    rows = [{"prompt_ids": [n], "chosen_ids": [7] * (1 + n % 3), "rejected_ids": [8] * (1 + n % 3)} for n in range(240)]
    trainer = trainer_for(
        "dpo", tiny_model(), datasets.Dataset.from_list(rows), tmp_path, max_steps=30, learning_rate=1e-2,
        per_device_train_batch_size=8, logging_steps=5, stop_on=["nan", "label_leak"], save_strategy="steps",
        save_steps=5,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 25  # logs 2 to 5, 20 steps of 8 rows
    assert "stopped at step 25 (stop_on: label_leak)" in caplog.text
    assert "label_leak" in warned(caplog)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (5, 10, 15, 20)}


@pytest.mark.parametrize("method", [name for name in METHODS if "no_learning" in TABLE[name].symptoms])
def test_a_learning_rate_that_moves_nothing_is_noticed_once(method, tmp_path, caplog):
    trainer = trainer_for(
        method, tiny_model(), token_rows(method), tmp_path, max_steps=70, learning_rate=1e-10, logging_steps=5
    )
    trainer.train()
    assert warned(caplog).count("no_learning") == 1
    assert trainer.state.global_step == 70


def test_a_kl_below_zero_throughout_is_noticed(tmp_path, caplog):
    """The reference gives the mismatched completions more than the policy does, at every step."""
    trainer = trainer_for(
        "kto", tiny_model(seed=8), token_rows("kto"), tmp_path, second=tiny_model(), max_steps=60, learning_rate=1e-5,
        logging_steps=5,
    )  # fmt: skip
    trainer.train()
    assert all(log["kl"] < 0 for log in trainer.state.log_history if "loss" in log)
    assert "kl_zero" in warned(caplog)


def test_rollouts_that_never_end_are_noticed_and_end_the_run(tmp_path, monkeypatch, caplog):
    def endless(model, prompts, max_new_tokens, *args, **kwargs):
        return [[5] * max_new_tokens for _ in prompts]

    monkeypatch.setattr(rollout, "generate", endless)
    trainer = trainer_for(
        "opd", tiny_model(), token_rows("opd", 40), tmp_path, tiny_model(seed=9), max_steps=60, logging_steps=8,
        stop_on="no_eos",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 40  # 5 logs of 32 prompts
    assert warned(caplog) == ["clipped_rollouts", "no_eos"]


def test_a_resumed_run_knows_its_earlier_logs(tmp_path, caplog):
    """Five logs before the checkpoint and three behind it: the eighth is the first with 50 steps at rest."""
    config = {"max_steps": 60, "learning_rate": 1e-10, "logging_steps": 10, "save_strategy": "steps", "save_steps": 50}
    trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config | {"max_steps": 50}).train()
    assert warned(caplog) == []
    trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config).train(resume_from_checkpoint="auto")
    assert warned(caplog) == ["no_learning"]


# ---- threads and cores


@pytest.mark.parametrize(
    ("cores", "load", "threads", "processes", "said"),
    [
        (2, 1.0, 2, 1, ""),  # the run itself, and little else
        (2, 3.0, 2, 1, ""),  # its own threads and one more
        (2, 9.0, 1, 2, ""),  # one thread does not wait for another
        (2, 4.5, 2, 1, "other programs use about 2 of the 2 cores, so that the threads of this run wait"),
        (64, 70.0, 64, 1, ""),
        (64, 120.0, 64, 1, "other programs use about 56 of the 64 cores"),
        (8, 0.0, 8, 2, "2 processes of 8 threads share 8 cores, so that they wait for each other. Set OMP_"),
        (8, 0.0, 4, 2, ""),
        (8, 9.5, 4, 1, ""),  # half of the cores are taken, and half as many threads run
        (1, 0.0, 2, 1, "1 process of 2 threads share 1 cores"),
    ],
)
def test_threads_that_wait_for_each_other(monkeypatch, cores, load, threads, processes, said):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = oversubscription_hint(threads, processes)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.slow
def test_nothing_is_printed_of_a_kernel_and_of_a_reporter_that_are_not_used():
    code = "from hf_posttrain.recipe.build import import_quietly; import_quietly('hf_posttrain.methods.sft')"
    env = os.environ | {"WANDB_MODE": "offline"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout + done.stderr == ""
