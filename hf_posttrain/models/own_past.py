"""The student as its own teacher: as it was when training started, or the moving average of its weights."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ..engines import engine, sharded
from ..errors import InputError
from ..scoring import forward
from . import score_cache
from .frozen import round_products
from .reference import COPY, adapter_reference
from .section import TeacherSection
from .teacher import Teacher


class Itself(Teacher):
    """The policy as its own teacher, with its adapter off or as it was: no second model.

    inside: from the policy to a context in which it is the teacher.
    """

    offload = False

    def __init__(self, trainer: Any, inside: Callable[[Any], Any], described: str):
        self.trainer, self.inside, self.accelerator = trainer, inside, trainer.accelerator
        self.described = described
        self.sharded, self.contexts = engine.shards(trainer.accelerator), ExitStack()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The policy."""
        return self.trainer.model_wrapped

    def __enter__(self) -> nn.Module:
        self.contexts.enter_context(forward.eval_mode(self.model))
        self.contexts.enter_context(self.inside(forward.unwrapped(self.model)))
        return self.model

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()

    @property
    def leaves(self) -> bool:
        """An adapter on the head is on again behind the forward."""
        head = forward.causal_lm(self.model).get_output_embeddings()
        return self.sharded or hasattr(head, "base_layer") or hasattr(head, "modules_to_save")

    def key(self) -> Any:
        with self.inside(forward.unwrapped(self.model)):  # what is off does not count
            off = self.inside is peft.PeftModel.disable_adapter
            return score_cache.model_key(self.model, with_adapter=not off)

    def release(self) -> None:
        """It is where the policy is."""


class MovingAverage(TrainerCallback):
    """Weights of a teacher that follow those of the policy: w <- decay w + (1 - decay) policy, after each step.

    pairs: gives the tensors of both, the teacher's and the policy's, by name. They are saved with a checkpoint.
    """

    FILE = "teacher_average.safetensors"

    def __init__(self, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float, writes: bool):
        self.pairs, self.decay, self.writes = pairs, decay, writes

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow."""
        for average, now in self.pairs().values():
            average.lerp_(now.to(average), 1 - self.decay)

    @torch.no_grad()
    def begin_run(self, folder: str | None) -> None:
        """Begin as the policy, or as the checkpoint in `folder` has it. Raises InputError where it has none."""
        if folder is None:
            for average, now in self.pairs().values():
                average.copy_(now)
            return
        file = Path(folder, self.FILE)
        if not file.exists():
            raise InputError(f"{folder} has no {self.FILE}: it was written by a run without teacher.self: ema")
        saved = load_file(file)
        for name, (average, _) in self.pairs().items():
            average.copy_(saved[name])

    def give_up(self, steps: int) -> None:
        """Nothing of it is elsewhere."""

    def save(self, folder: str) -> None:
        """Into a checkpoint. All ranks call it."""
        if not self.writes:
            return
        averages = {name: average.detach().cpu().contiguous() for name, (average, _) in self.pairs().items()}
        save_file(averages, Path(folder, self.FILE))


def own_past(trainer: Any, section: TeacherSection) -> Teacher:
    """The teacher that a section with `self` asks for. Raises InputError for what cannot be had."""
    policy, accelerator, follows = trainer.model, trainer.accelerator, section.self == "ema"
    if follows and engine.changes_weights(accelerator):
        raise InputError("teacher.self: ema: its weights are kept whole: use one GPU or DDP, or self: start")
    inside, described = None, f"self: {section.self}" + f" {section.ema:g}" * follows
    if isinstance(policy, peft.PeftModel):  # a moving average needs a copy of the adapter
        inside = adapter_reference(policy, trainer.new_adapter and not follows)
    # before training its engine has yet to cut or cast the policy, which cannot score for itself then
    if engine.changes_weights(accelerator) and trainer.args.precompute_teacher_top_k is not None:
        inside = None
    if inside is not None:
        if follows:
            _follow(trainer, partial(_adapter_pairs, policy, inside), section.ema)
        return Itself(trainer, inside, described)
    whole = sharded.copied(policy, accelerator)
    teacher = Teacher(whole if follows else round_products(whole, accelerator), accelerator, section.offload)
    teacher.described = described
    if follows:
        _follow(trainer, lambda: _weight_pairs(teacher.model, policy), section.ema)
    return teacher


def check_average(dtypes: Iterable[torch.dtype]) -> None:
    """Raises InputError where one of these, of weights that are trained, is too coarse for a moving average."""
    if low := {str(dtype) for dtype in dtypes} - {"torch.float32", "torch.float64"}:
        problem = f"an average of {low.pop()} weights does not move: set model.dtype: float32"
        raise InputError(f"teacher.self: ema: {problem}")


def _follow(trainer: Any, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float) -> None:
    check_average(average.dtype for average, _ in pairs().values())
    average = MovingAverage(pairs, decay, trainer.args.should_save)
    trainer.add_callback(average)
    trainer.kept_in_checkpoints.append(average)


def _weight_pairs(teacher: nn.Module, policy: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrapped(policy).named_parameters())
    trained = {name for name, weight in mine.items() if weight.requires_grad}
    return {name: (weight, mine[name]) for name, weight in teacher.named_parameters() if name in trained}


def _adapter_pairs(policy: nn.Module, copied: Any) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrapped(policy).named_parameters())
    of_copy = {name.replace(f".{COPY}", f".{copied.trained}"): weight for name, weight in mine.items()
               if f".{COPY}" in name}  # fmt: skip
    return {name: (weight, mine[name]) for name, weight in of_copy.items() if name in mine}
