"""Options of DPO, CPO, KTO and SFT that weight tokens or pairs, or change the reference, against their formulas."""

import math

import peft
import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import LORA, token_rows, trainer_for

from hf_posttrain.errors import InputError


@pytest.mark.parametrize(
    "options", [{"ld_alpha": 0.25}, {"ld_alpha": 0.0, "precompute_ref_log_probs": True}, {"use_weighting": True}]
)
def test_weights_of_dpo_are_those_of_their_formulas(options, tmp_path):
    """LD-DPO and WPO on full logits; the reference is another model."""
    policy, reference = tiny_model(), tiny_model(seed=3)
    rows = token_rows("dpo", 4)
    trainer = trainer_for("dpo", policy, rows, tmp_path, second=tiny_model(seed=3), **options)
    trainer.train()
    losses = []
    for row in rows:
        shared = min(len(row["chosen_ids"]), len(row["rejected_ids"]))
        ratios, weight = [], 1.0
        for name in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor(row["prompt_ids"] + row[name])
            tables = [model(input_ids=ids[None]).logits[0].double().log_softmax(-1) for model in (policy, reference)]
            start, count = len(row["prompt_ids"]) - 1, len(row[name])
            own, other = (table[start:-1][range(count), ids[start + 1 :]] for table in tables)
            alpha = options.get("ld_alpha", 1.0)
            factors = torch.tensor([1.0 if n < shared else alpha for n in range(count)])
            ratios.append(((own - other) * factors).sum())
            if options.get("use_weighting"):
                collision = (2 * tables[0][start:-1]).exp().sum(-1).log()
                weight = weight * (own - collision).mean().exp()
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])) * weight)
    assert trainer.state.log_history[0]["loss"] == pytest.approx((sum(losses) / 4).item(), rel=1e-5)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_synchronized_reference_follows_and_is_resumed(method, lora, tmp_path):
    """ref <- a policy + (1 - a) ref every second step; a resumed run continues with the same reference."""
    options = {
        "sync_ref_model": True, "ref_model_mixup_alpha": 0.25, "ref_model_sync_steps": 2, "max_steps": 4,
        "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2, "precompute_ref_log_probs": None,
    }  # fmt: skip

    def built():
        adapter = peft.LoraConfig(**LORA) if lora else None
        return trainer_for(method, tiny_model(), token_rows(method, 8), tmp_path, peft_config=adapter, **options)

    trainer = built()
    pairs = trainer.stateful["reference_average"].pairs
    start = {name: average.clone() for name, (average, _) in pairs().items()}
    seen = []
    update = trainer.stateful["reference_average"].on_step_end

    def watched(args, state, control, **kwargs):
        update(args, state, control, **kwargs)
        seen.append((state.global_step, {name: (a.clone(), w.detach().clone()) for name, (a, w) in pairs().items()}))

    trainer.stateful["reference_average"].on_step_end = watched
    trainer.train()
    assert len(start) > 4
    previous = start
    for step, weights in seen:
        for name, (average, weight) in weights.items():
            expected = previous[name] if step % 2 else 0.75 * previous[name] + 0.25 * weight
            torch.testing.assert_close(average, expected)
        previous = {name: average for name, (average, _) in weights.items()}
    resumed = built()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, (average, weight) in resumed.stateful["reference_average"].pairs().items():
        torch.testing.assert_close(average, seen[-1][1][name][0])
        torch.testing.assert_close(weight, seen[-1][1][name][1])


def test_a_reference_without_the_weights_of_the_policy_is_not_synchronized(tmp_path):
    with pytest.raises(InputError, match="sync_ref_model requires a reference with the weights of the policy"):
        trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, second=tiny_model("llama"), sync_ref_model=True)


@pytest.mark.parametrize("loss", ["hinge", "ipo", "simpo"])
def test_losses_of_cpo(loss, tmp_path):
    rows = token_rows("cpo", 4)
    trainer = trainer_for("cpo", tiny_model(), rows, tmp_path, loss_type=loss, cpo_alpha=0.5, beta=0.7)
    trainer.train()
    losses = []
    for row in rows:
        sums, means = [], []
        for name in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor(row["prompt_ids"] + row[name])
            table = tiny_model()(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            start = len(row["prompt_ids"]) - 1
            logps = table[start:-1][range(len(row[name])), ids[start + 1 :]]
            sums.append(logps.sum())
            means.append(logps.mean())
        preference = {
            "hinge": torch.relu(1 - 0.7 * (sums[0] - sums[1])),
            "ipo": (means[0] - means[1] - 1 / 1.4) ** 2,
            "simpo": -torch.nn.functional.logsigmoid(0.7 * (means[0] - means[1]) - 0.5),
        }[loss]
        losses.append(preference - 0.5 * means[0])
    assert trainer.state.log_history[0]["loss"] == pytest.approx((sum(losses) / 4).item(), rel=1e-5)


def trained_logits(row):
    """The logits of the trained tokens of a row of SFT, and their log-probabilities, in float64."""
    ids = torch.tensor(row["prompt_ids"] + row["completion_ids"])
    logits = tiny_model()(input_ids=ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1].double()
    logps = logits.log_softmax(-1)[range(len(logits)), row["completion_ids"]]
    mask = torch.tensor(row["completion_mask"]) > 0
    return logits[mask], logps[mask]


def probability(logits, logps):
    return logps.exp()


def entropy_of_top(logits, logps):
    top = logits.topk(20).values.softmax(-1)
    return -(top * top.log()).sum(-1) / math.log(20)


@pytest.mark.parametrize(("loss", "weight"), [("dft", probability), ("eaft", entropy_of_top)])
def test_losses_of_sft_weight_each_token(loss, weight, tmp_path):
    rows = token_rows("sft", 4)
    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, loss_type=loss)
    trainer.train()
    found = [trained_logits(row) for row in rows]
    count = sum(len(logps) for _, logps in found)
    total = -sum((weight(logits, logps) * logps).sum().item() for logits, logps in found)
    nll = -sum(logps.sum().item() for _, logps in found)
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(total / count, rel=1e-5)
    assert log["nll"] == pytest.approx(nll / count, rel=1e-5)
    assert log["loss"] < log["nll"]
