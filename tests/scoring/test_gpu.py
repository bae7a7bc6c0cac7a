"""What the head does on a GPU, without one: its kernels in Triton's interpreter, its cost on the meta device.

Compiling for the architectures that people have is slow, and proves that the kernels are valid there.
"""

import importlib
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from meta_for_tests import allow_meta
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_posttrain.scoring import forward, head
from hf_posttrain.scoring import teacher_tiles as distill
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.teachers import local
from hf_posttrain.teachers.local import TeacherStates

N, V, D = 23, 3001, 8


@pytest.fixture(scope="module")
def interpreted():
    """The module of the kernels, run by Triton's interpreter on CPU, a thousand logits at a time."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":  # see conftest.py
        pytest.skip("there is a GPU: PARTS=a bash benchmarks/gpu.sh compares the kernels on it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_posttrain.scoring.kernels.BLOCK", 1024)
        yield kernels_module()


def kernels_module():
    return importlib.import_module("hf_posttrain.scoring.kernels")


@pytest.fixture
def fused(interpreted, monkeypatch):
    """The kernels in the place of the torch functions, also on CPU."""
    for module in (head, distill):
        monkeypatch.setattr(module, "triton_kernels", lambda states: interpreted)
    return interpreted


def test_float64_is_left_to_torch(interpreted):
    on_gpu = [SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    assert [head.triton_kernels(states) for states in on_gpu] == [None, interpreted]
    assert head.triton_kernels(torch.zeros(1)) is None


def logits(rows=6, size=V, seed=0, offset=0.0):
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) + offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("vocabulary", [V, V - 101])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernel_of_log_probabilities_is_that_of_float64(interpreted, temperature, vocabulary, stats, dtype):
    x, targets = logits(), torch.tensor([5, 0, vocabulary - 1, 77, 1200, 2])
    targets[0] = x[0, :vocabulary].argmax()
    x[3], x[4, 9] = 0.0, -torch.inf  # all equal, so that none is best; an id that the model forbids
    exact = x.double().requires_grad_()
    logps = torch.log_softmax(exact[:, :vocabulary] / temperature, -1)
    expected = logps.gather(1, targets[:, None])[:, 0]
    [gradient] = torch.autograd.grad(expected.sum(), exact)

    found, kept = torch.full((6, V), 7.0, dtype=dtype), x.clone()
    value, entropy, correct = interpreted.log_prob(x, targets, temperature, vocabulary, found, stats)
    torch.testing.assert_close(value.double(), expected.detach(), atol=5e-6, rtol=0)
    assert (found - gradient).abs().max() < (1e-6 if dtype == torch.float32 else 0.008)
    assert torch.equal(x, kept)
    if stats:
        plain = torch.nan_to_num(logps.exp() * logps).sum(-1).neg().detach()
        torch.testing.assert_close(entropy.double(), plain, atol=1e-5, rtol=0)
        assert correct.tolist() == [1, 0, 0, 0, 0, 0]
    again = interpreted.log_prob(x, targets, temperature, vocabulary, None, stats)[0]
    assert torch.equal(again, value)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_kernel_hides_no_broken_logits(interpreted, broken):
    """A model that gives them has a loss that is not finite, as in torch; the rows beside it are as they were. On a GPU
    a maximum drops NaN unless told not to; the interpreter's keeps it, so the text is looked at too."""
    assert "propagate_nan=tl.PropagateNan.ALL" in inspect.getsource(interpreted._load.fn)
    x, t, targets = logits(rows=2), logits(rows=2, seed=1), torch.tensor([5, 6])
    x[0, 9] = broken
    found = [interpreted.log_prob(x, targets, 1.0, V, None, True)[0]]
    found += [interpreted.kl(x, t, targets, 1.0, reverse, 0.0, None)[0] for reverse in (True, False)]
    for value in found:
        assert value.isfinite().tolist() == [False, True]


def test_rows_without_a_distribution_and_targets_that_are_forbidden_are_those_of_torch(fused, monkeypatch):
    """Row 0 is -inf throughout, on either side: NaN. The target of row 1 is: its log-probability is -inf."""
    x, t, targets = logits(rows=3), logits(rows=3, seed=1), torch.tensor([5, 6, 7])
    x[0] = x[1, 6] = t[0] = t[1, 6] = -torch.inf
    good, identity = logits(rows=3, seed=2), forward.LMHead(nn.Identity(), lambda rows: rows, head.LogitTransform())
    everything = slice(0, 3)

    def made():
        buffer = torch.full((3, V), 7.0)
        yield LogProb(targets, 0.7, stats=True)(x.clone(), everything, True, buffer)
        for mine, theirs in ((x, good), (good, t), (x, t)):
            teacher = TeacherStates(identity, theirs)
            for function in (distill.forward_kl, distill.reverse_kl):
                tile = distill.dense_divergence(function, teacher, targets, 0.7, 0.3 if mine is good else 0.0)
                yield tile(mine.clone(), everything, True, torch.full((3, V), 7.0))

    found = list(made())
    for module in (head, distill):
        monkeypatch.setattr(module, "triton_kernels", lambda states: None)
    for mine, plain in zip(found, made(), strict=True):
        assert mine.value[0].isnan()
        assert mine.grad[0].isnan().any()
        torch.testing.assert_close(mine.value, plain.value, equal_nan=True, atol=1e-5, rtol=1e-5)
        for name in plain.stats:
            torch.testing.assert_close(mine.stats[name], plain.stats[name], equal_nan=True, atol=1e-5, rtol=1e-5)
    assert found[0].value[1] == -torch.inf


@pytest.mark.parametrize("offset", [0.0, pytest.param(30.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [V, V - 101, V + 50], ids=lambda size: f"teacher of {size}")
@pytest.mark.parametrize(("temperature", "ce_coef"), [(1.0, 0.0), (0.7, 0.0), (1.0, 0.3)])
@pytest.mark.parametrize("reverse", [True, False])
def test_the_kernel_of_divergences_is_that_of_float64(interpreted, reverse, temperature, ce_coef, size, offset):
    z, targets, both = logits(), torch.tensor([5, 0, 1000, 77, 1200, 2]), min(size, V)
    t = logits(size=size, seed=1, offset=offset)
    t[:, :both] = 0.2 * t[:, :both] + z[:, :both]
    z[1, 9], t[1, 9] = -torch.inf, -torch.inf
    exact = z.double().requires_grad_()
    sides = exact, t.double()
    q, p = (torch.log_softmax(side[:, :both].clamp(min=-1e30) / temperature, -1) for side in sides)
    kl = (q.exp() * (q - p)).sum(-1) if reverse else (p.exp() * (p - q)).sum(-1)
    own = q.gather(1, targets[:, None])[:, 0]
    [gradient] = torch.autograd.grad(((1 - ce_coef) * kl - ce_coef * own).sum(), exact)

    found = torch.full_like(z, 7.0)
    value, student, teacher = interpreted.kl(z, t, targets, temperature, reverse, ce_coef, found)
    limit = {"atol": 3e-5 if offset else 5e-6, "rtol": 0}  # sums of numbers of size `offset`
    torch.testing.assert_close(value.double(), kl.detach(), **limit)
    torch.testing.assert_close(student.double(), own.detach(), **limit)
    torch.testing.assert_close(teacher.double(), p.gather(1, targets[:, None])[:, 0], **limit)
    torch.testing.assert_close(found.double(), gradient, atol=3e-5 if offset else 2e-6, rtol=0)
    assert torch.equal(interpreted.kl(z, t, targets, temperature, reverse, ce_coef, None)[0], value)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_kernels_over_a_real_vocabulary_are_those_of_float64(interpreted, vocabulary, monkeypatch):
    """Values, entropy and gradients to 2e-5 of their size, with a few likely tokens and a long tail."""
    monkeypatch.setattr(interpreted, "BLOCK", 8192)
    z, targets = logits(2, vocabulary), torch.tensor([5, 77])
    z[0, 5], z[1, 900], z[1, 78] = 15.0, 14.0, 13.0
    t = z + 0.3 * logits(2, vocabulary, seed=1)
    exact = z.double().requires_grad_()
    q, p = torch.log_softmax(exact, -1), torch.log_softmax(t.double(), -1)
    own = q.gather(1, targets[:, None])[:, 0]
    found = torch.empty_like(z)

    value, entropy, _ = interpreted.log_prob(z, targets, 1.0, vocabulary, found, True)
    close(value, own)
    close(entropy, -(q.exp() * q).sum(-1))
    close(found, torch.autograd.grad(own.sum(), exact, retain_graph=True)[0])
    for reverse, kl in ((True, (q.exp() * (q - p)).sum(-1)), (False, (p.exp() * (p - q)).sum(-1))):
        close(interpreted.kl(z, t, targets, 1.0, reverse, 0.0, found)[0], kl)
        close(found, torch.autograd.grad(kl.sum(), exact, retain_graph=True)[0])


def close(found, expected):
    assert (found.double() - expected).norm() <= 2e-5 * expected.norm()


def states(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype).requires_grad_()  # noqa: E731
    return make(N, D), make(300, D), make(300), torch.randint(0, 300, (N,), generator=draw)


def passes(head_of, hidden, tile, weights, inputs):
    values, stats = head.score_tokens(head_of, hidden, tile, weights)
    return values, stats, torch.autograd.grad(values.sum(), inputs)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("promised", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("transform", [(), (0.25,), (2.0, 3.0)], ids=str)
@pytest.mark.parametrize("kind", ["log-prob", "forward_kl", "reverse_kl", "jsd"])
def test_the_head_with_kernels_is_the_head_in_torch(interpreted, kind, transform, promised, kept, monkeypatch):
    monkeypatch.setattr(head, "TILE_ELEMENTS", 5 * 300)
    monkeypatch.setattr(head, "MIN_TILE_ROWS", 1)
    monkeypatch.setattr(head, "MAX_KEPT_ELEMENTS", 10**9 if kept else 0)
    hidden, weight, bias, targets = states()
    own = head.LinearHead(weight, bias, head.LogitTransform(*transform))
    if kind == "log-prob":
        tile = LogProb(targets, 0.7, stats=True, vocabulary=290)
        targets.clamp_(max=289)
    else:
        theirs = forward.LMHead(nn.Identity(), lambda rows: rows.clone(), head.LogitTransform())
        teacher = TeacherStates(theirs, logits(N, 300, seed=3))
        function = distill.divergence_function(kind, None)
        tile = distill.dense_divergence(function, teacher, targets, 1.0, 0.3)
    weights = torch.ones(N) if promised else None
    expected = passes(own, hidden, tile, weights, (hidden, weight, bias))
    for module in (head, distill):
        monkeypatch.setattr(module, "triton_kernels", lambda states: interpreted)
    found = passes(own, hidden, tile, weights, (hidden, weight, bias))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_a_kernel_rounds_the_gradient_as_it_writes_it(fused):
    """In bf16 it takes half the memory of a tile, and no other pass over it."""
    hidden, weight, _, targets = states(torch.bfloat16)
    *_, gradient = head._tile_buffers(hidden, 300)
    assert gradient.dtype == torch.bfloat16
    values, _, [found] = passes(head.LinearHead(weight, None), hidden, LogProb(targets), None, (hidden,))
    exact = hidden.detach().float().requires_grad_()
    wanted = torch.log_softmax(exact @ weight.detach().float().T, -1)[torch.arange(N), targets]
    [expected] = torch.autograd.grad(wanted.sum(), exact)
    assert (values - wanted).abs().max() < 0.2  # logits of the CPU's product are rounded
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_divergence_without_a_kernel_makes_its_own_buffer(fused):
    """What a GPU keeps for gradients in bf16 is not enough for its sums."""
    hidden, weight, _, targets = states(torch.bfloat16)
    theirs = forward.LMHead(nn.Identity(), lambda rows: rows.clone(), head.LogitTransform())
    teacher = TeacherStates(theirs, logits(N, 300, seed=3))
    tile = distill.dense_divergence(distill.divergence_function("jsd", None), teacher, targets, 1.0, 0.0)
    values, _, [found] = passes(head.LinearHead(weight, None), hidden, tile, torch.ones(N), (hidden,))
    assert values.isfinite().all()
    assert found.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_kernels_compile_for_the_gpus_that_people_have(capability):
    pytest.importorskip("triton")
    code = f"""
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_posttrain.scoring import kernels

def types(function, **given):
    usual = {{"targets": "*i64", "stride": "i32", "teacher_stride": "i32", "vocabulary": "i32", "padded": "i32"}}
    usual |= {{name: "fp32" for name in ("scale", "min_top_logp", "ce")}} | given
    names = function.arg_names
    constants = {{name: value for name, value in FLAGS.items() if name in names}}
    found = {{name: usual.get(name, "*fp32") for name in names if name not in constants}}
    return found | {{name: "constexpr" for name in constants}}, constants

for gradient in ("*bf16", "*fp16", "*fp32"):
    for flag in (True, False):
        for function in (kernels._log_prob, kernels._kl):
            FLAGS = {{"GRADIENT": True, "STATS": flag, "REVERSE": flag, "BLOCK": kernels.BLOCK}}
            signature, constants = types(function, gradient=gradient)
            source = ASTSource(fn=function, signature=signature, constexprs=constants)
            made = compile(source, target=GPUTarget("cuda", {capability}, 32), options={{"num_warps": kernels.WARPS}})
            print(function.__name__, len(made.asm["cubin"]), made.metadata.shared)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 12
    assert all(int(line.split()[1]) > 1000 for line in run.stdout.splitlines())


# ---- the head's cost, on the meta device


class Cost(TorchDispatchMode):
    """Counts launches, the bytes that products move, and their operations."""

    PRODUCTS = ("mm", "addmm")
    NOTHING = ("detach", "empty", "new_empty", "empty_like", "alias")

    def __init__(self):
        super().__init__()
        self.launches = self.moved = self.flops = 0
        self.results = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # torch 2.11 fails to decompose this one on the meta device
        given = func is torch.ops.aten.addmm.dtype_out
        result = kwargs["out"] if given else func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in self.NOTHING:
            return result
        self.launches += 1
        if name in self.PRODUCTS:
            tensors = {id(each): each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
            self.moved += sum(each.nbytes for each in tensors.values())
            a, b = [each for each in args if isinstance(each, torch.Tensor)][-2:]
            self.flops += 2 * a.numel() * b.shape[1]
            self.results.add((a.dtype, result.dtype, b.shape[1]))
        return result


VOCABULARY, TOKENS = 151_936, 16_384
BANDWIDTH, RATE = 4.3e12, 790e12  # bytes and operations a second of an H200


@pytest.mark.parametrize("hidden_size", [1024, 4096], ids=["0.6B", "8B"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "kd", "jsd"])
def test_the_head_of_a_large_vocabulary_is_few_launches_bound_by_its_products(kind, hidden_size, monkeypatch):
    """16,384 tokens: at most 700 launches, and products that take longer to compute than to read, with logits that are
    not rounded."""
    allow_meta(monkeypatch)
    meta = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    weight, hidden = torch.empty(VOCABULARY, hidden_size, **meta), torch.empty(TOKENS, hidden_size, **meta)
    targets = torch.empty(TOKENS, device="meta", dtype=torch.long)
    weights = None if kind == "dpo" else torch.empty(TOKENS, device="meta")
    tile = LogProb(targets, stats=kind == "sft")
    if kind in ("kd", "jsd"):
        module = nn.Linear(2048, VOCABULARY, bias=False, device="meta", dtype=torch.bfloat16)
        theirs = forward.LMHead(module, module.forward, head.LogitTransform())
        teacher = TeacherStates(theirs, torch.empty(TOKENS, 2048, device="meta", dtype=torch.bfloat16))
        function = distill.divergence_function("forward_kl" if kind == "kd" else kind, None)
        tile = distill.dense_divergence(function, teacher, targets, 1.0, 0.0)
    with Cost() as cost:
        values, _ = head.score_tokens(head.LinearHead(weight, None), hidden, tile, weights)
        values.sum().backward()
    assert cost.launches <= (775 if kind == "jsd" else 700)  # the latter has no kernel, and more sums
    assert cost.moved / BANDWIDTH <= cost.flops / RATE
    logits_of = {result for a, result, columns in cost.results if columns == VOCABULARY}
    assert logits_of == {torch.float32}
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("gib", "rows"), [(24, 256), (80, 1024), (141, 1920)])
def test_tiles_are_as_large_as_a_gpu_allows(gib, rows):
    assert head.tile_rows(VOCABULARY, gib * 2**30) == rows
    assert head.tile_rows(1000, gib * 2**30) == 4096
    assert head.tile_rows(VOCABULARY, None) == head.MIN_TILE_ROWS == 128
    assert head.tile_rows(2**15, None) == 256


def test_kept_gradients_are_a_share_of_the_gpu():
    """16,384 tokens of 152k logits on 80 GiB, so that DPO and KTO need no fourth product; on CPU as it was."""
    assert head.max_kept_logits(80 * 2**30, 2) >= 16_384 * VOCABULARY
    assert head.max_kept_logits(24 * 2**30, 2) < 16_384 * VOCABULARY
    assert head.max_kept_logits(None, 4) == head.MAX_KEPT_ELEMENTS


def test_a_broken_promise_on_a_gpu_is_told_when_somebody_waits(monkeypatch):
    """`torch._assert_async` would end the CUDA context, and every message after it would be of that."""
    flag = torch.tensor(True)
    monkeypatch.setattr(head, "_weight_violations", [flag])
    with pytest.raises(RuntimeError, match="does not match the `weights` of score_tokens"):
        head.check_score_weights()
    head.check_score_weights()  # once


@pytest.mark.parametrize("copied", [False, True])
def test_logits_without_gradient_are_exact_on_a_gpu(copied, monkeypatch):
    """Of teacher and reference: the product is not rounded to the weights' dtype. copied: a head that is sharded."""
    allow_meta(monkeypatch)
    module = nn.Linear(8, 300, bias=False, device="meta", dtype=torch.bfloat16)
    own = forward.LMHead(module, module.forward, head.LogitTransform())
    own = local.copy_head(own) if copied else own
    with Cost() as cost, torch.no_grad():
        assert own.logits(torch.empty(4, 8, device="meta", dtype=torch.bfloat16)).dtype == torch.float32
    assert cost.results == {(torch.bfloat16, torch.float32, 300)}
