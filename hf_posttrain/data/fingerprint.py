"""Fingerprints of prepared rows, by which `datasets` finds them in its cache."""

from typing import Any

from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .encode import Plan
from .images import read_by

_LEFT_OUT = ("_tokenizer", "_vocab", "_merges", "picture_reader", "deprecation_warnings")
"""Attributes of a tokenizer that its backend or its processor holds as well, and warnings that it has given."""


def fingerprint(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, plan: Plan, filled: list[str]) -> str:
    """Return the fingerprint of the examples that `prepare.tokenise` makes of a dataset.

    `Dataset.map` would pickle each tokenizer in Python, which takes 9 seconds for the 262,144 tokens of Gemma 3.
    """
    parts: list[Any] = [dataset._fingerprint, fingerprint_of_tokenizer(tokenizer), plan._replace(teacher=None), filled]
    if plan.teacher is not None:
        names, prompts, tokenizers = plan.teacher
        parts += [names, prompts, {name: fingerprint_of_tokenizer(each) for name, each in tokenizers.items()}]
    return Hasher.hash(parts)


def fingerprint_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that the ids of a text, of messages, or of images depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Hasher.hash(tokenizer)
    attributes = {name: value for name, value in vars(tokenizer).items() if name not in _LEFT_OUT}
    reader = read_by(tokenizer)
    processor = (type(reader.processor), reader.processor.to_dict()) if reader else None
    return Hasher.hash([type(tokenizer), backend.to_str(), attributes, processor])
