"""The student as its own teacher, with its weights at the start of training or with a moving average of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import peft
from torch import nn

from ..capabilities import Feature, conflict_message
from ..engines import engine, sharded
from ..errors import InputError
from ..models import score_cache
from ..models.config import TeacherSection
from ..models.frozen import FrozenModel, precast_linear_weights
from ..models.moving_average import adapter_pairs, build_average, model_pairs
from ..models.reference import REFERENCE_ADAPTER, FrozenAdapterReference, adapter_reference
from ..scoring import forward
from ..trainer.interface import TrainerInterface
from .local import LocalTeacher

if TYPE_CHECKING:
    from ..trainer.base import PostTrainer


OPTION = "teacher.self: ema"
"""Option of a moving average, in messages."""


class SelfTeacher(LocalTeacher):
    """The policy as its own teacher without a second model, with its adapter disabled or replaced by a frozen copy.

    Args:
        trainer: The trainer of the policy.
        teacher_context: Function of the policy that returns a context in which the policy is the teacher.
        description: Description in checkpoints.
    """

    offload = False

    def __init__(
        self,
        trainer: TrainerInterface,
        teacher_context: Callable[..., AbstractContextManager[object]],
        description: str,
    ) -> None:
        self.trainer = trainer
        self.teacher_context = teacher_context
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
        """An empty list, because the trainer holds the policy."""
        return []

    def __enter__(self) -> nn.Module:
        self.contexts.enter_context(forward.eval_mode(self.model))
        self.contexts.enter_context(self.teacher_context(forward.unwrap_model(self.model)))
        return self.model

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()

    @property
    def needs_head_copy(self) -> bool:
        """Whether the head changes after a forward pass, because an adapter on it is active again."""
        head = forward.causal_lm(self.model).get_output_embeddings()
        return self.sharded or hasattr(head, "base_layer") or hasattr(head, "modules_to_save")

    def key(self) -> object:
        """Return a hash of the model, without a disabled adapter."""
        with self.teacher_context(forward.unwrap_model(self.model)):
            is_disabled = self.teacher_context is peft.PeftModel.disable_adapter
            return score_cache.model_key(self.model, with_adapter=not is_disabled)

    def release(self) -> None:
        """Do nothing, because the policy has the weights."""


def build_self_teacher(trainer: "PostTrainer", section: TeacherSection, name: str) -> LocalTeacher:
    """Return the teacher of a section with `self`. Its `average` is the callback that updates a moving average.

    Raises:
        InputError: The weights of a moving average are sharded or are not float32.
    """
    policy = trainer.model
    accelerator = trainer.accelerator
    is_average = section.self == "ema"
    if is_average and engine.changes_weights(accelerator):
        raise InputError(conflict_message(Feature.MOVING_AVERAGE, Feature.SHARDED))
    teacher_context = None
    description = f"self: {section.self}" + f" {section.ema:g}" * is_average
    if isinstance(policy, peft.PeftModel):  # a moving average requires a copy of the adapter
        teacher_context = adapter_reference(policy, trainer.new_adapter and not is_average)
    # Before training, the engine has not yet sharded or cast the policy, which therefore cannot score.
    if engine.changes_weights(accelerator) and trainer.args.teacher.precompute:
        teacher_context = None
    if teacher_context is not None:
        self_teacher = SelfTeacher(trainer, teacher_context, description)
        if is_average:
            assert isinstance(teacher_context, FrozenAdapterReference)
            adapters = REFERENCE_ADAPTER, teacher_context.trained_adapter
            self_teacher.average = build_average(OPTION, partial(adapter_pairs, policy, *adapters), section.ema)
        return self_teacher

    model = sharded.copy_model(policy, accelerator)
    if not is_average:
        model = precast_linear_weights(model, accelerator)
    teacher = LocalTeacher(model, accelerator, section.offload)
    teacher.description = description
    if is_average:
        teacher.average = build_average(OPTION, partial(model_pairs, teacher.model, policy), section.ema)
    return teacher
