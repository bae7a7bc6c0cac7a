"""Rows and models for tests on two pretrained models (marker `real`)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.real.models import NotAvailable, model_folder

NAMES = ("smollm2", "gemma3")
ROWS = [
    ("Natalia sold 48 clips in April and half as many in May. How many?", "She sold 24 in May, 72 in all. #### 72"),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Write 1,234.5 + 6 in words: é, 東京, 🎉", "One thousand two hundred and forty point five."),
    ("def f(x):\n\treturn x **", " 2  # the square\n"),
]


def found(name):
    try:
        return model_folder(name)
    except NotAvailable as error:
        pytest.skip(f"{name} cannot be built: {error}")


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def rows_of(method):
    if method in ("sft", "kd", "opd"):
        return [{"prompt": f"{question}\n", "completion": answer} for question, answer in ROWS]
    if method == "kto":
        return [{"prompt": f"{q}\n", "completion": a, "label": n % 2 == 0} for n, (q, a) in enumerate(ROWS)]
    others = [answer for _, answer in ROWS[1:] + ROWS[:1]]
    return [{"prompt": f"{q}\n", "chosen": a, "rejected": b} for (q, a), b in zip(ROWS, others, strict=True)]
