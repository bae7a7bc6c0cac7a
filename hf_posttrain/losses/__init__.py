"""All the mathematics, as pure functions of tensors: nothing here knows of models, batches or trainers.

preference.py   pairs (DPO and its family) and single labelled answers (KTO, BCO)
divergence.py   distances between two next-token distributions, and the on-policy policy gradient
"""

from .divergence import DIVERGENCES, discounted, forward_kl, policy_gradient, reverse_kl, top_k_buckets, with_tail
from .preference import PAIRED, REFERENCE_FREE, UNPAIRED, PairedOptions, Pairs

__all__ = [
    "DIVERGENCES",
    "PAIRED",
    "REFERENCE_FREE",
    "UNPAIRED",
    "PairedOptions",
    "Pairs",
    "discounted",
    "forward_kl",
    "policy_gradient",
    "reverse_kl",
    "top_k_buckets",
    "with_tail",
]
