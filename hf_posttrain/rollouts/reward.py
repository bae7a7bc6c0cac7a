"""A reward in addition to the teacher of OPD: rollouts of a prompt are graded, and tokens of the better ones credited.

coef * (r - mean r of the prompt's K rollouts) is added to the advantage A = ln p - ln q of each token of a rollout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import error_context
from ..generation.graders import grade, load_grader
from .completion import Rollout
from .options import RewardOptions


class Reward:
    """Grades rollouts by the option `reward`. Raises InputError if its function cannot be imported."""

    def __init__(self, options: RewardOptions) -> None:
        self.options = options
        with error_context("reward"):
            self.grader = load_grader(options.function)

    def grades(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]], rollouts: Sequence[Rollout]
    ) -> Tensor:
        """Return the grades of the rollouts of each row's prompt, [prompts, K].

        Raises InputError unless the function returns a finite number for each rollout.
        """

        def decode(ids: list[int]) -> Any:
            return tokenizer.decode(ids, skip_special_tokens=True)

        texts = [
            (
                decode(rollout.prompt),
                decode(completion.ids),
                decode(row["completion_ids"]) if row.get("completion_ids") else None,
            )
            for row, rollout in zip(rows, rollouts, strict=True)
            for completion in rollout.completions
        ]
        prompts, completions, references = map(list, zip(*texts, strict=True)) if texts else ([], [], [])
        grades = grade(self.grader, f"reward: {self.options.function}", prompts, completions, references)
        return torch.tensor(grades, dtype=torch.float).view(len(rows), -1)


def group_advantage(grades: Tensor) -> Tensor:
    """Return the grades minus the mean of their prompt, [prompts, K]."""
    return grades - grades.mean(1, keepdim=True)
