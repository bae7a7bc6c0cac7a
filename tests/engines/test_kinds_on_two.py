"""Hybrids, mixtures of experts and models that see give on two processes the numbers of one, full and LoRA.

LoRA of a mixture adapts its experts too, which are tensors of three dimensions.
"""

import functools
import itertools
import tempfile

import peft
import pytest
import torch
from architectures import tiny
from processes_for_tests import ENGINES, engine_arguments, on_two
from training_for_tests import LORA, assert_same_run, fake_generate, logs_and_weights, token_rows, trainer_for
from vision_for_tests import pictures, processor_of, seeing

from hf_posttrain.engines import engine as engines
from hf_posttrain.generation import rollout

pytestmark = pytest.mark.engines
KINDS = {"hybrid": "qwen3_5_text", "mixture": "qwen3_moe", "sinks": "gpt_oss", "seeing": "qwen3_vl", "both": "qwen3_5"}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def model_of(kind, seed=0):
    return seeing(KINDS[kind], seed)[0] if kind in ("seeing", "both") else tiny(KINDS[kind], seed, scale=3.0)


def rows_of(kind, method, count, seed=0):
    """Of a model that sees, conversations with a picture, or none in each fourth."""
    if kind not in ("seeing", "both"):
        return token_rows(method, count, seed)
    rows = []
    for n in range(count):
        image = {"type": "image", "image": pictures()[(n + seed) % 2]}
        content = [*([image] if n % 4 else []), {"type": "text", "text": f"What is {n}?" + " So?" * (n % 3)}]
        turn = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
        answers = {"chosen": turn(f"It is {n}."), "rejected": turn("I do not know" + "!" * n)}
        rows.append({"prompt": [{"role": "user", "content": content}]} | (answers if method == "dpo" else {}))
    return rows


def trained(rank, kind, method, engine, lora, size):
    """(engine that really ran, logs, weights) of three steps; of gradients of rounding size AdamW makes no steps."""
    rollout.generate = fake_generate
    options = {"tokenizer": processor_of(KINDS[kind])} if kind in ("seeing", "both") else {}
    if lora:
        options["peft_config"] = peft.LoraConfig(**LORA, **(EXPERTS if kind in ("mixture", "sinks") else {}))
    torch.manual_seed(0)
    second = model_of(kind, seed=5) if method == "opd" else None
    trainer = trainer_for(
        method, model_of(kind), rows_of(kind, method, 9), tempfile.mkdtemp(), second,
        eval_rows=rows_of(kind, method, 3, seed=1), max_steps=3, learning_rate=1e-3, max_grad_norm=1.0,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, per_device_train_batch_size=size,
        per_device_eval_batch_size=size, adam_epsilon=1e-5, **options, **engine_arguments(engine, None),
    )  # fmt: skip
    trainer.train()
    return engines.engine_name(trainer.accelerator), *logs_and_weights(trainer, lora)


@functools.cache
def on_one(kind, method, lora):
    return on_two(trained, "single", kind, method, "single", lora, 2, world=1)[0]


IN_CI = {("hybrid", "dpo", "fsdp2", False)}


@pytest.mark.parametrize(
    ("kind", "method", "engine", "lora"),
    [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow)
     for case in itertools.product(KINDS, ("dpo", "opd"), ENGINES, (False, True))],
)  # fmt: skip
def test_two_processes_give_the_numbers_of_one(kind, method, engine, lora):
    _, logs, weights = on_one(kind, method, lora)
    (name, found, weights_found), (_, found_by_other, _) = on_two(trained, engine, kind, method, engine, lora, 1)
    assert name == engine
    assert found == found_by_other
    assert len(found) == len(logs) > 3
    assert_same_run((found, weights_found), (logs, weights))
