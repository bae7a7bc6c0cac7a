"""What a trainer of KD or OPD is given as its teacher, and what it asks of it before and around a step."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.align import Aligner
from ..data.teacher_rows import by_name
from ..engines import launch
from ..errors import InputError
from ..scoring import forward
from ..scoring.chunks import Across
from ..scoring.layouts import Example
from ..scoring.stop_outcome import StopOutcome
from ..scoring.teacher_view import WHOLE, make_views
from . import load, score_cache
from .frozen import Frozen, shares_trained_weights
from .own_past import Itself, own_past
from .prepare import find_terminal_ids
from .section import ModelSection, TeacherSection
from .served_teacher import ServedTeacher
from .teacher import Teacher, Teachers

logger = logging.getLogger(__name__)
Given = nn.Module | str | TeacherSection
"""A teacher as users give it: a model, its name or folder, or a section of a recipe."""


def add_teacher(
    trainer: Any, given: Given | Mapping[str, Given] | None, offload: bool | Mapping[str, bool]
) -> tuple[Any, int]:
    """The trainer's teacher, or several by name, and the number of token ids that all models have.

    A model that is a name is loaded. Raises InputError for a missing teacher, the student itself, names that the Config
    does not know, a server that cannot be asked, and different token ids (padding aside) where `teacher_tokenizer` does
    not name the teacher's own.
    """
    if given is None:
        raise InputError("teacher_model is missing: pass a model, its name or folder, or a TeacherSection")
    names = trainer.args.teacher_names or []
    if isinstance(given, Mapping) and {*names} != {*given}:
        raise InputError(f"teacher_model names {', '.join(given)}, and teacher_names is {names}: they must be the same")
    if names and not isinstance(given, Mapping):
        raise InputError(f"teacher_names is {names}: pass teacher_model as a dict of them")
    several = by_name(given)
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(several, offload)
    made = {name: _made(trainer, one, name, offloaded.get(name, False)) for name, one in several.items()}
    sizes = [forward.causal_lm(trainer.model).config.get_text_config().vocab_size]
    sizes += [size for part, size in made.values() if part.aligner is None]
    parts = {name: part for name, (part, _) in made.items()}
    seconds = [part for part in parts.values() if isinstance(part, Frozen) and not isinstance(part, Itself)]
    for part in seconds:
        trainer.add_callback(part)
    trainer.set_second_models(seconds)
    aligners = {name: part.aligner for name, part in parts.items() if part.aligner is not None}
    served = {name for name, part in parts.items() if not part.dense}
    apart = names or served or aligners or trainer.args.teacher_prompt
    if apart and trainer.data_collator.pictures:
        what = "several teachers, servers, and teachers with a prompt or a tokenizer of their own"
        raise InputError(f"{what} are shown no pictures yet: drop them, or train on text (model.images: false)")
    if apart:
        trainer.data_collator.views = partial(_views, aligners, served)
    described = [part.described for part in parts.values()]
    trainer.second_key = " ".join(filter(None, [trainer.second_key, *described])) or None
    whole = Teachers(parts, min(sizes)) if names else parts[""]
    return whole, min(sizes)


def _views(
    aligners: Mapping[str, Aligner], served: set[str], examples: Sequence[Example], batch: dict, lay_out: Callable
) -> dict[str, Any]:
    """`make_views`, of answers in the tokens of the teachers that have their own."""
    read = []
    for example in examples:
        reading = example.reading or WHOLE
        if (aligner := aligners.get(reading.teacher)) is not None:
            aligned = [aligner(branch.ids) for branch in example.branches]
            example = replace(example, reading=replace(reading, aligned=aligned))
        read.append(example)
    return make_views(read, batch, lay_out, served)


def _made(trainer: Any, given: Given, name: str, offload: bool) -> tuple[Any, int]:
    """A teacher, and its number of token ids."""
    own, switches = by_name(trainer.args.teacher_tokenizer).get(name), trainer.args.chat_template_kwargs
    if isinstance(given, TeacherSection) and given.self:
        return own_past(trainer, given), forward.causal_lm(trainer.model).config.get_text_config().vocab_size
    if isinstance(given, TeacherSection) and given.url:
        served = ServedTeacher(trainer, given, f"teachers.{name}" if name else "teacher")
        served.check(trainer.args.teacher_top_k or trainer.args.precompute_teacher_top_k or 0)
        served.aligner = _aligner(trainer, served.tokenizer, own, lambda tokenizer: served.ends(tokenizer, switches))
        return served, served.vocabulary
    model: Any = given
    if isinstance(given, str | TeacherSection):
        section = ModelSection(name_or_path=given) if isinstance(given, str) else given
        offload = offload or section.offload
        kwargs = trainer.args.teacher_model_init_kwargs or {}
        options = load.take_options(section, kwargs, "teacher_model_init_kwargs")
        model = load.load_model(section, trainable=False, options=options)
    launch.check_model(model, trainer.args)
    if shares_trained_weights(model, trainer.model):
        problem = "teacher_model is the student itself, or shares weights with it"
        raise InputError(f"{problem}: pass TeacherSection(self='start') to distil from its start")
    path = getattr(model.config, "_name_or_path", "")
    theirs = None
    with suppress(InputError):  # of a model in memory the tokenizer may not be found
        theirs = load.load_tokenizer(ModelSection(name_or_path=path)) if path and own is None else None
    if offload and getattr(model, "is_loaded_in_8bit", False):
        raise InputError("teacher offload: bitsandbytes keeps 8-bit weights on the GPU: use 4bit, or do not offload")
    teacher = Teacher(model, trainer.accelerator, offload)
    teacher.aligner = _aligner(trainer, theirs, own, lambda tokenizer: find_terminal_ids(model, tokenizer, switches))
    if teacher.aligner is not None:
        load.check_tokenizer_fits(teacher.aligner.teacher, forward.causal_lm(model).config, type(model).__name__)
    return teacher, forward.causal_lm(model).config.get_text_config().vocab_size


def _aligner(trainer: Any, tokenizer: Any, own: str | None, ends: Callable[[Any], list[int]]) -> Aligner | None:
    """What aligns a teacher's tokens with the student's, if it is to have a tokenizer of its own. Raises InputError
    where it has, and is not to."""
    if own is None:
        if tokenizer is not None:
            load.check_same_vocabulary(trainer.tokenizer, tokenizer)
        return None
    theirs = load.load_tokenizer(ModelSection(name_or_path=own))
    if trainer.tokenizer.get_vocab() == theirs.get_vocab():  # then tokens are compared as they are
        logger.info("the teacher's tokenizer is the student's: nothing needs to be aligned")
        return None
    return Aligner(trainer.tokenizer, theirs, trainer.terminal_ids, ends(theirs)[0])


def find_stop_outcome(trainer: Any, wanted: bool) -> tuple[list[int], StopOutcome]:
    """The terminal ids of the trainer's student and teacher, and which of them are one outcome. wanted: as the option
    `one_stop_outcome`. A teacher with its own tokenizer has its own ids, which `data.align` lays alongside."""
    other = trainer.teacher.aligner is not None
    theirs = [] if other else trainer.teacher.ends(trainer.tokenizer, trainer.args.chat_template_kwargs)
    both = list(dict.fromkeys(trainer.terminal_ids + theirs))
    one = [i for i in both if i < trainer.vocabulary] if wanted else []
    if len(one) > 1:
        names = " ".join(trainer.tokenizer.convert_ids_to_tokens(one))
        logger.info("terminal tokens that count as one outcome: %s", names)
    return both, StopOutcome(torch.tensor(one, device=trainer.accelerator.device), trainer.args.temperature)


def find_across(trainer: Any) -> Any:
    """The `Across` of a trainer whose teacher has its own tokenizer; None: it has the student's."""
    aligner = trainer.teacher.aligner
    if aligner is None:
        return None
    ends = trainer.teacher.ends(aligner.teacher, trainer.args.chat_template_kwargs)
    return Across(aligner, trainer.stop, ends, trainer.args.device)


def precompute_top_k(trainer: Any) -> None:
    """Give the trainer's rows teacher_ids and teacher_logps, [trained tokens][K] each, from the cache or scored now.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    args, k, size = trainer.args, trainer.args.precompute_teacher_top_k, trainer.vocabulary
    trainer.check_scoring(trainer.model)
    one = trainer.stop.ids.tolist()
    key = [
        trainer.teacher.key(), sorted(trainer.tokenizer.get_vocab().items()),
        k, args.temperature, args.bf16, args.fp16, size, *([one] if one else []),
    ]  # fmt: skip

    def score(batch: dict) -> list[dict[str, Any]]:
        tokens = trainer.stop.of(forward.targets(batch))
        found = trainer.teacher.top(batch, k, tokens, args.temperature, size, trainer.stop)
        ids, logps = found["teacher_ids"].int().cpu().numpy(), found["teacher_logps"].float().cpu().numpy()
        own = [(batch["owner"] == number).cpu().numpy() for number in range(len(batch["index"]))]
        return [{"teacher_ids": ids[mask], "teacher_logps": logps[mask]} for mask in own]

    score_cache.add_scores(trainer, "precompute_teacher_top_k", "teacher", key, args.per_device_eval_batch_size, score)
    for second in trainer.second_models:
        trainer.remove_callback(second)
    trainer.set_second_models([])
    trainer.data_collator.views = None
