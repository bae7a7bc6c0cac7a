"""A reward beside OPD's teacher: rollouts of one prompt are graded, and each token of a better one is credited.

r - (mean r of the prompt's K rollouts), times coef, is added to A = ln p - ln q of each of its tokens
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import error_context
from ..generation.graders import load_grader, grade
from .completion import Rollout
from .options import RewardOptions


class Reward:
    """Grades rollouts by the option `reward`. Raises InputError if its function cannot be imported."""

    def __init__(self, options: RewardOptions):
        self.options = options
        with error_context("reward"):
            self.grader = load_grader(options.function)

    def grades(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]], rollouts: Sequence[Rollout]
    ) -> Tensor:
        """[prompts, K], of the rollouts of each row's prompt. Raises InputError where the function gives other than a
        finite number for each.
        """
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        texts = [
            (decode(one.prompt), decode(each.ids), decode(row["completion_ids"]) if row.get("completion_ids") else None)
            for row, one in zip(rows, rollouts, strict=True)
            for each in one.completions
        ]
        prompts, completions, references = map(list, zip(*texts, strict=True)) if texts else ([], [], [])
        found = grade(self.grader, f"reward: {self.options.function}", prompts, completions, references)
        return torch.tensor(found, dtype=torch.float).view(len(rows), -1)


def group_advantage(grades: Tensor) -> Tensor:
    """R less the mean of its prompt, [prompts, K]."""
    return grades - grades.mean(1, keepdim=True)
