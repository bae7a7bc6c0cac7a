"""What a run shows: a bar on a terminal, lines elsewhere; and what they tell: tokens a second, memory, time left."""

import contextlib
import io
import logging
import re
import time
import types

import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import on_two
from training_for_tests import METHODS, fix_rollouts, names_where, second_model, token_rows, trainer_for
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.monitoring import progress

LINE = re.compile(r"step \d+/6  loss \d\S*  (\w[\w ]* -?[\d.e-]+  )*[\d,]+ tokens/s  \d\d:\d\d<\d\d:\d\d")


class Terminal(io.StringIO):
    """As far as a bar can tell."""

    encoding = "utf-8"

    def isatty(self):
        return True


@contextlib.contextmanager
def on_terminal(output=None):
    """Standard error is a terminal, and so is standard output unless another is given."""
    screen = Terminal()
    with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(output or screen):
        yield screen


def run(method, tmp_path, **config):
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 16), tmp_path, second_model(method, seed=9),
        **{"max_steps": 6, "logging_steps": 2, "disable_tqdm": False, "learning_rate": 1e-3} | config,
    )  # fmt: skip
    trainer.train()
    return trainer


# ---- lines


@pytest.mark.parametrize("disable_tqdm", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_file_gets_one_readable_line_for_each_log(method, disable_tqdm, tmp_path, monkeypatch, capsys):
    fix_rollouts(monkeypatch)
    trainer = run(method, tmp_path, disable_tqdm=disable_tqdm)
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if not line.startswith("[")]  # DeepSpeed's, once a process
    assert len(lines) == 4
    assert all(LINE.fullmatch(line) for line in lines[:3]), lines
    assert re.fullmatch(r"step 6/6  done in 00:\d\d, mean loss \S+", lines[3])
    for name in TABLE[method].key_metrics.values():
        assert f"  {name} " in lines[2]
    assert f"loss {trainer.state.log_history[2]['loss']:.4g} " in lines[2]
    assert "\r" not in shown.out + shown.err
    assert "|" not in shown.err  # no bar


def test_an_evaluation_is_a_line_and_custom_metrics_are_in_it(tmp_path, capsys):
    config = {"eval_rows": token_rows("dpo", 5), "eval_strategy": "steps", "eval_steps": 4}
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, max_steps=4, logging_steps=4, disable_tqdm=False, **config
    )
    trainer.compute_metrics = lambda predicted: {"spread": 0.125}
    trainer.train()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "evaluation" in line]
    assert re.fullmatch(r"step 4/4  evaluation: loss \S+  spread 0.125  margin \S+  accuracy \S+", line)
    trainer.evaluate()
    assert capsys.readouterr().out == ""  # outside of training it is the caller's to show


def test_several_evaluation_sets_keep_their_names():
    logs = {"eval_easy_loss": 1.5, "eval_easy_rewards/margins": 0.25, "eval_easy_logps/chosen": -3.0, "epoch": 1.0}
    assert progress.format_evaluation(logs, TABLE["dpo"].key_metrics) == "easy_loss 1.5  easy_margin 0.25"


def test_figures_of_a_log():
    logs = {"loss": 0.693147, "kl": -0.00012346, "rewards/margins": 1234567.0, "tokens_per_second": 41234.5}
    expected = "loss 0.6931  margin 1.235e+06  KL -0.0001235  41,234 tokens/s"
    assert progress.format_metrics(logs, TABLE["kto"].key_metrics) == expected
    assert progress.format_metrics({"loss": float("nan")}, {}) == "loss nan"
    losses = {"loss": 0.5, "loss/math": 0.25, "loss/chat": 0.75, "distill/ce": 1.0}
    assert progress.format_metrics(losses, {}) == "loss 0.5  loss/math 0.25  loss/chat 0.75"
    assert progress.format_metrics({f"loss/{n}": 1.0 for n in range(9)} | {"loss": 1.0}, {}) == "loss 1"


def test_time_left_is_that_of_this_run(monkeypatch):
    """Resumed at step 90 of 100, two steps took 10 s: eight more take 40 s."""
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(progress, "time", clock)
    lines, state = progress.LogLines(TABLE["sft"].key_metrics), types.SimpleNamespace(global_step=90, max_steps=100)
    lines.on_train_begin(None, state, None)
    clock.monotonic, state.global_step = (lambda: 10.0), 92
    assert lines.line({"loss": 1.0}, state) == "step 92/100  loss 1  00:10<00:40"


# ---- the bar


def test_a_terminal_shows_one_bar_and_results(tmp_path):
    config = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2, "disable_tqdm": False}
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, eval_rows=token_rows("dpo", 4), max_steps=6, logging_steps=2,
        **config,
    )  # fmt: skip
    with on_terminal() as screen:
        trainer.train()
    frames = [frame.strip("\n\x1b[A") for frame in screen.getvalue().split("\r")]
    bar = re.compile(r"100%\|█+\| 6/6  \d\d:\d\d<00:00")
    assert any(bar.fullmatch(frame.strip()) for frame in frames), frames
    assert max(map(len, frames)) <= 80  # time left is within the narrowest terminal
    evaluations = [n for n, frame in enumerate(frames) if frame.startswith("evaluation |")]
    assert len(evaluations) >= 2
    assert frames[evaluations[-1] + 1].strip() == ""  # taken away
    lines = [frame.split(":")[0] for frame in frames if frame.startswith("step ")]
    history = [line for line in lines if "  loss " in line]
    assert [line[:8] for line in history] == ["step 2/6", "step 4/6", "step 6/6"]
    others = [line for line in lines if line not in history]
    assert others == ["step 3/6  evaluation", "step 6/6  evaluation", "step 6/6  done in 00"]


def test_a_bar_alongside_a_file_leaves_lines_there(tmp_path):
    file = io.StringIO()
    with on_terminal(file) as screen:
        run("sft", tmp_path)
    assert "| 6/6  00:0" in screen.getvalue()
    assert len(file.getvalue().splitlines()) == 4


class Speaks(TrainerCallback):
    """Says something in the middle."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            logging.getLogger("hf_posttrain.guard").warning("look here")


def test_a_message_stands_above_the_bar(tmp_path, monkeypatch):
    with on_terminal() as screen:
        handler = logging.StreamHandler(screen)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        run("sft", tmp_path, callbacks=[Speaks()])
    assert "\rlook here\n" in screen.getvalue()  # in a line that was cleared
    assert logging.getLogger().handlers == [handler]


def test_other_ranks_show_nothing(tmp_path):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=2, disable_tqdm=False)
    bar = next(
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, progress.ProgressBar)
    )
    state = TrainerState(max_steps=2, is_world_process_zero=False)
    with on_terminal() as screen:
        bar.on_train_begin(trainer.args, state, trainer.control)
        bar.on_log(trainer.args, state, trainer.control, {"loss": 1.0})
        bar.on_prediction_step(trainer.args, state, trainer.control, eval_dataloader=[1, 2])
        bar.on_train_end(trainer.args, state, trainer.control)
    assert screen.getvalue() == ""


# ---- the caller's own callbacks


def kinds(trainer):
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def test_the_callers_callbacks_stay(tmp_path):
    class Mine(ProgressCallback):
        pass

    for disabled, ours in ((False, progress.ProgressBar), (True, progress.LogLines)):
        trainer = trainer_for(
            "sft", tiny_model(), token_rows("sft"), tmp_path, disable_tqdm=disabled,
            callbacks=[Mine(), PrinterCallback()],
        )  # fmt: skip
        found = kinds(trainer)
        assert ours in found
        assert {Mine, PrinterCallback} <= set(found)
        assert ProgressCallback not in found
        assert found.count(PrinterCallback) == 1


@pytest.mark.parametrize("disabled", [False, True])
def test_hugging_faces_name_still_removes_it(disabled, tmp_path, capsys):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, disable_tqdm=disabled)
    trainer.remove_callback(PrinterCallback if disabled else ProgressCallback)
    trainer.train()
    assert capsys.readouterr().out == ""


# ---- tokens a second, and memory


def a_second_a_step(trainer, monkeypatch):
    """A clock by which every step takes one second, and evaluations or checkpoints none."""
    clock = types.SimpleNamespace(perf_counter=lambda: float(trainer.state.global_step), monotonic=time.monotonic)
    monkeypatch.setattr(progress, "time", clock)
    trainer.throughput.since = 0.0


def read_tokens(method, row, layout):
    """The tokens of one row's documents: prompt and answers without their last token."""
    answers = [row[name] for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in row]
    if TABLE[method].rows.masked:  # nothing behind the last trained token is read
        trained = [n for n, is_trained in enumerate(row["completion_mask"]) if is_trained]
        answers = [row["completion_ids"][: trained[-1] + 1]]
    prompts = 1 if layout == "shared" else len(answers)
    read = TABLE[method].head == "score"  # whether the last token of an answer is an input as well
    return prompts * (len(row["prompt_ids"]) - 1) + sum(len(answer) + read for answer in answers)


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("method", names_where(lambda method: method.second != "teacher"))
def test_tokens_a_second_counts_every_token_once(method, layout, tmp_path, monkeypatch):
    """12 rows, 4 a step in micro-batches of 2, logs every 2 steps: rows 0-7, then 8-11 and 0-3."""
    rows = token_rows(method, 12)
    trainer = trainer_for(
        method, tiny_model(), rows, tmp_path, max_steps=4, logging_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, layout=layout, eval_rows=token_rows(method, 3), eval_strategy="steps",
        eval_steps=1,
    )  # fmt: skip
    a_second_a_step(trainer, monkeypatch)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    counts = [read_tokens(method, row, layout) for row in rows]
    assert [log["tokens_per_second"] for log in logs] == [sum(counts[:8]) / 2, (sum(counts[8:]) + sum(counts[:4])) / 2]


def counted(rank, folder):
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft", 12), folder, max_steps=3, per_device_train_batch_size=2, logging_steps=3,
        layout="padded",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        a_second_a_step(trainer, patch)
        patch.setattr(progress, "peak_memory", lambda device: (1 + rank) * progress.GIB)
        trainer.train()
    return {name: trainer.state.log_history[0][name] for name in ("tokens_per_second", "peak_memory_gib")}


def test_ranks_are_added_up_and_the_largest_memory_counts(tmp_path):
    one, other = on_two(counted, "ddp", str(tmp_path))
    assert one == other
    counts = [read_tokens("sft", row, "padded") for row in token_rows("sft", 12)]
    assert one["tokens_per_second"] == pytest.approx(sum(counts) / 3)
    assert one["peak_memory_gib"] == 2.0


def test_evaluations_and_checkpoints_are_not_training_time(monkeypatch):
    clock = types.SimpleNamespace(perf_counter=iter([0.0, 10.0, 40.0, 50.0]).__next__)
    monkeypatch.setattr(progress, "time", clock)
    training = progress.Throughput()
    training.count(torch.tensor([[2, 1, 1, 0]]))
    training.count(torch.tensor([[1, 1], [1, 0]]))
    with training.paused():  # 10 to 40
        pass
    (tokens, seconds), peak = training.read(processes=1)  # at 50
    assert tokens / seconds == pytest.approx((3 + 3) / (50 - 30))
    assert 0.1 < peak < 64  # GiB of this process


@pytest.mark.gpu
def test_peak_memory_of_a_gpu_is_what_was_allocated():
    before = progress.peak_memory(torch.device("cuda"))
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert progress.peak_memory(torch.device("cuda")) >= max(before, 2**30)
    del held
