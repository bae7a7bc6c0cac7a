"""Options of the teacher of a method. This module can be imported without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..options import option
from ..trainer.limits import COUNT
from ..trainer.option_group import OptionGroup, OptionKind

if TYPE_CHECKING:
    from ..trainer.config import PostTrainConfig


@dataclass(frozen=True)
class TeacherOptions(OptionKind):
    """Options for the comparison of student and teacher, and for the input of the teacher."""

    selector: ClassVar = ""
    limits: ClassVar = {"top_k": COUNT}

    top_k: int | None = option(
        None,
        "Number of most likely tokens of the teacher that are compared with the student. None means the whole "
        "distribution.",
    )
    top_k_remainder: str = option(
        "tail",
        "Treatment of the tokens outside top_k: tail counts them as one token, which gives a lower bound of the "
        "divergence; residual estimates their part of reverse_kl on rollouts from the sampled token, without bias; "
        "generalized ignores them, and compares the others by the generalized forward_kl or reverse_kl.",
    )
    precompute: bool = option(
        False,
        "Score all rows once before training, and cache the top_k tokens of the teacher on disk, or without top_k its "
        "hidden states, from which its head computes the whole distribution. Rollouts must be frozen.",
    )
    merge_eos: bool | None = option(
        None,
        "Count all EOS ids of student and teacher as one outcome in the divergence. None means true for rollouts, "
        "and false for rows of data.",
    )
    prompt: str | dict[str, str] | None = option(
        None,
        "Jinja template of the prompt of the teacher, with the columns of the row and `prompt` as variables. With "
        "several teachers, a mapping by name. In a recipe, set prompt in the teacher section instead.",
    )
    tokenizer: str | dict[str, str] | None = option(
        None,
        "Name or folder of the tokenizer of the teacher, if it differs from that of the student, so that texts are "
        "aligned. In a recipe, set own_tokenizer in the teacher section instead.",
    )
    names: list[str] | None = option(
        None,
        "Names of several teachers. The column `teacher` of a row has one of them. In a recipe, write the section "
        "teachers instead.",
    )
    logprobs_column: str | None = option(
        None,
        "Column of the rows with the log-probabilities of a teacher, recorded by vLLM with return_tokens_as_token_ids. "
        "They replace a teacher model for the answers of the rows. Requires top_k.",
    )


TEACHER = OptionGroup(TeacherOptions)
COMPARISON_OPTIONS = ("top_k", "top_k_remainder", "precompute", "merge_eos", "logprobs_column")
"""Options for the comparison of student and teacher, which a recipe may have in its teacher section."""


def precomputes(config: "PostTrainConfig") -> bool:
    """Return whether the teacher scores the rows once, before training."""
    teacher = getattr(config, "teacher", None)
    return teacher is not None and teacher.precompute


def caches_hidden_states(config: "PostTrainConfig") -> bool:
    """Return whether the scores are hidden states, so that the head of the teacher stays in memory."""
    return precomputes(config) and config.teacher.top_k is None  # type: ignore[attr-defined]
