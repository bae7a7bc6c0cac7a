"""The first steps of SFT, DPO and KTO on two pretrained models equal those of TRL, where both define the same loss."""

import importlib

import datasets
import pytest
from on_real_models import NAMES, found, load, rows_of
from transformers import AutoTokenizer

pytestmark = pytest.mark.real
STEPS = 3
CASES = {
    "sft": {},
    "dpo": {"beta": 0.1},
    "kto": {"loss_type": "apo_zero_unpaired"},  # `kto` pairs prompts with other completions by another permutation
}
COMMON = {
    "use_cpu": True, "bf16": False, "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-5,
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant", "weight_decay": 0.0, "warmup_steps": 0, "gradient_checkpointing": False,
    "max_length": 512, "seed": 0, "train_sampling_strategy": "sequential",
}  # fmt: skip
METRICS = {
    "sft": ("loss", "grad_norm", "mean_token_accuracy", "entropy"),
    "dpo": ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
            "logps/chosen", "logps/rejected"),
    "kto": ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen",
            "logps/rejected"),
}  # fmt: skip


def logs(package, method, folder, output_dir):
    """Return what `package` logs of each of the first steps of a method."""
    module = importlib.import_module(package)
    config = getattr(module, f"{method.upper()}Config")
    trainer = getattr(module, f"{method.upper()}Trainer")(
        model=load(folder), args=config(output_dir=str(output_dir), **COMMON, **CASES[method]),
        train_dataset=datasets.Dataset.from_list(rows_of(method)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_first_steps_are_those_of_trl(name, method, tmp_path):
    pytest.importorskip("trl", reason="make test-real installs it (extra bench)")
    folder = found(name)
    ours, theirs = (logs(package, method, folder, tmp_path / package) for package in ("hf_posttrain", "trl"))
    assert len(ours) == len(theirs) == STEPS
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for metric in METRICS[method]:
            expected = pytest.approx(other[metric], rel=2e-4, abs=2e-4)
            assert mine[metric] == expected, f"{metric} of step {step}"
