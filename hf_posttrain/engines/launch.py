"""The engine that the config and the launcher ask for, and what is refused at the start of a run: that which would
train wrong numbers, something else than was asked for, or fail late.
"""

import inspect
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, has_offloaded_params, is_compiled_module
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.utils.import_utils import enable_tf32, is_torch_tf32_available

from ..errors import InputError, LaunchError
from . import config_files
from . import engine as engines

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_START_ALL = "start all with torchrun --nproc_per_node N or accelerate launch --multi_gpu (on CPU with use_cpu: true)"


class RequestedEngine(NamedTuple):
    """The engine that is asked for."""

    fsdp: int  # FSDP's version, 0 without FSDP
    state_dict_type: str  # what FSDP saves: FULL_STATE_DICT or SHARDED_STATE_DICT
    zero: int | None  # ZeRO's stage, None without DeepSpeed

    @property
    def shards(self) -> str | None:
        """The engine's name if it cuts weights over the ranks."""
        return "FSDP2" if self.fsdp else "ZeRO-3" if self.zero == 3 else None


def requested_engine(args: TrainingArguments, env: Mapping[str, str] | None = None) -> RequestedEngine:
    """What `args`, a method's Config, asks for; the launcher's environment where it says nothing of FSDP."""
    env = os.environ if env is None else env  # not bound at import: `datasets` replaces it after a map on processes
    zero = None if args.deepspeed_plugin is None else int(args.deepspeed_plugin.zero_stage)  # from either of them
    if args.fsdp:
        plugin = args.fsdp_plugin_args or {}  # none on XLA
        return RequestedEngine(plugin.get("fsdp_version", 2), str(plugin.get("state_dict_type")).upper(), zero)
    if env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        state = env.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")  # both are Accelerate's defaults
        return RequestedEngine(int(env.get("FSDP_VERSION", "1")), state.upper(), zero)
    return RequestedEngine(0, "", zero)


def check_engine(args: TrainingArguments, env: Mapping[str, str] | None = None) -> None:
    """Raises LaunchError for an engine or a launch that must not train. args: a Config after HF's `__post_init__`."""
    env = os.environ if env is None else env
    # a process that trains alone though several were started: each would train and save the same
    if args.world_size == 1:
        for name in _SIZES:
            if (size := int(env.get(name) or 1)) > 1:
                raise LaunchError(f"{name} says {size} processes, and this one would train alone: {_START_ALL}")
        several = env.get("MASTER_ADDR") == "127.0.0.1" and {"MASTER_PORT", "ACCELERATE_MIXED_PRECISION"} <= env.keys()
        if "RANK" not in env and several:  # set for the one that it starts
            raise LaunchError(f"accelerate launch was asked for several processes and started one: {_START_ALL}")
    if (args.fsdp or args.deepspeed) and "LOCAL_RANK" not in env:
        name = "fsdp" if args.fsdp else "deepspeed"
        command = "torchrun --nproc_per_node N -m hf_posttrain.run"
        raise LaunchError(f"{name} needs a launcher, on one GPU too: {command} RECIPE.yaml")
    # the launcher's environment against the config
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and not getattr(args, precision):
        here = "fp16 is on" if args.fp16 else "bf16 is on" if args.bf16 else "bf16 and fp16 are off"
        raise LaunchError(
            f"the launcher's mixed_precision is {precision}, but {here} here: say {precision}: true,"
            " or mixed_precision: 'no' in the accelerate config"
        )
    # keys of files that Accelerate and DeepSpeed would drop
    if file := config_files.find_launch_config():
        config_files.check_accelerate_file(file)
    if args.deepspeed:
        config_files.check_deepspeed(args.deepspeed)
    engine = requested_engine(args, env)
    if engine.fsdp == 1:
        raise LaunchError(
            "FSDP1 is deprecated and not supported: set version: 2 in fsdp_config (accelerate: fsdp_version: 2)"
        )
    if "SHARDED" in engine.state_dict_type and args.load_best_model_at_end:
        raise LaunchError(
            "load_best_model_at_end crashes or loads wrong weights with FSDP2's SHARDED_STATE_DICT:"
            " set state_dict_type: FULL_STATE_DICT in fsdp_config (accelerate: fsdp_state_dict_type)"
        )


def check_accelerator(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Raises InputError where Accelerate left the engine out that was asked for, as it does on CPU without a word."""
    engine = requested_engine(args)
    fsdp_lost = engine.fsdp and not accelerator.is_fsdp2
    if fsdp_lost or (engine.zero is not None and accelerator.state.deepspeed_plugin is None):
        raise InputError(
            f"{'fsdp' if fsdp_lost else 'deepspeed'} is asked for, but Accelerate would train without it on"
            f" {accelerator.device.type}, each rank with all weights: leave it out there, or run on GPUs"
        )
    compiled = accelerator.state.dynamo_plugin
    if compiled.backend != DynamoBackend.NO and not args.torch_compile:
        raise InputError(
            "the accelerate config's dynamo_backend compiles the model as a whole, for each shape of a batch anew:"
            " leave it out, and set train.torch_compile: true, which compiles its layers for all shapes"
        )
    compiled.backend = DynamoBackend.NO  # `models.acceleration` compiles
    if args.torch_compile and not args.tf32 and is_torch_tf32_available():
        enable_tf32(False)  # Accelerate turns it on with a dynamo backend, as HF does, and nobody asked


@contextmanager
def main_process_first(args: TrainingArguments) -> Iterator[None]:
    """The first process of each machine runs the block, then all others do: they find in the cache what it wrote.

    TrainingArguments' method of that name waits in a collective, which gives up after ddp_timeout. args: a Config.
    """
    if args.local_process_index != 0:
        _wait_for_all()
        yield
        return
    try:
        yield
    except Exception:  # the others find the same mistake
        _wait_for_all()
        raise
    _wait_for_all()


def _wait_for_all() -> None:
    """A barrier without timeout."""
    if not dist.is_initialized():
        return
    # every process adds 1 to a count in the process group's store, and looks at it until all are there
    store = dist.distributed_c10d._get_default_store()
    world = dist.get_world_size()
    rounds = -(-store.add("hf_posttrain/waiting", 1) // world)
    while store.add("hf_posttrain/waiting", 0) < rounds * world:
        time.sleep(0.2)
    dist.barrier()  # none leaves, and takes the store along, before all have seen the count


def describe_launch(trainer: Any) -> str:
    """Engine, processes, rows of an optimizer step and precision."""
    args = trainer.args
    count = trainer.accelerator.num_processes
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no mixed precision"
    processes = f"{count} process{'es' * (count > 1)}"
    rows = trainer.get_total_train_batch_size(args)
    return f"on engine {engines.engine_name(trainer.accelerator)}, {processes}, {rows} rows a step, {precision}"


def check_model(model: Any, args: TrainingArguments) -> None:
    """Raises InputError for a policy, reference or teacher that is not a plain model, or quantised as the engine cannot
    take.
    """
    if problem := model_problem(model, args):
        raise InputError(problem)
    if not getattr(model, "is_quantized", False):
        return
    how = model.config.quantization_config
    bits = next((name for name in ("4bit", "8bit") if getattr(how, f"load_in_{name}", False)), "such quantised")
    if problem := quantisation_problem(bits, args, getattr(how, "bnb_4bit_quant_storage", torch.uint8)):
        raise InputError(problem)


def model_problem(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return why a model cannot be trained or scored as it was passed, and what to pass, or None for a plain one."""
    if is_compiled_module(model):
        return "a model from torch.compile takes no scorer in its forward: pass the model itself"
    if isinstance(getattr(model, "module", None), nn.Module) and not hasattr(type(model), "config_class"):
        return f"the model is wrapped in {type(model).__name__}: pass its module, which the launcher wraps itself"
    if not isinstance(model, nn.Module):
        return None
    for name, module in model.named_modules():
        replaced = inspect.isfunction(vars(module).get("forward"))  # as by torch.compile(model.forward)
        if (module._compiled_call_impl or replaced) and not args.torch_compile:
            where = f"{name} of the model" if name else "the model"
            return f"{where} is compiled: pass it as it was loaded, and set torch_compile: true, which compiles layers"
        if has_offloaded_params(module):
            return (
                "weights of the model are offloaded (device_map), so that they cannot be trained: load it without "
                "device_map, and use FSDP2 or ZeRO-3 (accelerate_configs/) if it does not fit"
            )
    weights = list(model.parameters())
    if any(isinstance(weight, DTensor) for weight in weights):
        return (
            "weights of the model are distributed already (tp_plan, distributed_config or fully_shard): load it plain, "
            "and choose an engine by accelerate_configs/"
        )
    devices = sorted({str(weight.device) for weight in weights if not weight.is_meta})
    if len(devices) > 1:
        return f"weights of the model are on {' and '.join(devices)} (device_map): load it onto one device"
    return None


def quantisation_problem(bits: str, args: TrainingArguments, storage: torch.dtype | None = None) -> str | None:
    """Why the engine cannot train on weights of `bits` ("4bit", "8bit", other words), or None where it can.

    storage: the dtype that 4-bit weights are kept as; None: `quantised_storage`.
    """
    engine = requested_engine(args)
    wanted = quantised_storage(args)
    if bits != "4bit":
        how = "use 4bit, or DDP or ZeRO-2, which need not"
        return engine.shards and f"{engine.shards} cannot cut {bits} weights over the ranks: {how}"
    # the dtype says how the bits are stored, not what they mean: an engine that casts it makes noise of them
    storage = storage or wanted
    trained = _mixed_dtype(args) or storage
    if storage.is_floating_point and storage != trained and (engine.fsdp or engine.zero is not None):
        return f"4-bit weights kept as {storage} would be cast to {trained}, to noise: bnb_4bit_quant_storage={wanted}"
    if engine.fsdp and not storage.is_floating_point:
        return f"FSDP2 would keep 4-bit weights of {storage} whole on each rank: bnb_4bit_quant_storage={wanted}"
    return None


def quantised_storage(args: TrainingArguments) -> torch.dtype:
    """The dtype to keep 4-bit weights as: FSDP2 cuts floating ones alone, and casts them to that of training."""
    return (_mixed_dtype(args) or torch.float32) if requested_engine(args).fsdp else torch.uint8


def _mixed_dtype(args: TrainingArguments) -> torch.dtype | None:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
