"""gpt-oss's weights in MXFP4 are loaded as what they stand for, train, and are saved as plain weights."""

import json

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import token_rows, trainer_for
from transformers import AutoModelForCausalLM, GptOssConfig

from hf_posttrain.models.config import ModelSection
from hf_posttrain.models.load import load_model

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of the three bits of a number, the fourth of which is its sign (OCP Microscaling Formats, 5.3.3)."""


def stands_for(blocks, scales):
    """Weights [experts, in, out] of blocks [experts, out, groups, 16], two numbers a byte, and their exponents."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # the low half first
    plain = VALUES[numbers & 7] * (1 - 2.0 * (numbers >> 3)) * torch.exp2(scales.float() - 127)[..., None]
    return plain.flatten(-2).transpose(1, 2)


def write_base(folder):
    """A model in MXFP4 in a folder; what its weights stand for, by name."""
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=300, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    expected = {}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        experts, before, behind = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, behind, before // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, behind, before // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = stands_for(blocks, scales)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(told))
    return expected


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False).logits


def test_weights_in_mxfp4_are_loaded_trained_and_saved(tmp_path):
    expected = write_base(tmp_path / "base")
    model = load_model(ModelSection(str(tmp_path / "base")))
    assert len(expected) == 4
    for name, weight in expected.items():
        assert torch.equal(model.state_dict()[name], weight)
    trainer = trainer_for("sft", model, token_rows("sft"), tmp_path / "out", learning_rate=1e-3)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, weight in expected.items():
        assert saved[name].shape == weight.shape
        assert not torch.equal(saved[name], weight)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))


def test_an_adapter_on_a_base_in_mxfp4_is_loaded_on_it_again(tmp_path):
    """Its experts too."""
    expected, section = write_base(tmp_path / "base"), ModelSection(str(tmp_path / "base"))
    experts = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=4, target_modules="all-linear", target_parameters=experts)
    model = load_model(section)
    before = logits(model)
    trainer = trainer_for("dpo", model, token_rows("dpo"), tmp_path / "out", learning_rate=1e-2, peft_config=config)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    base = load_model(section, trainable=False)
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))
    assert (logits(loaded) - before).abs().max() > 1e-4
    plain = {name: weight for name, weight in load_model(section).state_dict().items() if name in expected}
    assert all(torch.equal(weight, expected[name]) for name, weight in plain.items())
