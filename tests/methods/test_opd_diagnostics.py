"""What OPD logs beyond its loss: each number by its definition, and that looking changes nothing."""

import logging
from types import SimpleNamespace

import peft
import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import LORA, assert_same_step, fix_rollouts, one_step, token_rows, trainer_for

from hf_posttrain import OPDTrainer
from hf_posttrain.generation.rollout import repeated_ngram_share
from hf_posttrain.methods import opd_diagnostics, opd_metrics
from hf_posttrain.methods.opd_diagnostics import (
    BUCKETS,
    Diagnostics,
    compare_logits,
    diagnostic_metrics,
    is_logged_step,
    rollout_advice,
)
from hf_posttrain.scoring.forward import LMHead
from hf_posttrain.scoring.head import LogitTransform, Tile
from hf_posttrain.teachers.eos import MergedEOS
from hf_posttrain.teachers.local import TeacherStates

N, V, D, T = 6, 40, 5, 0.7
ENDS, SPECIAL = torch.tensor([3, 7]), torch.tensor([3, 7, 11])
STEPS = {"max_completion_length": 8, "num_generations": 2, "learning_rate": 1e-3}


def test_each_number_is_that_of_its_definition():
    torch.manual_seed(0)
    linear = torch.nn.Linear(D, V, bias=False, dtype=torch.float64)
    states, logits = torch.randn(N, D, dtype=torch.float64), torch.randn(N, V, dtype=torch.float64)
    teacher = TeacherStates(LMHead(linear, linear.forward, LogitTransform()), states)
    scratch = [torch.empty_like(logits) for _ in range(3)]
    found = compare_logits(logits.clone(), teacher.logits(slice(0, N)), T, ENDS, SPECIAL, scratch)
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
    found = diagnostic_metrics(stats, rollout, counts, max_tokens=16)  # two tokens a bucket
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
    assert repeated_ngram_share(ids) == pytest.approx(share)


@pytest.mark.parametrize(
    ("agreed", "rollouts", "expected"),
    [(0.5, "on_policy", "rollouts: frozen may train better"),
     (0.9, "frozen", "rollouts: on_policy usually trains better"),
     (0.9, "on_policy", None), (0.5, "frozen", None), (0.5, "replay", None)],
)  # fmt: skip
def test_the_advice_on_rollouts(agreed, rollouts, expected):
    said = rollout_advice({"distill/top1_agreement": agreed, "distill/near_mass": 0.97}, rollouts)
    assert f"the same most likely token for {agreed:.0%} of" in said
    assert "have 97% of" in said
    assert (expected in said) if expected else ("rollouts:" not in said)


@pytest.mark.parametrize(
    ("strategy", "first", "steps"),
    [
        ("steps", False, [2, 5]), ("steps", True, [0, 2, 5]), ("no", False, []), ("no", True, [0]),
        ("epoch", False, [*range(7)]),
    ],
)  # fmt: skip
def test_steps_are_due_as_the_log_is(strategy, first, steps):
    args = SimpleNamespace(logging_first_step=first, logging_strategy=strategy)
    assert [n for n in range(7) if is_logged_step(SimpleNamespace(global_step=n, logging_steps=3), args)] == steps


def test_epochs_shorter_than_logging_steps_are_observed(tmp_path, monkeypatch, caplog):
    fix_rollouts(monkeypatch)
    caplog.set_level(logging.INFO, "hf_posttrain")
    trainer = trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, second=tiny_model(seed=9), max_steps=4,
                          logging_strategy="epoch", logging_steps=10)  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2, 4]
    assert all("distill/top1_agreement" in log for log in logs)
    assert caplog.text.count("have the same most likely token") == 1


def test_where_nothing_was_sampled_nothing_is_said():
    assert rollout_advice({}, "on_policy") is None


@pytest.mark.parametrize("diagnostics", [True, False])
def test_a_stat_of_ones_own_is_no_diagnostic(diagnostics, tmp_path, monkeypatch):
    """A tile function of a subclass may return more stats: they are in `scores.stats`."""
    fix_rollouts(monkeypatch)
    seen = []

    class Watched(OPDTrainer):
        def distill(self, model, batch, weights, observe=None):
            scores, signal = super().distill(model, batch, weights, observe)
            stats = (scores.stats or {}) | {"kl": torch.full_like(scores.value, 1e6), "mine": scores.value.detach()}
            seen.append(stats["mine"])
            return scores.replace(stats=stats), signal

    monkeypatch.setattr("training_for_tests.trainer_class", lambda row: Watched)
    models = tiny_model(), tiny_model(seed=9)
    trainer = trainer_for("opd", models[0], token_rows("opd", 8), tmp_path, models[1], diagnostics=diagnostics)
    trainer.train()
    assert seen
    assert all(abs(value) < 1e5 for name, value in trainer.state.log_history[0].items() if name.startswith("position/"))
    assert any(name.startswith("position/") for name in trainer.state.log_history[0]) == diagnostics


LOSSES = {
    "reverse_kl": {},
    "jsd": {"loss_type": "jsd"},
    "top_k": {"teacher": {"top_k": 5}},
    "residual": {"teacher": {"top_k": 5, "top_k_remainder": "residual"}},
    "policy_gradient": {"loss_type": "policy_gradient"},
    "warm": {"temperature": 0.7},
    "lora": {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **LORA)},
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_that_is_logged_trains_as_it_would(name, bf16, tmp_path, monkeypatch):
    """The student runs once; the teacher does so where the loss reads its whole distribution."""
    fix_rollouts(monkeypatch)
    rows, steps, forwards = token_rows("opd", 8), [], []
    for diagnostics in (True, False):
        models, calls = (tiny_model(), tiny_model(seed=9)), ([], [])
        for model, called in zip(models, calls, strict=True):
            model.model.register_forward_pre_hook(lambda module, _, called=called: called.append(module.training))
        given = STEPS | LOSSES[name] | {"diagnostics": diagnostics, "second": models[1], "bf16": bf16}
        steps.append(one_step("opd", models[0], rows, tmp_path, **given))
        forwards.append([*map(len, calls)])
    assert_same_step(*steps, relative=0)
    assert forwards[0][0] == forwards[1][0]
    assert forwards[0][1] - forwards[1][1] == (name in ("top_k", "residual", "policy_gradient"))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_logits_of_two_dtypes_are_compared_in_the_finer_one(dtypes):
    logits = [torch.randn(N, V, dtype=dtype) for dtype in dtypes]
    found = observed(*logits)
    q, p = (torch.softmax(each.double(), -1) for each in logits)
    torch.testing.assert_close(found["diagnostics/kl"], (q * (q / p).log()).sum(-1))


def test_a_tile_is_compared_in_parts_and_may_be_empty(monkeypatch):
    logits = [torch.randn(7, V) for _ in range(2)]
    whole = observed(*logits)
    monkeypatch.setattr(opd_diagnostics, "SCRATCH_SIZE", V)  # a token at once
    parts = observed(*logits)
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values)
    assert all(len(values) == 0 for values in observed(*(each[:0] for each in logits)).values())


def test_equal_logits_agree_where_several_tokens_are_best():
    logits = torch.randint(3, (200, V)).float()
    assert observed(logits, logits.clone())["diagnostics/agreement"].min() == 1


def observed(student, teacher):
    """The stats that Diagnostics adds to a loss, in tiles of two tokens; it keeps no memory then."""
    whole = SimpleNamespace(logits=lambda rows: teacher[rows].clone())
    diagnostics = Diagnostics(whole, len(student), MergedEOS(torch.tensor([], dtype=torch.long)), 1.0, ENDS, SPECIAL)
    tile = diagnostics.observe(lambda logits, rows, need_grad, buffer: Tile(logits[:, 0], None, {}))
    tiles = [tile(student[rows].clone(), rows, False, torch.empty(0)) for rows in tiles_of(len(student))]
    again = tile(student[:2].clone(), slice(0, 2), True, torch.empty(0))  # as a backward may call it
    assert torch.equal(again.stats["diagnostics/kl"], tiles[0].stats["diagnostics/kl"])
    assert diagnostics.scratch == []
    return {name: torch.cat([each.stats[name] for each in tiles]) for name in tiles[0].stats}


def tiles_of(count):
    return [slice(start, min(start + 2, count)) for start in range(0, max(count, 1), 2)]


def assert_same_diagnostics(found, expected):
    """The logs of two runs."""
    measured = {key for key in (*found, *expected) if key.startswith("position/")}
    measured |= {"distill/near_mass", "distill/special_share"}
    assert len(measured) > 8
    for key in measured:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("name", LOSSES)
def test_diagnostics_do_not_depend_on_the_loss(name, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    logs = []
    for options in (LOSSES[name], {"temperature": LOSSES[name].get("temperature", 1.0)}):
        options = STEPS | options | {"max_steps": 1}
        trainer = trainer_for("opd", tiny_model(), token_rows("opd", 8), tmp_path, second=tiny_model(seed=9), **options)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert_same_diagnostics(*logs)
    if name in ("reverse_kl", "jsd"):  # the part of a rollout up to its first eighth has fewer tokens than all
        assert logs[1]["distill/top1_agreement"] == logs[0]["distill/top1_agreement"]


def test_steps_that_are_logged_are_measured(tmp_path, monkeypatch, caplog):
    fix_rollouts(monkeypatch)
    measured = []
    whole = opd_metrics.diagnostic_metrics
    monkeypatch.setattr(
        opd_metrics, "diagnostic_metrics", lambda *given: measured.append(whole(*given)) or measured[-1]
    )
    given = STEPS | {"max_steps": 7, "logging_steps": 3}
    trainer = trainer_for("opd", tiny_model(), token_rows("opd", 8), tmp_path, second=tiny_model(seed=9), **given)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert len(measured) == 2  # a micro-batch each, of steps 2 and 5
    assert caplog.text.count("have the same most likely token") == 1
    for found, log in zip(measured, trainer.state.log_history, strict=False):
        assert log["distill/near_mass"] == pytest.approx(mean(found["distill/near_mass"]))
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


def test_cached_hidden_states_give_the_diagnostics_of_the_teacher(tmp_path):
    logs = []
    for folder, teacher in (("cached", {"precompute": True}), ("online", {})):
        models = tiny_model(), tiny_model(seed=9)
        options = STEPS | {"max_steps": 1, "rollouts": "frozen", "teacher": teacher}
        trainer = trainer_for("opd", models[0], token_rows("opd", 8), tmp_path / folder, second=models[1], **options)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert_same_diagnostics(*logs)
