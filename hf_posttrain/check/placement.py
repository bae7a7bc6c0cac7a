"""Which engine holds what, on how many devices: arithmetic of weights, gradients and the optimizer's state.

ZeRO's shares are those of its paper (arXiv 1910.02054); the README's table of bytes a weight follows from them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..engines import launch
from ..errors import InputError

MOMENTS = {
    "ademamix": 3, "lion": 1, "rmsprop": 1, "adagrad": 1, "schedule_free_sgd": 1, "sgd": 0, "lomo": 0, "adafactor": 0,
}  # fmt: skip
"""Part of an optimizer's name in `train.optim` -> numbers that it keeps for each weight; others: 2, as AdamW."""
HOST = ("cpu", "nvme")
"""Where DeepSpeed may keep what is not on the device."""


@dataclass(frozen=True)
class Engine:
    """The engine of a run: single, ddp, fsdp2, zero1, zero2 or zero3; what it keeps in host memory; is it for GPUs?"""

    name: str = "single"
    processes: int = 1
    offload_optimizer: bool = False
    offload_params: bool = False
    gpu: bool = False

    @property
    def shards(self) -> bool:
        """Does it cut weights over the devices? Whole layers come to each while they compute."""
        return self.name in ("fsdp2", "zero3")

    @property
    def changes_weights(self) -> bool:
        """Does it cut or cast them when training begins?"""
        return self.name not in ("single", "ddp")

    def __str__(self) -> str:
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
    gpu, zero = not given.get("use_cpu", False) and kind != "MULTI_CPU", given.get("deepspeed_config", {})
    if kind == "DEEPSPEED":
        optimizer, params = (zero.get(f"offload_{what}_device") in HOST for what in ("optimizer", "param"))
        return Engine(f"zero{zero.get('zero_stage', 2)}", count, optimizer, params, gpu)
    if kind == "FSDP":
        offloads = bool(given.get("fsdp_config", {}).get("fsdp_offload_params"))
        return Engine("fsdp2", count, offloads, offloads, gpu)
    return Engine("ddp", count, gpu=gpu) if count > 1 and kind not in ("NO", "FALSE") else Engine(gpu=gpu)


def engine_asked(config: Any, env: Mapping[str, str] = os.environ) -> Engine:
    """The engine of this run: `launch.asked` and the number of processes. config: a method's Config."""
    asked, gpu, count = launch.asked(config, env), config.device.type != "cpu", config.world_size
    if asked.zero is not None:
        zero = config.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        optimizer, params = (zero.get(f"offload_{what}", {}).get("device") in HOST for what in ("optimizer", "param"))
        return Engine(f"zero{asked.zero}", count, optimizer, params, gpu)
    if asked.fsdp:
        plugin = (config.fsdp_plugin_args or {}) if config.fsdp else {}
        offloads = bool(plugin.get("cpu_offload")) or env.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        return Engine("fsdp2", count, offloads, offloads, gpu)
    return Engine("ddp" if count > 1 else "single", count, gpu=gpu)


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's frozen weights and of its trained ones; how many both are, and the trained ones."""

    frozen: int = 0
    trained: int = 0
    numbers: int = 0
    trained_numbers: int = 0
    gathered: int = 0  # how many are whole at once where an engine cuts them: outside of layers, and of two layers
    quantised: bool = False  # the frozen ones: no engine casts them


def state_bytes(optim: Any, weights: Weights) -> int:
    """Bytes of an optimizer's state for the trained weights; of quantised ones with a float32 for each block of 256."""
    name = str(getattr(optim, "value", optim))
    moments = next((count for part, count in MOMENTS.items() if part in name), 2)
    size = 1.0 if "8bit" in name else 0.5 if "4bit" in name else None
    return weights.trained * moments if size is None else int(weights.trained_numbers * moments * (size + size / 64))


def policy_on(engine: Engine, weights: Weights, optim: Any, mixed: bool) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer of the trained model on one device, and what is in host memory for
    it. mixed: bf16 or fp16, which DeepSpeed casts weights to."""
    size, count = 2 if mixed else 4, engine.processes
    parameters, gradients, optimizer = weights.frozen + weights.trained, weights.trained, state_bytes(optim, weights)
    if engine.name == "ddp":
        gradients *= 2  # they travel in buckets of their own
    if engine.name.startswith("zero"):
        frozen = weights.frozen if weights.quantised else (weights.numbers - weights.trained_numbers) * size
        gradients = weights.trained_numbers * size
        parameters, optimizer = frozen + gradients, optimizer + weights.trained_numbers * 4  # float32 that AdamW moves
    # ZeRO-1 cuts the optimizer, ZeRO-2 gradients too, and the others everything
    optimizer //= count if engine.changes_weights else 1
    gradients //= count if engine.changes_weights and engine.name != "zero1" else 1
    parameters //= count if engine.shards else 1
    host = (optimizer + gradients) * engine.offload_optimizer + parameters * engine.offload_params
    parameters = parameters * (not engine.offload_params) + weights.gathered * size * engine.shards
    kept = not engine.offload_optimizer
    return {"parameters": parameters, "gradients": gradients * kept, "optimizer": optimizer * kept, "host": host}


def frozen_on(engine: Engine, weights: Weights, mixed: bool) -> int:
    """Bytes of a reference or teacher on one device: cut where the policy is, cast to its dtype by DeepSpeed."""
    casts = engine.name.startswith("zero") and mixed and not weights.quantised
    whole = weights.numbers * 2 if casts else weights.frozen + weights.trained
    gathered = weights.gathered * min(whole / max(weights.numbers, 1), 2 if mixed else 4)
    return whole // engine.processes + int(gathered) if engine.shards else whole
