"""Models, batches and inputs of the LM head that several parts measure."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from hf_posttrain.batching.micro_batch import MicroBatch
from hf_posttrain.scoring import attention_selection, forward
from hf_posttrain.scoring.head import LogProb

from ..setting import configured, random_model
from .settings import Settings


def build(settings: Settings, implementation: str = "sdpa", ours: bool = True) -> Any:
    """Return a model of the 0.6B shape in bf16, which takes a scorer.

    Args:
        implementation: transformers' name of the attention implementation.
        ours: Replace it by the one that training chooses on this device.
    """
    device = torch.device(settings.device)
    spec = {"device": settings.device, "dtype": "bfloat16", "attention": implementation}
    model = random_model(configured(settings.shape("qwen3-0.6b"), settings.vocabulary), spec)
    forward.enable_scoring(model)
    attention_selection.disable_cudnn_attention(device)
    if ours:
        attention_selection.choose_attention(model, device)
    return model


def score_and_backward(model: Any, batch: MicroBatch) -> Tensor:
    """Return the log-probabilities of the scored tokens, [N], after the backward of their sum."""
    model.zero_grad()
    values = forward.score(model, batch, LogProb(batch.targets)).value
    values.sum().backward()
    return values.detach()


def first_gradient(model: Any) -> Tensor:
    """Return the gradient of the first layer's query projection, which depends on attention in all layers."""
    return model.model.layers[0].self_attn.q_proj.weight.grad


def preference_lengths(count: int, seed: int = 0) -> list[list[int]]:
    """Return the lengths of `count` prompts and of two answers to each."""
    draw = random.Random(seed)
    return [[draw.randrange(50, 300), draw.randrange(50, 400), draw.randrange(50, 400)] for _ in range(count)]


def head_inputs(settings: Settings, tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [N, H], the weight [V, H] and targets [N] of an LM head, with values that bf16 represents.

    Targets have a probability of about one half, so that a gradient depends on the softmax.
    """
    torch.manual_seed(0)
    device = torch.device(settings.device)
    weight = torch.randn(settings.vocabulary, size, device=device) / size**0.5
    targets = torch.randint(settings.vocabulary, (tokens,), device=device)
    hidden = math.log(settings.vocabulary) * weight[targets] + torch.randn(tokens, size, device=device)
    rounded = [each.to(torch.bfloat16).to(dtype).requires_grad_() for each in (hidden, weight)]
    return rounded[0], rounded[1], targets
