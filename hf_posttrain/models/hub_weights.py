"""Names of a model's weights, in memory and as the Hub has them."""

import re
from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..scoring import forward as scoring


def named_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the weights and saved buffers of the causal LM by name, without weights of adapters.

    A tied weight is included under each of its names. DeepSpeed may have sharded the weights.
    """
    # state_dict() would shard the weights of FSDP2 again
    inner = scoring.causal_lm(model)
    tensors: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    for prefix, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}"] = buffer
    plain = {re.sub(r"(\.base_layer)+\.", ".", name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in plain.items() if ".lora_" not in name}


def hub_weights(inner: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded weights under the names that `from_pretrained` reads."""
    return dict(revert_weight_conversion(inner, weights))
