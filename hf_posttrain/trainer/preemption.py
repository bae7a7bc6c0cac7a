"""SIGTERM or Ctrl-C to any rank: all ranks finish the optimizer step, or the piece of a round that they draw, save a
checkpoint and leave `train`.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .interface import TrainerInterface

logger = logging.getLogger(__name__)


class Preemption(TrainerCallback):
    """Looks after each step, and between pieces of a round, whether any rank was asked to stop.

    happened: was the last run stopped? interrupted: when Ctrl-C was pressed first, or 0; `train` then ends in a
    KeyboardInterrupt.
    """

    def __init__(self, trainer: TrainerInterface):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.stop_requested = self.preempted = False
        self.interrupt_time = 0.0
        self.group: Any = None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Around a training; Python lets only the main thread listen."""
        self.stop_requested = False
        self.preempted = False
        self.interrupt_time = 0.0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGTERM: lambda *_: setattr(self, "stop_requested", True), signal.SIGINT: self._interrupt}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, *_: Any) -> None:
        """Ask once; pressed again it ends the run at once. A launcher sends each Ctrl-C a second time."""
        if self.interrupt_time and time.monotonic() - self.interrupt_time > 2:
            raise KeyboardInterrupt
        if not self.interrupt_time and self.accelerator.is_main_process:
            os.write(2, b"\nCtrl-C: saving after this step; again to stop at once\n")  # a logger may be in use just now
        self.stop_requested = True
        self.interrupt_time = self.interrupt_time or time.monotonic()

    def should_stop(self, state: TrainerState, control: TrainerControl) -> bool:
        """Whether any rank was asked to stop, which ends training. All ranks call it, to stop together."""
        asked = self.stop_requested
        # the signal reaches ranks at different moments; they agree on the hosts alone, so no device is waited for
        if self.accelerator.num_processes > 1:
            self.group = self.group or dist.new_group(backend="gloo")
            most = torch.tensor(float(asked))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            asked = most.item() > 0
        if asked:
            self.preempted = control.should_training_stop = True
            how = "Ctrl-C" if self.interrupt_time else "SIGTERM"
            what = f"saving step {state.global_step} and stopping" if state.global_step else "stopping before a step"
            logger.warning("%s: %s", how, what)
        return asked

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save, and evaluate nothing, since time is short."""
        if self.should_stop(state, control):
            control.should_save = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget the best checkpoint in memory, so that HF neither loads it now nor deletes the new one in its favour;
        the trainer_state.json on disk still names it.
        """
        if self.preempted:
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """This is the middle of an epoch: nothing that is due at its end. Save what no step has saved, as between
        steps.
        """
        if self.preempted:
            control.should_save = bool(state.global_step) and self.trainer.saved_step != state.global_step
            control.should_evaluate = False
            if not control.should_save:
                state.best_model_checkpoint = None
