"""accelerate_configs/: every file means what it says; launch.py: engines and launches that are refused.

Two gloo processes on CPU train under the environment that `accelerate launch` leaves for each file.
"""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import quick, token_rows, trainer_for

from hf_posttrain import SFTConfig, run
from hf_posttrain.check import placement
from hf_posttrain.engines import config_files, engine, launch
from hf_posttrain.errors import InputError, LaunchError
from hf_posttrain.models import load as models
from hf_posttrain.models.config import ModelSection
from hf_posttrain.recipe.read import load_recipe

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
FILES = {file.stem: file for file in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
NAMES = {"single", "ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3", "zero3_offload", "multi_node"}
ENGINES = {"ddp": "ddp", "fsdp2": "fsdp2", "multi_node": "fsdp2"} | {f"zero{n}": f"zero{n}" for n in (1, 2, 3)}


def launched(monkeypatch, name, *flags):
    """(torchrun's arguments, environment) of `accelerate launch` with this file, up to starting the processes."""
    import accelerate.commands.launch as accelerate_launch

    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    seen = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: seen.append((args, dict(os.environ))))
    parser = accelerate_launch.launch_command_parser()
    command = ["--config_file", str(FILES[name]), *flags, "-m", "hf_posttrain.run", "recipes/dpo.yaml"]
    accelerate_launch.launch_command(parser.parse_args(command))
    [(args, env)] = seen
    return args, {key: value for key, value in env.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


def test_all_files_are_there_with_their_launch_line():
    assert FILES.keys() == NAMES
    for name, file in FILES.items():
        text = file.read_text()
        launch_line = rf"#   accelerate launch --config_file accelerate_configs/{name}\.yaml "
        recipe = re.search(launch_line + r".*?-m hf_posttrain.run (recipes/\S+)", text, re.DOTALL)
        assert recipe, name
        assert (ROOT / recipe[1]).is_file()
        assert "\n# When: " in text, name
        assert "\n# Costs: " in text, name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_key_is_read_by_accelerate(name):
    """Accelerate refuses unknown keys at the top, drops those inside a section, and lets some lose to the defaults of
    its command line."""
    from accelerate.commands import launch as accelerate_launch
    from accelerate.commands.config import load_config_from_file

    load_config_from_file(str(FILES[name]))
    args = accelerate_launch.launch_command_parser().parse_args(["--config_file", str(FILES[name]), "script.py"])
    known = set(vars(args))
    args, *_ = accelerate_launch._validate_launch_command(args)
    given = yaml.safe_load(FILES[name].read_text())
    sections = [value for value in given.values() if isinstance(value, dict)]
    flat = {key: value for key, value in given.items() if not isinstance(value, dict)}
    for key, value in [*flat.items(), *(pair for section in sections for pair in section.items())]:
        if key != "distributed_type":
            assert key in known, key
            assert getattr(args, key) == value, key


def test_single_starts_one_plain_process(monkeypatch):
    started = []
    process = SimpleNamespace(wait=lambda: None, returncode=0)
    popen = lambda cmd, env: started.append((cmd, env)) or process  # noqa: E731
    monkeypatch.setattr("accelerate.commands.launch.subprocess.Popen", popen)
    from accelerate.commands import launch as accelerate_launch

    line = ["--config_file", str(FILES["single"]), "-m", "hf_posttrain.run"]
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(line))
    [(command, env)] = started
    assert command == [sys.executable, "-m", "hf_posttrain.run"]
    assert "MASTER_ADDR" not in env
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"


def test_several_machines(monkeypatch):
    """16 processes on 2 machines are 8 on each, which meet at the first; the other files take the same flags."""
    ours = ("--machine_rank", "1", "--main_process_ip", "first")
    args, _ = launched(monkeypatch, "multi_node", *ours)
    more = ("--num_machines", "2", "--num_processes", "16", "--main_process_port", "29500")
    for found in (args, launched(monkeypatch, "zero3", *ours, *more)[0], launched(monkeypatch, "ddp", *ours, *more)[0]):
        assert (found.nproc_per_node, found.nnodes, found.node_rank) == ("8", "2", 1)
        assert found.rdzv_endpoint == "first:29500"


def trained_by_environment(rank, env, folder):
    """(engine, loss, gradient norm) of one step of SFT under the launcher's environment."""
    os.environ |= env
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), folder, per_device_train_batch_size=2)
    launch.check_accelerator(trainer.accelerator, trainer.args)
    trainer.train()
    asked = launch.requested_engine(trainer.args)
    zero = trainer.accelerator.state.deepspeed_plugin
    assert (asked.fsdp == 2) == trainer.accelerator.is_fsdp2
    assert asked.state_dict_type in ("", "FULL_STATE_DICT")
    assert (asked.zero or 0) == engine.zero_stage(trainer.accelerator)
    if zero is not None:
        assert zero.deepspeed_config["gradient_clipping"] == trainer.args.max_grad_norm
        assert zero.zero3_init_flag == zero.zero3_save_16bit_model == (asked.zero == 3)
    units = [type(module).__name__ for module in trainer.model_wrapped.modules()]
    log = trainer.state.log_history[0]
    return units.count("FSDPQwen3DecoderLayer"), log["loss"], log["grad_norm"]


@pytest.mark.parametrize("name", quick("fsdp2", among=sorted(ENGINES)))
def test_each_engine_trains_as_one_process(name, monkeypatch, tmp_path):
    """By the file alone: no key of the recipe names an engine or a layer."""
    _, env = launched(monkeypatch, name, *(["--machine_rank", "1", "--main_process_ip", "x"] * (name == "multi_node")))
    alone = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    alone.train()
    expected = alone.state.log_history[0]
    for units, loss, norm in on_two(trained_by_environment, ENGINES[name], env, str(tmp_path)):
        assert units == (2 if ENGINES[name] == "fsdp2" else 0)  # both layers: _no_split_modules
        torch.testing.assert_close((loss, norm), (expected["loss"], expected["grad_norm"]), rtol=1e-5, atol=1e-6)


def test_offload_waits_in_host_memory(monkeypatch):
    """The two files whose optimizers want a GPU, or a compiler: their settings alone."""
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    for name, read in (("fsdp2_offload", FullyShardedDataParallelPlugin), ("zero3_offload", DeepSpeedPlugin)):
        _, env = launched(monkeypatch, name)
        with monkeypatch.context() as patch:
            for key, value in env.items():
                patch.setenv(key, value)
            plugin = read()
        if name == "fsdp2_offload":
            assert plugin.fsdp_version == 2
            assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        else:
            zero = plugin.deepspeed_config["zero_optimization"]
            assert (zero["stage"], plugin.zero3_init_flag) == (3, True)
            assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"


# ---- slurm.sh

STUBS = {
    "scontrol": 'if [[ $1 == show ]]; then printf "node7\\nnode8\\n"; else echo "scontrol $*"; fi',
    "scancel": 'echo "scancel $*"; kill -TERM "$(cat "$STUBS/pid")"',
    "srun": '[[ $2 == --cpus-per-task=64 ]] || exit 9; shift 2; "$@" & echo $! > "$STUBS/pid"; wait $!',
    "torchrun": 'echo "torchrun $*"; trap "kill %1; echo saved; exit 1" TERM; sleep ${LONG:-0} & touch $STUBS/up; wait',
    "accelerate": 'echo "accelerate $*"; echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds"',
}


def slurm(tmp_path, *arguments, **env):
    """slurm.sh as a job on two machines of four GPUs, with stand-ins for SLURM and the launchers."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env |= {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "31234", "SLURM_JOB_NODELIST": "node[7-8]"}
    env |= {"SLURM_CPUS_PER_TASK": "64", "STUBS": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "accelerate_configs/slurm.sh", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_slurm_launches_on_every_machine(tmp_path):
    assert subprocess.run(["bash", "-n", ROOT / "accelerate_configs" / "slurm.sh"]).returncode == 0
    ours = "-m hf_posttrain.run recipes/dpo.yaml train.resume_from_checkpoint=auto train.beta=0.2\n"
    job = slurm(tmp_path, "recipes/dpo.yaml", "train.beta=0.2")
    flags = "--num_machines 2 --num_processes 8 --rdzv_backend c10d --main_process_ip node7 --main_process_port 21234"
    config = "--config_file accelerate_configs/fsdp2.yaml"
    assert job.communicate()[0] == f"accelerate launch {config} {flags} {ours}240 seconds\n"
    job = slurm(tmp_path, "recipes/dpo.yaml", "train.beta=0.2", CONFIG="")
    flags = "--nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint node7:21234 --rdzv_id 31234"
    assert job.communicate()[0] == f"torchrun {flags} {ours}"
    assert job.returncode == 0
    job = slurm(tmp_path)
    assert "usage: sbatch" in job.communicate()[1]
    assert job.returncode != 0


def test_slurm_saves_and_requeues_before_the_limit(tmp_path):
    job = slurm(tmp_path, "recipes/dpo.yaml", CONFIG="", LONG="30")
    while not (tmp_path / "up").exists():
        assert job.poll() is None
        time.sleep(0.2)
    time.sleep(0.2)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=20)
    assert output.splitlines()[1:] == ["scancel --signal=TERM 31234", "saved", "scontrol requeue 31234"]
    assert job.returncode == 0


# ---- refusals


def asking(**fields):
    """A Config as far as launch.py looks at it: DDP on two processes in float32, changed by `fields`."""
    plain = {
        "world_size": 2, "fsdp": None, "fsdp_plugin_args": None, "deepspeed": None, "deepspeed_plugin": None,
        "bf16": False, "fp16": False, "load_best_model_at_end": False,
    }  # fmt: skip
    return SimpleNamespace(**plain | fields)


def fsdp(version=2, state="FULL_STATE_DICT", **fields):
    return asking(fsdp=True, fsdp_plugin_args={"fsdp_version": version, "state_dict_type": state}, **fields)


def zero(stage, **fields):
    return asking(deepspeed="zero.json", deepspeed_plugin=SimpleNamespace(zero_stage=stage), **fields)


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
BY_FSDP = RANK | {"ACCELERATE_USE_FSDP": "true"}
SHARDED_BEST = "load_best_model_at_end is not supported with FSDP2's SHARDED_STATE_DICT"


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (fsdp(1), RANK, "FSDP1 is not supported"),
        (asking(), BY_FSDP, "FSDP1 is not supported"),  # Accelerate's default
        (asking(), BY_FSDP | {"FSDP_VERSION": "1"}, "Set version: 2 in fsdp_config"),
        (fsdp(state="sharded_state_dict", load_best_model_at_end=True), RANK, SHARDED_BEST),
        (asking(load_best_model_at_end=True), BY_FSDP | {"FSDP_VERSION": "2"}, SHARDED_BEST),  # its default again
        (asking(world_size=1), RANK, "WORLD_SIZE is 2, and this process would train alone. Start all processes with"),
        (
            asking(world_size=1),
            {"SLURM_STEP_NUM_TASKS": "8"},
            "SLURM_STEP_NUM_TASKS is 8, and this process would train alone",
        ),
        (
            asking(world_size=1),
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"},
            "accelerate launch is configured for several processes, and started one",
        ),
        (fsdp(world_size=1), {}, "fsdp requires a launcher"),
        (zero(3, world_size=1), {}, "deepspeed requires a launcher"),
        (asking(), RANK | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision is bf16, but bf16 and fp16 are off"),
        (asking(bf16=True), RANK | {"ACCELERATE_MIXED_PRECISION": "fp16"}, "is fp16, but bf16 is on. Set fp16"),
    ],
)
def test_what_is_refused(args, env, message):
    with pytest.raises(InputError) as caught:
        launch.check_engine(args, env)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (asking(world_size=1), {}),
        (asking(world_size=1), {"WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "no", "SLURM_STEP_NUM_TASKS": "1"}),
        (asking(world_size=16), RANK | {"SLURM_STEP_NUM_TASKS": "2"}),  # torchrun on two machines
        (fsdp(state="SHARDED_STATE_DICT"), RANK),
        (fsdp(load_best_model_at_end=True), BY_FSDP),  # the config comes first
        (zero(3, load_best_model_at_end=True), RANK),
        (asking(bf16=True), RANK | {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ],
)
def test_what_is_not(args, env):
    launch.check_engine(args, env)


def test_a_launch_of_one_process_instead_of_two_is_refused(monkeypatch, tmp_path):
    """What `accelerate launch --cpu --num_processes 2` leaves for the one process that it starts."""
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))  # as `datasets` does after a map on several processes
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="configured for several processes, and started one"):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv("MASTER_ADDR", "node1")  # the cluster's own, of a launch with single.yaml
    SFTConfig(output_dir=str(tmp_path), use_cpu=True)


def test_a_mistake_of_the_launch_names_no_line_of_the_recipe(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    assert run.main(["recipes/tiny/sft_student.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: accelerate launch is configured for several processes")


def test_recipes_are_refused_before_a_model_is_loaded(monkeypatch, capsys, tmp_path):
    """One line that names the recipe's key, and exit code 2."""
    monkeypatch.chdir(ROOT)
    shutil.copytree("recipes/tiny/student", tmp_path / "saved")
    (tmp_path / "saved/model.safetensors").touch()
    monkeypatch.setattr(models, "load_model", lambda *args, **kwargs: pytest.fail("a model is loaded"))
    recipe = "recipes/tiny/dpo.yaml"
    model = ["model.name_or_path=recipes/tiny/student", "model.from_scratch=true"]
    assert run.main([recipe, *model, "train.fsdp=true", "train.fsdp_config={version: 1}"]) == 2
    assert capsys.readouterr().err == (
        "error: fsdp requires a launcher, even on one GPU. "
        "Use torchrun --nproc_per_node N -m hf_posttrain.run RECIPE.yaml\n"
    )
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert run.main([recipe, *model]) == 2
    assert "error: " in (error := capsys.readouterr().err)
    assert "FSDP1 is not supported" in error
    monkeypatch.setenv("FSDP_VERSION", "2")
    quantised = [f"model.name_or_path={tmp_path}/saved", "model.lora={r: 2}", "model.quantization=8bit"]
    assert run.main([recipe, *quantised]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: command line: model.quantization: FSDP2 cannot shard 8bit weights over the ranks. ")
    assert error.count("\n") == 1


# ---- keys that Accelerate and DeepSpeed drop


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fsdp2", {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_parms": True}}, "mean 'fsdp_offload_params'"),
        ("fsdp2", {"fsdp_config": {"version": 2, "offload_parms": True}}, "ignores the unknown key 'offload_parms'"),
        ("zero2", {"deepspeed_config": {"zero_stag": 3}}, "deepspeed_config: Accelerate ignores the unknown"),
        ("zero2", {"fsdp_config": {"fsdp_version": 2}}, "fsdp_config is only valid with distributed_type: FSDP"),
        ("ddp", {"deepspeed_config": {"zero_stage": 3}}, "distributed_type: DEEPSPEED, and it is MULTI_GPU. Change it"),
        ("ddp", {"mixed_precison": "bf16"}, "not a valid accelerate config: .*unknown keys (['mixed_precison'])"),
        ("ddp", {"dynamo_config": {"backnd": "inductor"}}, "did you mean 'dynamo_backend'"),
        ("ddp", {"fp8_config": {"amax_compute_algorithm": "max"}}, "rename it to 'amax_compute_algo'"),
    ],
)  # fmt: skip
def test_keys_of_accelerate_files_that_are_dropped(name, change, message, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(FILES[name].read_text()) | change))
    pattern = f"^{file}: .*" + re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(InputError, match=pattern):
        placement.engine_from_file(file)
    monkeypatch.setattr(config_files, "find_launch_config", lambda: file)
    with pytest.raises(LaunchError, match=pattern):
        launch.check_engine(asking(), {})


@pytest.mark.parametrize("name", sorted(NAMES))
def test_our_files_and_those_that_accelerate_writes_are_let_through(name, tmp_path):
    config_files.check_accelerate_file(FILES[name])
    given = yaml.safe_load(FILES[name].read_text())
    empty = {key: {} for key in ("deepspeed_config", "fsdp_config", "fp8_config", "dynamo_config") if key not in given}
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(given | empty | {"debug": False, "rdzv_backend": "static"}))
    config_files.check_accelerate_file(tmp_path / "written.yaml")


@pytest.mark.slow
def test_the_file_of_the_launcher_is_found(tmp_path, monkeypatch):
    file, accelerate = tmp_path / "mine.yaml", tmp_path / "accelerate"
    file.touch()
    code = "from hf_posttrain.engines.config_files import find_launch_config; print(find_launch_config())"
    accelerate.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    for option in (["--config_file", str(file)], [f"--config_file={file}"]):
        line = [sys.executable, str(accelerate), "launch", *option]
        for behind in ([], ["train.py", "--config_file", str(tmp_path / "other.yaml")]):
            assert subprocess.run(line + behind, capture_output=True, text=True, check=True).stdout.strip() == str(file)
    own = [sys.executable, str(accelerate), "launch", "train.py", "--config_file", str(file)]  # the script's
    assert subprocess.run(own, capture_output=True, text=True, check=True).stdout.strip() == "None"
    assert config_files.find_launch_config() is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, "ignores the unknown key 'zero_optimisation'; did you mean"),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"train_microbatch_size_per_gpu": 1}, "did you mean 'train_micro_batch_size_per_gpu'"),
        ({"stage": 3}, "ignores 'stage' at the top level. Move it into zero_optimization"),
        ({"zero": {"stage": 3}}, "Move it into zero_optimization"),
        ({"stage3_prefetch_bucket_size": 1}, "Move it into zero_optimization"),
    ],
)
def test_keys_of_deepspeed_files_that_are_dropped(tree, message, tmp_path):
    pytest.importorskip("deepspeed")
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(tree | {"train_batch_size": "auto"}))
    for given, location in ((file, f"deepspeed: {file}"), (tree, "deepspeed")):
        with pytest.raises(InputError, match=f"^{re.escape(location)}: .*{re.escape(message)}"):
            config_files.check_deepspeed(given)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimization": 3}, "zero_optimization must be a mapping such as {stage: 3}, not 3"),
        (
            {"zero_optimization": {"offload_param": "cpu"}},
            "zero_optimization.offload_param must be a mapping, not 'cpu'",
        ),
        ({"bf16": True}, "bf16 must be a mapping, not True"),
        ({"optimizer": {"params": [1]}}, "optimizer.params must be a mapping, not [1]"),
    ],
)
def test_sections_of_deepspeed_that_are_no_mappings(tree, message, tmp_path):
    pytest.importorskip("deepspeed")
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(tree))
    for config, location in ((str(file), f"deepspeed: {file}"), (tree, "deepspeed")):
        with pytest.raises(InputError) as caught:
            SFTConfig(output_dir=str(tmp_path), use_cpu=True, deepspeed=config)
        assert str(caught.value) == f"{location}: {message}"


def test_empty_sections_of_deepspeed_are_let_through():
    config_files.check_deepspeed_sections({"zero_optimization": None, "optimizer": {"params": None}, "bf16": {}})


def test_keys_that_deepspeed_reads_are_let_through():
    pytest.importorskip("deepspeed")
    config_files.check_deepspeed({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "optimizer": {"type": "AdamW"}, "scheduler": {},
        "steps_per_print": 10, "wall_clock_breakdown": False, "flops_profiler": {}, "activation_checkpointing": {},
        "aio": {}, "communication_data_type": "fp32", "zero_force_ds_cpu_optimizer": False, "sparse_gradients": False,
        "prescale_gradients": False, "amp": {}, "tensorboard": {}, "csv_monitor": {}, "comms_logger": {}, "seed": 1,
        "sequence_parallel_size": 2, "_comment": "mine", "note": "x",
    })  # fmt: skip


# ---- quantised models


NOT_BNB = {"quant_method": "gptq"}


def in_4bit(storage=torch.uint8):
    return {"load_in_4bit": True, "bnb_4bit_quant_storage": storage}


def quantised(how):
    return SimpleNamespace(is_quantized=True, config=SimpleNamespace(quantization_config=SimpleNamespace(**how)))


@pytest.mark.parametrize(
    ("how", "args", "message"),
    [
        ({"load_in_8bit": True}, fsdp(), "FSDP2 cannot shard 8bit weights"),
        ({"load_in_8bit": True}, zero(3), "ZeRO-3 cannot shard 8bit weights"),  # each rank would keep a whole copy
        (NOT_BNB, zero(3), "ZeRO-3 cannot shard these quantized weights"),
        (
            in_4bit(),
            fsdp(bf16=True),
            "cannot shard 4-bit weights that are stored as torch.uint8. Set bnb_4bit_quant_storage=torch.bfloat16",
        ),
        (in_4bit(torch.float32), fsdp(bf16=True), "would be cast to torch.bfloat16"),
        (in_4bit(torch.bfloat16), zero(2, fp16=True), "would be cast to torch.float16"),
        ({"load_in_8bit": True}, asking(), None),
        ({"load_in_8bit": True}, zero(2), None),
        (in_4bit(), zero(3, bf16=True), None),
        (in_4bit(torch.bfloat16), fsdp(bf16=True), None),
        (in_4bit(torch.float16), asking(bf16=True), None),
    ],
)
def test_quantised_models_that_an_engine_cannot_cut(how, args, message):
    if message is None:
        return launch.check_model(quantised(how), args)
    with pytest.raises(InputError, match=re.escape(message)):
        launch.check_model(quantised(how), args)


def trained_in_4bit(rank, arguments, folder):
    """(bytes of a 4-bit weight that this rank holds, loss, gradient norm) of a LoRA step, loaded as recipes do."""
    import bitsandbytes.nn.modules
    import peft

    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # its kernel for evaluation on CPU stays on in training
    size = 4 // int(os.environ["WORLD_SIZE"])
    args = SFTConfig(output_dir=folder, use_cpu=True, **arguments)
    section = ModelSection(folder, quantization="4bit", lora={})
    model = models.load_model(section, storage=launch.quantized_storage(args))
    launch.check_model(model, args)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = token_rows("sft")
    trainer = trainer_for("sft", model, rows, folder, peft_config=lora, per_device_train_batch_size=size, **arguments)
    trainer.train()
    weights = {name: weight for name, weight in trainer.model.named_parameters() if "q_proj.base_layer" in name}
    weight = next(iter(weights.values()))
    log = trainer.state.log_history[0]
    return getattr(weight, "_local_tensor", weight).nbytes, log["loss"], log["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_4bit_trains_as_one_process_and_is_cut(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    [(whole, *expected)] = on_two(trained_in_4bit, "ddp", {}, str(tmp_path), world=1)
    assert whole == 64 * 64 // 2
    for held, *found in on_two(trained_in_4bit, kind, engine_arguments(kind), str(tmp_path)):
        assert held == whole // (2 if kind == "fsdp2" else 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- what Accelerate really built


def refused_without_its_engine(rank, arguments, folder):
    with pytest.raises(InputError, match="not supported on cpu, where Accelerate trains") as caught:  # noqa: PT012
        trainer = trainer_for("sft", tiny_model(), token_rows("sft"), folder, **arguments)
        launch.check_accelerator(trainer.accelerator, trainer.args)
    return str(caught.value)


def test_fsdp_on_cpu_is_refused(tmp_path):
    """Without the tests' shim: Accelerate trains DDP there."""
    for message in on_two(refused_without_its_engine, "ddp", engine_arguments("fsdp2"), str(tmp_path)):
        assert message.startswith("fsdp is not supported on cpu")


# ---- the user's own commands

END = [
    "-m", "hf_posttrain.run", "recipes/tiny/sft_student.yaml", "data.eval=null", "train.eval_strategy=no",
    "train.eval_on_start=false", "train.eval_exact_match=false", "train.max_steps=2", "train.logging_steps=1",
]  # fmt: skip


def command(launcher, *flags):
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    line = [str(Path(sys.executable).with_name(launcher)), *flags]
    return subprocess.run(line, cwd=ROOT, env=env, text=True, capture_output=True, timeout=200)


@pytest.mark.slow
def test_torchrun_and_accelerate_launch_train_on_two_processes(tmp_path):
    losses = []
    config = ["launch", "--config_file", str(FILES["ddp"]), "--num_processes", "2", "--main_process_port", "0"]
    launchers = {"torchrun": ["--standalone", "--nproc_per_node", "2"], "accelerate": config, "python": []}
    for launcher, flags in launchers.items():
        size = 64 if launcher == "python" else 32
        out = tmp_path / launcher
        ended = command(launcher, *flags, *END, f"train.output_dir={out}", f"train.per_device_train_batch_size={size}")
        assert (out / "model.safetensors").is_file(), ended.stderr[-3000:]
        log = yaml.safe_load((out / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-5, atol=1e-6)
    assert losses[1] == losses[0]
    assert len(losses[0]) == 2


@pytest.mark.slow
def test_accelerate_launch_on_cpu_that_starts_one_process_is_refused(tmp_path):
    flags = ["launch", "--cpu", "--num_processes", "2"]
    ended = command("accelerate", *flags, *END, f"train.output_dir={tmp_path / 'out'}")
    assert "error: accelerate launch is configured for several processes, and started one" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_configs_and_recipes_agree_on_the_way_to_say_bf16():
    """The recipe alone: a file that said bf16 would win over a recipe that says no, without a word."""
    for file in FILES.values():
        assert yaml.safe_load(file.read_text())["mixed_precision"] == "no"
    assert load_recipe(ROOT / "recipes" / "dpo.yaml").train.get("bf16") is None
