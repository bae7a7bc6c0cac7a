"""Build the teacher of a trainer of KD or OPD."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
from ..models.policy import find_terminal_ids
from ..scoring import forward
from ..trainer.interface import TrainerInterface
from .cross_tokenizer import CrossTokenizerTeacher
from .eos import MergedEOS
from .inputs import TeacherInputs
from .local import LocalTeacher
from .router import TeacherRouter
from .self_teacher import MovingAverage, build_self_teacher
from .served import ServedTeacher
from .signal import Teacher

logger = logging.getLogger(__name__)
TeacherLike: TypeAlias = nn.Module | str | TeacherSection | Teacher | Callable[[Any], Teacher]
"""A teacher as users give it: a model, its name or folder, a section of a recipe, an object with the interface, or a
function that returns one for a trainer."""


@dataclass
class TeacherSetup:
    """A teacher, and what a trainer must know about it."""

    teacher: Teacher
    vocabulary: int  # number of token ids that all models have
    terminal_ids: list[int]  # that end an answer of the student or of a teacher with the student's tokenizer
    eos: MergedEOS
    models: list[FrozenModel] = field(default_factory=list)  # second models in memory
    inputs: TeacherInputs | None = None  # where a teacher does not read the student's batch
    average: MovingAverage | None = None  # of a teacher that follows the student


def build_teacher(
    trainer: TrainerInterface,
    given: TeacherLike | Mapping[str, TeacherLike] | None,
    offload: bool | Mapping[str, bool],
    merge_eos: bool,
) -> TeacherSetup:
    """Build the teacher of a trainer, or several by name. A model given by name is loaded.

    Raises InputError for a missing teacher, the student itself, names that the Config does not know, a server that
    cannot be reached, and different token ids (padding aside) where `tokenizer` does not name the teacher's.
    """
    if given is None:
        raise InputError("teacher_model is missing: pass a model, its name or folder, or a TeacherSection")
    names = trainer.args.teacher.names or []
    if isinstance(given, Mapping) and {*names} != {*given}:
        raise InputError(f"teacher_model names {', '.join(given)}, and teacher.names is {names}: they must be the same")
    if names and not isinstance(given, Mapping):
        raise InputError(f"teacher.names is {names}: pass teacher_model as a dict of them")
    several = by_teacher(given)
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(several, offload)

    teachers: dict[str, Any] = {}
    for name, one in several.items():
        builders = [build for key, build in BUILDERS.items() if isinstance(one, TeacherSection) and getattr(one, key)]
        if not isinstance(one, nn.Module) and hasattr(one, "signal"):
            teachers[name] = one
        elif not isinstance(one, nn.Module | type) and callable(one):
            teachers[name] = one(trainer)
        elif builders:
            teachers[name] = builders[0](trainer, one, name)
        else:
            teachers[name] = _build_local(trainer, one, name, offloaded.get(name, False))
    of_student = forward.causal_lm(trainer.model).config.get_text_config().vocab_size
    vocabulary = min([of_student, *(each.vocabulary for each in teachers.values() if each.aligner is None)])

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
    models = [model for one in teachers.values() for model in one.models]
    averages = [one.average for one in teachers.values() if getattr(one, "average", None)]
    if len(averages) > 1:
        raise InputError("only one of several teachers can have self: ema")
    return TeacherSetup(teacher, vocabulary, terminal_ids, eos, models, inputs, *averages)


def _merged_eos(trainer: TrainerInterface, teacher: Any, vocabulary: int, merge: bool) -> tuple[list[int], MergedEOS]:
    """Return the ids that end an answer of the student or of a teacher with its tokenizer, and the merged ids."""
    theirs = []
    if teacher.aligner is None:
        theirs = teacher.ends(trainer.tokenizer, trainer.args.chat_template_kwargs)
    terminal_ids = list(dict.fromkeys(trainer.terminal_ids + theirs))
    merged = [i for i in terminal_ids if i < vocabulary] if merge else []
    if len(merged) > 1:
        names = " ".join(trainer.tokenizer.convert_ids_to_tokens(merged))
        logger.info("terminal tokens that count as one outcome: %s", names)
    return terminal_ids, MergedEOS(torch.tensor(merged, device=trainer.accelerator.device), trainer.args.temperature)


def _build_served(trainer: TrainerInterface, section: TeacherSection, name: str) -> ServedTeacher:
    """Connect to a server and test it."""
    args = trainer.args
    teacher = ServedTeacher(trainer, section, f"teachers.{name}" if name else "teacher")
    teacher.check(args.teacher.top_k or 0)
    tokenizer = by_teacher(args.teacher.tokenizer).get(name)
    ends = lambda theirs: teacher.ends(theirs, args.chat_template_kwargs)  # noqa: E731
    teacher.aligner = _build_aligner(trainer, teacher.tokenizer, tokenizer, ends)
    return teacher


BUILDERS: dict[str, Callable[[Any, TeacherSection, str], Any]] = {"self": build_self_teacher, "url": _build_served}
"""Key of a teacher's section -> function of (trainer, section, name) that builds such a teacher. A section with none of
these keys is a model in memory."""


def _build_local(trainer: TrainerInterface, given: TeacherLike, name: str, offload: bool) -> LocalTeacher:
    """Load a model where it is given by name, and test whether its tokens are the student's."""
    args = trainer.args
    model: Any = given
    if isinstance(given, str | TeacherSection):
        section = ModelSection(name_or_path=given) if isinstance(given, str) else given
        offload = offload or section.offload
        kwargs = args.teacher_model_init_kwargs or {}
        options = load.apply_model_init_kwargs(section, kwargs, "teacher_model_init_kwargs")
        model = load.load_model(section, trainable=False, options=options)
    launch.check_model(model, args)
    if shares_trained_weights(model, trainer.model):
        problem = "teacher_model is the student itself, or shares weights with it"
        raise InputError(f"{problem}: pass TeacherSection(self='start') to distil from its start")
    tokenizer = by_teacher(args.teacher.tokenizer).get(name)
    path = getattr(model.config, "_name_or_path", "")
    theirs = None
    with suppress(InputError):  # of a model in memory the tokenizer may not be found
        theirs = load.load_tokenizer(ModelSection(name_or_path=path)) if path and tokenizer is None else None
    if offload and getattr(model, "is_loaded_in_8bit", False):
        raise InputError("teacher offload: bitsandbytes keeps 8-bit weights on the GPU: use 4bit, or do not offload")
    teacher = LocalTeacher(model, trainer.accelerator, offload)
    ends = lambda theirs: find_terminal_ids(model, theirs, args.chat_template_kwargs)  # noqa: E731
    teacher.aligner = _build_aligner(trainer, theirs, tokenizer, ends)
    if teacher.aligner is not None:
        load.check_tokenizer_fits(teacher.aligner.teacher, forward.causal_lm(model).config, type(model).__name__)
    return teacher


def _build_aligner(
    trainer: TrainerInterface,
    tokenizer: PreTrainedTokenizerBase | None,
    own_tokenizer: str | None,
    ends: Callable[[Any], list[int]],
) -> Aligner | None:
    """Return what aligns a teacher's tokens with the student's; None where both have one tokenizer.

    tokenizer: of the teacher, where it is known. own_tokenizer: its name, where the Config says that it is another one.
    Raises InputError where it is another one and the Config does not say so.
    """
    if own_tokenizer is None:
        if tokenizer is not None:
            load.check_same_vocabulary(trainer.tokenizer, tokenizer)
        return None
    theirs = load.load_tokenizer(ModelSection(name_or_path=own_tokenizer))
    if trainer.tokenizer.get_vocab() == theirs.get_vocab():  # then tokens are compared as they are
        logger.info("the teacher's tokenizer is the student's: nothing needs to be aligned")
        return None
    return Aligner(trainer.tokenizer, theirs, trainer.terminal_ids, ends(theirs)[0])
