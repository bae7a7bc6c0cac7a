"""gpt-oss's weights in MXFP4 are loaded as what they stand for, train, and are saved as plain weights."""

import json

import torch
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import token_rows, trainer_for
from transformers import AutoModelForCausalLM, GptOssConfig

from hf_posttrain.models.load import load_model
from hf_posttrain.models.section import ModelSection

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of the three bits of a number, the fourth of which is its sign (OCP Microscaling Formats, 5.3.3)."""


def stands_for(blocks, scales):
    """Weights [experts, in, out] of blocks [experts, out, groups, 16], two numbers a byte, and their exponents."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # the low half first
    plain = VALUES[numbers & 7] * (1 - 2.0 * (numbers >> 3)) * torch.exp2(scales.float() - 127)[..., None]
    return plain.flatten(-2).transpose(1, 2)


def test_weights_in_mxfp4_are_loaded_trained_and_saved(tmp_path):
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=300, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    folder, expected = tmp_path / "base", {}
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

    model = load_model(ModelSection(str(folder)))
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
