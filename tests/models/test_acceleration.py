"""Compiled layers and Liger's kernels give the numbers of the layers as they are written; few graphs for all shapes."""

import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate.utils import send_to_device
from meta_for_tests import allow_meta
from models_for_tests import tiny_model
from torch._dynamo.exc import FailOnRecompileLimitHit
from training_for_tests import (
    METHODS,
    Gradients,
    assert_same_step,
    fix_rollouts,
    second_model,
    token_rows,
    trainer_for,
)
from transformers import Qwen3Config

from hf_posttrain import SFTConfig
from hf_posttrain.errors import InputError
from hf_posttrain.models import acceleration
from hf_posttrain.scoring import attention_selection, forward
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.trainer import step

LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture
def graphs():
    """A backend that runs dynamo's graphs as they are, and how many it got."""
    found = Counter()

    def backend(graph, _inputs):
        found["graphs"] += 1
        return graph.forward

    yield SimpleNamespace(backend=backend, found=found)
    torch._dynamo.reset()


def asked(backend):
    return SimpleNamespace(
        torch_compile=True, torch_compile_backend=backend, torch_compile_mode=None, use_liger_kernel=False
    )


def batches(count, device="cpu"):
    """Micro-batches of `count` shapes."""
    draw = random.Random(0)
    ids = lambda low, high: [draw.randrange(250) for _ in range(draw.randint(low, high))]  # noqa: E731
    for _ in range(count):
        rows = [Example(ids(2, 20), [Branch(ids(3, 30)), Branch(ids(3, 30))]) for _ in range(draw.choice([1, 2, 6]))]
        batch = collate(rows, "shared", row_multiple=1)
        yield send_to_device(batch, device)


def model_of(lora, checkpointed):
    model = tiny_model()
    model = peft.get_peft_model(model, LORA) if lora else model
    forward.enable_scoring(model)
    attention_selection.choose_attention(forward.causal_lm(model), torch.device("cpu"))
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model.train()


def passed(model, batch):
    model.zero_grad()
    value = forward.score(model, batch, LogProb(batch.targets)).value
    value.sum().backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_compiled_layers_give_the_same_numbers(lora, checkpointed, graphs):
    compiled, plain = model_of(lora, checkpointed), model_of(lora, checkpointed)
    acceleration.apply_liger_and_compile(compiled, asked(graphs.backend))
    for batch in batches(4):
        for found, expected in zip(passed(compiled, batch), passed(plain, batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert bool(graphs.found["graphs"]) != checkpointed  # on CPU attention is not compiled: see the next test


@pytest.mark.parametrize(
    ("bf16", "kernel", "options", "said"),
    [(True, False, {}, True), (False, True, {}, True), (True, True, {}, False),
     (True, False, {"activation_checkpointing": False}, False), (True, False, {"torch_compile": False}, False)],
)  # fmt: skip
def test_layers_that_checkpointing_keeps_from_being_compiled_are_told(bf16, kernel, options, said, monkeypatch, caplog):
    monkeypatch.setattr(acceleration, "has_varlen_kernel", lambda _: kernel)
    given = {"torch_compile": True, "activation_checkpointing": True, "bf16": bf16, "fp16": False, "device": None}
    model = tiny_model()
    attention_selection.choose_attention(model, torch.device("cpu"))
    acceleration.warn_if_not_compiled(model, SimpleNamespace(**given | options))
    assert ("torch_compile has no effect" in caplog.text) == said


@pytest.mark.slow
@pytest.mark.parametrize("raised", [True, False])
def test_kinds_of_layers_two_models_and_evaluation_are_all_compiled(raised, graphs, monkeypatch):
    """Dynamo's own limit is 8 for a layer's code; Gemma 3 has layers with and without a window."""
    monkeypatch.setattr(acceleration, "RECOMPILE_LIMIT", acceleration.RECOMPILE_LIMIT if raised else 8)
    models = [tiny_model("gemma3", seed=seed, hidden_size=size) for seed, size in ((0, 32), (1, 64))]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        for model in models:
            forward.enable_scoring(model)
            attention_selection.choose_attention(model, torch.device("cpu"))
            acceleration.apply_liger_and_compile(model, asked(graphs.backend))
        with nullcontext() if raised else pytest.raises(FailOnRecompileLimitHit):
            for batch in batches(6):
                for model in models:
                    passed(model.train(), batch)
                    with torch.no_grad():
                        forward.score(model.eval(), batch, LogProb(batch.targets))


@SLOW
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_fifty_shapes_of_batches_take_at_most_four_graphs(lora, checkpointed, graphs, monkeypatch):
    """As on a GPU in bf16, on the meta device: one varlen call a layer, which does not break the graph."""
    allow_meta(monkeypatch)
    model = model_of(lora, checkpointed).to("meta", torch.bfloat16)
    acceleration.apply_liger_and_compile(model, asked(graphs.backend))
    shapes = set()
    for batch in batches(50, "meta"):
        shapes.add(batch["input_ids"].shape)
        passed(model, batch)
    assert len(shapes) > 30
    assert 1 <= graphs.found["graphs"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_compiled_layers_is_the_same(method, tmp_path, monkeypatch):
    """All that Trainer does around it, second models and rollouts too."""
    fix_rollouts(monkeypatch)
    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        keep = Gradients()
        given = options | {"second": second_model(method, seed=9), "callbacks": [keep]}
        trainer = trainer_for(method, tiny_model(), token_rows(method), tmp_path, **given)
        # of the policy and of a second model
        compiled = [
            layer._compiled_call_impl for model in trainer.scored for layer in acceleration.decoder_layers(model)
        ]
        assert len(compiled) >= 2
        assert all((call is not None) == bool(options) for call in compiled)
        trainer.train()
        found.append((trainer.state.log_history[0]["loss"], keep.steps[0]))
    assert_same_step(found[1], found[0], relative=1e-5)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiling_warns_of_nothing(graphs, recwarn):
    """Dynamo warns when it traces a function with a cache, such as the one that asks for the varlen kernel."""
    torch._dynamo.reset()
    model = model_of(False, False).to(torch.bfloat16)
    acceleration.apply_liger_and_compile(model, asked(graphs.backend))
    passed(model, next(batches(1)))
    assert graphs.found["graphs"]
    assert not [str(each.message) for each in recwarn if "cache" in str(each.message)]


@pytest.mark.slow
def test_rollouts_and_checks_run_the_layers_as_written(graphs):
    model = model_of(False, False)
    acceleration.apply_liger_and_compile(model, asked(graphs.backend))
    with step.run_eagerly(asked(None)):
        passed(model, next(batches(1)))
    assert not graphs.found["graphs"]
    passed(model, next(batches(1)))
    assert graphs.found["graphs"]


def test_a_model_without_layers_of_a_name_is_refused():
    model = tiny_model()
    model._no_split_modules = []
    with pytest.raises(InputError, match="names no layers to compile"):
        acceleration.apply_liger_and_compile(model, asked("eager"))


LIGER = """
import numpy, sys, torch, triton.language as tl
from triton.runtime import interpreter
import liger_kernel.ops.rms_norm as norms

# what the interpreter lacks: numbers that have a dtype, and libdevice
plain = interpreter._implicit_cvt
number = lambda x: tl.tensor(interpreter.TensorHandle(numpy.array([x], dtype=numpy.float32), tl.float32), tl.float32)
interpreter._implicit_cvt = lambda x: number(x) if isinstance(x, float) else plain(x)
norms.rsqrt = lambda x: tl.rsqrt(x)

sys.path.insert(0, sys.argv[1])
from training_for_tests import one_step, token_rows, second_model
from accelerate.utils import send_to_device
from models_for_tests import tiny_model
from training_for_tests import Gradients, assert_same_step, trainer_for
method, name, folder = sys.argv[2:]
steps = []
for liger in (False, True):  # Liger patches transformers for the process, so it comes last
    second, keep = second_model(method, architecture=name, seed=9), Gradients()
    given = {"second": second, "use_liger_kernel": liger, "bf16": False, "callbacks": [keep]}
    trainer = trainer_for(method, tiny_model(name), token_rows(method, 4), folder, **given)
    models = [trainer.model, *([trainer.second_models[0].model] if trainer.second_models else [])]
    for layer in [model.model.layers[0] for model in models]:  # before train(), where HF patches the policy itself
        forwards = [module.forward for module in (layer.mlp, layer.input_layernorm)]
        assert all("liger" in forward.__func__.__module__ for forward in forwards) == liger, forwards
    trainer.train()
    steps.append((trainer.state.log_history[0]["loss"], keep.steps[0]))
assert_same_step(steps[1], steps[0], relative=1e-4)
print("equal")
"""


@pytest.mark.slow  # triton's interpreter: 17 s
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral"])
def test_ligers_kernels_and_our_head_give_the_same_step(method, name, tmp_path):
    """Its real kernels, in Triton's interpreter: norms, rotary embedding and MLP, in student and teacher."""
    pytest.importorskip("liger_kernel")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: bash benchmarks/gpu.sh trains with Liger on it")
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", LIGER, support, method, name, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "equal" in run.stdout


def test_a_model_that_liger_does_not_know_is_refused(monkeypatch):
    pytest.importorskip("liger_kernel")
    model = tiny_model()
    model.config = Qwen3Config()
    model.config.model_type = "unheard_of"
    args = SimpleNamespace(use_liger_kernel=True, liger_kernel_config={}, torch_compile=False)
    with pytest.raises(InputError, match="use_liger_kernel is not supported for Qwen3ForCausalLM"):
        acceleration.apply_liger_and_compile(model, args)


def test_kernels_that_liger_does_not_know_are_refused():
    pytest.importorskip("liger_kernel")
    args = SimpleNamespace(use_liger_kernel=True, liger_kernel_config={"swigul": False}, torch_compile=False)
    with pytest.raises(InputError, match="Liger has no swigul for Qwen3ForCausalLM; did you mean 'swiglu'"):
        acceleration.apply_liger_and_compile(tiny_model(), args)
    with pytest.raises(InputError, match="must be a mapping of kernels"):
        SFTConfig(output_dir="o", use_cpu=True, use_liger_kernel=True, liger_kernel_config=["rope"])


def test_torch_compile_leaves_products_in_float32(tmp_path, monkeypatch):
    """HF would turn TF32 on for the process."""
    asked = []
    for module in ("transformers.training_args", "hf_posttrain.trainer.config"):
        monkeypatch.setattr(f"{module}.is_torch_tf32_available", lambda: True)
        monkeypatch.setattr(f"{module}.enable_tf32", asked.append)
    SFTConfig(output_dir=str(tmp_path), torch_compile=True, use_cpu=True, bf16=False)
    assert asked[-1:] == [False]


def test_a_second_model_that_cannot_be_sped_up_is_left_as_it_is(caplog):
    model = tiny_model()
    model._no_split_modules = []
    with caplog.at_level("INFO"):
        acceleration.apply_liger_and_compile(model, asked("eager"), second=True)
    said = "the second model is not accelerated: torch_compile is not supported for Qwen3ForCausalLM, which names no"
    assert said in caplog.text
