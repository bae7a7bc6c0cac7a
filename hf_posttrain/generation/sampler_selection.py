"""The way in which a model generates, and the check that its answers are those of its own forward."""

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
from ..scoring.parity_check import reference_logits, example_ids, attention_spans, tolerance, is_within_tolerance
from ..scoring.rotary import rope_switch_length
from .graphs import supports_cuda_graphs
from .hf_generate import NONFINITE_LOGITS

logger = logging.getLogger(__name__)
GRAPHS = "graphs"
DECODE = "decode"
HF_BATCHED = "batches"
HF_SINGLE = "alone"
"""`rollout.decode`, by CUDA graphs or not; transformers' own generate, of left-padded batches; that with each prompt
alone."""
NATIVE = GRAPHS, DECODE
Answer = Callable[[str, list[list[int]]], list[list[int]]]
"""(way, prompts) -> a few greedy tokens after each."""


def select_backend(model: nn.Module, longest: int, answer: GenerateBatch) -> tuple[str, float]:
    """The first way whose greedy answers are those of whole forwards, and for how long rows, in tokens, that is proven.

    longest: row that is wanted now. Raises InputError where all ways give other answers than the model's own.
    """
    inner = causal_lm(model)
    beyond = [size for size in attention_spans(inner) if size >= longest]
    proven = min(beyond) if beyond else math.inf
    if (switch := rope_switch_length(inner)) and longest > switch:
        return HF_SINGLE, proven  # a row's rotary frequencies depend on its length: in a batch on that of the longest
    if not reference_logits(model, example_ids(inner)(3), 1).amax().isfinite():
        raise RuntimeError(NONFINITE_LOGITS)
    limits = 10 * tolerance(inner), 1.0
    why_not = decode_obstacle(inner)
    own = [] if why_not else [GRAPHS] * supports_cuda_graphs(inner) + [DECODE]
    for way in [*own, HF_BATCHED, HF_SINGLE]:  # the quick ones first
        right = is_within_tolerance(partial(_logit_gap, model, longest, way, answer), limits, f"answers, {way}")
        if right and (way != GRAPHS or getattr(inner, "can_capture_graph", True)):
            if way == HF_SINGLE:
                said = "%s generates wrongly in padded batches: its prompts are answered one by one"
                logger.warning(said, type(inner).__name__)
            elif way == HF_BATCHED:
                why = why_not or "its answers by our own decoding are not those of its forward"
                logger.info("%s is sampled by transformers' generate, which is slower: %s", type(inner).__name__, why)
            return way, proven
    raise InputError(f"{type(inner).__name__} generates other answers with a cache than its own forward has")


def decode_obstacle(model: PreTrainedModel) -> str:
    """Return why a model is not decoded by `rollout.decode`; empty where it says that it keeps plain keys and values,
    and no more, between steps.
    """
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in getattr(model, "peft_config", {}).values()):
        return "activated LoRA is switched on by what PEFT's own generate sees in the prompt"
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if own is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares the inputs of each step by itself"
    if not cache_argument(model):
        return "its forward takes no cache by a known name"
    layers = DynamicCache(config=model.config).layers
    other = {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    return f"its cache has other layers: {', '.join(sorted(other))}" if other or not layers else ""


def _logit_gap(model: nn.Module, longest: int, way: str, answer: GenerateBatch, _: bool) -> float:
    """How much less likely the answers' tokens are than the best ones of whole forwards: the largest, in logits."""
    inner = causal_lm(model)
    draw = example_ids(inner)
    sizes = {1, 3, 6, 12, 16} | {size + 2 for size in attention_spans(inner) if size + 5 < longest}
    prompts = [draw(size) for size in sorted(sizes)]
    gap = 0.0
    found = [answer(way, [prompt])[0] for prompt in prompts] if way == HF_SINGLE else answer(way, prompts)
    for prompt, ids in zip(prompts, found, strict=True):
        logits = reference_logits(model, [*prompt, *ids[:-1]], len(ids))
        chosen = logits.gather(-1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        gap = max(gap, (logits.amax(-1) - chosen).max().item())
    return gap
