"""The interface of a source of rollouts, and rollouts of the current policy.

on policy    sampled from the current policy in each optimizer step
replay       a share `fresh_fraction` of the prompts of each step on policy; the others are replaced by prompts of
             earlier steps with their rollouts
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
        """Return as many prompts with `num_generations` completions as there are rows.

        A source may replace a prompt by another one, as `Replay` does. The caller rejects empty completions.

        Args:
            rows: Prepared rows, which have a prompt.
            seed: The seed of the global generator, which the caller has set.
            max_new_tokens: Largest length of a completion. The caller truncates longer ones.
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
