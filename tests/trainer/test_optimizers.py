"""Muon next to AdamW, and learning rates of some weights."""

import peft
import pytest
import torch
from models_for_tests import tiny_model
from torch.optim import AdamW, Muon
from training_for_tests import LORA, logs_and_weights, token_rows, trainer_for

from hf_posttrain import SFTConfig
from hf_posttrain.errors import InputError
from hf_posttrain.trainer.optimizers import MuonAdamW, hidden_matrices

STEPS = {"max_steps": 4, "learning_rate": 1e-2, "max_grad_norm": 0.0, "weight_decay": 0.1}


def test_muon_updates_hidden_matrices_and_adamw_the_rest(tmp_path):
    """Each as torch's optimizer alone does on the same gradients."""
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, optim="muon", **STEPS)
    names = hidden_matrices(trainer.model)
    assert names == {n for n, w in tiny_model().named_parameters() if w.ndim == 2 and "layers" in n}
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    seen = []
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, MuonAdamW)
    step = optimizer.step

    def watched(*args, **kwargs):
        if not seen:
            seen.append({name: weight.grad.clone() for name, weight in trainer.model.named_parameters()})
            result = step(*args, **kwargs)
            seen.append({name: weight.detach().clone() for name, weight in trainer.model.named_parameters()})
            return result
        return step(*args, **kwargs)

    optimizer.step = watched
    trainer.train()
    gradients, after = seen
    for name, start in before.items():
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradients[name]
        decay = 0.1 if weight.ndim == 2 else 0.0
        if name in names:
            alone = Muon([weight], lr=1e-2, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        else:
            alone = AdamW([weight], lr=1e-2, weight_decay=decay)
        alone.step()
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_with_muon_is_resumed(lora, tmp_path):
    def built(folder):
        adapter = peft.LoraConfig(**LORA) if lora else None
        return trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path / folder, peft_config=adapter, optim="muon",
                           save_strategy="steps", save_steps=2, lr_scheduler_type="linear", **STEPS)  # fmt: skip

    whole = built("whole")
    whole.train()
    resumed = built("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    (_, expected), (_, found) = logs_and_weights(whole, lora), logs_and_weights(resumed, lora)
    for name, weight in expected.items():
        assert torch.equal(weight, found[name])
    rates = [log["learning_rate"] for log in whole.state.log_history if "learning_rate" in log]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_learning_rates_of_some_weights(tmp_path):
    """LoRA+: B has 16 times the rate of A. With SGD, an update is the rate times the gradient."""
    factors = {"lora_B": 16.0, r"layers\.0\.": 0.5}
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, peft_config=peft.LoraConfig(**LORA), optim="sgd",
        learning_rate_factors=factors, max_steps=1, learning_rate=1e-3, max_grad_norm=0.0,
    )  # fmt: skip
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    gradients = {}

    def keep(args, state, control, model=None, **kwargs):
        gradients.update({name: weight.grad.clone() for name, weight in trained.items()})

    trainer.callback_handler.callbacks[0].on_pre_optimizer_step = keep
    trainer.train()
    for name, weight in trained.items():
        factor = 16 if "lora_B" in name else 0.5 if ".layers.0." in name else 1
        expected = 1e-3 * factor * gradients[name]
        torch.testing.assert_close(before[name] - weight.detach(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate_factors": {"lora_C": 2.0}}, "'lora_C' matches no trained weight that no earlier key matches"),
        ({"learning_rate_factors": {".": 2.0, "embed": 1.0}}, "'embed' matches no trained weight that no earlier"),
    ],
)
def test_a_factor_without_weights_is_told(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **options).train()


def test_a_model_without_trained_matrices_has_no_use_for_muon(tmp_path):
    model = tiny_model()
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)
    with pytest.raises(InputError, match=r"optim: muon requires hidden matrices, and none is trained. Use adamw_torch"):
        trainer_for("sft", model, token_rows("sft"), tmp_path, optim="muon").train()


@pytest.mark.parametrize("factors", [{"(": 1.0}, {"a": -1.0}, {"a": "x"}, {1: 2.0}, 1, 0, "auto", ["a"]])
def test_factors_are_positive_numbers_by_expressions(factors, tmp_path):
    with pytest.raises(InputError, match="learning_rate_factors"):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, learning_rate_factors=factors)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("stage", "reason"), [(1, "flattened weights"), (2, "flattened weights"), (3, "sharded weights")]
)
def test_muon_is_refused_under_zero(stage, reason, tmp_path):
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    deepspeed = sizes | {"zero_optimization": {"stage": stage}}
    with pytest.raises(InputError, match=f"optim: muon cannot be combined with .*{reason}"):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="muon", deepspeed=deepspeed)
