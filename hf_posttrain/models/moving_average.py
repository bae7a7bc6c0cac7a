"""Moving average of the policy's weights in a frozen copy: an EMA teacher, or a synchronized reference."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import InputError
from ..scoring import forward

WeightPairs = Callable[[], Mapping[str, tuple[Tensor, Tensor]]]
"""Function that returns the averaged weight and the weight of the policy, by name."""


class MovingAverage(TrainerCallback):
    """Moving average of the weights of the policy, w <- decay w + (1 - decay) policy.

    Checkpoints store the averages.

    Args:
        pairs: The weights.
        decay: Decay of the average.
        interval: Number of optimizer steps between two updates.
    """

    required = True

    def __init__(self, pairs: WeightPairs, decay: float, interval: int = 1) -> None:
        self.pairs = pairs
        self.decay = decay
        self.interval = interval

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Update the averages."""
        if state.global_step % self.interval == 0:
            for average, weight in self.pairs().values():
                average.lerp_(weight.to(average), 1 - self.decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the weights of the policy."""
        for average, weight in self.pairs().values():
            average.copy_(weight)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average of each weight."""
        return {name: average.detach() for name, (average, _) in self.pairs().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the averages of a checkpoint."""
        for name, (average, _) in self.pairs().items():
            average.copy_(state[name])


def build_average(option: str, pairs: WeightPairs, decay: float, interval: int = 1) -> MovingAverage:
    """Return the moving average of pairs of weights.

    Raises:
        InputError: If the dtype of a weight is too coarse. The message begins with `option`.
    """
    check_average(option, (average.dtype for average, _ in pairs().values()))
    return MovingAverage(pairs, decay, interval)


def check_average(option: str, dtypes: Iterable[torch.dtype]) -> None:
    """Raise InputError if one of the dtypes of trained weights is too coarse for a moving average."""
    if low_precision := {str(dtype) for dtype in dtypes} - {"torch.float32", "torch.float64"}:
        problem = f"an average of {low_precision.pop()} weights does not move"
        raise InputError(f"{option}: {problem}. Set model.dtype: float32")


def model_pairs(model: nn.Module, policy: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the weights of a frozen model and of the policy by name, for all weights that are trained."""
    policy_weights = dict(forward.unwrap_model(policy).named_parameters())
    trained = {name for name, weight in policy_weights.items() if weight.requires_grad}
    return {name: (weight, policy_weights[name]) for name, weight in model.named_parameters() if name in trained}


def adapter_pairs(policy: nn.Module, frozen_adapter: str, trained_adapter: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the weights of a frozen copy of the adapter and of the trained adapter, by name."""
    weights = dict(forward.unwrap_model(policy).named_parameters())
    copied = {
        name.replace(f".{frozen_adapter}", f".{trained_adapter}"): weight
        for name, weight in weights.items()
        if f".{frozen_adapter}" in name
    }
    return {name: (weight, weights[name]) for name, weight in copied.items() if name in weights}
