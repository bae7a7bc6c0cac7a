"""W&B, TensorBoard and other reporters of `report_to`.

An error of a reporter does not end a run. W&B gets the recipe, and continues its run when training resumes.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

logger = logging.getLogger(__name__)
_REPORTER_CALLBACKS: Any = tuple(INTEGRATION_TO_CALLBACK.values())
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def isolate_failures(callbacks: list[Any], config: Mapping[str, Any]) -> None:
    """Turn an error of a reporter into a warning, after which the run continues without the reporter.

    Args:
        callbacks: The callbacks of the trainer. Those that are no reporters are not changed.
        config: Values that are added to the config of the W&B run.
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
        if (run := _wandb_run()) is not None and method.__name__ == "on_train_begin":
            run.config.update(config, allow_val_change=True)
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


def wandb_id() -> str | None:
    """Return the id of the W&B run, for checkpoints, or None."""
    return getattr(_wandb_run(), "id", None)


@contextmanager
def wandb_environment(run_id: str | None) -> Iterator[None]:
    """Set environment variables of W&B inside the context. Variables that are set already are not changed.

    W&B continues the run with this id, and at the end the process waits for it for at most ten minutes.
    """
    variables = {"WANDB_FINISH_TIMEOUT": "600"}
    if run_id is not None and "WANDB_RUN_ID" not in os.environ:
        variables |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
