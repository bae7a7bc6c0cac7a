"""The loss of each option of DPO and of reward models equals that of TRL on the same rows, to 1e-5."""

import copy
import importlib

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.real
F_DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
DPO = {
    **{name: {"loss_type": [name]} for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "discopop")},
    **{name: {"loss_type": [name]} for name in ("bco_pair", "sppo_hard", "apo_zero", "apo_down")},
    **{name: {"loss_type": [name], "label_smoothing": 0.1} for name in ("robust", "exo_pair")},
    **{name: {"f_divergence_type": name} for name in F_DIVERGENCES},
    "sigmoid_norm of forward_kl": {"loss_type": ["sigmoid_norm"], "f_divergence_type": "forward_kl"},
    "ipo of alpha 2": {"loss_type": ["ipo"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0},
    "LD": {"ld_alpha": 0.3},
    "LD masks": {"ld_alpha": 0.0, "loss_type": ["hinge"]},
    "WPO": {"use_weighting": True},
    "all": {"use_weighting": True, "ld_alpha": 0.5, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.1]},
}
REWARD = {"rm": {}, "centered": {"center_rewards_coefficient": 0.1}}
ROWS = [
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " it is five", "margin": 0.5},
    {"prompt": "the answer to three times four is", "chosen": " twelve, of course", "rejected": " 7", "margin": -1.0},
    {"prompt": "x", "chosen": " y", "rejected": " z", "margin": 0.0},
]


def loss_of(package, method, model, tmp_path, options, **arguments):
    """Return the loss of evaluation."""
    module = importlib.import_module(package)
    name = {"dpo": "DPO", "rm": "Reward"}[method]
    config = getattr(module, f"{name}Config")(
        output_dir=str(tmp_path / package), use_cpu=True, bf16=False, report_to="none", max_length=None,
        per_device_eval_batch_size=len(ROWS), gradient_checkpointing=False, **options,
    )  # fmt: skip
    rows = [{name: value for name, value in row.items() if method == "rm" or name != "margin"} for row in ROWS]
    trainer = getattr(module, f"{name}Trainer")(
        model=copy.deepcopy(model), args=config, train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows), processing_class=byte_tokenizer(), **arguments,
    )  # fmt: skip
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("case", DPO)
def test_dpo(case, tmp_path):
    pytest.importorskip("trl", reason="make test-real installs it (extra bench)")
    policy = tiny_model("llama")
    reference = copy.deepcopy(policy)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    ours, theirs = (
        loss_of(package, "dpo", policy, tmp_path, DPO[case], ref_model=copy.deepcopy(reference))
        for package in ("hf_posttrain", "trl")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("case", REWARD)
def test_rm(case, tmp_path):
    pytest.importorskip("trl", reason="make test-real installs it (extra bench)")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    ours, theirs = (loss_of(package, "rm", model, tmp_path, REWARD[case]) for package in ("hf_posttrain", "trl"))
    assert ours == pytest.approx(theirs, rel=1e-5)
