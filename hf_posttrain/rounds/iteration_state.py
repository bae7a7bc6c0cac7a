"""The round that is under way: its rows, as checkpoints keep them, and what happens at its end."""

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from pyarrow import parquet
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..trainer.output_dir import write_json
from .config import number_of_rounds
from .iteration_log import SUMMARY_FILE
from .sample_and_judge import FOLDER

logger = logging.getLogger(__name__)


class Round(TrainerCallback):
    """The round that is under way, as checkpoints keep it; each ends with one, where any are saved."""

    required = False

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.number = -1
        self.rows: Any = None  # prepared, maybe none
        self.order: list[np.ndarray] = []  # of each of its steps, numbers of rows; none: they are yet to be dealt out
        self.tokens = np.zeros(0)  # of each row
        self.drawn: Path | None = None  # where the pieces of a round are that is being drawn
        self.told: list[dict[str, Any]] = []  # what rounds.json has of each round

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of the round, as a Parquet file, its number, and what rounds.json has of all rounds."""
        if self.rows is None:
            return {}
        file = io.BytesIO()
        parquet.write_table(self.rows.with_format("arrow")[:], file)
        rows = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return {"rows": rows, "round": self.number, "told": json.dumps(self.told)}

    def remove_pieces(self) -> None:
        """On each machine, but for those of a round that a lost server has kept from being drawn."""
        if self.trainer.args.local_process_index == 0:
            for left in Path(self.trainer.args.output_dir, FOLDER).glob("pieces-*"):
                if left != self.drawn:
                    shutil.rmtree(left, ignore_errors=True)

    def reset(self) -> None:
        """Start before the first round."""
        self.number = -1
        self.rows = None
        self.drawn = None
        self.told = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the round of a checkpoint."""
        if state:
            table = parquet.read_table(io.BytesIO(state["rows"].numpy().tobytes()))
            self.trainer.set_rows(state["round"], datasets.Dataset(datasets.table.InMemoryTable(table)))
            self.told = json.loads(state["told"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what a checkpoint tells of its rounds: the folder may be another, or have been that of a new run."""
        count = None if self.trainer.longest else self.trainer.section.count  # a probe has one step
        if count and (taken := number_of_rounds(self.trainer.section, state.max_steps)) < count:
            logger.warning("rounds.count: %d rounds, and not %d: the run has no more steps", taken, count)
        if args.should_save and not state.global_step:
            for file in Path(self.trainer.args.output_dir, FOLDER).glob("*.json*"):  # of an earlier run, but no pieces
                file.unlink()
        if args.should_save:
            summary = Path(self.trainer.args.output_dir, FOLDER, SUMMARY_FILE)
            if self.told:
                write_json(summary, self.told)
            else:
                summary.unlink(missing_ok=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save after the last step of a round over all prompts."""
        trainer = self.trainer
        saved = getattr(args.save_strategy, "value", args.save_strategy)
        ends = trainer.round_of(state.global_step) != trainer.round_of(state.global_step - 1)
        by_epoch = saved == "epoch" and state.global_step % len(trainer.windows) == 0  # which saves as well
        if trainer.section.count and ends and not by_epoch and saved not in ("no", "best"):
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the pieces on disk, whose answers the checkpoint has."""
        self.remove_pieces()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step of a round without rows changes nothing: without gradients torch's optimizers pass weights over."""
        if not len(self.rows):
            for weight in self.trainer.model.parameters():
                weight.grad = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing is left to be found again."""
        if not self.trainer.preemption.preempted:
            self.remove_pieces()
