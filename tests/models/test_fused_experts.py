"""LoRA on experts that are one parameter per layer (`target_parameters`): losses, gradients and merged weights are
those of base + delta, computed expert by expert."""

import itertools
import re
import warnings

import peft
import plain_for_tests as plain
import pytest
import torch
from architectures import tiny
from safetensors.torch import load_file
from tokenizers_for_tests import byte_tokenizer
from torch.func import functional_call
from training_for_tests import Gradients, logged, quick, token_rows, trainer_for
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_posttrain.commands import merge
from hf_posttrain.errors import InputError
from hf_posttrain.models.adapters import adapted_layers, add_adapter, describe_adapter
from hf_posttrain.models.config import ModelSection
from hf_posttrain.models.load import load_model

NAMES = ("mixtral", "qwen3_moe", "gpt_oss")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
R = 2
SCALING = 4.0


def config(**options):
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS} | options
    return peft.LoraConfig(r=R, lora_alpha=R * SCALING, task_type="CAUSAL_LM", **options)


def factors(state):
    """{name of a base weight: (A, B)} of an adapter's weights, with any prefix and adapter name."""
    found = {}
    for name, weight in state.items():
        if ".lora_A" in name:
            layer = name.partition(".lora_A")[0].removeprefix("base_model.model.")
            # of an expert's two wrappers, the one of down_proj is the outer one
            layer = layer.replace("experts.base_layer", "experts.gate_up_proj")
            layer = f"{layer}.down_proj" if layer.endswith("experts") else layer
            layer += "" if "experts" in layer else ".weight"
            found[layer] = weight, state[name.replace(".lora_A", ".lora_B")]
    return found


def adapted(name, base, lora):
    """The weights of base + delta in the dtype of the factors: W_e + scaling * B_e @ A_e of each expert e.

    A is [experts * R, in], expert by expert; B is [out, R * experts], rank by rank. gpt-oss stores W_e as [in, out].
    """
    weights = {}
    for layer, (a, b) in lora.items():
        weight = base[layer].to(a.dtype)
        if weight.dim() == 2:
            weights[layer] = weight + SCALING * b @ a
            continue
        count = len(weight)
        deltas = [SCALING * b[:, e::count] @ a[e * R : (e + 1) * R] for e in range(count)]
        weights[layer] = torch.stack(
            [w + (d.T if name == "gpt_oss" else d) for w, d in zip(weight, deltas, strict=True)]
        )
    return weights


class Plain:
    """A model with other weights."""

    def __init__(self, model, weights):
        self.model = model
        self.weights = weights

    def __call__(self, **inputs):
        return functional_call(self.model, self.weights, kwargs=inputs)


IN_CI = {("mixtral", "shared", 2), ("qwen3_moe", "packed", 1), ("gpt_oss", "padded", 4)}


@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow)
     for case in itertools.product(NAMES, ("shared", "packed", "padded"), (1, 2, 4))],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_base_and_delta(name, layout, size, tmp_path):
    """Of DPO, whose reference is the model without the adapter, in each layout and with accumulation."""
    rows = token_rows("dpo", 4)
    gradients = Gradients()
    trainer = trainer_for(
        "dpo", tiny(name), rows, tmp_path, peft_config=config(), layout=layout,
        per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, callbacks=[gradients],
    )  # fmt: skip
    trained = {
        key: p.detach().clone().requires_grad_() for key, p in trainer.model.named_parameters() if p.requires_grad
    }
    trainer.train()

    base = tiny(name)
    lora = factors(trained)
    assert len(lora) == 3 * base.config.num_hidden_layers
    model = Plain(base, adapted(name, base.state_dict(), lora))
    loss = plain.dpo(model, rows, base)
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.steps[0].keys() == trained.keys()
    for key, weight in trained.items():
        error = (gradients.steps[0][key] - weight.grad).norm()
        assert error <= 2e-4 * weight.grad.norm(), f"{key}: {error / weight.grad.norm():.1e} of its norm"


@pytest.mark.parametrize("name", quick("gpt_oss", among=NAMES))
def test_trained_experts_are_resumed_saved_and_merged(name, tmp_path):
    """And a reference that is computed before training gives the same numbers."""
    base = tmp_path / "base"
    tiny(name).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)

    def run(folder, resume=None, **options):
        trainer = trainer_for(
            "dpo", AutoModelForCausalLM.from_pretrained(base), token_rows("dpo"), folder, peft_config=config(),
            max_steps=4, learning_rate=1e-2, save_strategy="steps", save_steps=2, **options,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return logged(trainer), load_file(folder / "adapter_model.safetensors")

    logs, saved = run(tmp_path / "run")
    resumed_logs, resumed = run(tmp_path / "resumed", resume=str(tmp_path / "run" / "checkpoint-2"))
    precomputed_logs, precomputed = run(tmp_path / "precomputed", precompute_ref_log_probs=True)
    assert resumed_logs == logs
    losses, precomputed_losses = ([log["loss"] for log in each if "loss" in log] for each in (logs, precomputed_logs))
    assert precomputed_losses == pytest.approx(losses, rel=1e-4)
    for key, weight in saved.items():
        assert torch.equal(resumed[key], weight)
        torch.testing.assert_close(precomputed[key], weight, rtol=1e-4, atol=1e-5)

    assert merge.main([str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    untrained = AutoModelForCausalLM.from_pretrained(base).state_dict()
    lora = factors({key: weight.double() for key, weight in saved.items()})
    expected = untrained | adapted(name, untrained, lora)
    assert merged.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(merged[key].double(), weight.double(), rtol=1e-6, atol=1e-7)
        assert not torch.equal(merged[key], untrained[key]) or key not in lora


ALL_LINEAR_ON_EXPERTS = ("mixtral", "qwen3_moe")
"""Models whose experts PEFT adapts by the names that they had in transformers 4, with twice the rank for two in one."""
NO_EXPERTS = ("gemma3", "recurrent_gemma", "lfm2", "qwen3_5_text")
"""Models with other weights of three dimensions: of a vision encoder, of gates and of convolutions."""


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("gpt_oss", {"target_modules": "all-linear"}, True),
        ("gpt_oss", {"target_modules": "all-linear", "target_parameters": EXPERTS[:1]}, "down_proj"),
        ("gpt_oss", {"target_modules": "all-linear", "target_parameters": EXPERTS}, False),
        ("gpt_oss", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, False),
        # the MLP of a shared expert, next to the others
        ("qwen2_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, True),
        ("qwen2_moe", {"target_modules": ["q_proj", "v_proj"]}, False),
        *((name, {"target_modules": "all-linear"}, False) for name in ALL_LINEAR_ON_EXPERTS),
        *((name, {"target_modules": "all-linear"}, False) for name in NO_EXPERTS),
        ("llama4_text", {"target_modules": "all-linear"}, "feed_forward.experts.gate_up_proj"),
    ],
)
def test_experts_that_an_adapter_on_all_linear_layers_leaves_are_told_once(name, options, fix):
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    said = describe_adapter(add_adapter(tiny(name), adapter), adapter)
    assert said.count("To train fused experts, set target_parameters: [") == bool(fix)
    assert isinstance(fix, bool) or fix in said.rpartition("set target_parameters: [")[2]
    # of an adapter that is continued, the option cannot be changed
    assert "target_parameters" not in describe_adapter(add_adapter(tiny(name), adapter))


@pytest.mark.parametrize("names", [["w1", "w2", "w3"], ["gate_proj", "up_proj", "down_proj"]])
def test_experts_may_have_their_names_of_transformers_4(names, tmp_path):
    """PEFT replaces them by the fused parameters, which match no module, and warns of the ranks that it sets itself."""
    name = "mixtral" if "w1" in names else "qwen3_moe"
    tiny(name).save_pretrained(tmp_path / "base")
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        policy = add_adapter(tiny(name), peft.LoraConfig(target_modules=["q_proj", *names]))
        policy.save_pretrained(tmp_path / "adapter")
        section = ModelSection(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
        loaded = load_model(section)
    assert {type(layer) for layer in adapted_layers(loaded)} == {type(layer) for layer in adapted_layers(policy)}
    assert {key.rpartition(".")[2] for key in policy.targeted_parameter_names} == {"gate_up_proj", "down_proj"}
    with pytest.raises(InputError, match="target_modules: 'k_prj' matches nothing in the model"):
        add_adapter(tiny("llama"), peft.LoraConfig(target_modules=["q_proj", "k_prj"]))


REFUSED = [
    ({"lora_dropout": 0.1}, "an adapter on fused experts does not work with lora_dropout != 0. Change this option, or"),
    ({"use_dora": True}, "an adapter on fused experts does not work with use_dora=True. Change this option, or"),
    ({"lora_bias": True}, "an adapter on fused experts does not work with lora_bias=True. Change this option, or"),
    (
        {"exclude_modules": ["experts"]},
        "exclude_modules: PEFT does not exclude the parameter model.layers.0.mlp",
    ),
    ({"exclude_modules": r".*\.experts"}, "To train no experts, set target_modules to layers outside of the experts"),
    (
        {"target_parameters": ["mlp.experts.up"]},
        "Its fused experts are mlp.experts.down_proj, mlp.experts.gate_up",
    ),
    ({"target_modules": None, "target_parameters": ["mlp.up"]}, "Its fused experts are mlp.experts.down_proj, "),
    (
        {"target_modules": ["experts"]},
        "Target module GptOssExperts is no linear layer. Use target_parameters. Its",
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_do_not_fit_experts_are_refused_with_the_fix(options, message, device):
    with pytest.raises(InputError, match=re.escape(message)):
        add_adapter(tiny("gpt_oss").to(device), config(**options))


def test_a_model_without_experts_has_no_target_parameters():
    with pytest.raises(
        InputError, match=r"'mlp\.experts\.gate_up_proj' matches nothing in the model\. It has no fused"
    ):
        add_adapter(tiny("llama"), config(target_parameters=EXPERTS[:1]))
    policy = add_adapter(tiny("gpt_oss"), config(target_modules=None))
    assert all("experts" in name for name in policy.targeted_parameter_names)


def test_experts_next_to_quantized_layers_are_trained(tmp_path):
    """bitsandbytes quantizes linear layers alone, so the experts stay in full precision."""
    pytest.importorskip("bitsandbytes")
    tiny("qwen3_moe").save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    trainer = trainer_for(
        "sft", quantized, token_rows("sft"), tmp_path, peft_config=config(), max_steps=3, learning_rate=1e-2
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert any("experts" in name for name in moved)
