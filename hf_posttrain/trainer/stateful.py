"""The state that a run continues from, besides weights, optimizer and Trainer's own: means, buffers, rollouts, rounds.

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
"""In a checkpoint: {name: state}."""


class Stateful(Protocol):
    """State that a checkpoint stores. All ranks call all methods."""

    required: bool
    """Whether a checkpoint without this state cannot be resumed."""

    def reset(self) -> None:
        """Set the state with which a run starts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, texts, and lists or dicts of them. That of the first rank is stored."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        ...


def save(objects: Mapping[str, Stateful], folder: str, writes: bool) -> None:
    """Store the states of all objects in a checkpoint. `writes` on the rank that writes files."""
    states = {name: each.state_dict() for name, each in objects.items()}
    if writes and states:
        torch.save(states, Path(folder, FILE))


def load(objects: Mapping[str, Stateful], folder: str | None) -> None:
    """Load the states of all objects from a checkpoint, or reset them where `folder` is None.

    Raises InputError for a checkpoint without a state that is required.
    """
    states = read(folder) if folder is not None else {}
    for name, each in objects.items():
        each.reset()
        if name in states:
            each.load_state_dict(states[name])
        elif folder is not None and each.required:
            raise InputError(f"{folder} has no state of {name}: it was written by a run without it")


def read(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Return the states in a checkpoint by name, with tensors on the CPU."""
    file = Path(folder, FILE)
    if not file.exists():
        return {}
    states: dict[str, dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
    return states
