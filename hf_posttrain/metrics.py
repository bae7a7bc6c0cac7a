"""Metrics: exact global means, and the exact-match score of generated answers.

Meter         (sum, count) pairs on device; one reduction each time they are logged
ExactMatch    an `evaluate.Metric` that needs no network: does the final answer equal the reference's?
"""

import re

import datasets
import evaluate
import torch
from torch import Tensor


class Meter:
    """Named (sum, count) pairs. Every rank adds the same names in the same order; counts may be zero."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values of any shape, weighted; weight 0 leaves a value out even where it is NaN."""
        values = values.detach().double() if values.device.type != "mps" else values.detach().float()
        weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
        values = torch.where(weights == 0, 0.0, values * weights)
        pair = torch.stack([values.sum(), weights.sum()])
        self.totals[name] = self.totals[name] + pair if name in self.totals else pair

    def averages(self, accelerator=None) -> dict[str, float]:
        """Global means since the last call; a name that nothing was counted for is left out. Empties the meter."""
        if not self.totals:
            return {}
        totals = torch.stack(list(self.totals.values()))  # [names, 2]
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.reduce(totals, "sum")
        pairs = dict(zip(self.totals, totals.tolist(), strict=True))
        self.totals = {}
        return {name: total / count for name, (total, count) in pairs.items() if count}


def final_answer(text: str) -> str:
    r"""The final answer of a solution: after `####`, in `\boxed{}`, or after `A:` / "answer is"; else its last number.

    Thousands separators, currency signs and a trailing period or `.0` do not count: "$1,200.00" is "1200".
    """
    for pattern in (r"####\s*(\S+)", r"\\boxed\{([^{}]*)\}", r"(?:\bA|[Aa]nswer(?:\s+is)?)\s*:?\s*\$?(-?[\d.,]*\d)"):
        found = re.findall(pattern, text)
        if found:
            return _normal(found[-1])
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return _normal(numbers[-1] if numbers else text)


def _normal(answer: str) -> str:
    """One spelling for equal answers."""
    answer = answer.strip().strip("$.").replace(",", "").replace("$", "")
    try:
        return f"{float(answer):.10g}"
    except ValueError:
        return answer.lower()


class ExactMatch(evaluate.Metric):
    """Share of predictions whose final answer equals the reference's: {"exact_match": float in 0..1}."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Exact match of the final answer",
            citation="",
            inputs_description="predictions and references: texts that end in an answer",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [final_answer(p) == final_answer(r) for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(hits) / max(len(hits), 1)}
