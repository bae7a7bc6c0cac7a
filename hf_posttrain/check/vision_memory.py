"""Bytes that images need: activations of a vision encoder, and its features.

Vision encoders compute with values (the number of patches of an image, the tiles that are padding), so they cannot run
on shapes alone. One layer of an encoder runs here on one small image. Its other layers are alike, and bytes grow with
the number of features.
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
    """Bytes of a vision encoder for each token of image features."""

    inputs: float  # pixels, and the features that the language model gets
    outside: float  # saved before and after the layers
    layer: float  # saved in a layer
    hidden: float  # the input of a layer
    layers: int
    trained: bool

    def saved(self, every: int) -> float:
        """Return the bytes that a forward saves for its backward. every: as in `Shapes.training`."""
        recomputed = len(range(0, self.layers, every)) if every else 0
        saved = self.outside + self.layer * (self.layers - recomputed) + self.hidden * recomputed
        return saved if self.trained else 0.0


def vision_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model's vision encoder."""
    lists = (
        part
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and is_vision_parameter(model, name)
    )
    return max(lists, key=len)


def measure_vision_memory(model: PreTrainedModel, reader: ImageReader, dtype: torch.dtype | None) -> VisionMemory:
    """Return the bytes of the vision encoder of a causal LM on the meta device.

    Args:
        model: The causal LM. The encoder counts as trained if its parameters require gradients.
        reader: Reader of images for this model.
        dtype: Dtype in which the encoder computes; None for that of its weights.
    """
    weights = vision_weights(model)
    trained = any(weight.requires_grad for weight in weights)
    scale = (dtype or weights[0].dtype).itemsize / 4

    # a copy with one layer and weights of zero, in float32
    copied: Any = copy.deepcopy(model).float().requires_grad_(True)
    layers = vision_layers(copied)
    count = len(layers)
    del layers[1:]
    for name, part in copied.named_modules():
        # a module may have weights of the encoder itself, and contain the language model
        if is_vision_parameter(copied, f"{name}.any"):
            part.to_empty(device="cpu", recurse=False)
            for values in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                values.detach().zero_()
    image = reader.blank_tensors
    if image["pixel_values"].dim() == 5:  # tiles: [images, tiles, channels, height, width]
        image = {name: value[:, :1] for name, value in image.items()}

    # bytes of the layer's input, and of all that is saved before and after the layer
    counter = SavedTensorCounter(copied.parameters())
    marks = []
    layers[0].register_forward_pre_hook(lambda _, inputs: marks.extend([inputs[0].nbytes, counter.bytes]))
    layers[0].register_forward_hook(lambda *_: marks.append(counter.bytes))
    with counter.counting():
        output = copied.base_model.get_image_features(**image, return_dict=True).pooler_output
    features: Sequence[Tensor] = output if isinstance(output, list | tuple) else [output]
    # Qwen3-VL gives features of some of its layers to layers of the language model
    deepstack = len(getattr(copied.config.vision_config, "deepstack_visual_indexes", ()))

    hidden, before, after = marks
    feature_bytes = (1 + deepstack) * sum(feature.nbytes for feature in features)
    tokens = sum(feature.flatten(0, -2).shape[0] for feature in features)
    per_token = scale / tokens
    return VisionMemory(
        inputs=image["pixel_values"].nbytes / tokens + per_token * feature_bytes,
        outside=per_token * (counter.bytes - after + before),
        layer=per_token * (after - before),
        hidden=per_token * hidden,
        layers=count,
        trained=trained,
    )
