"""Which curves share a chart, what a reader should see in it, and where charts stand.

    charts(history)         the charts of one run, in order
    shared_charts(runs)     the same metrics of several runs: a chart for each, a line for each run
    Chart, Line             a chart and its lines

A metric that nobody here knows (from compute_metrics, say) gets a chart of its own at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .history import History, Series


@dataclass(frozen=True)
class Line:
    """A curve: its name in the legend, the number of its colour, and its points."""

    label: str
    colour: int
    series: Series
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over optimizer steps."""

    group: str
    title: str
    note: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class _Kind:
    group: str
    title: str
    metrics: Mapping[str, str]
    """Metric: its name in the legend."""
    note: str = ""


QUALITY, METHOD, LENGTHS, OPTIMISER, MACHINE, OTHER = (
    "Loss and quality", "What the method moves", "Answers", "Optimiser", "Machine", "Other metrics",
)  # fmt: skip
KINDS = (
    _Kind(QUALITY, "Loss", {"loss": "loss"}, "Evaluation loss that rises while training loss falls: overfitting."),
    _Kind(QUALITY, "Exact match", {"exact_match": "exact match"}, "Share of greedy answers that end right."),
    _Kind(QUALITY, "Token accuracy", {"mean_token_accuracy": "accuracy"}, "Share of trained tokens ranked first."),
    _Kind(QUALITY, "Reward accuracy", {"rewards/accuracies": "accuracy"},
          "Share of pairs whose chosen answer has the higher reward. Near 1 from the first steps: look for a leak."),
    _Kind(METHOD, "Rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
          "beta times the log-ratio to the reference. Both falling together: the policy forgets both answers."),
    _Kind(METHOD, "Reward margin", {"rewards/margins": "margin"}, "Chosen less rejected reward; it should rise."),
    _Kind(METHOD, "Log-probabilities", {"logps/chosen": "chosen", "logps/rejected": "rejected"},
          "Sum over an answer's tokens, under the policy."),
    _Kind(METHOD, "Chosen against the reference", {"logps/chosen_change": "change"},
          "Log-probability of chosen answers less the reference's. Well below 0: they become unlikely too."),
    _Kind(METHOD, "KL estimate", {"kl": "KL"}, "Distance from the reference. Always 0: the policy stands still."),
    _Kind(METHOD, "KL clamped at 0", {"kl_clamped": "share"}, "Share of steps whose estimate was negative."),
    _Kind(METHOD, "Delta", {"delta": "delta"}, "BCO's running mean of rewards."),
    _Kind(METHOD, "Reverse KL to the teacher", {"distill/reverse_kl": "reverse KL"}, "Per token; it should fall."),
    _Kind(METHOD, "Log-probability per token", {"logprob/student": "student", "logprob/teacher": "teacher"},
          "Of the student's own answers. The teacher's rises as they become better."),
    _Kind(METHOD, "Perplexity", {"perplexity/student": "student", "perplexity/teacher": "teacher"},
          "Of the student's own answers."),
    _Kind(METHOD, "Entropy", {"entropy": "entropy"}, "Of the policy, per token. A collapse to 0: it no longer varies."),
    _Kind(LENGTHS, "Rollout length", {"generation/length": "tokens"}, "Mean tokens of a sampled answer."),
    _Kind(LENGTHS, "Rollouts that ended", {"generation/stopped": "share"},
          "Share that stopped by themselves before the limit. Low: raise max_completion_length, or look at EOS."),
    _Kind(OPTIMISER, "Learning rate", {"learning_rate": "rate"}),
    _Kind(OPTIMISER, "Gradient norm", {"grad_norm": "norm"}, "Before clipping."),
    _Kind(MACHINE, "Tokens per second", {"tokens_per_second": "tokens/s"}, "Through the policy, all processes."),
    _Kind(MACHINE, "Peak memory", {"peak_memory_gib": "GiB"}, "GiB, of the process with the most."),
)  # fmt: skip
REPEATED = ("logprob/gap", "distill/advantage")
"""Metrics that are the difference of two others that are shown."""


def charts(history: History) -> list[Chart]:
    """Charts of one run: training solid, evaluation dashed in the same colour."""
    return [
        Chart(kind.group, kind.title, kind.note, lines)
        for kind in _kinds([history])
        if (lines := tuple(_lines(kind, history)))
    ]


def shared_charts(histories: Mapping[str, History]) -> list[Chart]:
    """One chart for each metric and split that at least one run has: {name of a run: its history}."""
    found = []
    for kind in _kinds(list(histories.values())):
        for metric, label in kind.metrics.items():
            for key, split in ((metric, "training"), (f"eval_{metric}", "evaluation")):
                lines = tuple(
                    Line(name, number, history[key])
                    for number, (name, history) in enumerate(histories.items())
                    if key in history
                )
                title = kind.title if len(kind.metrics) == 1 else f"{kind.title}, {label}"
                if lines:
                    found.append(Chart(kind.group, f"{title} ({split})", kind.note, lines))
    return found


def _lines(kind: _Kind, history: History) -> list[Line]:
    """Training and evaluation of each metric; the legend names what tells the lines apart."""
    lines = []
    for colour, (metric, label) in enumerate(kind.metrics.items()):
        for key, split in ((metric, "training"), (f"eval_{metric}", "evaluation")):
            if key in history:
                name = split if len(kind.metrics) == 1 else f"{label}, {split}"
                lines.append(Line(name, colour, history[key], dashed=split == "evaluation"))
    return lines


def _kinds(histories: list[History]) -> list[_Kind]:
    """The known kinds, and one for every other metric, by name."""
    known = {metric for kind in KINDS for metric in kind.metrics} | {*REPEATED}
    metrics = {series.metric for history in histories for series in history.values()}
    return [*KINDS, *(_Kind(OTHER, name, {name: name}) for name in sorted(metrics - known))]
