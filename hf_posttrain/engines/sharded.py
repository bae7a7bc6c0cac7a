"""Weights that FSDP2 or DeepSpeed's ZeRO-3 cut over the ranks: the policy's, and those of a frozen second model."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor


def original_class(module: nn.Module) -> Any:
    """The module's class without what FSDP2 adds to it."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


def keep_full_precision(accelerator: Accelerator) -> None:
    """Mixed precision of FSDP2 without what Accelerate adds: log-probabilities rounded to bf16, and gradients summed
    over the ranks in bf16.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and (policy := plugin.mixed_precision_policy) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def set_wrapped_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """FSDP2's units, where none are named, are the layers that a model has: Accelerate refuses one that names those of
    a part that it lacks (the tower for pictures of Qwen3.5, as a text model).
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = _layer_classes(model)


def _layer_classes(model: Any) -> list[str]:
    """The names of its classes of layers, which are never cut further."""
    return sorted({type(module).__name__ for module in model.modules()} & {*(model._no_split_modules or ())})


# ---- frozen models


def prepare_frozen(model: nn.Module, accelerator: Accelerator, offload: bool) -> nn.Module:
    """`model`, wrapped and cut as the policy is, in eval mode. offload: shards live in CPU memory."""
    pinned = accelerator.device.type == "cuda"
    if accelerator.is_fsdp2:
        return _with_fsdp2(model, accelerator, CPUOffloadPolicy(pin_memory=pinned) if offload else None).eval()
    import deepspeed

    # an engine of its own without optimizer
    config = _inference_config(accelerator)
    if offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    wrapped = deepspeed.initialize(model=model, config=config)[0]
    wrapped.eval()
    return wrapped


def _with_fsdp2(model: nn.Module, accelerator: Accelerator, offload: CPUOffloadPolicy | None) -> nn.Module:
    """Accelerate's own wrapping, around the layers of this model's architecture instead of the policy's."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    # what this changes in the run's plugin is put back: the policy is wrapped by it too
    plugin = accelerator.state.fsdp_plugin
    changed = ("transformer_cls_names_to_wrap", "auto_wrap_policy", "cpu_offload")
    kept = {name: getattr(plugin, name) for name in changed}
    layers = {type(module).__name__ for module in model.modules()}
    if plugin.transformer_cls_names_to_wrap and not layers & set(plugin.transformer_cls_names_to_wrap):
        plugin.transformer_cls_names_to_wrap = _layer_classes(model)  # another architecture than the policy's: its own
    plugin.cpu_offload = offload or plugin.cpu_offload
    try:
        return fsdp2_prepare_model(accelerator, model)
    finally:
        for name, value in kept.items():
            setattr(plugin, name, value)


def _inference_config(accelerator: Accelerator) -> dict[str, Any]:
    """DeepSpeed's config of the run, for a model that is not trained."""
    whole = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    whole["zero_optimization"].pop("offload_optimizer", None)
    return {name: value for name, value in whole.items() if name not in ("optimizer", "scheduler")}


# ---- the policy, gathered


@contextmanager
def gather_zero3(model: Any) -> Iterator[nn.Module]:
    """The policy inside its DeepSpeed engine with every weight gathered and DeepSpeed's hooks off."""
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    weights = model.optimizer.parameter_offload
    model.empty_partition_cache()  # what a forward prefetched for the next one
    # DeepSpeed's own context leaves the hook that compares ranks, so it is taken off here and put back
    weights.fwd_pre_hook.remove()
    try:
        with unwrap_model_for_generation(model):
            yield model.module
    finally:
        compare = lambda *_: weights.get_param_coordinator().reset_step()  # noqa: E731
        weights.fwd_pre_hook = model.module.register_forward_pre_hook(compare)


@contextmanager
def gather_fsdp2(model: Any, accelerator: Accelerator) -> Iterator[nn.Module]:
    """The policy without other wrappers, every FSDP2 unit of it gathered; a forward does not cut it again."""
    plugin = accelerator.state.fsdp_plugin
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = set(plugin.transformer_cls_names_to_wrap or model._no_split_modules)
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield accelerator.unwrap_model(model)
    finally:
        for unit in units:
            unit.reshard()  # embeddings and head stay gathered from forward to backward, as Accelerate has it
            is_layer = type(unit).__name__.removeprefix("FSDP") in layers
            unit.set_reshard_after_forward(plugin.reshard_after_forward and is_layer, recurse=False)


def iter_gathered(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each of these weights by its name, whole on every rank until the next one. All ranks run through all."""
    for name, tensor in tensors.items():
        with gather_parameters(tensor):
            if isinstance(tensor, DTensor):  # an offloaded one where its collectives run
                there: Any = tensor.to(tensor.device_mesh.device_type)
                yield name, there.full_tensor()
            else:
                yield name, tensor


# ---- models that DeepSpeed cut while they were loaded


def gather_parameters(*tensors: nn.Parameter | Any) -> AbstractContextManager:
    """All of these weights on each rank inside, where DeepSpeed cut them."""
    cut = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not cut:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(cut)


def copy_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """A deep copy of a model; where DeepSpeed has cut its weights they are gathered, copied and cut one by one."""
    twin = copy.deepcopy(model)
    for own, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if hasattr(own, "ds_id"):  # what was copied is an empty stand-in
            import deepspeed

            with gather_parameters(own):
                theirs.data = own.detach().clone()
            deepspeed.zero.Init(nn.ParameterList([theirs]), config_dict_or_path=_inference_config(accelerator))
    return twin
