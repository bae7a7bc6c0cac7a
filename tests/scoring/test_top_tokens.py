"""The reverse KL from a teacher's top tokens, by enumeration on 12 ids in float64."""

import pytest
import torch

from hf_posttrain.losses.divergence import DIVERGENCES, GENERALIZED, reverse_kl
from hf_posttrain.scoring import head as H
from hf_posttrain.scoring.top_tokens import TopTokens, residual_reverse_kl, top_k_divergence

N, V, D, T = 5, 12, 4, 0.7


@pytest.fixture
def given():
    """The student's states and head, its log-probabilities, and the teacher's logits."""
    draw = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    hidden, weight = random(N, D).requires_grad_(), random(V, D).requires_grad_()
    return hidden, weight, torch.log_softmax(hidden @ weight.T / T, -1), 2 * random(N, V)


def scored(function, hidden, weight, theirs, k, targets, *divergence):
    """`score_tokens` of the tile function, with what a teacher tells of its top K tokens and of the targets."""
    tile = TopTokens(k, T, V, targets)(theirs, slice(0, N), False, torch.empty(0))
    given = tile.stats["ids"], tile.stats["logps"], targets, T, V
    return H.score_tokens(H.LinearHead(weight, None), hidden, function(*divergence, *given, teacher=tile.value))


@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_the_residual_is_unbiased_in_value_and_gradient(k, given):
    hidden, weight, q, theirs = given
    p = torch.log_softmax(theirs / T, -1)
    total, gradient = torch.zeros(N).double(), torch.zeros_like(weight)
    for token in range(V):
        targets = torch.full((N,), token)
        values, stats = scored(residual_reverse_kl, hidden, weight, theirs, k, targets)
        torch.testing.assert_close(stats["student"], q[:, token].detach())
        torch.testing.assert_close(stats["teacher"], p[:, token])
        chance = q[:, token].exp().detach()
        total += chance * values.detach()
        gradient += torch.autograd.grad((chance * values).sum(), weight)[0]
    exact = reverse_kl(q, p)
    torch.testing.assert_close(total, exact.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), weight)[0], atol=1e-9, rtol=1e-9)


def test_the_residual_with_all_tokens_is_the_dense_loss(given):
    """Exactly, whatever was sampled."""
    hidden, weight, q, theirs = given
    targets = torch.tensor([3, 0, 11, 5, 7])
    values, _ = scored(residual_reverse_kl, hidden, weight, theirs, V, targets)
    expected = reverse_kl(q, torch.log_softmax(theirs / T, -1))
    torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
    found = torch.autograd.grad(values.sum(), (hidden, weight))
    for one, other in zip(found, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_tail_is_one_outcome_of_both_models(name, k, given):
    """Value, gradient and stats are of distributions over K + 1 outcomes: a bound (data processing inequality)."""
    hidden, weight, q, theirs = given
    p, targets = torch.log_softmax(theirs / T, -1), torch.tensor([3, 0, 11, 5, 7])
    values, stats = scored(top_k_divergence, hidden, weight, theirs, k, targets, DIVERGENCES[name])
    coarse = []
    for side in (q, p):
        best = p.argsort(-1, descending=True)
        top, rest = side.gather(-1, best[:, :k]), side.gather(-1, best[:, k:])
        coarse.append(torch.cat([top, rest.logsumexp(-1, keepdim=True)], -1))
    expected = DIVERGENCES[name](*coarse)
    torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
    found = torch.autograd.grad(values.sum(), (hidden, weight), retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), (hidden, weight), retain_graph=True), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(stats["divergence"], expected.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(stats["student"], q.gather(-1, targets[:, None])[:, 0].detach())
    torch.testing.assert_close(stats["teacher"], p.gather(-1, targets[:, None])[:, 0])
    assert (values >= 0).all()
    assert (values <= DIVERGENCES[name](q, p) + 1e-9).all()


@pytest.mark.parametrize("k", [1, 4, 12])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_the_generalized_kl_is_a_bound_below_the_tail_and_least_at_the_teacher(name, k, given):
    hidden, weight, q, theirs = given
    p, targets = torch.log_softmax(theirs / T, -1), torch.tensor([3, 0, 11, 5, 7])
    divergence = DIVERGENCES[name]

    def generalized(*args, **kwargs):
        return top_k_divergence(*args, **kwargs, tail=False)

    values, stats = scored(generalized, hidden, weight, theirs, k, targets, divergence)
    best = p.argsort(-1, descending=True)[:, :k]
    (first, second) = (p, q) if name == "forward_kl" else (q, p)
    first, second = first.gather(-1, best), second.gather(-1, best)
    expected = (first.exp() * (first - second) - first.exp() + second.exp()).sum(-1)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(stats["divergence"], expected.detach(), atol=1e-12, rtol=1e-12)
    found = torch.autograd.grad(values.sum(), (hidden, weight), retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), (hidden, weight), retain_graph=True), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)

    tail, _ = scored(top_k_divergence, hidden, weight, theirs, k, targets, divergence)
    full = divergence(q, p)
    assert (values > 0).all()
    assert (values <= tail + 1e-6).all()  # the tail has at least a probability of 1e-7
    assert (values <= full + 1e-12).all()
    if k == V:
        torch.testing.assert_close(values, full, atol=1e-12, rtol=1e-12)

    own = (hidden @ weight.T).detach()  # the teacher is the student: value and gradient are 0
    values, _ = scored(generalized, hidden, weight, own, k, targets, divergence)
    assert values.abs().max() < 1e-12
    assert torch.autograd.grad(values.sum(), weight)[0].abs().max() < 1e-12


@pytest.mark.parametrize("name", GENERALIZED.values(), ids=lambda f: f.__name__)
def test_the_generalized_kl_is_finite_for_probabilities_of_0(name):
    student = torch.tensor([[-0.5, float("-inf"), -1.0]], requires_grad=True)
    teacher = torch.tensor([[-0.1, -3.0, float("-inf")]])
    value = name(student, teacher)
    assert value.isfinite().all()
    assert (value > 0).all()
