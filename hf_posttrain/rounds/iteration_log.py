"""Logs of a round, and files of the rounds over all prompts in output_dir."""

import json
import logging
import math
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch

from ..trainer.output_dir import write_json
from .judges.question import answer_row
from .pairing import SelectedRows
from .sample_and_judge import FOLDER, ScoredCompletions

if TYPE_CHECKING:
    from .iterative_trainer import InRounds

logger = logging.getLogger(__name__)
SUMMARY_FILE = "rounds.json"


def log_round(
    trainer: "InRounds",
    prompts: datasets.Dataset,
    judged: list[ScoredCompletions],
    selected: SelectedRows,
    seconds: float,
) -> None:
    """Log the round that the trainer has just sampled. All ranks call it.

    Rounds over all prompts also write N.jsonl, with all answers, and rounds.json.

    Args:
        trainer: The trainer.
        prompts: Prepared rows of the prompts of the round.
        judged: Answers and scores of each prompt.
        selected: Rows that were made of the answers.
        seconds: Time that the round took before training.
    """
    summary = summarize(judged, trainer.terminal_ids)
    number = trainer.round.number + 1
    summary |= {"rows": float(selected.count), "left_out": float(selected.left_out.total())}
    if trainer.section.steps:
        for name, value in summary.items():
            trainer.meters["train"].add(f"rounds/{name}", torch.tensor(value, device=trainer.args.device))
        return

    if selected.left_out:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in selected.left_out.most_common())
        message = "round %d: %d of %d prompts give no row (%s)"
        logger.info(message, number, selected.left_out.total(), len(prompts), reasons)
    labels = {row.label for rows in selected.rows for row in rows} - {None}
    if len(labels) == 1:
        message = "round %d: all %d labeled answers are %s. One label alone does not define a preference"
        logger.warning(message, number, selected.count, "good" if True in labels else "bad")
    trainer.log({"rounds/round": number} | {f"rounds/{name}": value for name, value in summary.items()})
    if not trainer.args.should_save:
        return

    folder = Path(trainer.args.output_dir, FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as file:
        for row in _answer_rows(trainer, prompts, judged, selected):
            print(json.dumps(row, ensure_ascii=False), file=file)

    summary |= {name: int(summary[name]) for name in ("rows", "left_out")}
    means = [np.mean(scores) for scores in known_scores(judged) if scores]
    error = {"score_error": round(float(np.std(means, ddof=1) / len(means) ** 0.5), 6)} if len(means) > 1 else {}
    entry = {
        "round": number,
        "step": trainer.state.global_step,
        **summary,
        **error,
        "seconds": round(seconds, 1),
        "unjudged": sum(score is None for completions in judged for score in completions.scores),
        "reasons": dict(selected.left_out),
    }
    earlier = [past for past in trainer.round.summaries if past["round"] < number]
    trainer.round.summaries = [*earlier, entry]
    write_json(folder / SUMMARY_FILE, trainer.round.summaries)
    if trainer.section.judge.by != "url":  # its scores are shares of wins, with a mean of 0.5 in each round
        _warn_if_scores_fell(entry, [past for past in earlier if "score_error" in past])


def _warn_if_scores_fell(entry: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Warn if the mean score is below that of an earlier round by more than four standard errors of the difference."""
    best = max(earlier, key=itemgetter("score"), default=None)
    if not best or "score_error" not in entry:
        return
    difference = best["score"] - entry["score"]
    error = math.hypot(best["score_error"], entry["score_error"])
    if difference > 4 * error > 0:
        message = (
            "round %d: its answers score %.3g on average, and in round %d they scored %.3g. Training made them worse"
        )
        advice = ". Lower learning_rate, and see docs/guides/rounds.md, What to watch"
        logger.warning(message + advice, entry["round"], entry["score"], best["round"], best["score"])


def _answer_rows(
    trainer: "InRounds", prompts: datasets.Dataset, judged: list[ScoredCompletions], selected: SelectedRows
) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer, as `hf-posttrain judge` writes it, with the additional column `used`.

    `used` is 1 for an answer that is trained as the better one or alone, -1 for the worse one, and otherwise 0.
    """
    for prompt, completions, rows in zip(prompts, judged, selected.rows, strict=True):
        better = {row.answers[0] for row in rows if row.label is not False}
        worse = {row.answers[-1] for row in rows if len(row.answers) > 1 or row.label is False}
        for number, (ids, score) in enumerate(zip(completions.answers, completions.scores, strict=True)):
            used = 1 if number in better else -1 if number in worse else 0
            judgment = {"score": score, "judge": str(trainer.section.judge), "used": used}
            ids_columns = {"prompt_ids": prompt["prompt_ids"], "completion_ids": ids}
            yield answer_row(prompt, ids, trainer.tokenizer, trainer.terminal_ids) | ids_columns | judgment


def known_scores(judged: list[ScoredCompletions]) -> list[list[float]]:
    """Return the scores of each prompt's answers, without answers that the judge did not score."""
    return [[score for score in completions.scores if score is not None] for completions in judged]


def summarize(judged: list[ScoredCompletions], terminal_ids: list[int]) -> dict[str, float]:
    """Return means over the answers to all prompts.

    Returns:
        `score`, `best_score` of each prompt, `stopped` (share of answers with a terminal id), and `length` in tokens.
        A mean over nothing is left out.
    """
    answers = [ids for completions in judged for ids in completions.answers]
    scores = known_scores(judged)
    values: dict[str, Any] = {
        "score": [score for scores_of_prompt in scores for score in scores_of_prompt],
        "best_score": [max(scores_of_prompt) for scores_of_prompt in scores if scores_of_prompt],
        "stopped": [ids[-1] in terminal_ids for ids in answers],
        "length": [*map(len, answers)],
    }
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}
