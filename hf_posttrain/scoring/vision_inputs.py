"""What pictures add to a micro-batch: the tensors that the model's tower reads, positions, and who sees whom in them.

A picture is read once for all answers to its prompt: in the shared layout it stands in the row once. Its features take
the place of tokens of their own, in the order of the row, which is the one order that all models agree on.
"""

import inspect
from collections.abc import Sequence
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
    """How a model takes pictures. rope: an empty model of its class, whose method says positions, or None. always: a
    batch without pictures has a blank one, of which nothing is seen: an engine that cuts the tower gathers it on all
    ranks, and one that averages gradients waits for those of a tower that is trained.
    """

    reader: ImageReader
    rope: Any = None
    always: bool = False
    whole: bool = False  # do the tokens of a picture see each other, those behind them too, in some layers?

    @classmethod
    def of(cls, model: PreTrainedModel, reader: ImageReader, always: bool = False) -> "VisionInputs":
        """Of a causal LM with a tower. Raises InputError for one that cannot be trained with pictures."""
        inner = model.base_model
        empty = None
        if model.config.model_type == "paligemma":
            raise InputError("images: PaliGemma lets all tokens of a prompt see each other, which no layout does here")
        if hasattr(inner, "get_rope_index"):
            empty = object.__new__(type(inner))  # without weights: a worker of the data loader has a copy
            nn.Module.__init__(empty)
            empty.config = inner.config
        return cls(reader, empty, always, bool(sees_whole_pictures(model)))

    def positions(self, ids: Sequence[int], pictures: Sequence[Any]) -> np.ndarray:
        """Three positions of each token of a text, [tokens, 3]. Raises InputError where its pictures bring other
        numbers of features than it has places for: a file has changed since its row was prepared.
        """
        tokens = torch.tensor([ids])
        kinds = torch.isin(tokens, torch.tensor(self.reader.token_ids)).int()
        if sum(self.reader.counts(pictures)) != int(kinds.sum()):
            names = ", ".join(sorted({str(picture["path"] or "bytes") for picture in pictures}))[:200]
            raise InputError(f"pictures have changed since their rows were prepared ({names}): prepare them again")
        if self.rope is None:
            return np.repeat(np.arange(len(ids))[:, None], 3, axis=1)
        grids = torch.tensor([self.reader.grid(picture) for picture in pictures])
        found, _ = self.rope.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
        return found[:, 0].T.numpy()

    def add_to(self, batch: Batch, pictures: Sequence[Any]) -> Batch:
        """Return the batch with the inputs of the vision encoder. pictures: in the order of the batch's rows."""
        if not pictures:
            batch = batch.replace(rope_positions=None)
            return batch.replace(visual=self.reader.blank, blind=True) if self.always else batch
        numbers = None
        if self.whole:
            places = torch.isin(batch.input_ids, torch.tensor(self.reader.token_ids))
            begins = places & ~places.roll(1, -1)
            begins[:, 0] = places[:, 0]
            numbers = begins.cumsum(-1) * places
        positions = None if self.rope is None else batch.rope_positions
        return batch.replace(visual=self.reader.tensors(pictures), picture=numbers, rope_positions=positions)

    def of_prompts(self, pictures: Sequence[Any], ids: Tensor, model: nn.Module) -> dict[str, Tensor]:
        """What transformers' generate takes of the pictures of prompts [n, L], on their device."""
        kinds = torch.isin(ids, torch.tensor(self.reader.token_ids, device=ids.device)).long()
        tensors = {name: value.to(ids.device) for name, value in self.reader.tensors(pictures).items()}
        return tensors | dict.fromkeys(names_of_kinds(model), kinds)


def sees_whole_pictures(model: PreTrainedModel) -> str:
    """In which layers of a causal LM with a tower do the tokens of a picture see those behind them? "all": Gemma 3;
    "sliding": the larger Gemma 4, where a layer has a window; "": in none that is known (the check of the first batch
    shows it a picture).
    """
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return "sliding"
    return "all" if model.config.model_type == "gemma3" else ""


def names_of_kinds(model: nn.Module) -> list[str]:
    """The arguments in which a model's forward is told which tokens are of pictures (1) and which of text (0)."""
    taken = inspect.signature(type(model).forward).parameters
    return [name for name in ("mm_token_type_ids", "token_type_ids") if name in taken]


def nothing_of(features: Any) -> Any:
    """0 with the graph of a tower's features: what a blank picture adds, so that the tower has gradients of 0."""
    parts = [*features.values()]
    tensors = [part for each in parts for part in (each if isinstance(each, list | tuple) else [each])]
    return sum(part.sum() * 0 for part in tensors if isinstance(part, Tensor) and part.requires_grad)
