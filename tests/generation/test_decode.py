"""Decoding: the completions of `transformers.generate`, for the cost of the rows that go on."""

import functools
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers as tf
from architectures import WINDOW, tiny
from meta_for_tests import HostReads
from models_for_tests import CONFIGS, tiny_model

from hf_posttrain.errors import InputError
from hf_posttrain.generation import batch_size, rollout, sampler_selection
from hf_posttrain.generation.rollout import TokenSampler
from hf_posttrain.scoring import cpu, forward
from hf_posttrain.scoring.attention_selection import choose_attention
from hf_posttrain.scoring.forward import cache_argument

PROMPTS = [[1, 2, 3], [4], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12], [1, 2, 3], [20, 30]]
ENDS = list(range(0, 300, 7))
"""So many that rows end at different steps."""


def alone(model, prompt, count, ends):
    """One prompt, no padding, no cache: obviously right."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_are_those_of_each_prompt_alone(name):
    model = tiny_model(name)
    assert not sampler_selection.decode_obstacle(model)
    free = [alone(model, prompt, 12, []) for prompt in PROMPTS]
    ends = [free[0][2], free[2][6]]
    found = rollout.generate(model, PROMPTS, 12, ends, 256, batch_size=3)
    assert found == [alone(model, prompt, 12, ends) for prompt in PROMPTS]
    assert len({len(ids) for ids in found}) > 1  # some end early


def test_models_with_another_state_are_left_to_transformers(monkeypatch):
    model = tiny_model()
    expected = rollout.generate(model, PROMPTS, 12, ENDS, 256)
    monkeypatch.setattr(sampler_selection, "decode_obstacle", lambda model: "asked")
    monkeypatch.setattr(rollout, "decode", None)
    del model.generation_backend
    assert rollout.generate(model, PROMPTS, 12, ENDS, 256) == expected


def test_plain_caches_are_known():
    from transformers import AutoModelForCausalLM, MambaConfig, Qwen3NextConfig

    small = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 30}
    for config in (MambaConfig(**small), Qwen3NextConfig(**small, num_attention_heads=2, num_key_value_heads=1)):
        with torch.device("meta"):
            assert sampler_selection.decode_obstacle(AutoModelForCausalLM.from_config(config))


def test_a_step_costs_the_rows_that_go_on_and_a_shared_prompt_is_read_once(monkeypatch):
    model, sizes = tiny_model(), []
    rollout.generate(model, [[1, 2, 3]], 10, ENDS, 256)  # the proof is behind it
    real = model.forward

    def watched(input_ids, **kwargs):
        sizes.append(tuple(input_ids.shape))
        return real(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    torch.manual_seed(3)
    found = rollout.generate(model, [[1, 2, 3]] * 4 + [[5, 6]] * 2, 10, ENDS, 256, temperature=1.0)
    lengths = [len(ids) for ids in found]
    assert sizes[0] == (2, 3)  # two prompts, once each
    going = [sum(length > step for length in lengths) for step in range(1, 10)]
    assert sizes[1:] == [(count, 1) for count in going if count]
    assert len(set(lengths)) > 2


def test_ids_beyond_the_shared_vocabulary_are_never_drawn():
    model = tiny_model()
    drawn = rollout.generate(model, [[1, 2]] * 200, 3, [], 256, temperature=5.0, vocabulary=40)
    assert {len(ids) for ids in drawn} == {3}
    assert max(max(ids) for ids in drawn) == 39


@pytest.mark.parametrize("draw", [cpu.sample_ids, cpu.exponential_race])
def test_tokens_are_drawn_from_the_softmax_and_never_with_probability_0(draw, monkeypatch):
    monkeypatch.setattr(rollout, "sample_ids", draw)
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -torch.inf, 0.5, 1.0, -1.0, -torch.inf, 7.0])
    drawn = TokenSampler(0.7, 6)(logits.repeat(200_000, 1))
    expected = torch.softmax(logits[:6] / 0.7, dim=-1)
    found = torch.bincount(drawn, minlength=6) / len(drawn)
    assert (found - expected).abs().max() < 4 * 0.5 / len(drawn) ** 0.5
    assert found[1] == found[5] == 0


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (2, 4), (9, 1), (64, 1), (65, 1)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_with_packed_weights_are_those_of_linear(shape, bias, monkeypatch):
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(64, 48, bias=bias), torch.randn(*shape, 64)
    expected = layer(rows)
    calls, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: calls.append(1) or linear(*args))
    with torch.no_grad(), cpu.packed_weights(layer):
        found = layer(rows)
        again = layer(rows)
    is_packed = cpu.MIN_PACKED_ROWS <= rows[..., 0].numel() <= cpu.PACKED_ROWS[-1]
    assert bool(calls) != (is_packed and torch.backends.mkl.is_available())
    assert "forward" not in vars(layer)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    assert torch.equal(again, found)


def test_another_number_of_rows_packs_again_and_a_changed_weight_counts_in_the_next_context():
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 16)
    with torch.no_grad():
        for scale in (1.0, 3.0):
            layer.weight.mul_(scale)
            with cpu.packed_weights(layer):
                for count in (40, 17, 8, 5, 30):
                    rows = torch.randn(count, 32)
                    torch.testing.assert_close(layer(rows), rows @ layer.weight.T + layer.bias)


def test_weights_are_not_packed_where_memory_is_short(monkeypatch):
    layer = torch.nn.Linear(8, 8)
    copy = 4 * 8 * (8 + cpu.PACKED_PADDING)  # MKL's is larger than the weight
    for factor, ranks, packed in ((1, 1, False), (2, 1, True), (2, 2, False), (4, 2, True)):
        available = cpu.psutil.virtual_memory()._replace(available=factor * copy)
        monkeypatch.setattr(cpu.psutil, "virtual_memory", lambda available=available: available)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with torch.no_grad(), cpu.packed_weights(layer):
            assert ("forward" in vars(layer)) == (packed and torch.backends.mkl.is_available())


def test_no_weight_is_packed_while_gradients_are_computed():
    layer = torch.nn.Linear(8, 8)
    with cpu.packed_weights(layer):
        layer(torch.ones(4, 8)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize("way", [sampler_selection.DECODE, sampler_selection.HF_BATCHED, sampler_selection.HF_SINGLE])
def test_logits_that_are_not_finite_are_an_error_and_no_token(broken, way, temperature):
    model = tiny_model().eval()
    torch.nn.init.constant_(model.lm_head.weight, broken)
    with torch.no_grad(), pytest.raises(RuntimeError, match="NaN or infinite"):
        rollout.generate_batch(model, way, [[5, 6], [7]], 3, [0], 0, TokenSampler(temperature, 250))


# ---- the proof that answers are the model's own


def way(model, longest=40):
    return rollout.generate(model, [[5] * (longest - 6)], 6, [299], 0) and model.generation_backend[0]


@pytest.mark.parametrize(("name", "expected"), {
    "llama": sampler_selection.DECODE, "mamba": sampler_selection.HF_BATCHED,
    "rwkv": sampler_selection.HF_SINGLE,  # its state takes padding as text
    "bart": sampler_selection.HF_SINGLE,  # its positions take padding as text
}.items())  # fmt: skip
def test_answers_are_those_of_whole_forwards(name, expected, caplog):
    model = tiny(name)
    assert way(model) == expected
    assert rollout.generate(model, PROMPTS, 6, [299], 0) == [alone(model, prompt, 6, [299]) for prompt in PROMPTS]
    assert ("answered one by one" in caplog.text) == (expected == sampler_selection.HF_SINGLE)


def test_the_proof_is_made_again_for_rows_longer_than_a_window(monkeypatch):
    model, proven = tiny("mistral"), []
    real = sampler_selection.select_backend
    monkeypatch.setattr(sampler_selection, "select_backend", lambda *args: proven.append(args[1]) or real(*args))
    for longest in (10, 11, WINDOW + 1, 50):
        way(model, longest)
    assert proven == [10, WINDOW + 1]


def test_a_model_whose_cache_is_wrong_is_refused(monkeypatch):
    model = tiny("llama")
    real = type(model).forward

    @functools.wraps(real)
    def forgets(self, *args, **kwargs):
        output = real(self, *args, **kwargs)
        if kwargs.get(cache_argument(model)) is not None:
            output.logits = -output.logits
        return output

    monkeypatch.setattr(type(model), "forward", forgets)
    with pytest.raises(InputError, match="MoshiForCausalLM generates other tokens"):
        way(tiny("moshi"))  # its cache keeps a window that its layers do not have
    with pytest.raises(InputError, match="LlamaForCausalLM generates other tokens with a cache"):
        way(model)


@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_logits_are_told_greedy_and_sampled(temperature, broken, monkeypatch):
    sampler = TokenSampler(temperature, 300)
    logits = torch.randn(3, 300)
    logits[1, 7] = broken
    ids = sampler(logits)
    assert ids[1] == 300
    assert (ids[[0, 2]] < 300).all()
    monkeypatch.setattr(rollout, "sample_ids", cpu.exponential_race)  # as on a GPU
    assert sampler(logits)[1] == 300


def test_a_model_that_gives_nan_raises():
    model = tiny_model()
    model.lm_head.weight.data[:] = float("nan")
    for temperature in (None, 1.0):
        with pytest.raises(RuntimeError, match="NaN or infinite"):
            rollout.generate(model, [[5, 6]], 4, [299], 0, temperature)


# ---- as on a GPU


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_looking_seldom_for_rows_that_have_ended_changes_no_answer(name, monkeypatch):
    model = tiny_model(name)
    expected = rollout.generate(model, PROMPTS, 12, ENDS, 256)
    monkeypatch.setitem(rollout.END_CHECK_INTERVAL, "cpu", 5)
    assert rollout.generate(model, PROMPTS, 12, ENDS, 256) == expected
    assert len({len(answer) for answer in expected}) > 1


def test_sampling_reads_nothing_at_each_token(monkeypatch):
    """Neither here nor in transformers, which would ask whether a mask of padding has any."""
    monkeypatch.setitem(rollout.END_CHECK_INTERVAL, "cpu", 8)
    monkeypatch.setattr(rollout, "sample_ids", cpu.exponential_race)
    model = tiny_model()
    choose_attention(model, torch.device("cpu"))
    with torch.no_grad(), HostReads() as reads:
        found = rollout.decode(model, PROMPTS, 24, [], TokenSampler(1.0, 300))
    assert [len(answer) for answer in found] == [24] * len(PROMPTS)
    assert sum(reads.found.values()) <= 24 // 8 + 2  # and what reading the prompts asks once


@pytest.mark.parametrize(("count", "most", "size"), [(10, 100, 10), (10, 4, 4), (10, 9, 5), (10, 0, 1), (0, 3, 1)])
def test_rows_go_in_even_parts(count, most, size):
    assert batch_size.even_batch_size(count, most) == size


def test_a_layers_own_forward_is_left_to_it():
    layer, calls = torch.nn.Linear(4, 4), []
    layer.forward = lambda rows: calls.append(rows) or rows
    with cpu.packed_weights(layer):
        layer(torch.ones(2, 4))
    layer(torch.ones(2, 4))
    assert len(calls) == 2


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma2"])
def test_what_a_token_keeps_is_measured(name, bf16):
    model = tiny_model(name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        cache = rollout.growing_cache(model)
        model(torch.tensor([[1, 2, 3, 4]]), **{cache_argument(model): cache}, use_cache=True)
        found = batch_size.cache_bytes_per_token(model, rollout.growing_cache(model))
    assert found == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 4
    growing = [layer for layer in cache.layers if type(layer) is rollout.GrowingLayer]
    assert all(layer.keys.dtype == layer.values.dtype for layer in growing)  # though rotary makes keys float32


def test_as_many_rows_go_at_once_as_half_of_what_is_free_keeps(monkeypatch):
    monkeypatch.setattr(batch_size, "cache_bytes_per_token", lambda model, cache: 10)
    free = {"mem_get_info": (7000, 0), "memory_reserved": 3000, "memory_allocated": 2000}  # 8,000 bytes in all
    for name, found in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    config = tf.Qwen3Config(vocab_size=0)
    model = SimpleNamespace(device=torch.device("cuda"), config=config)
    assert batch_size.max_generation_batch(model, None, 5, 200) == 2  # 2,000 bytes a row
    assert batch_size.max_generation_batch(model, None, 1, 200) == 1


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", "qwen3_moe"])
def test_what_a_token_keeps_is_measured_of_every_kind_of_decoder(name):
    model = tiny(name)
    with torch.no_grad():
        assert batch_size.cache_bytes_per_token(model, rollout.growing_cache(model)) > 0


# ---- bf16: weights rounded once


@pytest.mark.parametrize("name", ["qwen3", "llama"], ids=["tied", "untied"])
def test_weights_rounded_once_are_those_that_autocast_rounds(name):
    """So rollouts are of the distribution that is scored, to the last bit; afterwards the weights are as they were."""
    model, ids = tiny_model(name).eval(), torch.tensor([PROMPTS[2]])
    before = {key: (id(weight), weight.clone()) for key, weight in model.named_parameters()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        with forward.precast_weights(model):
            assert model.lm_head.weight.dtype == model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
            assert model.get_input_embeddings().weight.dtype == torch.float32
            assert torch.equal(model(ids).logits, expected)
    with forward.precast_weights(model):  # without autocast nothing is rounded
        assert model.lm_head.weight.dtype == torch.float32
    after = {key: (id(weight), weight) for key, weight in model.named_parameters()}
    for key, (number, weight) in before.items():
        assert after[key][0] == number
        assert torch.equal(after[key][1], weight)


def test_weights_that_an_adapter_reads_are_not_rounded():
    """DoRA takes the norm of a weight: of the rounded one it is another."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False)
    model, ids = peft.get_peft_model(tiny_model(), config).eval(), torch.tensor([PROMPTS[2]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        with forward.precast_weights(model):
            assert torch.equal(model(ids).logits, expected)
            assert forward.causal_lm(model).lm_head.weight.dtype == torch.bfloat16
