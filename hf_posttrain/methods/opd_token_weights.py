"""Weights of the tokens of OPD rollouts, which are computed before the first backward of a step."""

import dataclasses
from typing import TYPE_CHECKING

import torch

from ..losses.token_weights import Tokens, normalized_weights
from ..rollouts.batch import RolloutBatch
from ..scoring.forward import eval_mode

if TYPE_CHECKING:
    from .opd import OPDTrainer


def add_token_weights(trainer: "OPDTrainer", batches: list[RolloutBatch]) -> list[RolloutBatch]:
    """Return the micro-batches of a step with `token_weights` [N].

    Student and teacher score the whole step once more, so that the weights do not depend on the micro-batch size.
    """
    scored = []
    for batch in batches:
        with torch.no_grad(), eval_mode(trainer.model_wrapped), trainer.accelerator.autocast():
            scores, _ = trainer.distill(trainer.model_wrapped, batch, None)
        student = scores.student
        teacher = scores.teacher
        assert student is not None
        assert teacher is not None
        divergence = student - teacher if scores.divergence is None else scores.divergence
        scored.append(Tokens(student, teacher, divergence, batch.owner, trainer.weights(batch)))
    options = trainer.args.token_weights
    weights = normalized_weights(Tokens.concat(scored, trainer.accelerator), options.kind, dataclasses.asdict(options))
    weights_of_batches = weights.split([len(tokens.student) for tokens in scored])
    return [batch.replace(token_weights=part) for batch, part in zip(batches, weights_of_batches, strict=True)]
