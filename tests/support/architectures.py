"""Every causal LM of the installed transformers, built tiny from its config: name of the architecture -> model."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""All of them, as `model_type` in config.json."""
VOCABULARY, WINDOW, LARGEST = 300, 14, 20_000_000  # ids; tokens that a windowed layer sees; most parameters of "tiny"
SIZES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim lru_width attention_hidden_size",
    48: "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim block_ff_dim intermediate_size_mlp",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    WINDOW: "sliding_window attention_window_size window_size attention_chunk_size",
    64: "mamba_d_ssm",
    16: "moe_intermediate_size shared_expert_intermediate_size mamba_d_head mamba_head_dim expert_dim",
    8: "head_dim q_lora_rank kv_lora_rank v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state "
       "state_size ssm_state_size query_pre_attn_scalar hidden_size_per_layer_input laurel_rank chunk_size "
       "mamba_chunk_size global_head_dim",
    4: "num_hidden_layers num_attention_heads n_layer n_head n_heads n_layers num_layers num_heads num_experts "
       "num_local_experts n_routed_experts decoder_layers decoder_attention_heads encoder_attention_heads "
       "qk_rope_head_dim qk_nope_head_dim rotary_dim linear_num_value_heads mamba_n_heads mamba_num_heads",
    3: "conv_L_cache",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads encoder_layers altup_num_inputs eos_token_id "
       "num_global_key_value_heads",
    1: "n_shared_experts n_group topk_group bos_token_id n_mamba_heads num_codebooks first_k_dense_replace",
    0: "pad_token_id num_kv_shared_layers",
}  # fmt: skip
"""Value -> the names that config classes have for it."""
MLA = {"num_key_value_heads": 4, "head_dim": 4}  # one latent for all heads; what is rotated is a head of its own
HYBRID = {"layer_types": ["mamba", "attention"] * 2}
DECODER = {"is_decoder": True, "encoder_layers": 4, "num_hidden_layers": 4}  # of an encoder-decoder
SPECIAL = {
    "axk1": MLA, "axk2": MLA, "deepseek_v2": MLA, "deepseek_v3": MLA, "glm4_moe_lite": MLA,
    "minicpm3": MLA, "deepseek_v32": MLA, "glm_moe_dsa": MLA, "youtu": MLA,
    "bamba": {"attn_layer_indices": [1, 3]}, "bart": DECODER, "bigbird_pegasus": DECODER, "blenderbot": DECODER,
    "blenderbot-small": DECODER, "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_expert_group": 1,
                       "num_experts_per_token": 2} | MLA,
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts_per_token": 2,
                    "linear_head_dim": 8, "linear_num_heads": 4} | MLA,
    "gemma4": {"per_layer_config": {}}, "gemma4_unified": {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2} | MLA,
    "mamba2": {"num_heads": 8}, "marian": DECODER, "mbart": DECODER, "mvp": DECODER, "nemotron_h": {"n_groups": 1},
    "pegasus": DECODER, "plbart": DECODER, "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xlm": {"emb_dim": 32}, "xlstm": {"qk_dim_factor": 1.0},
    "zamba2": {"n_mamba_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64,
               "mamba_headdim": 16, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {"ngram_vocab_size_base": 500, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4},
}  # fmt: skip
"""What an architecture needs besides."""
SCALES = {"kimi_linear": 2.0, "gemma3n_text": 1.0, "ctrl": 5.0, "olmo_hybrid": 5.0, "qwen3_5_text": 5.0,
          "qwen3_next": 5.0, "minicpm3": 5.0, "mimo_v2_flash": 5.0}  # fmt: skip
"""Of those that with larger weights choose other experts at every rounding (MiMo-V2-Flash at a token whose second and
third differ by 9e-8), have no gradient, logits that float32 knows to 2e-4 (MiniCPM3), or a gradient that it knows to
1e-3: in float64 those of CTRL and the three hybrids are equal to 1e-6 at any scale."""


def tiny_config(name, **changes):
    """The config of an architecture with small sizes, its layers of all kinds among 4; `changes` where it has them."""
    config = CONFIG_MAPPING[name]()
    text = config.get_text_config()
    values = {key: value for value, keys in SIZES.items() for key in keys.split()}
    values |= {"partial_rotary_factor": 0.5, "rotary_pct": 0.5} | SPECIAL.get(name, {}) | changes
    known = text.to_dict()
    values = {key: value for key, value in values.items() if key in known}
    if text is config:
        try:
            config = text = type(config)(**values)
        except Exception:  # its defaults and these sizes do not go together at once
            text.update(values)
    else:
        text.update(values)
        for part in vars(config).values():  # towers for pictures and sound
            if isinstance(part, PreTrainedConfig) and part is not text:
                few = {"num_hidden_layers": 1, "depth": 1, "num_key_value_heads": 4}
                part.update({key: value for key, value in (values | few).items() if key in part.to_dict()})
    # a list with one entry for each layer begins with its kinds
    layers = getattr(text, "num_hidden_layers", None)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers"):
        found = getattr(text, key, None)
        if isinstance(found, list) and layers and len(found) != layers:
            kinds = list(dict.fromkeys(found))
            setattr(text, key, [kinds[i % len(kinds)] for i in range(layers)])
    return config


def tiny(name, seed=0, scale=None, **changes):
    """A float32 model in eval mode, of weights so large that its distributions are far from uniform.

    Raises ValueError where it does not get small; whatever transformers raises where it does not build.
    """
    config = tiny_config(name, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    scale = SCALES.get(name, 10.0) if scale is None else scale
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def drop_pieces(model):
    """A model whose layers do not pass the pieces of a row on to its attention, as some written elsewhere."""
    own = type(model.model.layers[0].self_attn).forward
    for layer in model.model.layers:
        layer.self_attn.forward = lambda *args, _layer=layer.self_attn, segments=None, **kwargs: own(
            _layer, *args, **kwargs
        )
    return model
