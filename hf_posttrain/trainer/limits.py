"""Limits of numeric options, and the type of a problem with an option."""

from collections.abc import Callable
from dataclasses import dataclass

Problem = tuple[tuple[str, ...], str]
"""Names of the invalid options, the one to change first; and the message."""


@dataclass(frozen=True)
class Limit:
    """A condition that the number of an option must meet.

    Attributes:
        is_valid: Returns whether a number meets the condition.
        message: The rest of the message after `option=value` about a number that does not.
    """

    is_valid: Callable[[float], bool]
    message: str


COUNT = Limit(lambda n: n >= 1, "must be at least 1")
NOT_NEGATIVE = Limit(lambda x: 0 <= x < float("inf"), "must be at least 0")
MAX_FACTOR = 1e6
"""Largest factor and largest divisor of a loss. Adam squares gradients, and float32 ends at 3e38."""
COEFFICIENT = Limit(lambda x: 0 <= x <= MAX_FACTOR, "must be from 0 to 1e6")
POSITIVE = Limit(lambda x: 1 / MAX_FACTOR <= x <= MAX_FACTOR, "must be positive, from 1e-6 to 1e6")
ABOVE_ZERO = Limit(lambda x: 1e-38 <= x < float("inf"), "must be at least 1e-38, the smallest number of float32")
FRACTION = Limit(lambda x: 0 <= x <= 1, "must be in [0, 1]")
POSITIVE_FRACTION = Limit(lambda x: 0 < x <= 1, "must be in (0, 1]")
FRACTION_BELOW_ONE = Limit(lambda x: 0 <= x < 1, "must be in [0, 1)")
