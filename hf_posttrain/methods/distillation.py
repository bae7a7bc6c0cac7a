"""What KD and OPD have in common: options for teachers."""

from dataclasses import dataclass
from typing import Any

from ..data.teacher_rows import by_name
from ..errors import InputError
from ..models.section import TeacherSection
from ..trainer.config import PostTrainConfig
from .rules import section_problems, teacher_problems


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


def check_teacher(args: Any, given: Any) -> None:
    """What a trainer is given as `teacher_model`, before anything is loaded. Raises InputError for a section that says
    what the Config does not, or that goes with nothing that the Config wants."""
    for name, one in by_name(given).items():
        if not isinstance(one, TeacherSection):
            continue
        key = f"teacher_model[{name!r}]" if name else "teacher_model"
        for _, problem in (*section_problems(key, one), *teacher_problems(args, one)):
            raise InputError(problem)
        for option, value in (("teacher_prompt", one.prompt), ("teacher_tokenizer", one.own_tokenizer or None)):
            if value is not None and by_name(getattr(args, option)).get(name) is None:
                why = "rows are prepared before the teacher is known"
                raise InputError(f"{key}: {why}: set {option} of the Config too")
