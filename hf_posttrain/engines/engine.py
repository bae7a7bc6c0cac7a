"""Which engine runs (one process, DDP, FSDP2, DeepSpeed ZeRO-1, 2 or 3), and what each training step needs of it.

The rest is Accelerate's: `trainer.model_wrapped` is called like the model itself on every engine. What FSDP2 and ZeRO-3
need for weights that are cut over the ranks is in `sharded`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import sharded


def engine_name(accelerator: Accelerator) -> str:
    """single, ddp, fsdp2, zero1, zero2 or zero3."""
    if accelerator.state.deepspeed_plugin is not None:
        return f"zero{zero_stage(accelerator)}"
    return "fsdp2" if accelerator.is_fsdp2 else "single" if accelerator.num_processes == 1 else "ddp"


def zero_stage(accelerator: Accelerator) -> int:
    """0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.zero_stage


def shards_weights(accelerator: Accelerator) -> bool:
    """Does the engine cut the weights of a model over the ranks?"""
    return accelerator.is_fsdp2 or zero_stage(accelerator) == 3


def changes_weights(accelerator: Accelerator) -> bool:
    """Does the engine cut or cast weights when training begins, so that the policy cannot score (rightly) before?"""
    return engine_name(accelerator) not in ("single", "ddp")


def prepare_frozen(model: nn.Module, accelerator: Accelerator, offload: bool = False) -> nn.Module:
    """`model`, wrapped and cut as the policy is, or moved to the device where nothing is cut. Changes it in place.

    Under DeepSpeed it gets the policy's dtype: bf16 means bf16 weights there, not autocast.
    offload: shards live in CPU memory (the caller moves a model that is not cut by itself).
    """
    if shards_weights(accelerator):
        return sharded.prepare_frozen(model, accelerator, offload)
    casts = zero_stage(accelerator) and not getattr(model, "is_quantized", False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision) if casts else None
    return model.to(accelerator.device, dtype)


def gather_policy(model: nn.Module, accelerator: Accelerator) -> AbstractContextManager[nn.Module]:
    """The unwrapped policy with all its weights on each rank, without hooks: inside no forward waits for another rank.

    model: the wrapped policy. All ranks enter together; it costs one gather of all weights, and their memory.
    """
    # before training begins nothing is cut yet
    if zero_stage(accelerator) == 3 and hasattr(model, "module"):
        return sharded.gather_zero3(model)
    if isinstance(model, FSDPModule):
        return sharded.gather_fsdp2(model, accelerator)
    return nullcontext(accelerator.unwrap_model(model))
