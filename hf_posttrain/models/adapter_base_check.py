"""Check whether the base of an adapter is still the model that the config of the adapter names."""

import json
import logging
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..scoring import forward

logger = logging.getLogger(__name__)
_OPTIONS = ("rope_parameters", "sliding_window", "layer_types", "num_hidden_layers", "num_experts_per_tok")
"""Options of a config that may be set while a model is loaded, and that change its outputs."""


def warn_if_base_changed(model: nn.Module) -> None:
    """Warn if the model in memory differs from the folder that the adapter to be trained will name as its base.

    The adapter would be loaded on another model.
    """
    adapters = getattr(model, "peft_config", {})
    inits = [getattr(config, "init_lora_weights", None) for config in adapters.values()]
    if any(isinstance(init, str) and init != "gaussian" for init in inits):
        return  # an initialization such as PiSSA moves a part of the base into the adapter
    inner = forward.causal_lm(model)
    folder = _source_folder(inner.config, next((config.revision for config in adapters.values()), None))
    with suppress(OSError, SafetensorError):  # incomplete files are reported when they are loaded
        if folder and (change := _changed_option(inner, folder) or _changed_weight(inner, folder, bool(adapters))):
            logger.warning(
                "the base model was changed after loading (%s is not that of %s, which the adapter will name as its "
                "base). The adapter would be loaded on another model. Save the base and load it from there",
                change,
                folder,
            )


def _source_folder(config: PreTrainedConfig, revision: str | None) -> Path | None:
    """Return the folder from which the model was loaded, which may be in the cache of the Hub."""
    name = config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    with suppress(ValueError):  # not a valid hub name
        file = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(file).parent if isinstance(file, str) else None
    return None


def _changed_option(inner: PreTrainedModel, folder: Path) -> str | None:
    """Return the first option of the config that differs from that in the folder."""
    if not (folder / "config.json").is_file():
        return None
    saved = type(inner.config).from_pretrained(folder).get_text_config()
    current = inner.config.get_text_config()
    return next((name for name in _OPTIONS if getattr(saved, name, None) != getattr(current, name, None)), None)


def _changed_weight(inner: PreTrainedModel, folder: Path, adapted: bool) -> str | None:
    """Return the first weight that differs from the weight of the same name in the files.

    Weights are compared by their first row, and embedding and head by all rows, since single tokens may have changed.
    """
    # weights that are trained in addition to an adapter are saved with it
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in inner.named_parameters()
        if not (adapted and weight.requires_grad)
    }
    embeddings = (inner.get_input_embeddings(), inner.get_output_embeddings())
    compared_fully = {id(getattr(embedding, "weight", None)) for embedding in embeddings}
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for file in sorted(folder / name for name in files if (folder / name).is_file()):
        with safe_open(file, "pt") as saved:
            for name in sorted(saved.keys() & weights.keys()):
                rows = saved.get_slice(name)
                weight = weights[name].detach()
                # a weight may be resized, sharded by an engine, quantized, or not loaded
                comparable = rows.get_shape() == [*weight.shape] and weight.is_floating_point() and weight.ndim
                if not comparable or weight.is_meta or isinstance(weight, DTensor):
                    continue
                count = None if id(weights[name]) in compared_fully else 1
                saved_rows = rows[:count]
                current_rows = weight[:count].cpu()
                # it may have been loaded in a lower precision, and cast after that; 8-bit weights have a scale, too
                dtypes = {current_rows.dtype, torch.bfloat16, torch.float16}
                equal = any(torch.equal(saved_rows.to(dtype).to(current_rows.dtype), current_rows) for dtype in dtypes)
                if saved_rows.element_size() > 1 and not equal:
                    return name
    return None
