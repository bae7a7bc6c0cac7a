"""SIGTERM to any rank: all ranks finish the optimizer step, save a checkpoint and leave `train`."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class Preemption(TrainerCallback):
    """Looks after each step whether any rank was asked to stop. `happened`: was the last run stopped?"""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.asked = self.happened = False
        self.group: Any = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around a training; Python lets only the main thread listen."""
        self.asked = self.happened = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop together, where any rank was asked to. Time is short, so nothing is evaluated."""
        asked = self.asked
        # the signal reaches ranks at different moments; they agree on the hosts alone, so no device is waited for
        if self.accelerator.num_processes > 1:
            self.group = self.group or dist.new_group(backend="gloo")
            most = torch.tensor(float(asked))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            asked = most.item() > 0
        if asked:
            self.happened = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
            logger.warning("SIGTERM: saving step %d and stopping", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the best checkpoint in memory, so that HF neither loads it now nor deletes the new one in its favour;
        the trainer_state.json on disk still names it."""
        if self.happened:
            state.best_model_checkpoint = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """This is the middle of an epoch: nothing that is due at its end."""
        if self.happened:
            control.should_save = control.should_evaluate = False
