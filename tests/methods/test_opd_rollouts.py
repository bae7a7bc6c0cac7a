"""Which rollouts OPD trains on: train_max_tokens, replay, frozen, and that a resumed run has the same."""

import math

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import assert_same_step, fix_rollouts, one_step, token_rows, trainer_for

from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.methods.opd import OPDConfig
from hf_posttrain.scoring.head import LogProb

NEVER = [10_000]
"""Terminal ids that are never drawn."""
STEPS = {"max_completion_length": 8, "num_generations": 2, "learning_rate": 1e-3}


def opd(tmp_path, rows=12, **config):
    return trainer_for(
        "opd", tiny_model(), token_rows("opd", rows), tmp_path, second=tiny_model(seed=9), **STEPS | config
    )


def watch(trainer):
    """What each micro-batch was trained on: lists of (prompt, rollouts)."""
    seen, laid_out = [], trainer.rollouts._lay_out

    def watched(examples, *args):
        seen.append([(list(e.prompt), [list(b.ids) for b in e.branches]) for e in examples])
        return laid_out(examples, *args)

    trainer.rollouts._lay_out = watched
    return seen


def count_calls(monkeypatch):
    """How many prompts each call of generation had."""
    calls, real = [], rollout.generate

    def generate(model, prompts, *args, **kwargs):
        calls.append(len(prompts))
        return real(model, prompts, *args, **kwargs)

    monkeypatch.setattr(rollout, "generate", generate)
    return calls


# ---- horizon


def test_the_horizon_ends_generation_and_grows(tmp_path):
    trainer = opd(tmp_path, max_steps=4, rollouts={"train_max_tokens": {"from": 2, "to": 6, "steps": 2}})
    trainer.terminal_ids = NEVER
    seen = watch(trainer)
    trainer.train()
    longest = [max(len(ids) for _, answers in window for ids in answers) for window in seen]
    assert longest == [2, 4, 6, 6]


def test_what_the_horizon_cut_is_not_clipped(tmp_path):
    """generation/stopped is of rollouts that could end: none here, until their own length is the limit."""
    for horizon, found in ((3, None), (None, 0.0)):
        trainer = opd(tmp_path, max_steps=1, rollouts={"train_max_tokens": horizon})
        trainer.terminal_ids = NEVER
        trainer.train()
        assert trainer.state.log_history[0].get("generation/stopped") == found


def test_evaluation_knows_no_horizon(tmp_path):
    trainer = opd(tmp_path, rollouts={"train_max_tokens": 2})
    trainer.terminal_ids = NEVER
    trainer.eval_dataset = trainer.train_dataset
    assert trainer.evaluate()["eval_generation/length"] == 8


@pytest.mark.parametrize(
    ("horizon", "said"),
    [(0, "train_max_tokens=0 must be at least 1"), ("six", "must be a whole number or a mapping or null, not 'six'"),
     (True, "must be a whole number or a mapping or null, not True"), (9, "from 1 to max_completion_length=8"),
     ({"from": 1}, "must have the keys from, to and steps"), ({"from": 1, "to": 4, "steps": 0}, "each at least 1"),
     ({"from": 1, "to": 9, "steps": 5}, "is above max_completion_length=8")],
)  # fmt: skip
def test_bad_horizons_are_refused(horizon, said, tmp_path):
    with pytest.raises(InputError, match=said):
        OPDConfig(output_dir=str(tmp_path), max_completion_length=8, rollouts={"train_max_tokens": horizon})


# ---- replay


def test_replay_samples_a_share_and_draws_the_rest_from_the_last_windows(tmp_path, monkeypatch):
    calls = count_calls(monkeypatch)
    trainer = opd(tmp_path, 24, max_steps=6, rollouts={"source": "replay", "fresh_fraction": 0.25, "replay_steps": 2})
    seen = watch(trainer)
    trainer.train()
    assert calls == [8, 2, 2, 2, 2, 2]  # K = 2 rollouts of 4 prompts, and then of one
    new = [window[: count // 2] for window, count in zip(seen, calls, strict=True)]
    for number, window in enumerate(seen[1:], start=1):
        known = [one for earlier in new[max(0, number - 2) : number] for one in earlier]
        assert all(one in known for one in window[1:])
        again = math.ceil(len(window[1:]) / len(known))  # none a second time before all were drawn
        assert max(window[1:].count(one) for one in window[1:]) == again


def test_a_resumed_replay_has_the_same_rollouts(tmp_path):
    config = {"max_steps": 6, "rollouts": "replay", "save_steps": 3, "save_strategy": "steps"}
    whole = opd(tmp_path, 24, **config)
    expected = watch(whole)
    whole.train()
    again = opd(tmp_path, 24, **config)
    seen = watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert seen == expected[3:]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])


def test_a_step_that_is_not_done_is_not_kept(tmp_path):
    """A lost server ends a run within a step: the checkpoint of the last whole one has no rollouts of the next."""
    trainer = opd(tmp_path, 24, max_steps=4, rollouts="replay")
    trainer.train()
    kept = trainer.source.state_dict()
    trainer.source.rollouts([{"prompt_ids": [5, 6, 7]}], (0,), 4)
    assert trainer.source.state_dict() == kept
    trainer.source.on_step_end(None, trainer.state, None)
    assert trainer.source.state_dict() != kept


# ---- frozen


def test_frozen_rollouts_are_sampled_once_by_the_first_policy(tmp_path, monkeypatch):
    calls = count_calls(monkeypatch)
    trainer = opd(tmp_path, max_steps=6, rollouts="frozen")
    seen = watch(trainer)
    trainer.train()
    assert calls == [24]
    known = {}
    for prompt, answers in (one for window in seen for one in window):
        assert known.setdefault(tuple(prompt), answers) == answers
    assert len(known) == 12
    # from the cache, for the same start alone
    opd(tmp_path, max_steps=1, rollouts="frozen").train()
    assert calls == [24]
    opd(tmp_path, max_steps=1, rollouts="frozen", temperature=0.7).train()
    assert calls == [24, 24]
    # random numbers depend on the prompts that are answered together
    opd(tmp_path, max_steps=1, rollouts="frozen", sampler={"batch_size": 2}).train()
    assert calls == [24, 24, 24]


def test_rows_of_concatenated_prepared_data_sets_have_rollouts_of_their_own(tmp_path):
    parts = [opd(tmp_path, 4, seed=seed).train_dataset for seed in (0, 5)]
    both = datasets.concatenate_datasets(parts)
    assert both["index"][:] == [0, 1, 2, 3] * 2
    trainer = trainer_for("opd", tiny_model(), both, tmp_path, second=tiny_model(seed=9), rollouts="frozen", **STEPS)
    assert trainer.train_dataset["index"][:] == [*range(8)]
    assert trainer.train_dataset.remove_columns("index")[:] == both.remove_columns("index")[:]
    trainer.train()
    found = trainer.source.rollouts(list(trainer.train_dataset), (0,), 4)
    assert [answer.prompt for answer in found] == both["prompt_ids"][:]
    assert trainer.source.positions == {n: n for n in range(8)}


def test_a_step_on_frozen_rollouts_is_that_of_live_ones(tmp_path, monkeypatch):
    """The same rollouts give the same loss and gradient."""
    fix_rollouts(monkeypatch)
    rows, second = token_rows("opd", 4), tiny_model(seed=9)
    live = one_step("opd", tiny_model(), rows, tmp_path, second=second, **STEPS)
    frozen = one_step("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), rollouts="frozen", **STEPS)
    assert_same_step(frozen, live)


def test_a_resumed_run_takes_frozen_rollouts_from_the_cache_or_says_that_they_are_gone(tmp_path, monkeypatch):
    config = {"max_steps": 4, "rollouts": "frozen", "save_steps": 2, "save_strategy": "steps"}
    whole = opd(tmp_path, **config)
    whole.train()
    calls = count_calls(monkeypatch)
    again = opd(tmp_path, **config)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert calls == []
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "empty")
    with pytest.raises(InputError, match="no longer in the cache"):
        opd(tmp_path, **config).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_policy_that_was_trained_samples_no_frozen_rollouts_of_other_rows(tmp_path):
    trainer = opd(tmp_path, max_steps=2, rollouts="frozen")
    trainer.train()
    trainer.train()  # of the rows that it knows
    trainer.train_dataset = opd(tmp_path, 6, seed=1).train_dataset
    with pytest.raises(InputError, match="has been trained since the start of the run"):
        trainer.train()


# ---- weights of tokens


SCORED = {"rollouts": "frozen", "teacher": {"top_k": 5, "precompute": True}}


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
@pytest.mark.parametrize("horizon", [None, 3])
def test_frozen_rollouts_are_scored_once_with_the_numbers_of_scoring_them_each_time(horizon, sizes, tmp_path):
    rows, runs = token_rows("opd", 4), []
    sizes = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), sizes, strict=True))
    for config in (SCORED, {"rollouts": "frozen", "teacher": {"top_k": 5, "top_k_remainder": "tail"}}):
        given, second = STEPS | sizes | config, tiny_model(seed=9)
        given["rollouts"] = {"source": "frozen", "train_max_tokens": horizon}
        second.generation_config.eos_token_id = 256  # not the student's: both are one outcome
        runs.append(one_step("opd", tiny_model(), rows, tmp_path, second=second, **given))
    assert_same_step(*runs)


def test_a_teacher_that_scored_beforehand_rests_until_an_evaluation(tmp_path, monkeypatch):
    trainer = opd(tmp_path, max_steps=4, num_train_epochs=2, eval_strategy="steps", eval_steps=4, **SCORED,
                  eval_rows=token_rows("opd", 3, seed=5))  # fmt: skip
    calls, score = [], trainer.teacher.score
    monkeypatch.setattr(trainer.teacher, "score", lambda *a: (calls.append(trainer.state.global_step), score(*a))[1])
    trainer.train()
    assert {*calls[:-1]} == {0}  # before the first step
    assert calls[-1] == 4
    logs = trainer.state.log_history
    assert all("distill/top1_agreement" not in log for log in logs)
    assert any("eval_loss" in log for log in logs)
    again = opd(tmp_path, max_steps=1, **SCORED)
    monkeypatch.setattr(again.teacher, "score", None)  # from the cache
    again.train()


@pytest.mark.parametrize("loss_type", ["reverse_kl", "policy_gradient"])
@pytest.mark.parametrize("token_weights", ["cumulative", {"name": "top_share", "share": 0.3}])
def test_token_weights_do_not_depend_on_accumulation(token_weights, loss_type, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    config = STEPS | {"token_weights": token_weights, "loss_type": loss_type, "num_generations": 1}
    steps = []
    for size, accumulated in ((4, 1), (1, 4)):
        steps.append(one_step(
            "opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9),
            per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, **config,
        ))  # fmt: skip
    assert_same_step(*steps)


def test_all_tokens_in_the_top_share_are_no_weights(tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    steps = [
        one_step("opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9), **STEPS, **config)
        for config in ({}, {"token_weights": {"name": "top_share", "share": 1.0}})
    ]
    assert_same_step(*steps)


def test_the_sign_has_the_gradient_of_its_definition(tmp_path, monkeypatch):
    """c x sign(A), by hand."""
    fix_rollouts(monkeypatch)
    config = STEPS | {"loss_type": "policy_gradient"}
    found = one_step(
        "opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9), token_weights="sign", **config
    )
    trainer = opd(tmp_path, 4, **config)
    [batch] = trainer.rollouts.window([next(iter(trainer.get_train_dataloader()))], 0)
    scores, _ = trainer.distill(trainer.model, batch, None)
    gap = (scores["teacher"] - scores["student"]).detach()
    logps = trainer.score(trainer.model, batch, LogProb(batch.targets)).value
    (-gap.abs().mean() * gap.sign() * logps).mean().backward()
    gradients = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    assert_same_step((found[0], gradients), found, relative=1e-4)


@pytest.mark.parametrize(
    ("config", "said"),
    [({"token_weights": "top"}, "token_weights"), ({"token_weights": {"name": "top_share", "rho": 1}}, "rho"),
     ({"token_weights": {"name": "top_share", "share": 2}}, r"token_weights.share=2 must be in \(0, 1\]"),
     ({"token_weights": "sign"}, "sign requires loss_type policy_gradient"),
     ({"token_weights": "bounded", "loss_type": "policy_gradient", "num_generations": 2,
       "reward": {"function": "exact_match"}}, "cannot be combined with reward"),
     ({"rollouts": "replay", "loss_type": "policy_gradient"}, "biased"),
     ({"rollouts": {"fresh_fraction": 0.5}}, "not an option of source on_policy, the default. Set rollouts.s"),
     ({"rollouts": "stale"}, "rollouts"), ({"rollouts": "frozen", "lmbda": 0.0}, "no rollouts are sampled"),
     ({"token_weights": 3}, "must be one of cumulative, top_share, .* not 3"),
     ({"token_weights": {"share": 0.5}}, "token_weights requires token_weights.name"),
     ({"teacher": {"top_k": 4, "precompute": True}}, "teacher.precompute cannot be combined with rollouts that are"),
     ({"teacher": {"precompute": True, "names": ["a", "b"]}, "rollouts": "frozen"},
      "teacher.precompute requires teacher.top_k with several teachers"),
     (SCORED | {"lmbda": 0.5}, "lmbda"), (SCORED | {"teacher": {"top_k": 0, "precompute": True}}, "at least 1"),
     ({"rollouts": {"source": "replay", "fresh_fraction": 0.0}}, "rollouts.fresh_fraction=0 must be in")],
)  # fmt: skip
def test_contradictions_are_refused(config, said, tmp_path):
    with pytest.raises(InputError, match=said):
        OPDConfig(output_dir=str(tmp_path), **config)
