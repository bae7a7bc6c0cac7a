"""Judges, which score the answers to a question. A higher score is a better answer, and None an answer not judged.

functions   exact match, and functions of the user
models      a reward model, and a teacher's log-probability per token
server      a language model on an OpenAI-compatible server, which compares answers in pairs, in both orders
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .config import JudgeSection
    from .question import Judge


def make_judge(
    section: "JudgeSection", tokenizer: "PreTrainedTokenizerBase | None" = None, device: "torch.device | str" = "cpu"
) -> "Judge":
    """Return the judge of a section.

    Args:
        section: The section.
        tokenizer: Tokenizer of the model whose answers are judged.
        device: Device of a judge that is a model.

    Raises:
        InputError: There is no such function, model or server.
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
