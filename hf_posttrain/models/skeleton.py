"""Models without weights, from their configs alone, on the meta device."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from . import load
from .section import ModelSection


def load_skeleton(section: ModelSection) -> PreTrainedModel:
    """The model of `section` on the meta device, with its generation config and its attention implementation."""
    config = load.check_model(section)
    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if section.attn_implementation != "auto":
        options["attn_implementation"] = section.attn_implementation
    source = load.names_the_source("model", section.name_or_path)
    with source, load.whole_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    try:
        model.generation_config = GenerationConfig.from_pretrained(section.name_or_path)
    except OSError:  # it has none of its own
        model.generation_config = GenerationConfig.from_model_config(config)
    return model
