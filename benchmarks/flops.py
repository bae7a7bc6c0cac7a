"""Useful arithmetic of a training step, and how fast this machine can multiply.

Useful: every prompt token once through the layers, every answer token once through the layers and the head, in each
pass that the method asks for; a backward is twice its forward, or once where the weights are frozen (LoRA). What an
implementation does beyond that (a prompt twice, padding, logits that nobody reads, recomputing) earns nothing.
"""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_posttrain.methods import METHODS

from .setting import PAIRED


@dataclass(frozen=True)
class Costs:
    """FLOPs of a model's forward."""

    token: float
    """Through the layers, for each token: 2 x their weights."""
    pair: float
    """Of attention, for each pair of a token and one that it sees."""
    logit: float
    """Through the head, for each token: 2 x vocabulary x hidden size."""
    backward: float
    """Of a trained pass, forward and backward, as a multiple of its forward."""

    @classmethod
    def of(cls, config: Any, weights: int, lora: bool) -> "Costs":
        """weights: of the whole model without adapters, embedding and head included (counted once where tied)."""
        head = config.vocab_size * config.hidden_size
        layers = weights - head * (1 if config.tie_word_embeddings else 2)
        width = config.num_attention_heads * config.head_dim
        return cls(2.0 * layers, 4.0 * width * config.num_hidden_layers, 2.0 * head, 2.0 if lora else 3.0)

    def forward(self, prompt: int, *answers: int, context: int = 0) -> float:
        """A prompt and its answers, behind `context` tokens that were computed before."""
        seen = context + prompt
        pairs = prompt * (context + prompt / 2) + sum(n * (seen + n / 2) for n in answers)
        return self.token * (prompt + sum(answers)) + self.pair * pairs + self.logit * sum(answers)


def of_row(costs: Costs, method: str, row: dict[str, Any], cached: bool) -> float:
    """FLOPs that a prepared row is worth; `completion` (a number) stands for the length of an OPD rollout."""
    prompt = len(row["prompt_ids"])
    second = 0 if cached else 1
    if method in PAIRED:
        answers = len(row["chosen_ids"]), len(row["rejected_ids"])
        reference = second if METHODS[method].second == "reference" else 0
        costs = replace(costs, logit=0.0) if method == "rm" else costs
        return (costs.backward + reference) * costs.forward(prompt, *answers)
    own = row["completion"] if method == "opd" else len(row["completion_ids"])
    trained = costs.backward * costs.forward(prompt, own)
    if method == "kto":
        other = len(row["mismatch_ids"])
        return trained + costs.forward(0, other, context=prompt) + second * costs.forward(prompt, own, other)
    if method == "kd" and cached:  # the teacher's head reads its hidden states
        return trained + costs.logit * own
    passes = {"sft": 0, "kd": 1, "opd": 2}  # the teacher, and generation
    return trained + passes[method] * costs.forward(prompt, own)


def machine_rate(device: str, dtype: torch.dtype, size: int | None = None, repeats: int = 9) -> float:
    """FLOP/s of a large square matrix product (median)."""
    size = size or (8192 if device == "cuda" else 2048)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        left @ right
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / statistics.median(seconds[1:])


DATASHEET = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Part of a card's name -> dense bf16 FLOP/s by its vendor (SXM), the usual denominator of model FLOPs utilisation."""


def datasheet_rate(device: str) -> float | None:
    """The card's bf16 FLOP/s by DATASHEET; None on CPU and for other cards."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((rate for card, rate in DATASHEET.items() if card in name), None)


def wait(device: str) -> None:
    """Until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
