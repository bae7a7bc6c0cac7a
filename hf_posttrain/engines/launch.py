"""The engine that the Config and the launcher request, and checks at the start of a run.

The checks reject launches and models that would train with wrong results, train in another way than requested, or fail
late.
"""

import inspect
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, has_offloaded_params, is_compiled_module
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.utils.import_utils import enable_tf32, is_torch_tf32_available

from ..errors import InputError, LaunchError, count_noun
from ..scoring.cpu import lacks_bf16_instructions
from . import config_files
from . import engine as engines

if TYPE_CHECKING:
    from transformers import Trainer

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_START_ALL = (
    "Start all processes with torchrun --nproc_per_node N or accelerate launch --multi_gpu (on CPU with use_cpu: true)"
)
SHARDING_FIX = "To shard it, use FSDP2 or ZeRO-3 (accelerate_configs/)"
"""Fix in errors about models that are placed on several devices while they are loaded."""


class RequestedEngine(NamedTuple):
    """The engine that a Config or a launcher requests."""

    fsdp: int  # version of FSDP, 0 without FSDP
    state_dict_type: str  # of FSDP's checkpoints: FULL_STATE_DICT or SHARDED_STATE_DICT
    zero: int | None  # ZeRO stage, None without DeepSpeed

    @property
    def sharding_engine(self) -> str | None:
        """The name of the engine if it shards weights over the ranks, otherwise None."""
        return "FSDP2" if self.fsdp else "ZeRO-3" if self.zero == 3 else None


def requested_engine(args: TrainingArguments, env: Mapping[str, str] | None = None) -> RequestedEngine:
    """Return the engine that a Config requests, or the launcher if the Config does not mention FSDP.

    Args:
        args: A method's Config after `__post_init__` of HF.
        env: The environment that the launcher has set; os.environ by default.
    """
    env = os.environ if env is None else env  # not a default value: `datasets` replaces it after a map with processes
    # the plugin may be requested by the Config or by the launcher
    zero = None if args.deepspeed_plugin is None else int(args.deepspeed_plugin.zero_stage)
    if args.fsdp:
        plugin = args.fsdp_plugin_args or {}  # None on XLA
        return RequestedEngine(plugin.get("fsdp_version", 2), str(plugin.get("state_dict_type")).upper(), zero)
    if env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        state = env.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")  # both defaults are Accelerate's
        return RequestedEngine(int(env.get("FSDP_VERSION", "1")), state.upper(), zero)
    return RequestedEngine(0, "", zero)


def check_engine(args: TrainingArguments, env: Mapping[str, str] | None = None) -> None:
    """Raise LaunchError for an engine or a launch that is not supported.

    Args:
        args: A method's Config after `__post_init__` of HF.
        env: The environment that the launcher has set; os.environ by default.
    """
    env = os.environ if env is None else env
    # several processes that do not know of each other would each train and save the same model
    if args.world_size == 1:
        for name in _SIZES:
            if (size := int(env.get(name) or 1)) > 1:
                raise LaunchError(f"{name} is {size}, and this process would train alone. {_START_ALL}")
        # `accelerate launch` sets these variables for the single process that it starts
        is_multi = env.get("MASTER_ADDR") == "127.0.0.1" and {"MASTER_PORT", "ACCELERATE_MIXED_PRECISION"} <= env.keys()
        if "RANK" not in env and is_multi:
            raise LaunchError(f"accelerate launch is configured for several processes, and started one. {_START_ALL}")
    if (args.fsdp or args.deepspeed) and "LOCAL_RANK" not in env:
        name = "fsdp" if args.fsdp else "deepspeed"
        command = "torchrun --nproc_per_node N -m hf_posttrain.run"
        raise LaunchError(f"{name} requires a launcher, even on one GPU. Use {command} RECIPE.yaml")

    # conflicts between the launcher and the Config
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and not getattr(args, precision):
        state = "fp16 is on" if args.fp16 else "bf16 is on" if args.bf16 else "bf16 and fp16 are off"
        raise LaunchError(
            f"the launcher's mixed_precision is {precision}, but {state}. Set {precision}: true, or mixed_precision: "
            "'no' in the accelerate config"
        )
    # keys of config files that Accelerate and DeepSpeed ignore
    if file := config_files.find_launch_config():
        config_files.check_accelerate_file(file)
    if args.deepspeed:
        config_files.check_deepspeed(args.deepspeed)

    engine = requested_engine(args, env)
    if engine.fsdp == 1:
        raise LaunchError(
            "FSDP1 is not supported, since it is deprecated. Set version: 2 in fsdp_config (accelerate: "
            "fsdp_version: 2)"
        )
    if "SHARDED" in engine.state_dict_type and args.load_best_model_at_end:
        raise LaunchError(
            "load_best_model_at_end is not supported with FSDP2's SHARDED_STATE_DICT, with which it crashes or loads "
            "wrong weights. Set state_dict_type: FULL_STATE_DICT in fsdp_config (accelerate: fsdp_state_dict_type)"
        )


def check_accelerator(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Raise InputError if Accelerate has silently ignored the requested engine, as it does on CPU."""
    engine = requested_engine(args)
    fsdp_ignored = engine.fsdp and not accelerator.is_fsdp2
    if fsdp_ignored or (engine.zero is not None and accelerator.state.deepspeed_plugin is None):
        raise InputError(
            f"{'fsdp' if fsdp_ignored else 'deepspeed'} is not supported on {accelerator.device.type}, where Accelerate"
            " trains without it, with all weights on each rank. Remove it, or run on GPUs"
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO and not args.torch_compile:
        raise InputError(
            "dynamo_backend in the accelerate config is not supported, since it compiles the whole model for each shape"
            " of a batch. Remove it, and set train.torch_compile: true, which compiles the layers for all shapes"
        )
    plugin.backend = DynamoBackend.NO  # `models.acceleration` compiles the layers
    if args.torch_compile and not args.tf32 and is_torch_tf32_available():
        enable_tf32(False)  # HF and Accelerate enable it with a dynamo backend, which users do not expect


@contextmanager
def main_process_first(args: TrainingArguments) -> Iterator[None]:
    """Run the block on the first process of each machine, then on all others, which find its results in the cache.

    The method of TrainingArguments with this name waits in a collective, which fails after `ddp_timeout`.
    """
    if args.local_process_index != 0:
        _wait_for_all()
        yield
        return
    try:
        yield
    except Exception:  # the other processes raise the same error
        _wait_for_all()
        raise
    _wait_for_all()


def _wait_for_all() -> None:
    """Wait for all processes, without a timeout."""
    if not dist.is_initialized():
        return
    # every process adds 1 to a counter in the store of the process group, and polls it until all have done so
    store = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    rounds = -(-store.add("hf_posttrain/waiting", 1) // world_size)
    while store.add("hf_posttrain/waiting", 0) < rounds * world_size:
        time.sleep(0.2)
    dist.barrier()  # the process with the store must not end before all have read the counter


def describe_launch(trainer: "Trainer") -> str:
    """Return a description of the engine, the processes, the rows of an optimizer step and the precision."""
    args = trainer.args
    count = trainer.accelerator.num_processes
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no mixed precision"
    if args.bf16 and args.device.type == "cpu" and lacks_bf16_instructions():
        precision += " (slow: this processor has no bf16 instructions, see --check)"
    processes = count_noun(count, "process", "es")
    rows = trainer.get_total_train_batch_size(args)
    return f"on engine {engines.engine_name(trainer.accelerator)}, {processes}, {rows} rows a step, {precision}"


def check_model(model: nn.Module, args: TrainingArguments) -> None:
    """Raise InputError for a policy, reference or teacher that is wrapped, or whose quantization is not supported."""
    if problem := model_problem(model, args):
        raise InputError(problem)
    if not getattr(model, "is_quantized", False):
        return
    config: Any = model.config
    options = config.quantization_config
    bits = next((name for name in ("4bit", "8bit") if getattr(options, f"load_in_{name}", False)), "these quantized")
    if problem := quantization_problem(bits, args, getattr(options, "bnb_4bit_quant_storage", torch.uint8)):
        raise InputError(problem)


def model_problem(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return why a model cannot be trained or scored, and the fix, or None for a plain model on one device."""
    if is_compiled_module(model):
        return "a model from torch.compile is not supported, since its forward takes no scorer. Pass the original model"
    if isinstance(getattr(model, "module", None), nn.Module) and not hasattr(type(model), "config_class"):
        return f"the model is wrapped in {type(model).__name__}. Pass its module, which the launcher wraps"
    if not isinstance(model, nn.Module):
        return None
    weights = list(model.parameters())
    config = getattr(model, "config", None)
    # with pipeline parallelism, weights are plain tensors
    if getattr(config, "distributed_config", None) or any(isinstance(weight, DTensor) for weight in weights):
        return (
            "weights of the model are distributed already (tp_plan, distributed_config or fully_shard). Load it "
            f"without these. {SHARDING_FIX}"
        )
    for name, module in model.named_modules():
        is_replaced = inspect.isfunction(vars(module).get("forward"))  # for instance by torch.compile(model.forward)
        if (module._compiled_call_impl or is_replaced) and not args.torch_compile:
            part = f"{name} of the model" if name else "the model"
            return f"{part} is compiled. Pass it as it was loaded, and set torch_compile: true, which compiles layers"
        if has_offloaded_params(module):
            return f"weights of the model are offloaded (device_map). Load it without device_map. {SHARDING_FIX}"
    devices = sorted({str(weight.device) for weight in weights if not weight.is_meta})
    if len(devices) > 1:
        return (
            f"weights of the model are on {' and '.join(devices)} (device_map). Load it onto one device. {SHARDING_FIX}"
        )
    return None


def quantization_problem(bits: str, args: TrainingArguments, storage: torch.dtype | None = None) -> str | None:
    """Return why the engine cannot train with quantized weights, or None if it can.

    Args:
        bits: "4bit", "8bit", or a word for other weights.
        args: The Config.
        storage: The dtype that 4-bit weights are stored as; by default that of `quantized_storage`.
    """
    engine = requested_engine(args)
    expected = quantized_storage(args)
    if bits != "4bit":
        if engine.sharding_engine is None:
            return None
        return (
            f"{engine.sharding_engine} cannot shard {bits} weights over the ranks. Use 4bit, or use DDP or ZeRO-2, "
            "which do not shard them"
        )
    # the dtype of 4-bit weights is that of their storage, so that an engine that casts it destroys their values
    storage = storage or expected
    trained = _mixed_dtype(args) or storage
    if storage.is_floating_point and storage != trained and (engine.fsdp or engine.zero is not None):
        return (
            f"4-bit weights that are stored as {storage} would be cast to {trained}, which destroys their values. Set "
            f"bnb_4bit_quant_storage={expected}"
        )
    if engine.fsdp and not storage.is_floating_point:
        return f"FSDP2 cannot shard 4-bit weights that are stored as {storage}. Set bnb_4bit_quant_storage={expected}"
    return None


def quantized_storage(args: TrainingArguments) -> torch.dtype:
    """Return the dtype to store 4-bit weights as.

    FSDP2 shards only floating-point weights, and casts them to the dtype of training.
    """
    return (_mixed_dtype(args) or torch.float32) if requested_engine(args).fsdp else torch.uint8


def _mixed_dtype(args: TrainingArguments) -> torch.dtype | None:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
