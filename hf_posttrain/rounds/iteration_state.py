"""State of the current round: its rows, stored in checkpoints, and actions at its end."""

import io
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
from pyarrow import parquet
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..trainer.output_dir import write_json
from .config import number_of_rounds
from .iteration_log import SUMMARY_FILE
from .sample_and_judge import FOLDER

if TYPE_CHECKING:
    from .iterative_trainer import InRounds

logger = logging.getLogger(__name__)


class Round(TrainerCallback):
    """The current round, stored in checkpoints. Each round ends with a checkpoint, if the run saves any."""

    required = False

    def __init__(self, trainer: "InRounds") -> None:
        self.trainer = trainer
        self.number = -1
        self.rows: Any = None  # prepared rows, possibly none
        self.order: list[np.ndarray] = []  # numbers of the rows of each step; empty until rows are assigned to steps
        self.tokens = np.zeros(0)  # of each row
        self.folder_in_progress: Path | None = None  # chunk files of a round that is being sampled
        self.summaries: list[dict[str, Any]] = []  # entries of rounds.json

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of the round, as a Parquet file, its number, and the entries of rounds.json."""
        if self.rows is None:
            return {}
        file = io.BytesIO()
        parquet.write_table(self.rows.with_format("arrow")[:], file)
        rows = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return {"rows": rows, "round": self.number, "told": json.dumps(self.summaries)}

    def remove_chunk_files(self) -> None:
        """Remove chunk files on each machine, unless a lost server has interrupted their round."""
        if self.trainer.args.local_process_index == 0:
            for folder in Path(self.trainer.args.output_dir, FOLDER).glob("pieces-*"):
                if folder != self.folder_in_progress:
                    shutil.rmtree(folder, ignore_errors=True)

    def reset(self) -> None:
        """Start before the first round."""
        self.number = -1
        self.rows = None
        self.folder_in_progress = None
        self.summaries = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the round of a checkpoint."""
        if state:
            table = parquet.read_table(io.BytesIO(state["rows"].numpy().tobytes()))
            self.trainer.set_rows(state["round"], datasets.Dataset(datasets.table.InMemoryTable(table)))
            self.summaries = json.loads(state["told"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the entries of the checkpoint: the folder may be another, or have files of another run."""
        count = None if self.trainer.use_longest_answers else self.trainer.section.count  # a probe has one step
        if count and (possible := number_of_rounds(self.trainer.section, state.max_steps)) < count:
            message = "rounds.count: the run has %d rounds instead of %d, because it has no more steps"
            logger.warning(message, possible, count)
        if args.should_save and not state.global_step:
            for file in Path(self.trainer.args.output_dir, FOLDER).glob("*.json*"):  # of an earlier run, no chunk files
                file.unlink()
        if args.should_save:
            summary_file = Path(self.trainer.args.output_dir, FOLDER, SUMMARY_FILE)
            if self.summaries:
                write_json(summary_file, self.summaries)
            else:
                summary_file.unlink(missing_ok=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save after the last step of a round over all prompts."""
        trainer = self.trainer
        strategy = getattr(args.save_strategy, "value", args.save_strategy)
        is_last = trainer.round_of(state.global_step) != trainer.round_of(state.global_step - 1)
        by_epoch = strategy == "epoch" and state.global_step % len(trainer.windows) == 0  # which saves as well
        if trainer.section.count and is_last and not by_epoch and strategy not in ("no", "best"):
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove chunk files, because the checkpoint has their answers."""
        self.remove_chunk_files()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the step of a round without rows change nothing: optimizers of torch skip weights without gradient."""
        if not len(self.rows):
            for weight in self.trainer.model.parameters():
                weight.grad = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove chunk files, unless the run was preempted and will resume."""
        if not self.trainer.preemption.preempted:
            self.remove_chunk_files()
