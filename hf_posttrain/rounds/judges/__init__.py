"""Judges: each gives every answer of a question a score, of which more is better, or None where it could not judge.

functions   exact match, and functions of the user's
models      a reward model; a teacher's log-probability per token
server      a language model behind an OpenAI-compatible server, pairwise in both orders
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def make_judge(section: Any, tokenizer: Any = None, device: "torch.device | str" = "cpu") -> Any:
    """The judge that a JudgeSection names, a `question.Judge`. tokenizer: of the model whose answers are judged. Raises
    InputError where there is no such function, model or server.
    """
    from .functions import FunctionJudge
    from .models import RewardModel, TeacherJudge
    from .server import ServerJudge

    kinds: dict[str, Any] = {
        "exact_match": FunctionJudge,
        "function": FunctionJudge,
        "model": RewardModel,
        "teacher": TeacherJudge,
        "url": ServerJudge,
    }
    return kinds[section.by](section, tokenizer, device)
