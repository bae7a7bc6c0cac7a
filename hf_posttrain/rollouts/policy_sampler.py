"""Rollouts by the model that is trained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .completion import Completion

if TYPE_CHECKING:
    from .interface import SamplingInterface


class PolicySampler:
    """Samples with the policy itself, by the decoding of this package or by `generate` of transformers."""

    reports_logps = False  # the policy computes the same log-probabilities when it trains

    def __init__(self, trainer: "SamplingInterface") -> None:
        self.trainer = trainer

    def synchronize(self) -> None:
        """Do nothing: the policy has its own weights."""

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Raise NotImplementedError: the model is busy with training."""
        raise NotImplementedError

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt, from the global generator: see `generation.rollout.seeded`."""
        trainer = self.trainer
        options = self.trainer.rollout_options
        repeated = [prompt for prompt in prompts for _ in range(n)]
        sampled = trainer.generate(
            repeated,
            max_new_tokens,
            vocabulary=trainer.vocabulary,
            temperature=options.temperature or None,
            batch_size=options.sampler.batch_size,
        )
        completions = [*map(Completion, sampled)]
        return [completions[start : start + n] for start in range(0, len(completions), n)]


def synchronize(trainer: "SamplingInterface") -> None:
    """Give the sampler of a trainer the policy's weights: once per optimizer step, and each time outside training.

    All ranks call it.
    """
    step = trainer.state.global_step if trainer.is_in_train else None
    if step is None or step != trainer.synchronized:
        trainer.sampler.synchronize()
    trainer.synchronized = step
