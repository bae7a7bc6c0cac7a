"""Which engine holds what, on how many devices: arithmetic of weights, gradients and the optimizer's state.

    Engine          its name, processes, what it keeps in host memory
    engine_of       from a file of accelerate_configs/
    engine_asked    by the config and the launcher's environment
    Weights         what a model consists of
    state_bytes     what an optimizer keeps, by its name in `train.optim`
    policy_on, frozen_on     what of a model lies on one device

ZeRO's shares are those of its paper (arXiv 1910.02054); the README's table of bytes a weight follows from them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from ..engines import launch
from ..errors import InputError
from .live import nbytes

MOMENTS = {
    "adamw_torch": 2, "adamw_torch_fused": 2, "adamw_torch_xla": 2, "adamw_torch_npu_fused": 2, "adamw_anyprecision": 2,
    "paged_adamw_32bit": 2, "schedule_free_adamw": 2, "schedule_free_radam": 2, "stable_adamw": 2, "grokadamw": 2,
    "ademamix": 3, "paged_ademamix_32bit": 3, "adagrad": 1, "rmsprop": 1, "rmsprop_bnb": 1, "rmsprop_bnb_32bit": 1,
    "lion_32bit": 1, "paged_lion_32bit": 1, "schedule_free_sgd": 1, "sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0,
}  # fmt: skip
"""Numbers that an optimizer keeps for each weight, in the weight's dtype. Adafactor keeps one for each row and column
of a matrix, next to nothing."""
SMALL_MOMENTS = {
    "adamw_8bit": 2.0, "adamw_bnb_8bit": 2.0, "paged_adamw_8bit": 2.0, "adamw_torch_8bit": 2.0, "adamw_torch_4bit": 1.0,
    "ademamix_8bit": 3.0, "paged_ademamix_8bit": 3.0, "lion_8bit": 1.0, "paged_lion_8bit": 1.0, "rmsprop_bnb_8bit": 1.0,
}  # fmt: skip
"""Bytes that a quantised optimizer keeps for each weight."""
HOST = ("cpu", "nvme")
"""Where DeepSpeed may keep what is not on the device."""
SCALES = 4 / 256
"""Bytes a quantised byte: a float32 scale for each block of 256."""


@dataclass(frozen=True)
class Engine:
    """The engine of a run."""

    name: str = "single"
    """single, ddp, fsdp2, zero1, zero2 or zero3."""
    processes: int = 1
    offload_optimizer: bool = False
    """The optimizer's state, and what it updates, in host memory."""
    offload_params: bool = False
    """The shards of all weights too; whole layers come to the device while they compute."""
    gpu: bool = False
    """Is it meant for GPUs?"""

    @property
    def shards(self) -> bool:
        """Does it cut weights over the devices?"""
        return self.name in ("fsdp2", "zero3")

    @property
    def zero(self) -> int:
        """ZeRO's stage, 0 without DeepSpeed."""
        return int(self.name[-1]) if self.name.startswith("zero") else 0

    @property
    def described(self) -> str:
        """In words."""
        kept = "all but gathered layers" if self.offload_params else "the optimizer" if self.offload_optimizer else ""
        many = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{self.name}, {many}" + (f", {kept} in host memory" if kept else "")


def engine_of(config_file: Path) -> Engine:
    """The engine that a file for `accelerate launch --config_file` asks for. Raises InputError where it is none."""
    try:
        given = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        kind, count = str(given["distributed_type"]).upper(), int(given.get("num_processes", 1))
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{config_file}: no accelerate config with distributed_type and num_processes") from error
    gpu = not given.get("use_cpu", False) and kind != "MULTI_CPU"
    if kind == "DEEPSPEED":
        zero = given.get("deepspeed_config", {})
        optimizer, params = (zero.get(f"offload_{what}_device") in HOST for what in ("optimizer", "param"))
        return Engine(f"zero{zero.get('zero_stage', 2)}", count, optimizer, params, gpu)
    if kind == "FSDP":
        offload = bool(given.get("fsdp_config", {}).get("fsdp_offload_params", False))
        return Engine("fsdp2", count, offload, offload, gpu)
    several = count > 1 and kind not in ("NO", "FALSE")
    return Engine("ddp", count, gpu=gpu) if several else Engine(gpu=gpu)


def engine_asked(config: Any, env: Mapping[str, str] | None = None) -> Engine:
    """The engine of this run: `launch.asked` and the number of processes. config: a method's Config."""
    env, asked = os.environ if env is None else env, launch.asked(config, env)
    gpu, count = config.device.type != "cpu", config.world_size
    if asked.zero is not None:
        zero = config.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        optimizer, params = (zero.get(f"offload_{what}", {}).get("device") in HOST for what in ("optimizer", "param"))
        return Engine(f"zero{asked.zero}", count, optimizer, params, gpu)
    if asked.fsdp:
        plugin = (config.fsdp_plugin_args or {}) if config.fsdp else {}
        offload = bool(plugin.get("cpu_offload")) or env.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        return Engine("fsdp2", count, offload, offload, gpu)
    return Engine("ddp" if count > 1 else "single", count, gpu=gpu)


@dataclass(frozen=True)
class Weights:
    """Bytes and numbers of a model's weights and buffers."""

    frozen: int = 0
    """Bytes of what is not trained."""
    trained: int = 0
    """Bytes of what is."""
    numbers: int = 0
    """Of weights, all together."""
    trained_numbers: int = 0
    """Of those that are trained."""
    gathered: int = 0
    """Numbers that a device has whole at once where an engine cuts them: two layers, and what is outside of layers."""
    quantised: bool = False
    """Frozen weights are quantised: no engine casts them."""

    @classmethod
    def of(cls, model: nn.Module, quantised: int | None = None) -> "Weights":
        """quantised: bytes of the frozen weights once they are quantised."""
        trained = [p for p in model.parameters() if p.requires_grad]
        rest = [p for p in model.parameters() if not p.requires_grad]
        frozen = nbytes(model.buffers()) + (nbytes(rest) if quantised is None else quantised)
        numbers, of_trained = (sum(p.numel() for p in part) for part in (rest + trained, trained))
        return cls(frozen, nbytes(trained), numbers, of_trained, _gathered(model), quantised is not None)


def _gathered(model: nn.Module) -> int:
    """Weights outside of the layers, which stay whole from forward to backward, and of the two largest layers: one
    that computes and one that is fetched."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=nn.ModuleList())
    sizes = sorted(sum(p.numel() for p in layer.parameters()) for layer in layers)
    return sum(p.numel() for p in model.parameters()) - sum(sizes) + sum(sizes[-2:])


def state_bytes(optim: str, weights: Weights) -> int:
    """Bytes of an optimizer's state for the trained weights; one that is not known counts like AdamW."""
    name = str(getattr(optim, "value", optim))
    if name in SMALL_MOMENTS:
        return int(weights.trained_numbers * SMALL_MOMENTS[name] * (1 + SCALES))
    return weights.trained * MOMENTS.get(name, 2)


@dataclass(frozen=True)
class Held:
    """Bytes on one device, and those kept for it in host memory."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0


def policy_on(engine: Engine, weights: Weights, optim: str, mixed: bool) -> Held:
    """What one device holds of the model that is trained. mixed: bf16 or fp16, which DeepSpeed casts weights to."""
    state, count = state_bytes(optim, weights), engine.processes
    if engine.name in ("single", "ddp"):
        buckets = weights.trained if engine.name == "ddp" else 0  # gradients travel in buckets of their own
        return Held(weights.frozen + weights.trained, weights.trained + buckets, state)
    size = 2 if mixed else 4
    if engine.name == "fsdp2":
        shard = Held((weights.frozen + weights.trained) // count, weights.trained // count, state // count)
    else:
        frozen = weights.frozen if weights.quantised else (weights.numbers - weights.trained_numbers) * size
        own, cut = weights.trained_numbers * size, count if engine.zero == 3 else 1
        masters = weights.trained_numbers * 4  # the float32 weights that AdamW moves
        parameters, gradients = (frozen + own) // cut, own // (count if engine.zero > 1 else 1)
        shard = Held(parameters, gradients, (masters + state) // count)
    return _offloaded(engine, shard, weights.gathered * size if engine.shards else 0)


def _offloaded(engine: Engine, shard: Held, gathered: int) -> Held:
    """The shard with what goes to host memory, and the layers that are whole while they compute."""
    host = shard.optimizer * engine.offload_optimizer + shard.parameters * engine.offload_params
    gradients = 0 if engine.offload_optimizer else shard.gradients
    if engine.offload_optimizer:
        host += shard.gradients
    parameters = gathered + (0 if engine.offload_params else shard.parameters)
    return Held(parameters, gradients, 0 if engine.offload_optimizer else shard.optimizer, host)


def frozen_on(engine: Engine, weights: Weights, mixed: bool) -> int:
    """Bytes of a reference or teacher on one device: cut where the policy is, cast to its dtype by DeepSpeed."""
    casts = bool(engine.zero) and mixed and not weights.quantised
    whole = weights.numbers * 2 if casts else weights.frozen + weights.trained
    if not engine.shards:
        return whole
    per_weight = whole / max(weights.numbers, 1)
    return whole // engine.processes + int(weights.gathered * min(per_weight, 2 if mixed else 4))
