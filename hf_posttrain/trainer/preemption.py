"""Handling of SIGTERM and Ctrl-C.

After a signal to any rank, all ranks finish the optimizer step, or the chunk of a round that they sample, save a
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
    """Callback that stops training after a signal. It is queried after each step and between the chunks of a round.

    Attributes:
        stop_requested: Whether this rank has received a signal.
        preempted: Whether a signal stopped the last run.
        interrupt_time: Time of the first Ctrl-C, or 0. If it is not 0, `train` ends in a KeyboardInterrupt.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.stop_requested = False
        self.preempted = False
        self.interrupt_time = 0.0
        self.group: Any = None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals during training. Python supports this only in the main thread."""
        self.stop_requested = False
        self.preempted = False
        self.interrupt_time = 0.0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGTERM: self._terminate, signal.SIGINT: self._interrupt}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _terminate(self, *_: object) -> None:
        """Request a stop after SIGTERM."""
        self.stop_requested = True

    def _interrupt(self, *_: object) -> None:
        """Request a stop after the first Ctrl-C, and end the run immediately after another one.

        A launcher sends each Ctrl-C twice, so one within two seconds of the first is ignored.
        """
        if self.interrupt_time and time.monotonic() - self.interrupt_time > 2:
            raise KeyboardInterrupt
        if not self.interrupt_time and self.accelerator.is_main_process:
            os.write(2, b"\nCtrl-C: saving after this step; again to stop at once\n")  # a logger may hold its lock
        self.stop_requested = True
        self.interrupt_time = self.interrupt_time or time.monotonic()

    def should_stop(self, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether any rank has received a signal, and stop training if so. All ranks call it."""
        requested = self.stop_requested
        # The signal reaches ranks at different times. They agree on the CPU, so that no device is synchronized.
        if self.accelerator.num_processes > 1:
            self.group = self.group or dist.new_group(backend="gloo")
            maximum = torch.tensor(float(requested))
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
            requested = maximum.item() > 0
        if requested:
            self.preempted = True
            control.should_training_stop = True
            reason = "Ctrl-C" if self.interrupt_time else "SIGTERM"
            step = state.global_step
            action = f"saving step {step} and stopping" if step else "stopping before the first step"
            logger.warning("%s: %s", reason, action)
        return requested

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Save without an evaluation after a signal, since time is short."""
        if self.should_stop(state, control):
            control.should_save = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Clear the best checkpoint of the state in memory after a signal.

        Otherwise Trainer would load the best checkpoint, or delete the new one in its favor. The trainer_state.json on
        disk still names it.
        """
        if self.preempted:
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Skip the actions of the end of an epoch after a signal, and save a step that has not been saved.

        Training stops within the epoch.
        """
        if self.preempted:
            control.should_save = bool(state.global_step) and self.trainer.saved_step != state.global_step
            control.should_evaluate = False
            if not control.should_save:
                state.best_model_checkpoint = None
