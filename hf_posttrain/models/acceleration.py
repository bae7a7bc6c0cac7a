"""Optional acceleration of layers: Liger kernels, and torch.compile of each layer.

Neither changes the head, which this package fuses already. Both apply to a second model, too.
"""

import inspect
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from ..errors import InputError, name_hint
from ..scoring import forward
from ..scoring.attention import BY_SEGMENT
from ..scoring.head import HALF_DTYPES
from ..scoring.varlen import has_varlen_kernel

if TYPE_CHECKING:
    from ..trainer.config import PostTrainConfig

logger = logging.getLogger(__name__)
RECOMPILE_LIMIT = 32
"""Compilations of the code of one layer. Above this number, torch would run the layer without compilation."""


def apply_liger_and_compile(model: nn.Module, args: "PostTrainConfig", second: bool = False) -> None:
    """Apply Liger kernels to the layers of a model and compile them, as the Config requests.

    Args:
        model: The model.
        args: The Config.
        second: Whether it is a second model, which is left unchanged with a log line if it is not supported.

    Raises:
        InputError: If the model is not supported and is not a second model.
    """
    try:
        _apply(forward.causal_lm(model), args)
    except InputError as error:
        if not second:
            raise
        logger.info("the second model is not accelerated: %s", error)


def warn_if_not_compiled(model: PreTrainedModel, args: "PostTrainConfig") -> None:
    """Warn if torch_compile has no effect.

    Under activation checkpointing, dynamo compiles a layer completely or not at all, and attention by segment is not
    compiled.
    """
    half = args.bf16 or args.fp16 or model.dtype in HALF_DTYPES
    by_segment = model.config.get_text_config()._attn_implementation == BY_SEGMENT
    by_segment = by_segment and not (half and has_varlen_kernel(args.device))
    if args.torch_compile and args.activation_checkpointing and by_segment:
        logger.warning(
            "torch_compile has no effect. With activation_checkpointing, only layers whose attention is one kernel can "
            "be compiled, on a GPU in bf16 (from Ampere and torch 2.11 on). Disable one of the two options"
        )


def _apply(model: PreTrainedModel, args: "PostTrainConfig") -> None:
    if args.use_liger_kernel:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        name = type(model).__name__
        if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise InputError(f"use_liger_kernel is not supported for {name}. Remove it")
        apply_function = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
        supported = inspect.signature(apply_function).parameters.keys() - {"model"}
        kernels = args.liger_kernel_config or {}
        for kernel in kernels.keys() - supported:
            if "cross_entropy" not in kernel:  # kernels of the head, which the Config has disabled
                raise InputError(f"liger_kernel_config: Liger has no {kernel} for {name}{name_hint(kernel, supported)}")
        try:
            apply_liger_kernel(model, args.liger_kernel_config)
        except ValueError as error:  # such as an unsupported activation
            raise InputError(f"use_liger_kernel: {name}: {error}") from error
    if args.torch_compile:
        logger.info("compiling the decoder layers (%s): the first steps take longer", args.torch_compile_backend)
        # the same code is compiled for each kind of layer, for two models, with gradient and without: 8 are not enough
        limits = torch.compiler.config
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
        for layer in decoder_layers(model):
            layer.compile(dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def decoder_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the repeated layers of a causal LM, which are the units of FSDP. Raise InputError if it names none."""
    names = getattr(model, "_no_split_modules", None) or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise InputError(
            f"torch_compile is not supported for {type(model).__name__}, which names no layers to compile. Remove it"
        )
    yield from layers
