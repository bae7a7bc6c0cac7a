"""Quicker layers, where asked for: Liger's kernels in them, and torch.compile of each.

Both leave the head alone, which is fused here already, and both apply to a second model too.
"""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel

from ..errors import InputError, name_hint
from ..scoring import forward
from ..scoring.attention import BY_SEGMENT
from ..scoring.head import HALF_DTYPES
from ..scoring.varlen import has_varlen_kernel

logger = logging.getLogger(__name__)
RECOMPILE_LIMIT = 32  # of one layer's code, beyond which torch would run it as written


def apply_liger_and_compile(model: nn.Module, args: TrainingArguments, second: bool = False) -> None:
    """Give a model's layers Liger's kernels, and compile them, where the Config says so. Raises InputError where that
    cannot be; a `second` model is left as it is then, with a line in the log.
    """
    try:
        _apply(forward.causal_lm(model), args)
    except InputError as error:
        if not second:
            raise
        logger.info("the second model is not sped up: %s", error)


def warn_if_not_compiled(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Say where torch_compile does nothing: in activation checkpointing dynamo compiles a layer whole or not at all,
    and attention piece by piece is called as written.
    """
    half = args.bf16 or args.fp16 or model.dtype in HALF_DTYPES
    pieces = model.config.get_text_config()._attn_implementation == BY_SEGMENT
    pieces = pieces and not (half and has_varlen_kernel(args.device))
    if args.torch_compile and args.activation_checkpointing and pieces:
        logger.warning(
            "torch_compile does nothing here: with activation_checkpointing only layers whose attention is one kernel "
            "can be compiled, on a GPU in bf16 (from Ampere and torch 2.11 on); switch one of the two off"
        )


def _apply(inner: PreTrainedModel, args: Any) -> None:
    if args.use_liger_kernel:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

        name = type(inner).__name__
        if inner.config.model_type not in KNOWN:
            raise InputError(f"use_liger_kernel: Liger has no kernels for {name}: leave it out")
        own = inspect.signature(KNOWN[inner.config.model_type]).parameters.keys() - {"model"}
        for kernel in args.liger_kernel_config.keys() - own:
            if "cross_entropy" not in kernel:  # of the head, which the Config switched off
                raise InputError(f"liger_kernel_config: Liger has no {kernel} for {name}{name_hint(kernel, own)}")
        try:
            apply_liger_kernel(inner, args.liger_kernel_config)
        except ValueError as error:  # an activation that it has not, for one
            raise InputError(f"use_liger_kernel: {name}: {error}") from error
    if args.torch_compile:
        logger.info("compiling the decoder layers (%s): the first steps take longer", args.torch_compile_backend)
        # the same code is compiled for kinds of layers, for two models, with gradient and without: 8 are soon too few
        limits = torch.compiler.config
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
        for layer in decoder_layers(inner):
            layer.compile(dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def decoder_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The repeated layers of a causal LM, as FSDP cuts it. Raises InputError where it names none."""
    names = getattr(model, "_no_split_modules", None) or ()
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise InputError(f"torch_compile: {type(model).__name__} names no layers that could be compiled: leave it out")
    yield from found
