"""Rounds: rows of judged answers are trained as the method trains them, by any engine, resumed or not."""

import io
import json
import linecache
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import ENGINES, engine_arguments, on_two
from pyarrow import parquet
from safetensors.torch import load_file
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import assert_same_run, assert_same_step, fake_generate, logged, logs_and_weights, quick
from training_for_tests import one_step as step_of_plain_rows
from transformers import TrainerCallback
from vision_for_tests import pictures, seeing
from vllm_for_tests import Serving

from hf_posttrain import run
from hf_posttrain.data.images import get_image_reader
from hf_posttrain.data.prepare import prompt_key
from hf_posttrain.data.row_schema import PREFERENCE, SUPERVISED, UNPAIRED
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.generation.completions_client import ServerError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods import config_class, trainer_class
from hf_posttrain.rounds import iteration_log, iterative_trainer, sample_and_judge
from hf_posttrain.rounds.config import make_section, resolve_threshold
from hf_posttrain.rounds.pairing import SelectedRows, pair_up
from hf_posttrain.trainer import stateful

KINDS = (SUPERVISED, PREFERENCE, UNPAIRED)
METHODS = [name for name, row in TABLE.items() if row.rows in KINDS and row.second != "teacher"]
REFERENCED = [name for name in METHODS if TABLE[name].second == "reference"]
LENGTH = 7  # of the longest answer


def odd_bytes(prompts, completions, references):
    """A judge: the share of letters with an odd number. Nobody asks it about nothing."""
    assert completions
    return [sum(ord(c) % 2 for c in text) / (len(text) or 1) for text in completions]


def prompts(count=11):
    rows = [{"prompt": "ask"[: 1 + n % 3] + str(n), "completion": f"{n}"} for n in range(count)]
    return datasets.Dataset.from_list(rows)


def section(**changes):
    given = {"num_generations": 4, "max_completion_length": LENGTH, "judge": "test_iterative_trainer:odd_bytes",
             "pair": {"unfinished": True}}  # fmt: skip
    return make_section(given | ({"count": 3} if "steps" not in changes else {}) | changes)


def trainer(method, folder, changes=None, model=None, rows=None, callbacks=None, evaluated=None, **config):
    config = {
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, "learning_rate": 1e-3, "max_grad_norm": 1.0,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "activation_checkpointing": False, "max_length": 60,
    } | config  # fmt: skip
    made = iterative_trainer.in_rounds(trainer_class(TABLE[method]), section(**(changes or {})))
    return made(
        model or tiny_model(), config_class(TABLE[method])(**config), train_dataset=rows or prompts(),
        eval_dataset=evaluated, processing_class=byte_tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def weights_of(done):
    return {name: weight.detach().clone() for name, weight in done.model.named_parameters()}


def history(done):
    return [log for log in logged(done) if "loss" in log]


def rows_by_hand(method, asked):
    """The rows of a first round, from the same answers, by the pairing alone."""
    kind, tokenizer, made = TABLE[method].rows, byte_tokenizer(), []
    for prompt in asked["prompt"]:
        ids = tokenizer(prompt)["input_ids"]
        answers = fake_generate(None, [ids] * 4, LENGTH, [258])
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        scores = odd_bytes([], texts, [])
        own = section()
        paired = pair_up(
            kind, [[*map(tuple, answers)]], [scores], [[True] * 4], own.pair, resolve_threshold(own.pair, "x")
        )
        for row in paired.rows[0]:
            given = {"prompt_ids": ids, "label": row.label, "prompt_key": prompt_key(ids)}
            given |= {name: answers[n] for name, n in zip(kind.answers, row.answers, strict=True)}
            made.append({name: given[name] for name in kind.columns if name in given})
    return datasets.Dataset.from_list(made)


@pytest.mark.parametrize("method", quick("dpo", "kto", among=METHODS))
def test_a_step_is_that_of_the_methods_own_trainer_on_the_same_rows(method, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "generate", fake_generate)
    asked = prompts(8)
    keep, plain = Gradients(), rows_by_hand(method, asked)
    config = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.0,
              "max_grad_norm": 0.0}  # fmt: skip
    rounds = trainer(method, tmp_path / "rounds", {"count": 1}, rows=asked, callbacks=[keep], **config)
    rounds.train()
    assert rounds.round.rows.num_rows == len(plain)
    options = {"per_device_train_batch_size": len(plain), "max_length": 60}
    expected = step_of_plain_rows(method, tiny_model(), plain, tmp_path / "plain", **options)
    assert_same_step((history(rounds)[0]["loss"], keep.steps[0]), expected)


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("changes", [{}, {"reference": "round"}, {"steps": 1, "reference": "round"}])
def test_the_reference_is_the_model_as_it_began_or_as_the_round_began(changes, tmp_path):
    """The margins of DPO are 0 where policy and reference are one."""
    done = trainer("dpo", tmp_path, changes)
    done.train()
    margins = [log["rewards/margins"] for log in history(done)]
    first = {done.steps_of(number).start for number in range(3)} if changes else {0}
    assert {n for n, margin in enumerate(margins) if abs(margin) < 1e-6} == first


@pytest.mark.parametrize("method", quick("dpo", among=REFERENCED))
def test_the_reference_of_a_round_scores_as_a_kept_model_would(method, tmp_path, monkeypatch):
    """In the first round both references are the model as it began."""
    losses = []
    for name in ("first", "round"):
        done = trainer(method, tmp_path / name, {"count": 1, "reference": name})
        done.train()
        losses.append([log["loss"] for log in history(done)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rows_are_dealt_out_evenly_in_passes(tmp_path):
    done = trainer("sft", tmp_path, {"count": 2}, num_train_epochs=2)
    seen = []
    done.add_callback(Deals(done, seen))
    done.train()
    assert len(seen) == 2 * 2 * 3  # 11 prompts, 4 a step, twice in each of two rounds
    for number in (0, 1):
        dealt = [rows for of, rows in seen if of == number]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        each = [n for rows in dealt for n in rows]
        assert sorted(each) == sorted([*range(11)] * 2)
        assert sorted(each[:11]) == [*range(11)]  # a pass before the next


def test_a_short_window_at_the_end_of_a_pass_has_its_share_of_the_rows_alone(tmp_path):
    """9 prompts, two windows of four and a micro-batch of one: no micro-batch holds more than the others."""
    done = trainer("sft", tmp_path, {"count": 2}, rows=prompts(9), gradient_accumulation_steps=2)
    assert done.windows == [2, 2, 1]
    sizes, lay_out = [], done._micro_batch
    done._micro_batch = lambda numbers: sizes.append(len(numbers)) or lay_out(numbers)
    done.train()
    assert max(sizes) == 2
    assert sum(sizes) == 18


@pytest.mark.parametrize(("count", "steps"), [(3, 4), (8, 9), (2, 7), (3, 2), (1, 5)])
def test_as_many_rounds_as_asked_for_share_the_steps(count, steps, tmp_path):
    done = trainer("sft", tmp_path, {"count": count})
    done.state.max_steps = steps
    of = [done.round_of(step) for step in range(steps)]
    assert len({*of}) == min(count, steps)
    for number in {*of}:
        assert [step for step in range(steps) if of[step] == number] == [*done.steps_of(number)]


def test_steps_of_the_last_online_round_take_the_prompts_that_are_left(tmp_path):
    done = trainer("dpo", tmp_path, {"steps": 4}, rows=prompts(20))
    done.state.max_steps = 5
    assert [len(done._prompts_of(number)) for number in (0, 1)] == [16, 4]


class Deals(TrainerCallback):
    def __init__(self, trainer, seen):
        self.trainer, self.seen = trainer, seen

    def on_step_begin(self, args, state, control, **kwargs):
        of = self.trainer.round
        first = self.trainer.steps_of(of.number).start
        self.seen.append((of.number, of.order[state.global_step - first].tolist()))


@pytest.mark.parametrize(
    ("method", "changes"),
    [("dpo", {"reference": "round"}),
     *(pytest.param(method, changes, marks=pytest.mark.slow) for method, changes in
       (("sft", {}), ("dpo", {}), ("kto", {"reference": "round"}), ("kto", {"steps": 1}), ("cpo", {"steps": 2})))],
)  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(method, changes, tmp_path):
    config = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    config |= {"num_train_epochs": 3} if "steps" in changes else {}
    whole = trainer(method, tmp_path / "whole", changes, **config)
    whole.train()
    steps = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "whole").glob("checkpoint-*"))
    assert {2, 4, 9} <= {*steps}
    for step in (2, 3, 4, 6) if "steps" not in changes else (2, 4):  # within a round, and between two
        half = tmp_path / f"half-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", half / f"checkpoint-{step}")
        torch.manual_seed(step)  # nothing may depend on the state of the global generator
        resumed = trainer(method, half, changes, **config)
        resumed.train(resume_from_checkpoint="auto")
        assert history(resumed)[step:] == history(whole)[step:]
        for name, weight in weights_of(whole).items():
            assert torch.equal(weights_of(resumed)[name], weight), name


def test_what_was_sampled_of_a_round_is_found_again(tmp_path, monkeypatch):
    """The second judge call fails; the next try answers what is left alone, and ends as a run that did not fail."""
    monkeypatch.setattr(sample_and_judge, "CHUNK_SIZE", 4)
    whole = trainer("dpo", tmp_path / "whole")
    whole.train()
    broken = trainer("dpo", tmp_path / "broken")
    score, calls = broken.judge.score, []

    def fail(questions):
        calls.append(len(questions))
        if len(calls) == 2:
            raise InputError("the judge is ill")
        return score(questions)

    broken.judge.score = fail
    with pytest.raises(InputError, match="ill"):
        broken.train()
    [pieces] = (tmp_path / "broken" / "_rounds").glob("pieces-*")
    assert [file.name for file in pieces.iterdir()] == ["0.json"]
    again = trainer("dpo", tmp_path / "broken")
    answered, sample = [], again.sampler.sample
    again.sampler.sample = lambda asked, *rest: answered.append(len(asked)) or sample(asked, *rest)
    again.train()
    assert answered == [4, 3] + [4, 4, 3] * 2
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(again)[name], weight), name
    assert not [*(tmp_path / "broken" / "_rounds").glob("pieces-*")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_ten_kills_over_three_rounds_change_nothing(method, tmp_path):
    """SIGKILL of the command at any moment, while it samples, judges, trains or saves."""
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps(row) for row in prompts(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    recipe = {
        "method": method, "model": {"name_or_path": str(tmp_path / "model")},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}},
        "rounds": {"count": 3, "num_generations": 4, "max_completion_length": 24, "pair": {"unfinished": True},
                   "reference": "round" if method in REFERENCED else "first",
                   "judge": "test_iterative_trainer:slow_odd_bytes"},
        "train": {"num_train_epochs": 1, "per_device_train_batch_size": 8, "save_steps": 20, "learning_rate": 1e-3,
                  "use_cpu": True, "max_length": 60, "report_to": "none", "resume_from_checkpoint": "auto"},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}

    def begin(name):
        words = [sys.executable, "-m", "hf_posttrain.run", "recipe.yaml", f"train.output_dir={tmp_path / name}"]
        log = (tmp_path / f"{name}.log").open("a")
        return subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=log, stderr=log)

    assert begin("whole").wait() == 0
    kills, draw_pause = 0, random.Random(method)
    for _ in range(60):
        process, pause = begin("killed"), draw_pause.uniform(4, 16) if kills < 10 else 600
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            continue
        if kills >= 10:
            break
        # it was done before ten kills: once more from its beginning
        shutil.rmtree(tmp_path / "killed")
    assert process.returncode == 0, (tmp_path / "killed.log").read_text()[-3000:]
    assert kills >= 10
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def slow_odd_bytes(prompts, completions, references):
    """A judge that takes its time, so that kills find it at work."""
    time.sleep(0.5)
    return odd_bytes(prompts, completions, references)


@pytest.mark.slow
def test_a_server_that_is_lost_in_a_round_costs_what_it_had_not_answered(tmp_path, monkeypatch):
    """The checkpoint that is saved then leaves the pieces of the round that was under way."""
    monkeypatch.setattr(sample_and_judge, "CHUNK_SIZE", 4)
    whole = trainer("dpo", tmp_path / "whole")
    whole.train()
    lost = trainer("dpo", tmp_path / "lost", save_strategy="steps", save_steps=100)
    score, calls = lost.judge.score, []

    def fail(questions):
        calls.append(len(questions))
        if len(calls) == 5:
            raise ServerError("the judge is gone")
        return score(questions)

    lost.judge.score = fail
    with pytest.raises(ServerError, match=r"the judge is gone\. checkpoint-3 is saved"):
        lost.train()
    again = trainer("dpo", tmp_path / "lost", save_strategy="steps", save_steps=100)
    answered, sample = [], again.sampler.sample
    again.sampler.sample = lambda asked, *rest: answered.append(len(asked)) or sample(asked, *rest)
    again.train(resume_from_checkpoint="auto")
    assert answered == [4, 3, 4, 4, 3]
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(again)[name], weight), name


@pytest.mark.parametrize(
    ("call", "best", "saved", "left"),
    [
        pytest.param(1, False, set(), [4, 3, 4, 4, 3, 4, 4, 3], id="before a step"),
        pytest.param(8, True, {"checkpoint-2", "checkpoint-3"}, [3, 4, 4, 3], id="between steps, best model"),
        pytest.param(5, False, {"checkpoint-3"}, [3, 4, 4, 3], id="no other saves"),
        pytest.param(6, False, {"checkpoint-3", "checkpoint-4"}, [4, 4, 3], id="last piece", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_in_a_round_ends_after_the_piece(call, best, saved, left, tmp_path, monkeypatch, caplog):
    """SIGTERM at a call of the judge: what was trained is saved, and pieces that are done are found again. After the
    last piece there is a step. The best model is not loaded, nor are others deleted for it; dropout goes on."""
    monkeypatch.setattr(sample_and_judge, "CHUNK_SIZE", 4)
    options = {"eval_strategy": "steps", "eval_steps": 1, "evaluated": prompts(2), "load_best_model_at_end": True,
               "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}  # fmt: skip
    options = options if best else {}
    made = lambda name, **more: trainer("sft", tmp_path / name, model=tiny_model(attention_dropout=0.2), **more)  # noqa: E731
    whole, stopped, again = (made(name, **options) for name in ("whole", "stopped", "stopped"))
    if call in (5, 6):  # a checkpoint of an earlier run is none of this one
        made("stopped", changes={"count": 1}, learning_rate=1.0, save_strategy="steps", save_steps=3).train()
    whole.train()
    calls = terminate_at(call, stopped)
    stopped.train()
    assert stopped.preemption.preempted
    assert len(calls) == call
    assert {file.name for file in (tmp_path / "stopped").glob("checkpoint-*")} == saved
    assert ("saving step" in caplog.text) is bool(saved)
    assert "single sample" not in caplog.text
    answered, sample = [], again.sampler.sample
    again.sampler.sample = lambda asked, *rest: answered.append(len(asked)) or sample(asked, *rest)
    again.train(resume_from_checkpoint="auto")
    assert [count for count in answered if count > 2] == left
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(again)[name], weight), name


def terminate_at(call, stopped):
    """SIGTERM at this call of the judge; returns a list of all calls."""
    score, calls = stopped.judge.score, []

    def terminate(questions):
        calls.append(len(questions))
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(questions)

    stopped.judge.score = terminate
    return calls


def test_pieces_of_other_weights_or_options_are_not_taken(tmp_path):
    def name(changes=None, seed=0, rows=None):
        made = trainer("sft", tmp_path, changes, tiny_model(seed=seed), rows)
        return sample_and_judge.round_files(made, made.train_dataset, 42, 0).folder.name

    own = name()
    assert own == name()
    others = {name({"temperature": 0.5}), name({"num_generations": 3}), name(seed=1), name(rows=prompts(10)),
              name({"judge": {"by": "exact_match"}})}  # fmt: skip
    assert len(others | {own}) == 6


def test_scores_of_a_function_that_was_changed_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for value in (1, 2):
        code = f"def f(prompts, completions, references):\n    return [{value}] * len(prompts)"
        (tmp_path / "changing.py").write_text(code)
        sys.modules.pop("changing", None)
        linecache.clearcache()
        made = trainer("sft", tmp_path, {"judge": "changing:f"})
        names.append(sample_and_judge.round_files(made, made.train_dataset, 42, 0).folder.name)
    assert names[0] != names[1]


def test_a_resumed_run_has_the_rounds_of_the_one_that_wrote_it(tmp_path):
    """Where a round begins depends on the length of a run, also under a constant rate."""
    config = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    trainer("sft", tmp_path, **config).train()
    for name, value in {"num_train_epochs": 2, "max_steps": 20}.items():
        with pytest.raises(InputError, match=f"was written with other settings: {name}: then"):
            trainer("sft", tmp_path, **config | {name: value}).train(resume_from_checkpoint="auto")


def test_the_users_config_stays_as_it_is(tmp_path):
    given = {"use_cpu": True, "num_train_epochs": 1, "report_to": "none", "max_length": 60}
    config = config_class(TABLE["sft"])(str(tmp_path), **given)
    for _ in range(2):
        made = iterative_trainer.in_rounds(trainer_class(TABLE["sft"]), section())
        done = made(tiny_model(), config, train_dataset=prompts(), processing_class=byte_tokenizer())
        assert (config.num_train_epochs, done.args.num_train_epochs, done.args.passes) == (1, 3, 1)


def test_the_best_model_is_that_of_the_best_score(tmp_path):
    config = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    done = trainer("sft", tmp_path, evaluated=prompts(3), **config)
    done.train()
    scores = {log["step"]: log["eval_score"] for log in done.state.log_history if "eval_score" in log}
    assert done.state.best_metric == max(scores.values())
    assert len([*tmp_path.glob("checkpoint-*")]) == 3


# ---- engines


def run_of(rank, method, engine, changes, folder, resumed=None, stopped=False):
    """Logs and weights. stopped: the second rank gets SIGTERM while its answers of the second round are judged."""
    done = trainer(method, folder, changes, rows=prompts(12), per_device_train_batch_size=1 if rank is not None else 2,
                   gradient_accumulation_steps=2, evaluated=prompts(3), eval_strategy="steps", eval_steps=3,
                   max_grad_norm=0.0, learning_rate=1e-4, **engine_arguments(engine))  # fmt: skip
    if stopped and rank == 1:
        terminate_at(2, done)
    done.train(resume_from_checkpoint=resumed)
    return logs_and_weights(done, lora=False)


@pytest.mark.engines
@pytest.mark.parametrize("engine", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow)
                                    for name in ENGINES])  # fmt: skip
@pytest.mark.parametrize(
    ("method", "changes"),
    [("dpo", {"reference": "round"}), pytest.param("sft", {}, marks=pytest.mark.slow),
     pytest.param("kto", {}, marks=pytest.mark.slow), pytest.param("dpo", {"steps": 1}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_two_processes_are_one(method, changes, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_and_judge, "CHUNK_SIZE", 5)
    expected = run_of(None, method, "single", changes, str(tmp_path / "one"))
    found = on_two(small_pieces, engine, method, engine, changes, str(tmp_path / "two"))
    assert_same_run(found[0], expected)


def small_pieces(rank, *args):
    sample_and_judge.CHUNK_SIZE = 5
    return run_of(rank, *args)


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("engine", quick("ddp", among=ENGINES))
def test_ranks_stop_together_in_a_round(engine, tmp_path):
    """SIGTERM to the second rank in the first lap of two, which the other takes alone."""
    folder = tmp_path / "stopped"
    expected = on_two(small_pieces, engine, "dpo", engine, {}, str(tmp_path / "whole"))[0]
    on_two(small_pieces, engine, "dpo", engine, {}, str(folder), None, True)
    assert [file.name for file in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    [pieces] = (folder / "_rounds").glob("pieces-*")
    assert sorted(file.name for file in pieces.iterdir()) == ["0.json", "1.json"]
    found = on_two(small_pieces, engine, "dpo", engine, {}, str(folder), "auto")[0]
    assert_same_run(found, expected)


# ---- vLLM: stand-ins here, the real one in tests/served


def test_a_server_samples_each_round_by_the_weights_of_then(tmp_path, monkeypatch):
    """Weights are sent before each round; the answers that a checkpoint has are those of the server."""
    model = tiny_model()
    with Serving(tiny_model(seed=4)) as server:
        asked = {"sampler": {"kind": "vllm_server", "base_url": server.url, "check_steps": 1}}
        done = trainer("dpo", tmp_path, asked | {"count": 2}, model=model)
        done.train()
        paths = [path for path, _ in server.log if path in ("/collective_rpc", "/v1/completions")]
    sent = [n for n, path in enumerate(paths) if path == "/collective_rpc"]
    assert len(sent) == 6  # scrambled weights, and those of each round: of the first load each is asked to read files
    assert paths[-11:] == ["/v1/completions"] * 11  # a request for each prompt of the second round


# ---- pictures


def picture_prompts():
    turn = lambda n: [{"role": "user", "content": f"<image>What is {n}?"}]  # noqa: E731
    return [{"prompt": turn(n), "images": [pictures()[n % 2]]} for n in range(4)]


@pytest.mark.parametrize("method", ["dpo", pytest.param("kto", marks=pytest.mark.slow),
                                    pytest.param("sft", marks=pytest.mark.slow)])  # fmt: skip
def test_answers_to_pictures_train_with_them(method, tmp_path):
    """The rows of a round have their prompts' pictures, and its reference scores as the policy that sampled."""
    model, tokenizer = seeing("qwen3_vl")
    given = {"count": 1, "reference": "round" if method in REFERENCED else "first"}
    made = iterative_trainer.in_rounds(trainer_class(TABLE[method]), section(**given))
    done = made(
        model,
        config_class(TABLE[method])(
            str(tmp_path), use_cpu=True, num_train_epochs=1, per_device_train_batch_size=4, logging_steps=1,
            report_to="none", save_strategy="steps", save_steps=1, max_length=200, activation_checkpointing=False,
        ),
        train_dataset=picture_prompts(), processing_class=get_image_reader(tokenizer).processor,
    )  # fmt: skip
    done.train()
    assert all(len(row["images"]) == 1 for row in done.round.rows)
    if method == "dpo":
        assert history(done)[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    table = parquet.read_table(io.BytesIO(stateful.read(tmp_path / "checkpoint-1")["round"]["rows"].numpy().tobytes()))
    kept = datasets.Dataset(datasets.table.InMemoryTable(table))
    assert kept.features == done.round.rows.features
    assert kept.to_list() == done.round.rows.to_list()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"judge": {"by": "teacher", "name": "x"}}, "a judge that is a model cannot be combined with images"),
     ({"sampler": {"kind": "vllm_server", "base_url": "http://x"}}, "a vLLM sampler cannot be combined with images")],
)  # fmt: skip
def test_what_is_shown_no_pictures_is_refused(changes, said, tmp_path):
    model, tokenizer = seeing("qwen3_vl")
    made = iterative_trainer.in_rounds(trainer_class(TABLE["sft"]), section(**changes))
    config = config_class(TABLE["sft"])(str(tmp_path), use_cpu=True, report_to="none", max_length=200)
    with pytest.raises(InputError, match=said):
        made(model, config, train_dataset=picture_prompts(), processing_class=get_image_reader(tokenizer).processor)


# ---- what is told


def test_each_round_is_logged_and_written(tmp_path):
    done = trainer("dpo", tmp_path)
    done.train()
    logs = [log for log in done.state.log_history if "rounds/round" in log]
    assert [(log["step"], log["rounds/round"]) for log in logs] == [(0, 1), (3, 2), (6, 3)]
    told = json.loads((tmp_path / "_rounds" / "rounds.json").read_text())
    assert [one["round"] for one in told] == [1, 2, 3]
    for log, one in zip(logs, told, strict=True):
        rows = [json.loads(line) for line in (tmp_path / "_rounds" / f"{one['round']}.jsonl").open()]
        assert len(rows) == 11 * 4
        scores = [row["score"] for row in rows]
        assert log["rounds/score"] == pytest.approx(sum(scores) / 44) == pytest.approx(one["score"])
        assert log["rounds/best_score"] == pytest.approx(sum(max(scores[n : n + 4]) for n in range(0, 44, 4)) / 11)
        assert sum(row["used"] == 1 for row in rows) == sum(row["used"] == -1 for row in rows) == one["rows"]
        assert log["rounds/left_out"] == sum(one["reasons"].values())
        assert odd_bytes([], [rows[0]["completion"]], []) == [rows[0]["score"]]


@pytest.mark.parametrize(
    ("first", "second", "warns"),
    [
        ([0.0, 1.0] * 8, [0.0, 0.1] * 8, False),  # by 3.4 standard errors
        ([0.0, 1.0] * 16, [0.0, 0.1] * 16, True),  # by 4.9
        ([1.0] + [0.0] * 63, [0.0] * 64, False),  # one hit, which may have been luck
        ([1.0], [0.0], False),  # of one prompt nothing is known
        ([0.0] * 9, [1.0] * 8 + [0.9], False), ([None] * 9, [0.5] * 9, False), ([0.5] * 9, [None] * 9, False),
    ],
)  # fmt: skip
def test_scores_that_fall_are_warned_of(first, second, warns, tmp_path, caplog):
    done = trainer("sft", tmp_path)
    for number, scores in enumerate((first, second)):
        done.round.number = number
        rows = prompts(len(scores))
        judged = [sample_and_judge.ScoredCompletions([[1, 258]], [score]) for score in scores]
        iteration_log.log_round(done, prepared(rows), judged, SelectedRows([[] for _ in scores]), 1.0)
    assert ("round 2: its answers score" in caplog.text) == warns


def prepared(rows):
    return rows.map(lambda row: {"prompt_ids": [65], "completion_ids": [66]})


def test_a_judge_that_compares_has_no_level_to_fall_from(tmp_path, caplog):
    """Shares of wins are 0.5 on average, whatever the model."""
    judge = {"by": "url", "name": "http://127.0.0.1:9"}
    given = section(judge=judge)
    config = {"load_best_model_at_end": True, "max_length": 600, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with pytest.raises(InputError, match=r"shares of wins .* Set it to exact_match"):
        iterative_trainer.config_for_rounds(config_class(TABLE["sft"])(str(tmp_path), **config), given)
    assert "rounds/score" not in iterative_trainer.in_rounds(trainer_class(TABLE["sft"]), given).method.key_metrics
    done = trainer("sft", tmp_path)
    type(done).section = make_section({**vars(done.section), "judge": given.judge})
    for number, score in enumerate((0.9, 0.1)):
        done.round.number = number
        judged = [sample_and_judge.ScoredCompletions([[1, 258]], [score + n / 1000]) for n in range(9)]
        iteration_log.log_round(done, prepared(prompts(9)), judged, SelectedRows([[] for _ in judged]), 1.0)
    assert "made them worse" not in caplog.text


@pytest.mark.parametrize("other", [False, True])
def test_a_resumed_run_has_the_story_of_the_rounds_before(other, tmp_path):
    """Also in another folder, where the last round began before the checkpoint."""
    config = {"save_strategy": "steps", "save_steps": 4, "report_to": "none"}
    trainer("sft", tmp_path / "one", **config).train()
    told = json.loads((tmp_path / "one" / "_rounds" / "rounds.json").read_text())
    (tmp_path / "one" / "_rounds" / "rounds.json").unlink()
    checkpoint = tmp_path / "one" / "checkpoint-8"
    shutil.rmtree(tmp_path / "one" / "checkpoint-9")
    folder = tmp_path / ("two" if other else "one")
    trainer("sft", folder, **config).train(resume_from_checkpoint=str(checkpoint))
    assert [one["step"] for one in told] == [0, 3, 6]
    assert json.loads((folder / "_rounds" / "rounds.json").read_text()) == told


def test_answers_of_a_round_can_be_paired_again(tmp_path, monkeypatch):
    trainer("dpo", tmp_path, {"count": 1}).train()
    monkeypatch.chdir(tmp_path)
    command = "pair", "_rounds/1.jsonl", "--method", "dpo", "--ids", "--unfinished", "--out", "again.jsonl"
    assert run.main(command) == 0
    told = json.loads((tmp_path / "_rounds" / "rounds.json").read_text())
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").open()]
    drawn = [json.loads(line) for line in (tmp_path / "_rounds" / "1.jsonl").open()]
    assert len(again) == told[0]["rows"] > 3
    for name, used in (("chosen_ids", 1), ("rejected_ids", -1)):
        ids = [[row["prompt_ids"], row["completion_ids"]] for row in drawn if row["used"] == used]
        assert [[row["prompt_ids"], row[name]] for row in again] == ids


def test_an_evaluation_samples_and_judges_the_same_draws_each_time(tmp_path):
    done = trainer("sft", tmp_path, learning_rate=0.0, evaluated=prompts(3), eval_strategy="steps", eval_steps=3)
    done.train()
    found = [log for log in done.state.log_history if "eval_score" in log]
    assert len(found) == 3
    assert len({log["eval_score"] for log in found}) == 1
    assert found[0]["eval_best_score"] >= found[0]["eval_score"]
    assert 0 < found[0]["eval_length"] <= LENGTH
    assert done.evaluate()["eval_score"] == found[0]["eval_score"]


def test_online_steps_log_their_scores(tmp_path):
    done = trainer("dpo", tmp_path, {"steps": 1})
    done.train()
    assert all("rounds/score" in log for log in history(done))
    assert len(history(done)) == 3
    assert not [*tmp_path.glob("_rounds/*")]


def test_prompts_of_steps_are_each_seen_once_a_pass(tmp_path):
    done = trainer("dpo", tmp_path, {"steps": 1}, rows=prompts(8))
    done.state.max_steps = 4
    seen = [row["index"] for number in range(4) for row in done._prompts_of(number)]
    assert sorted(seen[:8]) == sorted(seen[8:]) == [*range(8)]
    assert seen[:8] != seen[8:]


# ---- rounds that give nothing


def nothing(prompts, completions, references):
    return [0.0] * len(completions)


NOTHING = {"judge": "test_iterative_trainer:nothing"}


def test_a_first_round_without_rows_is_an_error_with_its_reasons(tmp_path):
    with pytest.raises(InputError, match=r"first round gives no row to train on \(11 prompts: answers that differ"):
        trainer("dpo", tmp_path, NOTHING).train()


def test_labels_of_one_kind_are_warned_of(tmp_path, caplog):
    trainer("kto", tmp_path, {"count": 1, "pair": {"threshold": 2.0}}).train()
    assert "round 1: all 44 labeled answers are bad. One label alone does not define a preference" in caplog.text


def test_a_later_round_without_rows_ends_training(tmp_path, caplog):
    done = trainer("dpo", tmp_path)
    score = done.judge.score
    done.judge.score = lambda asked: score(asked) if done.round.number < 0 else [[0.0] * 4 for _ in asked]
    done.train()
    assert "round 2 gives no row to train on. Training ends" in caplog.text
    assert done.state.global_step == 3


def test_training_that_ends_early_takes_no_step_more(tmp_path):
    done = trainer("dpo", tmp_path, gradient_accumulation_steps=1, weight_decay=0.1)
    score = done.judge.score
    done.judge.score = lambda asked: score(asked) if done.round.number < 0 else [[0.0] * 4 for _ in asked]
    ended = []
    done.add_callback(AfterStep(lambda step: ended.append(weights_of(done))))
    done.train()
    assert done.state.global_step == len(ended) == 6
    for name, weight in weights_of(done).items():
        assert torch.equal(weight, ended[-1][name])


class AfterStep(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        self.act(state.global_step)


@pytest.mark.parametrize(
    ("method", "reference"), [(name, "first") for name in METHODS] + [(name, "round") for name in REFERENCED]
)
def test_an_online_step_without_rows_changes_nothing(method, reference, tmp_path):
    """Behind one that has moved the optimizer's momentum."""
    pair = {} if TABLE[method].rows.paired else {"threshold": 0.0}
    done = trainer(method, tmp_path, {"steps": 1, "reference": reference, "pair": pair | {"unfinished": True}},
                   weight_decay=0.1)  # fmt: skip
    score, kept = done.judge.score, []
    empty = [0.0 if TABLE[method].rows.paired else None] * 4
    done.judge.score = lambda asked: [empty for _ in asked] if done.state.global_step == 1 else score(asked)
    done.add_callback(AfterStep(lambda step: kept.append(weights_of(done))))
    done.train()
    assert [log["rounds/rows"] > 0 for log in history(done)] == [True, False, True]
    assert history(done)[1]["loss"] == 0
    for name, weight in kept[0].items():
        assert torch.equal(weight, kept[1][name])
    assert any(not torch.equal(weight, kept[2][name]) for name, weight in kept[1].items())


def test_class_weights_do_not_depend_on_the_round_before(tmp_path):
    done = trainer("kto", tmp_path, desirable_weight="auto")
    rows = lambda labels: datasets.Dataset.from_list([{"prompt_ids": [1], "label": each} for each in labels])  # noqa: E731
    done.set_rows(0, rows([True, False, False]))
    assert done.class_weights == (2.0, 1.0)
    done.set_rows(1, rows([True, True]))
    assert done.class_weights == (1.0, 1.0)


def test_labels_that_are_all_one_leave_class_weights_as_they_are(tmp_path, caplog):
    done = trainer("kto", tmp_path, NOTHING | {"pair": {"threshold": 0.5}}, desirable_weight="auto")
    done.train()
    assert "class weight `auto` requires rows of both labels" in caplog.text
    assert done.class_weights == (1.0, 1.0)


# ---- what is refused


@pytest.mark.parametrize(
    ("method", "changes", "config", "said"),
    [
        ("dpo", {"num_generations": 1}, {}, "must be at least 2, because answers are compared with each other"),
        ("sft", {"temperature": 0.0}, {}, "temperature must be above 0, because 0 gives the same answer each time"),
        ("sft", {"count": 2, "steps": 3}, {}, "steps cannot be combined with count"),
        ("sft", {"reference": "round"}, {}, "round requires a method with a reference, and sft has none"),
        ("sft", {"cuont": 2}, {}, "unknown key rounds.cuont; did you mean 'count'?"),
        ("sft", {"pair": {"tak": "all"}}, {}, "unknown key rounds.pair.tak; did you mean 'take'?"),
        ("sft", {"judge": {"bye": 1}}, {}, "unknown key rounds.judge.bye; did you mean 'by'?"),
        ("sft", {"judge": partial(odd_bytes)}, {}, r"has no name\. Pass a function, or package.module:name"),
        ("sft", {"judge": 3}, {}, "rounds.judge: 3 must be a mapping of its keys, or a short form"),
        ("sft", {"pair": {"margin": 1.0}}, {}, "margin is only valid with pairs and labels"),
        ("dpo", {"pair": {"threshold": 1.0}}, {}, "threshold is only valid with labels"),
        ("sft", {"sampler": "vllm_server"}, {}, "sampler requires sampler.base_url"),
        ("dpo", {}, {"precompute_ref_log_probs": True}, "cannot be combined with rounds"),
        ("sft", {"max_completion_length": 60}, {}, "max_length=60 must exceed rounds.max_completion_length=60"),
        ("sft", {"judge": {"by": "model"}}, {}, "name is missing"),
        (
            "sft",
            {"judge": "exact_match", "pair": {"threshold": 1.5}},
            {},
            "must be above 0 and at most 1, because scores of exact_match are from 0 to 1",
        ),
        (
            "dpo",
            {"judge": "exact_match", "pair": {"margin": 2.0}},
            {},
            "must be at most 1, because scores of exact_match are from 0 to 1",
        ),
        (
            "kto",
            {"judge": "exact_match", "pair": {"margin": 0.6}},
            {},
            r"must be at most 0\.5, because scores of exact_match are from 0 to 1",
        ),
        ("dpo", {"reference": "round"}, {"loss_type": ["simpo"]}, "the loss does not use a reference"),
    ],
)
def test_what_cannot_be_is_refused(method, changes, config, said, tmp_path):
    with pytest.raises(InputError, match=said):
        trainer(method, tmp_path, changes, **config)


def test_rounds_are_no_more_than_steps(tmp_path, caplog):
    done = trainer("sft", tmp_path, {"count": 5}, max_steps=2)
    done.train()
    assert "rounds.count: the run has 2 rounds instead of 5, because it has no more steps" in caplog.text
    assert [log["rounds/round"] for log in done.state.log_history if "rounds/round" in log] == [1, 2]


def test_methods_with_a_teacher_are_refused():
    with pytest.raises(InputError, match="rounds cannot be combined with a method with a teacher"):
        iterative_trainer.in_rounds(trainer_class(TABLE["opd"]), 3)


def test_exact_match_needs_answers(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}])
    with pytest.raises(
        InputError, match=r"exact_match compares with completions of the data\. 2 of 2 rows have no completion"
    ):
        trainer("sft", tmp_path, {"judge": "exact_match"}, rows=rows)
    labelled = [{"prompt": f"{n}=", "completion": "1", "label": n > 0} for n in range(3)]
    with pytest.raises(InputError, match=r"1 of 3 rows have no completion, or a wrong one \(the first prompt: '0='\)"):
        trainer("sft", tmp_path, {"judge": "exact_match"}, rows=datasets.Dataset.from_list(labelled))
