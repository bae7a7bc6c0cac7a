"""The tiled head against the plain softmax over full logits."""

import math

import pytest
import torch
from torch import nn
from training_for_tests import quick

from hf_posttrain.losses.divergence import DIVERGENCES, GENERALIZED, reverse_kl, with_tail
from hf_posttrain.methods import opd_diagnostics
from hf_posttrain.scoring import head as H
from hf_posttrain.scoring import teacher_tiles as distill
from hf_posttrain.scoring.adapted_head import score_tokens_checkpointed
from hf_posttrain.scoring.forward import LMHead
from hf_posttrain.scoring.head import LogitTransform, LogProb
from hf_posttrain.scoring.policy_gradient import SampledPolicyGradient
from hf_posttrain.scoring.teacher_tiles import (
    add_cross_entropy,
    autograd_tile,
    dense_divergence,
    divergence_function,
)
from hf_posttrain.scoring.top_tokens import TopTokens, residual_reverse_kl, top_k_divergence
from hf_posttrain.scoring.weighted_log_prob import EntropyWeightedLogProb, WeightedLogProb
from hf_posttrain.teachers.eos import MergedEOS
from hf_posttrain.teachers.local import TeacherStates

N, V, D = 23, 37, 8
TRANSFORMS = [H.LogitTransform(*how) for how in ((), (0.25,), (1.0, 5.0), (2.0, 3.0))]


@pytest.fixture(params=["keep", "recompute"])
def small_tiles(request, monkeypatch):
    """Five tokens a tile, so that a pass has several; with and without keeping them."""
    monkeypatch.setattr(H, "TILE_ELEMENTS", 5 * V)
    monkeypatch.setattr(H, "MIN_TILE_ROWS", 1)
    monkeypatch.setattr(H, "MAX_KEPT_ELEMENTS", 10**9 if request.param == "keep" else 0)


def tensors(dtype=torch.float64, bias=True):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype).requires_grad_()  # noqa: E731
    return make(N, D), make(V, D), make(V) if bias else None, torch.randint(0, V, (N,), generator=g)


def few(hidden, weight, bias, targets):
    """Fewer tokens and ids, still in several tiles: a numerical gradient takes two passes for each number."""
    parts = (part.detach().clone().requires_grad_() for part in (hidden[:17], weight[:11], bias[:11]))
    return *parts, targets[:17] % 11


def plain_logps(hidden, weight, bias, targets, finish, temperature=1.0):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * finish.scale
    if finish.softcap is not None:
        logits = finish.softcap * torch.tanh(logits / finish.softcap)
    return torch.log_softmax(logits / temperature, -1)[torch.arange(N), targets]


@pytest.mark.parametrize("finish", TRANSFORMS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("promised", [True, False])
def test_log_prob_equals_plain_softmax(small_tiles, finish, bias, promised):
    hidden, weight, b, targets = tensors(bias=bias)
    token_weights = torch.linspace(0, 2, N, dtype=torch.float64)
    inputs = [t for t in (hidden, weight, b) if t is not None]

    expected = plain_logps(hidden, weight, b, targets, finish, temperature=0.7)
    expected_grads = torch.autograd.grad(3 * (expected * token_weights).sum(), inputs)
    values, _ = H.score_tokens(
        H.LinearHead(weight, b, finish), hidden, LogProb(targets, 0.7), token_weights if promised else None
    )
    grads = torch.autograd.grad(3 * (values * token_weights).sum(), inputs)

    torch.testing.assert_close(values, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("finish", TRANSFORMS, ids=str)
def test_gradcheck_log_prob(small_tiles, finish, stats):
    hidden, weight, bias, targets = few(*tensors())

    def values(hidden, weight, bias):
        return H.score_tokens(H.LinearHead(weight, bias, finish), hidden, LogProb(targets, stats=stats))[0]

    assert torch.autograd.gradcheck(values, (hidden, weight, bias))


@pytest.mark.parametrize("finish", TRANSFORMS, ids=str)
def test_a_tile_function_may_overwrite_the_logits(small_tiles, finish):
    """The derivative of a softcap must not depend on what a tile function leaves in the logits."""
    hidden, weight, bias, targets = tensors()

    def gradients(tile):
        values, _ = H.score_tokens(H.LinearHead(weight, bias, finish), hidden, tile)
        return torch.autograd.grad(values.sum(), (hidden, weight, bias))

    def overwriting(logits, rows, need_grad, buffer):
        result = LogProb(targets)(logits, rows, need_grad, buffer)
        logits.fill_(torch.nan)
        return result

    for found, expected in zip(gradients(overwriting), gradients(LogProb(targets)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", quick("reverse_kl", "jsd", "tvd", "skew_forward_kl", among=DIVERGENCES))
def test_gradcheck_divergence(small_tiles, name):
    hidden, weight, bias, _ = few(*tensors())
    teacher_hidden, teacher_weight, _, _ = tensors(bias=False)
    teacher = teacher_weight[: len(weight)].detach().roll(3, 0)

    def function(logits, rows):
        return DIVERGENCES[name](
            logits.log_softmax(-1), (teacher_hidden.detach()[rows] @ teacher.T).log_softmax(-1)
        ), {}

    def loss(hidden, weight, bias):
        head, weights = H.LinearHead(weight, bias), torch.ones(len(hidden))
        return H.score_tokens(head, hidden, autograd_tile(function), weights)[0].sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("size", [V, V - 4, V + 3], ids=lambda size: f"teacher of {size}")
@pytest.mark.parametrize(("temperature", "ce_coef"), [(1.0, 0.0), (1.0, 0.3), (0.7, 0.0), (0.7, 0.3)])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_kl_in_closed_form_equals_autograd(small_tiles, name, temperature, ce_coef, size):
    hidden, weight, bias, targets = tensors()
    targets = targets.clamp(max=min(size, V) - 1)
    draw = torch.Generator().manual_seed(1)
    theirs = torch.randn(N, size, generator=draw, dtype=torch.float64)
    theirs[3, 5] = theirs[7, 2] = -torch.inf if name == "forward_kl" else 0.0
    teacher = TeacherStates(LMHead(nn.Identity(), lambda logits: logits.clone(), H.LogitTransform()), theirs)
    tile = distill.dense_divergence(distill.divergence_function(name, 0.3), teacher, targets, temperature, ce_coef)
    assert isinstance(tile, distill.KL)

    found = []
    for one in (tile, tile.fallback):
        values, stats = H.score_tokens(H.LinearHead(weight, bias), hidden, one, torch.ones(N, dtype=torch.float64))
        found.append((values, *torch.autograd.grad(values.sum(), (hidden, weight, bias)), stats))
    for closed, autograd in zip(*found, strict=True):
        torch.testing.assert_close(closed, autograd)


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_of_close_models_is_not_lost_in_rounding(reverse):
    """As at the end of a distillation: logits of size 100, and a KL of some 1e-5."""
    draw = torch.Generator().manual_seed(0)
    z = 4 * torch.randn(8, 5000, generator=draw) + 100
    t = z + 0.01 * torch.randn(8, 5000, generator=draw)
    q, p = (torch.log_softmax(side.double(), -1) for side in (z, t))
    expected = (q.exp() * (q - p)).sum(-1) if reverse else (p.exp() * (p - q)).sum(-1)
    teacher = TeacherStates(LMHead(nn.Identity(), lambda logits: logits, H.LogitTransform()), t)
    name, targets = "reverse_kl" if reverse else "forward_kl", torch.zeros(8, dtype=torch.long)
    tile = distill.dense_divergence(DIVERGENCES[name], teacher, targets, 1.0, 0.0)
    kept = t.clone()
    found = tile(z.clone(), slice(0, 8), False, torch.empty_like(z)).value
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=3e-6)
    assert torch.equal(teacher.hidden, kept)


def test_tiles_behind_an_adapted_head_are_float32_under_autocast():
    hidden, weight, _, targets = tensors(torch.float32, bias=False)
    teacher = TeacherStates(LMHead(nn.Identity(), lambda logits: logits, H.LogitTransform()), torch.randn(N, V))
    tile = distill.dense_divergence(DIVERGENCES["forward_kl"], teacher, targets, 1.0, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        through, stats = score_tokens_checkpointed(lambda part: H.LogitTransform()(part @ weight.T), hidden, tile, V)
        plain, others = H.score_tokens(H.LinearHead(weight, None), hidden, tile)
    torch.testing.assert_close(through, plain)
    torch.testing.assert_close(stats, others)


def test_frozen_head_gives_the_same_hidden_gradient(small_tiles):
    hidden, weight, bias, targets = tensors()
    expected = torch.autograd.grad(plain_logps(hidden, weight, bias, targets, H.LogitTransform()).sum(), hidden)[0]
    values, _ = H.score_tokens(H.LinearHead(weight.detach(), bias.detach()), hidden, LogProb(targets))
    torch.testing.assert_close(torch.autograd.grad(values.sum(), hidden)[0], expected)


def test_stats_are_entropy_and_argmax_accuracy(small_tiles):
    hidden, weight, bias, targets = tensors()
    logps = (hidden @ weight.T + bias).log_softmax(-1)
    _, stats = H.score_tokens(H.LinearHead(weight, bias), hidden, LogProb(targets, stats=True))
    torch.testing.assert_close(stats["entropy"], -(logps.exp() * logps).sum(-1).detach())
    assert stats["correct"].tolist() == (logps.argmax(-1) == targets).float().tolist()


def test_module_path_equals_plain_head(small_tiles):
    hidden, weight, bias, targets = tensors()
    module = nn.Linear(D, V).double()
    module.weight.data, module.bias.data = weight.detach(), bias.detach()
    expected = plain_logps(hidden, weight, bias, targets, H.LogitTransform(scale=2.0))
    logits_of = lambda part: H.LogitTransform(scale=2.0)(module(part))  # noqa: E731
    values, stats = score_tokens_checkpointed(logits_of, hidden, LogProb(targets, stats=True), V)
    torch.testing.assert_close(values, expected)
    assert set(stats) == {"entropy", "correct"}
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), (hidden, module.weight)),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
    )


@pytest.mark.parametrize("by_autograd", [False, True])
def test_a_checkpointed_tile_computes_its_gradient_in_the_backward_alone(by_autograd, small_tiles):
    """A tile function with autograd of its own saves tensors, which the checkpoint around it must not count."""
    hidden, weight, bias, targets = tensors()
    squares = distill.autograd_tile(
        lambda logits, rows: (logits.log_softmax(-1).gather(-1, targets[rows, None])[:, 0].square(), {})
    )
    inner, asked = squares if by_autograd else LogProb(targets), []
    tile = lambda logits, rows, grad, buffer: asked.append(grad) or inner(logits, rows, grad, buffer)  # noqa: E731
    compute_logits = lambda part: H.LogitTransform(softcap=5.0)(part @ weight.T + bias)  # noqa: E731
    values, _ = score_tokens_checkpointed(compute_logits, hidden, tile, V)
    count = len(asked)
    logps = plain_logps(hidden, weight, bias, targets, H.LogitTransform(softcap=5.0))
    expected = logps.square() if by_autograd else logps
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), (hidden, weight, bias)),
        torch.autograd.grad(expected.sum(), (hidden, weight, bias)),
    )
    assert count > 1
    assert asked == [False] * count + [True] * count


def test_broken_promise_is_an_error():
    hidden, weight, bias, targets = tensors()
    values, _ = H.score_tokens(H.LinearHead(weight, bias), hidden, LogProb(targets), torch.ones(N))
    with pytest.raises(RuntimeError, match="does not match the `weights` of score_tokens"):
        (values**2).sum().backward()


def test_extreme_logits_in_bfloat16_stay_finite():
    hidden = torch.full((4, 1), 100.0, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[100.0], [-100.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)  # logits +-1e4
    values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, LogProb(torch.tensor([0, 1, 2, 0]), stats=True))
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert values[1] == -2 * 9984  # 100 * 100 rounds to 9984 in bfloat16
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_the_true_tokens_gradient_survives_bfloat16_where_it_is_almost_certain():
    """1 - p of a p near 1, among 150,000 tokens, is not rounded away: within a few per cent, the rounding of a float32
    sum of so many, it is that of float64."""
    torch.manual_seed(0)
    targets, own = torch.tensor([3, 149_999, 70_000]), torch.eye(8)[:3]
    weight = 0.05 * torch.randn(150_000, 8)
    weight[targets] = own
    weight = weight.to(torch.bfloat16)
    hidden = (torch.tensor([[17.0], [19.0], [22.0]]) * own).to(torch.bfloat16).requires_grad_()
    values, _ = H.score_tokens(H.LinearHead(weight, None), hidden, LogProb(targets))
    values.sum().backward()

    logits = (hidden.detach() @ weight.T).double()
    probs = torch.softmax(logits, -1)
    assert 1e-6 < 1 - probs.amax(-1).max() < 1e-3 < 1 - probs.amax(-1).min() < 0.05
    torch.testing.assert_close(values.double(), probs.gather(-1, targets[:, None])[:, 0].log(), rtol=0.05, atol=0)
    expected = (torch.nn.functional.one_hot(targets, 150_000) - probs) @ weight.double()
    assert ((hidden.grad.double() - expected).norm(dim=-1) < 0.05 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("promised", [True, False])
def test_no_token_gives_no_value_and_zero_gradient(promised):
    hidden, weight, bias, _ = tensors()
    tile, token_weights = LogProb(torch.zeros(0, dtype=torch.long), stats=True), torch.ones(0) if promised else None
    values, stats = H.score_tokens(H.LinearHead(weight, bias), hidden[:0], tile, token_weights)
    (values.sum() + 0 * hidden.sum()).backward()
    assert values.shape == stats["entropy"].shape == stats["correct"].shape == (0,)
    assert weight.grad.abs().sum() == 0


# ---- at the size of real vocabularies


def realistic_logits(vocabulary, seed=0):
    """Logits of float32 as a pretrained model has them: a few likely tokens, a long tail, another level in each row."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(6, vocabulary, generator=draw) + 5 * torch.randn(6, 1, generator=draw)
    for size in (12.0, 10.0, 9.0):
        logits[torch.arange(6), torch.randint(vocabulary, (6,), generator=draw)] += size
    return logits


def tile_functions(targets, teacher, vocabulary):
    """Name -> (tile function, the value in float64 of student logits)."""
    states = TeacherStates(LMHead(nn.Identity(), lambda rows: rows.clone(), LogitTransform()), teacher)
    p = torch.log_softmax(teacher.double(), -1)
    logp = lambda z: torch.log_softmax(z, -1)  # noqa: E731
    picked = lambda z: logp(z).gather(-1, targets[:, None])[:, 0]  # noqa: E731
    found = {
        "log_prob": (LogProb(targets, stats=True), picked),
        "log_prob at 0.7": (LogProb(targets, 0.7), lambda z: logp(z / 0.7).gather(-1, targets[:, None])[:, 0]),
    }
    found["log_prob weighted by its probability"] = (
        WeightedLogProb(targets),
        lambda z: picked(z).exp().detach() * picked(z),
    )
    found["log_prob weighted by the entropy"] = (
        EntropyWeightedLogProb(targets, stats=True),
        lambda z: entropy_of_top(z).detach() * picked(z),
    )
    for name in DIVERGENCES:
        function = divergence_function(name, None)
        found[name] = (
            dense_divergence(function, states, targets, 1.0, 0.0),
            lambda z, function=function: function(logp(z), p),
        )
        found[f"{name} with ce"] = (
            dense_divergence(function, states, targets, 1.0, 0.3),
            lambda z, function=function: 0.7 * function(logp(z), p) - 0.3 * logp(z).gather(-1, targets[:, None])[:, 0],
        )
    top, ids = p.topk(64)
    found["forward_kl of top 64"] = (
        top_k_divergence(divergence_function("forward_kl", None), ids, top.float(), targets, 1.0, vocabulary),
        lambda z: divergence_function("forward_kl", None)(with_tail(logp(z).gather(-1, ids)), with_tail(top)),
    )
    for function, generalized in GENERALIZED.items():
        found[f"{generalized.__name__} of top 64"] = (
            top_k_divergence(function, ids, top.float(), targets, 1.0, vocabulary, tail=False),
            lambda z, generalized=generalized: generalized(logp(z).gather(-1, ids), top),
        )
    for name in ("forward_kl", "reverse_kl", "jsd"):
        function = divergence_function(name, None)
        found[f"{name} at 0.7"] = (
            dense_divergence(function, states, targets, 0.7, 0.0),
            lambda z, function=function: function(logp(z / 0.7), torch.log_softmax(teacher.double() / 0.7, -1)),
        )
    own = p.gather(-1, targets[:, None])[:, 0]
    found["policy gradient"] = (
        SampledPolicyGradient(targets, own.float(), 1.0, vocabulary),
        lambda z: -(own - picked(z)).detach() * picked(z),
    )
    found["residual of top 64"] = (
        residual_reverse_kl(ids, top.float(), targets, 1.0, vocabulary, teacher=own.float()),
        lambda z: reverse_kl_of_top(logp(z), ids, top, picked(z), own, (ids == targets[:, None]).any(-1)),
    )
    ends = MergedEOS(torch.tensor([7, 11, vocabulary - 1]))
    found["log_prob with several ends"] = (ends.wrap(LogProb(ends.merge_ids(targets), stats=True)), picked)
    found["cross-entropy of the whole head"] = (
        add_cross_entropy(dense_divergence(reverse_kl, states, targets, 1.0, 0.0), targets, 0.3),
        lambda z: 0.7 * reverse_kl(logp(z), p) - 0.3 * picked(z),
    )
    return found


def entropy_of_top(logits):
    """The weights of `EntropyWeightedLogProb`."""
    logps = logits.topk(20).values.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1) / math.log(20)


def reverse_kl_of_top(q, ids, p, own_q, own_p, known):
    """The value of `residual_reverse_kl` with the gradient that it promises, in the precision of its arguments."""
    apart = (q.gather(-1, ids) - p).detach()
    rest = torch.where(known, 0.0, (own_q - own_p).detach())
    moving = (q.gather(-1, ids).exp() * apart).sum(-1) + rest * own_q
    return moving + ((moving - rest * own_q + rest) - moving).detach()


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_sums_over_a_real_vocabulary_are_those_of_float64(vocabulary):
    """Values, gradients and entropy in float32 to 2e-5, relative to their size. Products that add up a vocabulary in
    its order were wrong by 1e-3."""
    student = realistic_logits(vocabulary)
    teacher = student + 0.3 * realistic_logits(vocabulary, seed=1)
    targets = student.topk(3).indices[:, 1]
    for name, (tile, exact) in tile_functions(targets, teacher, vocabulary).items():
        z = student.double().requires_grad_()
        expected = exact(z)
        [gradient] = torch.autograd.grad(expected.sum(), z)
        found = tile(student.clone(), slice(0, 6), True, torch.empty_like(student))
        # the residual is a difference of logarithms of size 10, of which float32 has no more than 1e-6
        size = expected.abs().clamp(min=1.0 if name.startswith("residual") else 0.0)
        error = ((found.value.double() - expected).abs() / size).max()
        assert error <= 2e-5, f"{name}: value {error:.1e}"
        error = (found.grad.double() - gradient).norm(dim=-1) / gradient.norm(dim=-1)
        limit = 1e-3 if "tvd" in name else 2e-5  # whose gradient changes its sign where both probabilities are equal
        assert error.max() <= limit, f"{name}: gradient {error.max():.1e}"
        if "entropy" in found.stats:
            q = torch.log_softmax(z.detach(), -1)
            entropy = -(q.exp() * q).sum(-1)
            error = ((found.stats["entropy"].double() - entropy).abs() / entropy).max()
            assert error <= 2e-5, f"{name}: entropy {error:.1e}"


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_metrics_over_a_real_vocabulary_are_those_of_float64(vocabulary):
    """What is logged and kept without a gradient: OPD's diagnostics and a teacher's top tokens."""
    student = realistic_logits(vocabulary)
    teacher = student + 0.3 * realistic_logits(vocabulary, seed=1)
    q, p = (torch.log_softmax(side.double(), -1) for side in (student, teacher))
    special, ends = torch.tensor([7, 11]), student.argmax(-1)[:2]
    scratch = [torch.empty_like(student) for _ in range(3)]
    found = opd_diagnostics.compare_logits(student.clone(), teacher, 1.0, ends, special, scratch)
    expected = {
        "kl": reverse_kl(q, p), "student_entropy": -(q.exp() * q).sum(-1), "teacher_entropy": -(p.exp() * p).sum(-1),
        "near": p.gather(-1, q.topk(opd_diagnostics.NEAR_TOKENS).indices).exp().sum(-1),
        "student_stop": q[:, ends].exp().sum(-1), "teacher_stop": p[:, ends].exp().sum(-1),
    }  # fmt: skip
    for name, exact in expected.items():
        error = ((found[name].double() - exact).abs() / exact.abs()).max()
        assert error <= 2e-5, f"{name}: {error:.1e}"
    top = TopTokens(64, 0.7, vocabulary)(student, slice(0, 6), False, student).stats
    exact, ids = torch.log_softmax(student.double() / 0.7, -1).topk(64)
    assert torch.equal(top["ids"], ids)
    torch.testing.assert_close(top["logps"].double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_a_scaled_and_soft_capped_head_of_a_real_vocabulary_is_that_of_float64(vocabulary, monkeypatch):
    """Values and all three gradients of whole passes: Gemma's cap, Granite's scale, in three tiles."""
    monkeypatch.setattr(H, "TILE_ELEMENTS", 16 * vocabulary)
    monkeypatch.setattr(H, "MIN_TILE_ROWS", 1)
    draw = torch.Generator().manual_seed(0)
    hidden = (2 * torch.randn(48, 16, generator=draw)).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=draw).requires_grad_()
    bias = torch.randn(vocabulary, generator=draw).requires_grad_()
    targets = torch.randint(vocabulary, (48,), generator=draw)
    for transform in (H.LogitTransform(0.5, 30.0), H.LogitTransform(2.0)):
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
        logits = transform(exact[0] @ exact[1].T + exact[2])
        expected = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
        gradients = torch.autograd.grad(expected.sum(), exact)
        values, _ = H.score_tokens(H.LinearHead(weight, bias, transform), hidden, LogProb(targets), torch.ones(48))
        assert ((values.double() - expected).abs() / expected.abs()).max() <= 2e-5
        for found, gradient in zip(torch.autograd.grad(values.sum(), (hidden, weight, bias)), gradients, strict=True):
            assert (found.double() - gradient).norm() <= 2e-5 * gradient.norm()
