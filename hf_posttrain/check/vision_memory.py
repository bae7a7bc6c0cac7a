"""Estimate of the memory of images: activations of a vision encoder, and its output features.

Vision encoders compute with values (the number of patches of an image, the tiles that are padding), so they cannot run
on shapes alone. Instead one layer of the encoder runs on one small image. The estimate assumes that all layers use the
same memory, and that memory is proportional to the number of image tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.images import ImageReader
from ..scoring.forward import is_vision_parameter, vision_weights
from .saved_tensors import SavedTensorCounter


@dataclass(frozen=True)
class VisionMemory:
    """Estimate of the memory of a vision encoder: saved activations and output features, per image token.

    Attributes:
        input_and_feature_bytes: Pixels, and the features that the language model gets.
        non_layer_bytes: Activations that are saved before and after the layers.
        bytes_per_layer: Activations that are saved in a layer.
        layer_input_bytes: Input of a layer.
        num_layers: Number of layers.
        trained: Whether the encoder is trained, so that activations are saved.
    """

    input_and_feature_bytes: float
    non_layer_bytes: float
    bytes_per_layer: float
    layer_input_bytes: float
    num_layers: int
    trained: bool

    def saved_bytes(self, checkpoint_every: int) -> float:
        """Return the bytes that a forward saves for its backward.

        Args:
            checkpoint_every: One of so many layers is recomputed in the backward, 0 for none.
        """
        if not self.trained:
            return 0.0
        recomputed = len(range(0, self.num_layers, checkpoint_every)) if checkpoint_every else 0
        in_layers = self.bytes_per_layer * (self.num_layers - recomputed)
        return self.non_layer_bytes + in_layers + self.layer_input_bytes * recomputed


def vision_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the layers of a model's vision encoder, or None for an encoder without a list of layers."""
    lists = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and is_vision_parameter(model, name)
    )
    return max(lists, key=len, default=None)


def measure_vision_memory(model: PreTrainedModel, reader: ImageReader, dtype: torch.dtype | None) -> VisionMemory:
    """Measure the memory of the vision encoder of a causal LM on the meta device.

    Args:
        model: The causal LM. The encoder counts as trained if its parameters require gradients.
        reader: Reader of images for this model.
        dtype: Dtype in which the encoder computes; None for that of its weights.

    Raises:
        NotImplementedError: For an encoder without a list of layers, or whose first layer does not run exactly once.
    """
    weights = vision_weights(model)
    trained = any(weight.requires_grad for weight in weights)
    scale = (dtype or weights[0].dtype).itemsize / 4

    # a copy with one layer and weights of zero, in float32
    probe: Any = copy.deepcopy(model).float().requires_grad_(True)
    layers = vision_layers(probe)
    if not layers:
        raise NotImplementedError(f"the vision encoder of {type(model).__name__} has no list of layers")
    num_layers = len(layers)
    del layers[1:]
    for name, module in probe.named_modules():
        # A parent of both encoder and language model may own encoder parameters. The suffix tests its direct
        # parameters.
        if is_vision_parameter(probe, f"{name}.any"):
            module.to_empty(device="cpu", recurse=False)
            for values in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                values.detach().zero_()
    image = reader.blank_tensors
    if image["pixel_values"].dim() == 5:  # tiles: [images, tiles, channels, height, width]
        image = {name: value[:, :1] for name, value in image.items()}

    # bytes of the layer's input, and of all that is saved before and after the layer
    counter = SavedTensorCounter(probe.parameters())
    recorded_bytes: list[int] = []

    def record_input(_: nn.Module, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> None:
        tensors = (value for value in (*inputs, *keyword_inputs.values()) if isinstance(value, Tensor))
        recorded_bytes.extend([next(tensors).nbytes, counter.bytes])

    layers[0].register_forward_pre_hook(record_input, with_kwargs=True)
    layers[0].register_forward_hook(lambda *_: recorded_bytes.append(counter.bytes))
    with counter.counting():
        output = probe.base_model.get_image_features(**image, return_dict=True).pooler_output
    if len(recorded_bytes) != 3:
        problem = (
            f"the first layer of the vision encoder of {type(model).__name__} ran {len(recorded_bytes) // 3} times"
        )
        raise NotImplementedError(f"{problem} instead of once")
    features: Sequence[Tensor] = output if isinstance(output, list | tuple) else [output]
    # Qwen3-VL gives features of some of its layers to layers of the language model
    deepstack = len(getattr(probe.config.vision_config, "deepstack_visual_indexes", ()))

    layer_input, before, after = recorded_bytes
    feature_bytes = (1 + deepstack) * sum(feature.nbytes for feature in features)
    tokens = sum(feature.flatten(0, -2).shape[0] for feature in features)
    per_token = scale / tokens
    return VisionMemory(
        input_and_feature_bytes=image["pixel_values"].nbytes / tokens + per_token * feature_bytes,
        non_layer_bytes=per_token * (counter.bytes - after + before),
        bytes_per_layer=per_token * (after - before),
        layer_input_bytes=per_token * layer_input,
        num_layers=num_layers,
        trained=trained,
    )
