"""Tiny random causal LMs of the architectures that matter, each built from its config."""

import torch
import transformers as tf

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "eos_token_id": 258,
    "bos_token_id": None,
}
CONFIGS = {
    "qwen3": lambda: tf.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: tf.Gemma2Config(**SMALL, sliding_window=5, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL | {"num_hidden_layers": 6}, sliding_window=5),
    "cohere": lambda: tf.CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.25),
    "granite": lambda: tf.GraniteConfig(
        **SMALL, logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.0
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.1, eos_token_id=258
    ),
}


def tiny_model(name="qwen3", seed=0, **changes):
    """A float32 model with weights large enough that its distributions are far from uniform."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    attention = "eager" if name == "gemma2" else "sdpa"
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15.0)
    return model.eval()
