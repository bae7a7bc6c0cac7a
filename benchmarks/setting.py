"""What both sides of a benchmark are given: rows of GSM8K, a tokenizer and a model of random weights.

SHAPES           the models: `small` (44 million weights) for CPU, sizes of Qwen3 and Gemma 3 for GPUs, and `tiny`
read_rows        method -> rows of plain strings, evenly spaced over the file
write_model      a byte-level BPE tokenizer trained on the rows' text, and config.json, in one folder
build_model      the folder -> random weights from a seed
configured, random_model, random_batch      the same without a folder, and tokens for it
ends             what ends a rollout of them
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posttrain.methods import METHODS

if TYPE_CHECKING:
    from hf_posttrain.batching.micro_batch import MicroBatch

BPE_VOCABULARY = 32_768
ENDS = 80
"""One in so many tokens ends a rollout: random weights would hardly ever draw the one EOS."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
    },
}
SPECIALS = ["<|endoftext|>", "<|pad|>"]
PLAIN = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
"""A chat template that adds nothing but the end: the same tokens as prompt and completion as strings."""
PAIRED = tuple(name for name, method in METHODS.items() if method.rows.paired)
"""Methods whose rows have two answers."""
FILES = {"kto": "unpaired.jsonl"} | dict.fromkeys(PAIRED, "preference.jsonl")
"""The others read train.jsonl."""
Row = dict[str, Any]


def read_rows(data: Path, method: str, count: int, shots: int = 0, answers: int = 1) -> list[Row]:
    """`count` rows in the columns that both sides read. data: GSM8K's folder, or a file of question and answer rows.

    A plain file has no preferences: another row's answer stands in for the rejected or undesirable one.
    shots: so many solved examples stand before each prompt (long prompts, short answers).
    answers: each answer goes on with those of other rows, so many in all (short prompts, long answers).
    Raises SystemExit where there are too few rows.
    """
    rows = _plain_rows(data, method, count)
    column = "chosen" if method in PAIRED else "completion"
    solved = [row["prompt"] + row[column] + "\n\n" for row in rows]
    texts = ["".join(solved[(n + 1 + k) % len(rows)] for k in range(shots)) for n in range(len(rows))]
    more = ["".join("\n" + rows[(n + k) % len(rows)][column] for k in range(1, answers)) for n in range(len(rows))]
    columns = [name for name in ("completion", "chosen", "rejected") if name in rows[0]]
    return [
        row | {"prompt": text + row["prompt"]} | {name: row[name] + rest for name in columns}
        for row, text, rest in zip(rows, texts, more, strict=True)
    ]


def _plain_rows(data: Path, method: str, count: int) -> list[Row]:
    rows = list(_lines(data / FILES.get(method, "train.jsonl") if data.is_dir() else data))
    if len(rows) < count:
        raise SystemExit(f"error: {method}: {count} rows are wanted and {data} has {len(rows)}")
    rows = [rows[n * len(rows) // count] for n in range(count)]
    if "question" in rows[0]:
        pairs = [(row["question"], row["answer"]) for row in rows]
        return [_row(method, n, prompt, answer, pairs[n - 1][1]) for n, (prompt, answer) in enumerate(pairs)]
    if missing := [name for name in _columns(method) if name not in rows[0]]:
        raise SystemExit(f"error: {data} has neither question and answer nor {', '.join(missing)}")
    return [{name: row[name] for name in _columns(method)} for row in rows]


def _row(method: str, number: int, prompt: str, answer: str, other: str) -> Row:
    if method in PAIRED:
        return {"prompt": prompt, "chosen": answer, "rejected": other}
    if method == "kto":
        return {"prompt": prompt, "completion": other if number % 2 else answer, "label": number % 2 == 0}
    return {"prompt": prompt, "completion": answer}


def _columns(method: str) -> tuple[str, ...]:
    if method in PAIRED:
        return "prompt", "chosen", "rejected"
    return ("prompt", "completion", "label") if method == "kto" else ("question", "answer")


def _lines(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def write_model(folder: Path, data: Path, shape: str = "small", vocabulary: int = BPE_VOCABULARY) -> None:
    """Tokenizer and config.json of a model with tied embeddings, in `folder`.

    vocabulary: rows of the embedding; the tokenizer fills the first 32768 of them at most.
    """
    train_tokenizer(data, vocabulary).save_pretrained(folder)
    configured(shape, vocabulary).save_pretrained(folder)


def train_tokenizer(data: Path, vocabulary: int = BPE_VOCABULARY) -> Any:
    """Return a byte-level BPE tokenizer of at most 32768 tokens, trained on the rows of `data`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, BPE_VOCABULARY),
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for row in _lines(data / "train.jsonl" if data.is_dir() else data) for text in row.values())
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIALS[0], pad_token=SPECIALS[1])
    tokenizer.chat_template = PLAIN
    return tokenizer


def configured(shape: str, vocabulary: int) -> Any:
    """Return the config of a shape, with an embedding of `vocabulary` rows: a Qwen3 unless the shape names a type."""
    from transformers import AutoConfig

    options: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True} | SHAPES[shape]
    return AutoConfig.for_model(**options, vocab_size=vocabulary, eos_token_id=0, pad_token_id=1, bos_token_id=None)


def build_model(spec: Row, seed: int) -> Any:
    """Return the model of `write_model` with random weights from a seed. For `rm` it has a score layer.

    spec: method, folder, device, dtype, attention.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if spec["method"] == "rm":
        config = AutoConfig.from_pretrained(spec["folder"], num_labels=1)
        return random_model(config, spec, seed, AutoModelForSequenceClassification)
    return random_model(AutoConfig.from_pretrained(spec["folder"]), spec, seed)


def random_model(config: Any, spec: Row, seed: int = 0, kind: Any = None) -> Any:
    """Return a model with random weights, the same for every caller with this seed. spec: device, dtype, attention.

    kind: the auto class, by default that of causal LMs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(spec["device"]):
        return (kind or AutoModelForCausalLM).from_config(
            config, dtype=getattr(torch, spec["dtype"]), attn_implementation=spec["attention"]
        )


def random_batch(
    lengths: list[list[int]], vocabulary: int, layout: str, device: str, row_multiple: int | None = None
) -> "MicroBatch":
    """Return a batch on the device of examples with random tokens. lengths: of each prompt and of its answers."""
    import torch

    from hf_posttrain.scoring.layouts import Branch, Example, collate

    draw = torch.Generator().manual_seed(0)
    ids = [[torch.randint(vocabulary, (n,), generator=draw).tolist() for n in row] for row in lengths]
    examples = [Example(prompt, [Branch(answer) for answer in answers]) for prompt, *answers in ids]
    return collate(examples, layout, row_multiple=row_multiple).to(device)


def check_device(parser: Any, device: str) -> None:
    """Ends the command with a line where the device is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: to try the command, --device cpu --shape tiny")


def ends(vocabulary: int) -> list[int]:
    """What ends a rollout."""
    return [0, *range(ENDS, vocabulary, ENDS)]
