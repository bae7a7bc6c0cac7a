"""Evaluation by exact match: answer the prompts of the eval set greedily and compare final answers."""

import re
from collections.abc import Iterable
from decimal import Context, InvalidOperation
from functools import partial
from typing import Any

import datasets
import evaluate
import torch

from ..errors import InputError

_PATTERNS = (
    r"####\s*(\S+)",
    r"\\boxed\{([^{}]*)\}",
    r"(?:\bA\s*:|\b(?i:answer)\s*(?::|is\b\s*:?))[\s*]*([-$]*[\d.,]*\d)",  # an "A" or "answer" alone is a word
    r"-?\d[\d,]*(?:\.\d+)?",  # any number
)
_EXACT = Context(prec=999, Emax=999, Emin=-999, traps=[InvalidOperation])  # finite: 1e999999999 is not written out


def final_answer(text: str) -> str:
    r"""The final answer of a solution: after `####`, in `\boxed{}`, or after `A:`, `answer:` or "answer is"; else its
    last number.

    Thousands separators, currency signs and a trailing period or `.0` do not count: "$1,200.00" is "1200".
    """
    # the marked answer, by the first mark that is there; the last one counts, since solutions may try several
    for pattern in _PATTERNS:
        if found := re.findall(pattern, text):
            return _normal(found[-1])
    return _normal(text)


def _normal(answer: str) -> str:
    """One spelling for equal answers."""
    answer = answer.strip().strip("$.").replace(",", "").replace("$", "")
    try:
        return f"{_EXACT.create_decimal(answer).normalize(_EXACT):f}"
    except InvalidOperation:
        return answer.lower()


class ExactMatch(evaluate.Metric):
    """Share of predictions whose final answer equals the reference's: {"exact_match": float in 0..1}."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        given = "predictions and references: texts that end in an answer"
        return evaluate.MetricInfo(description="", citation="", inputs_description=given, features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [final_answer(p) == final_answer(r) for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(hits) / max(len(hits), 1)}


def answerable(rows: Iterable[dict]) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, their right answers) of prepared rows: the chosen or desirable ones.

    Raises InputError for rows without a prompt or an answer.
    """
    kept = [row for row in rows if row.get("label", True)]
    prompts = [row["prompt_ids"] for row in kept]
    gold = [row["chosen_ids"] if "chosen_ids" in row else row["completion_ids"] for row in kept]
    if not kept or not all(gold) or all(len(prompt) < 2 for prompt in prompts):
        raise InputError("eval_exact_match needs eval rows with a prompt and an answer")
    return prompts, gold


def exact_match(trainer: Any, rows: datasets.Dataset) -> float:
    """The share of prompts whose greedy answer has the final answer of the data (of its chosen or desirable answer).

    Raises InputError for rows without a prompt or an answer.
    """
    prompts, gold = answerable(rows)
    args, accelerator = trainer.args, trainer.accelerator
    # each rank answers its share of the rows; hits and answers are added up over the ranks
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    answers = trainer.generate(prompts[mine], args.eval_max_completion_length, batch_size=args.eval_batch_size)
    decode = partial(trainer.tokenizer.batch_decode, skip_special_tokens=True)
    hits = torch.zeros(2, device=accelerator.device)
    if answers:  # a rank may have none
        score = ExactMatch().compute(predictions=decode(answers), references=decode(gold[mine]))["exact_match"]
        hits += torch.tensor([score * len(answers), len(answers)], device=accelerator.device)
    right, count = accelerator.reduce(hits, "sum").tolist()
    return right / count
