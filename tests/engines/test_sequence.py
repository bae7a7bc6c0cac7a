"""Sequence parallelism: rows cut over two ranks give the losses, gradient norms and weights of one process."""

import importlib.util
import tempfile

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two
from training_for_tests import token_rows, trainer_for

from hf_posttrain import DPOConfig, SFTConfig, SFTTrainer
from hf_posttrain.check.plan import plan
from hf_posttrain.engines.sequence import shard_batch
from hf_posttrain.engines.sharded import gather_parameters
from hf_posttrain.errors import InputError
from hf_posttrain.scoring.layouts import Branch, Example, collate

pytestmark = pytest.mark.engines

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2,
    "num_train_epochs": 2, "max_steps": -1, "learning_rate": 1e-3, "max_grad_norm": 0.1, "eval_strategy": "steps",
    "eval_steps": 3,
    "adam_epsilon": 1e-5,  # or AdamW makes a step of the rounding of a gradient near 0
}  # fmt: skip


def test_cut_parts_hold_each_token_and_each_target_once():
    batch = collate([Example([1, 2], [Branch([3, 4])]), Example([5], [Branch([6])])], "padded", pad_id=9)
    # inputs 1 2 3 | 5 9 9 predict - 3 4 | 6 - -: the length 3 becomes 4, parts of 2
    first, second = shard_batch(batch, 0, 2), shard_batch(batch, 1, 2)
    assert first["input_ids"].tolist() == [[1, 2], [5, 9]]
    assert second["input_ids"].tolist() == [[3, 0], [9, 0]]
    assert first["shift_labels"].tolist() == [[-100, 3], [6, -100]]
    assert second["shift_labels"].tolist() == [[4, -100], [-100, -100]]
    assert second["position_ids"].tolist() == [[2, 3], [2, 3]]
    assert (first["scored"].tolist(), first["owner"].tolist()) == ([1, 2], [0, 1])
    assert (second["scored"].tolist(), second["owner"].tolist()) == ([0], [0])
    assert "attention_mask" not in first


def long_rows():
    """11 rows of unequal lengths, some with so long a prompt that the first part of the row has no trained token."""
    rows = token_rows("sft", 11).to_list()
    for row in rows[2:6]:
        row["prompt_ids"] *= 40 // len(row["prompt_ids"])
    return datasets.Dataset.from_list(rows)


def train(folder, config, architecture="qwen3", lora=False, resume=None):
    """(logs, trained weights) of a run of 6 steps (accumulation 2) with evaluations."""
    peft_config = peft.LoraConfig(r=4, target_modules="all-linear") if lora else None
    trainer = trainer_for(
        "sft", tiny_model(architecture), long_rows(), folder, eval_rows=long_rows().select(range(5)),
        peft_config=peft_config, **SETTINGS | config,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    with gather_parameters(*trained.values()):
        weights = {name: weight.detach().clone() for name, weight in trained.items()}
    return trainer.state.log_history, weights


def case(rank, engine, folder, config, *args):
    return train(folder, {"parallelism_config": {"sp_size": 2}} | engine_arguments(engine) | config, *args)


def assert_same(found, expected, steps):
    """Logs (what they measure, not when) and final weights within 1e-4."""
    logs = [[log for log in run[0] if "loss" in log or "eval_loss" in log] for run in (found, expected)]
    assert [log["step"] for log in logs[0]] == steps
    names = {"loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss", "eval_entropy"}
    for one, two in zip(*logs, strict=True):
        for name in names & set(two):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), (name, one, two)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


@needs_deepspeed
@pytest.mark.parametrize(
    ("engine", "architecture", "lora", "config"),
    [
        ("zero3", "qwen3", False, {}),
        pytest.param("zero2", "qwen3", False, {}, marks=pytest.mark.slow),
        pytest.param("zero3", "qwen3", True, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("zero2", "llama", True, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("zero3", "qwen3_moe", False, {}, marks=pytest.mark.slow),
        pytest.param("zero3", "granite", False, {}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_that_share_rows_train_as_one_process(engine, architecture, lora, config, tmp_path):
    expected = train(tmp_path / "one", config, architecture, lora)
    for found in on_two(case, engine, engine, str(tmp_path / "two"), config, architecture, lora):
        assert_same(found, expected, [1, 2, 3, 3, 4, 5, 6, 6])


def counted(rank, folder, count):
    """((rows of a step, steps) as the trainer has them, the same as the plan has them)."""
    config = {"parallelism_config": {"sp_size": 2}, "num_train_epochs": 2, "max_steps": -1} | engine_arguments("zero3")
    trainer = trainer_for(
        "sft", tiny_model(), long_rows().select(range(count)), folder, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, **config,
    )  # fmt: skip
    trainer.train()
    found = plan(trainer.train_dataset, SFTTrainer, trainer.args, [tiny_model()], trainer.args.world_size)
    told = trainer.get_total_train_batch_size(trainer.args), trainer.state.global_step
    return told, (found.rows_per_step, found.steps)


@needs_deepspeed
@pytest.mark.parametrize(("count", "steps"), [pytest.param(8, 4, marks=pytest.mark.slow), (9, 6)])
def test_the_plan_counts_rows_and_steps_as_the_trainer_does(count, steps, tmp_path):
    """Batches of 2 rows, 2 a step, 2 epochs. Of 9 rows each of two processes draws ceil(9 / 4) = 3 batches, and trains
    on all 6: 3 steps an epoch."""
    for trainer, planned in on_two(counted, "zero3", str(tmp_path), count):
        assert trainer == planned == (4, steps)


@needs_deepspeed
@pytest.mark.slow
def test_two_pairs_of_ranks_train_as_one_process(tmp_path):
    expected = train(tmp_path / "one", {"gradient_accumulation_steps": 4})
    for found in on_two(case, "zero3", "zero3", str(tmp_path / "four"), {}, world=4):
        assert_same(found, expected, [1, 2, 3, 3, 4, 4])


@needs_deepspeed
@pytest.mark.slow
def test_a_run_stopped_in_the_second_epoch_resumes_as_one_process_goes_on(tmp_path):
    config = {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 4}
    expected = train(tmp_path / "one", config)
    on_two(case, "zero3", "zero3", str(tmp_path / "two"), config)
    half = str(tmp_path / "two" / "checkpoint-4")
    for found in on_two(case, "zero3", "zero3", str(tmp_path / "three"), config, "qwen3", False, half):
        assert_same(found, expected, [1, 2, 3, 3, 4, 5, 6, 6])


class Mixing(torch.nn.Module):
    """Mixes a position with the one before it outside attention, as convolutions and recurrent layers do."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, hidden):
        return hidden + self.share * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def mixed(rank, share, bf16):
    """What training a model says that mixes so much."""
    model = tiny_model()
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Mixing(share))
    config = engine_arguments("zero3") | {"parallelism_config": {"sp_size": 2}, "bf16": bf16}
    try:
        trainer_for("sft", model, long_rows(), tempfile.mkdtemp(), **config).train()
    except InputError as error:
        return str(error)
    return "no error"


@needs_deepspeed
@pytest.mark.parametrize(
    ("share", "bf16", "said"),
    [
        (0.2, True, "other scores than the forward of the model"),
        pytest.param(0.0, True, "no error", marks=pytest.mark.slow),
        pytest.param(0.5, False, "other scores than the forward of the model", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_looks_across_the_cut_is_refused(share, bf16, said):
    """In bf16 too, whose rounding would hide it."""
    assert said in on_two(mixed, "zero3", share, bf16)[0]


def refusals(rank):
    """What each of these says."""
    folder = tempfile.mkdtemp()
    parallel = {"parallelism_config": {"sp_size": 2}, "output_dir": folder, "use_cpu": True, "report_to": "none"}
    zero3 = parallel | engine_arguments("zero3")
    attempts = {
        "dpo": lambda: DPOConfig(**zero3),
        "ddp": lambda: SFTConfig(**parallel),
        "zero1": lambda: SFTConfig(**parallel | engine_arguments("zero1")),
        "ranks": lambda: SFTConfig(**zero3 | {"parallelism_config": {"sp_size": 4}}),
        "shared": lambda: SFTConfig(**zero3, layout="shared"),
        "packing": lambda: SFTConfig(**zero3, packing=True),
        "exact_match": lambda: SFTConfig(**zero3, eval_exact_match=True),
        "noise": lambda: SFTConfig(**zero3, neftune_noise_alpha=5.0),
        "context": lambda: SFTConfig(**zero3 | {"parallelism_config": {"cp_size": 2}}),
        "tensor": lambda: SFTConfig(**parallel | {"parallelism_config": {"tp_size": 2}}),
        "eager": lambda: train(folder, zero3, "gemma2"),
        "window": lambda: train(folder, zero3, "mistral"),
        "gpt2": lambda: train(folder, zero3, "gpt2"),
        "router": lambda: train(folder, zero3 | {"router_aux_loss_coef": 0.1}, "qwen3_moe"),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except InputError as error:
            said[name] = str(error)
    return said | {"layout": SFTConfig(**zero3).layout}


@needs_deepspeed
def test_what_cannot_be_cut_is_refused():
    said = on_two(refusals, "zero3")[0]
    for name, words in {
        "dpo": "not supported for method dpo",
        "ddp": "ZeRO stage 2 or 3", "zero1": "ZeRO stage 2 or 3", "ranks": "not 2",
        "shared": "layout: padded", "packing": "packing cannot be combined", "exact_match": "eval_exact_match cannot",
        "noise": "neftune_noise_alpha", "context": "Use sp_size",
        "tensor": "Remove it. To shard it, use FSDP2 or ZeRO-3", "eager": "requires sdpa",
        "window": "layers of type sliding_attention with sdpa", "gpt2": "requires num_key_value_heads",
        "router": "router_aux_loss_coef: 0",
    }.items():  # fmt: skip
        assert words in said.get(name, "no error"), name
    assert said["layout"] == "padded"


def test_accelerate_launch_may_ask_for_it(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(InputError, match=r"sp_size=2\) requires DeepSpeed"):
        SFTConfig(output_dir=tempfile.mkdtemp(), use_cpu=True)
