"""Checks of a trainer's `teacher_model` against its Config."""

from typing import Any

from ..data.teacher_prompts import by_name
from ..errors import InputError
from ..models.config import TeacherSection
from .rules import teacher_problems, teacher_section_problems


def check_teacher(args: Any, given: Any) -> Any:
    """Return the `teacher_model` of a trainer, or the name that the Config has, before anything is loaded.

    Raises InputError for a section that says what the Config does not, or that goes with nothing that the Config wants,
    and for options of the Config for a teacher that is given otherwise.
    """
    name = args.teacher_model_name_or_path
    if given is None:
        given = name
    elif name is not None and given != name:
        problem = f"teacher_model_name_or_path is {name!r}, and the trainer is given another teacher_model"
        raise InputError(f"{problem}: leave one of the two out")
    if args.teacher_model_init_kwargs and not isinstance(given, str):
        problem = "teacher_model_init_kwargs is for a teacher that is given by name"
        raise InputError(f"{problem}: leave it out, or pass the name as teacher_model")
    for name, one in by_name(given).items():
        if not isinstance(one, TeacherSection):
            continue
        key = f"teacher_model[{name!r}]" if name else "teacher_model"
        for _, problem in (*teacher_section_problems(key, one), *teacher_problems(args, one)):
            raise InputError(problem)
        for name_of_option, value in (("prompt", one.prompt), ("tokenizer", one.own_tokenizer or None)):
            if value is not None and by_name(getattr(args.teacher, name_of_option)).get(name) is None:
                why = "rows are prepared before the teacher is known"
                raise InputError(f"{key}: {why}: set {name_of_option} in the option teacher of the Config too")
    return given
