"""Rollouts of the next window, which a server samples while the current one trains."""

import json
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from accelerate.utils import gather_object

from ..generation.completions_client import run_in_background
from ..trainer.interface import TrainerInterface


class PrefetchedRollouts:
    """Rollouts of the next window, which are sampled while the current one trains. A checkpoint stores them.

    The rollouts that the current step uses are kept as well. After an error the checkpoint of the last complete step is
    written, and the step after it uses them when training resumes.
    """

    required = False

    def __init__(self, trainer: TrainerInterface) -> None:
        self.trainer = trainer
        self.key: Any = None
        self.instance_id: str | None = None
        self.future: Future[Any] | None = None
        self.taken: tuple[int, Any, Future[Any]] | None = None  # number of complete steps, key, future

    def begin(self, key: object, sample: Callable[[], Any], instance_id: str | None) -> None:
        """Sample in the background.

        Args:
            key: Arguments that identify the rollouts.
            sample: Function that returns the rollouts.
            instance_id: Id of the server process that samples, which changes at each start of the server.
        """
        self.key = _as_json(key)
        self.instance_id = instance_id
        self.future = run_in_background(sample)

    def take(self, key: object, instance_id: str | None) -> Callable[[], Any] | None:
        """Return a function that waits for the rollouts of `key` and returns them; each is taken once.

        Returns None without such rollouts, or if the server has restarted since, and may have had other weights.
        """
        if self.future is None or self.key != _as_json(key):
            return None
        future = self.future
        self.future = None
        self.taken = self.trainer.state.global_step, self.key, future
        return future.result if self.instance_id in (None, instance_id) else None

    def wait(self) -> None:
        """Wait until no request is in progress."""
        if self.future is not None:
            wait([self.future])

    def reset(self) -> None:
        """Start without rollouts, once the requests of an earlier run are done: they would get weights of this run."""
        self.wait()
        self.future = self.taken = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts of all ranks as JSON, with None for a rank whose server is lost."""
        if self.taken is not None and self.taken[0] == self.trainer.state.global_step:
            _, self.key, self.future = self.taken  # an error ended the step that used them
        self.wait()
        succeeded = self.future is not None and self.future.exception() is None
        sampled = [self.key, self.future.result()] if succeeded and self.future is not None else None
        return {"of_ranks": json.dumps(gather_object([sampled]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rollouts of this rank, if the number of ranks is the same."""
        of_ranks = json.loads(state["of_ranks"])
        accelerator = self.trainer.accelerator
        if len(of_ranks) == accelerator.num_processes and (sampled := of_ranks[accelerator.process_index]):
            key, groups = sampled
            self.begin(key, lambda: [[tuple(completion) for completion in group] for group in groups], None)


def _as_json(value: object) -> Any:
    """Return a value as it is after a round trip through JSON, such as lists in place of tuples."""
    return json.loads(json.dumps(value))
