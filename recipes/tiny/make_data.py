"""Writes everything in this folder that is not a recipe: problems, a tokenizer, two model shapes. Seeded, no network.

    python recipes/tiny/make_data.py [FOLDER]

Git has the small files (tokenizer, shapes) and not the 59,000 rows: the quickstart and the tests run this script first.
It takes less than a second, and a file that already holds what it should is left alone.

The task is the sum of two three-digit numbers, worked from the ones up, each column with its carry:

    {"prompt": "347+589=", "completion": "16 13 9 #### 936"}        7+9=16, 4+8+1=13, 3+5+1=9

    train.jsonl      problems and solutions for the teacher     heldout.jsonl    for evaluation alone
    few.jsonl        the first of them, for the student         dpo.jsonl, kto.jsonl   right and wrong answers
    prompts.jsonl    problems without solution, for OPD         sums.jsonl       some with their sums, for rounds
    rm.jsonl         many more right and wrong answers, for a reward model
    teacher/, student/    config.json and the tokenizer that both share

No problem of heldout.jsonl, nor its mirror image (b+a), is in another file.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

SIZES = {"train": 8192, "few": 1024, "prompts": 4096, "heldout": 500, "pairs": 2048, "rm": 40960}
DIGITS = 3
SEED = 0
VOCABULARY = ["<pad>", "<eos>", *"0123456789", "+", "=", " ", " #### "]


def columns(a: int, b: int) -> list[int]:
    """The sums of the columns of a + b from the ones up, carries included: 347, 589 -> [16, 13, 9]."""
    sums = []
    carry = 0
    while a or b:
        sums.append(a % 10 + b % 10 + carry)
        a = a // 10
        b = b // 10
        carry = sums[-1] // 10
    return sums


def solution(a: int, b: int) -> dict[str, str]:
    """A problem and its worked solution."""
    working = " ".join(map(str, columns(a, b)))
    return {"prompt": f"{a}+{b}=", "completion": f"{working} #### {a + b}"}


def slip(a: int, b: int, random_: random.Random) -> str:
    """A wrong solution: in one column the carry is forgotten or added where there is none, the rest follows from it."""
    place = random_.randrange(DIGITS)
    sums = []
    carry = 0
    for n in range(DIGITS):
        sums.append(a // 10**n % 10 + b // 10**n % 10 + ((1 - carry) if n == place else carry))
        carry = sums[-1] // 10
    total = sum(value % 10 * 10**n for n, value in enumerate(sums)) + carry * 10**DIGITS
    return f"{' '.join(map(str, sums))} #### {total}"


def problems(random_: random.Random, count: int, taken: set[frozenset[int]]) -> list[tuple[int, int]]:
    """`count` new pairs of three-digit numbers; no pair, either way round, is in `taken`, and all are added to it."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        a, b = (random_.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
        if frozenset((a, b)) not in taken:
            taken.add(frozenset((a, b)))
            found.append((a, b))
    return found


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of each file."""
    random_ = random.Random(SEED)
    taken = set[frozenset[int]]()
    heldout = problems(random_, SIZES["heldout"], taken)
    train = problems(random_, SIZES["train"], taken)
    prompts = problems(random_, SIZES["prompts"], taken)
    pairs = problems(random_, SIZES["pairs"], taken)
    right = [solution(a, b) for a, b in pairs]
    wrong = [slip(a, b, random_) for a, b in pairs]
    rows: dict[str, list[dict[str, Any]]] = {
        "heldout": [{**solution(a, b), "rejected": slip(a, b, random_)} for a, b in heldout],
        "train": [solution(a, b) for a, b in train],
        "prompts": [{"prompt": f"{a}+{b}="} for a, b in prompts],
        "dpo": [
            {"prompt": r["prompt"], "chosen": r["completion"], "rejected": w} for r, w in zip(right, wrong, strict=True)
        ],
        "kto": [
            {**r, "label": True} if n % 2 else {**r, "completion": w, "label": False}
            for n, (r, w) in enumerate(zip(right, wrong, strict=True))
        ],
    }
    rows["rm"] = [
        {"prompt": f"{a}+{b}=", "chosen": solution(a, b)["completion"], "rejected": slip(a, b, random_)}
        for a, b in problems(random_, SIZES["rm"], taken)
    ]
    rows["few"] = rows["train"][: SIZES["few"]]
    rows["sums"] = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in prompts[: SIZES["few"]]]
    return rows


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """A tokenizer of single characters, and ` #### ` as one token."""
    special = [
        {
            "id": n,
            "content": VOCABULARY[n],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n in (0, 1)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " #### |."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {token: n for n, token in enumerate(VOCABULARY)}, "unk_token": "<pad>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def model_config(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """A small Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.05,
    }


def write(folder: Path) -> None:
    """Every file, below `folder`."""
    for name, rows in make_rows().items():
        _write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name, shape in {"teacher": (96, 3, 4), "student": (64, 2, 4)}.items():
        for file, content in {"config.json": model_config(*shape), **tokenizer_files()}.items():
            _write(folder / name / file, json.dumps(content, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Make the file `path` with this content, or leave it as it is where that is its content.

    The time of a file is part of the key under which `datasets` caches its rows, so it may not change for nothing. The
    file appears under its name whole: several processes may write at the same time.
    """
    content = text.encode()
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
