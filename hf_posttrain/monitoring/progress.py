"""Progress of a training run: a line for each log (`LogLines`), on a terminal above a progress bar (`ProgressBar`).

A line is:

    step 120/400  loss 0.6412  accuracy 0.71  margin 0.1852  3,412 tokens/s  02:10<05:03

`format_metrics` formats the key metrics of the method for both, and `Throughput` counts tokens. Only the first process
shows progress. The logs of trainer_state.json, W&B and other reporters do not depend on it.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import has_length

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)
GIB = 2**30
LOG_INTERVAL = 30.0
"""Seconds between two log lines about the progress of a long task without a terminal."""
_LINE = "step {n_fmt}/{total_fmt}  {desc}  {elapsed}<{remaining}"
_BAR = "{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}"  # fits into 80 columns
_EVALUATION = "evaluation |{bar:16}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}"
MAX_LOSSES = 4
"""Maximum number of losses of sources in a line."""
_HIDDEN_SUFFIXES = ("epoch", "_runtime", "_per_second", "_time", "total_flos", "_clamped")
"""Suffixes of keys in the log of an evaluation that are no results."""
_ROUND_METRICS = ("score", "best_score", "stopped", "length", "rows", "left_out")
"""Metrics of the answers of a round that are printed."""


def format_metrics(logs: Mapping[str, Any], key_metrics: Mapping[str, str]) -> str:
    """Format the losses, the key metrics and the tokens per second of a training log as "name value  name value".

    The losses of more than MAX_LOSSES sources are left out.
    """
    losses = [key for key in logs if key.startswith("loss/")]
    names = {"loss": "loss"}
    if len(losses) <= MAX_LOSSES:
        names |= {key: key for key in losses}
    names |= key_metrics
    entries = [f"{name} {_format_number(logs[key])}" for key, name in names.items() if key in logs]
    if "tokens_per_second" in logs:
        entries.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(entries)


def format_evaluation(logs: Mapping[str, Any], key_metrics: Mapping[str, str]) -> str:
    """Format the log of an evaluation on any data set as "name value  name value".

    It has the loss, exact match, the key metrics, and the metrics of compute_metrics (whose names have no slash, unlike
    metrics of this package).
    """
    entries = []
    for key, value in logs.items():
        # keys start with eval_ or eval_NAME_, so that a key metric is recognized by the end of the key
        metric = next((name for name in key_metrics if key.endswith(f"_{name}")), None)
        if metric or not ("/" in key or key.endswith(_HIDDEN_SUFFIXES)):
            name = key.removesuffix(metric) + key_metrics[metric] if metric else key
            entries.append(f"{name.removeprefix('eval_')} {_format_number(value)}")
    return "  ".join(entries)


def _format_number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LogLines(PrinterCallback):
    """Callback that prints a line to standard output for each log of a training, its evaluations and its end.

    With disable_tqdm this is all output. It is a PrinterCallback, so that a user can remove it by that name, as the one
    of transformers.
    """

    def __init__(self, key_metrics: Mapping[str, str]) -> None:
        self.key_metrics = key_metrics
        self.start: tuple[float, int] | None = None  # during training, the time and the step at which it started

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock. The first step of a resumed run is not 0."""
        self.start = time.monotonic(), state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop printing. Evaluations after training are left to the caller."""
        self.start = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print one line."""
        if self.start is not None and logs is not None and state.is_world_process_zero:
            tqdm.write(self.line(logs, state))

    def line(self, logs: Mapping[str, Any], state: TrainerState) -> str:
        """Return the line of a log of training, of an evaluation, or of the summary of the run."""
        assert self.start is not None
        start_time, start_step = self.start
        elapsed = time.monotonic() - start_time
        step = state.global_step
        if "loss" in logs:
            text = format_metrics(logs, self.key_metrics)
            return tqdm.format_meter(step, state.max_steps, elapsed, prefix=text, bar_format=_LINE, initial=start_step)
        if "train_runtime" in logs:
            if step == start_step and step >= state.max_steps:
                return f"step {step}/{state.max_steps}  already complete, nothing left to train"
            duration = tqdm.format_interval(logs["train_runtime"])
            return f"step {step}/{state.max_steps}  done in {duration}, mean loss {_format_number(logs['train_loss'])}"
        if "rounds/round" in logs:
            names = {f"rounds/{name}": name.replace("_", " ") for name in _ROUND_METRICS}
            text = format_metrics(logs, names)
            return f"step {step}/{state.max_steps}  answers of round {logs['rounds/round']:g}: {text}"
        return f"step {step}/{state.max_steps}  evaluation: {format_evaluation(logs, self.key_metrics)}"


class ProgressBar(ProgressCallback):
    """Callback that shows a progress bar if standard error is a terminal, below the lines of `LogLines`."""

    def __init__(self, key_metrics: Mapping[str, str]) -> None:
        super().__init__()
        self.lines = LogLines(key_metrics)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show a bar that starts at the first step of training."""
        self.lines.on_train_begin(args, state, control)
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = _make_bar(state.max_steps, _BAR, initial=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print a line above the bar."""
        self.lines.on_log(args, state, control, logs)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader | None = None,
        **kw: Any,
    ) -> None:
        """Show a short bar for the evaluation, which is removed at its end."""
        if self.prediction_bar is None and state.is_world_process_zero and has_length(eval_dataloader):
            self.prediction_bar = _make_bar(len(eval_dataloader), _EVALUATION, leave=False)  # type: ignore[arg-type]
        super().on_prediction_step(args, state, control, eval_dataloader, **kw)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar in its current state."""
        self.on_evaluate(args, state, control)  # removes the bar of an evaluation that an error has ended
        super().on_train_end(args, state, control, **kwargs)
        self.lines.on_train_end(args, state, control)


def _make_bar(total: int, bar_format: str, **options: Any) -> Any:
    """Return a progress bar, which shows nothing without a terminal."""
    return tqdm(total=total, bar_format=bar_format, dynamic_ncols=True, smoothing=0, disable=None, **options)


def replace_progress_callback(trainer: "Trainer", key_metrics: Mapping[str, str]) -> None:
    """Replace the progress callback that Trainer has added (with disable_tqdm for printing) by that of this package.

    Callbacks of the user are not changed, and neither is the table in a notebook.
    """
    # the last one of exactly these classes: an instance of a subclass belongs to the user
    replacements: dict[type, type[Any]] = {ProgressCallback: ProgressBar, PrinterCallback: LogLines}
    callbacks = reversed(trainer.callback_handler.callbacks)
    default = next((callback for callback in callbacks if type(callback) in replacements), None)
    if default is not None:
        trainer.remove_callback(default)
        trainer.add_callback(replacements[type(default)](key_metrics))


def logs_above_progress_bar() -> AbstractContextManager:
    """Return a context in which log lines appear above a progress bar, not in it."""
    return logging_redirect_tqdm() if sys.stderr.isatty() else nullcontext()


# ---- entries of training logs in addition to losses and metrics


class Throughput:
    """Throughput of a logging interval.

    The tokens that the policy reads with gradient are counted, without padding: a prompt once in the shared layout, and
    once for each answer in others. Passes of KTO for the KL estimate and generated tokens are not counted, but their
    time is. The time of evaluations and checkpoints is not.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.since = time.perf_counter()

    def count(self, weights: Tensor) -> None:
        """Add a micro-batch: `router_weights` [R, L], which are 0 only for padding."""
        self.tokens = (weights > 0).sum() + (0 if self.tokens is None else self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self, processes: int) -> tuple[Tensor, Tensor] | None:
        """Return the throughput and the memory since the last call, without waiting for the device.

        Args:
            processes: Number of processes.

        Returns:
            [tokens, seconds / processes], whose sums over the ranks give the tokens per second, and the peak memory so
            far in GiB. None if no token was counted.
        """
        now = time.perf_counter()
        tokens = self.tokens
        seconds = (now - self.since) / processes
        self.tokens = None
        self.since = now
        if tokens is None:
            return None
        pair = torch.stack([tokens.float(), tokens.new_tensor(seconds, dtype=torch.float32)])
        return pair, tokens.new_tensor(peak_memory(tokens.device) / GIB, dtype=torch.float32)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far, in bytes: allocated on a CUDA device, or resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class LogLastStep(TrainerCallback):
    """Callback that also logs the last step with logging_strategy steps, so that a short run has a loss to show."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a log after the callback of transformers has decided about this step."""
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            control.should_log = True


class TaskProgress:
    """Progress of a long task: a bar on a terminal, otherwise a log line every `LOG_INTERVAL` seconds.

    Args:
        total: Total number of units.
        title: Title of the task.
        unit: Name of a unit.
        done: Number of units that are done at the start.
        shown: Whether to show the progress.
    """

    def __init__(self, total: int, title: str, unit: str, done: int = 0, shown: bool = True) -> None:
        self.total = total
        self.title = title
        self.unit = unit
        self.done = done
        self.shown = shown
        self.bar = tqdm(total=total, desc=title, unit=unit, initial=done, disable=None if shown else True)
        self.last_logged = time.monotonic()

    def __enter__(self) -> "TaskProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def add(self, count: int = 1) -> None:
        """Add to the number of units that are done."""
        self.done += count
        self.bar.update(count)
        if self.shown and self.bar.disable and time.monotonic() - self.last_logged > LOG_INTERVAL:
            self.last_logged = time.monotonic()
            logger.info("%s: %d of %d %ss are done", self.title, self.done, self.total, self.unit)
