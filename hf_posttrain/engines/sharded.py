"""Weights of the policy and of frozen models that FSDP2 or DeepSpeed's ZeRO-3 shard over the ranks."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import InputError

FSDP_FOLDER = "pytorch_model_fsdp_0"
"""Folder in which Accelerate saves the shards of a model under FSDP2."""


def original_class(module: nn.Module) -> type:
    """Return the class of a module without the mixin of FSDP2."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


def keep_full_precision(accelerator: Accelerator) -> None:
    """Make FSDP2 leave outputs in their own dtype and sum gradients over the ranks in float32.

    In mixed precision, Accelerate would round log-probabilities and sums of gradients to bf16.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and (policy := plugin.mixed_precision_policy) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def set_wrapped_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Set the units of FSDP2 to the layers of the model, unless the plugin names some.

    Without it, Accelerate takes the names in `_no_split_modules` and rejects a model that lacks one of these layers. A
    Qwen3.5 that is loaded as a text model, for example, names the layers of the vision encoder.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = _layer_classes(model)


def _layer_classes(model: nn.Module) -> list[str]:
    """Return the class names of a model's layers, which are the smallest units that are sharded."""
    no_split: Any = model._no_split_modules
    return sorted({type(module).__name__ for module in model.modules()} & {*(no_split or ())})


# ---- frozen models


def prepare_frozen(model: nn.Module, accelerator: Accelerator, offload: bool) -> nn.Module:
    """Wrap and shard a frozen model as the policy is, in eval mode.

    Args:
        model: The model, which is changed in place.
        accelerator: The accelerator of the run.
        offload: Whether shards are kept in CPU memory.
    """
    pin_memory = accelerator.device.type == "cuda"
    if accelerator.is_fsdp2:
        return _wrap_fsdp2(model, accelerator, CPUOffloadPolicy(pin_memory=pin_memory) if offload else None).eval()
    import deepspeed

    # a separate DeepSpeed engine without optimizer
    config = _inference_config(accelerator)
    if offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    wrapped = deepspeed.initialize(model=model, config=config)[0]
    wrapped.eval()
    return wrapped


def _wrap_fsdp2(model: nn.Module, accelerator: Accelerator, offload: CPUOffloadPolicy | None) -> nn.Module:
    """Wrap a frozen model with Accelerate's function. Its units are layers of its own architecture."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    # the same plugin wraps the policy, so its values are restored afterwards
    plugin = accelerator.state.fsdp_plugin
    restored_names = ("transformer_cls_names_to_wrap", "auto_wrap_policy", "cpu_offload")
    original = {name: getattr(plugin, name) for name in restored_names}
    if plugin.transformer_cls_names_to_wrap:  # Accelerate rejects the name of a layer that this model lacks
        classes = {type(module).__name__ for module in model.modules()}
        present = [name for name in plugin.transformer_cls_names_to_wrap if name in classes]
        plugin.transformer_cls_names_to_wrap = present or _layer_classes(model)
    plugin.cpu_offload = offload or plugin.cpu_offload
    try:
        return fsdp2_prepare_model(accelerator, model)
    finally:
        for name, value in original.items():
            setattr(plugin, name, value)


def _inference_config(accelerator: Accelerator) -> dict[str, Any]:
    """Return DeepSpeed's config of the run for a model that is not trained."""
    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    config["zero_optimization"].pop("offload_optimizer", None)
    return {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}


# ---- the gathered policy


@contextmanager
def gather_zero3(model: Any) -> Iterator[nn.Module]:
    """Yield the policy of a DeepSpeed engine with all weights gathered and without DeepSpeed's hooks."""
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    offload = model.optimizer.parameter_offload
    model.empty_partition_cache()  # it may hold weights that were prefetched for the next forward
    # DeepSpeed's context does not remove the hook that compares the ranks, so it is removed here and added again
    offload.fwd_pre_hook.remove()
    try:
        with unwrap_model_for_generation(model):
            yield model.module
    finally:

        def reset_step(*_: object) -> None:
            offload.get_param_coordinator().reset_step()

        offload.fwd_pre_hook = model.module.register_forward_pre_hook(reset_step, prepend=True)


@contextmanager
def gather_fsdp2(model: Any, accelerator: Accelerator) -> Iterator[nn.Module]:
    """Yield the unwrapped policy with all FSDP2 units gathered. A forward inside the context does not shard them."""
    plugin = accelerator.state.fsdp_plugin
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = set(plugin.transformer_cls_names_to_wrap or model._no_split_modules)
    embedding = model.get_input_embeddings()
    is_tied = embedding.weight is model.get_output_embeddings().weight
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield accelerator.unwrap_model(model)
    finally:
        for unit in units:
            unit.reshard()
            # as in Accelerate, the last norm and the LM head, also as a tied embedding, stay gathered until backward
            reshards = type(unit).__name__.removeprefix("FSDP") in layers or (unit is embedding and not is_tied)
            unit.set_reshard_after_forward(plugin.reshard_after_forward and reshards, recurse=False)


def iter_gathered(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, complete weight) of each weight. The weight is valid until the next one is yielded.

    All ranks must iterate over all weights.
    """
    for name, tensor in tensors.items():
        with gather_parameters(tensor):
            if isinstance(tensor, DTensor):
                # an offloaded weight moves to the device, where its collectives run
                on_device: Any = tensor.to(tensor.device_mesh.device_type)
                yield name, on_device.full_tensor()
            else:
                yield name, tensor


# ---- models that DeepSpeed shards while they are loaded


def gather_parameters(*tensors: Tensor) -> AbstractContextManager:
    """Return a context in which all of these weights are complete on each rank, if DeepSpeed has sharded them."""
    shards = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not shards:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(shards)


def copy_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a deep copy of a model. Weights that DeepSpeed has sharded are gathered, copied and sharded one by one."""
    duplicate = copy.deepcopy(model)
    config: dict[str, Any] | None = None
    for source, target in zip(model.parameters(), duplicate.parameters(), strict=True):
        if hasattr(source, "ds_id"):  # the deep copy of a sharded weight is empty
            import deepspeed

            with gather_parameters(source):
                target.data = source.detach().clone()
            config = config or _inference_config(accelerator)
            deepspeed.zero.Init(nn.ParameterList([target]), config_dict_or_path=config)
    return duplicate


# ---- checkpoints


def read_shards(checkpoint: Path) -> dict[str, Tensor]:
    """Return all weights of a checkpoint of FSDP2 or DeepSpeed by name, complete and on CPU.

    The weights of DeepSpeed are in float32.

    Raises:
        InputError: If shards are missing or damaged.
    """
    try:
        if (checkpoint / FSDP_FOLDER).is_dir():
            return _read_fsdp(checkpoint / FSDP_FOLDER)
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(StringIO()):
            return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    except ImportError as error:
        raise InputError(f"{checkpoint} is a checkpoint of DeepSpeed. To read it, install deepspeed") from error
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, CheckpointException) as error:
        problem = str(error).strip().rpartition("\n")[2].rstrip(".")
        raise InputError(f"{checkpoint}: the shards are not complete ({problem}). Use another checkpoint") from error


def _read_fsdp(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the files of torch.distributed.checkpoint, without the name of the object that has them."""
    reader = torch_checkpoint.FileSystemReader(folder)
    metadata = reader.read_metadata()
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return {str(metadata.planner_data[key][-1]): tensor for key, tensor in state.items()}
