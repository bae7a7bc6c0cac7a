"""Fingerprints of prepared rows, by which `datasets` finds them in its cache."""

from typing import Any

from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .encode import Plan
from .images import read_by

_LEFT_OUT = ("_tokenizer", "_vocab", "_merges", "picture_reader", "deprecation_warnings")
"""Attributes of a tokenizer that its backend or its processor holds as well, and warnings that it has given."""


def fingerprint(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, plan: Plan, filled: list[str]) -> str | None:
    """Return the fingerprint of the examples that `prepare.tokenise` makes of a dataset.

    `Dataset.map` would pickle each tokenizer in Python, which takes 9 seconds for the 262,144 tokens of Gemma 3. None
    leaves that to it: for tokenizers without a backend, or with a part that has no JSON.
    """
    tokenizers = plan.teacher.tokenizers if plan.teacher else {}
    try:
        state = state_of_tokenizer(tokenizer)
        of_teachers = {name: state_of_tokenizer(each) for name, each in tokenizers.items()}
    except Exception:  # `tokenizers` raises no other class
        return None
    plan = plan._replace(teacher=plan.teacher and plan.teacher._replace(tokenizers={}))
    return Hasher.hash([dataset._fingerprint, plan, state, of_teachers, filled])


def state_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return everything that the ids of a text, of messages, or of images depend on.

    Raises AttributeError for a tokenizer without a backend, and Exception for a backend that cannot be written as JSON.
    """
    backend = tokenizer.backend_tokenizer.to_str()
    attributes = {name: value for name, value in vars(tokenizer).items() if name not in _LEFT_OUT}
    if reader := read_by(tokenizer):
        processor = vars(reader.processor).items()
        attributes["processor"] = (
            type(reader.processor),
            {name: value for name, value in processor if not isinstance(value, PreTrainedTokenizerBase)},
        )
    return [type(tokenizer), backend, attributes]
