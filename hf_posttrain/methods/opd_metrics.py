"""Metrics of the rollouts of OPD, and its predictions in evaluation."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..rollouts.batch import RolloutBatch
from ..scoring.forward import Scores
from ..teachers.signal import TeacherSignal
from .opd_diagnostics import STATS_PREFIX, diagnostic_metrics

if TYPE_CHECKING:
    from .opd import OPDTrainer


def rollout_metrics(
    trainer: "OPDTrainer", scores: Scores, signal: TeacherSignal, batch: RolloutBatch
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metrics of a batch, which are means over sampled tokens or over rollouts.

    Completions of the data do not count.
    """
    student = scores.student
    teacher = scores.teacher
    assert student is not None
    assert teacher is not None
    gap = teacher - student
    rollout_weights = (batch.sampled * batch.weights_of_rows)[batch.row]  # [rollouts]
    token_weights = rollout_weights[batch.owner]  # [N]
    lengths = batch.per_branch(torch.ones_like(student))
    stopped = batch.per_branch(
        torch.isin(batch.targets, trainer.ends).float()
    )  # only the last token can be such a token
    # a rollout that train_max_tokens has truncated does not count in generation/stopped
    truncated = (stopped == 0) & (lengths < trainer.args.max_completion_length)
    # unless the loss itself is the reverse KL, it is estimated by the mean of -gap over sampled tokens
    reverse_kl = -gap
    if trainer.args.loss_type == "reverse_kl" and scores.divergence is not None:
        reverse_kl = scores.divergence
    metrics = {
        "logprob/student": (student, token_weights),
        "logprob/teacher": (teacher, token_weights),
        "logprob/gap": (gap, token_weights),
        "distill/advantage": (gap, token_weights),
        "distill/reverse_kl": (reverse_kl, token_weights),
        "generation/length": (lengths, rollout_weights),
        "generation/stopped": (stopped, rollout_weights * ~truncated),
        "generation/repeated": (batch.repeated, rollout_weights),
    }
    if batch.sampler_logps is not None:
        difference = batch.sampler_logps - student
        comparable = token_weights * ~trainer.eos.contains(batch.targets)
        metrics |= {
            "sampling/kl": (difference, comparable),
            "sampling/logp_difference": (difference.abs(), comparable),
        }
    metrics |= trainer.teacher_metrics(batch, signal, scores, reverse_kl, "distill/reverse_kl", token_weights)
    if batch.grades is not None:
        counts = batch.weights_of_rows
        metrics |= {
            "reward/mean": (batch.grades.mean(1), counts),
            "reward/spread": (batch.grades.std(1, correction=0), counts),
        }
    if scores.entropy is not None:
        metrics["entropy"] = scores.entropy, token_weights
    all_stats = scores.stats or {}
    if stats := {
        name.removeprefix(STATS_PREFIX): values for name, values in all_stats.items() if name.startswith(STATS_PREFIX)
    }:
        metrics |= diagnostic_metrics(stats, batch.owner, token_weights, trainer.args.max_completion_length)
    return metrics


def rollout_predictions(scores: Scores, batch: RolloutBatch, num_generations: int) -> tuple[Tensor, Tensor]:
    """Return the predictions and label_ids for `compute_metrics` in an evaluation, where every prompt has K rollouts.

    Returns:
        The summed log-probabilities under student and teacher [prompts, K, 2], and the lengths [prompts, K].
    """
    shape = len(batch.index), num_generations
    assert scores.student is not None
    assert scores.teacher is not None
    summed = [batch.per_branch(logps).view(shape) for logps in (scores.student, scores.teacher)]
    lengths = batch.per_branch(torch.ones_like(scores.value)).view(shape)
    return torch.stack(summed, dim=-1), lengths


def add_perplexities(metrics: dict[str, float]) -> dict[str, float]:
    """Add the perplexities of the rollouts, computed from the mean log-probabilities."""
    for name in ("student", "teacher"):
        if f"logprob/{name}" in metrics:
            metrics[f"perplexity/{name}"] = math.exp(min(-metrics[f"logprob/{name}"], 700))
    return metrics
