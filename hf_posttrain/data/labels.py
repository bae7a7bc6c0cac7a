"""Labels of single answers: what each class weighs."""

import logging
from collections.abc import Sequence

from ..errors import InputError

logger = logging.getLogger(__package__)


def class_weights(
    desirable: float | str, undesirable: float | str, labels: Sequence[bool] | None
) -> tuple[float, float]:
    """(desirable, undesirable) with `auto` resolved: the rarer class is raised until both weigh the same in total.

    Raises InputError for auto on labels of one class.
    """
    weights = {True: desirable, False: undesirable}
    if "auto" not in weights.values() or labels is None:
        resolved = [1.0 if weights[label] == "auto" else float(weights[label]) for label in (True, False)]
        return resolved[0], resolved[1]
    good = sum(labels)
    count = {True: good, False: len(labels) - good}
    if not all(count.values()):
        raise InputError(f"class weight auto needs both labels, the data has {good} desirable of {len(labels)} rows")
    for label in (True, False):
        other = 1.0 if weights[not label] == "auto" else float(weights[not label])
        if weights[label] == "auto":
            weights[label] = max(1.0, other * count[not label] / count[label])
    logger.info("class weights: desirable %.3g, undesirable %.3g", weights[True], weights[False])
    return float(weights[True]), float(weights[False])
