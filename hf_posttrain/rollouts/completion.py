"""A completion, a prompt with its completions, and the interface of a sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """The answer to a prompt."""

    ids: list[int]  # up to and including the first terminal id
    logps: list[float] | None = None  # of `ids`, under the distribution they were sampled from; None: not reported


@dataclass(frozen=True)
class Rollout:
    """A prompt and its completions."""

    prompt: list[int]
    completions: list[Completion]
    teacher: list[dict[str, Any]] | None = None
    """Teacher's scores of the tokens of each completion, as columns of `teachers.columns`."""


class Sampler(Protocol):
    """Samples completions from the policy."""

    reports_logps: bool
    """Whether completions have log-probabilities, because another program than the trainer samples them."""

    def synchronize(self) -> None:
        """Load the current weights of the policy for all later samples. All ranks call it."""
        ...

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Begin to sample what a later `sample` with the same arguments returns. Only a server supports it."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt. All ranks call it, each with its own prompts.

        Args:
            prompts: Token ids of the prompts.
            n: Number of completions per prompt.
            max_new_tokens: Largest number of tokens of a completion.
            seed: Numbers that determine the completions. The decoding of the policy itself uses the global generator,
                which the caller has seeded with them.
        """
        ...
