"""Attention in pieces, in blocks and through FlashAttention is that of the dense mask: values, gradients, reads."""

import logging
import random
from collections import Counter

import pytest
import torch
import transformers
from meta_for_tests import HostReads
from models_for_tests import tiny_model
from torch.nn.attention import flex_attention
from training_for_tests import quick, token_rows, trainer_for

from hf_posttrain.scoring import attention, choose_layout, forward
from hf_posttrain.scoring import flex as flex_blocks
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layouts import Branch, Example, collate

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DRAW = random.Random(0)


def ids(count):
    return [DRAW.randrange(250) for _ in range(count)]


def pairs(*sizes):
    """Examples of (prompt, answers ...) in tokens."""
    return [Example(ids(prompt), [Branch(ids(size)) for size in answers]) for prompt, *answers in sizes]


EXAMPLES = pairs((9, 12, 7), (1, 30, 3), (20, 5, 6, 11), (8, 4), (2, 1, 1))


def dense(queries, keys, values, bounds, window, scale):
    """A varlen kernel that is obviously right: a softmax over a masked product for each piece."""
    found = []
    for a, b, c, d in zip(bounds[0][:-1], bounds[0][1:], bounds[1][:-1], bounds[1][1:], strict=True):
        q, k, v = (states.transpose(0, 1) for states in (queries[a:b], keys[c:d], values[c:d]))
        repeats = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(repeats, 0).mT * scale
        gap = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        seen = (gap >= 0) & ((gap <= window[0]) if window[0] >= 0 else True)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append((weights @ v.repeat_interleave(repeats, 0)).transpose(0, 1))
    return torch.cat(found)


@pytest.fixture
def varlen(monkeypatch):
    """The path of a GPU in half precision, with a kernel written in torch; the number of its calls."""
    calls = Counter()

    def kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        calls["varlen"] += 1
        assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert type(longest_q) is int
        assert enable_gqa
        return dense(q, k, v, (cu_q.tolist(), cu_k.tolist()), window_size, scale)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda *_: True)
    return calls


def scored(model, batch):
    """Values of the tokens, branch by branch, and the gradient of all weights."""
    model.zero_grad()
    values = forward.score(model, batch, LogProb(forward.targets(batch)))["value"]
    values.sum().backward()
    order = batch["owner"].argsort(stable=True)
    return values.detach()[order], torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_equal(found, expected):
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


def with_mask(model, examples, layout):
    """What the dense mask gives."""
    return scored(model, collate(examples, layout))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("multiple", [1, 16])
def test_the_pieces_of_a_row_are_the_rule(window, multiple):
    batch = collate(EXAMPLES, "shared", row_multiple=multiple)
    pieces, length = batch["segments"], batch["input_ids"].shape[1]
    assert batch["input_ids"].shape[0] == 1
    assert length % multiple == 0
    gathered = torch.arange(length) if pieces["gathered"] is None else pieces["gathered"]
    found, begin, start = torch.zeros(length, length, dtype=torch.bool), 0, 0
    for queries, keys in pieces["sizes"]:
        mask = attention._behind(queries, keys, window, CPU)
        mask = torch.ones(queries, keys).tril().bool() if mask is None else mask[0, 0]
        found[begin : begin + queries, gathered[start : start + keys]] = mask
        begin, start = begin + queries, start + keys
    real = batch["document"][0] >= 0
    assert torch.equal(found[real], attention.allowed(batch, window)[0][real])


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gemma3", "gpt2"])
def test_attention_in_pieces_is_that_of_the_dense_mask(name, layout, varlen, monkeypatch):
    """Through sdpa, a piece at a time, and in one call of a varlen kernel."""
    model = tiny_model(name)
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, layout)
    attention.choose_attention(model, CPU)
    batch = collate(EXAMPLES, layout, row_multiple=attention.row_multiple([model]))
    assert batch["input_ids"].shape[0] == 1
    assert_equal(scored(model, batch), expected)
    assert varlen["varlen"] == model.config.num_hidden_layers
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda *_: False)
    assert_equal(scored(model, batch), expected)
    assert varlen["varlen"] == model.config.num_hidden_layers


def test_one_plain_document_needs_no_gathering(varlen):
    model = tiny_model()
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES[3:4], "shared")
    attention.choose_attention(model, CPU)
    batch = collate(EXAMPLES[3:4], "shared", row_multiple=1)
    assert batch["segments"]["gathered"] is None
    assert_equal(scored(model, batch), expected)


def test_a_row_that_was_not_cut_is_attended_with_its_mask():
    """Batches of two models, one of which takes no pieces, have several rows."""
    model = tiny_model()
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    attention.choose_attention(model, CPU)
    assert attention.row_multiple([model, tiny_model("gemma2")]) is None
    assert_equal(with_mask(model, EXAMPLES, "shared"), expected)


def test_dropout_of_attention_is_kept(varlen):
    """The varlen kernel has none: the pieces go through sdpa."""
    model = tiny_model(attention_dropout=0.5)
    forward.enable_scoring(model)
    attention.choose_attention(model, CPU)
    batch = collate(EXAMPLES, "shared", row_multiple=1)
    first, second = (scored(model.train(), batch)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert not varlen["varlen"]


def test_a_model_that_does_not_pass_the_pieces_on_gets_a_mask(caplog):
    model = tiny_model()
    forward.enable_scoring(model)
    attention.choose_attention(model, CPU)
    own = type(model.model.layers[0].self_attn).forward
    for layer in model.model.layers:
        layer.self_attn.forward = lambda *args, _layer=layer.self_attn, segments=None, **kwargs: own(
            _layer, *args, **kwargs
        )
    with caplog.at_level(logging.INFO):
        assert choose_layout.trusted_layout([model], "shared", explicit=True) == "shared"
    assert "attends with a mask" in caplog.text
    assert attention.row_multiple([model]) is None
    fresh = tiny_model()
    forward.enable_scoring(fresh)
    assert_equal(with_mask(model, EXAMPLES, "shared"), with_mask(fresh, EXAMPLES, "shared"))


def test_a_window_that_a_layer_does_not_tell_its_attention_is_found():
    """It is in transformers' mask alone there: the check of the first batch sees the difference, and a mask is used."""
    model = tiny_model("mistral")
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    attention.choose_attention(model, CPU)
    for layer in model.model.layers:
        layer.self_attn.config = type("Config", (), {**vars(model.config), "sliding_window": None})()
        layer.self_attn.config._attn_implementation = attention.BY_SEGMENT
    assert choose_layout.check(model, "shared") > 1e-2
    assert choose_layout.trusted_layout([model], "shared", explicit=True) == "shared"
    for layer in model.model.layers:
        layer.self_attn.config._attn_implementation = "sdpa"
    assert_equal(with_mask(model, EXAMPLES, "shared"), expected)


# ---- what is chosen


@pytest.fixture
def keep_cudnn():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("name", "asked", "changes", "on_cpu", "on_gpu"),
    [("qwen3", "sdpa", {}, attention.BY_SEGMENT, attention.BY_SEGMENT),
     ("qwen3", "eager", {}, "eager", "eager"),
     ("qwen3", "flex_attention", {}, attention.BY_BLOCK, attention.BY_BLOCK),
     ("qwen3", "flash_attention_2", {}, "flash_attention_2", "flash_attention_2"),
     ("gemma2", "eager", {}, "eager", attention.BY_BLOCK),
     ("gemma2", "eager", {"attn_logit_softcapping": None}, "eager", "eager")],
)  # fmt: skip
def test_the_quickest_attention_is_chosen_by_device_and_model(name, asked, changes, on_cpu, on_gpu):
    model = tiny_model(name, **changes)
    model.config._attn_implementation = asked
    assert [attention.quickest(model, device)[0] for device in (CPU, GPU)] == [on_cpu, on_gpu]


@pytest.mark.parametrize("asked", [None, "1"])
def test_cudnn_is_off_on_a_gpu_unless_asked_for(asked, keep_cudnn, monkeypatch, caplog):
    """The choice is the model's own, and one line of the log."""
    monkeypatch.delenv("TORCH_CUDNN_SDPA_ENABLED", raising=False)
    if asked:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_ENABLED", asked)
    torch.backends.cuda.enable_cudnn_sdp(True)
    model, other = tiny_model(), tiny_model()
    with caplog.at_level(logging.INFO):
        attention.choose_attention(model, GPU)
    assert torch.backends.cuda.cudnn_sdp_enabled() == bool(asked)
    [line] = [line for line in caplog.messages if "attention" in line]
    assert line.startswith("attention of Qwen3ForCausalLM: sdpa_by_segment (each piece of a row alone, in one varlen")
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_a_trainer_switches_cudnn_off_on_a_gpu(layout, keep_cudnn, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", given.append)
    choose, avoid = attention.choose_attention, attention.avoid_cudnn
    monkeypatch.setattr("hf_posttrain.models.prepare.choose_attention", lambda model, _: choose(model, GPU))
    monkeypatch.setattr("hf_posttrain.models.prepare.avoid_cudnn", lambda _: avoid(GPU))
    trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, layout=layout)
    assert given == [False]


# ---- flex_attention


@pytest.fixture
def flex(monkeypatch):
    """flex_attention on CPU, backward too: dynamo's graphs are run as they are; how many there are."""
    graphs = Counter()

    def backend(graph, _inputs):
        graphs["graphs"] += 1
        return graph.forward

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, backend=backend)
    monkeypatch.setattr(flex_blocks, "_compiled", lambda: compiled)
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_that_are_left_out_have_no_pair_that_is_seen(window):
    examples = pairs((90, 60, 70), (1, 200, 30), (3, 20, 30, 300), (150, 10), (10, 200, 190))
    batch = collate(examples, "shared", row_multiple=flex_blocks.BLOCK)
    rule = lambda window, i, j: attention._sees(batch, window, 0, i, j)  # noqa: E731
    mask, length = flex_blocks.block_mask(batch, window, rule), batch["input_ids"].shape[1]
    allowed = attention.allowed(batch, window)[0]
    place = torch.arange(length)
    assert torch.equal(mask.mask_mod(0, 0, place[:, None], place), allowed)
    blocks = allowed.view(length // 128, 128, length // 128, 128).sum((1, 3)) > 0
    kept = mask.to_dense()[0, 0].bool()
    assert not (blocks & ~kept).any()
    assert (~kept).sum() > 0.6 * (~blocks).sum()


@pytest.mark.parametrize("name", quick("qwen3", "mistral", among=["qwen3", "mistral", "gemma2"]))
def test_flex_attention_of_one_row_is_that_of_the_dense_mask(name, flex):
    changes = {"attn_logit_softcapping": 0.7} if name == "gemma2" else {}
    model = tiny_model(name, **changes)
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    model.config._attn_implementation = "eager" if name == "gemma2" else "flex_attention"
    attention.choose_attention(model, GPU)
    assert model.config._attn_implementation == attention.BY_BLOCK
    batch = collate(EXAMPLES, "shared", row_multiple=attention.row_multiple([model]))
    assert batch["input_ids"].shape[1] % flex_blocks.BLOCK == 0
    assert_equal(scored(model, batch), expected)
    assert flex["graphs"]
    assert choose_layout.check(model, "shared") < 1e-4
    assert choose_layout.check(model, "padded") < 1e-4


def varied(count):
    """Micro-batches of other shapes each."""
    draw = random.Random(1)
    some = lambda low, high: draw.randint(low, high)  # noqa: E731
    for _ in range(count):
        rows = [(some(5, 60), some(5, 150), some(5, 150)) for _ in range(draw.choice([1, 2, 4]))]
        yield collate(pairs(*rows), "shared", row_multiple=2 * flex_blocks.BLOCK)


@pytest.mark.parametrize("name", quick("qwen3", among=["qwen3", "gemma3"]))
def test_flex_attention_is_compiled_for_all_shapes_at_once(name, flex):
    """With and without gradient and in recomputation: dynamo's limit is 8, beyond which it is not compiled at all."""
    model = tiny_model(name)
    model.config._attn_implementation = "flex_attention"
    attention.choose_attention(model, GPU)
    forward.enable_scoring(model)
    model.gradient_checkpointing_enable()
    lengths = set()
    for batch in varied(8):
        lengths.add(batch["input_ids"].shape[1])
        with torch.no_grad():
            forward.score(model.eval(), batch, LogProb(forward.targets(batch)))
        scored(model.train(), batch)
    assert len(lengths) >= 3
    assert 1 <= flex["graphs"] <= 4


# ---- FlashAttention


@pytest.fixture
def flash(monkeypatch):
    """FlashAttention's interface, written in torch; the number of its calls."""
    calls = Counter()
    utils = transformers.modeling_flash_attention_utils

    def whole(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), **kwargs):
        calls["whole"] += 1
        ends = [[n * q.shape[1] for n in range(len(q) + 1)]] * 2
        states = (x.flatten(0, 1) for x in (q, k, v))
        return dense(*states, ends, window_size, softmax_scale or q.shape[-1] ** -0.5).view(q.shape)

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, window_size=(-1, -1), **kwargs):
        calls["varlen"] += 1
        with torch.utils._python_dispatch._disable_current_modes():  # the kernel reads these on the device
            ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return dense(q, k, v, ends, window_size, softmax_scale or q.shape[-1] ** -0.5)

    given = (whole, varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: given)
    monkeypatch.setattr(utils, "_flash_fn", None, raising=False)
    yield calls
    for name in ("_flash_fn", "_flash_varlen_fn", "_loaded_implementation"):
        if hasattr(utils, name):
            setattr(utils, name, None)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_flashattention_gets_the_bounds_of_documents(name, flash):
    """So nothing is read on the host in a layer, where it would look for the longest document; transformers reads once
    before the layers."""
    model = tiny_model(name)
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "packed")
    model.config._attn_implementation = "flash_attention_2"
    attention.choose_attention(model, GPU)
    assert choose_layout.able([model])[0] == ["packed", "padded"]
    batch = collate(EXAMPLES, "packed", row_multiple=attention.row_multiple([model]))
    with HostReads() as reads:
        found = scored(model, batch)
    assert_equal(found, expected)
    assert flash == {"varlen": model.config.num_hidden_layers}
    assert reads.found == {"masking_utils.py": 1}
