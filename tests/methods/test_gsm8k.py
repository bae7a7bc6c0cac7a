"""Point 1 of the spine: real rows, every method, 20 steps of a small random Qwen3 from its recipe, by overrides alone.

No warning that comes with it may be wrong: all of them are collected, and only those of EXPECTED may be there.
"""

import json
import logging
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers_for_tests import CHATML
from transformers import PreTrainedTokenizerFast, Qwen3Config

from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.run import main

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS, BATCH = 20, 2
FILES = {
    name: "preference" if method.rows.paired else "unpaired" if method.rows.labeled else "train"
    for name, method in TABLE.items()
}
EXPECTED = (  # a regular expression, and why it is right that it appears
    (r"^(train|eval) \(\w+\.jsonl\): \d+ rows read.* truncated \(.*max_length 256", "true: max_length is this test's"),
    (r"^eval \(\w+\.jsonl\): 8 of 8 examples are also in the training set", "true: dpo and kto have one file"),
    (r"^eval_exact_match: \d of 8 answers of the data are truncated", "true: max_length is this test's"),
    (r"torch.jit.script_method. is deprecated", "torch's own, where this is the first to import a part of it"),
    (r"the chat template does not use: chat_template_kwargs 'enable_thinking'", "true: ChatML has no such switch"),
    (r"^(train|eval) \(\w+\.jsonl\): .* lose the end of a completion", "true: max_length is this test's"),
)
SECONDS = {}


@pytest.fixture(scope="module")
def folders(gsm8k, tmp_path_factory):
    """Student and teacher: config.json (hidden 256, 4 and 6 layers) and one BPE tokenizer trained on the questions."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    rows = map(json.loads, (gsm8k / "train.jsonl").open(encoding="utf-8"))
    backend.train_from_iterator((f"{row['question']}\n{row['answer']}" for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    made = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    for layers, folder in zip((4, 6), made, strict=True):
        tokenizer.save_pretrained(folder)
        Qwen3Config(
            vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
        ).save_pretrained(folder)  # fmt: skip
    return made


def overrides(method, gsm8k, folders, out):
    """Everything that differs from the real recipe."""
    columns = "{prompt: question, completion: answer}" if FILES[method] == "train" else "null"
    test = "test" if FILES[method] == "train" else FILES[method]
    given = [
        f"model.name_or_path={folders[0]}", "model.from_scratch=true", "model.lora=null", f"train.output_dir={out}",
        "train.use_cpu=true", f"train.max_steps={STEPS}", f"train.per_device_train_batch_size={BATCH}",
        "train.gradient_accumulation_steps=1", "train.logging_steps=1", "train.max_length=256", "train.warmup_steps=2",
        "train.learning_rate=1e-3", "train.eval_strategy=no", "train.save_strategy=no",
    ]  # fmt: skip
    for split, file, limit in (("train", FILES[method], 200), ("eval", test, 8)):
        given += [f"data.{split}.path={gsm8k / file}.jsonl", f"data.{split}.columns={columns}"]
        given += [f"data.{split}.limit={limit}", f"data.{split}.name=null", f"data.{split}.split=train"]
    if TABLE[method].second == "teacher":
        given += [f"teacher.name_or_path={folders[1]}", "teacher.from_scratch=true"]
    if FILES[method] == "train":
        given += ["train.eval_max_completion_length=16"]
    return [*given, "train.max_completion_length=32"] if TABLE[method].rows.sampled else given


@pytest.fixture
def heard(caplog):
    """Warnings of the libraries as well: theirs do not reach the root logger by themselves."""
    loggers = [logging.getLogger(name) for name in ("transformers", "datasets", "accelerate", "peft", "torch")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


@pytest.mark.slow
@pytest.mark.parametrize("method", FILES)
def test_every_method_trains_on_gsm8k(method, gsm8k, folders, tmp_path, heard, recwarn):
    began = time.perf_counter()
    threads = torch.get_num_threads()
    assert main([str(RECIPES / f"{method}.yaml"), *overrides(method, gsm8k, folders, tmp_path / "out")]) == 0
    torch.set_num_threads(threads)
    SECONDS[method] = time.perf_counter() - began

    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == STEPS
    assert all(torch.isfinite(torch.tensor(losses)))
    if TABLE[method].rows.masked:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    warned = {r.getMessage() for r in heard.records if r.levelno >= logging.WARNING} | {str(w.message) for w in recwarn}
    assert [text for text in warned if not any(re.search(pattern, text) for pattern, _ in EXPECTED)] == []


@pytest.mark.slow
def test_total_time(gsm8k, capsys):
    with capsys.disabled():  # on stderr, which workers of pytest-xdist share
        each = ", ".join(f"{method} {seconds:.1f}" for method, seconds in SECONDS.items())
        print(f"\nGSM8K, {STEPS} steps of each method: {sum(SECONDS.values()):.0f} s ({each})", file=sys.stderr)
