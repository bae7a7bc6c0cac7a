"""What differs between engines: one process, DDP, FSDP2 and DeepSpeed ZeRO-1, 2 and 3.

    name            which of them it is
    plain_class     the class of a module that FSDP2 wrapped
    keep_scores_whole   what FSDP2's mixed precision must not round
    shards          does the engine cut the weights of a model over the ranks?
    changes_weights     does it cut or cast them?
    prepare_frozen  a second model, ready to score: cut over the ranks where the policy is
    gathered        inside it these weights are whole, where DeepSpeed cut them while the model was loaded
    copied          a deep copy of the policy as it is in memory, cut or not
    whole_weights   inside it every rank has all weights of the policy: one gather for a whole generation

The rest is Accelerate's: `trainer.model_wrapped` is called like the model itself on every engine.
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule


def shards(accelerator: Any) -> bool:
    """FSDP2 or ZeRO-3."""
    return accelerator.is_fsdp2 or zero_stage(accelerator) == 3


def changes_weights(accelerator: Any) -> bool:
    """Does the engine cut or cast weights when training begins, so that the policy cannot score (rightly) before?"""
    return name(accelerator) not in ("single", "ddp")


def zero_stage(accelerator: Any) -> int:
    """0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.zero_stage


def name(accelerator: Any) -> str:
    """single, ddp, fsdp2, zero1, zero2 or zero3."""
    if accelerator.state.deepspeed_plugin is not None:
        return f"zero{zero_stage(accelerator)}"
    return "fsdp2" if accelerator.is_fsdp2 else "single" if accelerator.num_processes == 1 else "ddp"


def plain_class(module: nn.Module) -> Any:
    """The module's class without what FSDP2 adds to it."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


def keep_scores_whole(accelerator: Any) -> None:
    """Mixed precision of FSDP2 without what Accelerate adds: log-probabilities rounded to bf16, and gradients summed
    over the ranks in bf16."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        exact = {"output_dtype": None, "reduce_dtype": torch.float32}
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, **exact)


def prepare_frozen(model: nn.Module, accelerator: Any, offload: bool = False) -> nn.Module:
    """`model`, wrapped and cut as the policy is, or moved to the device where nothing is cut. Changes it in place.

    Under DeepSpeed it gets the policy's dtype: bf16 means bf16 weights there, not autocast.
    offload: shards live in CPU memory (the caller moves a model that is not cut by itself).
    """
    if accelerator.is_fsdp2:
        return _with_fsdp2(model, accelerator, offload)
    if zero_stage(accelerator) == 3:
        return _with_zero3(model, accelerator, offload)
    casts = zero_stage(accelerator) and not getattr(model, "is_quantized", False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision) if casts else None
    return model.to(accelerator.device, dtype)


def _with_fsdp2(model: nn.Module, accelerator: Any, offload: bool) -> nn.Module:
    """Accelerate's own wrapping, around the layers of this model's architecture instead of the policy's."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = accelerator.state.fsdp_plugin
    changed = ("transformer_cls_names_to_wrap", "auto_wrap_policy", "cpu_offload")
    kept = {name: getattr(plugin, name) for name in changed}
    layers = {type(module).__name__ for module in model.modules()}
    if plugin.transformer_cls_names_to_wrap and not layers & set(plugin.transformer_cls_names_to_wrap):
        plugin.transformer_cls_names_to_wrap = None  # another architecture than the policy's: its own layers
    if offload:
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda")
    try:
        return fsdp2_prepare_model(accelerator, model).eval()
    finally:
        for name, value in kept.items():
            setattr(plugin, name, value)


def _with_zero3(model: nn.Module, accelerator: Any, offload: bool) -> nn.Module:
    """An engine of its own without optimizer."""
    import deepspeed

    config = _without_training(accelerator)
    if offload:
        pinned = accelerator.device.type == "cuda"
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    wrapped = deepspeed.initialize(model=model, config=config)[0]
    wrapped.eval()
    return wrapped


def _without_training(accelerator: Any) -> dict[str, Any]:
    """DeepSpeed's config of the run, for a model that is not trained."""
    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    config["zero_optimization"].pop("offload_optimizer", None)
    return config


def gathered(*tensors: nn.Parameter | Any) -> AbstractContextManager:
    """All of these weights on each rank inside, where DeepSpeed cut them while the model was loaded (zero.Init)."""
    cut = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not cut:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(cut)


def copied(model: nn.Module, accelerator: Any) -> nn.Module:
    """A deep copy; where DeepSpeed has cut the weights they are gathered, copied and cut one by one."""
    twin = copy.deepcopy(model)
    for own, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if hasattr(own, "ds_id"):  # what was copied is an empty stand-in
            import deepspeed

            with gathered(own):
                theirs.data = own.detach().clone()
            deepspeed.zero.Init(nn.ParameterList([theirs]), config_dict_or_path=_without_training(accelerator))
    return twin


@contextmanager
def whole_weights(model: Any, accelerator: Any) -> Iterator[nn.Module]:
    """The unwrapped policy with all its weights on each rank, without hooks: inside no forward waits for another rank.

    model: the wrapped policy. All ranks enter together; it costs one gather of all weights, and their memory.
    """
    if zero_stage(accelerator) == 3 and hasattr(model, "module"):
        with _without_zero3(model):
            yield model.module
    elif accelerator.is_fsdp2 and isinstance(model, FSDPModule):
        with _unsharded(model, accelerator.state.fsdp_plugin):
            yield accelerator.unwrap_model(model)
    else:
        yield accelerator.unwrap_model(model)


@contextmanager
def _without_zero3(model: Any) -> Iterator[None]:
    """Every weight gathered now and DeepSpeed's hooks off; its own context leaves the one that compares ranks."""
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    weights = model.optimizer.parameter_offload
    model.empty_partition_cache()  # what a forward prefetched for the next one
    weights.fwd_pre_hook.remove()
    with unwrap_model_for_generation(model):
        yield
    compare = lambda *_: weights.get_param_coordinator().reset_step()  # noqa: E731
    weights.fwd_pre_hook = model.module.register_forward_pre_hook(compare)


@contextmanager
def _unsharded(model: Any, plugin: Any) -> Iterator[None]:
    """Every unit of an FSDP2 model gathered now, and kept so by forwards."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = set(plugin.transformer_cls_names_to_wrap or model._no_split_modules)
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.reshard()  # embeddings and head stay gathered from forward to backward, as Accelerate has it
            is_layer = type(unit).__name__.removeprefix("FSDP") in layers
            unit.set_reshard_after_forward(plugin.reshard_after_forward and is_layer, recurse=False)
