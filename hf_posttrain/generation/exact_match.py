"""Evaluation by exact match: answer the prompts of the eval set greedily and compare final answers."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import datasets
import evaluate
import torch
import xxhash

from ..errors import InputError
from ..scoring.layouts import Prompt
from .final_answer import final_answer
from .rollout import truncate_at_terminal

logger = logging.getLogger(__name__)


class ExactMatch(evaluate.Metric):
    """Share of predictions whose final answer equals the reference's: {"exact_match": float in 0..1}."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        given = "predictions and references: texts that end in an answer"
        return evaluate.MetricInfo(description="", citation="", inputs_description=given, features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [final_answer(p) == final_answer(r) for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(hits) / max(len(hits), 1)}


def prompts_with_answers(rows: Iterable[dict]) -> tuple[list[Prompt], list[list[int]]]:
    """(prompts, their right answers) of prepared rows that have one: the chosen or desirable ones.

    Raises InputError for rows without prompts, or without answers.
    """
    answered = [(Prompt.from_row(row), gold) for row in rows if (gold := correct_answer(row))]
    if all(len(prompt) < 2 for prompt, _ in answered):
        raise InputError("eval_exact_match needs eval rows with a prompt and an answer")
    return [prompt for prompt, _ in answered], [gold for _, gold in answered]


def first_turn(row: dict) -> list[int]:
    """The answer of a prepared row, of a conversation of many turns the assistant's first; [] if it has none."""
    answer = row.get("chosen_ids") or row.get("completion_ids") or []
    mask = row.get("completion_mask") or []
    return answer[: mask.index(0)] if 0 in mask else answer


def correct_answer(row: dict) -> list[int]:
    """The same, but [] for an answer that is labelled false."""
    return first_turn(row) if row.get("label", True) else []


def select_complete_answers(trainer: Any, rows: Iterable[dict]) -> tuple[list[Prompt], list[list[int]], int]:
    """(prompts, their right answers, how many rows were left out) of prepared rows: of answers of several turns the
    first, and none that max_length has cut, whose final answer is not known. Raises what `prompts_with_answers` does.
    """
    prompts, gold = prompts_with_answers(rows)
    gold = [truncate_at_terminal(answer, trainer.terminal_ids) for answer in gold]
    whole = [n for n, answer in enumerate(gold) if answer[-1] in trainer.terminal_ids] or [*range(len(gold))]
    return [prompts[n] for n in whole], [gold[n] for n in whole], len(gold) - len(whole)


def answers_key(trainer: Any, rows: Any) -> Any:
    """A hash of the final answers that exact match looks for and of eval_max_completion_length, the same under every
    tokenizer; None without them.
    """
    if isinstance(rows, dict):
        return {name: answers_key(trainer, part) for name, part in rows.items()}
    if not trainer.args.eval_exact_match or "prompt_ids" not in (getattr(rows, "column_names", None) or ()):
        return None
    answers = trainer.tokenizer.batch_decode(select_complete_answers(trainer, rows)[1], skip_special_tokens=True)
    looked_for = [trainer.args.eval_max_completion_length, *map(final_answer, answers)]
    return xxhash.xxh3_64_hexdigest(repr(looked_for).encode())[:12]


def exact_match(trainer: Any, rows: datasets.Dataset) -> float:
    """The share of prompts whose greedy answer has the final answer of the data (of its chosen or desirable answer).

    Raises InputError for rows without a prompt or an answer.
    """
    prompts, gold, cut = select_complete_answers(trainer, rows)
    if cut:
        said = "eval_exact_match: %d of %d answers of the data do not end: they are left out"
        logger.warning(said, cut, cut + len(gold))
    wanted = sum(rows["label"]) if "label" in rows.column_names else len(rows)
    if lacking := wanted - cut - len(gold):
        logger.warning("eval_exact_match: %d of %d rows have no right answer: they are left out", lacking, wanted)
    args = trainer.args
    accelerator = trainer.accelerator
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
