"""Bytes of a model, and their placement on devices by an engine.

Weights, and the tensors that a forward saves for its backward, are counted on the meta device, where tensors have a
shape and no memory. Shares of ZeRO: arXiv 1910.02054.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from transformers import AttentionInterface

from ..batching.micro_batch import MicroBatch
from ..data.images import ImageReader, get_image_reader
from ..engines import launch
from ..engines.config_files import check_accelerate_file
from ..errors import InputError, count_noun
from ..models import adapters, load
from ..models.config import ModelSection
from ..models.policy import freeze_vision
from ..scoring import forward
from ..trainer.config import PostTrainConfig
from ..trainer.optimizers import hidden_matrices
from ..trainer.rules import MUON
from . import vision_memory
from .saved_tensors import SavedTensorCounter

HOST_DEVICES = ("cpu", "nvme")
"""Devices to which DeepSpeed may offload."""
QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
"""Bytes of a quantized weight. In 4 bits there is a byte for each 64 of them, and a float32 for each 256 of those."""


@dataclass(frozen=True)
class Engine:
    """The engine of a run: single, ddp, fsdp2, zero1, zero2 or zero3, its offloading, and whether it is for GPUs."""

    name: str = "single"
    processes: int = 1
    offload_optimizer: bool = False
    offload_params: bool = False
    gpu: bool = False

    @property
    def shards(self) -> bool:
        """Whether it shards weights over the devices, and gathers whole layers on each while they compute."""
        return self.name in ("fsdp2", "zero3")

    def __str__(self) -> str:
        on_host = (
            "all but gathered layers" if self.offload_params else "the optimizer" if self.offload_optimizer else ""
        )
        processes = count_noun(self.processes, "process", "es")
        return f"{self.name}, {processes}" + (f", {on_host} in host memory" if on_host else "")


def engine_from_file(config_file: Path) -> Engine:
    """Return the engine that a file for `accelerate launch --config_file` requests.

    Raises InputError for a file that is not a valid accelerate config.
    """
    try:
        settings = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        kind = str(settings["distributed_type"]).upper()
        count = int(settings.get("num_processes", 1))
        zero = settings.get("deepspeed_config") or {}
        fsdp = settings.get("fsdp_config") or {}
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(
            f"{config_file}: not a valid accelerate config with distributed_type and num_processes"
        ) from error
    check_accelerate_file(config_file)
    if "deepspeed_config_file" in zero:
        problem = "deepspeed_config_file is not supported by --check"
        raise InputError(f"{config_file}: {problem}. Set zero_stage and offload_*_device in its place")
    default = "ddp" if count > 1 and kind not in ("NO", "FALSE") else "single"
    name = {"DEEPSPEED": f"zero{zero.get('zero_stage', 2)}", "FSDP": "fsdp2"}.get(kind, default)
    offloads = (zero.get(f"offload_{part}_device") in HOST_DEVICES for part in ("optimizer", "param"))
    optimizer, params = (offload or bool(fsdp.get("fsdp_offload_params")) for offload in offloads)
    on_cpu = settings.get("use_cpu", False) or kind == "MULTI_CPU"
    return Engine(name, 1 if name == "single" else count, optimizer, params, not on_cpu)


def engine_from_config(config: PostTrainConfig) -> Engine:
    """Return the engine of this run, with its number of processes, from `launch.requested_engine`."""
    requested = launch.requested_engine(config)
    gpu = config.device.type != "cpu"
    count = config.world_size
    if requested.zero is not None:
        plugin: Any = config.deepspeed_plugin
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        optimizer, params = (
            zero.get(f"offload_{part}", {}).get("device") in HOST_DEVICES for part in ("optimizer", "param")
        )
        return Engine(f"zero{requested.zero}", count, optimizer, params, gpu)
    if requested.fsdp:
        fsdp = (config.fsdp_plugin_args or {}) if config.fsdp else {}
        offloads = bool(fsdp.get("cpu_offload")) or os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        return Engine("fsdp2", count, offloads, offloads, gpu)
    return Engine("ddp" if count > 1 else "single", count, gpu=gpu)


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's frozen and trained weights, and numbers of all and of the trained ones."""

    frozen: int = 0
    trained: int = 0
    numbers: int = 0
    trained_numbers: int = 0
    gathered: int = (
        0  # largest number that is whole at once if an engine shards them: outside of layers, and two layers
    )
    quantized: bool = False  # whether the frozen ones are quantized, so that no engine casts them
    matrices: int = 0  # bytes of the trained weights that Muon updates


def state_bytes(optim: object, weights: Weights) -> int:
    """Return the bytes of an optimizer's state. Quantized states have a float32 for each block of 256."""
    name = str(getattr(optim, "value", optim))
    if name == MUON:  # a momentum of the hidden matrices, and both moments of AdamW of the others
        return 2 * weights.trained - weights.matrices
    moments_by_name = {"lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0, "adafactor": 0}
    moments = next((count for part, count in moments_by_name.items() if part in name), 2)  # two for AdamW and others
    size = 1.0 if "8bit" in name else 0.5 if "4bit" in name else None
    return weights.trained * moments if size is None else int(weights.trained_numbers * moments * (size + size / 64))


def model_bytes(engine: Engine, weights: Weights, optim: object, mixed: bool) -> dict[str, int]:
    """Return the bytes of a model on one device, and in host memory for that device.

    Args:
        engine: Engine of the run.
        weights: Bytes and numbers of the weights.
        optim: Name of the optimizer.
        mixed: Whether the run trains in bf16 or fp16, to which DeepSpeed casts weights.

    Returns:
        `parameters`, `gradients`, `optimizer` and `host`.
    """
    size = 2 if mixed else 4
    count = engine.processes
    parameters = weights.frozen + weights.trained
    gradients = weights.trained
    optimizer = state_bytes(optim, weights)
    if engine.name == "ddp":
        gradients *= 2  # communication buckets have the same size
    if engine.name.startswith("zero"):
        frozen = weights.frozen if weights.quantized else (weights.numbers - weights.trained_numbers) * size
        gradients = weights.trained_numbers * size
        parameters = frozen + gradients
        optimizer = optimizer + weights.trained_numbers * 4  # float32 copies that the optimizer updates

    # ZeRO-1 shards the optimizer, ZeRO-2 also gradients, and the others everything
    optimizer //= count if engine.name not in ("single", "ddp") else 1
    gradients //= count if engine.name not in ("single", "ddp", "zero1") else 1
    parameters //= count if engine.shards else 1

    host = (optimizer + gradients) * engine.offload_optimizer + parameters * engine.offload_params
    parameters = parameters * (not engine.offload_params) + weights.gathered * size * engine.shards
    on_device = not engine.offload_optimizer
    return {
        "parameters": parameters,
        "gradients": gradients * on_device,
        "optimizer": optimizer * on_device,
        "host": host,
    }


def add_trained_adapter(model: nn.Module, section: ModelSection, vision: bool) -> Any:
    """Return a model without memory with the trained adapter of its section, or unchanged if there is none.

    vision: whether the vision encoder is trained as well.
    """
    adapter = adapters.trained_adapter_config(section)
    if adapter is None:
        return model
    adapter.inference_mode = False
    with torch.device("meta"):
        return adapters.add_adapter(model, adapter, vision)


class Shapes:
    """A model without memory, with its adapter, and the bytes that it would have.

    Args:
        section: Section of the model.
        trainable: Whether it is trained.
        device: Device on which it would run, which determines its dtypes.
        vision: Whether its vision encoder is trained as well.
    """

    def __init__(self, section: ModelSection, trainable: bool, device: torch.device, vision: bool = False) -> None:
        model: Any = load.load_skeleton(section)
        if not vision:
            freeze_vision(model)
        all_trained = trainable and section.lora is None and not section.adapter
        model.to(load.weights_dtype(section, model.config, all_trained, device))
        self.inner = model
        self.head = forward.output_layer(model).weight
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not self.head}
        embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        products = [w for w in {*linear, self.head} - embeddings if w.dtype == torch.float32]
        self.precast_savings = 2 * sum(w.numel() for w in products)  # bytes that `frozen.precast_linear_weights` saves
        model = add_trained_adapter(model, section, vision)
        self.model = model
        parameters = list(model.parameters())
        quantized = section.quantization != "none"
        language = self.inner.get_decoder() if forward.is_vision_language_model(model) else model
        self.layers = max((m for m in language.modules() if isinstance(m, nn.ModuleList)), key=_count_parameters)

        # peft casts weights that are not quantized to float32
        sizes = {p: 4 if quantized else p.itemsize for p in parameters}
        sizes |= dict.fromkeys(linear, QUANTIZED_BYTES[section.quantization]) if quantized else {}
        trained = [p for p in parameters if p.requires_grad and trainable]
        trained_count = sum(p.numel() for p in trained)
        trained_bytes = sum(p.numel() * sizes[p] for p in trained)
        hidden = hidden_matrices(model)
        updated = [p for name, p in model.named_parameters() if name in hidden and p.requires_grad and trainable]
        matrix_bytes = sum(p.numel() * sizes[p] for p in updated)
        buffers = sum(b.nbytes for b in model.buffers())
        frozen_bytes = int(sum(p.numel() * sizes[p] for p in parameters) - trained_bytes + buffers)
        vision_layers = vision_memory.vision_layers(self.inner) if forward.is_vision_language_model(model) else None
        sharded = [*self.layers, *(vision_layers or ())]
        count = _count_parameters(model)
        gathered = count - sum(sorted(map(_count_parameters, sharded))[:-2])
        self.weights = Weights(frozen_bytes, trained_bytes, count, trained_count, gathered, quantized, matrix_bytes)

        self.tokens = 1
        self.kept = [0] * (1 + len(self.layers))
        self.hidden = 0
        self.cache = 0
        self.reader: ImageReader | None = get_image_reader(load.load_tokenizer(section)) if section.images else None
        self.vision: vision_memory.VisionMemory | None = None  # of a vision-language model, once it is counted

    def count(self, batch: MicroBatch, dtype: torch.dtype | None) -> None:
        """Run one forward in `dtype` without the head, and count bytes.

        Sets `kept` (bytes saved before the first layer, and in each layer), `hidden` (input of a layer), `cache` (keys
        and values of all layers) and `vision`. Raises any error of a forward that requires values.
        """
        self.vision = vision_memory.measure_vision_memory(self.inner, self.reader, dtype) if self.reader else None
        forward.enable_scoring(self.model.train().to(dtype))
        counter = SavedTensorCounter((*self.model.parameters(), *self.model.buffers()))
        starts = [0]  # bytes that were saved when each layer began
        self.cache = 0
        gathered = batch.segments["gathered"] if batch.segments else None
        gathered = None if gathered is None else gathered.to("meta")

        def attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
            # [R, heads, L, D] -> [R, L, heads, D]: a fused kernel saves its inputs and its result
            output = query.new_empty(*query.shape[:-1], value.shape[-1], requires_grad=True)
            self.cache += key.nbytes + value.nbytes
            if gathered is not None:  # the keys of a prompt once more for each of its answers
                key, value = (states.index_select(2, gathered) for states in (key, value))
            for tensor in (query, key, value, output):
                counter.add(tensor)
            return output.transpose(1, 2).contiguous(), None

        AttentionInterface.register("shapes", attention)
        self.inner.set_attn_implementation("shapes")  # this makes no masks either, which would require values
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: starts.append(counter.bytes))
        inputs = MicroBatch(input_ids=batch.input_ids, position_ids=batch.position_ids, scored=batch.scored).to("meta")
        with counter.counting():
            forward.run(self.model, inputs, lambda _, hidden: {"states": forward.scored_hidden_states(hidden, inputs)})
        self.tokens = batch.input_ids.numel()
        self.kept = np.diff([*starts, counter.bytes]).tolist()
        self.hidden = self.tokens * self.head.shape[1] * self.head.itemsize

    def count_features(self, batch: MicroBatch) -> int:
        """Return the number of tokens of a batch that image features replace."""
        if self.vision is None or self.reader is None:
            return 0
        return int(torch.isin(batch.input_ids, torch.tensor(self.reader.token_ids)).sum())

    def image_bytes(self, batch: MicroBatch) -> tuple[int, int]:
        """Return the bytes of a batch's images with their features, and of an encoder layer without gradient."""
        count = self.count_features(batch)
        if not count or self.vision is None:
            return 0, 0
        return int(count * self.vision.input_and_feature_bytes), int(count * self.vision.bytes_per_layer)

    def encoder_bytes(self, batch: MicroBatch, every: int) -> int:
        """Return the bytes that a trained vision encoder saves for a batch. every: as in `training`."""
        count = self.count_features(batch)
        return int(count * self.vision.saved_bytes(every)) if count and self.vision else 0

    def training(self, every: int) -> tuple[int, int]:
        """Return the bytes that a forward saves, and the bytes that a layer's backward adds.

        every: one of so many layers is recomputed in the backward, 0 for none.
        """
        recomputed = self.kept[1::every] if every else []
        saved = sum(self.kept) - sum(recomputed) + self.hidden * len(recomputed)
        return saved, int(max(self.kept[1:]) * (1.5 if every else 0.5))

    def layer(self, tokens: int) -> int:
        """Return the bytes of a forward over a number of tokens without gradient: one layer at a time."""
        return max(self.kept[1:]) * tokens // self.tokens


def _count_parameters(module: nn.Module) -> int:
    """Return the number of values of all parameters of a module."""
    return sum(p.numel() for p in module.parameters())
