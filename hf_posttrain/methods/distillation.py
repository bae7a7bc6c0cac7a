"""Options and the teacher that KD and OPD share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import InputError
from ..options import option
from ..scoring.head import TileFunction
from ..scoring.teacher_tiles import TeacherLogits
from ..teachers.cross_tokenizer import alignment_metrics
from ..teachers.factory import build_teacher
from ..teachers.inputs import DistillationBatch, DistillationCollator
from ..teachers.options import TeacherOptions
from ..teachers.router import TeacherRouter
from ..teachers.signal import Chunked, Dense, Request, Teacher, TeacherSignal
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .check_teacher import check_teacher
from .objective import Objective, Scores


@dataclass
class DistillationConfig(PostTrainConfig):
    """Options of methods with a teacher."""

    of_python: ClassVar = (
        *PostTrainConfig.of_python,
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "teacher_model_init_kwargs",
    )
    """Fields that are no keys of a recipe."""
    merges_eos: ClassVar[bool] = False
    """Default of the option `merge_eos` of `teacher`."""
    teacher: TeacherOptions | str | dict[str, Any] | None = option(
        None,
        "How student and teacher are compared, and what the teacher reads: {top_k, top_k_remainder, precompute, "
        "merge_eos, prompt, tokenizer, names}.",
    )
    teacher_model_name_or_path: str | None = option(
        None,
        "Name or folder of the teacher for a trainer without `teacher_model`. A recipe has it in its teacher section.",
    )
    teacher_model_revision: str | None = option(
        None, "Revision of the teacher on the hub: only main; download any other, and give that folder."
    )
    teacher_model_init_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of `from_pretrained` for a teacher that is given by name. A recipe has them in its teacher section.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_model_revision not in (None, "main"):
            problem = f"teacher_model_revision={self.teacher_model_revision!r} cannot be loaded by name"
            raise InputError(f"{problem}: download that revision, and give its folder as teacher")

    def _validate(self) -> None:
        super()._validate()
        options: Any = self.teacher
        if options.merge_eos is None:
            self.teacher = replace(options, merge_eos=self.merges_eos)


class Observer(TeacherLogits, Protocol):
    """Measures student and teacher in the tiles of a loss, which reads the teacher's logits from it."""

    def observe(self, tile: TileFunction) -> TileFunction:
        """Return the tile function of the loss with more stats."""
        ...


class DistillationTrainer(PostTrainer):
    """A trainer with a teacher; further arguments: `teacher_model` (a model, its name, a TeacherSection, or a dict of
    them by the names of `args.teacher.names`), and `teacher_offload`, which keeps it on CPU between uses.

    A method defines `build_objective`; `distill` scores a batch with it.
    """

    collator_class = DistillationCollator
    teacher: Teacher | None
    cached_at: float | None = None
    """Temperature of the scores that the rows have in place of a teacher."""

    def __init__(
        self,
        *args: Any,
        teacher_model: Any = None,
        teacher_offload: bool | Mapping[str, bool] = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        teacher_model = check_teacher(self.args, teacher_model)
        setup = build_teacher(self, teacher_model, teacher_offload, self.args.teacher.merge_eos)
        self.teacher = setup.teacher
        self.vocabulary = setup.vocabulary
        self.eos = setup.eos
        self.teacher_ends = setup.terminal_ids
        self.data_collator.teacher_inputs = setup.inputs
        # the teacher itself is a callback, or the model that it reads with another tokenizer
        parts: list[Any] = [self.teacher] if isinstance(self.teacher, TrainerCallback) else setup.models
        self.teacher_callbacks = [part for part in parts if isinstance(part, TrainerCallback)]
        for callback in self.teacher_callbacks:
            self.add_callback(callback)
        self.set_second_models(setup.models)
        self.second_key = " ".join(filter(None, [self.second_key, setup.teacher.description])) or None
        if setup.average is not None:
            self.add_callback(setup.average)
            self.stateful["teacher_average"] = setup.average

    def request(self, kind: Literal["dense", "sampled"], top_k: int | None) -> Request:
        """Return what the loss needs from the teacher; with `top_k` only its most likely tokens."""
        return Request("top_k" if top_k else kind, self.args.temperature, self.vocabulary, self.eos, top_k or 0)

    def build_objective(self) -> Objective:
        """Return the loss of each token, by the current options."""
        raise NotImplementedError

    def drop_teacher(self) -> None:
        """Train without the teacher, whose scores the rows have: its memory is freed."""
        for callback in self.teacher_callbacks:
            self.remove_callback(callback)
        self.teacher_callbacks = []
        self.set_second_models([])
        self.data_collator.teacher_inputs = None
        self.teacher = None
        self.cached_at = self.args.temperature

    def prepare_window(self, batches: Sequence[Any]) -> list[Any]:
        """Ask a teacher on a server about all micro-batches of a window at once."""
        batches = list(batches)
        if self.teacher is None or batches[0].teacher_signal is not None:
            return batches
        signals = self.teacher.signals(batches, self.build_objective().request)
        if signals is None:
            return batches
        return [batch.replace(teacher_signal=signal) for batch, signal in zip(batches, signals, strict=True)]

    def signal(self, batch: DistillationBatch, request: Request) -> TeacherSignal:
        """Return what the teacher says about a batch, or has said before the step."""
        if batch.teacher_signal is not None:
            if self.teacher is None and self.args.temperature != self.cached_at:
                problem = f"temperature={self.args.temperature:g}: the teacher was scored at {self.cached_at:g}"
                raise InputError(f"{problem}: build a new trainer for another temperature")
            return batch.teacher_signal
        if self.teacher is None:
            raise InputError(
                "this data set was not scored by the teacher: with teacher.precompute, pass every dataset when "
                "the trainer is built"
            )
        return self.teacher.signal(batch, request)

    def distill(
        self,
        model: nn.Module,
        batch: DistillationBatch,
        weights: Tensor | None,
        observe: Callable[[TeacherLogits], Observer] | None = None,
    ) -> tuple[Scores, TeacherSignal]:
        """Return the loss of each token as `value`, what it is made of, [N] each, and the teacher's signal.

        weights: the weight of each token [N] in the loss; None where that is not known yet. observe: returns what
        measures student and teacher in the tiles of the loss, given the teacher's logits.
        """
        objective = self.build_objective()
        signal = self.signal(batch, objective.request)
        if observe is None:
            tile = objective.tile(signal, batch)
        else:
            whole = replace(objective.request, kind="dense")
            dense = signal if isinstance(signal, Dense) else self.signal(batch, whole)
            assert isinstance(dense, Dense)
            observer = observe(dense.logits)
            tile = objective.tile(Dense(observer) if dense is signal else signal, batch)
            tile = observer.observe(tile)

        # across tokenizers the loss of a token depends on other tokens: it is no multiple of one weight
        weights = None if isinstance(signal, Chunked) else weights
        scores = self.score(model, batch, tile, weights)
        return objective.complete(scores, signal), signal

    def teacher_metrics(
        self,
        batch: DistillationBatch,
        signal: TeacherSignal,
        scores: Scores,
        divergence: Tensor,
        name: str,
        weights: Tensor,
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return the divergence of each of several teachers, and how tokens of another tokenizer were compared.

        Args:
            divergence: Of each token, [N], logged as `name`.
            weights: Which tokens count, [N].
        """
        metrics: dict[str, tuple[Tensor, Tensor | None]] = {}
        if isinstance(self.teacher, TeacherRouter):
            metrics |= self.teacher.metrics(batch, name, divergence, weights)
        if isinstance(signal, Chunked):
            metrics |= alignment_metrics(signal.batch, scores.alone, weights)
        return metrics
