"""Evaluation by exact match: prompts of the eval set are answered greedily, and final answers are compared."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import evaluate
import torch
import xxhash

from ..errors import InputError
from ..scoring.layouts import Prompt
from .final_answer import final_answer
from .rollout import truncate_at_terminal

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface

logger = logging.getLogger(__name__)


class ExactMatch(evaluate.Metric):
    """Share of predictions whose final answer equals that of the reference: {"exact_match": float in 0..1}."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        inputs = "predictions and references: texts that end with an answer"
        return evaluate.MetricInfo(description="", citation="", inputs_description=inputs, features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [final_answer(p) == final_answer(r) for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(hits) / max(len(hits), 1)}


def prompts_with_answers(rows: Iterable[dict]) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts and the correct answers (the chosen or desirable ones) of prepared rows that have one.

    Raises:
        InputError: If no row has a prompt and an answer.
    """
    pairs = [(Prompt.from_row(row), answer) for row in rows if (answer := correct_answer(row))]
    if all(len(prompt) < 2 for prompt, _ in pairs):
        raise InputError("eval_exact_match requires eval rows with a prompt and an answer")
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def first_turn(row: dict) -> list[int]:
    """Return the answer of a prepared row, for a conversation its first turn by the assistant, or [] if it has none."""
    answer = row.get("chosen_ids") or row.get("completion_ids") or []
    mask = row.get("completion_mask") or []
    return answer[: mask.index(0)] if 0 in mask else answer


def correct_answer(row: dict) -> list[int]:
    """Return the answer of a prepared row as `first_turn`, but [] for an answer that is labeled false."""
    return first_turn(row) if row.get("label", True) else []


def select_complete_answers(
    trainer: "TrainerInterface", rows: Iterable[dict]
) -> tuple[list[Prompt], list[list[int]], int]:
    """Return the prompts and correct answers of prepared rows, and the number of omitted rows.

    Rows are omitted if max_length has truncated the answer, whose final answer is then unknown. Of an answer with
    several turns, only the first is used.

    Raises:
        InputError: As `prompts_with_answers`.
    """
    prompts, answers = prompts_with_answers(rows)
    answers = [truncate_at_terminal(answer, trainer.terminal_ids) for answer in answers]
    complete = [n for n, answer in enumerate(answers) if answer[-1] in trainer.terminal_ids] or [*range(len(answers))]
    return [prompts[n] for n in complete], [answers[n] for n in complete], len(answers) - len(complete)


def answers_key(trainer: "TrainerInterface", rows: Any) -> Any:
    """Return a hash of the expected final answers and of eval_max_completion_length, or None without exact match.

    The hash does not depend on the tokenizer. For a dict of data sets, the result is a dict of hashes.
    """
    if isinstance(rows, dict):
        return {name: answers_key(trainer, part) for name, part in rows.items()}
    if not trainer.args.eval_exact_match or "prompt_ids" not in (getattr(rows, "column_names", None) or ()):
        return None
    answers = trainer.tokenizer.batch_decode(select_complete_answers(trainer, rows)[1], skip_special_tokens=True)
    expected = [trainer.args.eval_max_completion_length, *map(final_answer, answers)]
    return xxhash.xxh3_64_hexdigest(repr(expected).encode())[:12]


def exact_match(trainer: "TrainerInterface", rows: datasets.Dataset) -> float:
    """Return the share of prompts whose greedy answer has the final answer of the data (the chosen or desirable one).

    Raises:
        InputError: If no row has a prompt and an answer.
    """
    prompts, references, truncated = select_complete_answers(trainer, rows)
    if truncated:
        message = "eval_exact_match: %d of %d answers of the data are truncated, and are left out"
        logger.warning(message, truncated, truncated + len(references))
    expected = sum(rows["label"]) if "label" in rows.column_names else len(rows)
    if missing := expected - truncated - len(references):
        logger.warning("eval_exact_match: %d of %d rows have no correct answer, and are left out", missing, expected)

    args = trainer.args
    accelerator = trainer.accelerator
    # each rank answers its share of the rows, and the counts of hits and answers are summed over the ranks
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    answers = trainer.generate(prompts[share], args.eval_max_completion_length, batch_size=args.eval_batch_size)
    decode = partial(trainer.tokenizer.batch_decode, skip_special_tokens=True)
    hits = torch.zeros(2, device=accelerator.device)
    if answers:  # a rank may have none
        score = ExactMatch().compute(predictions=decode(answers), references=decode(references[share]))["exact_match"]
        hits += torch.tensor([score * len(answers), len(answers)], device=accelerator.device)
    correct, count = accelerator.reduce(hits, "sum").tolist()
    return correct / count
