"""Names of the divergences in recipes, and defaults of losses. Importable without torch."""

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd", "entropy_aware_kl")
"""Functions of `divergence.py`."""
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
"""Keys of `preference.F_DIVERGENCES`."""
DISCOPOP_TAU = 0.05
"""Default temperature of DiscoPOP."""
SIMPO_GAMMA = 0.5
"""Default target reward margin of SimPO."""
