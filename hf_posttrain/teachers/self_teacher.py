"""The student as its own teacher: as it was when training started, or the moving average of its weights."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..capabilities import Feature, conflict_message
from ..engines import engine, sharded
from ..errors import InputError
from ..models import score_cache
from ..models.config import TeacherSection
from ..models.frozen import FrozenModel, precast_linear_weights
from ..models.reference import REFERENCE_ADAPTER, adapter_reference
from ..scoring import forward
from ..trainer.interface import TrainerInterface
from .local import LocalTeacher


class SelfTeacher(LocalTeacher):
    """The policy as its own teacher, with its adapter disabled or as it was: no second model.

    inside: returns a context in which the policy is the teacher.
    """

    offload = False

    def __init__(self, trainer: TrainerInterface, inside: Callable[[Any], Any], description: str):
        self.trainer = trainer
        self.inside = inside
        self.accelerator = trainer.accelerator
        self.description = description
        self.sharded = engine.shards_weights(trainer.accelerator)
        self.contexts = ExitStack()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The policy."""
        return self.trainer.model_wrapped

    @property
    def models(self) -> list[FrozenModel]:
        """None: the trainer has the policy."""
        return []

    def __enter__(self) -> nn.Module:
        self.contexts.enter_context(forward.eval_mode(self.model))
        self.contexts.enter_context(self.inside(forward.unwrap_model(self.model)))
        return self.model

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()

    @property
    def head_leaves(self) -> bool:
        """Whether the head is another one after a forward: an adapter on it is active again."""
        head = forward.causal_lm(self.model).get_output_embeddings()
        return self.sharded or hasattr(head, "base_layer") or hasattr(head, "modules_to_save")

    def key(self) -> Any:
        with self.inside(forward.unwrap_model(self.model)):  # what is off does not count
            off = self.inside is peft.PeftModel.disable_adapter
            return score_cache.model_key(self.model, with_adapter=not off)

    def release(self) -> None:
        """It is where the policy is."""


class MovingAverage(TrainerCallback):
    """Weights of a teacher that follow those of the policy: w <- decay w + (1 - decay) policy, after each step.

    pairs: returns the tensors of both, the teacher's and the policy's, by name. A checkpoint stores the averages.
    """

    required = True

    def __init__(self, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float):
        self.pairs = pairs
        self.decay = decay

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Follow."""
        for average, now in self.pairs().values():
            average.lerp_(now.to(average), 1 - self.decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Start as the policy."""
        for average, now in self.pairs().values():
            average.copy_(now)

    def state_dict(self) -> dict[str, Any]:
        """Return the average of each weight."""
        return {name: average.detach() for name, (average, _) in self.pairs().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the averages of a checkpoint."""
        for name, (average, _) in self.pairs().items():
            average.copy_(state[name])


def build_self_teacher(trainer: Any, section: TeacherSection, name: str) -> LocalTeacher:
    """Return the teacher of a section with `self`. Its `average` is the moving average that training must update.

    Raises InputError for a moving average of sharded weights.
    """
    policy = trainer.model
    accelerator = trainer.accelerator
    follows = section.self == "ema"
    if follows and engine.changes_weights(accelerator):
        raise InputError(conflict_message(Feature.MOVING_AVERAGE, Feature.SHARDED))
    inside = None
    description = f"self: {section.self}" + f" {section.ema:g}" * follows
    if isinstance(policy, peft.PeftModel):  # a moving average needs a copy of the adapter
        inside = adapter_reference(policy, trainer.new_adapter and not follows)
    # before training its engine has yet to cut or cast the policy, which cannot score for itself then
    if engine.changes_weights(accelerator) and trainer.args.teacher.precompute:
        inside = None
    if inside is not None:
        with_adapter = SelfTeacher(trainer, inside, description)
        if follows:
            with_adapter.average = _build_average(trainer, partial(_adapter_pairs, policy, inside), section.ema)
        return with_adapter
    whole = sharded.copy_model(policy, accelerator)
    teacher = LocalTeacher(whole if follows else precast_linear_weights(whole, accelerator), accelerator, section.offload)
    teacher.description = description
    if follows:
        teacher.average = _build_average(trainer, lambda: _weight_pairs(teacher.model, policy), section.ema)
    return teacher


def check_average(dtypes: Iterable[torch.dtype]) -> None:
    """Raises InputError where one of these, of weights that are trained, is too coarse for a moving average."""
    if low := {str(dtype) for dtype in dtypes} - {"torch.float32", "torch.float64"}:
        problem = f"an average of {low.pop()} weights does not move: set model.dtype: float32"
        raise InputError(f"teacher.self: ema: {problem}")


def _build_average(
    trainer: TrainerInterface, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float
) -> MovingAverage:
    check_average(average.dtype for average, _ in pairs().values())
    return MovingAverage(pairs, decay)


def _weight_pairs(teacher: nn.Module, policy: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrap_model(policy).named_parameters())
    trained = {name for name, weight in mine.items() if weight.requires_grad}
    return {name: (weight, mine[name]) for name, weight in teacher.named_parameters() if name in trained}


def _adapter_pairs(policy: nn.Module, copied: Any) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrap_model(policy).named_parameters())
    of_copy = {
        name.replace(f".{REFERENCE_ADAPTER}", f".{copied.trained}"): weight for name, weight in mine.items() if f".{REFERENCE_ADAPTER}" in name
    }
    return {name: (weight, mine[name]) for name, weight in of_copy.items() if name in mine}
