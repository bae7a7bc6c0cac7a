"""Check of the argument `teacher_model` of a trainer against its Config."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..capabilities import Feature, conflict_message
from ..data.recorded_scores import recorded_column
from ..data.teacher_prompts import by_teacher
from ..errors import InputError
from ..models.config import TeacherSection
from .rules import teacher_problems, teacher_section_problems

if TYPE_CHECKING:
    from ..teachers.factory import TeacherLike
    from .distillation import DistillationConfig


def check_teacher(
    args: "DistillationConfig", teacher: "TeacherLike | Mapping[str, TeacherLike] | None"
) -> "TeacherLike | Mapping[str, TeacherLike] | None":
    """Return the `teacher_model` of a trainer, or else the name in its Config, before a model is loaded.

    Raises:
        InputError: The argument and the Config name different teachers; the Config reads recorded log-probabilities
            instead of a teacher; the Config has options for loading a teacher
            by name and the teacher is given otherwise; or a section contradicts the Config, or sets a prompt or a
            tokenizer that the Config lacks.
    """
    path = args.teacher_model_name_or_path
    if teacher is None:
        teacher = path
    elif path is not None and teacher != path:
        problem = f"teacher_model_name_or_path is {path!r}, and the trainer is given another teacher_model"
        raise InputError(f"{problem}. Remove one of the two")
    if teacher is not None and recorded_column(args) is not None:
        raise InputError(conflict_message(Feature.RECORDED, Feature.TEACHER_MODEL))
    if args.teacher_model_init_kwargs and not isinstance(teacher, str):
        problem = "teacher_model_init_kwargs is only valid with a teacher that is given by name"
        raise InputError(f"{problem}. Remove it, or pass the name as teacher_model")

    for name, section in by_teacher(teacher).items():
        if not isinstance(section, TeacherSection):
            continue
        key = f"teacher_model[{name!r}]" if name else "teacher_model"
        for _, problem in (*teacher_section_problems(key, section), *teacher_problems(args, section, args.method)):
            raise InputError(problem)
        for option, value in (("prompt", section.prompt), ("tokenizer", section.own_tokenizer or None)):
            expected = by_teacher(getattr(args.teacher, option)).get(name)
            if value is not None and expected is None:
                problem = "rows are prepared before the teacher is known"
                raise InputError(f"{key}: {problem}. Set {option} in the option teacher of the Config too")
            if option == "prompt" and value not in (None, expected):
                problem = f"{key}: prompt is {value!r}, and teacher.prompt of the Config is {expected!r}"
                raise InputError(f"{problem}. Use the same template in both")
    return teacher
