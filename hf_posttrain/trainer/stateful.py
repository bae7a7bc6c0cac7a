"""State of a run in addition to weights, optimizer and the state of Trainer, such as buffers, rollouts and rounds.

The trainer has one mapping of names to `Stateful` objects. A checkpoint stores all of them in one file, and they are
loaded in one place.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import InputError

FILE = "stateful.pt"
"""File of a checkpoint with the mapping of names to states."""


class Stateful(Protocol):
    """Object whose state a checkpoint stores. All ranks call all methods."""

    required: bool
    """Whether a checkpoint without this state cannot be resumed."""

    def reset(self) -> None:
        """Set the initial state of a run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, and lists or dicts of them. The first rank's state is stored."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        ...


def save(objects: Mapping[str, Stateful], folder: str, should_write: bool) -> None:
    """Store the states of all objects in a checkpoint.

    Args:
        objects: The objects by name.
        folder: Folder of the checkpoint.
        should_write: Whether this rank writes files.
    """
    states = {name: stateful.state_dict() for name, stateful in objects.items()}
    if should_write and states:
        torch.save(states, Path(folder, FILE))


def load(objects: Mapping[str, Stateful], folder: str | None) -> None:
    """Load the states of all objects from a checkpoint, or reset them.

    Args:
        objects: The objects by name.
        folder: Folder of the checkpoint. If None, the run starts from the initial states.

    Raises:
        InputError: If the checkpoint lacks a required state.
    """
    states = read(folder) if folder is not None else {}
    for name, stateful in objects.items():
        stateful.reset()
        if name in states:
            stateful.load_state_dict(states[name])
        elif folder is not None and stateful.required:
            raise InputError(f"{folder} has no state of {name}. Resume a checkpoint of a run with {name}")


def read(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Return the states in a checkpoint by name, with tensors on CPU."""
    file = Path(folder, FILE)
    if not file.exists():
        return {}
    states: dict[str, dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
    return states
