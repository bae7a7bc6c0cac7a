"""Names of the divergences in recipes, and a default of a loss. Importable without torch."""

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd")
"""Functions of `divergence.py`."""
SIMPO_GAMMA = 0.5
"""Default target reward margin of SimPO."""
