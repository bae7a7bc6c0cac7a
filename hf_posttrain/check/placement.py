"""Bytes of a model: its weights and what a forward keeps for its backward, counted on the meta device, where tensors
have a shape and no memory; and which engine holds what on each device. ZeRO's shares: arXiv 1910.02054.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import yaml
from torch import Tensor, nn
from transformers import AttentionInterface

from ..batching.micro_batch import MicroBatch
from ..data.images import get_image_reader
from ..engines import launch
from ..engines.config_files import check_accelerate_file
from ..errors import InputError
from ..models import adapters, load
from ..models.config import ModelSection
from ..models.policy import freeze_vision
from ..scoring import forward
from . import vision_memory
from .saved_tensors import SavedTensorCounter

HOST_DEVICES = ("cpu", "nvme")  # where DeepSpeed may keep what is not on the device
# bytes of a quantised weight: in 4 bits with a byte for each 64 of them, and a float32 for each 256 of those
QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}


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

    def __str__(self) -> str:
        kept = "all but gathered layers" if self.offload_params else "the optimizer" if self.offload_optimizer else ""
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        return f"{self.name}, {processes}" + (f", {kept} in host memory" if kept else "")


def engine_from_file(config_file: Path) -> Engine:
    """The engine that a file for `accelerate launch --config_file` asks for. Raises InputError where it is none."""
    try:
        given = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        kind = str(given["distributed_type"]).upper()
        count = int(given.get("num_processes", 1))
        zero = given.get("deepspeed_config") or {}
        fsdp = given.get("fsdp_config") or {}
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(f"{config_file}: no accelerate config with distributed_type and num_processes") from error
    check_accelerate_file(config_file)
    if "deepspeed_config_file" in zero:
        raise InputError(f"{config_file}: deepspeed_config_file is not read here: give zero_stage and offload_*_device")
    usual = "ddp" if count > 1 and kind not in ("NO", "FALSE") else "single"
    name = {"DEEPSPEED": f"zero{zero.get('zero_stage', 2)}", "FSDP": "fsdp2"}.get(kind, usual)
    offloads = (zero.get(f"offload_{what}_device") in HOST_DEVICES for what in ("optimizer", "param"))
    optimizer, params = (each or bool(fsdp.get("fsdp_offload_params")) for each in offloads)
    on_cpu = given.get("use_cpu", False) or kind == "MULTI_CPU"
    return Engine(name, 1 if name == "single" else count, optimizer, params, not on_cpu)


def requested_engine(config: Any) -> Engine:
    """The engine of this run: `launch.requested_engine` and the number of processes. config: a method's Config."""
    asked = launch.requested_engine(config)
    gpu = config.device.type != "cpu"
    count = config.world_size
    if asked.zero is not None:
        zero = config.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        optimizer, params = (
            zero.get(f"offload_{what}", {}).get("device") in HOST_DEVICES for what in ("optimizer", "param")
        )
        return Engine(f"zero{asked.zero}", count, optimizer, params, gpu)
    if asked.fsdp:
        plugin = (config.fsdp_plugin_args or {}) if config.fsdp else {}
        offloads = bool(plugin.get("cpu_offload")) or os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
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
    known = {"lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0, "adafactor": 0}
    moments = next((count for part, count in known.items() if part in name), 2)  # others keep two, as AdamW does
    size = 1.0 if "8bit" in name else 0.5 if "4bit" in name else None
    return weights.trained * moments if size is None else int(weights.trained_numbers * moments * (size + size / 64))


def model_bytes(engine: Engine, weights: Weights, optim: Any, mixed: bool) -> dict[str, int]:
    """Bytes of the trained model on one device, and in host memory for it. mixed: DeepSpeed casts to bf16 or fp16."""
    size = 2 if mixed else 4
    count = engine.processes
    parameters = weights.frozen + weights.trained
    gradients = weights.trained
    optimizer = state_bytes(optim, weights)
    if engine.name == "ddp":
        gradients *= 2  # they travel in buckets of their own
    if engine.name.startswith("zero"):
        frozen = weights.frozen if weights.quantised else (weights.numbers - weights.trained_numbers) * size
        gradients = weights.trained_numbers * size
        parameters = frozen + gradients
        optimizer = optimizer + weights.trained_numbers * 4  # float32 that AdamW moves
    # ZeRO-1 cuts the optimizer, ZeRO-2 gradients too, and the others everything
    optimizer //= count if engine.name not in ("single", "ddp") else 1
    gradients //= count if engine.name not in ("single", "ddp", "zero1") else 1
    parameters //= count if engine.shards else 1
    host = (optimizer + gradients) * engine.offload_optimizer + parameters * engine.offload_params
    parameters = parameters * (not engine.offload_params) + weights.gathered * size * engine.shards
    kept = not engine.offload_optimizer
    return {"parameters": parameters, "gradients": gradients * kept, "optimizer": optimizer * kept, "host": host}


def add_trained_adapter(model: nn.Module, section: ModelSection, vision: bool) -> Any:
    """Return a model without memory with the trained adapter of its section, or unchanged where that has none.

    vision: is its tower for pictures trained too?
    """
    adapter = peft.PeftConfig.from_pretrained(section.adapter) if section.adapter else adapters.lora_config(section)
    if adapter is None:
        return model
    adapter.inference_mode = False
    with torch.device("meta"):
        return adapters.add_adapter(model, adapter, vision)


class Shapes:
    """A model without memory, with the adapter and the dtypes that it would have on `device`. vision: is its tower for
    pictures trained too?
    """

    def __init__(self, section: ModelSection, trainable: bool, device: torch.device, vision: bool = False):
        model: Any = load.load_skeleton(section)
        if not vision:
            freeze_vision(model)
        whole = trainable and section.lora is None and not section.adapter
        model.to(load.weights_dtype(section, model.config, whole, device))
        self.inner = model
        self.head = model.get_output_embeddings().weight
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not self.head}
        embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        products = [w for w in {*linear, self.head} - embedded if w.dtype == torch.float32]
        self.rounding = 2 * sum(w.numel() for w in products)  # bytes that `frozen.precast_linear_weights` saves
        model = add_trained_adapter(model, section, vision)
        numbers: Any = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
        self.model = model
        every = list(model.parameters())
        quantised = section.quantization != "none"
        language = self.inner.get_decoder() if forward.is_vision_language_model(model) else model
        self.layers = max((m for m in language.modules() if isinstance(m, nn.ModuleList)), key=numbers)
        # peft makes float32 of what is not quantised
        sizes = {p: 4 if quantised else p.itemsize for p in every}
        sizes |= dict.fromkeys(linear, QUANTIZED_BYTES[section.quantization]) if quantised else {}
        trained = [p for p in every if p.requires_grad and trainable]
        count = sum(p.numel() for p in trained)
        own = sum(p.numel() * sizes[p] for p in trained)
        frozen = int(sum(p.numel() * sizes[p] for p in every) - own + sum(b.nbytes for b in model.buffers()))
        cut = [
            *self.layers,
            *(vision_memory.vision_layers(self.inner) if forward.is_vision_language_model(model) else ()),
        ]
        gathered = numbers(model) - sum(sorted(map(numbers, cut))[:-2])
        self.weights = Weights(frozen, own, numbers(model), count, gathered, quantised)
        self.tokens = 1
        self.kept = [0] * (1 + len(self.layers))
        self.hidden = 0
        self.cache = 0
        self.reader: Any = get_image_reader(load.load_tokenizer(section)) if section.images else None
        self.tower: Any = None  # of a model that sees, once it is counted

    def count(self, batch: MicroBatch, dtype: torch.dtype | None) -> None:
        """One forward in `dtype` without the head: bytes that are `kept` before the first layer and from each on, of a
        layer's `hidden` input, and of a `cache` of all layers; and the `tower`. Raises what a forward that needs values
        does.
        """
        self.tower = self.reader and vision_memory.measure_vision_memory(self.inner, self.reader, dtype)
        forward.enable_scoring(self.model.train().to(dtype))
        kept = SavedTensorCounter((*self.model.parameters(), *self.model.buffers()))
        starts = [0]
        self.cache = 0  # what was kept when each layer began; keys and values
        gathered = batch.segments["gathered"] if batch.segments else None
        gathered = None if gathered is None else gathered.to("meta")

        def attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
            # [R, heads, L, D] -> [R, L, heads, D]: a fused kernel keeps its inputs and its result
            found = query.new_empty(*query.shape[:-1], value.shape[-1], requires_grad=True)
            self.cache += key.nbytes + value.nbytes
            if gathered is not None:  # a prompt's keys once more for each of its answers
                key, value = (states.index_select(2, gathered) for states in (key, value))
            for tensor in (query, key, value, found):
                kept.add(tensor)
            return found.transpose(1, 2).contiguous(), None

        AttentionInterface.register("shapes", attention)
        self.inner.set_attn_implementation("shapes")  # no masks are made either, which would need values
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: starts.append(kept.bytes))
        given = MicroBatch(input_ids=batch.input_ids, position_ids=batch.position_ids, scored=batch.scored).to("meta")
        with kept.counting():
            forward.run(self.model, given, lambda _, states: {"states": forward.scored_hidden_states(states, given)})
        self.tokens = batch.input_ids.numel()
        self.kept = np.diff([*starts, kept.bytes]).tolist()
        self.hidden = self.tokens * self.head.shape[1] * self.head.itemsize

    def features(self, batch: MicroBatch) -> int:
        """How many tokens of a batch stand for what the tower makes of pictures."""
        return int(torch.isin(batch.input_ids, torch.tensor(self.reader.token_ids)).sum()) if self.tower else 0

    def picture_bytes(self, batch: MicroBatch) -> tuple[int, int]:
        """Bytes of a batch's pictures and their features, and those of a layer of the tower without gradient."""
        count = self.features(batch)
        return (int(count * self.tower.given), int(count * self.tower.layer)) if count else (0, 0)

    def kept_by_tower(self, batch: MicroBatch, every: int) -> int:
        """What a tower that is trained keeps of a batch's pictures; every: as in `training`."""
        count = self.features(batch)
        return int(count * self.tower.kept(every)) if count else 0

    def training(self, every: int) -> tuple[int, int]:
        """(bytes that a forward keeps, what a layer's backward adds). Each such layer is computed again; 0: none."""
        again = self.kept[1::every] if every else []
        return sum(self.kept) - sum(again) + self.hidden * len(again), int(max(self.kept[1:]) * (1.5 if every else 0.5))

    def layer(self, tokens: int) -> int:
        """Bytes of a forward over so many tokens without gradient: one layer at a time."""
        return max(self.kept[1:]) * tokens // self.tokens
