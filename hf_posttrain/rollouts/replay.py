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
    """Samples for some prompts, and takes the rollouts of earlier steps, of all ranks, in place of the others.

    A checkpoint stores them.
    """

    required = False

    @property
    def reports_logps(self) -> bool:
        """False: most rollouts are of another policy."""
        return False

    def __init__(self, trainer: SamplingInterface):
        super().__init__(trainer)
        steps = trainer.args.rollouts.replay_steps
        self.windows: deque[list[Any]] = deque(maxlen=steps)  # (prompt, completions), as ids
        self.newest: list[Any] | None = None  # of a step that is not done yet
        trainer.add_callback(self)
        trainer.stateful["replay"] = self

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Return as many rollouts as there are rows; sample all of them while there are no earlier ones."""
        earlier = [kept for window in self.windows for kept in window]
        count = len(rows)
        if earlier:
            count = min(math.ceil(self.trainer.args.rollouts.fresh_fraction * len(rows)), len(rows))
        sampled = super().rollouts(rows[:count], seed, max_new_tokens)
        wanted = len(rows) - count  # none a second time before all were chosen
        orders = [torch.randperm(len(earlier)) for _ in range(-(-wanted // len(earlier)) if earlier else 0)]
        chosen = torch.cat(orders)[:wanted].tolist() if orders else []
        self.newest = gather_object([([*one.prompt], [each.ids for each in one.completions]) for one in sampled])
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
        """Keep the rollouts of this step: a checkpoint that is saved during a step does not have them twice."""
        if self.newest is not None:
            self.windows.append(self.newest)
        self.newest = None
