"""KTO: batch size 1, one-class batches, odd last batches, partners, weights, the KL of window and evaluation."""

import logging
import random

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import Gradients, assert_same_step, logged, one_step, token_rows, trainer_for

from hf_posttrain.data.row_schema import class_weights
from hf_posttrain.errors import InputError
from hf_posttrain.methods import kto_pairing
from hf_posttrain.methods.kto_pairing import find_partners
from hf_posttrain.scoring import forward


def rows_with(labels):
    rows = token_rows("kto", len(labels)).to_list()
    return datasets.Dataset.from_list([row | {"label": label} for row, label in zip(rows, labels, strict=True)])


def run(rows, tmp_path, **config):
    trainer = trainer_for("kto", tiny_model(), rows, tmp_path, learning_rate=1e-3, **config)
    trainer.train()
    return trainer


def test_batch_size_one_has_a_finite_kl(tmp_path):
    trainer = run(token_rows("kto"), tmp_path, per_device_train_batch_size=1, max_steps=4, second=tiny_model(seed=9))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4
    for log in logs:
        assert abs(log["kl"]) > 1e-3  # a pair of a row with itself, or no pair, would not differ so
        assert log["kl"] == pytest.approx(log["kl"])  # not NaN


def test_the_order_changes_each_epoch(tmp_path, monkeypatch):
    seen = []
    trainer = trainer_for(
        "kto", tiny_model(), token_rows("kto", 12), tmp_path, max_steps=6, train_sampling_strategy="random"
    )
    score_reference = trainer.score_reference
    monkeypatch.setattr(
        trainer,
        "score_reference",
        lambda m, batch: (seen.extend(batch["index"].tolist()), score_reference(m, batch))[1],
    )
    trainer.train()
    first, second = seen[:12], seen[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12))


@pytest.mark.parametrize("labels", [[True] * 6, [False] * 6, [True, False] * 3])
def test_one_class_batches_have_exact_metrics(labels, tmp_path):
    """Every batch of one class; the metrics of an absent class are left out, never NaN."""
    rows = rows_with(labels)
    trainer = run(rows, tmp_path, per_device_train_batch_size=3, max_steps=2, second=tiny_model(seed=9), eval_rows=rows)
    metrics = trainer.evaluate()
    present = {("chosen" if label else "rejected") for label in labels}
    for log in [log for log in trainer.state.log_history if "loss" in log]:
        assert all(value == value for value in log.values())
    for name in ("chosen", "rejected"):
        assert (f"eval_rewards/{name}" in metrics) == (name in present)
    assert ("eval_rewards/margins" in metrics) == (len(present) == 2)


def test_metrics_are_sums_over_counts_of_the_interval(tmp_path):
    """Logging every 2 steps of unequal class mixes gives the mean over rows, not the mean of two step means."""
    rows = rows_with([True, True, True, False, True, False, False, False])
    each, both = (run(rows, tmp_path, max_steps=2, logging_steps=n, second=tiny_model(seed=9)) for n in (1, 2))
    first, second = each.state.log_history[:2]
    log = both.state.log_history[0]
    assert log["rewards/chosen"] == pytest.approx((3 * first["rewards/chosen"] + 1 * second["rewards/chosen"]) / 4)
    assert log["rewards/rejected"] == pytest.approx(
        (1 * first["rewards/rejected"] + 3 * second["rewards/rejected"]) / 4
    )
    assert log["rewards/margins"] == pytest.approx(log["rewards/chosen"] - log["rewards/rejected"])


def test_kl_is_logged_unclamped_with_its_clamp_fraction(tmp_path):
    logs = []
    for seed in (1, 9):  # a reference above and one below the policy on average
        trainer = run(token_rows("kto"), tmp_path, max_steps=6, second=tiny_model(seed=seed))
        logs += [log for log in trainer.state.log_history if "loss" in log]
    assert {log["kl_clamped"] for log in logs} == {0.0, 1.0}
    assert all((log["kl"] < 0) == (log["kl_clamped"] == 1.0) for log in logs)


@pytest.mark.parametrize("loss_type", ["kto", "bco"])
def test_metrics_of_a_window_do_not_depend_on_its_split(loss_type, tmp_path):
    """Nine rows, four a step: the last window has fewer micro-batches."""
    logs = []
    for size, accumulated in ((4, 1), (2, 2), (1, 4)):
        trainer = run(
            token_rows("kto", 9), tmp_path, second=tiny_model(seed=9), loss_type=loss_type, max_steps=-1,
            num_train_epochs=1, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated,
            logging_steps=3,
        )  # fmt: skip
        logs.append(trainer.state.log_history[0])
    for name in ("loss", *(("kl", "kl_clamped") if loss_type == "kto" else ("delta",))):
        assert [log[name] for log in logs] == pytest.approx([logs[0][name]] * 3, rel=1e-5)


def test_accuracy_is_the_share_of_rewards_with_the_sign_of_their_label(tmp_path):
    seen = []
    trainer = trainer_for(
        "kto", tiny_model(), token_rows("kto"), tmp_path, eval_rows=token_rows("kto", 7, seed=4),
        second=tiny_model(seed=9), per_device_eval_batch_size=3,
    )  # fmt: skip
    trainer.compute_metrics = lambda predicted: seen.append(predicted) or {}
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    positive = seen[0].predictions[:, 0] > seen[0].predictions[:, 1]
    assert accuracy == pytest.approx((positive == seen[0].label_ids).mean())
    assert 0 < accuracy < 1


@pytest.mark.parametrize("size", [3, 5, 8])
def test_the_odd_last_batch_counts_its_rows(size, tmp_path):
    """8 rows in batches of 3: the last step has 2. Its loss is the mean over 2 rows, its KL over 2 pairs."""
    rows, config = token_rows("kto"), {"second": tiny_model(seed=9), "learning_rate": 0.0}
    steps = -(-8 // size)
    trainer = trainer_for(
        "kto", tiny_model(), rows, tmp_path, max_steps=steps, per_device_train_batch_size=size, **config
    )
    trainer.train()
    last = rows.select(range(size * (steps - 1), 8))
    expected = trainer.evaluate(trainer.train_dataset.select(range(size * (steps - 1), 8)))
    assert trainer.state.log_history[steps - 1]["loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert len(last) == 8 - size * (steps - 1)


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    results = []
    for size in (1, 3, 8):
        trainer = trainer_for(
            "kto", tiny_model(), token_rows("kto"), tmp_path, eval_rows=token_rows("kto", 7, seed=4),
            second=tiny_model(seed=9), per_device_eval_batch_size=size,
        )  # fmt: skip
        results.append({k: v for k, v in trainer.evaluate().items() if not k.endswith(("second", "runtime", "time"))})
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5, abs=1e-6)


# ---- partners


def prompts(*ids):
    return datasets.Dataset.from_dict(
        {"prompt_ids": [[i] for i in ids], "completion_ids": [[1]] * len(ids), "prompt_key": list(ids)}
    )


@pytest.mark.parametrize("ids", [range(9), [1, 1, 2, 2, 3], [1, 1, 1, 2, 2, 2], [1, 2], [5] * 4 + [6] * 2 + [7] * 3])
def test_partners_are_a_permutation_without_the_own_prompt(ids):
    ids = list(ids)
    partner = find_partners(prompts(*ids), seed=0)
    assert sorted(partner) == list(range(len(ids)))
    assert all(ids[i] != ids[p] for i, p in enumerate(partner))


def test_partners_are_fixed_by_the_seed():
    rows = prompts(*range(50))
    assert (find_partners(rows, 1) == find_partners(rows, 1)).all()
    assert (find_partners(rows, 1) != find_partners(rows, 2)).any()


def test_a_prompt_with_most_rows_still_never_meets_itself(caplog):
    ids = [1] * 8 + [2, 3]
    with caplog.at_level(logging.WARNING):
        partner = find_partners(prompts(*ids), seed=0)
    assert all(ids[i] != ids[p] for i, p in enumerate(partner))
    assert "one prompt has 8 of 10 rows" in caplog.text


def test_a_single_prompt_is_refused():
    with pytest.raises(InputError, match="all 3 rows have the same prompt"):
        find_partners(prompts(1, 1, 1), seed=0)


# ---- weights


def test_weights_that_train_nothing_are_refused(tmp_path):
    with pytest.raises(InputError, match="undesirable_weight and desirable_weight are both 0"):
        trainer_for("kto", tiny_model(), token_rows("kto"), tmp_path, desirable_weight=0, undesirable_weight=0.0)


def test_auto_weights_balance_the_classes():
    assert class_weights("auto", 1.0, [True] * 2 + [False] * 6) == (3.0, 1.0)
    assert class_weights("auto", 1.0, [True] * 6 + [False] * 2) == (1.0, 1.0)  # never below 1
    assert class_weights("auto", "auto", [True] * 6 + [False] * 2) == (1.0, 3.0)
    assert class_weights(1.5, 0.5, [True]) == (1.5, 0.5)
    with pytest.raises(InputError, match="requires rows of both labels"):
        class_weights("auto", 1.0, [True] * 3)


@pytest.mark.parametrize("label", [True, False])
def test_gradient_ratio_is_the_configured_weight(label, tmp_path):
    name = "desirable_weight" if label else "undesirable_weight"
    rows = rows_with([label] * 4)
    once = one_step("kto", tiny_model(), rows, tmp_path, second=tiny_model(seed=9))
    twice = one_step("kto", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), **{name: 2.5})
    assert_same_step((twice[0] / 2.5, {n: g / 2.5 for n, g in twice[1].items()}), once)


def test_best_weights_are_evaluated_with_their_own_bco_shift(tmp_path):
    rows = token_rows("kto")
    trainer = trainer_for(
        "kto", tiny_model(), rows, tmp_path, loss_type="bco", beta=2.0, second=tiny_model(seed=9), eval_rows=rows,
        max_steps=4, learning_rate=1e-2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step < 4
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


def test_bco_shift_is_the_mean_reward_of_the_windows_before(tmp_path):
    trainer = run(token_rows("kto"), tmp_path, loss_type="bco", max_steps=3, second=tiny_model(seed=9))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    good = [
        sum(row["label"] for row in token_rows("kto").select(range(4 * (n % 2), 4 * (n % 2) + 4))) for n in range(2)
    ]
    means = [
        (g * log["rewards/chosen"] + (4 - g) * log["rewards/rejected"]) / 4 for g, log in zip(good, logs, strict=False)
    ]
    assert logs[0]["delta"] == 0
    assert logs[1]["delta"] == pytest.approx(means[0], rel=1e-5)
    assert logs[2]["delta"] == pytest.approx((means[0] + means[1]) / 2, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "bco", "apo_zero_unpaired"])
def test_a_stream_trains_and_evaluates_as_its_rows(loss_type, tmp_path):
    rows = token_rows("kto")
    results = []
    for streamed in (rows, rows.to_iterable_dataset()):
        trainer = trainer_for(
            "kto", tiny_model(), streamed, tmp_path, eval_rows=streamed, loss_type=loss_type, max_steps=3, max_length=6,
            second=tiny_model(seed=9), learning_rate=1e-2, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        results.append([*losses, trainer.evaluate()["eval_loss"]])
    assert results[1] == pytest.approx(results[0], rel=1e-6)


def test_partners_of_a_stream_are_in_its_chunk(monkeypatch, caplog):
    monkeypatch.setattr(kto_pairing, "STREAM_CHUNK", 4)
    ids = [1, 2, 3, 4, 5, 5, 6, 7, 8, 8]
    rows = datasets.Dataset.from_dict(
        {"prompt_ids": [[i] for i in ids], "completion_ids": [[i, i, i] for i in ids], "prompt_key": ids}
    )
    with caplog.at_level(logging.WARNING):
        paired = list(kto_pairing.add_mismatches(rows.to_iterable_dataset(), 3, 0, "train"))
    assert [row["prompt_key"] for row in paired] == ids[:8]
    assert "the last 2 rows of the stream are dropped" in caplog.text
    for chunk in (paired[:4], paired[4:]):
        assert all(row["mismatch_ids"] == row["mismatch_ids"][:1] * 2 for row in chunk)  # truncated to 3 - 1 tokens
        assert all(row["mismatch_ids"][0] != row["prompt_key"] for row in chunk)
        assert sorted(row["mismatch_ids"][0] for row in chunk) == sorted(row["prompt_key"] for row in chunk)


def test_automatic_class_weights_of_a_stream_are_rejected(tmp_path):
    with pytest.raises(InputError, match="undesirable_weight: auto cannot be combined with a stream"):
        trainer_for(
            "kto",
            tiny_model(),
            token_rows("kto").to_iterable_dataset(),
            tmp_path,
            max_steps=1,
            undesirable_weight="auto",
        )


def test_the_policy_may_be_in_eval_mode_when_the_window_is_scored(tmp_path):
    """The KL pass finds the model as the last evaluation left it; the step after it trains all the same."""
    keep = Gradients()
    trainer = trainer_for(
        "kto", tiny_model(), token_rows("kto"), tmp_path, eval_rows=token_rows("kto", 3), max_steps=2,
        eval_strategy="steps", eval_steps=1, callbacks=[keep], second=tiny_model(seed=9),
    )  # fmt: skip
    trainer.train()
    assert trainer.model.training or len(keep.steps) == 2
    assert all(torch.isfinite(g).all() for step in keep.steps for g in step.values())


def long_prompts(count=8):
    draw = random.Random(3)
    ids = lambda size: [draw.randrange(250) for _ in range(size)]  # noqa: E731
    rows = [{"prompt_ids": ids(20 + n), "completion_ids": ids(2 + n % 4), "label": n % 3 != 1} for n in range(count)]
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("cached", [False, True])
def test_an_evaluation_reads_prompts_once_for_the_loss_and_its_kl(cached, tmp_path):
    """One pass over [prompt, own, mismatched]: the same as the training loss of the same rows, whose KL comes first."""
    rows = long_prompts(4)
    trainer = trainer_for(
        "kto", tiny_model(), rows, tmp_path, eval_rows=rows, second=tiny_model(seed=9), eval_on_start=True,
        eval_strategy="steps", eval_steps=1, precompute_ref_log_probs=cached,
    )  # fmt: skip
    passes = []
    trainer.model.base_model.register_forward_pre_hook(lambda *args: passes.append(torch.is_grad_enabled()))
    trainer.train()
    before, step, after = logged(trainer)[:3]
    assert abs(before["eval_kl"]) > 1e-3
    assert before["eval_loss"] == pytest.approx(step["loss"], rel=1e-5)
    assert before["eval_kl"] == pytest.approx(step["kl"], rel=1e-4)
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-6)  # nothing moved, at a rate of 0
    assert passes.count(True) == 1


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_in_half_precision_policy_and_reference_score_in_equal_shapes(bf16, lora, layout, tmp_path, monkeypatch):
    """Products of other shapes round otherwise: at the size of a real model the first KL was 0.2, and not 0."""
    seen, score = [], forward.score

    def watched(model, batch, *args, **kwargs):
        seen.append((torch.is_grad_enabled(), batch["input_ids"].tolist()))
        return score(model, batch, *args, **kwargs)

    options = {"peft_config": peft.LoraConfig(target_modules="all-linear")} if lora else {}
    rows = token_rows("kto", 8)
    trainer = trainer_for("kto", tiny_model(), rows, tmp_path, bf16=bf16, layout=layout, precompute_ref_log_probs=False,
                          **options)  # fmt: skip
    monkeypatch.setattr(forward, "score", watched)
    trainer.train()
    [trained] = [ids for gradient, ids in seen if gradient]
    others = [ids for gradient, ids in seen if not gradient]
    assert (trained in others) == bf16
    # y' by both models; in float32 the reference reads it with y
    assert sum(others.count(ids) == 2 for ids in others) == 2 * bf16
    log = trainer.state.log_history[0]
    assert (log["loss"], log["kl"]) == ((0.5, 0.0) if bf16 else pytest.approx((0.5, 0.0), abs=1e-5))
