"""Warns of what goes wrong while a run trains, and ends the run where stop_on says so.

Symptoms are looked for at each log. A loss that is not finite is found without waiting for the device at every step:
micro-batches are kept until their losses are read, so that the first bad one can be saved.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..scoring.head import check_promised_weights
from . import symptoms

logger = logging.getLogger(__name__)
MAX_PENDING = 32  # micro-batches that are kept until their losses are read: at each log, or when there are so many
# what is kept of a batch, not copied: some 32 bytes a token, where the rest would be ten times that
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


class RecordedMicroBatch(NamedTuple):
    """A micro-batch and its loss (a scalar), both still on the device."""

    step: int
    loss: Tensor
    batch: dict[str, Tensor]  # the fields named in `RECORDED_FIELDS`


class AnomalyMonitor(TrainerCallback):
    """Watches over a training run of `trainer`, a PostTrainer. All ranks decide together.

    A run that is ended saves nothing more and is not evaluated. To be added after whatever else asks for a checkpoint.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.stop_on = symptoms.as_names(trainer.args.stop_on)
        self._begin([])

    def _begin(self, logs: list[dict[str, float]]) -> None:
        self.stopped: str | None = None  # why the last run was ended, in a line
        self.warned: set[str] = set()
        self.history: list[Mapping[str, float]] = []  # logs, a bounded number of them
        self.pending: list[RecordedMicroBatch] = []
        self.broken: RecordedMicroBatch | None = None  # this rank's first micro-batch whose loss was not finite
        for log in logs:
            self._remember(log)

    # ---- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin anew, or with the logs of the checkpoint that training resumes from."""
        self._begin(state.log_history)

    def note(self, loss: Tensor, step: int, batch: MicroBatch) -> None:
        """Remember the loss (a scalar) of a micro-batch; every MAX_PENDING of them the device is waited for."""
        if self.broken is None:
            self.pending.append(
                RecordedMicroBatch(step, loss.detach(), {name: batch[name] for name in RECORDED_FIELDS if name in batch})
            )
        if len(self.pending) >= MAX_PENDING:
            self._read_losses()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Look at the losses since the last log and, on the first rank, for symptoms that were not told of yet."""
        if "loss" not in logs:
            return
        self._remember(state.log_history[-1])
        loss_types = symptoms.as_names(getattr(args, "loss_type", None))
        found = self._nonfinite()
        if state.is_world_process_zero:  # whose findings `_act` sends to all
            found |= symptoms.find_symptoms(self.history, self.trainer.method.symptoms, loss_types, self.warned)
        self._act(found, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """No checkpoint of broken weights, where these end the run: look before one that no log precedes."""
        # before an evaluation too: with save_strategy best, Trainer may save right after it
        saves = control.should_save or control.should_evaluate
        if self.stopped or ("nan" in self.stop_on and saves and not control.should_log):
            self._act(self._nonfinite(), state, control)

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at what no log came after."""
        self._act(self._nonfinite(), state, control)

    # ---- what they do

    def _remember(self, log: Mapping[str, Any]) -> None:
        if "loss" in log:
            rows = self.trainer.get_total_train_batch_size(self.trainer.args)
            self.history.append({**log, "rows": log["step"] * rows})
        # thinned now and then, so that a look costs the same after 100,000 logs as after 800
        if len(self.history) >= 4 * symptoms.HISTORY_ENDS:
            self.history = symptoms.thin_history(self.history)

    def _read_losses(self) -> None:
        """Forget the pending micro-batches, but for the first whose loss is not finite."""
        check_promised_weights()
        if self.pending:
            finite = torch.stack([noted.loss for noted in self.pending]).isfinite().tolist()
            self.broken = next((noted for noted, good in zip(self.pending, finite, strict=True) if not good), None)
            self.pending = []

    def _nonfinite(self) -> dict[str, str]:
        """The symptom `nan`, with its micro-batch saved, once. All ranks call it."""
        if "nan" in self.warned:
            return {}
        self._read_losses()
        accelerator = self.trainer.accelerator
        folder = Path(self.trainer.args.output_dir)
        first = torch.tensor([torch.inf if self.broken is None else float(self.broken.step)], device=accelerator.device)
        steps = accelerator.gather(first).tolist()
        if min(steps) == torch.inf:
            return {}
        # each rank that had it writes its own file, and all ranks hear which of them could not
        step = int(min(steps))
        own = accelerator.process_index
        files = {rank: folder / f"nonfinite_step_{step}_rank_{rank}.pt" for rank, s in enumerate(steps) if s == step}
        problem = self._save(files[own]) if own in files else None
        problems = {rank: said for rank, said in gather_object([(own, problem)]) if said}
        kept = ", ".join(str(file) for rank, file in files.items() if rank not in problems)
        where = [f"its batch is in {kept} (rows, text, tensors)"] if kept else []
        where += [f"{files[rank]} could not be written ({said})" for rank, said in problems.items()]
        return {
            "nan": f"the loss was not finite at step {step}; {'; '.join(where)}. If its batch looks sound, the "
            "step before broke the weights: lower train.learning_rate, or set train.max_grad_norm."
        }

    def _save(self, path: Path) -> str | None:
        """Write `broken` for `torch.load`: step, loss, rows (their `index` in the prepared data, -1 where it has none),
        text (of each row of tokens) and the tensors themselves. Returns, in a line, why it could not be kept.
        """
        assert self.broken is not None
        step, loss, batch = self.broken
        try:
            batch = {name: tensor.cpu() for name, tensor in batch.items()}
            real = [ids[weights > 0] for ids, weights in zip(batch["input_ids"], batch["router_weights"], strict=True)]
            text = self.trainer.tokenizer.batch_decode(real)
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = batch["index"].tolist()
            torch.save({"step": step, "loss": loss.item(), "rows": rows, "text": text, "batch": batch}, path)
        except (OSError, RuntimeError) as error:  # a full disk, torch's writer; not raised, since other ranks wait
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return str(getattr(error, "strerror", None) or error).partition("\n")[0]
        return None

    def _act(self, found: dict[str, str], state: TrainerState, control: TrainerControl) -> None:
        """Say what is new, and stop where that was asked for."""
        [found] = broadcast_object_list([found])
        for name, message in found.items():
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
