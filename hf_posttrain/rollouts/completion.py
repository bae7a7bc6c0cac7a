"""A completion, a prompt with its completions, and the interface of what samples them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """The answer to a prompt."""

    ids: list[int]  # up to and with the first terminal id
    logps: list[float] | None = None  # of `ids`, under the distribution that they were sampled from; None: not reported
    finished: bool = True  # ends with a terminal id


@dataclass(frozen=True)
class Rollout:
    """A prompt and its completions."""

    prompt: list[int]
    completions: list[Completion]
    teacher: list[dict[str, list[Any]]] | None = None
    """For each completion what the teacher said about its tokens: `teacher_ids`, `teacher_logps` and `teacher_own`."""


class Sampler(Protocol):
    """Samples completions from the policy."""

    reports_logps: bool
    """Whether completions have log-probabilities, because another program than the trainer samples them."""

    def synchronise(self) -> None:
        """Sample from the policy's current weights from now on. All ranks call it."""
        ...

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Begin to sample what a later `sample` with the same arguments returns; only a server can."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt. All ranks call it, each with its own prompts.

        seed: on which the completions depend. The policy's own decoding draws from the global generator, which the
        caller has seeded with it.
        """
        ...


def is_finished(ids: Sequence[int], terminal_ids: Sequence[int]) -> bool:
    """Return whether a completion ends with a terminal id."""
    return bool(ids) and ids[-1] in terminal_ids
