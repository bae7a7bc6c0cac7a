"""Teachers of all kinds give on two processes the numbers of one: DDP, FSDP2 and ZeRO-2 and 3, full and LoRA."""

import functools
import itertools
import tempfile

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import ENGINES, engine_arguments, on_two
from tokenizers_for_tests import byte_tokenizer, gpt2_tokenizer
from training_for_tests import LORA, assert_same_run, fake_generate, logs_and_weights, token_rows, trainer_for
from vllm_for_tests import Serving

from hf_posttrain.engines import engine as engines
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.models.config import TeacherSection

pytestmark = pytest.mark.engines
KINDS = ("several", "mixed", "self", "served", "across")


def rows_of(kind, method, count, seed=0):
    rows = token_rows(method, count, seed).to_list()
    for n, row in enumerate(rows):
        row |= {"teacher": "a" if n % 5 else "b"} if kind in ("several", "mixed") else {}
        row |= {"teacher_prompt_ids": [3, n + 1, *row["prompt_ids"]]}
        row |= {"completion_mask": [1] * len(row["completion_ids"])} if method == "kd" else {}
    return datasets.Dataset.from_list(rows)


def options_of(kind, method, folder, url):
    """(teacher, options)"""
    if kind == "several":
        return {"a": tiny_model(seed=5), "b": tiny_model(seed=9)}, {"teacher": {"names": ["a", "b"]}}
    if kind == "self":
        return TeacherSection(self="start"), {"teacher": {"prompt": "{{ prompt }}"}}
    if kind in ("served", "mixed"):
        byte_tokenizer().save_pretrained(folder)
        tiny_model(seed=5).config.save_pretrained(folder)
        section = TeacherSection(url=url, name_or_path=folder)
        if kind == "served":
            return section, {"teacher": {"top_k": 8, "prompt": "{{ prompt }}"}}
        return {"a": tiny_model(seed=9), "b": section}, {"teacher": {"names": ["a", "b"], "top_k": 8}}
    gpt2_tokenizer().save_pretrained(folder)
    return tiny_model(seed=5, vocab_size=420), {"teacher": {"tokenizer": folder}}


def trained(rank, kind, method, engine, lora, size, url):
    """(engine that really ran, logs, weights) of four steps."""
    rollout.generate = fake_generate
    peft_config = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    torch.manual_seed(0)
    second, options = options_of(kind, method, tempfile.mkdtemp(), url)
    trainer = trainer_for(
        method, tiny_model(), rows_of(kind, method, 13), tempfile.mkdtemp(), second,
        eval_rows=rows_of(kind, method, 7, seed=3), max_steps=4, learning_rate=1e-3, max_grad_norm=1.0,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, per_device_train_batch_size=size,
        per_device_eval_batch_size=size, **options, **engine_arguments(engine), **peft_config,
    )  # fmt: skip
    trainer.train()
    return engines.engine_name(trainer.accelerator), *logs_and_weights(trainer, lora)


@pytest.fixture(scope="module")
def url():
    with Serving(tiny_model(seed=5)) as server:
        yield server.url


@functools.cache
def on_one(kind, method, lora, url):
    return on_two(trained, "single", kind, method, "single", lora, 4, url, world=1)[0]


IN_CI = {("served", "opd", "ddp", True)}


@pytest.mark.parametrize(
    ("kind", "method", "engine", "lora"),
    [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow)
     for case in itertools.product(KINDS, ("opd", "kd"), ENGINES, (False, True))],
)  # fmt: skip
def test_two_processes_give_the_numbers_of_one(kind, method, engine, lora, url):
    _, logs, weights = on_one(kind, method, lora, url)
    (name, found, weights_found), (_, found_by_other, _) = on_two(trained, engine, kind, method, engine, lora, 2, url)
    assert name == engine
    assert found == found_by_other
    assert len(found) == len(logs) > 4
    assert_same_run((found, weights_found), (logs, weights))


def average(rank, engine):
    trainer = trainer_for(
        "opd", tiny_model(), rows_of("self", "opd", 8), tempfile.mkdtemp(), TeacherSection(self="ema", ema=0.5),
        teacher={"prompt": "{{ prompt }}"}, max_steps=2, learning_rate=1e-3, **engine_arguments(engine),
    )  # fmt: skip
    rollout.generate = fake_generate
    trainer.train()
    pairs = trainer.stateful["teacher_average"].pairs()
    return {name: average.clone() for name, (average, _) in pairs.items()}


def test_a_moving_average_is_the_same_on_all_ranks_and_refused_where_weights_are_cut():
    first, second = on_two(average, "ddp", "ddp")
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    with pytest.raises(AssertionError, match=r"InputError.*the averaged weights are not sharded. Use one GPU or DDP"):
        on_two(average, "fsdp2", "fsdp2")


def fails(rank, url):
    """The teacher's server is lost on one rank: both have its error."""
    trainer = trainer_for(
        "opd", tiny_model(), rows_of("served", "opd", 12), tempfile.mkdtemp(),
        options_of("served", "opd", tempfile.mkdtemp(), url)[0], teacher={"top_k": 8}, max_steps=3,
        save_strategy="steps",
        save_steps=50,
    )  # fmt: skip
    rollout.generate = fake_generate
    if rank == 1:
        prepare = trainer.prepare_window

        def lost(batches):
            trainer.teacher.server.url = "http://127.0.0.1:9" if trainer.state.global_step == 2 else url
            return prepare(batches)

        trainer.prepare_window = lost
        trainer.teacher.server.pool.connection_pool_kw["retries"] = False
    try:
        trainer.train()
    except InputError as error:
        return str(error)


def test_a_server_that_one_rank_has_lost_ends_all_of_them(url):
    first, second = on_two(fails, "ddp", url)
    assert first == second
    assert "checkpoint-2 is saved" in first
