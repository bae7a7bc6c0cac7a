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

from ..recipe.fields import nearest
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
    remedies: Mapping[str, str]
    """method -> what to change, in keys of a recipe. Other methods do not have it."""
    unless: tuple[str, ...] = ()
    """Values of loss_type that mean to do this."""


SYMPTOMS = {
    "chosen_falling": Symptom(
        chosen_falling, "chosen answers become less likely while the margin rises",
        {"dpo": "Set train.nll_coef (0.1 to 5), which holds them up, and lower train.learning_rate",
         "kto": "Lower train.undesirable_weight, which pushes all answers down, and train.learning_rate"},
        unless=("apo_down",),
    ),
    "kl_zero": Symptom(
        kl_zero, "the KL estimate is stuck at 0",
        {"kto": "Raise train.gradient_accumulation_steps or train.per_device_train_batch_size (it is a mean over an "
                "optimizer step), lower train.undesirable_weight, or set train.loss_type=apo_zero_unpaired, which "
                "needs no KL"},
    ),
    "no_learning": Symptom(
        no_learning, "the policy does not leave its reference",
        dict.fromkeys(
            ("dpo", "kto"),
            "Raise train.learning_rate (model.lora wants ten times that of full training), and leave model.dtype at "
            "default: weights that are trained in bf16 hardly move",
        ),
    ),
    "clipped_rollouts": Symptom(
        clipped_rollouts, "rollouts are cut at max_completion_length instead of ending",
        {"opd": "Raise train.max_completion_length (and train.max_length with it), or teach the student by SFT on "
                "finished answers to end its own"},
    ),
    "empty_rollouts": Symptom(
        empty_rollouts, "rollouts are empty",
        {"opd": "Look at how prompts end (in a turn end, or without the opening of an answer: "
                "train.apply_chat_template, model.chat_template); if it began in mid-run, lower train.learning_rate"},
    ),
    "no_eos": Symptom(
        no_eos, "no rollout has ever ended by itself",
        {"opd": "Train the student by SFT first, or give it the chat template that its answers end by "
                "(train.apply_chat_template, model.chat_template)"},
    ),
    "label_leak": Symptom(
        label_leak, "every preference was predicted right almost from the start",
        dict.fromkeys(
            ("dpo", "kto"),
            "Look in data.train for what gives the label away: lengths, templates, missing ends, one model for all "
            "good answers and another for all bad ones",
        ),
    ),
}  # fmt: skip
"""In the order in which they are looked for."""
NAMES = ("nan", *SYMPTOMS)
"""What `train.stop_on` takes."""


def look(history: History, method: str, loss_types: Sequence[str] = (), told: Collection[str] = ()) -> dict[str, str]:
    """The symptoms that the history of a run of this method shows: name -> what, with which figures, what to do.

    told: names that are not looked for again.
    """
    found = {}
    for name, symptom in SYMPTOMS.items():
        if name in told or method not in symptom.remedies or set(loss_types) & set(symptom.unless):
            continue
        if figures := symptom.find(history):
            found[name] = f"step {history[-1]['step']:.0f}: {symptom.says} ({figures}). {symptom.remedies[method]}."
    return found


def listed(given: list[str] | str | None) -> list[str]:
    """The names that a `stop_on` gives: none, one, or a list of them."""
    return [given] if isinstance(given, str) else list(given or [])


def problems(given: list[str] | str | None, method: str | None = None) -> Iterator[str]:
    """What is wrong with a `stop_on`: names that do not exist or, with a method, symptoms of other methods."""
    for name in listed(given):
        if method is None and name not in NAMES:
            yield f"stop_on: there is no {name!r}{nearest(str(name), NAMES)}"
        elif method is not None and name in SYMPTOMS and method not in (methods := SYMPTOMS[name].remedies):
            yield f"stop_on: {name} is a symptom of {' and '.join(methods)}, not of {method}"
