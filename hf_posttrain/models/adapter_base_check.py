"""Is the base that an adapter is trained on still the one that its config names?"""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from ..scoring import forward

logger = logging.getLogger(__name__)
_OPTIONS = ("rope_parameters", "sliding_window", "layer_types", "num_hidden_layers", "num_experts_per_tok")
"""Options of a config that are set while a model is loaded, and change what it computes."""


def warn_if_base_changed(model: nn.Module) -> None:
    """Say where the model in memory, on which an adapter will be trained, is not that of the folder which the adapter
    will name as its base: it would be loaded on another.
    """
    adapters = getattr(model, "peft_config", {})
    inits = [getattr(config, "init_lora_weights", None) for config in adapters.values()]
    if any(isinstance(init, str) and init != "gaussian" for init in inits):
        return  # such as PiSSA, which moves a part of the base into the adapter
    inner = forward.causal_lm(model)
    folder = _folder(inner.config, next((config.revision for config in adapters.values()), None))
    with suppress(OSError, SafetensorError):  # files that are not whole are told when they are loaded
        if folder and (what := _changed_option(inner, folder) or _changed_weight(inner, folder, bool(adapters))):
            logger.warning(
                "the base was changed after loading (%s is not that of %s, which the adapter will name): whoever loads"
                " the adapter gets another model. Save the base as it is now, and load it from there",
                what,
                folder,
            )


def _folder(config: PreTrainedConfig, revision: str | None) -> Path | None:
    """Where the model of this config was loaded from, which may be the hub's cache."""
    name = config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    with suppress(ValueError):  # no name of the hub's
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _changed_option(inner: Any, folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return None
    there = type(inner.config).from_pretrained(folder).get_text_config()
    here = inner.config.get_text_config()
    return next((name for name in _OPTIONS if getattr(there, name, None) != getattr(here, name, None)), None)


def _changed_weight(inner: Any, folder: Path, adapted: bool) -> str | None:
    """The first weight that differs from the files, of those that these have by the same name: by its first row, and by
    all of the embedding and the head, where single tokens may have been changed.
    """
    # what is trained besides an adapter is saved with it
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in inner.named_parameters()
        if not (adapted and weight.requires_grad)
    }
    ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
    whole = {id(getattr(end, "weight", None)) for end in ends}
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for file in sorted(folder / name for name in files if (folder / name).is_file()):
        with safe_open(file, "pt") as saved:
            for name in sorted(saved.keys() & weights.keys()):
                rows = saved.get_slice(name)
                weight = weights[name].detach()
                # resized, cut by an engine, quantised, or not loaded
                comparable = rows.get_shape() == [*weight.shape] and weight.is_floating_point() and weight.ndim
                if not comparable or weight.is_meta or isinstance(weight, DTensor):
                    continue
                count = None if id(weights[name]) in whole else 1
                first = rows[:count]
                kept = weight[:count].cpu()
                # it may have been loaded in a lower precision, and cast after that; 8 bits have a scale besides
                casts = {kept.dtype, torch.bfloat16, torch.float16}
                if first.element_size() > 1 and not any(torch.equal(first.to(t).to(kept.dtype), kept) for t in casts):
                    return name
    return None
