"""Symptoms of problems in the logs of a training run. `find_symptoms` returns those that a history shows.

A history is the list of training logs so far, oldest first: each with `step`, `rows` (trained so far), and whatever was
logged. A symptom is found by a pure function that takes a history and returns the values that show it as text, or None.
One unusual log is no symptom: every function requires several in a row.

Non-finite losses are found in `anomaly_monitor`, which also warns and stops. This module does not import torch, so that
recipes are checked fast.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias

History: TypeAlias = Sequence[Mapping[str, float]]
HISTORY_ENDS = 200
"""Logs at both ends that `thin_history` keeps. No symptom requires as many logs, steps or rows, so that a symptom from
the start on is found, or ruled out, within the first HISTORY_ENDS logs."""
_REWARDS = ("rewards/chosen", "rewards/rejected")


# ---- preference methods


def chosen_falling(history: History) -> str | None:
    """Find that both answers become less likely, the rejected one faster.

    The loss depends only on the margin, and so looks good. Probability moves to answers that are not in the data, and
    the policy degrades (arXiv 2402.13228, 2410.08847).
    """
    names = ("logps/chosen", "logps/chosen_change", "rewards/margins")
    logs = [log for log in history if all(name in log for name in names)]
    if len(logs) < 6:
        return None
    # means over three logs at both ends: does the margin rise?
    first = logs[:3]
    last = logs[-3:]
    first_margin, margin = (mean(log["rewards/margins"] for log in part) for part in (first, last))
    if not margin > max(first_margin, 0):
        return None
    # the drop is at least 1 nat (log-probability of an entire answer) below the reference, and a fifth of the value of
    # the reference; in a good run the value changes by a few per cent
    drops = [(log["logps/chosen_change"], log["logps/chosen"]) for log in last]
    if not all(change <= -1.0 and change <= 0.2 * (value - change) for change, value in drops):
        return None
    change, value = drops[-1]
    start = value - change
    return f"logps/chosen_change {change:.3g}, from {start:.4g}; rewards/margins {first_margin:.2g} -> {margin:.2g}"


def kl_zero(history: History) -> str | None:
    """Find that KTO's KL estimate is 0 at every step, since it is negative and so clamped, or exactly 0.

    The loss then compares rewards with the constant 0 instead of the drift of the policy. If the rewards of both
    classes are on one side of it, the loss saturates, or stays at 0.5.
    """
    # in good runs noise leads to many clamped values, but not to ten in a row
    logs = _recent_logs(history, 10, "step", 50)
    if not logs or not all(log.get("kl_clamped", 0) > 0.999 or abs(log.get("kl", 1)) < 1e-6 for log in logs):
        return None
    return f"kl {mean(log['kl'] for log in logs):.2g} over the last {len(logs)} logs, never above 0"


def no_learning(history: History) -> str | None:
    """Find that rewards stay at 0 although the learning rate has passed its warm-up.

    The learning rate is for another kind of training (LoRA requires ten times that of full fine-tuning), or updates are
    lost in the rounding of bf16 weights.
    """
    logs = history[_peak_learning_rate(history) :]
    if len(logs) < 5 or logs[-1]["step"] - logs[0]["step"] < 50:
        return None
    # rewards without a reference are no log-ratios: such methods do not log the change of chosen answers
    if not logs[0].get("learning_rate", 0) > 0 or "logps/chosen_change" not in logs[-1] or any(map(_has_moved, logs)):
        return None
    largest = max(abs(log.get(name, 0.0)) for log in logs for name in _REWARDS)
    rate = logs[0]["learning_rate"]
    return f"no mean reward above {largest:.1g} at a learning rate of {rate:.2g}"


def label_leak(history: History) -> str | None:
    """Find that from the second log on every preference is predicted correctly, in rows that are seen the first time.

    Something reveals the label, such as a length, a template, a truncated end, or the model that wrote the answer.
    """
    # without the first log, where policy and reference are equal
    logs = [log for log in history[1:] if log.get("epoch", 0.0) <= 1]
    accuracy = [log.get("rewards/accuracies", 0.0) for log in logs]
    enough = len(logs) >= 3 and logs[-1]["rows"] - history[0]["rows"] >= 128
    if not enough or not all(share >= 0.999 for share in accuracy):
        return None
    return f"rewards/accuracies {mean(accuracy):.4g} from step {history[0]['step'] + 1:.0f} on"


# ---- methods that sample rollouts


def clipped_rollouts(history: History) -> str | None:
    """Find that almost all rollouts are truncated.

    The student does not learn to end its answers, and time is spent on tokens after the point where they should end.
    """
    logs = _recent_logs(history, 3, "rows", 64)
    if not logs or not all(log.get("generation/stopped", 1.0) <= 0.05 for log in logs):
        return None
    return f"generation/stopped {logs[-1]['generation/stopped']:.2g}, length {logs[-1]['generation/length']:.4g}"


def empty_rollouts(history: History) -> str | None:
    """Find that rollouts have only a terminal token.

    The prompt looks finished to the student (it ends with a turn end, or the template adds no opening of the answer),
    or the student has collapsed to empty answers.
    """
    logs = _recent_logs(history, 3, "rows", 64)
    # the length includes the terminal token; a rollout that is truncated after one token has not stopped
    short = logs and all(log.get("generation/length", 2.0) <= 1.1 for log in logs)
    if not short or logs[-1]["generation/stopped"] < 0.9:
        return None
    return f"generation/length {logs[-1]['generation/length']:.3g}, the terminal token counted"


def no_eos(history: History) -> str | None:
    """Find that no rollout has ended.

    The student cannot know how answers end: its terminal token is not one of the terminal ids, or it is a base model
    that has not been trained on any.
    """
    stopped = any(log.get("generation/stopped", 1.0) > 0 for log in history)
    return "generation/stopped 0 in all logs" if _recent_logs(history, 5, "rows", 128) and not stopped else None


# ---- all symptoms


class Symptom(NamedTuple):
    """A problem of runs. The table of methods specifies which methods may have it, and the fix."""

    find: Callable[[History], str | None]
    """Returns the values that show the symptom."""
    description: str
    expected_loss_type: str = ""
    """The loss_type that causes this on purpose."""


SYMPTOMS = {  # in the order of the checks
    "chosen_falling": Symptom(chosen_falling, "chosen answers become less likely while the margin rises", "apo_down"),
    "kl_zero": Symptom(kl_zero, "the KL estimate is stuck at 0"),
    "no_learning": Symptom(no_learning, "the policy does not move away from its reference"),
    "clipped_rollouts": Symptom(clipped_rollouts, "rollouts are truncated at max_completion_length instead of ending"),
    "empty_rollouts": Symptom(empty_rollouts, "rollouts are empty"),
    "no_eos": Symptom(no_eos, "no rollout has ended with a terminal token"),
    "label_leak": Symptom(label_leak, "every preference was predicted correctly almost from the start"),
}
SYMPTOM_NAMES = ("nan", *SYMPTOMS)
"""Values of `train.stop_on`."""


def find_symptoms(
    history: History, remedies: Mapping[str, str], loss_types: Sequence[str] = (), skip: Collection[str] = ()
) -> dict[str, str]:
    """Return a message for each symptom that the history of a run shows, by name.

    A message has the description, the values and the remedy.

    Args:
        history: The training logs.
        remedies: Remedies by symptom, for the symptoms of the run's method.
        loss_types: The loss types of the run.
        skip: Names of symptoms that are not checked.
    """
    messages = {}
    for name, symptom in SYMPTOMS.items():
        if name in skip or name not in remedies or symptom.expected_loss_type in loss_types:
            continue
        if values := symptom.find(history):
            step = history[-1]["step"]
            messages[name] = f"step {step:.0f}: {symptom.description} ({values}). {remedies[name]}."
    return messages


# ---- histories


def _recent_logs(history: History, count: int, key: str, growth: float) -> History:
    """Return the last `count` or more logs, in which `key` (step, rows) grows by `growth`, or [] if there are fewer."""
    for n in range(count, len(history) + 1):
        before = history[-n - 1][key] if len(history) > n else 0.0
        if history[-1][key] - before >= growth:
            return history[-n:]
    return []


def _peak_learning_rate(history: History) -> int:
    """Return the index of the first log with the highest learning rate."""
    return max(range(len(history)), key=lambda n: history[n].get("learning_rate", 0.0), default=0)


def _has_moved(log: Mapping[str, float]) -> bool:
    """Return whether a mean reward differs from 0."""
    return not all(abs(log.get(name, 0.0)) < 1e-3 for name in _REWARDS)


def thin_history(history: History) -> list[Mapping[str, float]]:
    """Return a bounded number of logs that show the same symptoms, with later ones, as the entire history.

    These are the first and last HISTORY_ENDS logs, the peak of the learning rate, and the last log that rules out
    `no_learning`. The run must have been checked from its start.
    """
    count = len(history)
    last_moved = next((n for n in reversed(range(count)) if _has_moved(history[n])), 0)
    first_logs = range(min(HISTORY_ENDS, count))
    last_logs = range(max(count - HISTORY_ENDS, 0), count)
    kept = {*first_logs, _peak_learning_rate(history), last_moved, *last_logs}
    return [history[n] for n in sorted(kept)] if history else []


# ---- options


def as_list(value: list[str] | str | None) -> list[str]:
    """Return the names in an option that is None, a name, or a list of names."""
    return [value] if isinstance(value, str) else list(value or [])
