"""The exception for a user's mistake: recipe, data or arguments."""


class InputError(ValueError):
    """A mistake in what the user gave: its message says what, where (file, line, row, key) and what to do.

    The command prints the message alone and exits with 2; in Python it is an ordinary `ValueError`.
    """


class LaunchError(InputError):
    """A mistake in how a run was launched, or in the engine it asks for: no line of the recipe is to blame."""
