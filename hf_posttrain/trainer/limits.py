"""Limits of numbers, and what a problem of an option is."""

from collections.abc import Callable
from dataclasses import dataclass

Problem = tuple[tuple[str, ...], str]
"""Names of the options that are wrong, the one to change first; and a sentence."""


@dataclass(frozen=True)
class Limit:
    """What a number must keep to."""

    holds: Callable[[float], bool]
    otherwise: str  # the end of a sentence about a number that does not


COUNT = Limit(lambda n: n >= 1, "must be at least 1")
NOT_NEGATIVE = Limit(lambda x: 0 <= x < float("inf"), "must be at least 0")
LARGEST = 1e6
"""Largest factor of a loss, and the largest that is divided by. Adam squares gradients, and float32 ends at 3e38."""
COEFFICIENT = Limit(lambda x: 0 <= x <= LARGEST, "must be from 0 to 1e6")
POSITIVE = Limit(lambda x: 1 / LARGEST <= x <= LARGEST, "must be positive, from 1e-6 to 1e6")
ABOVE_ZERO = Limit(lambda x: 1e-38 <= x < float("inf"), "must be at least 1e-38, the smallest number of float32")
SHARE = Limit(lambda x: 0 <= x <= 1, "is not in [0, 1]")
SOME = Limit(lambda x: 0 < x <= 1, "is not in (0, 1]")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "is not in [0, 1)")
