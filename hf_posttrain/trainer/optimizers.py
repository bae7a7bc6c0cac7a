"""Muon next to AdamW as one optimizer, and learning rates of some weights that differ from the others.

Trainer creates the optimizer from `get_optimizer_cls_and_kwargs`. A factory there gets the whole model.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import Trainer, TrainingArguments

from ..errors import InputError
from ..scoring import forward
from .interface import TrainerInterface
from .rules import MUON


class MuonAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for the other weights.

    Both share the groups and the state of this optimizer, which a scheduler and a checkpoint read.

    Args:
        muon: Optimizer of the hidden matrices.
        adamw: Optimizer of the other weights.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.algorithms: dict[str, Optimizer] = {"muon": muon, "adamw": adamw}
        groups = [group | {"algorithm": name} for name, part in self.algorithms.items() for group in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with both algorithms."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self.algorithms.items():
            # a scheduler and `load_state_dict` replace the groups and the state
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
        return loss


class MuonFactory:
    """Factory of `MuonAdamW`, which Trainer calls with the model."""

    def __call__(self, model: nn.Module, weight_decay: float, adamw: Mapping[str, Any]) -> MuonAdamW:
        """Return the optimizer of the trained weights of a model.

        Args:
            model: The policy.
            weight_decay: Weight decay, which biases and norms do not have.
            adamw: Other options of AdamW, with the learning rate, which Muon has as well.

        Raises:
            InputError: If no hidden matrix is trained.
        """
        decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
        matrices = hidden_matrices(model)
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        hidden = [weight for name, weight in trained.items() if name in matrices]
        others = {name: weight for name, weight in trained.items() if name not in matrices}
        if not hidden:
            raise InputError("optim: muon requires hidden matrices, and none is trained. Use adamw_torch")
        groups = [
            {"params": [weight for name, weight in others.items() if name in decayed], "weight_decay": weight_decay},
            {"params": [weight for name, weight in others.items() if name not in decayed], "weight_decay": 0.0},
        ]
        # the rate of AdamW fits: matrices are updated by steps of the same root mean square
        options = {"lr": adamw["lr"], "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        return MuonAdamW(Muon(hidden, **options), AdamW([g for g in groups if g["params"]] or groups, **adamw))


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices [n, m] that are neither embeddings nor the last layer of the model."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {id(weight) for module in embeddings for weight in module.parameters()}
    excluded |= {id(weight) for weight in forward.output_layer(model).parameters()}
    return {name for name, weight in model.named_parameters() if weight.ndim == 2 and id(weight) not in excluded}


class OptimizerMixin(TrainerInterface):
    """Adds `optim: muon` and `learning_rate_factors` to the optimizers of Trainer."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the class, or factory, of the optimizer and its arguments."""
        if args.optim != MUON:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        adamw = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        return MuonFactory, {"weight_decay": args.weight_decay, "adamw": adamw}

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer, with the learning rates of `learning_rate_factors`."""
        is_new = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(model)
        if is_new and self.args.learning_rate_factors:
            policy = self.model if model is None else model
            set_learning_rates(optimizer, policy.named_parameters(), self.args.learning_rate_factors)
        return optimizer


def set_learning_rates(
    optimizer: Optimizer, weights: Iterable[tuple[str, nn.Parameter]], factors: Mapping[str, float]
) -> None:
    """Split the groups of a new optimizer by the factor of their learning rates.

    Args:
        optimizer: Optimizer without state.
        weights: The weights of the model, by name.
        factors: Factors by regular expression. The first one that is found in the name of a weight applies.

    Raises:
        InputError: If an expression is found in no name of a trained weight, or not first.
    """
    names = {id(weight): name for name, weight in weights if weight.requires_grad}
    pattern_of = {
        key: next((pattern for pattern in factors if re.search(pattern, name)), None) for key, name in names.items()
    }
    if unused := [pattern for pattern in factors if pattern not in pattern_of.values()]:
        problem = f"learning_rate_factors: {unused[0]!r} matches no trained weight that no earlier key matches"
        raise InputError(f"{problem}. The weights are named like {next(iter(names.values()), 'none')}")

    groups = []
    for group in optimizer.param_groups:
        parts: dict[str | None, list[nn.Parameter]] = {}
        for weight in group["params"]:
            parts.setdefault(pattern_of.get(id(weight)), []).append(weight)
        for pattern, members in parts.items():
            factor = 1.0 if pattern is None else factors[pattern]
            groups.append(group | {"params": members, "lr": group["lr"] * factor})
    optimizer.param_groups = groups
