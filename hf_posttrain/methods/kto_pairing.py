"""What KTO needs besides its loss: a partner of each row, and BCO's running mean of rewards."""

import logging
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import InputError
from ..trainer import stateful
from ..trainer.loss_output import sum_and_count

logger = logging.getLogger(__name__)


def find_partners(rows: datasets.Dataset, seed: int, name: str = "train") -> np.ndarray:
    """For each row the number of a row with another prompt: a seeded permutation where that is possible, [rows].

    Rows of one prompt stand together in a shuffled order that is then shifted by the largest group: no row meets its
    own prompt as long as no prompt holds over half the rows. Raises InputError if there is a single distinct prompt.
    """
    _, group, sizes = np.unique(rows["prompt_key"][:], return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        raise InputError(f"{name}: all {len(rows)} rows have the same prompt; KTO's KL estimate needs another one")
    random = np.random.default_rng(seed)
    order = np.lexsort((random.permutation(len(group)), random.permutation(len(sizes))[group]))
    partner = np.empty(len(group), dtype=np.int64)
    partner[order] = np.roll(order, -int(sizes.max()))
    clash = group[partner] == group
    if clash.any():
        logger.warning(
            "%s: one prompt holds %d of %d rows; %d of them are paired with a random row of another prompt",
            name,
            sizes.max(),
            len(rows),
            clash.sum(),
        )
        others = np.flatnonzero(group != sizes.argmax())
        partner[clash] = random.choice(others, clash.sum())
    return partner


class RunningMean(TrainerCallback):
    """BCO's delta: the mean reward of every row trained so far, on all ranks; it moves once a window and is saved."""

    required = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.total = torch.zeros(2, dtype=torch.float64)
        self.pending: list[Tensor] = []

    @property
    def mean(self) -> Tensor:
        """The mean so far, a scalar; 0 before the first window."""
        return self.total[0] / self.total[1].clamp(min=1)

    def add(self, rewards: Tensor, weights: Tensor) -> None:
        """Remember the rewards of a micro-batch for the next window, [B] each; weight 0 leaves a row out."""
        self.pending.append(sum_and_count(rewards.detach(), weights))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take in what the window added, over all ranks."""
        if self.pending:
            added = self.accelerator.reduce(torch.stack(self.pending).sum(0), "sum")
            self.total = self.total.to(added.device) + added
            self.pending = []

    def reset(self) -> None:
        """Start at 0."""
        self.total = torch.zeros(2, dtype=torch.float64)
        self.pending = []

    def state_dict(self) -> dict[str, Any]:
        """Return the sum of rewards and their number."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the mean of a checkpoint."""
        self.total = state["total"]
        self.pending = []

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Return to the mean of the best weights, where they were loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.reset()
            if best := stateful.read(state.best_model_checkpoint).get("mean_reward"):
                self.load_state_dict(best)
