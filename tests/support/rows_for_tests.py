"""Raw rows of every kind, so that a test over the table of methods covers a new method without an edit."""

from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from hf_posttrain.methods import METHODS

COLUMNS = {
    SUPERVISED: ("prompt", "completion"),
    PREFERENCE: ("prompt", "chosen", "rejected"),
    REWARD_PAIRS: ("prompt", "chosen", "rejected"),
    UNPAIRED: ("prompt", "completion", "label"),
    PROMPTS: ("prompt",),
}
"""Raw columns of a kind in its plainest format."""


def raw_row(kind, prompt="q", answer="a", worse="b", label=True):
    """A row in the plainest format of its kind."""
    every = {"prompt": prompt, "completion": answer, "chosen": answer, "rejected": worse, "label": label}
    return {column: every[column] for column in COLUMNS[kind]}


def methods_of(*kinds):
    """Names of the methods that train on rows of these kinds."""
    return [name for name, method in METHODS.items() if method.rows in kinds]
