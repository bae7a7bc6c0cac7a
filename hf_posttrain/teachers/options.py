"""Options of the teacher of a method. Importable without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..options import option
from ..trainer.limits import COUNT
from ..trainer.option_group import OptionGroup, OptionKind

if TYPE_CHECKING:
    from ..trainer.config import PostTrainConfig


@dataclass(frozen=True)
class TeacherOptions(OptionKind):
    """How student and teacher are compared, and what the teacher reads."""

    selector: ClassVar = ""
    limits: ClassVar = {"top_k": COUNT}

    top_k: int | None = option(
        None,
        "Number of the teacher's most likely tokens that are compared with the student. By default its whole "
        "distribution.",
    )
    top_k_remainder: str = option(
        "tail",
        "What stands for the tokens beyond top_k: tail (their total probability, a lower bound of the divergence) or "
        "residual (the sampled token, an unbiased estimate of reverse_kl on rollouts).",
    )
    precompute: bool = option(
        False,
        "Score all rows once before training, and keep the teacher's top_k tokens on disk. Rollouts must be frozen.",
    )
    merge_eos: bool | None = option(
        None,
        "Count all EOS ids of student and teacher as one outcome in the divergence, if there are several. By default "
        "true for rollouts, and false for data, whose own EOS id the cross-entropy trains in any case.",
    )
    prompt: str | dict[str, str] | None = option(
        None,
        "Jinja template of the prompt that the teacher reads, over the columns of the row and `prompt`. Of several "
        "teachers by name. A recipe has it in the teacher section.",
    )
    tokenizer: str | dict[str, str] | None = option(
        None,
        "Name or folder of the teacher's tokenizer if it differs from the student's: texts are aligned. A recipe has "
        "own_tokenizer in the teacher section.",
    )
    names: list[str] | None = option(
        None,
        "Names of several teachers, of which each row has one in its column `teacher`. A recipe has the section "
        "teachers.",
    )


TEACHER = OptionGroup(TeacherOptions)
COMPARISON_OPTIONS = ("top_k", "top_k_remainder", "precompute", "merge_eos")
"""Options of how student and teacher are compared, which a recipe may have in its teacher section."""


def precomputes(config: "PostTrainConfig") -> bool:
    """Return whether a Config asks for the teacher's scores once, before training."""
    teacher = getattr(config, "teacher", None)
    return teacher is not None and teacher.precompute
