"""Selection of the backend that generates for a model, after a check that it agrees with full forwards."""

import logging
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import InputError
from ..scoring.forward import cache_argument, causal_lm
from ..scoring.parity_check import (
    attention_spans,
    check_causal,
    example_ids,
    is_within_tolerance,
    reference_logits,
    tolerance,
)
from ..scoring.rotary import rope_switch_length
from .graphs import supports_cuda_graphs
from .hf_generate import NONFINITE_LOGITS

logger = logging.getLogger(__name__)
GRAPHS = "graphs"
"""`rollout.decode` with CUDA graphs."""
DECODE = "decode"
"""`rollout.decode` without CUDA graphs."""
HF_BATCHED = "batches"
"""The `generate` of transformers with left-padded batches."""
HF_SINGLE = "alone"
"""The `generate` of transformers with one prompt at a time."""
NATIVE = GRAPHS, DECODE
GenerateBatch = Callable[[str, list[list[int]]], list[list[int]]]
"""(backend, prompts) -> a few greedy tokens for each prompt."""


def select_backend(model: nn.Module, longest: int, generate_batch: GenerateBatch) -> tuple[str, float]:
    """Return the fastest backend whose greedy tokens agree with full forwards.

    Args:
        model: The model.
        longest: Length of the longest row to generate, in tokens.
        generate_batch: Generates with a backend.

    Returns:
        The backend, and the maximum length of a row, in tokens, for which it is checked.

    Raises:
        InputError: If the model is not causal, or no backend agrees with full forwards.
    """
    inner = causal_lm(model)
    longer_spans = [size for size in attention_spans(inner) if size >= longest]
    checked_length = min(longer_spans) if longer_spans else math.inf
    if (switch_length := rope_switch_length(inner)) and longest > switch_length:
        # the rotary frequencies of a row depend on its length, and in a batch on that of the longest row
        return HF_SINGLE, checked_length
    ids = example_ids(inner)(8)
    logits = reference_logits(model, ids, len(ids))
    if not logits.amax(-1).isfinite().all():
        raise RuntimeError(NONFINITE_LOGITS)
    tolerances = 10 * tolerance(inner), 1.0
    check_causal(model, ids, logits, tolerances[0])
    obstacle = decode_obstacle(inner)
    native = [] if obstacle else [GRAPHS] * supports_cuda_graphs(inner) + [DECODE]
    name = type(inner).__name__
    for backend in [*native, HF_BATCHED, HF_SINGLE]:  # the fastest first
        gap = partial(_logit_gap, model, longest, backend, generate_batch)
        correct = is_within_tolerance(gap, tolerances, f"generation, {backend}")
        if correct and (backend != GRAPHS or getattr(inner, "can_capture_graph", True)):
            if backend == HF_SINGLE:
                logger.warning("%s generates wrong tokens in padded batches, so prompts are answered one by one", name)
            elif backend == HF_BATCHED:
                reason = obstacle or "our own decoding does not agree with its forward"
                logger.info("%s is sampled by transformers' generate, which is slower: %s", name, reason)
            return backend, checked_length
    raise InputError(f"{name} generates other tokens with a cache than by full forwards. It cannot be sampled from")


def decode_obstacle(model: PreTrainedModel) -> str:
    """Return why `rollout.decode` cannot generate for a model, or an empty string.

    It supports models that declare that they keep plain keys and values between steps, and nothing else.
    """
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in getattr(model, "peft_config", {}).values()):
        return "activated LoRA depends on the prompt, which only PEFT's own generate reads"
    prepare_inputs = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare_inputs is not GenerationMixin.prepare_inputs_for_generation:
        return "it has its own method that prepares the inputs of each step"
    if not cache_argument(model):
        return "its forward has no argument with a known name for a cache"
    layers = DynamicCache(config=model.config).layers
    unsupported = {
        type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
    }
    return f"its cache has other layers: {', '.join(sorted(unsupported))}" if unsupported or not layers else ""


def _logit_gap(model: nn.Module, longest: int, backend: str, generate_batch: GenerateBatch, _: bool) -> float:
    """Return the largest difference between the best logit of a full forward and that of the generated token."""
    inner = causal_lm(model)
    random_ids = example_ids(inner)
    sizes = {1, 3, 6, 12, 16} | {size + 2 for size in attention_spans(inner) if size + 5 < longest}
    prompts = [random_ids(size) for size in sorted(sizes)]
    gap = 0.0
    if backend == HF_SINGLE:
        completions = [generate_batch(backend, [prompt])[0] for prompt in prompts]
    else:
        completions = generate_batch(backend, prompts)
    for prompt, ids in zip(prompts, completions, strict=True):
        logits = reference_logits(model, [*prompt, *ids[:-1]], len(ids))
        generated = logits.gather(-1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        gap = max(gap, (logits.amax(-1) - generated).max().item())
    return gap
