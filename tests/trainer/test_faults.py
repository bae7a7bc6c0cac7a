"""Hunters: what goes wrong with files, disks and reporters is said in a line, and nothing half-written is taken."""

import contextvars
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two
from training_for_tests import LORA, logged, token_rows, trainer_for
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_posttrain.errors import InputError
from hf_posttrain.monitoring.reporters import reporter_places
from hf_posttrain.trainer import checkpoint, output_dir

SETTINGS = {"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
DAMAGES = {
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(random.Random(0).randbytes(file.stat().st_size)),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),  # what a file system leaves when power is lost
    "half zeros": lambda file: file.write_bytes(
        (whole := file.read_bytes())[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    ),
}
READ = {  # files that a resumed run reads
    "full": ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    "lora": ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth",
             "trainer_state.json"),
}  # fmt: skip


def build(folder, kind="full", **changed):
    torch.manual_seed(0)
    adapter = {"peft_config": peft.LoraConfig(**LORA)} if kind == "lora" else {}
    return trainer_for("sft", tiny_model(), token_rows("sft", 13), folder, **adapter | SETTINGS | changed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(kind): the trainer of an uninterrupted run with checkpoints 1 to 3, made once."""
    made = {}

    def get(kind="full"):
        if kind not in made:
            made[kind] = build(tmp_path_factory.mktemp(kind), kind)
            made[kind].train()
        return made[kind]

    return get


def left_at_2(whole, kind, folder):
    """`folder` as a run of this kind leaves it that ended after step 2."""
    for step in (1, 2):
        shutil.copytree(Path(whole(kind).args.output_dir, f"checkpoint-{step}"), folder / f"checkpoint-{step}")
    return folder / "checkpoint-2"


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(InputError, match=r"^resume_from_checkpoint: there is no folder .*checkpoint-5; did you mean '"):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-5")


@pytest.mark.parametrize("kind", READ)
def test_a_damaged_file_of_a_checkpoint_is_noticed(kind, whole, tmp_path, caplog):
    """Each file in each way: the next older checkpoint is found, and a log says why."""
    tried = 0
    for name in READ[kind]:
        for how, damage in DAMAGES.items():
            folder = tmp_path / f"{name}-{how}"
            damage(left_at_2(whole, kind, folder) / name)
            caplog.clear()
            if how.endswith("zeros") and name == "rng_state.pth":
                continue  # it is so small that half of it may be zeros as it is
            assert checkpoint.find_checkpoint(folder) == str(folder / "checkpoint-1"), (name, how)
            [said] = [message for message in caplog.messages if "It is skipped" in message]
            assert "checkpoint-2 is incomplete, without" in said
            assert "\n" not in said
            tried += 1
    print(f"{kind}: {tried} damages, {tried} passed over")


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [("full", "config.json", "gone"), ("full", "model.safetensors", "noise"), ("lora", "optimizer.pt", "cut")],
)
def test_a_run_goes_on_from_the_older_one_and_refuses_the_damaged(kind, name, how, whole, tmp_path):
    newest = left_at_2(whole, kind, tmp_path)
    DAMAGES[how](newest / name)
    with pytest.raises(InputError, match=rf"-2 is damaged, without .*{name}.*\. Use another checkpoint, or auto"):
        build(tmp_path, kind).train(resume_from_checkpoint=str(newest))
    trainer = build(tmp_path, kind)
    trainer.train(resume_from_checkpoint="auto")
    assert [log["loss"] for log in logged(trainer) if "loss" in log] == [
        log["loss"] for log in logged(whole(kind)) if "loss" in log
    ]
    assert all(map(torch.equal, trainer.model.parameters(), whole(kind).model.parameters()))


def test_a_checkpoint_without_config_and_record_loads_with_the_models_own(whole, tmp_path):
    """A class without a config would make its default size, which no machine of a tiny model holds."""
    newest = left_at_2(whole, "full", tmp_path)
    (newest / "config.json").unlink()
    trainer = build(tmp_path)
    trainer._load_from_checkpoint(str(newest))
    assert sum(weight.numel() for weight in trainer.model.parameters()) < 1e6


# ---- disks that machines do not share


def resume_alone(rank, folders, steps):
    """What each of two machines, with a disk of its own, resumes: the step, or the message that refuses it."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURM_LOCALID": "0"}
    for step in steps[rank]:
        shutil.copytree(Path(folders[2], f"checkpoint-{step}"), Path(folders[rank], f"checkpoint-{step}"))
    torch.manual_seed(0)
    settings = SETTINGS | {"per_device_train_batch_size": 2, "save_steps": 1, "save_on_each_node": True}
    trainer = trainer_for("sft", tiny_model(), token_rows("sft", 13), folders[rank], **settings)
    try:
        found = checkpoint.resolve_checkpoint(trainer, "auto")
    except InputError as error:
        return str(error)
    return found and Path(found).name


@pytest.mark.engines
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (((1, 2, 3), (1, 2)), "checkpoint-2"), (((1, 2), ()), "in common in .*rank 0: checkpoint-2, rank 1: none"),
        pytest.param(((1, 2, 3), (1, 2, 3)), "checkpoint-3", marks=pytest.mark.slow),
        pytest.param(((1, 3), (1, 2)), "checkpoint-1", marks=pytest.mark.slow),
        pytest.param(((), ()), None, marks=pytest.mark.slow),
        pytest.param(((2,), (1, 3)), "in common in .*Put output_dir on a shared disk", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_machines_agree_on_a_checkpoint_that_all_have(steps, expected, whole, tmp_path):
    folders = [str(tmp_path / "0"), str(tmp_path / "1"), whole().args.output_dir]
    found = on_two(resume_alone, "ddp", folders, steps)
    assert found[0] == found[1] or found[0].replace(folders[0], folders[1]) == found[1]
    assert re.search(expected, found[0]) if expected else found[0] is None


# ---- full disks


@contextmanager
def files_up_to(size):
    """No file can grow beyond so many bytes inside, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sizes_of(folder):
    return sorted({file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()})


@pytest.mark.parametrize(
    ("kind", "few"), [("full", 3), *[pytest.param(kind, None, marks=pytest.mark.slow) for kind in READ]]
)
def test_a_disk_that_is_full_at_any_write_is_one_line(kind, few, whole, tmp_path):
    """Each file of the second checkpoint in turn is the one that cannot be written; or the `few` largest."""
    sizes, said = sizes_of(Path(whole(kind).args.output_dir, "checkpoint-2")), []
    for number, size in enumerate(sizes[-few:] if few else sizes):
        folder = tmp_path / str(number)
        shutil.copytree(Path(whole(kind).args.output_dir, "checkpoint-1"), folder / "checkpoint-1")
        trainer = build(folder, kind)
        trainer._save_checkpoint = files_up_to(size - 1)(trainer._save_checkpoint)
        with pytest.raises(InputError) as raised:
            trainer.train(resume_from_checkpoint="auto")
        assert "\n" not in str(raised.value)
        said.append(str(raised.value))
        left = {path.name for path in folder.iterdir()}
        assert left == {"checkpoint-1", output_dir.LOCK_NAME}, "what was half-written is gone"
        assert checkpoint.find_checkpoint(folder) == str(folder / "checkpoint-1")
    assert all(re.search(r"could not be written \(.*\)\. Complete checkpoints are kept", line) for line in said), said
    print(f"{kind}: {len(said)} writes failed, {len(said)} said so in a line")


def test_the_final_model_on_a_full_disk_is_one_line(whole, tmp_path):
    with files_up_to(20000), pytest.raises(InputError, match="could not be written"):
        whole().save_model(str(tmp_path / "model"))


def test_too_little_space_is_told_before_it_is_filled(whole, tmp_path, monkeypatch):
    kind = type(shutil.disk_usage("/"))
    usage = lambda free: lambda path: kind(10**9, 10**9 - free, free)  # noqa: E731
    trainer = build(tmp_path)
    weights = sum(weight.nbytes for weight in trainer.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", usage(weights - 1))
    with pytest.raises(InputError, match=r"a checkpoint requires at least .* GiB"):  # before the first step
        trainer.train()
    assert trainer.state.global_step == 0


# ---- reporters


class Failing(TensorBoardCallback):
    """Fails at one of a run's events, as an integration does whose server has gone."""

    def __init__(self, event):
        self.calls = []

        def fail(*args, **kwargs):
            raise ConnectionError("no route\nto host")

        for name in ("on_train_begin", "on_log", "on_save", "on_train_end"):
            setattr(self, name, fail if name == event else lambda *args, name=name, **kwargs: self.calls.append(name))


@pytest.mark.parametrize("event", ["on_train_begin", "on_log", "on_save", "on_train_end"])
def test_a_reporter_that_fails_ends_no_run(event, whole, tmp_path, caplog):
    reporter = Failing(event)
    torch.manual_seed(0)
    trainer = trainer_for("sft", tiny_model(), token_rows("sft", 13), tmp_path, callbacks=[reporter], **SETTINGS)
    trainer.train()
    assert logged(trainer) == logged(whole())
    [said] = [message for message in caplog.messages if "continues without it" in message]
    assert said == "Failing failed, and the run continues without it: ConnectionError: no route to host"
    assert event not in reporter.calls


def test_tensorboard_without_a_folder_ends_no_run(whole, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    trainer = build(tmp_path / "run", report_to="tensorboard")
    trainer.train()
    assert logged(trainer) == logged(whole())
    assert "TensorBoard failed, and the run continues without it" in caplog.text


WANDB = """
import sys; sys.path[:0] = {paths!r}
import test_faults as faults
trainer = faults.build({folder!r}, report_to="wandb", run_name="a run")
trainer.add_callback(faults.Places())
trainer.recipe = {{"method": "sft"}}
trainer.train(resume_from_checkpoint="auto")
import wandb
print("steps", trainer.state.global_step, "id", wandb.run and wandb.run.id, dict(wandb.config) if wandb.run else "")
"""


def with_wandb(folder, **env):
    """The output of a run that reports to W&B, in a process of its own."""
    code = WANDB.format(paths=[entry for entry in sys.path if "tests" in entry], folder=str(folder))
    env = {**os.environ, "WANDB_SILENT": "true", "WANDB_DIR": str(folder.parent), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [{"WANDB_MODE": "online"},  # without a key
     {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9",
      "WANDB_INIT_TIMEOUT": "5", "WANDB_HTTP_TIMEOUT": "2"}],
    ids=["no key", "unreachable"],
)  # fmt: skip
def test_wandb_that_cannot_start_ends_no_run(env, tmp_path):
    output = with_wandb(tmp_path / "run", HOME=str(tmp_path), NETRC=str(tmp_path / "none"), **env)
    assert "Wandb failed, and the run continues without it" in output
    assert "steps 3" in output


@pytest.mark.slow
def test_wandb_holds_recipe_and_rows_and_goes_on_with_the_run(whole, tmp_path):
    first = with_wandb(tmp_path / "run", WANDB_MODE="offline")
    assert "'recipe': {'method': 'sft'}" in first
    assert "'rows': '13 rows (" in first
    assert Path(re.search(r"places \{'W&B': 'wandb sync (.*)'\}", first)[1]).is_dir()
    shutil.rmtree(tmp_path / "run/checkpoint-3")
    again = with_wandb(tmp_path / "run", WANDB_MODE="offline")
    assert re.search(r"id (\w+)", first)[1] == re.search(r"id (\w+)", again)[1]


class Places(TrainerCallback):
    """Prints where the reporters show the run, once."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print("places", reporter_places(args))


TRACKIO = """
import sys; sys.path[:0] = {paths!r}
import test_faults as faults
trainer = faults.build({folder!r}, report_to="trackio")
trainer.add_callback(faults.Places())
trainer.recipe = {{"method": "sft"}}
trainer.train(resume_from_checkpoint="auto")
from trackio.sqlite_storage import SQLiteStorage as Storage
for name in Storage.get_runs(trainer.args.project):
    logs, config = Storage.get_logs(trainer.args.project, name), Storage.get_run_config(trainer.args.project, name)
    print("run", name, len(logs), "recipe", config["recipe"], config["rows"])
"""


@pytest.mark.slow
def test_trackio_holds_recipe_and_rows_and_goes_on_with_the_run(tmp_path):
    pytest.importorskip("trackio")
    code = TRACKIO.format(paths=[entry for entry in sys.path if "tests" in entry], folder=str(tmp_path / "run"))
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "continues without it" not in done.stdout + done.stderr
        found.append(re.findall(r"^run (\S+) (\d+) recipe (.*)$", done.stdout, re.MULTILINE))
        shutil.rmtree(tmp_path / "run/checkpoint-3")
    [(name, logs, config)], [(again, more, _)] = found
    assert (name, int(logs) < int(more)) == (again, True)  # the same run, with the logs of both
    assert config.startswith("{'method': 'sft'} 13 rows (")
    assert "places {'trackio': 'trackio show --project" in done.stdout


@pytest.mark.parametrize(
    ("space", "server", "place"),
    [
        (None, None, "trackio show --project p"),
        ("me/space", "me/space", "https://huggingface.co/spaces/me/space"),
        (None, "http://host:7860/", "http://host:7860/"),
    ],
)
def test_the_place_of_trackio_is_its_space_or_server(space, server, place):
    """In place of `trackio.init`, which needs the network for a Space, the test sets the variables."""
    variables = pytest.importorskip("trackio").context_vars

    def places():
        variables.current_run.set(SimpleNamespace(project="p"))
        variables.current_space_id.set(space)
        variables.current_server.set(server)
        return reporter_places(SimpleNamespace(report_to=["trackio"]))

    assert contextvars.copy_context().run(places) == {"trackio": place}


# ---- code in checkpoints


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def resume_evil(rank, folder, insist):
    """Two steps under ZeRO-2, code put into the checkpoint of the first, and what resuming that says."""
    config = engine_arguments("zero2") | SETTINGS | {"per_device_train_batch_size": 2, "max_steps": 2}
    build_it = lambda **more: trainer_for("sft", tiny_model(), token_rows("sft", 13), folder, **config | more)  # noqa: E731
    build_it().train()
    torch.distributed.barrier()
    place = Path(folder, "checkpoint-1")
    if rank == 0:
        [file, _] = sorted(place.glob("global_step1/*optim_states.pt"))
        torch.save(torch.load(file, weights_only=False) | {"evil": Evil(f"{folder}/broken-in")}, file)
        state = json.loads((place / "trainer_state.json").read_text())
        files = state["stateful_callbacks"][checkpoint.LAUNCH_KEY]["files"]
        files[str(file.relative_to(place))] = checkpoint.fingerprint(file)  # whoever can write it can write this too
        (place / "trainer_state.json").write_text(json.dumps(state))
    torch.distributed.barrier()
    try:
        build_it(resume_despite="pickle" if insist else None).train(resume_from_checkpoint=str(place))
    except (InputError, RuntimeError) as error:  # the other rank has lost the one that is refused
        return str(error)
    return "resumed"


@pytest.mark.engines
@pytest.mark.parametrize("insist", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_deepspeed_checkpoint_runs_no_code(insist, tmp_path):
    found = on_two(resume_evil, "zero2", str(tmp_path), insist)
    assert (tmp_path / "broken-in").exists() == insist
    assert "resumed" in found if insist else "would run code when DeepSpeed reads it (posix.mkdir)" in found[0]
