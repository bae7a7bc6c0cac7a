"""What goes wrong in training runs, seen in their logs: `find_symptoms` finds the SYMPTOMS that a history shows.

A history is the training logs so far, oldest first: each with `step`, `rows` (trained so far), and whatever was logged.
A symptom is found by a pure function from a history to the figures that show it, as text, or None. One odd log is no
symptom: every function wants several in a row.

NaN losses are found in `anomaly_monitor`, which also warns and stops. Nothing here imports torch, so recipes are
checked fast.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias

History: TypeAlias = Sequence[Mapping[str, float]]
HISTORY_ENDS = 200
"""Logs at both ends that `thin_history` keeps. More than any number of logs, steps or rows that a symptom wants: what shows
from the start is seen, or refuted, within the first HISTORY_ENDS."""
_REWARDS = ("rewards/chosen", "rewards/rejected")


# ---- preference methods


def chosen_falling(history: History) -> str | None:
    """Both answers fall, the rejected one faster: the loss sees the margin alone, and so looks well.

    Probability goes to answers that nobody wrote, and the policy degrades (arXiv 2402.13228, 2410.08847).
    """
    names = ("logps/chosen", "logps/chosen_change", "rewards/margins")
    logs = [log for log in history if all(name in log for name in names)]
    if len(logs) < 6:
        return None
    # means over three logs at both ends: does the margin rise?
    first = logs[:3]
    last = logs[-3:]
    before, margin = (mean(log["rewards/margins"] for log in part) for part in (first, last))
    if not margin > max(before, 0):
        return None
    # fallen: by 1 nat (log-probability of a whole answer) below the reference, and by a fifth of what the reference
    # gives it; a run that ends well moves by a few per cent
    falls = [(log["logps/chosen_change"], log["logps/chosen"]) for log in last]
    if not all(change <= -1.0 and change <= 0.2 * (now - change) for change, now in falls):
        return None
    change, now = falls[-1]
    return f"logps/chosen_change {change:.3g}, from {now - change:.4g}; rewards/margins {before:.2g} -> {margin:.2g}"


def kl_zero(history: History) -> str | None:
    """KTO's KL estimate is 0 at every step: below it, and so clamped, or exactly there.

    The loss then compares rewards with the constant 0 instead of the policy's own drift: with rewards of both classes
    on one side of it the loss saturates, or stays at 0.5.
    """
    # in healthy runs noise clamps many, but not all of ten
    logs = _recent_logs(history, 10, "step", 50)
    if not logs or not all(log.get("kl_clamped", 0) > 0.999 or abs(log.get("kl", 1)) < 1e-6 for log in logs):
        return None
    return f"kl {mean(log['kl'] for log in logs):.2g} over the last {len(logs)} logs, never above 0"


def no_learning(history: History) -> str | None:
    """Rewards stay at 0 although the learning rate has passed its warm-up: it is meant for another kind of training
    (LoRA wants ten times that of all weights), or bf16 weights swallow the updates.
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
    """From the second log on, and on rows that were never seen before, every preference is predicted right: by a mark
    of the label, such as a length, a template, a truncated end, or the model that wrote the answer.
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
    """The student is not taught to end its answers, and time goes into tokens behind the point where it should have."""
    logs = _recent_logs(history, 3, "rows", 64)
    if not logs or not all(log.get("generation/stopped", 1.0) <= 0.05 for log in logs):
        return None
    return f"generation/stopped {logs[-1]['generation/stopped']:.2g}, length {logs[-1]['generation/length']:.4g}"


def empty_rollouts(history: History) -> str | None:
    """Rollouts are a terminal token alone: the prompt looks finished to the student (it ends in a turn end, or the
    template adds no opening of the answer), or the student has collapsed into silence.
    """
    logs = _recent_logs(history, 3, "rows", 64)
    # the terminal token counts into the length; a rollout that is cut after one token has not ended
    short = logs and all(log.get("generation/length", 2.0) <= 1.1 for log in logs)
    if not short or logs[-1]["generation/stopped"] < 0.9:
        return None
    return f"generation/length {logs[-1]['generation/length']:.3g}, the terminal token counted"


def no_eos(history: History) -> str | None:
    """The student cannot know how answers end: its terminal token is another one than those that count, or it is a
    base model that has never seen any.
    """
    ended = any(log.get("generation/stopped", 1.0) > 0 for log in history)
    return "generation/stopped 0 in all logs" if _recent_logs(history, 5, "rows", 128) and not ended else None


# ---- all of them


class Symptom(NamedTuple):
    """A way in which runs go wrong. The table of methods says which methods have it, and what to change."""

    find: Callable[[History], str | None]  # the figures that show it
    says: str  # what it is
    unless: str = ""  # the loss_type that means to do this


SYMPTOMS = {  # in the order in which they are looked for
    "chosen_falling": Symptom(chosen_falling, "chosen answers become less likely while the margin rises", "apo_down"),
    "kl_zero": Symptom(kl_zero, "the KL estimate is stuck at 0"),
    "no_learning": Symptom(no_learning, "the policy does not leave its reference"),
    "clipped_rollouts": Symptom(clipped_rollouts, "rollouts are cut at max_completion_length instead of ending"),
    "empty_rollouts": Symptom(empty_rollouts, "rollouts are empty"),
    "no_eos": Symptom(no_eos, "no rollout has ever ended by itself"),
    "label_leak": Symptom(label_leak, "every preference was predicted right almost from the start"),
}
SYMPTOM_NAMES = ("nan", *SYMPTOMS)  # what `train.stop_on` takes


def find_symptoms(
    history: History, remedies: Mapping[str, str], loss_types: Sequence[str] = (), told: Collection[str] = ()
) -> dict[str, str]:
    """The symptoms that the history of a run shows: name -> what, with which figures, what to do.

    remedies: symptom -> what to change, for the symptoms of the run's method. told: names not to look for again.
    """
    found = {}
    for name, one in SYMPTOMS.items():
        if name in told or name not in remedies or one.unless in loss_types:
            continue
        if figures := one.find(history):
            found[name] = f"step {history[-1]['step']:.0f}: {one.says} ({figures}). {remedies[name]}."
    return found


# ---- histories


def _recent_logs(history: History, count: int, key: str, least: float) -> History:
    """The last logs: `count`, or as many as `key` (step, rows) takes to grow by `least`; none where there are fewer."""
    for n in range(count, len(history) + 1):
        before = history[-n - 1][key] if len(history) > n else 0.0
        if history[-1][key] - before >= least:
            return history[-n:]
    return []


def _peak_learning_rate(history: History) -> int:
    """The first log of the highest learning rate."""
    return max(range(len(history)), key=lambda n: history[n].get("learning_rate", 0.0), default=0)


def _has_moved(log: Mapping[str, float]) -> bool:
    """Is a mean reward off 0?"""
    return not all(abs(log.get(name, 0.0)) < 1e-3 for name in _REWARDS)


def thin_history(history: History) -> list[Mapping[str, float]]:
    """Of many logs the first and last HISTORY_ENDS, the peak of the learning rate, and the last that refutes `no_learning`.

    Later logs after these show the same as after all of them, where a run is looked at from its start.
    """
    count = len(history)
    last_moved = next((n for n in reversed(range(count)) if _has_moved(history[n])), 0)
    kept = {*range(min(HISTORY_ENDS, count)), _peak_learning_rate(history), last_moved, *range(max(count - HISTORY_ENDS, 0), count)}
    return [history[n] for n in sorted(kept)] if history else []


# ---- options


def as_names(given: list[str] | str | None) -> list[str]:
    """The names that an option gives: none, one, or a list of them."""
    return [given] if isinstance(given, str) else list(given or [])
