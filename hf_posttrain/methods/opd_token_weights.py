"""Weights of the tokens of OPD's rollouts, before the first backward of a step."""

import dataclasses
from typing import Any

import torch

from ..losses.token_weights import Tokens, weigh
from ..rollouts.batch import RolloutBatch
from ..scoring.forward import eval_mode


def add_token_weights(trainer: Any, batches: list[RolloutBatch]) -> list[RolloutBatch]:
    """Return the micro-batches of a step with their `token_weights` [N].

    Student and teacher score the whole step once more, so that the weights do not depend on how the step is split.
    """
    scored = []
    for batch in batches:
        with torch.no_grad(), eval_mode(trainer.model_wrapped), trainer.accelerator.autocast():
            scores, _ = trainer.distill(trainer.model_wrapped, batch, None)
        student = scores.student
        teacher = scores.teacher
        divergence = student - teacher if scores.divergence is None else scores.divergence
        scored.append(Tokens(student, teacher, divergence, batch.owner, trainer.weights(batch)))
    options = trainer.args.token_weights
    weights = weigh(Tokens.of(scored, trainer.accelerator), options.kind, dataclasses.asdict(options))
    of_batches = weights.split([len(tokens.student) for tokens in scored])
    return [batch.replace(token_weights=each) for batch, each in zip(batches, of_batches, strict=True)]
