"""W&B, TensorBoard and whatever else `report_to` names: kept from ending a run, told of the recipe, resumed."""

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
    """An error in a reporter becomes a warning, and the run goes on without it. config: what W&B's is to hold too."""
    for reporter in callbacks:
        if isinstance(reporter, _REPORTER_CALLBACKS) and not hasattr(reporter, "failed"):
            reporter.failed = False
            for event in _EVENTS:
                setattr(reporter, event, partial(_attempt, reporter, getattr(reporter, event), config))


def _attempt(reporter: Any, method: Callable, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the reporter's method unless one of its calls has failed."""
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
        logger.warning("%s failed, and the run goes on without it: %s: %s", name, type(error).__name__, problem)
        return None


def _wandb_run() -> Any:
    """W&B's run of this process, if there is one."""
    return getattr(sys.modules.get("wandb"), "run", None)


def wandb_id() -> str | None:
    """The id of W&B's run, for checkpoints."""
    return getattr(_wandb_run(), "id", None)


@contextmanager
def wandb_environment(run_id: str | None) -> Iterator[None]:
    """Inside, W&B goes on with the run of this id, and is waited for at the end for ten minutes at most; what the
    environment says already stays.
    """
    wanted = {"WANDB_FINISH_TIMEOUT": "600"}
    if run_id is not None and "WANDB_RUN_ID" not in os.environ:
        wanted |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
