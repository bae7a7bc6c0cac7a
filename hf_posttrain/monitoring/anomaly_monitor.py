"""Warnings about anomalies in a training run, which end the run if `stop_on` names them.

Symptoms are checked at each log. A non-finite loss is found without waiting for the device at every step: micro-batches
are kept until their losses are read, so that the first one with a non-finite loss can be saved.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..scoring.head import check_score_weights
from . import symptoms

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface

logger = logging.getLogger(__name__)
MAX_PENDING = 32
"""Maximum number of micro-batches that are kept until their losses are read, which also happens at each log."""
RECORDED_FIELDS = (
    "index",
    "row_weights",
    "label",
    "ref_logps",
    "shift",
    "input_ids",
    "position_ids",
    "shift_labels",
    "router_weights",
)
"""Fields of a batch that are kept, without a copy: about 32 bytes a token. The others would take ten times as much."""


class RecordedMicroBatch(NamedTuple):
    """A micro-batch and its loss (a scalar), both on the device."""

    step: int
    loss: Tensor
    batch: dict[str, Tensor]
    """The fields named in `RECORDED_FIELDS`."""


class AnomalyMonitor(TrainerCallback):
    """Callback that checks a training run for anomalies. All ranks decide together.

    A run that is ended saves nothing more and is not evaluated. Add this callback after all callbacks that request a
    checkpoint.

    Args:
        trainer: The trainer, a PostTrainer.
    """

    def __init__(self, trainer: "TrainerInterface") -> None:
        self.trainer = trainer
        self.stop_on = symptoms.as_list(trainer.args.stop_on)
        self._reset([])

    def _reset(self, logs: list[dict[str, float]]) -> None:
        self.stopped: str | None = None  # why the last run was ended, in one line
        self.warned: set[str] = set()
        self.history: list[Mapping[str, float]] = []  # a bounded number of logs
        self.pending: list[RecordedMicroBatch] = []
        self.broken: RecordedMicroBatch | None = None  # this rank's first micro-batch with a non-finite loss
        for log in logs:
            self._remember(log)

    # ---- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reset the state, with the logs of the checkpoint from which training resumes."""
        self._reset(state.log_history)

    def record(self, loss: Tensor, step: int, batch: MicroBatch) -> None:
        """Record the loss (a scalar) of a micro-batch. Every MAX_PENDING micro-batches, this waits for the device."""
        if self.broken is None:
            fields = {name: batch[name] for name in RECORDED_FIELDS if name in batch}
            self.pending.append(RecordedMicroBatch(step, loss.detach(), fields))
        if len(self.pending) >= MAX_PENDING:
            self._read_losses()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the losses since the last log and, on the first rank, the symptoms without an earlier warning."""
        if logs is None or "loss" not in logs:
            return
        self._remember(state.log_history[-1])
        loss_types = symptoms.as_list(getattr(args, "loss_type", None))
        messages = self._nonfinite()
        if state.is_world_process_zero:  # `_act` sends its messages to all ranks
            messages |= symptoms.find_symptoms(self.history, self.trainer.method.symptoms, loss_types, self.warned)
        self._act(messages, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the losses before a checkpoint without a log, so that no broken weights are saved if `nan` stops."""
        # also before an evaluation: with save_strategy best, Trainer may save right after it
        saves = control.should_save or control.should_evaluate
        if self.stopped or ("nan" in self.stop_on and saves and not control.should_log):
            self._act(self._nonfinite(), state, control)

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the losses after the last log."""
        self._act(self._nonfinite(), state, control)

    # ---- implementation

    def _remember(self, log: Mapping[str, Any]) -> None:
        if "loss" in log:
            rows = self.trainer.get_total_train_batch_size(self.trainer.args)
            self.history.append({**log, "rows": log["step"] * rows})
        # thinned regularly, so that a check costs the same after 100,000 logs as after 800
        if len(self.history) >= 4 * symptoms.HISTORY_ENDS:
            self.history = symptoms.thin_history(self.history)

    def _read_losses(self) -> None:
        """Discard the pending micro-batches except for the first with a non-finite loss."""
        check_score_weights()
        if self.pending:
            finite = torch.stack([recorded.loss for recorded in self.pending]).isfinite().tolist()
            pairs = zip(self.pending, finite, strict=True)
            self.broken = next((recorded for recorded, is_finite in pairs if not is_finite), None)
            self.pending = []

    def _nonfinite(self) -> dict[str, str]:
        """Return the symptom `nan`, once, after its micro-batch has been saved. All ranks call it."""
        if "nan" in self.warned:
            return {}
        self._read_losses()
        accelerator = self.trainer.accelerator
        folder = Path(self.trainer.args.output_dir)
        first = torch.tensor([torch.inf if self.broken is None else float(self.broken.step)], device=accelerator.device)
        steps = accelerator.gather(first).tolist()
        if min(steps) == torch.inf:
            return {}

        # each rank with a non-finite loss writes its own file, and all ranks get the problems of all files
        step = int(min(steps))
        own_rank = accelerator.process_index
        files = {rank: folder / f"nonfinite_step_{step}_rank_{rank}.pt" for rank, s in enumerate(steps) if s == step}
        own_problem = self._save(files[own_rank]) if own_rank in files else None
        problems = {rank: problem for rank, problem in gather_object([(own_rank, own_problem)]) if problem}
        saved = ", ".join(str(file) for rank, file in files.items() if rank not in problems)
        places = [f"its batch is in {saved} (rows, text, tensors)"] if saved else []
        places += [f"{files[rank]} could not be written ({problem})" for rank, problem in problems.items()]
        return {
            "nan": f"the loss was not finite at step {step}; {'; '.join(places)}. If its batch looks correct, the "
            "previous step broke the weights. Lower train.learning_rate, or set train.max_grad_norm."
        }

    def _save(self, path: Path) -> str | None:
        """Write `broken` for `torch.load`, and return the problem in one line if that fails.

        The file has the step, the loss, rows (their `index` in the prepared data, -1 for rows without one), text (of
        each row of tokens) and the tensors.
        """
        assert self.broken is not None
        step, loss, batch = self.broken
        try:
            batch = {name: tensor.cpu() for name, tensor in batch.items()}
            ids = [ids[weights > 0] for ids, weights in zip(batch["input_ids"], batch["router_weights"], strict=True)]
            text = self.trainer.tokenizer.batch_decode(ids)
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = batch["index"].tolist()
            torch.save({"step": step, "loss": loss.item(), "rows": rows, "text": text, "batch": batch}, path)
        except (OSError, RuntimeError) as error:  # a full disk, torch's writer; not raised, since other ranks wait
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return str(getattr(error, "strerror", None) or error).partition("\n")[0]
        return None

    def _act(self, messages: dict[str, str], state: TrainerState, control: TrainerControl) -> None:
        """Log the new messages of the first rank by the names of their symptoms, and stop if `stop_on` names one."""
        [messages] = broadcast_object_list([messages])
        for name, message in messages.items():
            if name in self.warned:
                continue
            self.warned.add(name)
            if name in self.stop_on and self.stopped is None:
                self.stopped = f"stopped at step {state.global_step} (stop_on: {name}): {message}"
            if state.is_world_process_zero:
                logger.warning("%s", self.stopped if name in self.stop_on else message)
        if self.stopped:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
