"""Construction of the teacher of a trainer for KD or OPD."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..capabilities import Feature, conflict_message
from ..data.align import Aligner
from ..data.teacher_prompts import by_teacher
from ..engines import launch
from ..errors import InputError
from ..models import load
from ..models.config import ModelSection, TeacherSection
from ..models.frozen import FrozenModel, shares_trained_weights
from ..models.moving_average import MovingAverage
from ..models.policy import find_terminal_ids
from ..scoring import forward
from ..trainer.interface import TrainerInterface
from .cross_tokenizer import CrossTokenizerTeacher
from .eos import MergedEOS
from .inputs import TeacherInputs
from .local import LocalTeacher
from .router import TeacherRouter
from .self_teacher import build_self_teacher
from .served import ServedTeacher
from .signal import Teacher

logger = logging.getLogger(__name__)
TeacherLike: TypeAlias = nn.Module | str | TeacherSection | Teacher | Callable[[Any], Teacher]
"""Teacher as an argument of a trainer: a model, its name or folder, a section of a recipe, an object with the interface
of a teacher, or a function of the trainer that returns such an object."""


@dataclass
class TeacherSetup:
    """A teacher, and its properties that concern the trainer.

    Attributes:
        teacher: The teacher, or None if the rows have its scores.
        vocabulary: Number of token ids that all models have.
        terminal_ids: Ids that end an answer of the student, or of a teacher with the tokenizer of the student.
        eos: Merged EOS ids.
        models: Second models in memory.
        inputs: Builder of the inputs of teachers, or None if the teacher reads the batch of the student.
        average: Callback that updates the weights of a teacher that is a moving average of the student.
    """

    teacher: Teacher | None
    vocabulary: int
    terminal_ids: list[int]
    eos: MergedEOS
    models: list[FrozenModel] = field(default_factory=list)
    inputs: TeacherInputs | None = None
    average: MovingAverage | None = None


def build_teacher(
    trainer: TrainerInterface,
    teacher_model: TeacherLike | Mapping[str, TeacherLike] | None,
    offload: bool | Mapping[str, bool],
    merge_eos: bool,
) -> TeacherSetup:
    """Build the teacher of a trainer, or several teachers by name. With recorded log-probabilities there is none.

    Args:
        trainer: The trainer.
        teacher_model: The teacher, or several by name. A model that is given by name is loaded.
        offload: Whether to keep a model in memory on the CPU between uses, or a dict of such values by teacher.
        merge_eos: Whether all EOS ids of student and teacher count as one outcome.

    Raises:
        InputError: The teacher is missing or is the student itself; the names differ from those in the Config; a server
            cannot be reached; or the token ids, except for padding, differ from those of the student and the Config
            does not name the tokenizer of the teacher.
    """
    student_size = forward.causal_lm(trainer.model).config.get_text_config().vocab_size
    if trainer.args.teacher.logprobs_column is not None:
        if offload:
            raise InputError("teacher_offload is only valid with a teacher in memory. Remove it")
        return TeacherSetup(None, student_size, trainer.terminal_ids, _eos(trainer, []))
    if teacher_model is None:
        raise InputError("teacher_model is missing. Pass a model, its name or folder, or a TeacherSection")
    names = trainer.args.teacher.names or []
    if isinstance(teacher_model, Mapping) and {*names} != {*teacher_model}:
        problem = f"teacher_model has the names {', '.join(teacher_model)}, and teacher.names is {names}"
        raise InputError(f"{problem}. Use the same names in both")
    if names and not isinstance(teacher_model, Mapping):
        raise InputError(
            f"teacher.names is {names}, which requires several teachers. Pass teacher_model as a dict by name"
        )
    models_by_name = by_teacher(teacher_model)
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(models_by_name, offload)
    if unknown := [name for name in offloaded if name not in models_by_name]:
        problem = f"teacher_offload has the name {unknown[0]!r}, and teacher_model has {', '.join(models_by_name)}"
        raise InputError(f"{problem}. Use the same names in both")

    teachers: dict[str, Any] = {}
    for name, model in models_by_name.items():
        builders = [
            build for key, build in BUILDERS.items() if isinstance(model, TeacherSection) and getattr(model, key)
        ]
        if offloaded.get(name):
            model = _with_offload(model)
        if not isinstance(model, nn.Module) and hasattr(model, "signal"):
            teachers[name] = model
        elif not isinstance(model, nn.Module | type) and callable(model):
            teachers[name] = model(trainer)
        elif builders:
            teachers[name] = builders[0](trainer, model, name)
        else:
            teachers[name] = _build_local(trainer, model, name, offloaded.get(name, False))
    sizes = [teacher.vocabulary for teacher in teachers.values() if teacher.aligner is None]
    vocabulary = min([student_size, *sizes])

    aligners = {name: teacher.aligner for name, teacher in teachers.items() if teacher.aligner is not None}
    served_names = {name for name, teacher in teachers.items() if not teacher.dense}
    inputs = None
    if names or served_names or aligners or trainer.args.teacher.prompt:
        if trainer.data_collator.vision_inputs and served_names:
            raise InputError(conflict_message(Feature.SERVED, Feature.IMAGES))
        inputs = TeacherInputs(aligners, served_names)

    teacher: Any = TeacherRouter(teachers, vocabulary) if names else teachers[""]
    terminal_ids, eos = _merged_eos(trainer, teacher, vocabulary, merge_eos)
    if teacher.aligner is not None:
        ends = teacher.ends(teacher.aligner.teacher, trainer.args.chat_template_kwargs)
        teacher = CrossTokenizerTeacher(teacher, teacher.aligner, eos, ends, trainer.args.device)
    models = [model for member in teachers.values() for model in member.models]
    averages = [member.average for member in teachers.values() if getattr(member, "average", None)]
    if len(averages) > 1:
        raise InputError("only one of several teachers can have self: ema. Use self: start in the others")
    return TeacherSetup(teacher, vocabulary, terminal_ids, eos, models, inputs, *averages)


def _with_offload(source: TeacherLike) -> TeacherLike:
    """Return a teacher that is on the CPU between uses. Raise InputError if it is not a model in memory."""
    if isinstance(source, TeacherSection) and not source.url:
        return replace(source, offload=True)
    if isinstance(source, nn.Module | str):
        return source
    raise InputError("teacher_offload is only valid with a teacher in memory. Remove it")


def _merged_eos(trainer: TrainerInterface, teacher: Any, vocabulary: int, merge: bool) -> tuple[list[int], MergedEOS]:
    """Return the ids that end an answer of the student, or of a teacher with its tokenizer, and the merged EOS ids."""
    teacher_ends = []
    if teacher.aligner is None:
        teacher_ends = teacher.ends(trainer.tokenizer, trainer.args.chat_template_kwargs)
    terminal_ids = list(dict.fromkeys(trainer.terminal_ids + teacher_ends))
    merged = [i for i in terminal_ids if i < vocabulary] if merge else []
    if len(merged) > 1:
        names = " ".join(trainer.tokenizer.convert_ids_to_tokens(merged))
        logger.info("EOS tokens that count as one outcome: %s", names)
    return terminal_ids, _eos(trainer, merged)


def _eos(trainer: TrainerInterface, ids: list[int]) -> MergedEOS:
    """Return EOS ids that count as one outcome at the temperature of a trainer."""
    return MergedEOS(torch.tensor(ids, device=trainer.accelerator.device), trainer.args.temperature)


def _build_served(trainer: TrainerInterface, section: TeacherSection, name: str) -> ServedTeacher:
    """Return a teacher on a server, after a check of the server."""
    args = trainer.args
    teacher = ServedTeacher(trainer, section, f"teachers.{name}" if name else "teacher")
    teacher.check(args.teacher.top_k or 0)
    tokenizer = by_teacher(args.teacher.tokenizer).get(name)

    def find_ends(teacher_tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return teacher.ends(teacher_tokenizer, args.chat_template_kwargs)

    teacher.aligner = _build_aligner(trainer, teacher.tokenizer, tokenizer, find_ends)
    return teacher


BUILDERS: dict[str, Callable[[Any, TeacherSection, str], Any]] = {"self": build_self_teacher, "url": _build_served}
"""Functions that build the teacher of a section with these keys. A section without them is a model in memory."""


def _build_local(trainer: TrainerInterface, source: TeacherLike, name: str, offload: bool) -> LocalTeacher:
    """Return a teacher in memory, which is loaded if it is given by name, after a check of its token ids."""
    args = trainer.args
    model: Any = source
    if isinstance(source, str | TeacherSection):
        section = ModelSection(name_or_path=source) if isinstance(source, str) else source
        offload = offload or section.offload
        kwargs = args.teacher_model_init_kwargs or {}
        options = load.apply_model_init_kwargs(section, kwargs, "teacher_model_init_kwargs")
        model = load.load_model(section, trainable=False, options=options)
    launch.check_model(model, args)
    if shares_trained_weights(model, trainer.model):
        problem = "teacher_model is the student itself, or shares weights with it"
        raise InputError(f"{problem}. Pass TeacherSection(self='start') to distill from the initial student")
    tokenizer = by_teacher(args.teacher.tokenizer).get(name)
    path = getattr(model.config, "_name_or_path", "")
    teacher_tokenizer = None
    with suppress(InputError):  # the tokenizer of a model in memory may not be found
        teacher_tokenizer = load.load_tokenizer(ModelSection(name_or_path=path)) if path and tokenizer is None else None
    if offload and getattr(model, "is_loaded_in_8bit", False):
        problem = "teacher offload is not supported with 8-bit weights, which bitsandbytes keeps on the GPU"
        raise InputError(f"{problem}. Use 4bit, or do not offload")
    teacher = LocalTeacher(model, trainer.accelerator, offload)

    def find_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return find_terminal_ids(model, tokenizer, args.chat_template_kwargs)

    teacher.aligner = _build_aligner(trainer, teacher_tokenizer, tokenizer, find_ends)
    if teacher.aligner is not None:
        load.check_tokenizer_fits(teacher.aligner.teacher, forward.causal_lm(model).config, type(model).__name__)
    return teacher


def _build_aligner(
    trainer: TrainerInterface,
    known_tokenizer: PreTrainedTokenizerBase | None,
    tokenizer_name: str | None,
    find_ends: Callable[[PreTrainedTokenizerBase], list[int]],
) -> Aligner | None:
    """Return the aligner of the tokens of student and teacher, or None if both have the same tokenizer.

    Args:
        trainer: The trainer.
        known_tokenizer: The tokenizer of the teacher, if it is known.
        tokenizer_name: Name or folder of the tokenizer of the teacher in the Config, None if it is that of the student.
        find_ends: Function of the tokenizer that returns the ids that end an answer of the teacher.

    Raises:
        InputError: The tokenizers differ, and the Config does not name that of the teacher.
    """
    if tokenizer_name is None:
        if known_tokenizer is not None:
            load.check_same_vocabulary(trainer.tokenizer, known_tokenizer)
        return None
    tokenizer = load.load_tokenizer(ModelSection(name_or_path=tokenizer_name))
    if trainer.tokenizer.get_vocab() == tokenizer.get_vocab():
        logger.info("student and teacher have the same tokenizer, so tokens are compared without alignment")
        return None
    return Aligner(trainer.tokenizer, tokenizer, trainer.terminal_ids, find_ends(tokenizer)[0])
