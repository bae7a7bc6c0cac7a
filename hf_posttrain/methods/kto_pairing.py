"""What KTO needs besides its loss: a partner of each row, and BCO's running mean of rewards."""

import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from ..errors import InputError
from ..trainer.loss_units import sum_and_count

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
        logger.warning("%s: one prompt holds %d of %d rows; %d of them are paired with a random row of another prompt",
                       name, sizes.max(), len(rows), clash.sum())  # fmt: skip
        others = np.flatnonzero(group != sizes.argmax())
        partner[clash] = random.choice(others, clash.sum())
    return partner


class RunningMean(TrainerCallback, ExportableState):
    """BCO's delta: the mean reward of every row trained so far, on all ranks; it moves once a window and is saved."""

    def __init__(self, accelerator: Any) -> None:
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take in what the window added, over all ranks."""
        if self.pending:
            added = self.accelerator.reduce(torch.stack(self.pending).sum(0), "sum")
            self.total, self.pending = self.total.to(added.device) + added, []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"total": self.total.tolist()}}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go back to the mean of the best weights, where they were loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._take(TrainerState.load_from_json(str(Path(state.best_model_checkpoint, "trainer_state.json"))))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or with the mean of the checkpoint that training resumes from."""
        self._take(state)

    def _take(self, state: Any) -> None:
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        kept = kept[-1] if isinstance(kept, list) else kept
        total = kept["attributes"]["total"] if kept else [0.0, 0.0]
        self.total, self.pending = torch.tensor(total, dtype=torch.float64), []
