"""What is saved: every weight, whatever the engine, read again and compared before anybody relies on it.

    whole_state   all weights on the first rank where the engine cuts them
    check_saved   are the files complete?
    save_merged   a LoRA model as one plain model (merge_lora)
"""

import copy
import math
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from . import engine, scoring
from .errors import InputError


def whole_state(trainer: Any, adapter_only: bool) -> dict[str, Tensor] | None:
    """Every weight, on the first rank (others may get less), or None where a model's own state_dict is as good.

    adapter_only: without the frozen base, where the engine can leave it out. All ranks call it.
    """
    accelerator, model = trainer.accelerator, trainer.model_wrapped
    if engine.zero_stage(accelerator) == 3:
        return model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=adapter_only)
    if accelerator.is_fsdp2 or engine.zero_stage(accelerator):
        return accelerator.get_state_dict(model)
    return None


def check_saved(model: nn.Module, folder: str | Path) -> None:
    """Compare names and shapes in the safetensors files of `folder` with the model's (or its adapter's).

    Raises RuntimeError where a file cannot be read or a weight is missing, empty or of another shape.
    """
    saved: dict[str, list[int]] = {}
    inner, place = scoring.unwrapped(model), Path(folder)
    if isinstance(inner, peft.PeftModel) and inner.active_adapter != "default":
        place = place / inner.active_adapter  # as PEFT has it
    for file in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                saved |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{file} was just saved and cannot be read: {error}") from error
    wanted = _shapes(model)
    missing = [names[0] for names, shape in wanted if not any(saved.get(name) == shape for name in names)]
    found, expected = (sum(map(math.prod, shapes)) for shapes in (saved.values(), (shape for _, shape in wanted)))
    if missing and found != expected:  # equal: the same weights under the names of the hub's format
        raise RuntimeError(
            f"what was saved in {folder} is not the whole model: {len(missing)} of {len(wanted)} weights are missing "
            f"or have another shape, {missing[0]} first ({found} of {expected} numbers are there)"
        )


def _shapes(model: nn.Module) -> list[tuple[list[str], list[int]]]:
    """(names of a weight, its whole shape) of each that must be saved; tied weights have several names."""
    inner = scoring.unwrapped(model)
    weights: dict[int, tuple[list[str], list[int]]] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        names, _ = weights.setdefault(id(parameter), ([], list(getattr(parameter, "ds_shape", parameter.shape))))
        names.append(name)
    if not isinstance(inner, peft.PeftModel):
        return list(weights.values())
    whole = {name: torch.empty(shape, device="meta") for names, shape in weights.values() for name in names}
    own = peft.get_peft_model_state_dict(inner, whole, inner.active_adapter, save_embedding_layers=False)
    return [([name], list(tensor.shape)) for name, tensor in own.items()]


def save_merged(trainer: Any, folder: str) -> None:
    """The trained adapter merged into its base and saved as a plain model. All ranks call it.

    Raises InputError for a model without adapter and for a quantised base.
    """
    policy = scoring.unwrapped(trainer.model)
    check_mergeable(policy)
    state = whole_state(trainer, adapter_only=False) or policy.state_dict()
    if not trainer.args.should_save:
        return
    inner = policy.get_base_model()
    base = engine.plain_class(inner)(inner.config).to(inner.dtype)  # not through from_config: DeepSpeed would cut it
    config = copy.deepcopy(policy.peft_config[policy.active_adapter])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # its weights come next: PiSSA and its kin would decompose random ones
    twin = peft.get_peft_model(base, config, adapter_name=policy.active_adapter)
    others = {name for name in policy.peft_config if name != policy.active_adapter}
    state = {name: t for name, t in state.items() if not others & set(name.split("."))}
    twin.load_state_dict(state)
    merged: Any = twin.merge_and_unload()
    merged.save_pretrained(folder)
    trainer.tokenizer.save_pretrained(folder)
    trainer.generation_config.save_pretrained(folder)
    check_saved(merged, folder)


def check_mergeable(model: Any) -> None:
    """Raises InputError where there is nothing to merge, or nothing to merge into."""
    if not isinstance(model, peft.PeftModel):
        raise InputError("merge_lora: the model has no adapter: set model.lora (peft_config), or drop merge_lora")
    if getattr(model.get_base_model(), "is_quantized", False):
        raise InputError(
            "merge_lora: the base is quantised and a merge would round the adapter away: drop merge_lora, and merge "
            "into the full-precision base afterwards"
        )
