"""What OPD logs beyond its loss: each number by its definition, and that looking changes nothing."""

import logging
from types import SimpleNamespace

import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import assert_same_step, fix_rollouts, one_step, token_rows, trainer_for

from hf_posttrain.generation.rollout import repeated_share
from hf_posttrain.methods import opd_diagnostics
from hf_posttrain.methods.opd_diagnostics import BUCKETS, compare, diagnose, is_due, metrics_of, overlap
from hf_posttrain.scoring.forward import LMHead
from hf_posttrain.scoring.head import LogitTransform
from hf_posttrain.scoring.teacher_tiles import TeacherStates

N, V, D, T = 6, 40, 5, 0.7
ENDS, SPECIAL = torch.tensor([3, 7]), torch.tensor([3, 7, 11])
STEPS = {"max_completion_length": 8, "num_generations": 2, "learning_rate": 1e-3}


def test_each_number_is_that_of_its_definition():
    torch.manual_seed(0)
    linear = torch.nn.Linear(D, V, bias=False, dtype=torch.float64)
    states, logits = torch.randn(N, D, dtype=torch.float64), torch.randn(N, V, dtype=torch.float64)
    teacher = TeacherStates(LMHead(linear, linear.forward, LogitTransform()), states)
    found = compare(teacher, T, ENDS, SPECIAL)(logits, slice(0, N), False, torch.empty(0)).stats
    q, p = torch.softmax(logits / T, -1), torch.softmax(linear(states).detach() / T, -1)
    terms = q * (q / p).log()
    expected = {
        "kl": terms.sum(-1), "special": terms[:, SPECIAL].sum(-1), "student_entropy": -(q * q.log()).sum(-1),
        "teacher_entropy": -(p * p.log()).sum(-1), "agreement": (q.argmax(-1) == p.argmax(-1)).float(),
        "near": torch.stack([own[best.topk(16).indices].sum() for own, best in zip(p, q, strict=True)]),
        "student_stop": q[:, ENDS].sum(-1), "teacher_stop": p[:, ENDS].sum(-1),
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.to(found[name].dtype), msg=name)


def mean(pair):
    return ((pair[0] * pair[1]).sum() / pair[1].sum()).item()


def test_numbers_by_position_and_shares_of_sums():
    names = ("kl", "special", "student_entropy", "teacher_entropy", "agreement", "near", "student_stop", "teacher_stop")
    stats = {name: 100.0 * n + torch.arange(1.0, 13.0) for n, name in enumerate(names)}
    rollout = torch.tensor([0] * 8 + [1] * 3 + [2])  # of 8, 3 and 1 tokens, of which the last does not count
    counts = torch.tensor([1.0] * 11 + [0.0])
    found = metrics_of(stats, rollout, counts, longest=16)  # two tokens a bucket
    first, last = (1 + 2 + 9 + 10) / 4, 7.5  # the means of a bucket of both rollouts and of one of the first's
    for name, offset in {"kl": 0, "teacher_entropy": 300, "student_stop": 600, "teacher_stop": 700}.items():
        assert mean(found[f"position/{name}_1"]) == offset + first
        assert mean(found[f"position/{name}_2"]) == pytest.approx(offset + (3 + 4 + 11) / 3)
        assert mean(found[f"position/{name}_4"]) == offset + last
        assert found[f"position/{name}_{BUCKETS}"][1].sum() == 0
    whole = {"student_entropy": 200, "teacher_entropy": 300, "top1_agreement": 400, "near_mass": 500}
    assert {name: mean(found[f"distill/{name}"]) for name in whole} == {name: at + 6 for name, at in whole.items()}
    assert mean(found["distill/special_share"]) == pytest.approx(sum(range(101, 112)) / sum(range(1, 12)))


@pytest.mark.parametrize(
    ("ids", "share"), [([1, 2, 3], 0.0), ([1, 2, 3, 4, 5], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4] * 2, 0.2), ([], 0.0)]
)
def test_the_share_of_what_is_repeated(ids, share):
    assert repeated_share(ids) == pytest.approx(share)


@pytest.mark.parametrize(
    ("agreed", "rollouts", "advice"),
    [(0.5, "live", "rollouts: frozen is worth a try"), (0.9, "frozen", "rollouts: live teaches more"),
     (0.9, "live", None), (0.5, "frozen", None), (0.5, "replay", None)],
)  # fmt: skip
def test_the_advice_on_rollouts(agreed, rollouts, advice):
    said = overlap({"distill/top1_agreement": agreed, "distill/near_mass": 0.97}, rollouts)
    assert f"the same best token at {agreed:.0%} of" in said
    assert "hold 97% of" in said
    assert (advice in said) if advice else ("rollouts:" not in said)


@pytest.mark.parametrize(("first", "steps"), [(False, [2, 5]), (True, [0, 2, 5])])
def test_steps_are_due_as_the_log_is(first, steps):
    args = SimpleNamespace(logging_first_step=first)
    assert [n for n in range(7) if is_due(SimpleNamespace(global_step=n, logging_steps=3), args)] == steps


def test_where_nothing_was_sampled_nothing_is_said():
    assert overlap({}, "live") is None


def test_steps_that_are_logged_are_looked_at_and_train_as_they_would(tmp_path, monkeypatch, caplog):
    fix_rollouts(monkeypatch)
    rows, steps = token_rows("opd", 8), []
    for diagnostics in (True, False):
        given = STEPS | {"diagnostics": diagnostics, "second": tiny_model(seed=9)}
        steps.append(one_step("opd", tiny_model(), rows, tmp_path, **given))
    assert_same_step(*steps, relative=0)
    looked, found = [], []
    note = lambda t, b: (looked.append(t.state.global_step), found.append(diagnose(t, b)), found[-1])[-1]  # noqa: E731
    monkeypatch.setattr(opd_diagnostics, "diagnose", note)
    given = STEPS | {"max_steps": 7, "logging_steps": 3}
    trainer = trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), **given)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert looked == [0, 2, 5]  # a micro-batch each; the first for the advice alone
    assert caplog.text.count("have the same best token") == 1
    for measured, log in zip(found[1:], trainer.state.log_history, strict=False):
        assert log["distill/near_mass"] == pytest.approx(mean(measured["distill/near_mass"]))
    assert 0 < log["distill/near_mass"] < 1
    assert log["position/kl_1"] > 0
    assert log["distill/student_entropy"] > 0
    assert 0 <= log["generation/repeated"] < 1


def test_a_student_is_its_own_equal(tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    trainer = trainer_for("opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(), **STEPS)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["distill/top1_agreement"] == 1
    assert log["position/kl_1"] == pytest.approx(0, abs=1e-6)
    assert log["distill/student_entropy"] == pytest.approx(log["distill/teacher_entropy"])
