"""The interface of a source of rollouts, and rollouts of the current policy.

on policy    sampled from the current policy in each optimizer step
replay       a share `fresh_fraction` of each window on policy, and rollouts of the last steps in place of the other
             prompts (LSPD)
frozen       sampled once, from the policy before training, and cached on disk (arXiv 2610.11291)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..scoring.layouts import Prompt
from .completion import Rollout

if TYPE_CHECKING:
    from .interface import SamplingInterface


class RolloutSource(Protocol):
    """Provides the rollouts of prompts."""

    @property
    def reports_logps(self) -> bool:
        """Whether its completions have log-probabilities."""
        ...

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Return one rollout for each prepared row: its prompt with `num_generations` completions, none of them empty.

        The caller has seeded the global generator with `seed`, and truncates completions to max_new_tokens.
        """
        ...


class OnPolicy:
    """Samples from the current policy."""

    def __init__(self, trainer: "SamplingInterface") -> None:
        self.trainer = trainer

    @property
    def reports_logps(self) -> bool:
        """Whether its completions have log-probabilities."""
        return bool(self.trainer.sampler.reports_logps)

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Sample `num_generations` completions of the prompt of each row."""
        prompts = [Prompt.from_row(row) for row in rows]
        n = self.trainer.args.num_generations
        sampled = self.trainer.sampler.sample(prompts, n, max_new_tokens, seed)
        return [Rollout(prompt, completions) for prompt, completions in zip(prompts, sampled, strict=True)]
