"""Where a key belongs that a recipe has in the wrong place.

belongs(key, sections, method)  the end of a message, "write model.lora", or None for a key that is nowhere
"""

import re
from collections.abc import Collection, Mapping

from ..trainer.renamed import advice
from .keys import owners

_ELSEWHERE = {  # names of other libraries and habits, and the key that they mean
    "model_name_or_path": "model.name_or_path",
    "model.path": "model.name_or_path",
    "model.name": "model.name_or_path",
    "teacher.path": "teacher.name_or_path",
    "teacher.name": "teacher.name_or_path",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization: 4bit",
    "load_in_8bit": "model.quantization: 8bit",
    "use_peft": "model.lora: {r: 16}",
    "lora_r": "model.lora.r",
    "dataset": "data.train",
    "dataset_name": "data.train.path",
    "dataset_config": "data.train.name",
    "train_file": "data.train.path",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
}


def belongs(key: str, sections: Mapping[str, Collection[str]], method: str | None) -> str | None:
    """What to write instead of `key`, a dotted key that does not exist; None where its name is not known elsewhere.

    sections: the names of each section's keys, those of `train` without what only other methods have.
    """
    section, _, name = re.sub(r"\.\d+\.", ".", key).rpartition(".")
    if section == "train" and (instead := advice(name)):
        return instead
    if other := _ELSEWHERE.get(f"{section}.{name}") or _ELSEWHERE.get(name):
        return f"write {other}"
    for other, names in sections.items():
        if name in names and other != section:
            return f"write {other}.{name}"
    if section in ("", "train") and (methods := owners(name)):
        return f"it is of method {' or '.join(methods)}, not of {method}"
    return None
