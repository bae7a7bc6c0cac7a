"""Every loss against hand-checked numbers, to 1e-6, and its limits. A reader can check them on paper:

pi_w = -10, pi_l = -12, ref_w = -11, ref_l = -11.5, so a = 1, c = -0.5, D = 1.5; beta = 0.1, lengths 5 and 6.
"""

import dataclasses
import math

import pytest
import torch

from hf_posttrain.losses.divergence import DIVERGENCES, log_softmax, with_tail
from hf_posttrain.losses.preference import F_DIVERGENCES, PAIRED, PairedOptions, Pairs
from hf_posttrain.losses.unpaired import UNPAIRED
from hf_posttrain.methods.rules import MARGIN_LOSSES, SMOOTHED_LOSSES
from hf_posttrain.scoring.policy_gradient import SampledPolicyGradient


def pairs(logps, ref_logps, lengths):
    """One pair from (chosen, rejected) of each."""
    return Pairs(*(torch.tensor([row], dtype=torch.float64) for row in (logps, ref_logps, lengths)))


PAIRS = pairs((-10.0, -12.0), (-11.0, -11.5), (5.0, 6.0))
MEANS = pairs((-5.0, -9.0), (0.0, 0.0), (5.0, 6.0))  # -1 and -1.5 a token
P = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)  # teacher
Q = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)  # student


@pytest.mark.parametrize(
    ("name", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, 0.6209570), ("sigmoid", 0.1, 0.6359570), ("robust", 0.1, 0.6022070), ("ipo_sum", 0.0, 12.25),
        ("ipo", 0.0, 22.2469444), ("hinge", 0.0, 0.85), ("apo_zero", 0.0, 0.9625234), ("apo_down", 0.0, 0.9875493),
        ("exo_pair", 0.1, 0.4313885), ("nca_pair", 0.0, 1.3508248), ("bco_pair", 0.0, 1.3128563),
        ("sppo_hard", 0.0, 36.25), ("sft", 0.0, 2.0), ("sigmoid_norm", 0.0, 0.6790809), ("discopop", 0.0, 0.8493376),
    ],
)  # fmt: skip
def test_paired_losses_have_their_closed_form(name, smoothing, expected):
    value = PAIRED[name](PAIRS, PairedOptions(beta=0.1, label_smoothing=smoothing))
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "alpha", "expected"),
    [
        ("reverse_kl", 0.5, 0.6209570), ("forward_kl", 0.5, 0.6311544), ("js_divergence", 0.5, 0.6606522),
        ("alpha_divergence", 0.5, 0.6276909), ("alpha_divergence", 2.0, 0.5931237),
        ("alpha_divergence", 1.0, 0.6209570),
    ],
)  # fmt: skip
def test_f_divergences_of_dpo(name, alpha, expected):
    changed = dataclasses.replace(PAIRS, f_divergence=name, alpha=alpha)
    assert PAIRED["sigmoid"](changed, PairedOptions(beta=0.1)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", PAIRED)
def test_losses_that_do_not_read_the_margin_alone_ignore_the_f_divergence(name):
    """`rules.MARGIN_LOSSES` lists the others, which a Config accepts with another f-divergence."""
    options = PairedOptions(label_smoothing=0.1)
    same = torch.equal(
        PAIRED[name](PAIRS, options), PAIRED[name](dataclasses.replace(PAIRS, f_divergence="forward_kl"), options)
    )
    assert same == (name not in MARGIN_LOSSES or name == "sft")


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_f_divergences_are_finite_with_gradients_at_the_ends(name):
    ratios = torch.tensor([-1e4, -50.0, 0.0, 50.0], requires_grad=True)
    values = F_DIVERGENCES[name](ratios, 0.5)
    assert values[2] == 0
    if name in ("reverse_kl", "js_divergence"):
        assert torch.isfinite(values).all()
        values.sum().backward()
        assert torch.isfinite(ratios.grad).all()


@pytest.mark.parametrize(("name", "beta", "expected"), [("simpo", 2.0, 0.4740770), ("orpo", 0.1, 1.0401135)])
def test_reference_free_losses(name, beta, expected):
    value = PAIRED[name](MEANS, PairedOptions(beta=beta, simpo_gamma=0.5))
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "shift", "desirable", "undesirable"),
    [
        ("kto", 0.3, 0.4825071, 0.4800107), ("kto", 0.0, 0.4750208, 0.4875026),
        ("apo_zero_unpaired", 0.3, 0.4750208, 0.4875026), ("bco", 0.025, 0.6563501, 0.6563501),
    ],
)  # fmt: skip
def test_unpaired_losses(name, shift, desirable, undesirable):
    ratios, labels = torch.tensor([1.0, -0.5], dtype=torch.float64), torch.tensor([True, False])
    values = UNPAIRED[name](ratios, labels, torch.tensor(shift, dtype=torch.float64), 0.1)
    assert values.tolist() == pytest.approx([desirable, undesirable], abs=1e-6)


def test_policy_equal_to_reference_gives_the_known_start():
    same = pairs((-10.0, -12.0), (-10.0, -12.0), (5.0, 6.0))
    assert PAIRED["sigmoid"](same, PairedOptions()).item() == pytest.approx(math.log(2))
    zero = torch.zeros(2)
    assert UNPAIRED["kto"](zero, torch.tensor([True, False]), torch.tensor(0.0), 0.1).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", PAIRED)
def test_label_smoothing_moves_the_losses_that_have_it_and_no_other(name):
    start, moved = (PAIRED[name](PAIRS, PairedOptions(label_smoothing=e)) for e in (0.1, 0.2))
    assert (start != moved).item() == (name in SMOOTHED_LOSSES)


@pytest.mark.parametrize("name", PAIRED)
def test_paired_losses_stay_finite_at_the_ends(name):
    values = [torch.tensor([row], requires_grad=True) for row in ((-1e4, -1e-9), (-1.0, -1e4))]
    loss = PAIRED[name](Pairs(*values, torch.tensor([[4.0, 4.0]])), PairedOptions(label_smoothing=0.1))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert all(v.grad is None or torch.isfinite(v.grad).all() for v in values)


# ---- divergences


def value_of(name, p=P, q=Q, **options):
    return DIVERGENCES[name](q.log(), p.log(), **options).item()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("forward_kl", {}, 0.0474687), ("reverse_kl", {}, 0.0400782), ("tvd", {}, 0.1),
        ("jsd", {"beta": 0.1}, 0.0041789), ("jsd", {"beta": 0.5}, 0.0107708), ("jsd", {"beta": 0.9}, 0.0036542),
        ("jsd", {"beta": 0.0}, 0.0474687), ("jsd", {"beta": 1.0}, 0.0400782),
        ("skew_forward_kl", {"alpha": 0.1}, 0.0368102), ("skew_reverse_kl", {"alpha": 0.1}, 0.0333260),
        ("entropy_aware_kl", {"threshold": 1.02}, 0.0875469),  # the entropy of P is 1.0297
        ("entropy_aware_kl", {"threshold": 1.03}, 0.0400782),
    ],
)  # fmt: skip
def test_divergences(name, options, expected):
    assert value_of(name, **options) == pytest.approx(expected, abs=1e-6)


def test_cross_entropy_is_forward_kl_plus_the_teachers_entropy():
    entropy = -(P * P.log()).sum().item()
    assert value_of("forward_kl") + entropy == pytest.approx(1.0771217, abs=1e-6)


def test_top_2_forward_kl():
    ids = torch.tensor([[0, 1]])
    student, teacher = with_tail(Q.log().gather(-1, ids)), with_tail(P.log().gather(-1, ids))
    assert DIVERGENCES["forward_kl"](student, teacher).item() == pytest.approx(0.0474687, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"), [("forward_kl", [0.1, 0.0, -0.1]), ("reverse_kl", [0.0853460, -0.0120235, -0.0733225])]
)
def test_gradient_to_the_students_logits(name, expected):
    logits = Q.log().requires_grad_()
    DIVERGENCES[name](logits.log_softmax(-1), P.log()).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_policy_gradient_has_the_reverse_kls_gradient_on_average():
    logits = Q.log().expand(3, 3).contiguous()  # as if each token had been sampled once
    tile = SampledPolicyGradient(torch.arange(3), P.log()[0], 1.0, 3)
    gradients = tile(logits.clone(), slice(0, 3), True, torch.empty_like(logits)).grad
    expectation = Q[0] @ gradients
    assert expectation.tolist() == pytest.approx([0.0853460, -0.0120235, -0.0733225], abs=1e-6)


def test_back_propagating_the_sampled_difference_would_teach_nothing():
    logits = Q.log().requires_grad_()
    q = logits.log_softmax(-1)[0]
    [gradient] = torch.autograd.grad((q.detach().exp() * (q - P.log()[0])).sum(), logits)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "options"), [(name, {}) for name in DIVERGENCES] + [("jsd", {"beta": b}) for b in (0.0, 1.0)]
)
def test_extreme_logits_stay_finite(name, options):
    """Logits of +-1e4 in bfloat16, and -inf padding entries in both models, give finite values and gradients."""
    student = torch.tensor([[1e4, -1e4, 0.0, -torch.inf]], dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0, -torch.inf]], dtype=torch.bfloat16)
    value = DIVERGENCES[name](student.float().log_softmax(-1), teacher.float().log_softmax(-1), **options)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(student.grad).all()
    without = DIVERGENCES[name](
        student[:, :3].float().log_softmax(-1), teacher[:, :3].float().log_softmax(-1), **options
    )
    assert value.item() == pytest.approx(without.item())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_no_gradient(name):
    logits = P.log().requires_grad_()
    value = DIVERGENCES[name](logits.log_softmax(-1), P.log())
    value.sum().backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("offset", [0.0, 100.0, -1000.0])
def test_log_softmax_does_not_depend_on_the_size_of_logits(offset):
    """A head may give all logits a common offset, which float32 must not lose digits to."""
    torch.manual_seed(0)
    logits = (torch.randn(4, 49_152) * 3 + offset).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    found, expected = log_softmax(logits), exact.log_softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=1e-6)
    weights = torch.rand_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
