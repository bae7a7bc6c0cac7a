"""Rollouts of the last optimizer steps, next to on-policy ones."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .completion import Completion, Rollout
from .interface import SamplingInterface
from .source import OnPolicy


class Replay(OnPolicy, TrainerCallback):
    """Samples rollouts of some prompts, and replaces the others by rollouts of earlier steps of all ranks.

    A checkpoint stores the rollouts of the last steps.
    """

    required = False

    @property
    def reports_logps(self) -> bool:
        """False: most rollouts were sampled by earlier policies."""
        return False

    def __init__(self, trainer: SamplingInterface) -> None:
        super().__init__(trainer)
        steps = trainer.args.rollouts.replay_steps
        self.windows: deque[list[Any]] = deque(maxlen=steps)  # (prompt, completions) as ids, of each step
        self.newest: list[Any] | None = None  # of the step that is not complete yet
        trainer.add_callback(self)
        trainer.stateful["replay"] = self

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Return as many rollouts as there are rows. Sample all of them while there are no earlier ones."""
        earlier = [rollout for window in self.windows for rollout in window]
        count = len(rows)
        if earlier:
            count = min(math.ceil(self.trainer.args.rollouts.fresh_fraction * len(rows)), len(rows))
        sampled = super().rollouts(rows[:count], seed, max_new_tokens)

        # random permutations: no rollout is chosen a second time before all were chosen
        missing = len(rows) - count
        orders = [torch.randperm(len(earlier)) for _ in range(-(-missing // len(earlier)) if earlier else 0)]
        chosen = torch.cat(orders)[:missing].tolist() if orders else []

        self.newest = gather_object(
            [([*rollout.prompt], [completion.ids for completion in rollout.completions]) for rollout in sampled]
        )
        replayed = [
            Rollout(prompt, [*map(Completion, completions)])
            for prompt, completions in (earlier[number] for number in chosen)
        ]
        return sampled + replayed

    def reset(self) -> None:
        """Start without rollouts."""
        self.windows.clear()
        self.newest = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts of the last steps."""
        return {"windows": list(self.windows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rollouts of a checkpoint."""
        self.windows.extend(state["windows"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rollouts of this step, which is done here so that a checkpoint never stores them twice."""
        if self.newest is not None:
            self.windows.append(self.newest)
        self.newest = None
