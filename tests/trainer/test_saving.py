"""What is saved on two processes is the trained model, and a stopped run goes on from it with the same numbers."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import datasets
import peft
import pytest
import torch
from architectures import tiny
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two, start
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import LORA, fake_generate, logs_and_weights, quick, token_rows, trainer_for
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from vision_for_tests import seeing

from hf_posttrain.commands import merge
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.models import score_cache
from hf_posttrain.models.config import section_from_name
from hf_posttrain.models.load import load_model
from hf_posttrain.trainer import checkpoint, output_dir, saving

pytestmark = pytest.mark.engines

ENGINES = ("ddp", "fsdp2", "fsdp2-sharded", "zero2", "zero3")
KINDS = ("full", "lora")
REPOSITORY = Path(__file__).parents[2]
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 1e-3,
    "max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": "random",
    "lr_scheduler_type": "linear", "disable_dropout": False,
}  # fmt: skip
BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3, "learning_rate": 0.03,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
}  # fmt: skip


class Signalled(TrainerCallback):
    """SIGTERM to this process in the middle of step 2."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def model_for(kind, name="qwen3", dropout=0.1, **changes):
    """(policy, peft_config): fully trained, with a new adapter, with trained copies too, or continued by DPO."""
    model = tiny_model(name, attention_dropout=dropout, **changes)
    config = peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"] if kind == "modules" else None)
    if kind == "continued":
        model = peft.get_peft_model(model, config)
        torch.manual_seed(8)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
    return model, None if kind in ("full", "continued") else config


def run(rank, folder, engine, method, kind="full", model=None, resume=None, signalled=None, offload=False, **config):
    """(logs, all weights, was it preempted?) of five steps of eight rows: with 13, step 3 is in mid-epoch.

    signalled: the rank that gets SIGTERM in step 2. offload: the teacher's teacher_offload.
    """
    policy, peft_config = model_for(kind, **model or {})
    name, _, sharded = engine.partition("-")
    layer = type(policy.get_submodule("model.layers.0" if kind != "continued" else "model.model.layers.0")).__name__
    asked = engine_arguments(name, layer, **({"state_dict_type": "SHARDED_STATE_DICT"} if sharded else {}))
    torch.manual_seed(100 + rank)  # nothing may hang on it
    rollout.generate = fake_generate
    trainer = trainer_for(
        method, policy, token_rows(method, 13), folder, eval_rows=token_rows(method, 5, seed=1),
        second=tiny_model(seed=5) if method == "opd" else None, peft_config=peft_config,
        callbacks=[Signalled()] if rank == signalled else None, **SETTINGS | asked | config,
    )  # fmt: skip
    if offload:
        trainer.teacher.offload = True
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/saved")
    if kind != "full":
        trainer.args.merge_lora = True
        trainer.save_model(f"{folder}/merged")
    return *logs_and_weights(trainer, lora=False), trainer.preemption.preempted


def run_with(rank, folder, engine, args, kwargs):
    return run(rank, folder, engine, *args, **kwargs)


def on(engine, folder, *args, world=2, **kwargs):
    """What rank 0 returned of `run`."""
    return on_two(run_with, engine.partition("-")[0], str(folder), engine, args, kwargs, world=world)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(engine, method, kind, **config): (folder, logs, weights) of a whole run, made once."""
    made = {}

    def get(engine, *args, **kwargs):
        key = json.dumps([engine, args, kwargs], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            made[key] = (folder, *on(engine, folder, *args, **kwargs)[:2])
        return made[key]

    return get


def loaded(folder, name="qwen3"):
    """The state_dict of what is in `folder`, as a user on one process loads it."""
    if (folder / "adapter_config.json").exists():
        return peft.PeftModel.from_pretrained(tiny_model(name), folder).state_dict()
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def assert_same(found, expected, exact=True):
    """Every weight of `expected`; the names in `found` may be more."""
    assert set(expected) <= set(found), set(expected) - set(found)
    for name, tensor in expected.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(found[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_logs(found, expected, relative=0.0):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=relative, abs=relative)


# ---- what is saved


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_saved_on_two_and_loaded_on_one(engine, kind, trained):
    folder, _, weights = trained(engine, "dpo", kind)
    assert_same(weights, loaded(folder / "saved"))
    assert_same(weights, loaded(folder / "checkpoint-5"))
    assert not (folder / checkpoint.SAVING_FOLDER).exists()
    if kind == "lora":
        merged = peft.PeftModel.from_pretrained(tiny_model(), folder / "saved").merge_and_unload()
        assert_same(merged.state_dict(), loaded(folder / "merged"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", quick("fsdp2", among=("single", *ENGINES)))
def test_a_tied_head_is_saved_once_and_the_cache_stays_on(engine, trained):
    folder, *_ = trained(engine, "dpo", "full", **{"world": 1} if engine == "single" else {})
    model = tiny_model()
    assert model.config.tie_word_embeddings
    for place in (folder / "saved", folder / "checkpoint-5"):
        if list(place.glob("*.safetensors")):  # else FSDP2's own files
            assert set(load_file(place / "model.safetensors")) == {name for name, _ in model.named_parameters()}
        assert json.loads((place / "config.json").read_text())["use_cache"] is True


@pytest.mark.parametrize("engine", quick("zero3", among=ENGINES))
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", "full"), pytest.param("llama", "modules", marks=pytest.mark.slow)]
)
def test_experts_and_trained_copies(engine, name, kind, trained):
    """The hub's names of experts differ from the runtime's; modules_to_save are whole modules alongside an adapter."""
    folder, _, weights = trained(engine, "sft", kind, model={"name": name}, max_steps=1)
    assert_same(weights, loaded(folder / "saved", name))
    if kind == "modules":
        merged = peft.PeftModel.from_pretrained(tiny_model(name), folder / "saved").merge_and_unload()
        assert_same(merged.state_dict(), loaded(folder / "merged"))


@pytest.mark.parametrize(
    ("engine", "name", "kind"),
    [("fsdp2-sharded", "qwen3_moe", "full"), ("zero3", "qwen3_moe", "full")]
    + [
        pytest.param(engine, "qwen3", kind, marks=pytest.mark.slow)
        for engine in ("fsdp2-sharded", "zero2", "zero3") for kind in KINDS
    ],
)  # fmt: skip
def test_a_checkpoint_of_shards_is_merged(engine, name, kind, trained, tmp_path):
    """Without the gathered files that our runs add, as other trainers leave it. An adapter is always gathered."""
    folder, *_ = trained(engine, "sft", kind, model={"name": name}, max_steps=1)
    base, checkpoint_folder = tmp_path / "base", tmp_path / "checkpoint"
    tiny_model(name, attention_dropout=0.1).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    shutil.copytree(folder / "checkpoint-1", checkpoint_folder)
    if kind == "full":
        assert (checkpoint_folder / "model.safetensors").exists()
        for file in checkpoint_folder.glob("*.*"):
            file.unlink()
    assert merge.main([str(checkpoint_folder), str(tmp_path / "merged"), "--base", str(base)]) == 0
    expected = loaded(folder / ("saved" if kind == "full" else "merged"), name)
    found = loaded(tmp_path / "merged", name)
    assert found.keys() == expected.keys()
    assert_same(found, expected)
    assert (tmp_path / "merged" / "tokenizer_config.json").exists()


def test_zero3_that_is_told_not_to_gather(trained):
    config = engine_arguments("zero3")["deepspeed"]
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    folder, _, weights = trained("zero3", "sft", max_steps=1, deepspeed=config)
    assert_same(weights, loaded(folder / "saved"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", quick("fsdp2", among=ENGINES))
def test_an_adapter_continued_by_dpo(engine, trained):
    """Two processes give the numbers of one, and the reference alongside the policy's adapter is not saved."""
    model = {"dropout": 0.0}
    _, logs, weights = trained("single", "dpo", "continued", model=model, per_device_train_batch_size=4, world=1)
    folder, found, weights_found = trained(engine, "dpo", "continued", model=model)
    assert_same_logs(found, logs, 1e-4)
    assert_same(weights_found, weights, exact=False)
    files = [str(file) for place in ("saved", "merged", "checkpoint-5") for file in (folder / place).rglob("*")]
    assert not [file for file in files if "reference" in file]
    assert not [name for name in load_file(folder / "saved/adapter_model.safetensors") if "reference" in name]
    adapter = loaded(folder / "saved")
    assert_same(weights_found, adapter)
    merged = peft.PeftModel.from_pretrained(tiny_model(), folder / "saved").merge_and_unload()
    assert_same(merged.state_dict(), loaded(folder / "merged"))


@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter_and_a_whole_model_do_not_share_a_folder(merged, tmp_path):
    """from_pretrained would put the one on top of the other."""
    lora, rows = {"peft_config": peft.LoraConfig(**LORA)}, token_rows("sft")
    trainer_for("sft", tiny_model(), rows, tmp_path, **lora, merge_lora=not merged).save_model()
    files = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    second = trainer_for("sft", tiny_model(), rows, tmp_path, **lora, merge_lora=merged)
    for step in (second.train, second.save_model):
        with pytest.raises(InputError, match="from_pretrained would add one to the other"):
            step()
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == files
    second.save_model(str(tmp_path / "elsewhere"))


def test_an_incomplete_save_raises(tmp_path, monkeypatch):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, whole = load_file(file), file.read_bytes()
    saving.check_saved(model, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for broken in (
        {key: tensor for key, tensor in weights.items() if key != name}, {}, weights | {name: torch.zeros(3, 32)},
        weights | {name: torch.zeros(0)},
    ):  # fmt: skip
        save_file(broken, file)
        with pytest.raises(RuntimeError, match="are not the complete model"):
            saving.check_saved(model, tmp_path)
    for cut in (b"", whole[:100], whole[:-100]):
        file.write_bytes(cut)
        with pytest.raises(RuntimeError, match="was just saved and cannot be read"):
            saving.check_saved(model, tmp_path)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, folder, **kwargs: None)
    trainer = trainer_for("sft", model, token_rows("sft"), tmp_path)
    with pytest.raises(RuntimeError, match="are not the complete model"):
        trainer.save_model(tmp_path / "new")


# ---- resumed


@pytest.mark.parametrize("kind", quick("lora", among=KINDS))
@pytest.mark.parametrize("engine", quick("fsdp2", among=ENGINES))
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("dpo", {}), pytest.param("sft", {}, marks=pytest.mark.slow),
        pytest.param("kto", {"loss_type": "bco"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_resumed_run_goes_on_as_the_uninterrupted(method, config, engine, kind, trained, tmp_path):
    whole, logs, weights = trained(engine, method, kind, **config)
    shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    if kind == "lora":  # the adapter's file alone has weights: no engine adds frozen ones
        files = [file for file in (whole / "checkpoint-3").rglob("*model*") if file.suffix in (".bin", ".safetensors")]
        assert [file.name for file in files if "states" not in file.name] == ["adapter_model.safetensors"]
    found, weights_found, _ = on(engine, tmp_path, method, kind, resume="auto", **config)
    assert_same_logs(found, logs)
    assert_same(weights_found, weights)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", quick("full", among=KINDS))
@pytest.mark.parametrize("engine", quick("fsdp2", among=("ddp", "fsdp2", "fsdp2-sharded")))
def test_a_run_resumes_with_another_number_of_processes(engine, kind, before, after, trained, tmp_path):
    settings = {"model": {"dropout": 0.0}}
    sizes = {world: {"world": world, "per_device_train_batch_size": 4 // world} for world in (1, 2)}
    whole, logs, weights = trained(engine, "sft", kind, **settings, **sizes[before])
    shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    found, weights_found, _ = on(engine, tmp_path, "sft", kind, resume="auto", **settings, **sizes[after])
    assert_same_logs(found, logs, 1e-5)
    assert_same(weights_found, weights, exact=False)


@pytest.mark.slow
def test_a_finished_run_resumed_trains_no_step_more(trained, tmp_path):
    folder, logs, weights = trained("ddp", "dpo", "full")
    shutil.copytree(folder / "checkpoint-5", tmp_path / "checkpoint-5")
    found, weights_found, _ = on("ddp", tmp_path, "dpo", resume="auto")
    assert_same_logs([log for log in found if "loss" in log], [log for log in logs if "loss" in log])
    assert_same(weights_found, weights)


@pytest.mark.parametrize(
    ("engine", "then", "message"),
    [
        ("ddp", {"engine": "zero2"}, "was written under zero2 and this run is single"),
        ("ddp", {"engine": "fsdp2 with FULL_STATE_DICT"}, "was written under fsdp2 with FULL_STATE_DICT"),
        ("ddp", {"rows_per_step": 16}, "trained 16 rows per step and this run 4"),
        ("zero2", {"processes": 4, "rows_per_step": 4}, "was written by 4 processes and this run has 2"),
    ],
)
def test_a_checkpoint_of_another_launch_is_refused(engine, then, message, tmp_path, monkeypatch):
    here = {"engine": "single", "processes": 1, "rows_per_step": 4}
    if engine == "zero2":
        here |= {"engine": "zero2", "processes": 2}
    monkeypatch.setattr(checkpoint, "launch_state", lambda trainer: here)
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    state = {"global_step": 1, "stateful_callbacks": {checkpoint.LAUNCH_KEY: here | then}}
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=message):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize(("kind", "limit"), [("full", 1), ("lora", 2)])
def test_the_best_model_is_loaded_at_the_end(engine, kind, limit, trained):
    rate = {"full": 0.1, "lora": 0.03}[kind]  # too high, so that the last evaluation is not the best
    folder, logs, weights = trained(engine, "sft", kind, save_total_limit=limit, **BEST | {"learning_rate": rate})
    losses = [log["eval_loss"] for log in logs if "eval_loss" in log]
    best = 1 + losses.index(min(losses))
    assert best < 3
    state = json.loads((folder / "checkpoint-3/trainer_state.json").read_text()) if limit > 1 else {}
    assert state.get("best_model_checkpoint", str(folder / f"checkpoint-{best}")) == str(folder / f"checkpoint-{best}")
    assert_same(weights, loaded(folder / f"checkpoint-{best}"))
    assert_same(weights, loaded(folder / "saved"))
    assert len(list(folder.glob("checkpoint-*"))) == limit


# ---- stopped


def in_saving(folder):
    """How many files the unfinished checkpoint has."""
    return sum(len(files) for _, _, files in os.walk(folder / checkpoint.SAVING_FOLDER))


def visible(folder):
    """The checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def kill_when(reached, ranks):
    """Kill a run there, halted first so that it is still there. Returns whether all of it was alive."""
    send = lambda signum: [os.kill(rank.pid, signum) for rank in ranks]  # noqa: E731
    while alive := all(rank.is_alive() for rank in ranks):
        if reached():
            send(signal.SIGSTOP)
            if reached():
                break
            send(signal.SIGCONT)
    for rank in ranks:
        rank.kill()
        rank.join()
    return alive


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 8000}
"""Of a model whose checkpoints are 120 MB, so that a save takes about a second."""


def killed_and_resumed(engine, world, kills, folder, model):
    """(logs, weights, _) of a run that saves every step and is killed, half the times while it saves, and resumed."""
    draw, while_saving = random.Random(0), 0
    settings = {"save_steps": 1, "save_total_limit": 2, "max_steps": 3 * kills + 2, "resume": "auto", "model": model}
    for kill in range(kills):
        known = visible(folder)
        with tempfile.TemporaryDirectory() as results:
            ranks = start(run_with, engine, results, str(folder), engine, ("sft",), settings, world=world)
            while visible(folder) == known and all(rank.is_alive() for rank in ranks):
                time.sleep(0.005)
            files, end = draw.randint(1, 6), time.monotonic() + draw.uniform(0, 1 if model else 0.06)
            by_files, by_time = (lambda: in_saving(folder) >= files), (lambda: time.monotonic() > end)  # noqa: B023
            assert kill_when(by_files if kill % 2 else by_time, ranks), "the run ended before it could be killed"
        while_saving += (folder / checkpoint.SAVING_FOLDER).exists()
        for path in visible(folder):
            assert checkpoint.incomplete_parts(path) == [], path
    assert while_saving
    return on(engine, folder, "sft", world=world, **settings)


@pytest.mark.parametrize(
    ("engine", "world", "kills", "model"),
    [
        ("single", 1, 3, {}),
        *[pytest.param(engine, world, kills, LARGE, marks=pytest.mark.slow) for engine, world, kills in
          (("single", 1, 30), ("ddp", 2, 10), ("fsdp2", 2, 10), ("zero3", 2, 10))],
    ],
    ids=lambda value: "large" if value == LARGE else None,
)  # fmt: skip
def test_killed_at_any_moment_a_run_goes_on_from_a_complete_checkpoint(engine, world, kills, model, tmp_path):
    """Bit by bit as if nothing had happened. HF_POSTTRAIN_KILLS: another number of kills of the large model."""
    kills = int(os.environ.get("HF_POSTTRAIN_KILLS", kills)) if model else kills
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    steps = {"max_steps": 3 * kills + 2, "save_strategy": "no", "model": model}
    logs, weights, _ = on(engine, tmp_path / "whole", "sft", world=world, **steps)
    logs_found, found, _ = killed_and_resumed(engine, world, kills, tmp_path / "killed", model)
    assert_same(found, weights)
    assert_same_logs([log for log in logs_found if "loss" in log], [log for log in logs if "loss" in log])
    assert not (tmp_path / "killed" / checkpoint.SAVING_FOLDER).exists()


def test_killed_while_old_checkpoints_are_deleted_none_is_half_there(tmp_path, monkeypatch):
    """It would count as the newest, being changed last, and the next save would delete complete ones in its favour."""

    def killed(folder, **kwargs):
        parts = list(Path(folder).rglob("model.safetensors"))
        if not parts:
            return real(folder, **kwargs)
        parts[0].unlink()
        raise KeyboardInterrupt

    real, settings = shutil.rmtree, {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 4}
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **settings).train()
    assert [path.name for path in visible(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert not any(checkpoint.incomplete_parts(path) for path in visible(tmp_path))
    monkeypatch.undo()
    trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **settings).train("auto")
    assert [path.name for path in visible(tmp_path)] == ["checkpoint-3", "checkpoint-4"]
    assert not (tmp_path / checkpoint.SAVING_FOLDER).exists()


def test_checkpoints_of_an_earlier_run_in_the_folder_are_passed_over(tmp_path, caplog):
    """Whatever their step is. A run without run.json, and copied folders, go by the step alone."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=3, **settings).train()
    for file in (tmp_path / "checkpoint-3").iterdir():
        os.utime(file, (1e9, 1e9))
    trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path / "later", max_steps=1, **settings).train()
    (tmp_path / "later/checkpoint-1").rename(tmp_path / "checkpoint-1")
    assert checkpoint.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    start = datetime.fromtimestamp((tmp_path / "checkpoint-1/trainer_state.json").stat().st_mtime - 60, UTC)
    (tmp_path / "run.json").write_text(json.dumps({"started": start.isoformat(timespec="seconds")}))
    with caplog.at_level(logging.WARNING, "hf_posttrain"):
        assert checkpoint.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert f"{tmp_path / 'checkpoint-3'} belongs to an earlier run in this folder. It is skipped" in caplog.text
    os.utime(tmp_path / "run.json", (1e8, 1e8))  # from an archive: the times mean nothing
    assert checkpoint.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")


def test_incomplete_checkpoints_are_passed_over(trained, tmp_path, caplog):
    whole, _, _ = trained("ddp", "dpo", "full")
    for step in (5, 6, 7, 8):
        shutil.copytree(whole / "checkpoint-5", tmp_path / f"checkpoint-{step}")
    (tmp_path / checkpoint.SAVING_FOLDER / "checkpoint-9").mkdir(parents=True)
    (tmp_path / "checkpoint-6/model.safetensors").unlink()
    (tmp_path / "checkpoint-7/rng_state_1.pth").unlink()
    cut = tmp_path / "checkpoint-8/optimizer.pt"
    cut.write_bytes(cut.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "hf_posttrain"):
        assert checkpoint.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    for step, part in ((6, "weights"), (7, "the complete rng_state_1.pth"), (8, "the complete optimizer.pt")):
        assert f"checkpoint-{step} is incomplete, without {part}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_got_sigterm_on_one_rank_goes_on_as_the_uninterrupted(engine, trained, tmp_path):
    _, logs, weights = trained(engine, "dpo", "lora")
    *_, happened = on(engine, tmp_path, "dpo", "lora", signalled=1)
    assert happened
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    found, weights_found, happened = on(engine, tmp_path, "dpo", "lora", resume="auto")
    assert not happened
    assert_same_logs([log for log in found if "loss" in log], [log for log in logs if "loss" in log])
    assert_same(weights_found, weights)


@pytest.mark.parametrize(
    "config",
    [BEST | {"save_total_limit": 1}, {"save_strategy": "epoch", "eval_strategy": "epoch"}, {"save_strategy": "no"},
     BEST | {"save_strategy": "best"}],
)  # fmt: skip
def test_sigterm_leaves_one_checkpoint_under_any_strategy(config, tmp_path):
    *_, happened = on("single", tmp_path, "sft", signalled=0, world=1, **config)
    assert happened
    assert checkpoint.find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert kept <= {"checkpoint-1", "checkpoint-2"}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def workers_of(launcher):
    """The process ids of a launcher's ranks, in order."""
    listed = subprocess.check_output(["ps", "-o", "pid=,args=", "--ppid", str(launcher)], text=True).splitlines()
    return sorted(int(line.split()[0]) for line in listed if "hf_posttrain.run" in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "worker"),
    [
        ([], None), pytest.param(TORCHRUN, None, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, 0, marks=pytest.mark.slow), pytest.param(TORCHRUN, 1, marks=pytest.mark.slow),
    ],
    ids=["python", "torchrun", "first worker", "second worker"],
)  # fmt: skip
def test_sigterm_to_the_command(launcher, worker, tmp_path):
    """The command ends with 1, so that no script takes it for a finished run, and says how to go on."""
    command = [
        sys.executable, *launcher, "-m", "hf_posttrain.run", "recipes/tiny/sft_student.yaml",
        f"train.output_dir={tmp_path}", "train.logging_steps=1", "train.eval_on_start=false", "train.eval_steps=400",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as running:
        output = ""
        while "/400  loss " not in output and (line := running.stdout.readline()):
            output += line
        os.kill(running.pid if worker is None else workers_of(running.pid)[worker], signal.SIGTERM)
        output += running.stdout.read()
    assert running.returncode == 1, output
    assert "To resume, run the same command with train.resume_from_checkpoint=auto" in output
    [saved] = tmp_path.glob("checkpoint-*")
    assert checkpoint.incomplete_parts(saved) == []
    assert int(saved.name.split("-")[1]) < 400  # the signal came in time


@pytest.mark.slow
def test_processes_end_with_their_launcher(tmp_path):
    """Killed with -9, it can tell them nothing: they save and stop all the same."""
    options = ("train.logging_steps=1", "train.eval_on_start=false", "train.eval_steps=400")
    child = [sys.executable, "-m", "hf_posttrain.run", "recipes/tiny/sft_student.yaml", *options,
             f"train.output_dir={tmp_path}/out"]  # fmt: skip
    code = f"import subprocess; subprocess.Popen({child!r}, stdout=open({str(tmp_path / 'log')!r}, 'w')).wait()"
    env = os.environ | {"ACCELERATE_MIXED_PRECISION": "no"}  # which accelerate launch sets
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=env) as launcher:
        end = time.monotonic() + 200
        while "/400  loss " not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert time.monotonic() < end
            time.sleep(0.1)
        worker = workers_of(launcher.pid)[0]
        launcher.kill()
    while Path(f"/proc/{worker}").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.1)
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    assert checkpoint.incomplete_parts(saved) == []


class Interrupted(TrainerCallback):
    """Ctrl-C to this process in the middle of step 2, twice in a row as a launcher passes it on."""

    def __init__(self, again=False):
        self.again = again

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            if self.again:
                self.again.interrupt_time -= 3  # seconds ago
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_ctrl_c_saves_once_and_promises_what_is_there(again, tmp_path, capfd):
    stopping = Interrupted()
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, callbacks=[stopping], max_steps=4)
    stopping.again = again and trainer.preemption
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C: saving after this step; again to stop at once" in capfd.readouterr().err
    saved = [path.name for path in visible(tmp_path)]
    assert saved == ([] if again else ["checkpoint-2"])
    assert ("checkpoint-2 is saved. To resume, run the same command with" in str(raised.value)) is not again


@pytest.mark.slow
def test_two_runs_do_not_share_an_output_dir(tmp_path, capsys):
    """The second is refused in a line; the lock of one that was killed goes with it."""
    code = f"""
import time
from types import SimpleNamespace
from hf_posttrain.trainer import output_dir
with output_dir.exclusive_access(SimpleNamespace(process_index=0, output_dir={str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(100)
"""
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert any(line == "held\n" for line in first.stdout)
        with pytest.raises(InputError, match=rf"another run \(process {first.pid} on .*\) trains in"):
            trainer.train()
        first.kill()
    with output_dir.exclusive_access(trainer.args):  # the command holds it around `train`
        trainer.train()


# ---- computed once


def scored(rank, engine, method, caches, machines=1):
    """(columns that were computed once, of 13 rows; did this rank compute?) with this rank's cache folder."""
    datasets.config.HF_DATASETS_CACHE = Path(caches[rank])
    if machines > 1:
        os.environ["LOCAL_RANK"] = "0"
    computed = []

    def watched(*args):
        computed.append(True)
        return real(*args)

    real, score_cache.score_rows = score_cache.score_rows, watched
    precompute = {"teacher": {"top_k": 3, "precompute": True}} if method == "kd" else {"precompute_ref_log_probs": True}
    rows = trainer_for(
        method, tiny_model(), token_rows(method, 13), tempfile.mkdtemp(), per_device_eval_batch_size=2,
        second=tiny_model(seed=5) if method == "kd" else None, **precompute, **engine_arguments(engine),
    ).train_dataset  # fmt: skip
    columns = ["teacher_ids", "teacher_logps"] if method == "kd" else ["ref_logps"]
    return {name: [torch.tensor(value) for value in rows[name]] for name in columns}, bool(computed)


@pytest.mark.parametrize("method", quick("dpo", "kd", among=("dpo", "kto", "kd")))
@pytest.mark.parametrize("engine", quick("zero3", among=("ddp", "fsdp2", "zero3")))
def test_a_cache_computed_on_two_is_that_of_one(engine, method, tmp_path):
    [(expected, _)] = on_two(scored, "single", "single", method, [str(tmp_path / "one")], world=1)
    for found, computed in on_two(scored, engine, engine, method, [str(tmp_path / "two")] * 2):
        assert computed
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_ranks_agree_on_a_cache_that_one_machine_lacks(tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for caches, expected in (([one, one], True), ([one, one], False), ([one, other], True), ([one, other], False)):
        results = on_two(scored, "ddp", "ddp", "dpo", caches, len(set(caches)))
        assert [computed for _, computed in results] == [expected, expected]
        torch.testing.assert_close(results[0][0], results[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_a_teacher_that_waits_on_cpu_gives_the_same_numbers(engine, trained):
    settings = {"model": {"dropout": 0.0}, "save_strategy": "no"}
    _, logs, weights = trained("single", "opd", world=1, per_device_train_batch_size=4, **settings)
    _, found, weights_found = trained(engine, "opd", offload=True, **settings)
    assert_same_logs(found, logs, 1e-4)
    assert_same(weights_found, weights, exact=False)


PICTURED = ("qwen3_vl", "gemma3", "smolvlm")


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral", "llama4_text", "deepseek_v3", *PICTURED])
def test_what_is_saved_in_the_hubs_format_is_compared_by_name(name, tmp_path):
    model = seeing(name)[0] if name in PICTURED else tiny(name)
    model.save_pretrained(tmp_path)
    saving.check_saved(model, tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    state = load_file(file)
    for change in ({"module." + key: value for key, value in state.items()}, swapped(state)):
        save_file(change, file, metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match="are not the complete model"):
            saving.check_saved(model, tmp_path)


def swapped(state):
    """Two weights of one shape, each under the name of the other."""
    names: dict = {}
    for name, weight in state.items():
        if weight.dim() > 1 and (other := names.get(weight.shape)) and not torch.equal(state[other], weight):
            return state | {name: state[other].clone(), other: weight.clone()}
        names.setdefault(weight.shape, name)
    raise AssertionError("no two weights have one shape")


@pytest.mark.parametrize("continued", [False, True])
def test_an_adapter_names_its_base_from_any_folder(continued, tmp_path, monkeypatch):
    """With commands of ours and with PEFT, though the model was named by a path from where it was trained."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tiny_model().save_pretrained("base")
    byte_tokenizer().save_pretrained("base")
    model, config = AutoModelForCausalLM.from_pretrained("base"), peft.LoraConfig(task_type="CAUSAL_LM")
    model, options = (peft.get_peft_model(model, config), {}) if continued else (model, {"peft_config": config})
    trainer = trainer_for("sft", model, token_rows("sft"), tmp_path / "run", learning_rate=1e-2, **options)
    trainer.train()
    trainer.save_model()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ids = torch.tensor([[1, 2, 3]])
    expected = trainer.model.eval()(ids).logits
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run")
    torch.testing.assert_close(loaded(ids).logits, expected)
    section = section_from_name(str(tmp_path / "run"))
    torch.testing.assert_close(load_model(section, trainable=False)(ids).logits, expected)


def test_an_adapters_base_may_be_named_from_the_adapters_folder(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "base")
    peft.get_peft_model(tiny_model(), peft.LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "../base"}))
    monkeypatch.chdir("/")
    loaded = load_model(section_from_name(str(tmp_path / "adapter")), trainable=False)
    assert loaded(torch.tensor([[1]])).logits.shape[-1] == 300
