"""Name of the engine (one process, DDP, FSDP2, DeepSpeed ZeRO-1, 2 or 3), and its requirements in each training step.

Accelerate provides the rest: `trainer.model_wrapped` is called like the model on every engine. `sharded` has the
functions that FSDP2 and ZeRO-3 require for sharded weights.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import sharded


def engine_name(accelerator: Accelerator) -> str:
    """Return the name of the engine: single, ddp, fsdp2, zero1, zero2 or zero3."""
    if accelerator.state.deepspeed_plugin is not None:
        return f"zero{zero_stage(accelerator)}"
    return "fsdp2" if accelerator.is_fsdp2 else "single" if accelerator.num_processes == 1 else "ddp"


def zero_stage(accelerator: Accelerator) -> int:
    """Return the ZeRO stage, or 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.zero_stage


def shards_weights(accelerator: Accelerator) -> bool:
    """Return whether the engine shards the weights of a model over the ranks."""
    return accelerator.is_fsdp2 or zero_stage(accelerator) == 3


def changes_weights(accelerator: Accelerator) -> bool:
    """Return whether the engine shards or casts weights when training begins.

    The policy cannot score correctly before that.
    """
    return engine_name(accelerator) not in ("single", "ddp")


def prepare_frozen(model: nn.Module, accelerator: Accelerator, offload: bool = False) -> nn.Module:
    """Wrap and shard a frozen model as the policy is, or move it to the device if the engine does not shard weights.

    Under DeepSpeed the model gets the dtype of the policy, since bf16 means bf16 weights there, not autocast.

    Args:
        model: The model, which is changed in place.
        accelerator: The accelerator of the run.
        offload: Whether shards are kept in CPU memory. The caller moves a model that is not sharded.
    """
    if shards_weights(accelerator):
        return sharded.prepare_frozen(model, accelerator, offload)
    casts = zero_stage(accelerator) and not getattr(model, "is_quantized", False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision) if casts else None
    return model.to(accelerator.device, dtype)


def gather_policy(model: nn.Module, accelerator: Accelerator) -> AbstractContextManager[nn.Module]:
    """Return a context with the unwrapped policy, all weights of which are on each rank.

    Hooks are removed, so that no forward in the context waits for another rank. All ranks must enter the context
    together. It costs one gather of all weights, and their memory.

    Args:
        model: The wrapped policy.
        accelerator: The accelerator of the run.
    """
    # weights are not sharded before training begins
    if zero_stage(accelerator) == 3 and hasattr(model, "module"):
        return sharded.gather_zero3(model)
    if isinstance(model, FSDPModule):
        return sharded.gather_fsdp2(model, accelerator)
    return nullcontext(accelerator.unwrap_model(model))
