"""What is told of a round: in the log, and of rounds over all prompts in files of output_dir."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from ..trainer.output_dir import write_json
from .judges.question import answer_row
from .pairing import SelectedRows
from .sample_and_judge import FOLDER, ScoredCompletions

logger = logging.getLogger(__name__)
SUMMARY_FILE = "rounds.json"


def log_round(
    trainer: Any, prompts: datasets.Dataset, judged: list[ScoredCompletions], paired: SelectedRows, seconds: float
) -> None:
    """Log the round that the trainer has just made; of those over all prompts write N.jsonl, with every answer, and
    rounds.json. All ranks call it.
    """
    found = summarise(judged, trainer.terminal_ids)
    number = trainer.round.number + 1
    found |= {"rows": float(paired.count), "left_out": float(paired.left_out.total())}
    if trainer.section.steps:
        for name, value in found.items():
            trainer.meters["train"].add(f"rounds/{name}", torch.tensor(value, device=trainer.args.device))
        return
    if paired.left_out:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in paired.left_out.most_common())
        said = "round %d: of %d prompts %d gave no row (%s)"
        logger.info(said, number, len(prompts), paired.left_out.total(), reasons)
    labels = {row.label for rows in paired.rows for row in rows} - {None}
    if len(labels) == 1:
        said = "round %d: all its %d labelled answers are %s: one label alone does not say what to prefer"
        logger.warning(said, number, paired.count, "good" if True in labels else "bad")
    trainer.log({"rounds/round": number} | {f"rounds/{name}": value for name, value in found.items()})
    if not trainer.args.should_save:
        return
    folder = Path(trainer.args.output_dir, FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as file:
        for row in _answer_rows(trainer, prompts, judged, paired):
            print(json.dumps(row, ensure_ascii=False), file=file)
    found |= {name: int(found[name]) for name in ("rows", "left_out")}
    means = [np.mean(own) for own in known_scores(judged) if own]
    error = {"score_error": round(float(np.std(means, ddof=1) / len(means) ** 0.5), 6)} if len(means) > 1 else {}
    entry = {
        "round": number,
        "step": trainer.state.global_step,
        **found,
        **error,
        "seconds": round(seconds, 1),
        "unjudged": sum(score is None for one in judged for score in one.scores),
        "reasons": dict(paired.left_out),
    }
    earlier = [one for one in trainer.round.told if one["round"] < number]
    trainer.round.told = [*earlier, entry]
    write_json(folder / SUMMARY_FILE, trainer.round.told)
    if trainer.section.judge.by != "url":  # its scores are shares of wins, whose mean is 0.5 in each round
        _warn_if_scores_fell(entry, [one for one in earlier if "score_error" in one])


def _warn_if_scores_fell(entry: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Warn where answers score clearly worse than those of an earlier round: by four standard errors of the
    difference.
    """
    best = max(earlier, key=lambda one: one["score"], default=None)
    if not best or "score_error" not in entry:
        return
    fall = best["score"] - entry["score"]
    error = math.hypot(best["score_error"], entry["score_error"])
    if fall > 4 * error > 0:
        said = "round %d: its answers score %.3g on average, and those of round %d %.3g: training made them worse"
        advice = ": lower learning_rate; docs/guides/rounds.md, What to watch, has more"
        logger.warning(said + advice, entry["round"], entry["score"], best["round"], best["score"])


def _answer_rows(
    trainer: Any, prompts: datasets.Dataset, judged: list[ScoredCompletions], paired: SelectedRows
) -> Iterator[dict[str, Any]]:
    """A row for each answer, as `hf-posttrain judge` writes them, with `used`: 1 as the better one or alone, -1 as the
    worse one.
    """
    for prompt, one, rows in zip(prompts, judged, paired.rows, strict=True):
        better = {row.answers[0] for row in rows if row.label is not False}
        worse = {row.answers[-1] for row in rows if len(row.answers) > 1 or row.label is False}
        for number, (ids, score) in enumerate(zip(one.answers, one.scores, strict=True)):
            used = 1 if number in better else -1 if number in worse else 0
            told = {"score": score, "judge": str(trainer.section.judge), "used": used}
            as_ids = {"prompt_ids": prompt["prompt_ids"], "completion_ids": ids}
            yield answer_row(prompt, ids, trainer.tokenizer, trainer.terminal_ids) | as_ids | told


def known_scores(judged: list[ScoredCompletions]) -> list[list[float]]:
    """Of each prompt the scores that its judge gave."""
    return [[score for score in one.scores if score is not None] for one in judged]


def summarise(judged: list[ScoredCompletions], ends: list[int]) -> dict[str, float]:
    """Means over prompts' answers: of their scores, of the best score of each prompt, of the share that ended by
    themselves, and of their lengths in tokens.
    """
    answers = [ids for one in judged for ids in one.answers]
    scores = known_scores(judged)
    found: dict[str, Any] = {
        "score": [score for own in scores for score in own],
        "best_score": [max(own) for own in scores if own],
        "stopped": [ids[-1] in ends for ids in answers],
        "length": [*map(len, answers)],
    }
    return {name: float(np.mean(values)) for name, values in found.items() if values}
