"""Removal of decoder layers from a model, for a smaller student that is distilled afterwards."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InputError


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the decoder layers of a causal LM, with their parent and their name in it.

    Raises:
        InputError: If there is no list with one module for each layer.
    """
    count = model.config.get_text_config().num_hidden_layers
    for parent in model.get_decoder().modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, name, child
    raise InputError(f"{type(model).__name__} has no list of its {count} layers. Its layers cannot be removed")


def evenly_spaced(count: int, total: int) -> list[int]:
    """Return the numbers of `count` of `total` layers in equal distances, with the first and the last layer."""
    if count == 1:
        return [0]
    return [round(n * (total - 1) / (count - 1)) for n in range(count)]


@torch.no_grad()
def layer_influence(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the block influence of each layer: the mean of 1 - cosine similarity of its input and output states.

    Source: ShortGPT, Men et al. 2024, eq. 1 (arXiv 2403.03853).

    Args:
        model: Causal LM.
        rows: Token ids of texts.
    """
    _, _, layers = decoder_layers(model)
    sums = [0.0] * len(layers)
    tokens = 0

    def record(number: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
            before = inputs[0] if inputs else keywords["hidden_states"]
            after: Tensor = output[0] if isinstance(output, tuple) else output  # type: ignore[assignment]
            sums[number] += (1 - cosine_similarity(before.float(), after.float(), dim=-1)).sum().item()

        return hook

    handles = [layer.register_forward_hook(record(number), with_kwargs=True) for number, layer in enumerate(layers)]
    try:
        for ids in rows:
            model(input_ids=torch.tensor([[*ids]], device=model.device), use_cache=False)
            tokens += len(ids)
    finally:
        for handle in handles:
            handle.remove()
    return [total / max(tokens, 1) for total in sums]


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Remove all other decoder layers from a model, and adapt its config.

    Args:
        model: Causal LM, which is changed.
        kept: Numbers of the layers to keep, in ascending order.

    Raises:
        InputError: If the config describes its layers in a way that is not known here.
    """
    parent, name, layers = decoder_layers(model)
    setattr(parent, name, nn.ModuleList(layers[number] for number in kept))
    for new, layer in enumerate(getattr(parent, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new
    config = model.config.get_text_config()
    _select_layers(config, len(layers), kept)


def _select_layers(config: PreTrainedConfig, total: int, kept: Sequence[int]) -> None:
    """Change the fields of a config that describe its layers, in place.

    These are lists with a value for each layer (layer_types), lists of numbers of layers (mlp_only_layers), and numbers
    of first layers of another kind (first_k_dense_replace).
    """
    for key, value in list(vars(config).items()):
        if not isinstance(value, list | tuple) or not value:
            continue
        is_sorted = all(type(n) is int for n in value) and [*value] == sorted({*value})
        if is_sorted and key.endswith(("layers", "idxs", "indices", "ids")) and value[0] >= 0 and value[-1] < total:
            setattr(config, key, [new for new, number in enumerate(kept) if number in value])
        elif len(value) == total:
            setattr(config, key, [value[number] for number in kept])
    if isinstance(first := getattr(config, "first_k_dense_replace", None), int):
        config.first_k_dense_replace = sum(number < first for number in kept)  # type: ignore[attr-defined]
    config.num_hidden_layers = len(kept)


def check_reloaded(model: PreTrainedModel, folder: str) -> None:
    """Raise InputError if a saved model does not compute the same logits as the model in memory.

    This finds configs whose layers differ by rules that `keep_layers` does not know.
    """
    problem = f"the layers of {type(model).__name__} depend on their numbers in a way that is not supported"
    error = InputError(f"{problem}. Keep layers at which its pattern of layers repeats, or use another model")
    try:
        reloaded = type(model).from_pretrained(folder, dtype=model.dtype, config=copy.deepcopy(model.config)).eval()
    except RuntimeError as cause:  # weights of other shapes
        raise error from cause
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(5, 5 + min(16, vocabulary - 5))[None]
    with torch.no_grad():
        expected, found = (net(input_ids=ids, use_cache=False).logits for net in (model.eval(), reloaded))
    if not torch.equal(expected, found):
        raise error
