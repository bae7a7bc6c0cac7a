"""Every causal LM of the installed transformers that builds tiny: layouts, answers, saving, LoRA, dropout off.

Each is compared with the model's own forward (`hunt_architectures`): equal, refused in one line, or known to be wrong
in transformers or PEFT themselves (`UPSTREAM`). The rest would be silently wrong.
"""

import logging

import pytest
from architectures import NAMES
from hunt_architectures import EQUAL, examine

from hf_posttrain.errors import InputError

QUICK = ("llama", "qwen3_5_text", "gpt_oss", "deepseek_v3")
UPSTREAM = {
    "diffllama": ("dropout", "its forward refuses attention_dropout"),
    "emu3": ("whole", "its text config is none of AutoModelForCausalLM's"),
    "mllama": ("whole", "the same"),
    "prophetnet": ("generation: generation", "no trainer takes it; its positions are other ones with a cache"),
    "youtu": ("whole: saved", "loading zeroes the padding token's row of a tied embedding; the file is right"),
    "zaya": ("whole", "its config is validated when it is loaded"),
}
"""What fails in transformers itself: the part of the examination, and why."""
counts: dict[str, list[str]] = {"tried": [], "not built": [], "refused": [], "equal": [], "upstream": []}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_an_architecture_is_right_or_refused(name, tmp_path):
    logging.disable(logging.WARNING)
    try:
        found = examine(name, tmp_path)
    finally:
        logging.disable(logging.NOTSET)
    counts["tried"].append(name)
    if "built" in found:
        counts["not built"].append(f"{name}: {found['built']}")
        return
    refused = {part: value for part, value in found.items() if isinstance(value, InputError)}
    counts["refused"] += [f"{name}, {part}: {value}" for part, value in refused.items()]
    assert not any("\n" in str(value) for value in refused.values())
    wrong = {part: value for part, value in found.items()
             if part not in refused and not (isinstance(value, float) and value < EQUAL)}  # fmt: skip
    if "layouts" in refused:  # no trainer takes it; it may still answer
        wrong = {part: value for part, value in wrong.items() if part.startswith("generation")}
    if name in UPSTREAM:
        counts["upstream"].append(f"{name}: {wrong}")
        assert [*wrong] == [UPSTREAM[name][0]]
        return
    assert not wrong
    if not refused:
        counts["equal"].append(name)


@pytest.mark.slow
def test_the_counts_of_architectures():
    """After the others: how many were tried, how many are equal, and what is refused and why."""
    for what, names in counts.items():
        print(f"{what}: {len(names)}")
        for line in names if what != "tried" else []:
            print(f"    {line}")
