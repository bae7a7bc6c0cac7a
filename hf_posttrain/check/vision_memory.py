"""Bytes that pictures take: what a vision tower keeps of them, and their features.

Towers compute with values (how many patches a picture has, which tiles are padding), so they do not run on shapes
alone. One of a tower's layers does run here, on one small picture: its other layers are like it, and bytes grow with
the number of features.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.images import ImageReader
from ..scoring.forward import is_vision_parameter, vision_weights
from .saved_tensors import SavedTensorCounter


@dataclass(frozen=True)
class VisionMemory:
    """Bytes of a tower for each token of features that pictures become."""

    given: float  # pixels, and the features that the language model is given
    outside: float  # kept before its layers and behind them
    layer: float  # kept in a layer
    hidden: float  # the input of a layer
    layers: int
    trained: bool

    def kept(self, every: int) -> float:
        """What a forward keeps for its backward; every: as in `Shapes.training`."""
        again = len(range(0, self.layers, every)) if every else 0
        kept = self.outside + self.layer * (self.layers - again) + self.hidden * again
        return kept if self.trained else 0.0


def vision_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a model's tower."""
    lists = (
        part
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and is_vision_parameter(model, name)
    )
    return max(lists, key=len)


def measure_vision_memory(model: Any, reader: ImageReader, dtype: torch.dtype | None) -> VisionMemory:
    """The tower of a causal LM on the meta device, trained or not as its parameters are. dtype: it computes in that,
    None: in its own.
    """
    vision = vision_weights(model)
    trained = any(weight.requires_grad for weight in vision)
    size = (dtype or vision[0].dtype).itemsize / 4
    # a copy with one layer and weights of zero, in float32
    model = copy.deepcopy(model).float().requires_grad_(True)
    layers = vision_layers(model)
    count = len(layers)
    del layers[1:]
    for name, part in model.named_modules():
        if is_vision_parameter(
            model, f"{name}.any"
        ):  # it may have weights of the tower of its own, and the language model in it
            part.to_empty(device="cpu", recurse=False)
            for values in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                values.detach().zero_()
    picture = reader.blank_tensors
    if picture["pixel_values"].dim() == 5:  # it is tiles: [pictures, tiles, channels, height, width]
        picture = {name: value[:, :1] for name, value in picture.items()}

    # bytes of the layer's input, and what is kept as it begins and ends
    kept = SavedTensorCounter(model.parameters())
    marks = []
    layers[0].register_forward_pre_hook(lambda _, given: marks.extend([given[0].nbytes, kept.bytes]))
    layers[0].register_forward_hook(lambda *_: marks.append(kept.bytes))
    with kept.counting():
        found = model.base_model.get_image_features(**picture, return_dict=True).pooler_output
    made: Sequence[Tensor] = found if isinstance(found, list | tuple) else [found]
    # Qwen3-VL gives features of some of its layers to layers of the language model
    deep = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    hidden, begun, ended = marks
    features = (1 + deep) * sum(one.nbytes for one in made)
    rows = sum(one.flatten(0, -2).shape[0] for one in made)
    each = size / rows
    return VisionMemory(
        given=picture["pixel_values"].nbytes / rows + each * features,
        outside=each * (kept.bytes - ended + begun),
        layer=each * (ended - begun),
        hidden=each * hidden,
        layers=count,
        trained=trained,
    )
