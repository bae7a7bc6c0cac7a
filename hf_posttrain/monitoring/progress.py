"""What a run shows while it trains: a line for each log (`LogLines`), on a terminal above a bar (`ProgressBar`):

    step 120/400  loss 0.6412  accuracy 0.71  margin 0.1852  3,412 tokens/s  02:10<05:03

`format_metrics` writes both, from the method's key metrics; `Throughput` counts tokens. Only the first process shows
anything. What is logged, to trainer_state.json, W&B and others, does not depend on it.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor
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

logger = logging.getLogger(__name__)
GIB = 2**30
LOG_INTERVAL = 30.0
"""Seconds between two lines about what is done of some long work, where there is no terminal."""
_LINE = "step {n_fmt}/{total_fmt}  {desc}  {elapsed}<{remaining}"
_BAR = "{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}"  # fits into 80 columns
_EVALUATION = "evaluation |{bar:16}| {n_fmt}/{total_fmt}  {elapsed}<{remaining}"
_HIDDEN_SUFFIXES = ("epoch", "_runtime", "_per_second", "_time", "total_flos", "_clamped")
"""How keys end that say nothing of an evaluation's result."""
_ROUND_METRICS = ("score", "best_score", "stopped", "length", "rows", "left_out")
"""What is shown of a round's answers, from its log."""


def format_metrics(logs: Mapping[str, Any], key_metrics: Mapping[str, str]) -> str:
    """Loss, key metrics and tokens a second of a training log, those that are there, as "name value  name value"."""
    names = {"loss": "loss", **key_metrics}
    shown = [f"{name} {_number(logs[key])}" for key, name in names.items() if key in logs]
    if "tokens_per_second" in logs:
        shown.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(shown)


def format_evaluation(logs: Mapping[str, Any], keys: Mapping[str, str]) -> str:
    """The same of an evaluation, of whichever data set: loss, exact match, key metrics, and what compute_metrics gives
    (none of whose names has a slash, as our own do).
    """
    shown = []
    for key, value in logs.items():
        # keys begin with eval_ or eval_NAME_, so a key metric is known by how its key ends
        known = next((name for name in keys if key.endswith(f"_{name}")), None)
        if known or not ("/" in key or key.endswith(_HIDDEN_SUFFIXES)):
            name = key.removesuffix(known) + keys[known] if known else key
            shown.append(f"{name.removeprefix('eval_')} {_number(value)}")
    return "  ".join(shown)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LogLines(PrinterCallback):
    """A line on standard output for each log of a training, its evaluations and its end. With disable_tqdm that is all.

    A PrinterCallback, so that the caller can remove it by that name, as HF's.
    """

    def __init__(self, key_metrics: Mapping[str, str]):
        self.key_metrics = key_metrics
        self.begun: tuple[float, int] | None = None  # while training: the time and step at which it began

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; a resumed run begins in the middle."""
        self.begun = time.monotonic(), state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is evaluated afterwards is the caller's to show."""
        self.begun = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """One line."""
        if self.begun is not None and state.is_world_process_zero:
            tqdm.write(self.line(logs, state))

    def line(self, logs: Mapping[str, Any], state: TrainerState) -> str:
        """The line of a log: of training, of an evaluation, or HF's summary of the run."""
        assert self.begun is not None
        elapsed = time.monotonic() - self.begun[0]
        step = state.global_step
        if "loss" in logs:
            text = format_metrics(logs, self.key_metrics)
            initial = self.begun[1]
            return tqdm.format_meter(step, state.max_steps, elapsed, prefix=text, bar_format=_LINE, initial=initial)
        if "train_runtime" in logs:
            if step == self.begun[1] and step >= state.max_steps:
                return f"step {step}/{state.max_steps}  was done before: nothing was left to train"
            took = tqdm.format_interval(logs["train_runtime"])
            return f"step {step}/{state.max_steps}  done in {took}, mean loss {_number(logs['train_loss'])}"
        if "rounds/round" in logs:
            told = format_metrics(logs, {f"rounds/{name}": name.replace("_", " ") for name in _ROUND_METRICS})
            return f"step {step}/{state.max_steps}  answers of round {logs['rounds/round']:g}: {told}"
        return f"step {step}/{state.max_steps}  evaluation: {format_evaluation(logs, self.key_metrics)}"


class ProgressBar(ProgressCallback):
    """A bar where standard error is a terminal, below `LogLines`: the history of the run."""

    def __init__(self, key_metrics: Mapping[str, str]):
        super().__init__()
        self.lines = LogLines(key_metrics)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A bar from the step at which training begins."""
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
        """A line, above the bar."""
        self.lines.on_log(args, state, control, logs)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kw: Any,
    ) -> None:
        """A short bar of its own, gone when the evaluation is."""
        if self.prediction_bar is None and state.is_world_process_zero and has_length(eval_dataloader):
            self.prediction_bar = _make_bar(len(eval_dataloader), _EVALUATION, leave=False)
        super().on_prediction_step(args, state, control, eval_dataloader, **kw)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it is now."""
        self.on_evaluate(args, state, control)  # takes away a bar that an error has left
        super().on_train_end(args, state, control, **kwargs)
        self.lines.on_train_end(args, state, control)


def _make_bar(total: int, form: str, **options: Any) -> Any:
    """Without a terminal it shows nothing."""
    return tqdm(total=total, bar_format=form, dynamic_ncols=True, smoothing=0, disable=None, **options)


def replace_progress_callback(trainer: Any, key_metrics: Mapping[str, str]) -> None:
    """Replace the callback that HF's Trainer has just added, for bars or (disable_tqdm) for printing, by ours of that
    kind. The caller's own callbacks stay, and so does a notebook's table.
    """
    # the last one of exactly these classes: a subclass is the caller's own
    ours: dict[type, type[Any]] = {ProgressCallback: ProgressBar, PrinterCallback: LogLines}
    default = next((one for one in reversed(trainer.callback_handler.callbacks) if type(one) in ours), None)
    if default is not None:
        trainer.remove_callback(default)
        trainer.add_callback(ours[type(default)](key_metrics))


def logs_above_progress_bar() -> AbstractContextManager:
    """What is logged inside appears above a bar, not in it."""
    return logging_redirect_tqdm() if sys.stderr.isatty() else nullcontext()


# ---- what each training log has besides losses and metrics


class Throughput:
    """How fast a logging interval trained.

    Counted are the tokens that the policy reads with gradient, padding aside: a prompt once in the shared layout and
    once for each answer in others. KTO's passes for the KL estimate are not, nor are generated tokens as they are
    drawn, but their time is; that of evaluations and checkpoints is not.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.since = time.perf_counter()

    def count(self, weights: Tensor) -> None:
        """Add a micro-batch: `router_weights` [R, L], which are 0 for padding alone."""
        self.tokens = (weights > 0).sum() + (0 if self.tokens is None else self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self, processes: int) -> tuple[Tensor, Tensor] | None:
        """Of the interval since the last call: ([tokens, seconds / processes], whose sums over the ranks give tokens a
        second; GiB at the peak so far). None where no token was counted. Nothing waits for the device.
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
    """The most memory so far, in bytes: allocated on a CUDA device, or resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class LogLastStep(TrainerCallback):
    """With logging_strategy steps the last step is logged too, so that a short run has a loss to show."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After HF's own callback has decided about this step."""
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            control.should_log = True


class TaskProgress:
    """What is done of some long work: a bar on a terminal, otherwise a line in the log every `LOG_INTERVAL` seconds."""

    def __init__(self, total: int, title: str, unit: str, done: int = 0, shown: bool = True):
        self.total = total
        self.title = title
        self.unit = unit
        self.done = done
        self.shown = shown
        self.bar = tqdm(total=total, desc=title, unit=unit, initial=done, disable=None if shown else True)
        self.said = time.monotonic()

    def __enter__(self) -> "TaskProgress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def add(self, count: int = 1) -> None:
        """Count some more of the units as done."""
        self.done += count
        self.bar.update(count)
        if self.shown and self.bar.disable and time.monotonic() - self.said > LOG_INTERVAL:
            self.said = time.monotonic()
            logger.info("%s: %d of %d %ss are done", self.title, self.done, self.total, self.unit)
