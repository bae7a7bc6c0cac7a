"""Weights of a model by the names in memory, and by the names of files on the Hub."""

import re
from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..scoring import forward


def named_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the weights and saved buffers of the causal LM by name, without weights of adapters.

    A tied weight is included under each of its names. DeepSpeed may have sharded the weights.
    """
    # state_dict() would shard the weights of FSDP2 again
    causal = forward.causal_lm(model)
    tensors: dict[str, Tensor] = dict(causal.named_parameters(remove_duplicate=False))
    for prefix, module in causal.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    plain = {re.sub(r"(\.base_layer)+\.", ".", name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in plain.items() if ".lora_" not in name}


def hub_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert complete weights from memory to the names and shapes that `from_pretrained` reads.

    A causal LM in transformers may have merged or split the weights of the Hub, for example those of experts.
    """
    return dict(revert_weight_conversion(model, weights))
