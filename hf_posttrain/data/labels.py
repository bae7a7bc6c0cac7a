"""Labels of single answers: what each class weighs."""

import logging
from collections.abc import Sequence

from ..errors import InputError

logger = logging.getLogger(__package__)


def class_weights(
    desirable: float | str, undesirable: float | str, labels: Sequence[bool] | None
) -> tuple[float, float]:
    """(desirable, undesirable) with `auto` resolved: the rarer class is raised until both weigh the same in total.

    Without labels, auto is 1. Raises InputError for auto on labels of one class.
    """
    known = [1.0 if weight == "auto" else float(weight) for weight in (desirable, undesirable)]
    if labels is None or "auto" not in (desirable, undesirable):
        return known[0], known[1]
    good = sum(labels)
    counts = good, len(labels) - good
    if not all(counts):
        raise InputError(f"class weight auto needs both labels, the data has {good} desirable of {len(labels)} rows")
    for one, other, weight in ((0, 1, desirable), (1, 0, undesirable)):
        if weight == "auto":
            known[one] = max(1.0, known[other] * counts[other] / counts[one])
    logger.info("class weights: desirable %.3g, undesirable %.3g", *known)
    return known[0], known[1]
