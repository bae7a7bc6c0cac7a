"""Models without weights, from their configs alone.

    skeletons    the policy, and what scores beside it: as training has them, on the meta device
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..recipe.read import ModelSection, Recipe, placed
from . import load as models


def skeletons(recipe: Recipe) -> list[PreTrainedModel]:
    """The policy and, for kd and opd, the teacher. Raises InputError where a model is not there."""
    found = []
    for key, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        if section:
            with placed(recipe, key):
                found.append(skeleton(section))
    return found


def skeleton(section: ModelSection) -> PreTrainedModel:
    """The model of `section` on the meta device, with its generation config and its attention implementation."""
    config = models.check_model(section)
    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if section.attn_implementation != "auto":
        options["attn_implementation"] = section.attn_implementation
    source = models.names_the_source("model", section.name_or_path)
    with source, models.whole_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    try:
        model.generation_config = GenerationConfig.from_pretrained(section.name_or_path)
    except OSError:  # it has none of its own
        model.generation_config = GenerationConfig.from_model_config(config)
    return model
