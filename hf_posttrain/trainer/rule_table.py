"""Which rules are whose, and how they are asked."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import InputError
from ..methods import rules as methods
from . import rules as shared
from .limits import Problem, beyond

RULES: dict[str, tuple[Callable[[Any], Iterable[Problem]], ...]] = {
    "shared": (shared.names, shared.refused, shared.intervals, shared.epochs, shared.best_model, shared.together),
    "sft": (methods.sft,),
    "dpo": (methods.dpo_losses, methods.dpo_smoothing),
    "kto": (methods.kto,),
    "kd": (methods.kd,),
    "opd": (methods.opd, methods.opd_rollouts),
}


def problems(kind: str, values: Any) -> Iterator[Problem]:
    """What is wrong with `values`, an object with the fields of a Config, as they were given.

    kind: "shared" for what all methods have, or a method for what is its own.
    """
    yield from beyond(kind, values)
    yield from shared.stops(kind, values)
    for rule in RULES[kind]:
        yield from rule(values)


def check(kind: str, config: Any) -> None:
    """Raises InputError with the first problem of a Config."""
    for _, problem in problems(kind, config):
        raise InputError(problem)
