"""What KD and OPD have in common: options for teachers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..data.teacher_rows import by_name
from ..errors import InputError
from ..models.section import TeacherSection
from ..trainer.config import PostTrainConfig
from .rules import section_problems, teacher_problems


@dataclass
class DistillationConfig(PostTrainConfig):
    """Options of methods with a teacher."""

    of_python: ClassVar = (
        *PostTrainConfig.of_python, "teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs",
    )  # fmt: skip
    """Fields that are no keys of a recipe."""
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
    teacher_model_name_or_path: str | None = None
    """Name or folder of the teacher for a trainer without `teacher_model`. A recipe has it in its teacher section."""
    teacher_model_revision: str | None = None
    """Revision of the teacher on the hub: only main; download any other, and give that folder."""
    teacher_model_init_kwargs: dict[str, Any] | None = None
    """Arguments of `from_pretrained` for a teacher that is given by name. A recipe has them in its teacher section."""

    def __post_init__(self):
        super().__post_init__()
        if self.teacher_model_revision not in (None, "main"):
            problem = f"teacher_model_revision={self.teacher_model_revision!r} cannot be loaded by name"
            raise InputError(f"{problem}: download that revision, and give its folder as teacher")


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
        for _, problem in (*section_problems(key, one), *teacher_problems(args, one)):
            raise InputError(problem)
        for option, value in (("teacher_prompt", one.prompt), ("teacher_tokenizer", one.own_tokenizer or None)):
            if value is not None and by_name(getattr(args, option)).get(name) is None:
                why = "rows are prepared before the teacher is known"
                raise InputError(f"{key}: {why}: set {option} of the Config too")
    return given
