"""Images of a micro-batch: inputs of the vision encoder, positions, and the attention among the tokens of an image.

An image is encoded once for all answers to its prompt, because in the shared layout it occurs in the row once. Its
features replace the embeddings of its tokens, in the order of the row, which is the only order on which all models
agree.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batching.micro_batch import Batch
from ..data.images import ImageReader
from ..errors import InputError


@dataclass
class VisionInputs:
    """Builder of the image inputs of a vision-language model.

    `add_blank` gives a batch without images a blank image, to which no token attends. An engine that shards the vision
    encoder gathers it on all ranks, and an engine that averages gradients waits for the gradients of an encoder that is
    trained.
    """

    reader: ImageReader
    rope_model: Any = None  # a model of its class without weights, whose method computes positions, or None
    add_blank: bool = False
    bidirectional: bool = False  # in some layers all tokens of an image attend to each other, later ones included

    @classmethod
    def from_model(cls, model: PreTrainedModel, reader: ImageReader, add_blank: bool = False) -> "VisionInputs":
        """Build the inputs for a vision-language model.

        Raises:
            InputError: If the model cannot be trained with images.
        """
        inner = model.base_model
        if model.config.model_type == "paligemma":
            raise InputError(
                "images are not supported for PaliGemma, because all tokens of its prompts attend to each other. "
                "Set images: false"
            )

        rope_model = None
        if hasattr(inner, "get_rope_index"):
            rope_model = object.__new__(type(inner))  # without weights, because data loader workers copy it
            nn.Module.__init__(rope_model)
            rope_model.config = inner.config
        return cls(reader, rope_model, add_blank, bool(bidirectional_image_layers(model)))

    def positions(self, ids: Sequence[int], images: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the three positions of each token of a text, [tokens, 3].

        Raises:
            InputError: If the images have other numbers of features than the text has places for them. In that case a
                file has changed since its row was prepared.
        """
        tokens = torch.tensor([ids])
        token_types = torch.isin(tokens, torch.tensor(self.reader.token_ids)).int()
        if sum(self.reader.feature_counts(images)) != int(token_types.sum()):
            names = ", ".join(sorted({str(image["path"] or "bytes") for image in images}))[:200]
            raise InputError(f"images have changed since their rows were prepared ({names}). Prepare the rows again")

        if self.rope_model is None:
            return np.repeat(np.arange(len(ids))[:, None], 3, axis=1)
        grids = torch.tensor([self.reader.patch_grid(image) for image in images])
        positions, _ = self.rope_model.get_rope_index(tokens, mm_token_type_ids=token_types, image_grid_thw=grids)
        return positions[:, 0].T.numpy()

    def add_to(self, batch: Batch, images: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch with the inputs of the vision encoder. The images are in the order of the batch's rows."""
        if not images:
            batch = batch.replace(rope_positions=None)
            if not self.add_blank:
                return batch
            return batch.replace(vision_inputs=self.reader.blank_tensors, blank_image=True)

        numbers = None
        if self.bidirectional:
            is_image = torch.isin(batch.input_ids, torch.tensor(self.reader.token_ids))
            begins = is_image & ~is_image.roll(1, -1)
            begins[:, 0] = is_image[:, 0]
            numbers = begins.cumsum(-1) * is_image

        positions = None if self.rope_model is None else batch.rope_positions
        tensors = self.reader.tensors(images)
        return batch.replace(vision_inputs=tensors, image_numbers=numbers, rope_positions=positions)

    def prompt_arguments(self, images: Sequence[Mapping[str, Any]], ids: Tensor, model: nn.Module) -> dict[str, Tensor]:
        """Return the image arguments of transformers' `generate` for prompts [n, L], on the device of the prompts."""
        token_types = torch.isin(ids, torch.tensor(self.reader.token_ids, device=ids.device)).long()
        tensors = {name: value.to(ids.device) for name, value in self.reader.tensors(images).items()}
        return tensors | dict.fromkeys(token_type_arguments(model), token_types)


def bidirectional_image_layers(model: PreTrainedModel) -> str:
    """Return in which layers the tokens of an image attend to later tokens of the same image.

    Returns:
        "all" for Gemma 3, "sliding" for the larger Gemma 4, where these are the layers with a window, and "" if no such
        layers are known. The parity check of the first batch includes an image.
    """
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return "sliding"
    return "all" if model.config.model_type == "gemma3" else ""


def token_type_arguments(model: nn.Module) -> list[str]:
    """Return the arguments of a model's forward that mark the tokens of images (1) and of text (0)."""
    parameters = inspect.signature(type(model).forward).parameters
    return [name for name in ("mm_token_type_ids", "token_type_ids") if name in parameters]


def zero_with_grad(features: Mapping[str, Any]) -> Tensor | int:
    """Return 0, connected to the graph of image features.

    A blank image adds this value to the hidden states, so that the vision encoder has gradients of 0.
    """
    outputs = [*features.values()]
    tensors = [tensor for output in outputs for tensor in (output if isinstance(output, list | tuple) else [output])]
    return sum(tensor.sum() * 0 for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad)
