"""Weights of the policy in the format that vLLM loads: unsharded, and under the names of the Hub."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..engines import sharded
from ..models.hub_weights import hub_weights, named_weights
from ..scoring import forward as scoring
from ..trainer.interface import TrainerInterface

WeightTransform: TypeAlias = Callable[[str, Tensor], Tensor]
"""Function of the name and the value of a weight that returns the value to send in its place."""


def gather_weights_on_first_rank(
    trainer: TrainerInterface, dtype: str | None, transform: WeightTransform | None = None
) -> dict[str, Tensor]:
    """Return the policy's weights in the format of the Hub, on the CPU of the first rank. All ranks call it.

    Never more than one of them is whole on a GPU.

    Args:
        trainer: Trainer of the policy.
        dtype: Name of the dtype to cast to; None keeps the dtype of each weight.
        transform: Change of each weight, if any.

    Returns:
        Weights by name; empty on all ranks but the first.
    """
    first = trainer.is_world_process_zero()
    gathered = {}
    with torch.no_grad():
        for name, weight in sharded.iter_gathered(named_weights(trainer.model_wrapped)):
            if first:
                cast = weight.to(getattr(torch, dtype)) if dtype and weight.is_floating_point() else weight
                sent = (transform(name, cast) if transform else cast).detach()
                copy = sent.clone if sent.device.type == "cpu" else sent.cpu
                gathered[name] = copy(memory_format=torch.contiguous_format)
        return hub_weights(scoring.causal_lm(trainer.model_wrapped), gathered) if first else {}


def scramble_weight(name: str, weight: Tensor) -> Tensor:
    """Return other values of the same magnitude, so that a model with one such weight is another model."""
    return weight.roll(1, 0) + 0.05 if weight.dim() and weight.is_floating_point() else weight


def scramble_adapter_weight(name: str, weight: Tensor) -> Tensor:
    """Return values far from 0 for the second matrices of a LoRA adapter, which are 0 in a new adapter."""
    return weight.roll(1, 0) + 0.5 if "lora_B" in name else weight


def has_tied_head(config: PretrainedConfig) -> bool:
    """Return whether a model of this config shares its head with its embedding."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
