"""What OPD logs about its rollouts."""

import math
from typing import Any

import torch
from torch import Tensor

from ..rollouts.batch import RolloutBatch
from ..scoring.forward import Scores
from ..teachers.signal import TeacherSignal
from .opd_diagnostics import STATS_PREFIX, diagnostic_metrics


def rollout_metrics(
    trainer: Any, scores: Scores, signal: TeacherSignal, batch: RolloutBatch
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metrics of a batch: means over the tokens that the student sampled, and over rollouts.

    Completions of the data do not count.
    """
    student = scores.student
    teacher = scores.teacher
    gap = teacher - student
    of_rollouts = (batch.sampled * batch.weights_of_rows)[batch.row]  # [rollouts]
    of_tokens = of_rollouts[batch.owner]  # [N]
    lengths = batch.per_branch(torch.ones_like(student))
    stopped = batch.per_branch(torch.isin(batch.targets, trainer.ends).float())  # one such token at most, the last
    # a rollout that train_max_tokens has truncated neither stopped nor failed to
    cut = (stopped == 0) & (lengths < trainer.args.max_completion_length)
    # the mean of -gap over sampled tokens is an estimate of the reverse KL, where that is not the loss itself
    reverse_kl = -gap
    if trainer.args.loss_type == "reverse_kl" and scores.divergence is not None:
        reverse_kl = scores.divergence
    metrics = {
        "logprob/student": (student, of_tokens),
        "logprob/teacher": (teacher, of_tokens),
        "logprob/gap": (gap, of_tokens),
        "distill/advantage": (gap, of_tokens),
        "distill/reverse_kl": (reverse_kl, of_tokens),
        "generation/length": (lengths, of_rollouts),
        "generation/stopped": (stopped, of_rollouts * ~cut),
        "generation/repeated": (batch.repeated, of_rollouts),
    }
    if batch.sampler_logps is not None:
        difference = batch.sampler_logps - student
        comparable = of_tokens * ~trainer.eos.contains(batch.targets)
        metrics |= {
            "sampling/kl": (difference, comparable),
            "sampling/logp_difference": (difference.abs(), comparable),
        }
    metrics |= trainer.teacher_metrics(batch, signal, scores, reverse_kl, "distill/reverse_kl", of_tokens)
    if batch.grades is not None:
        counts = batch.weights_of_rows
        metrics |= {
            "reward/mean": (batch.grades.mean(1), counts),
            "reward/spread": (batch.grades.std(1, correction=0), counts),
        }
    if scores.entropy is not None:
        metrics["entropy"] = scores.entropy, of_tokens
    named = scores.stats or {}
    if stats := {name.removeprefix(STATS_PREFIX): named[name] for name in named if name.startswith(STATS_PREFIX)}:
        metrics |= diagnostic_metrics(stats, batch.owner, of_tokens, trainer.args.max_completion_length)
    return metrics


def rollout_predictions(scores: Scores, batch: RolloutBatch, num_generations: int) -> tuple[Tensor, Tensor]:
    """Return what `compute_metrics` gets in an evaluation, where every prompt has K rollouts: summed log-probabilities
    under student and teacher, [prompts, K, 2], and lengths, [prompts, K].
    """
    shape = len(batch.index), num_generations
    summed = [batch.per_branch(logps).view(shape) for logps in (scores.student, scores.teacher)]
    lengths = batch.per_branch(torch.ones_like(scores.value)).view(shape)
    return torch.stack(summed, dim=-1), lengths


def add_perplexities(metrics: dict[str, float]) -> dict[str, float]:
    """Add perplexities of the rollouts, from the mean log-probabilities."""
    for name in ("student", "teacher"):
        if f"logprob/{name}" in metrics:
            metrics[f"perplexity/{name}"] = math.exp(min(-metrics[f"logprob/{name}"], 700))
    return metrics
