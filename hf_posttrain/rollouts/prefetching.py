"""Rollouts of the next window, which a server samples while this one trains."""

import json
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from accelerate.utils import gather_object

from ..generation.completions_client import run_in_background
from ..trainer.interface import TrainerInterface


class PrefetchedRollouts:
    """Rollouts of the next window, which are sampled while this one trains. A checkpoint stores them.

    Those that the current step uses are kept as well: after an error the checkpoint of the last whole step is written,
    and the next step after it uses them.
    """

    required = False

    def __init__(self, trainer: TrainerInterface):
        self.trainer = trainer
        self.key: Any = None
        self.process: str | None = None
        self.future: Future[Any] | None = None
        self.taken: tuple[int, Any, Future[Any]] | None = None  # steps that were done then, key, future

    def begin(self, key: Any, sample: Callable[[], Any], process: str | None) -> None:
        """Sample in the background. key: what identifies the rollouts; process: which start of the server samples."""
        self.key = _as_json(key)
        self.process = process
        self.future = run_in_background(sample)

    def take(self, key: Any, process: str | None) -> Callable[[], Any] | None:
        """Return what gives the rollouts that were begun for `key`, once; None where there are none, and where the
        server has started again since, so that it may have had other weights.
        """
        if self.future is None or self.key != _as_json(key):
            return None
        future = self.future
        self.future = None
        self.taken = self.trainer.state.global_step, self.key, future
        return future.result if self.process in (None, process) else None

    def wait(self) -> None:
        """Wait until no request is under way."""
        if self.future is not None:
            wait([self.future])

    def reset(self) -> None:
        """Start without rollouts, after the requests of an earlier run, which would have the weights of this one."""
        self.wait()
        self.future = self.taken = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts of all ranks, as JSON; None for a rank whose server is lost."""
        if self.taken is not None and self.taken[0] == self.trainer.state.global_step:
            _, self.key, self.future = self.taken  # an error ended the step that used them
        self.wait()
        done = self.future is not None and self.future.exception() is None
        sampled = [self.key, self.future.result()] if done and self.future is not None else None
        return {"of_ranks": json.dumps(gather_object([sampled]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rollouts of this rank, where the number of ranks is the same."""
        of_ranks = json.loads(state["of_ranks"])
        accelerator = self.trainer.accelerator
        if len(of_ranks) == accelerator.num_processes and (sampled := of_ranks[accelerator.process_index]):
            key, groups = sampled
            self.begin(key, lambda: [[tuple(one) for one in group] for group in groups], None)


def _as_json(value: object) -> Any:
    return json.loads(json.dumps(value))
