"""What KD and OPD have in common: options for teachers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..models.section import TeacherSection
from ..trainer.config import PostTrainConfig
from .rules import served_problem


@dataclass
class DistillationConfig(PostTrainConfig):
    """Options of methods with a teacher."""

    teacher_top_k: int | None = None
    """Compare with the teacher's top K tokens alone; None: with its whole vocabulary."""
    teacher_prompt: dict | str | None = None
    """What the teacher reads in place of the prompt: a Jinja template over the row's columns, and `prompt`; of several
    teachers by name. A recipe's teacher.prompt."""
    teacher_tokenizer: dict | str | None = None
    """Name or folder of the teacher's tokenizer where that is another one: texts are aligned; of several teachers by
    name. A recipe's teacher.own_tokenizer."""
    teacher_names: list[str] | None = None
    """Names of several teachers, of which each row has one in its column `teacher`. A recipe's teachers."""


def check_teacher(trainer: Any, given: Any) -> None:
    """What a trainer is given as `teacher_model`, before anything is loaded: names of several are the Config's. Raises
    InputError for a server that cannot give what the Config wants."""
    several = dict(given) if isinstance(given, Mapping) else {"": given}
    served = any(isinstance(one, TeacherSection) and one.url for one in several.values())
    if served and (problem := served_problem(trainer.args)):
        raise InputError(problem[1])
