"""The reverse KL from a teacher's top tokens, by enumeration on 12 ids in float64."""

import pytest
import torch

from hf_posttrain.losses.divergence import DIVERGENCES, reverse_kl
from hf_posttrain.scoring import head as H
from hf_posttrain.scoring.top_tokens import TopTokens, residual, top_k

N, V, D, T = 5, 12, 4, 0.7


@pytest.fixture
def given():
    """The student's states and head, its log-probabilities, and the teacher's logits."""
    draw = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    hidden, weight = random(N, D).requires_grad_(), random(V, D).requires_grad_()
    return hidden, weight, torch.log_softmax(hidden @ weight.T / T, -1), 2 * random(N, V)


def known(theirs, k, targets):
    """What a teacher tells: (ids, log-probabilities, those of the targets)."""
    tile = TopTokens(k, T, V, targets)(theirs, slice(0, N), False, torch.empty(0))
    return tile.stats["ids"], tile.stats["logps"], tile.value


@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_the_residual_is_unbiased_in_value_and_gradient(k, given):
    hidden, weight, q, theirs = given
    p = torch.log_softmax(theirs / T, -1)
    total, gradient = torch.zeros(N).double(), torch.zeros_like(weight)
    for token in range(V):
        targets = torch.full((N,), token)
        tile = residual(*known(theirs, k, targets), targets, T, V)
        values, stats = H.score_tokens(H.LinearHead(weight, None), hidden, tile)
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
    values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, residual(*known(theirs, V, targets), targets, T, V))
    expected = reverse_kl(q, torch.log_softmax(theirs / T, -1))
    torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
    found = torch.autograd.grad(values.sum(), (hidden, weight))
    for one, other in zip(found, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_tail_is_a_bound_and_never_negative(name, k, given):
    """One bucket for the rest is a coarser view of both models (data processing inequality)."""
    hidden, weight, q, theirs = given
    targets = torch.zeros(N, dtype=torch.long)
    ids, logps, _ = known(theirs, k, targets)
    tile = top_k(DIVERGENCES[name], ids, logps, targets, T, 0.0, V)
    values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, tile)
    exact = DIVERGENCES[name](q, torch.log_softmax(theirs / T, -1))
    assert (values >= 0).all()
    assert (values <= exact + 1e-9).all()
