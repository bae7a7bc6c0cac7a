"""Guard: reads the logs as they come, warns once of each symptom in `watch`, and ends the run where stop_on says so."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

from . import detectors
from . import symptoms as watch
from .nonfinite import Nonfinite

logger = logging.getLogger(__name__)


class Guard(TrainerCallback):
    """Watches over a training run of `trainer`, a PostTrainer. All ranks decide together.

    A run that is ended saves nothing more and is not evaluated: what it has saved before stays as it is. To be added
    after whatever else asks for a checkpoint.
    """

    stopped: str | None = None
    """Why the last run was ended, in a line; None where it was not."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.stop_on = watch.listed(trainer.args.stop_on)
        self.losses = Nonfinite()
        self.history: list[Mapping[str, float]] = []
        """Logs, a bounded number of them."""
        self.warned: set[str] = set()

    # ---- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or with the logs of the checkpoint that training resumes from."""
        self.stopped, self.warned, self.losses, self.history = None, set(), Nonfinite(), []
        for log in state.log_history:
            self._remember(log)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at the losses since the last log and, on the first rank, for symptoms that were not told of yet."""
        if "loss" not in logs:
            return
        self._remember(state.log_history[-1])
        loss_type = getattr(args, "loss_type", ())
        loss_types = [loss_type] if isinstance(loss_type, str) else loss_type
        found = self._nonfinite()
        if state.is_world_process_zero:  # whose findings `_act` sends to all
            found |= watch.look(self.history, self.trainer.method.symptoms, loss_types, self.warned)
        self._act(found, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No checkpoint of broken weights, where these end the run: look before one that no log precedes.

        Before an evaluation too: with save_strategy best, that it is saved is decided by Trainer at once behind it.
        """
        saves = control.should_save or control.should_evaluate
        looks = "nan" in self.stop_on and saves and not control.should_log
        if looks or self.stopped:
            self._act(self._nonfinite(), state, control)

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at what no log came after."""
        self._act(self._nonfinite(), state, control)

    # ---- what they do

    def _remember(self, log: Mapping[str, Any]) -> None:
        if "loss" in log:
            rows = self.trainer.get_total_train_batch_size(self.trainer.args)
            self.history.append({**log, "rows": log["step"] * rows})
        if len(self.history) >= 4 * detectors.ENDS:
            self.history = detectors.bounded(self.history)

    def _nonfinite(self) -> dict[str, str]:
        """The symptom `nan`, with its micro-batch saved, once."""
        if "nan" in self.warned or (found := self.losses.first_step(self.trainer.accelerator)) is None:
            return {}
        step, ranks = found
        folder, own = Path(self.trainer.args.output_dir), self.trainer.accelerator.process_index
        files = {rank: folder / f"nonfinite_step_{step}_rank_{rank}.pt" for rank in ranks}
        problem = self.losses.save(files[own], self.trainer.tokenizer) if own in files else None
        problems = {rank: said for rank, said in gather_object([(own, problem)]) if said}
        kept = ", ".join(str(file) for rank, file in files.items() if rank not in problems)
        where = [f"its batch is in {kept} (rows, text, tensors)"] if kept else []
        where += [f"{files[rank]} could not be written ({said})" for rank, said in problems.items()]
        return {"nan": f"the loss was not finite at step {step}; {'; '.join(where)}. If its batch looks sound, the "
                "step before broke the weights: lower train.learning_rate, or set train.max_grad_norm."}  # fmt: skip

    def _act(self, found: dict[str, str], state: Any, control: Any) -> None:
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
