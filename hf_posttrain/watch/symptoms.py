"""What goes wrong in training runs, seen in their logs, and what to do about it.

    NAMES          the names that `train.stop_on` takes: nan, and those of SYMPTOMS
    SYMPTOMS       name -> Symptom: which methods have it, how it shows (`detectors`), what to change
    look           logs -> the symptoms that show
    listed, problems    the names that a stop_on gives, and what is wrong with them

What looks at losses themselves, for nan, is `nonfinite`; what warns and stops is `guard`. Nothing here imports torch,
so a recipe is checked in no time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import nearest
from .detectors import (
    History,
    chosen_falling,
    clipped_rollouts,
    empty_rollouts,
    kl_zero,
    label_leak,
    no_eos,
    no_learning,
)


@dataclass(frozen=True)
class Symptom:
    """A way in which runs of some methods go wrong."""

    find: Callable[[History], str | None]
    """History -> the figures that show it, or None."""
    says: str
    """What it is."""
    unless: tuple[str, ...] = ()
    """Values of loss_type that mean to do this."""


SYMPTOMS = {
    "chosen_falling": Symptom(
        chosen_falling, "chosen answers become less likely while the margin rises", unless=("apo_down",)
    ),
    "kl_zero": Symptom(kl_zero, "the KL estimate is stuck at 0"),
    "no_learning": Symptom(no_learning, "the policy does not leave its reference"),
    "clipped_rollouts": Symptom(clipped_rollouts, "rollouts are cut at max_completion_length instead of ending"),
    "empty_rollouts": Symptom(empty_rollouts, "rollouts are empty"),
    "no_eos": Symptom(no_eos, "no rollout has ever ended by itself"),
    "label_leak": Symptom(label_leak, "every preference was predicted right almost from the start"),
}
"""In the order in which they are looked for; which methods have them is in the table of methods."""
NAMES = ("nan", *SYMPTOMS)
"""What `train.stop_on` takes."""


def look(
    history: History, remedies: Mapping[str, str], loss_types: Sequence[str] = (), told: Collection[str] = ()
) -> dict[str, str]:
    """The symptoms that the history of a run shows: name -> what, with which figures, what to do.

    remedies: symptom -> what to change, for the symptoms of the run's method. told: names not to look for again.
    """
    found = {}
    for name, symptom in SYMPTOMS.items():
        if name in told or name not in remedies or set(loss_types) & set(symptom.unless):
            continue
        if figures := symptom.find(history):
            found[name] = f"step {history[-1]['step']:.0f}: {symptom.says} ({figures}). {remedies[name]}."
    return found


def listed(given: list[str] | str | None) -> list[str]:
    """The names that a `stop_on` gives: none, one, or a list of them."""
    return [given] if isinstance(given, str) else list(given or [])


def problems(given: list[str] | str | None, method: str, known: Collection[str]) -> Iterator[str]:
    """What is wrong with a `stop_on`: names that do not exist, and symptoms that are not among the method's `known`."""
    for name in listed(given):
        if name not in NAMES:
            yield f"stop_on: there is no {name!r}{nearest(str(name), NAMES)}"
        elif name != "nan" and name not in known:
            yield f"stop_on: {name} is no symptom of {method}, which has {', '.join(['nan', *known])}"
