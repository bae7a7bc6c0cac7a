"""Fingerprints of prepared rows, the keys of their cache in `datasets`."""

from typing import Any

from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from .encode import Plan
from .images import get_image_reader

_EXCLUDED = ("_tokenizer", "_vocab", "_merges", "image_reader", "deprecation_warnings")
"""Attributes of a tokenizer that are not hashed: its backend or its processor holds the same, or they are warnings that
it has already given."""


def fingerprint(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, plan: Plan, filled: list[str]) -> str | None:
    """Return the fingerprint of the examples that `prepare.tokenise` makes of a dataset.

    `Dataset.map` would pickle each tokenizer in Python, which takes 9 seconds for the 262,144 tokens of Gemma 3.

    Args:
        dataset: The raw rows.
        tokenizer: The student's tokenizer.
        plan: Options of the preparation, with the tokenizers of teachers.
        filled: Columns with keys that Arrow filled with None, see `prepare.null_filled_columns`.

    Returns:
        None if `Dataset.map` must compute the fingerprint itself, because a tokenizer has no backend, or has a part
        that cannot be written as JSON.
    """
    tokenizers = plan.teacher.tokenizers if plan.teacher else {}
    try:
        student_state = tokenizer_state(tokenizer)
        teacher_states = {name: tokenizer_state(teacher) for name, teacher in tokenizers.items()}
    except Exception:  # `tokenizers` raises no more specific class
        return None
    # names occur in messages alone: another method with the same columns uses the same cache
    plan = plan._replace(method="", name="", teacher=plan.teacher and plan.teacher._replace(tokenizers={}))
    return Hasher.hash([dataset._fingerprint, plan, student_state, teacher_states, filled])


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return everything that the ids of a text, of messages, or of images depend on.

    Raises:
        AttributeError: If the tokenizer has no backend.
        Exception: If the backend cannot be written as JSON.
    """
    backend = tokenizer.backend_tokenizer.to_str()
    attributes = {name: value for name, value in vars(tokenizer).items() if name not in _EXCLUDED}
    if reader := get_image_reader(tokenizer):
        processor_attributes = vars(reader.processor).items()
        attributes["processor"] = (
            type(reader.processor),
            {name: value for name, value in processor_attributes if not isinstance(value, PreTrainedTokenizerBase)},
        )
    return [type(tokenizer), backend, attributes]
