"""Names of the divergences in recipes. Importable without torch."""

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd")
"""Functions of `divergence.py`."""
