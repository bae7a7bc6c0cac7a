"""A run that is stopped in mid-epoch and resumed has the losses of the run that was not, step by step."""

import json
import math
import shutil

import peft
import pytest
import torch
from datasets import IterableDataset
from models_for_tests import CONFIGS, tiny_model
from training_for_tests import METHODS, has_head, logged, quick, second_model, token_rows, trainer_for
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_posttrain.trainer import checkpoint

VARIANTS = [(method, {}) for method in METHODS] + [
    ("dpo", {"precompute_ref_log_probs": True}), ("kto", {"loss_type": "bco"}),
    ("opd", {"loss_type": "policy_gradient"}), ("opd", {"lmbda": 0.5, "num_generations": 2}),
    ("sft", {"neftune_noise_alpha": 5.0}), ("dpo", {"train_sampling_strategy": "group_by_length"}),
]  # fmt: skip
VARIANTS = [pytest.param(*variant, marks=[] if variant[1] or variant[0] in ("sft", "opd") else pytest.mark.slow)
            for variant in VARIANTS]  # fmt: skip


def trainer(method, tmp_path, lora, config, architecture="qwen3"):
    torch.manual_seed(3)
    model = tiny_model(architecture, attention_dropout=0.1)
    if lora:
        config = config | {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)}
    second = second_model(method, architecture, 9)
    config = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8, "learning_rate": 1e-3,
        "save_strategy": "steps", "save_steps": 4, "train_sampling_strategy": "random", "disable_dropout": False,
        "num_train_epochs": 3, "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
    } | config  # fmt: skip
    return trainer_for(method, model, token_rows(method, 11), tmp_path, second=second, **config)


def history(done):
    return [log for log in logged(done) if "loss" in log]


def assert_resume_is_exact(method, config, lora, tmp_path, architecture):
    whole = trainer(method, tmp_path / "whole", lora, config, architecture)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "half" / "checkpoint-4")  # 11 rows: mid-epoch 2
    torch.manual_seed(12345)  # nothing may hang on the state of the global generator
    resumed = trainer(method, tmp_path / "half", lora, config, architecture)
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-4"))

    assert [log["step"] for log in history(whole)] == list(range(1, 9))
    assert history(resumed)[4:] == history(whole)[4:]  # bit for bit
    for before, after in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("method", "config"), VARIANTS, ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else v
)
def test_resume_reproduces_the_uninterrupted_run(method, config, lora, tmp_path):
    assert_resume_is_exact(method, config, lora, tmp_path, "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        (method, architecture)
        for method in METHODS
        for architecture in CONFIGS
        if architecture not in ("qwen3", "gpt2") and has_head(method, architecture)
    ],
)
def test_resume_of_every_architecture(method, architecture, tmp_path):
    assert_resume_is_exact(method, {}, False, tmp_path, architecture)


class Counting(TrainerCallback, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {}}


def test_a_resumed_run_has_the_patience_that_it_had(tmp_path):
    """Two callbacks of one class, of which HF's state keeps every save, and one that comes only when it is resumed."""

    def trainer(*more):
        return trainer_for(
            "sft", tiny_model(), token_rows("sft"), tmp_path, eval_rows=token_rows("sft"), max_steps=9,
            learning_rate=1e-2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, greater_is_better=True,
            callbacks=[EarlyStoppingCallback(3), EarlyStoppingCallback(7), *more],
        )  # fmt: skip

    whole, again = trainer(), trainer(Counting())
    whole.train()
    assert whole.state.global_step == 4
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 4


@pytest.mark.parametrize("method", quick("opd", among=METHODS))
def test_same_seed_same_run_and_another_seed_another(method, tmp_path):
    seeds = (1, 1, 2)
    runs = [trainer(method, tmp_path / str(n), False, {"max_steps": 3, "seed": s}) for n, s in enumerate(seeds)]
    for run in runs:
        run.train()
    assert history(runs[0]) == history(runs[1])
    assert history(runs[0])[1:] != history(runs[2])[1:]


@pytest.mark.parametrize(("count", "accumulated", "saved", "steps"), [
    pytest.param(9, 1, "steps", [4], marks=pytest.mark.slow),  # in the first pass
    pytest.param(3, 1, "epoch", [3], marks=pytest.mark.slow),  # between two
    (5, 2, "steps", [3, 4]),  # in the second, and at its end, where a row is left out
])  # fmt: skip
def test_a_stream_is_resumed_in_the_pass_and_at_the_row_where_it_was(count, accumulated, saved, steps, tmp_path):
    def trained(folder, max_steps, resumed=None):
        rows = IterableDataset.from_generator(lambda: iter(token_rows("sft", count))).shuffle(seed=3, buffer_size=9)
        options = {
            "max_steps": max_steps, "learning_rate": 1e-2, "save_strategy": saved, "eval_strategy": saved,
            "save_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulated,
        }  # fmt: skip
        done = trainer_for("sft", tiny_model(), rows, folder, eval_rows=token_rows("sft", 2), **options)
        done.train(resume_from_checkpoint=resumed)
        return [(log["step"], log.get("loss"), log.get("eval_loss")) for log in logged(done)]

    whole = trained(tmp_path / "whole", 6)
    trained(tmp_path / "half", 4)  # at a constant rate it may go on
    for step in steps:
        assert trained(tmp_path / str(step), 6, str(tmp_path / "half" / f"checkpoint-{step}")) == whole


def test_the_state_is_written_as_trainer_reads_it(tmp_path):
    """Also after a failed checkpoint, which leaves no method of the state replaced."""
    run = trainer("sft", tmp_path, False, {"max_steps": 2, "save_steps": 2, "logging_steps": 1})
    run.train()
    run.state.log_history += [{"loss": math.nan, "step": 3}, {"text": '"log_history": []', "step": 4}]
    checkpoint.write_state(run.state, tmp_path / "ours.json")
    run.state.save_to_json(str(tmp_path / "theirs.json"))
    ours, theirs = ((tmp_path / name).read_text(encoding="utf-8") for name in ("ours.json", "theirs.json"))
    assert json.dumps(json.loads(ours)) == json.dumps(json.loads(theirs))
    assert len(ours.splitlines()) < len(theirs.splitlines())
    with pytest.raises(OSError, match="full"), checkpoint.atomic_checkpoint(run):
        raise OSError("full")
    assert "save_to_json" not in vars(run.state)
