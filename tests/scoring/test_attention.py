"""Attention in pieces, in blocks and through FlashAttention is that of the dense mask: values, gradients, reads."""

import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from architectures import drop_pieces
from meta_for_tests import HostReads
from models_for_tests import tiny_model
from torch.nn.attention import flex_attention
from training_for_tests import quick, token_rows, trainer_for

from hf_posttrain.errors import InputError
from hf_posttrain.scoring import (
    attention,
    attention_masks,
    attention_selection,
    forward,
    layout_selection,
    parity_check,
)
from hf_posttrain.scoring import flex as flex_blocks
from hf_posttrain.scoring import varlen as varlen_kernel
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

    def kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, window_size, enable_gqa=True):
        calls["varlen"] += 1
        assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert type(longest_q) is int
        assert enable_gqa
        return dense(q, k, v, (cu_q.tolist(), cu_k.tolist()), window_size, scale)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_supports_varlen", lambda *_: True)
    return calls


def scored(model, batch):
    """Values of the tokens, branch by branch, and the gradient of all weights."""
    model.zero_grad()
    values = forward.score(model, batch, LogProb(batch.targets)).value
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
        mask = attention._causal_mask(queries, keys, window, CPU)
        mask = torch.ones(queries, keys).tril().bool() if mask is None else mask[0, 0]
        found[begin : begin + queries, gathered[start : start + keys]] = mask
        begin, start = begin + queries, start + keys
    real = batch["document"][0] >= 0
    assert torch.equal(found[real], attention_masks.allowed_pairs(batch, window)[0][real])


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gemma3", "gpt2"])
def test_attention_in_pieces_is_that_of_the_dense_mask(name, layout, varlen, monkeypatch):
    """Through sdpa, a piece at a time, and in one call of a varlen kernel."""
    model = tiny_model(name)
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, layout)
    attention_selection.choose_attention(model, CPU)
    batch = collate(EXAMPLES, layout, row_multiple=attention_selection.row_multiple([model]))
    assert batch["input_ids"].shape[0] == 1
    assert_equal(scored(model, batch), expected)
    assert varlen["varlen"] == model.config.num_hidden_layers
    monkeypatch.setattr(attention, "_supports_varlen", lambda *_: False)
    assert_equal(scored(model, batch), expected)
    assert varlen["varlen"] == model.config.num_hidden_layers


def test_one_plain_document_needs_no_gathering(varlen):
    model = tiny_model()
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES[3:4], "shared")
    attention_selection.choose_attention(model, CPU)
    batch = collate(EXAMPLES[3:4], "shared", row_multiple=1)
    assert batch["segments"]["gathered"] is None
    assert_equal(scored(model, batch), expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_segments_of_the_same_size_are_attended_together(name, monkeypatch):
    model = tiny_model(name)
    forward.enable_scoring(model)
    examples = [*EXAMPLES, *EXAMPLES, *EXAMPLES[:2]]
    expected = with_mask(model, examples, "shared")
    attention_selection.choose_attention(model, CPU)
    batch = collate(examples, "shared", row_multiple=1)
    calls = []
    attend = attention.sdpa_attention_forward
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *args, **kw: calls.append(args) or attend(*args, **kw)
    )
    assert_equal(scored(model, batch), expected)
    assert len(calls) == model.config.num_hidden_layers * len({*batch["segments"]["sizes"]})
    assert len(calls) < model.config.num_hidden_layers * len(batch["segments"]["sizes"]) / 2


def test_a_row_that_was_not_cut_is_attended_with_its_mask():
    """Batches of two models, one of which takes no pieces, have several rows."""
    model = tiny_model()
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    attention_selection.choose_attention(model, CPU)
    assert attention_selection.row_multiple([model, tiny_model("gemma2")]) is None
    assert_equal(with_mask(model, EXAMPLES, "shared"), expected)


def test_dropout_of_attention_is_kept(varlen):
    """The varlen kernel has none: the pieces go through sdpa."""
    model = tiny_model(attention_dropout=0.5)
    forward.enable_scoring(model)
    attention_selection.choose_attention(model, CPU)
    batch = collate(EXAMPLES, "shared", row_multiple=1)
    first, second = (scored(model.train(), batch)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert not varlen["varlen"]


def test_a_model_that_does_not_pass_the_pieces_on_gets_a_mask(caplog):
    model = tiny_model()
    forward.enable_scoring(model)
    attention_selection.choose_attention(model, CPU)
    drop_pieces(model)
    with caplog.at_level(logging.INFO):
        assert layout_selection.verified_layout([model], "shared", explicit=True) == "shared"
    assert "Its attention gets a mask" in caplog.text
    assert attention_selection.row_multiple([model]) is None
    fresh = tiny_model()
    forward.enable_scoring(fresh)
    assert_equal(with_mask(model, EXAMPLES, "shared"), with_mask(fresh, EXAMPLES, "shared"))


def test_what_is_undone_is_what_the_model_had(flex):
    """Gemma 2 takes no sdpa, which caps no scores: eager attention on CPU, blocks on a GPU, and eager again."""
    model = tiny_model("gemma2")
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    attention_selection.choose_attention(model, GPU)
    own = type(model.model.layers[0].self_attn).forward
    for layer in model.model.layers:  # one that never gives the blocks to its attention

        def without(*args, _layer=layer.self_attn, **kwargs):
            blocks = isinstance(kwargs.get("attention_mask"), flex_attention.BlockMask)
            return own(_layer, *args, **kwargs | ({"attention_mask": None} if blocks else {}))

        layer.self_attn.forward = without
    assert layout_selection.verified_layout([model], "shared", explicit=True) == "shared"
    assert model.config._attn_implementation == "eager"
    assert_equal(with_mask(model, EXAMPLES, "shared"), expected)
    assert not attention_selection.restore_attention(model)


def test_a_kernel_that_is_wrong_in_half_precision_is_found(monkeypatch, varlen):
    """The check in float32 cannot run it."""
    monkeypatch.setattr(attention, "_supports_varlen", lambda _, value: value.dtype == torch.bfloat16)
    monkeypatch.setattr(parity_check, "has_varlen_kernel", lambda _: True)
    for wrong in (False, True):
        model = tiny_model("qwen3").to(torch.bfloat16)
        forward.enable_scoring(model)
        attention_selection.choose_attention(model, CPU)
        if wrong:
            monkeypatch.setattr(attention, "varlen_attn", lambda q, *_, **__: 30 * torch.ones_like(q))
        assert layout_selection.verified_layout([model], "shared", explicit=True) == "shared"
        assert model.config._attn_implementation == ("sdpa" if wrong else attention.BY_SEGMENT)
    assert varlen["varlen"]


@pytest.mark.parametrize(
    ("device", "capability", "has"),
    [("cpu", None, False), ("mps", None, False), ("xpu", None, False), ("cuda", (7, 5), False), ("cuda", (8, 0), True),
     ("cuda", (12, 0), True), ("meta", None, True)],
)  # fmt: skip
def test_the_varlen_kernel_is_that_of_ampere_and_later(device, capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    varlen_kernel._has_varlen_kernel.cache_clear()
    assert attention_selection.has_varlen_kernel(torch.device(device)) == has
    varlen_kernel._has_varlen_kernel.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "size", "of_values", "takes"),
    [(torch.bfloat16, 64, 64, True), (torch.float16, 256, 256, True), (torch.float32, 64, 64, False),
     (torch.bfloat16, 264, 264, False), (torch.bfloat16, 60, 60, False), (torch.bfloat16, 64, 32, False)],
)  # fmt: skip
def test_the_varlen_kernel_takes_half_precision_and_sizes_of_eight(dtype, size, of_values, takes):
    query, value = (torch.empty(3, 2, width, dtype=dtype, device="meta") for width in (size, of_values))
    assert attention._supports_varlen(query, value) == takes


@pytest.mark.parametrize("kind", ["pieces", "varlen", "blocks"])
def test_states_that_a_norm_left_in_float32_are_attended_in_the_dtype_of_the_values(kind, varlen, flex, monkeypatch):
    """Under autocast queries and keys may be float32, which no kernel mixes with bf16."""
    seen = []
    monkeypatch.setattr(attention, "_supports_varlen", lambda *_: kind == "varlen")
    monkeypatch.setattr(attention, "bf16_instructions", lambda: "amx_bf16")
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, *_, **__: seen.extend((q, k, v)) or q)

    def sdpa(_, q, k, v, *__, **___):
        assert not torch.is_autocast_enabled("cpu")
        seen.extend((q, k, v))
        return q.transpose(1, 2), None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    monkeypatch.setattr(flex_blocks, "_compiled", lambda: lambda q, k, v, *_, **__: seen.extend((q, k, v)) or q)
    batch = collate(EXAMPLES, "shared", row_multiple=128)
    shape = 1, 2, batch["input_ids"].shape[1], 16
    states = [torch.ones(shape, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16)]
    with torch.autocast("cpu", torch.bfloat16):
        if kind == "blocks":
            rule = lambda window, i, j: attention_masks.attends(batch, window, 0, i, j)  # noqa: E731
            mask = flex_blocks.block_mask(batch, None, rule)
            found, _ = flex_blocks.attend_by_block(None, *states, mask)
        else:
            found, _ = attention.attend_by_segment(None, *states, None, batch["segments"])
    assert {state.dtype for state in (*seen, found)} == {torch.bfloat16}


@pytest.mark.parametrize(("has", "dtype"), [("amx_bf16", torch.bfloat16), ("avx512_bf16", torch.float32)])
def test_bf16_is_attended_in_float32_on_a_cpu_without_amx(has, dtype, monkeypatch):
    seen, real = [], attention.sdpa_attention_forward
    monkeypatch.setattr(attention, "bf16_instructions", lambda: has)
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **given: seen.append(args[1:4]) or real(
        *args, **given))  # fmt: skip
    states = [torch.randn(1, 2, 7, 16, dtype=torch.bfloat16) for _ in range(3)]
    found, _ = attention.attend_by_segment(None, *states, None, attention.find_segments([np.zeros(7, int)], 7))
    assert {state.dtype for pieces in seen for state in pieces} == {dtype}
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("more", ["s_aux", "position_bias"])
def test_what_our_attention_does_not_compute_is_not_left_out(more, flex):
    """gpt-oss has sinks, T5 a bias."""
    states, batch = [torch.ones(1, 2, 7, 16)] * 3, {more: torch.ones(2)}
    with pytest.raises(RuntimeError, match=f"passes {more} to attention"):
        flex_blocks.attend_by_block(torch.nn.Identity(), *states, None, **batch)
    pieces = attention.find_segments([np.zeros(7, int)], 7)
    with pytest.raises(RuntimeError, match=f"passes {more} to attention"):
        attention.attend_by_segment(torch.nn.Identity(), *states, None, pieces, **batch)


def test_dropout_is_not_left_out_by_blocks(flex):
    model = tiny_model("qwen3", attention_dropout=0.1)
    model.config._attn_implementation = "flex_attention"
    attention_selection.choose_attention(model, GPU)
    forward.enable_scoring(model)
    with pytest.raises(InputError, match=r"flex_attention does not support attention dropout, which is 0.1"):
        scored(model.train(), collate(EXAMPLES, "shared", row_multiple=256))
    scored(model.eval(), collate(EXAMPLES, "shared", row_multiple=256))


def test_rows_of_no_whole_blocks_get_a_mask(flex):
    """As the packed layout has them where another model takes no blocks."""
    model = tiny_model("qwen3")
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "packed")
    model.config._attn_implementation = "flex_attention"
    attention_selection.choose_attention(model, GPU)
    assert_equal(with_mask(model, EXAMPLES, "packed"), expected)


def test_a_micro_batch_without_a_token_is_refused():
    nothing = [Example([3], [Branch([4, 5], [0, 0])])]
    for layout in ("shared", "packed", "padded"):
        with pytest.raises(InputError, match="no token"):
            collate(nothing, layout)


def test_a_window_that_a_layer_does_not_tell_its_attention_is_found():
    """It is in transformers' mask alone there: the check of the first batch sees the difference, and a mask is used."""
    model = tiny_model("mistral")
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    attention_selection.choose_attention(model, CPU)
    for layer in model.model.layers:
        layer.self_attn.config = type("Config", (), {**vars(model.config), "sliding_window": None})()
        layer.self_attn.config._attn_implementation = attention.BY_SEGMENT
    assert parity_check.parity_error(model, "shared") > 1e-2
    assert layout_selection.verified_layout([model], "shared", explicit=True) == "shared"
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
     ("qwen3", "flex_attention", {}, attention_masks.BY_BLOCK, attention_masks.BY_BLOCK),
     ("qwen3", "flash_attention_2", {}, "flash_attention_2", "flash_attention_2"),
     ("gemma2", "eager", {}, "eager", attention_masks.BY_BLOCK),
     ("gemma2", "eager", {"attention_dropout": 0.1}, "eager", "eager"),
     ("gemma2", "eager", {"attn_logit_softcapping": None}, "eager", "eager")],
)  # fmt: skip
def test_the_quickest_attention_is_chosen_by_device_and_model(name, asked, changes, on_cpu, on_gpu):
    model = tiny_model(name, **changes)
    model.config._attn_implementation = asked
    assert [attention_selection.fastest_attention(model, device)[0] for device in (CPU, GPU)] == [on_cpu, on_gpu]


@pytest.mark.parametrize("asked", [None, "1"])
def test_cudnn_is_off_on_a_gpu_unless_asked_for(asked, keep_cudnn, monkeypatch, caplog):
    """The choice is the model's own, and one line of the log."""
    monkeypatch.delenv("TORCH_CUDNN_SDPA_ENABLED", raising=False)
    if asked:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_ENABLED", asked)
    torch.backends.cuda.enable_cudnn_sdp(True)
    model, other = tiny_model(), tiny_model()
    monkeypatch.setattr(attention_selection, "has_varlen_kernel", lambda _: True)
    with caplog.at_level(logging.INFO):
        attention_selection.choose_attention(model, GPU)
    assert torch.backends.cuda.cudnn_sdp_enabled() == bool(asked)
    [line] = [line for line in caplog.messages if "attention" in line]
    assert line.endswith("Qwen3ForCausalLM: sdpa_by_segment (each segment of a row separately, in one varlen call)")
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_a_trainer_switches_cudnn_off_on_a_gpu(layout, keep_cudnn, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", given.append)
    choose, avoid = attention_selection.choose_attention, attention_selection.disable_cudnn_attention
    monkeypatch.setattr("hf_posttrain.models.policy.choose_attention", lambda model, _: choose(model, GPU))
    monkeypatch.setattr("hf_posttrain.models.policy.disable_cudnn_attention", lambda _: avoid(GPU))
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
    rule = lambda window, i, j: attention_masks.attends(batch, window, 0, i, j)  # noqa: E731
    mask, length = flex_blocks.block_mask(batch, window, rule), batch["input_ids"].shape[1]
    allowed = attention_masks.allowed_pairs(batch, window)[0]
    place = torch.arange(length)
    assert torch.equal(mask.mask_mod(0, 0, place[:, None], place), allowed)
    blocks = allowed.view(length // 128, 128, length // 128, 128).sum((1, 3)) > 0
    kept = mask.to_dense()[0, 0].bool()
    assert not (blocks & ~kept).any()
    assert (~kept).sum() > 0.6 * (~blocks).sum()


def test_blocks_behind_the_window_are_left_out():
    batch = collate(pairs((2, 1000)), "shared", row_multiple=flex_blocks.BLOCK)
    rule = lambda window, i, j: attention_masks.attends(batch, window, 0, i, j)  # noqa: E731
    kept = [flex_blocks.block_mask(batch, window, rule).to_dense().sum() for window in (None, 40, 200)]
    assert kept == [8 * 9 / 2, 8 + 7, 8 + 7 + 6]


@pytest.mark.parametrize("name", quick("qwen3", "mistral", among=["qwen3", "mistral", "gemma2"]))
def test_flex_attention_of_one_row_is_that_of_the_dense_mask(name, flex):
    changes = {"attn_logit_softcapping": 0.7} if name == "gemma2" else {}
    model = tiny_model(name, **changes)
    forward.enable_scoring(model)
    expected = with_mask(model, EXAMPLES, "shared")
    model.config._attn_implementation = "eager" if name == "gemma2" else "flex_attention"
    attention_selection.choose_attention(model, GPU)
    assert model.config._attn_implementation == attention_masks.BY_BLOCK
    batch = collate(EXAMPLES, "shared", row_multiple=attention_selection.row_multiple([model]))
    assert batch["input_ids"].shape[1] % flex_blocks.BLOCK == 0
    assert_equal(scored(model, batch), expected)
    assert flex["graphs"]
    assert parity_check.parity_error(model, "shared") < 1e-4
    assert parity_check.parity_error(model, "padded") < 1e-4


def varied(count):
    """Micro-batches of other shapes each."""
    draw = random.Random(1)
    some = lambda low, high: draw.randint(low, high)  # noqa: E731
    for _ in range(count):
        rows = [(some(5, 60), some(5, 150), some(5, 150)) for _ in range(draw.choice([1, 2, 4]))]
        yield collate(pairs(*rows), "shared", row_multiple=2 * flex_blocks.BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_flex_attention_is_compiled_for_all_shapes_at_once(name, flex):
    """With and without gradient and in recomputation: dynamo's limit is 8, beyond which it is not compiled at all."""
    model = tiny_model(name)
    model.config._attn_implementation = "flex_attention"
    attention_selection.choose_attention(model, GPU)
    forward.enable_scoring(model)
    model.gradient_checkpointing_enable()
    lengths = set()
    for batch in varied(8):
        lengths.add(batch["input_ids"].shape[1])
        with torch.no_grad():
            forward.score(model.eval(), batch, LogProb(batch.targets))
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
    attention_selection.choose_attention(model, GPU)
    assert layout_selection.supported_layouts([model])[0] == ["packed", "padded"]
    batch = collate(EXAMPLES, "packed", row_multiple=attention_selection.row_multiple([model]))
    with HostReads() as reads:
        found = scored(model, batch)
    assert_equal(found, expected)
    assert flash == {"varlen": model.config.num_hidden_layers}
    assert reads.found == {"masking_utils.py": 1}
