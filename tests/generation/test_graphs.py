"""Decoding on buffers of fixed length, as a CUDA graph reads and writes them. The graph itself needs a GPU: part f of
benchmarks/gpu.sh. Here a stand-in replays the forward."""

from types import SimpleNamespace

import pytest
import torch
from models_for_tests import CONFIGS, tiny_model
from test_decode import PROMPTS, alone
from torch.distributed.fsdp import FSDPModule

from hf_posttrain.generation import graphs, rollout, sampler_selection
from hf_posttrain.generation.graphs import FixedSteps
from hf_posttrain.scoring.forward import cache_argument


@pytest.fixture
def captured(monkeypatch):
    """Offer the way on CPU, and list what was captured: the shapes of the tokens and of the mask."""
    found = []
    monkeypatch.setattr(
        sampler_selection,
        "supports_cuda_graphs",
        lambda model: graphs.accepts_prepared_mask(model, rollout.growing_cache(model)),
    )
    monkeypatch.setattr(graphs, "COLUMN_CHUNK", 5)
    monkeypatch.setattr(graphs, "COLUMN_MULTIPLE", 2)

    class Graph:
        def __init__(self, of):
            self.of, self.mask, self.tokens = of, of.mask, of.tokens

        def replay(self):
            assert (self.mask is self.of.mask, self.tokens is self.of.tokens) == (True, True)
            self.of.logits.copy_(self.of._forward())

    def run(self):
        logits = self._forward()
        self.graph = Graph(self)
        found.append((len(self.tokens), self.mask.shape[-1]))
        return logits

    monkeypatch.setattr(FixedSteps, "_run_and_capture", run)
    return found


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_are_those_of_each_prompt_alone(name, batch_size, captured, monkeypatch):
    monkeypatch.setitem(rollout.END_CHECK_INTERVAL, "cpu", 2)
    model = tiny_model(name)
    free = [alone(model, prompt, 12, []) for prompt in PROMPTS]
    ends = [free[0][2], free[2][6]]
    found = rollout.generate(model, PROMPTS, 12, ends, 256, batch_size=batch_size)
    assert model.generation_backend[0] == (sampler_selection.GRAPHS if captured else sampler_selection.DECODE)
    assert found == [alone(model, prompt, 12, ends) for prompt in PROMPTS]


def test_a_graph_serves_until_a_buffer_is_full_or_half_of_the_rows_have_ended(captured, monkeypatch):
    monkeypatch.setitem(rollout.END_CHECK_INTERVAL, "cpu", 1)
    model = tiny_model()
    prompts = [[1, 2, 3], [4, 5, 6], [9, 8, 7], [3, 2, 1]]
    rollout.generate(model, prompts, 12, [], 256)
    captured.clear()
    assert [len(ids) for ids in rollout.generate(model, prompts, 12, [], 256)] == [12] * 4
    assert captured == [(4, 8), (4, 14)]
    free = [alone(model, prompt, 12, []) for prompt in prompts]
    captured.clear()
    ends = [free[0][1], free[1][2]]
    lengths = [len(alone(model, prompt, 12, ends)) for prompt in prompts]
    found = rollout.generate(model, prompts, 12, ends, 256)
    assert [len(ids) for ids in found] == lengths
    assert {rows for rows, _ in captured} <= {4, 2, 1}


def test_rollouts_of_one_prompt_and_drawn_tokens_are_those_without_graphs(captured, monkeypatch):
    model = tiny_model()
    drawn = []
    for way in (sampler_selection.GRAPHS, sampler_selection.DECODE):
        model.generation_backend = way, 10**6
        torch.manual_seed(5)
        drawn.append(rollout.generate(model, [[1, 2, 3]] * 3 + [[7]] * 3, 9, [], 256, temperature=1.0))
    assert drawn[0] == drawn[1]
    assert captured


def test_a_forward_that_waits_for_the_device_is_run_as_written(monkeypatch, caplog):
    """With the calls of torch.cuda replaced: the first one raises as an operation that waits does."""
    model = tiny_model()
    cache = rollout.growing_cache(model)
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, **{cache_argument(model): cache})
    forwards = FixedSteps(model, cache, torch.ones_like(ids), torch.tensor([[2]]), 5)

    mode, real = ["default"], model.forward

    def reading(**kwargs):
        output = real(**kwargs)
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return output

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda given: mode.__setitem__(0, given))
    monkeypatch.setattr(model, "forward", reading)
    forwards.on_gpu = True
    with caplog.at_level("INFO"):
        found = [forwards.forward(torch.tensor([token])) for token in (4, 5)]
    assert "decodes without CUDA graphs" in caplog.text
    assert not model.can_capture_graph
    for count, logits in enumerate(found, 1):
        whole = torch.tensor([[1, 2, 3, 4, 5][: 3 + count]])
        torch.testing.assert_close(logits, model(input_ids=whole).logits[:, -1])


def test_fsdp2_keeps_its_hooks_while_weights_are_whole(monkeypatch, tmp_path):
    model = tiny_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    weights = [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(model, "parameters", lambda: iter(weights))
    assert graphs.supports_cuda_graphs(model)
    with monkeypatch.context() as patch:
        patch.setenv(graphs.DISABLE_VARIABLE, "0")
        assert not graphs.supports_cuda_graphs(model)
    weights[0].ds_id = 3
    assert not graphs.supports_cuda_graphs(model)
    del weights[0].ds_id
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLayer", (FSDPModule, type(layer)), {})  # as fully_shard does
    assert not graphs.supports_cuda_graphs(model)
