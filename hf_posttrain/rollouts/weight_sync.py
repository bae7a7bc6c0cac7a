"""A policy's weights as vLLM takes them: whole, and by the hub's names."""

from typing import Any

import torch
from torch import Tensor

from ..engines import sharded
from ..models.hub_weights import hub_weights, named_weights
from ..scoring import forward as scoring
from ..trainer.interface import TrainerInterface


def gather_weights_on_first_rank(trainer: TrainerInterface, dtype: str | None, change: Any = None) -> dict[str, Tensor]:
    """The policy's weights in the hub's format on CPU, in `dtype` (None: their own), on the first rank; others get
    none. Never more than one of them is whole on a GPU. All ranks call it. change: (name, weight) -> another.
    """
    first = trainer.is_world_process_zero()
    found = {}
    with torch.no_grad():
        for name, whole in sharded.each_whole(named_weights(trainer.model_wrapped)):
            if first:
                cast = whole.to(getattr(torch, dtype)) if dtype and whole.is_floating_point() else whole
                here = (change(name, cast) if change else cast).detach()
                copy = here.clone if here.device.type == "cpu" else here.cpu
                found[name] = copy(memory_format=torch.contiguous_format)
        return hub_weights(scoring.causal_lm(trainer.model_wrapped), found) if first else {}


def scramble_weight(name: str, weight: Tensor) -> Tensor:
    """Other values of the same size, so that a model with one such weight is another model."""
    return weight.roll(1, 0) + 0.05 if weight.dim() and weight.is_floating_point() else weight


def scramble_adapter_weight(name: str, weight: Tensor) -> Tensor:
    """Of a LoRA adapter the second matrices, which are 0 in a new one, far from that."""
    return weight.roll(1, 0) + 0.5 if "lora_B" in name else weight


def has_tied_head(config: Any) -> bool:
    """Does a model of this config have its embedding as head?"""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
