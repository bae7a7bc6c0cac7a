"""Limits of numeric options, and the type of a problem with an option."""

import math
from dataclasses import dataclass

Problem = tuple[tuple[str, ...], str]
"""Names of the invalid options, the one to change first; and the message."""


@dataclass(frozen=True)
class Limit:
    """The interval that the number of an option must be in. It contains neither NaN nor infinity.

    Attributes:
        message: The rest of the message after `option=value` about a number outside of the interval.
        at_least: Lowest number.
        at_most: Highest number.
        above: Number below the interval that is not part of it.
        below: Number above the interval that is not part of it.
        also: A number outside of the interval that is valid.
    """

    message: str
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    also: float | None = None

    def is_valid(self, number: float) -> bool:
        """Return whether a number is valid."""
        is_inside = self.at_least <= number <= self.at_most and self.above < number < self.below
        return is_inside or number == self.also


MAX_FACTOR = 1e6
"""Largest factor and largest divisor of a loss. Adam squares gradients, and float32 ends at 3e38."""
COUNT = Limit("must be at least 1", at_least=1)
NOT_NEGATIVE = Limit("must be at least 0", at_least=0)
COEFFICIENT = Limit("must be from 0 to 1e6", at_least=0, at_most=MAX_FACTOR)
POSITIVE = Limit("must be positive, from 1e-6 to 1e6", at_least=1 / MAX_FACTOR, at_most=MAX_FACTOR)
ABOVE_ZERO = Limit("must be at least 1e-38, the smallest number of float32", at_least=1e-38)
FRACTION = Limit("must be in [0, 1]", at_least=0, at_most=1)
POSITIVE_FRACTION = Limit("must be in (0, 1]", above=0, at_most=1)
FRACTION_BELOW_ONE = Limit("must be in [0, 1)", at_least=0, below=1)
