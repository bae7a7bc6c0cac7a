"""Config and trainer that KD and OPD have in common, which handle the teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import InputError
from ..options import option
from ..scoring.forward import LMHead
from ..scoring.head import TileFunction
from ..scoring.teacher_tiles import TeacherLogits
from ..teachers.cross_tokenizer import alignment_metrics
from ..teachers.eos import MergedEOS
from ..teachers.factory import TeacherLike, build_teacher
from ..teachers.inputs import DistillationBatch, DistillationCollator
from ..teachers.local import TeacherStates
from ..teachers.options import TeacherOptions
from ..teachers.router import TeacherRouter
from ..teachers.signal import Chunked, Dense, HiddenStates, Request, Teacher, TeacherSignal
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .check_teacher import check_teacher
from .objective import Objective, Scores


@dataclass
class DistillationConfig(PostTrainConfig):
    """Options of the methods with a teacher, KD and OPD.

    The options of `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        teacher: Options for the comparison of student and teacher and for the input of the teacher: {top_k,
            top_k_remainder, precompute, merge_eos, prompt, tokenizer, names, logprobs_column}.
        entropy_threshold: Entropy of the teacher in nats above which entropy_aware_kl adds the forward KL to the
            reverse KL (by default 0.8).
        teacher_model_name_or_path: Name or folder of the teacher, for a trainer without the argument `teacher_model`.
            In a recipe it is in the teacher section.
        teacher_model_revision: Revision of the teacher on the hub. Only main is supported. Download any other revision
            and pass its folder.
        teacher_model_init_kwargs: Arguments of `from_pretrained` for a teacher that is given by name. In a recipe they
            are in the teacher section.

    Raises:
        InputError: `teacher_model_revision` is a revision other than main.
    """

    python_only: ClassVar = (
        *PostTrainConfig.python_only,
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "teacher_model_init_kwargs",
    )
    """Fields that are not keys of a recipe."""
    merges_eos: ClassVar[bool] = False
    """Default of `teacher.merge_eos`."""
    teacher: TeacherOptions | str | dict[str, Any] | None = option(
        None,
        "Options for the comparison of student and teacher and for the input of the teacher: {top_k, top_k_remainder, "
        "precompute, merge_eos, prompt, tokenizer, names, logprobs_column}.",
    )
    entropy_threshold: float | None = option(
        None,
        "Entropy of the teacher in nats above which entropy_aware_kl adds the forward KL to the reverse KL (by default "
        "0.8).",
    )
    teacher_model_name_or_path: str | None = option(
        None,
        "Name or folder of the teacher, for a trainer without the argument `teacher_model`. In a recipe it is in the "
        "teacher section.",
    )
    teacher_model_revision: str | None = option(
        None,
        "Revision of the teacher on the hub. Only main is supported. Download any other revision and pass its folder.",
    )
    teacher_model_init_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of `from_pretrained` for a teacher that is given by name. In a recipe they are in the teacher "
        "section.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_model_revision not in (None, "main"):
            problem = f"teacher_model_revision={self.teacher_model_revision!r} cannot be loaded by name"
            raise InputError(f"{problem}. Download that revision, and pass its folder as the teacher")

    def _validate(self) -> None:
        super()._validate()
        options = self.teacher
        assert isinstance(options, TeacherOptions)
        if options.merge_eos is None:
            self.teacher = replace(options, merge_eos=self.merges_eos)


class Observer(TeacherLogits, Protocol):
    """Measures student and teacher in the tiles of a loss, and passes the logits of the teacher on to the loss."""

    def observe(self, tile: TileFunction) -> TileFunction:
        """Return the tile function of the loss with the measurements among its stats."""
        ...


class DistillationTrainer(PostTrainer):
    """Base class of the trainers with a teacher.

    A subclass defines `build_objective`, and `distill` scores a batch with that objective.

    Args:
        *args: Positional arguments of `PostTrainer`.
        teacher_model: Teacher, which is a model, its name or folder, a `TeacherSection`, an object with the interface
            `teachers.signal.Teacher`, a function of the trainer that returns one, or a dict of these by the names in
            `args.teacher.names`. None means the model in `args.teacher_model_name_or_path`.
        teacher_offload: Whether to keep the teacher on the CPU between uses, or a dict of such values by teacher.
        **kwargs: Keyword arguments of `PostTrainer`.

    Raises:
        InputError: The teacher is missing, contradicts the Config, or has other token ids than the student.
    """

    collator_class = DistillationCollator
    teacher: Teacher | None
    cached_temperature: float | None = None
    """Temperature of the precomputed or recorded top k in the rows, which replaces the teacher."""
    teacher_head: LMHead | None = None
    """Copy of the head of the teacher, which reads precomputed hidden states."""

    def __init__(
        self,
        *args: Any,
        teacher_model: TeacherLike | Mapping[str, TeacherLike] | None = None,
        teacher_offload: bool | Mapping[str, bool] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        teacher_model = check_teacher(self.args, teacher_model)
        setup = build_teacher(self, teacher_model, teacher_offload, self.args.teacher.merge_eos)
        self.teacher = setup.teacher
        self.vocabulary = setup.vocabulary
        self.eos_ids = setup.eos.ids
        self.teacher_ends = setup.terminal_ids
        self.data_collator.teacher_inputs = setup.inputs
        if self.teacher is None:
            self.cached_temperature = self.args.temperature
        # The callback is the teacher itself, or else its model, as with a teacher that has another tokenizer.
        parts: Sequence[object] = [self.teacher] if isinstance(self.teacher, TrainerCallback) else setup.models
        self.teacher_callbacks = [part for part in parts if isinstance(part, TrainerCallback)]
        for callback in self.teacher_callbacks:
            self.add_callback(callback)
        self.set_second_models(setup.models)
        description = None if setup.teacher is None else setup.teacher.description
        self.second_key = " ".join(filter(None, [self.second_key, description])) or None
        if setup.average is not None:
            self.add_callback(setup.average)
            self.stateful["teacher_average"] = setup.average

    @property
    def eos(self) -> MergedEOS:
        """Merged EOS ids, at the current temperature."""
        return MergedEOS(self.eos_ids, self.args.temperature)

    def request(self, kind: Literal["dense", "sampled"], top_k: int | None) -> Request:
        """Return the request of a loss to the teacher, which with `top_k` is about its most likely tokens only."""
        return Request("top_k" if top_k else kind, self.args.temperature, self.vocabulary, self.eos, top_k or 0)

    def build_objective(self) -> Objective:
        """Return the objective that the current options select."""
        raise NotImplementedError

    def drop_teacher(self) -> None:
        """Remove the teacher and free its memory, because the rows have its scores."""
        for callback in self.teacher_callbacks:
            self.remove_callback(callback)
        self.teacher_callbacks = []
        self.set_second_models([])
        self.data_collator.teacher_inputs = None
        self.teacher = None
        self.cached_temperature = self.args.temperature

    def prepare_window(self, batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches of a window with the signals of a teacher on a server, all from one call."""
        batches = list(batches)
        if self.teacher is None or batches[0].teacher_signal is not None:
            return batches
        signals = self.teacher.signals(batches, self.build_objective().request)
        if signals is None:
            return batches
        return [batch.replace(teacher_signal=signal) for batch, signal in zip(batches, signals, strict=True)]

    def signal(self, batch: DistillationBatch, request: Request) -> TeacherSignal:
        """Return the signal of the teacher for a batch, which may have been computed before the step.

        Raises:
            InputError: The precomputed scores of the teacher are missing, or were computed at another temperature.
        """
        if isinstance(batch.teacher_signal, HiddenStates):
            assert self.teacher_head is not None
            return Dense(TeacherStates(self.teacher_head, batch.teacher_signal.hidden, self.eos))
        if batch.teacher_signal is not None:
            if self.teacher is None and self.args.temperature != self.cached_temperature:
                problem = (
                    f"temperature={self.args.temperature:g} differs from {self.cached_temperature:g}, at which the "
                    "teacher was scored"
                )
                raise InputError(f"{problem}. Build a new trainer for another temperature")
            return batch.teacher_signal
        if self.teacher is None:
            option = "precompute" if self.args.teacher.precompute else "logprobs_column"
            problem = f"this dataset was not scored by the teacher, which teacher.{option} requires"
            raise InputError(f"{problem}. Pass all datasets when the trainer is built")
        return self.teacher.signal(batch, request)

    def distill(
        self,
        model: nn.Module,
        batch: DistillationBatch,
        weights: Tensor | None,
        observe: Callable[[TeacherLogits], Observer] | None = None,
    ) -> tuple[Scores, TeacherSignal]:
        """Score a batch with the objective.

        Args:
            model: The student.
            batch: A micro-batch.
            weights: Weights of the tokens in the loss, [N]. None means that they are not known yet.
            observe: Function of the logits of the teacher that returns an observer, which measures student and teacher
                in the tiles of the loss.

        Returns:
            The scores, with the loss of each token as `value` and its components, [N] each; and the signal of the
            teacher.
        """
        objective = self.build_objective()
        signal = self.signal(batch, objective.request)
        if observe is None:
            tile = objective.tile(signal, batch)
        else:
            dense_request = replace(objective.request, kind="dense")
            dense = signal if isinstance(signal, Dense) else self.signal(batch, dense_request)
            assert isinstance(dense, Dense)
            observer = observe(dense.logits)
            tile = objective.tile(Dense(observer) if dense is signal else signal, batch)
            tile = observer.observe(tile)

        # With another tokenizer the loss of a token depends on other tokens, so it is not a multiple of its own weight.
        weights = None if isinstance(signal, Chunked) else weights
        scores = self.score(model, batch, tile, weights)
        return objective.to_token_losses(scores, signal), signal

    def teacher_metrics(
        self,
        batch: DistillationBatch,
        signal: TeacherSignal,
        scores: Scores,
        divergence: Tensor,
        name: str,
        weights: Tensor,
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return the metrics of several teachers by name, and those of the alignment with another tokenizer.

        Args:
            batch: The micro-batch.
            signal: The signal of the teacher.
            scores: The scores of the micro-batch.
            divergence: Divergences of the tokens, [N].
            name: Name of the divergence in the log, to which that of the teacher is appended.
            weights: Weights of the tokens in the metrics, [N].
        """
        metrics: dict[str, tuple[Tensor, Tensor | None]] = {}
        if isinstance(self.teacher, TeacherRouter):
            metrics |= self.teacher.metrics(batch, name, divergence, weights)
        if isinstance(signal, Chunked):
            metrics |= alignment_metrics(signal.batch, scores.alone, weights)
        return metrics
