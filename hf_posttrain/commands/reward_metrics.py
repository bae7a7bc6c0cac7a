"""Metrics of a reward model on pairs: accuracy, likelihood and calibration."""

import math
from collections.abc import Sequence
from statistics import fmean

BINS = 10
"""Number of bins of the confidence, from 0.5 to 1."""


def reward_metrics(chosen: Sequence[float], rejected: Sequence[float]) -> dict[str, float]:
    """Return the metrics of the rewards of chosen and rejected answers.

    `pair_accuracy` is the share of pairs whose chosen answer has the larger reward. `pair_nll` is the mean of
    -log sigmoid(chosen - rejected). `calibration_error` is the expected calibration error: the mean distance of
    confidence and accuracy over 10 bins of the confidence sigmoid(|chosen - rejected|), weighted by their sizes.
    `mean_reward` is the mean of all rewards.
    """
    differences = [good - bad for good, bad in zip(chosen, rejected, strict=True)]
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for difference in differences:
        confidence = 1 / (1 + math.exp(-min(abs(difference), 700.0)))
        number = min(int((confidence - 0.5) * 2 * BINS), BINS - 1)
        bins[number].append((confidence, difference > 0))

    gaps = [abs(sum(correct - confidence for confidence, correct in pairs)) for pairs in bins]
    return {
        "pair_accuracy": fmean(difference > 0 for difference in differences),
        "pair_nll": fmean(_softplus(-difference) for difference in differences),
        "calibration_error": sum(gaps) / len(differences),
        "mean_reward": fmean([*chosen, *rejected]),
    }


def _softplus(value: float) -> float:
    """Return log(1 + exp(value))."""
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))
