"""W&B, trackio, TensorBoard and other reporters of `report_to`.

An error of a reporter does not end a run. W&B and trackio get the recipe, and continue their run when training resumes.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

logger = logging.getLogger(__name__)
_REPORTER_CALLBACKS: Any = tuple(INTEGRATION_TO_CALLBACK.values())
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def isolate_failures(callbacks: list[Any], config: Mapping[str, Any]) -> None:
    """Turn an error of a reporter into a warning, after which the run continues without the reporter.

    Args:
        callbacks: The callbacks of the trainer. Those that are no reporters are not changed.
        config: Values that are added to the config of the run of W&B and trackio.
    """
    for reporter in callbacks:
        if isinstance(reporter, _REPORTER_CALLBACKS) and not hasattr(reporter, "failed"):
            reporter.failed = False
            for event in _EVENTS:
                setattr(reporter, event, partial(_attempt, reporter, getattr(reporter, event), config))


def _attempt(reporter: Any, method: Callable, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the method of a reporter unless an earlier call has failed."""
    if reporter.failed:
        return None
    try:
        control = method(*args, **kwargs)
        if method.__name__ == "on_train_begin":
            if (run := _wandb_run()) is not None:
                run.config.update(config, allow_val_change=True)
            if (run := _trackio_run()) is not None:
                run.config.update(config)
        return control
    except Exception as error:
        reporter.failed = True
        name = type(reporter).__name__.removesuffix("Callback")
        problem = " ".join(str(error).split())[:200]
        logger.warning("%s failed, and the run continues without it: %s: %s", name, type(error).__name__, problem)
        return None


def _wandb_run() -> Any:
    """Return the W&B run of this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _trackio_run() -> Any:
    """Return the trackio run of this process, or None."""
    trackio = sys.modules.get("trackio")
    return None if trackio is None else trackio.context_vars.current_run.get()


def run_names() -> dict[str, str | None]:
    """Return the id of the W&B run and the name of the trackio run, for checkpoints. They are None without a run."""
    return {"wandb": getattr(_wandb_run(), "id", None), "trackio": getattr(_trackio_run(), "name", None)}


def reporter_places(args: TrainingArguments) -> dict[str, str]:
    """Return where each reporter shows the run of this process: its URL, or the command that shows it."""
    places = {}
    if (run := _wandb_run()) is not None:
        places["W&B"] = run.url or f"wandb sync {Path(run.dir).parent}"
    if (run := _trackio_run()) is not None:
        context = sys.modules["trackio"].context_vars
        space, server = context.current_space_id.get(), context.current_server.get()
        url = f"https://huggingface.co/spaces/{space}" if space else server
        places["trackio"] = url or f"trackio show --project {run.project}"
    if "tensorboard" in (args.report_to or ()):
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or f"{args.output_dir}/runs"
        places["TensorBoard"] = f"tensorboard --logdir {folder}"
    return places


@contextmanager
def continued_runs(args: TrainingArguments, names: Mapping[str, str | None]) -> Iterator[None]:
    """Continue the runs of W&B and trackio inside the context. Environment variables that are set are not changed.

    At the end the process waits for W&B for at most ten minutes.

    Args:
        args: Options of the run. Its `run_name`, if it has none, is that of the trackio run inside the context.
        names: `run_names` of the checkpoint, empty for a new run.
    """
    variables = {"WANDB_FINISH_TIMEOUT": "600"}
    if (run_id := names.get("wandb")) is not None and "WANDB_RUN_ID" not in os.environ:
        variables |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= added
    run_name = args.run_name
    if run_name is None and "trackio" in (args.report_to or ()):
        args.run_name = names.get("trackio")
    try:
        yield
    finally:
        args.run_name = run_name
        for name in added:
            del os.environ[name]
