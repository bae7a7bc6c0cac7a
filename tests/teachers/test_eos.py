"""Terminal ids as one outcome: every loss against its definition over the merged vocabulary, on 12 ids in float64."""

import itertools

import pytest
import torch
from torch import nn

from hf_posttrain.losses.divergence import DIVERGENCES
from hf_posttrain.scoring import head as H
from hf_posttrain.scoring import teacher_tiles as distill
from hf_posttrain.scoring.forward import LMHead
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.policy_gradient import SampledPolicyGradient
from hf_posttrain.scoring.top_tokens import TopTokens, residual_reverse_kl, top_k_divergence
from hf_posttrain.teachers.eos import MergedEOS
from hf_posttrain.teachers.local import TeacherStates

N, V, D = 9, 12, 5
ENDS = [7, 2, 11]
"""Of the student and of the teacher; the first is not the smallest."""


def merged_logps(logits, temperature):
    """ln of the probabilities of V - 2 outcomes, E last: [N, V] -> [N, V - 2]."""
    logps = torch.log_softmax(logits / temperature, -1)
    others = [v for v in range(V) if v not in ENDS]
    return torch.cat([logps[:, others], logps[:, ENDS].logsumexp(-1, keepdim=True)], -1)


def outcome_of(tokens):
    """The column of `merged_logps` that a token is in."""
    others = [v for v in range(V) if v not in ENDS]
    return torch.tensor([len(others) if t in ENDS else others.index(t) for t in tokens.tolist()])


@pytest.fixture
def given():
    """Student's hidden states and head, the teacher's logits, and tokens among which every end is."""
    draw = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    hidden, weight = random(N, D).requires_grad_(), random(V, D).requires_grad_()
    return hidden, weight, 2 * random(N, V), torch.tensor([*ENDS, 0, 5, 7, 2, 1, 11])


def teacher_of(logits, stop=None):
    return TeacherStates(LMHead(nn.Identity(), lambda rows: rows, H.LogitTransform()), logits, stop)


def assert_equal(head, tile, expected, leaves):
    """Values and gradients of a tile function are those of `expected` [N], to 1e-9."""
    values, stats = H.score_tokens(head, leaves[0], tile)
    found = torch.autograd.grad(values.sum(), leaves)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    for one, other in zip((values, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    return stats


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_over_merged_outcomes(name, temperature, softcap, given):
    hidden, weight, theirs, tokens = given
    stop, transform = MergedEOS(torch.tensor(ENDS), temperature), H.LogitTransform(softcap=softcap)
    function = distill.divergence_function(name, 0.3 if name == "jsd" else None)
    tile = distill.dense_divergence(
        function, teacher_of(theirs.clone(), stop), stop.merge_ids(tokens), temperature, 0.0
    )
    logits = transform(hidden @ weight.T)
    q, p = merged_logps(logits, temperature), merged_logps(theirs, temperature)
    stats = assert_equal(H.LinearHead(weight, None, transform), stop.wrap(tile), function(q, p), (hidden, weight))
    own = outcome_of(tokens)[:, None]
    torch.testing.assert_close(stats["student"], q.gather(-1, own)[:, 0].detach())
    torch.testing.assert_close(stats["teacher"], p.gather(-1, own)[:, 0])


@pytest.mark.parametrize("coef", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("name", ["forward_kl", "tvd"])
def test_the_cross_entropy_beside_it_is_that_of_the_data(name, coef, given):
    hidden, weight, theirs, tokens = given
    stop = MergedEOS(torch.tensor(ENDS), 0.6)
    teacher, merged = teacher_of(theirs.clone(), stop), stop.merge_ids(tokens)
    tile = stop.wrap(distill.dense_divergence(DIVERGENCES[name], teacher, merged, 0.6, 0.0))
    logits = hidden @ weight.T
    ce = nn.functional.cross_entropy(logits, tokens, reduction="none")
    value = DIVERGENCES[name](merged_logps(logits, 0.6), merged_logps(theirs, 0.6))
    tile = distill.add_cross_entropy(tile, tokens, coef)
    stats = assert_equal(H.LinearHead(weight, None), tile, (1 - coef) * value + coef * ce, (hidden, weight))
    if coef:
        torch.testing.assert_close(stats["ce"], ce.detach())
    else:
        assert "ce" not in stats


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_policy_gradient_has_the_expectation_of_the_merged_reverse_kl(temperature, given):
    """By enumeration of the sampled token."""
    hidden, weight, theirs, _ = given
    stop = MergedEOS(torch.tensor(ENDS), temperature)
    logps = torch.log_softmax(hidden @ weight.T / temperature, -1).detach()
    p = merged_logps(theirs, temperature)
    total = torch.zeros_like(weight)
    for token in range(V):
        tokens = torch.full((N,), token)
        tile, buffer = stop.wrap(LogProb(stop.merge_ids(tokens), temperature)), torch.empty_like(theirs)
        teacher = tile(theirs.clone(), slice(0, N), False, buffer)
        torch.testing.assert_close(teacher.value, p.gather(-1, outcome_of(tokens)[:, None])[:, 0])
        tile = SampledPolicyGradient(stop.merge_ids(tokens), teacher.value, temperature, V)
        values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, stop.wrap(tile))
        total += torch.autograd.grad((values * logps[:, token].exp()).sum(), weight)[0]
    kl = DIVERGENCES["reverse_kl"](merged_logps(hidden @ weight.T, temperature), p)
    torch.testing.assert_close(total, torch.autograd.grad(kl.sum(), weight)[0], atol=1e-9, rtol=1e-9)


def test_the_entropy_is_that_of_the_outcomes(given):
    hidden, weight, _, tokens = given
    stop = MergedEOS(torch.tensor(ENDS))
    tile = stop.wrap(LogProb(stop.merge_ids(tokens), stats=True))
    _, stats = H.score_tokens(H.LinearHead(weight, None), hidden, tile)
    q = merged_logps(hidden @ weight.T, 1.0)
    torch.testing.assert_close(stats["entropy"], -(q.exp() * q).sum(-1).detach())
    assert stats["correct"].tolist() == (q.argmax(-1) == outcome_of(tokens)).double().tolist()


def test_a_cached_teacher_has_merged_outcomes_too(given):
    """All ten outcomes kept: the dense loss."""
    hidden, weight, theirs, tokens = given
    stop = MergedEOS(torch.tensor(ENDS), 0.6)
    kept = stop.wrap(TopTokens(10, 0.6, V))(theirs.clone(), slice(0, N), False, torch.empty(N, V).double()).stats
    assert torch.isin(kept["ids"], torch.tensor(ENDS)).sum(-1).tolist() == [1] * N
    cache = kept["ids"], kept["logps"]
    tile = top_k_divergence(DIVERGENCES["forward_kl"], *cache, stop.merge_ids(tokens), 0.6, V)
    expected = DIVERGENCES["forward_kl"](merged_logps(hidden @ weight.T, 0.6), merged_logps(theirs, 0.6))
    values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, stop.wrap(tile))
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6)  # the empty tail is 1e-7 at least


def test_all_tokens_and_the_residual_are_the_dense_loss(given):
    """Of the ends all but the first are none, and are among the teacher's best 12 all the same."""
    hidden, weight, theirs, tokens = given
    stop = MergedEOS(torch.tensor(ENDS), 0.6)
    tile = stop.wrap(TopTokens(V, 0.6, V, stop.merge_ids(tokens)))
    kept = tile(theirs.clone(), slice(0, N), False, torch.empty(N, V).double())
    tile = residual_reverse_kl(
        kept.stats["ids"], kept.stats["logps"], stop.merge_ids(tokens), 0.6, V, teacher=kept.value
    )
    expected = DIVERGENCES["reverse_kl"](merged_logps(hidden @ weight.T, 0.6), merged_logps(theirs, 0.6))
    assert_equal(H.LinearHead(weight, None), stop.wrap(tile), expected, (hidden, weight))


@pytest.mark.parametrize("ids", [[], [7]])
def test_fewer_than_two_ends_change_nothing(ids, given):
    _, _, theirs, tokens = given
    stop, plain = MergedEOS(torch.tensor(ids, dtype=torch.long), 0.6), LogProb(tokens, 0.6)
    assert stop.wrap(plain) is plain
    assert stop.merge_ids(tokens) is tokens
    kept = teacher_of(theirs, stop).logits(slice(0, N))
    assert torch.equal(kept, theirs)


def test_every_order_of_the_ends_gives_the_same(given):
    hidden, weight, theirs, tokens = given
    found = []
    for ends in itertools.permutations(ENDS):
        stop = MergedEOS(torch.tensor(ends))
        teacher, merged = teacher_of(theirs.clone(), stop), stop.merge_ids(tokens)
        tile = distill.dense_divergence(DIVERGENCES["reverse_kl"], teacher, merged, 1.0, 0.0)
        found.append(H.score_tokens(H.LinearHead(weight, None), hidden, stop.wrap(tile))[0])
    for values in found[1:]:
        torch.testing.assert_close(values, found[0])
