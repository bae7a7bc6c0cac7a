"""Objectives of distillation: a divergence from the teacher, or a policy gradient on sampled tokens.

    Divergence        D(q, p) over the whole vocabulary or the teacher's top k, plus the cross-entropy of the data
    PolicyGradient    -sg(A) ln q of the sampled tokens, A = ln p - ln q, where sg stops the gradient

q is the distribution of the student and p that of the teacher, both at the temperature of the request. `tile` returns
the tile function for `PostTrainer.score`. `to_token_losses` turns the scores into per-token losses. It only changes the
scores if the teacher has another tokenizer.

Legend: N scored tokens of a batch, n of them in a tile, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InputError
from ..rollouts.batch import RolloutBatch
from ..scoring import teacher_tiles
from ..scoring.forward import Scores
from ..scoring.head import TileFunction
from ..scoring.policy_gradient import SampledPolicyGradient
from ..scoring.top_tokens import residual_reverse_kl, top_k_divergence
from ..teachers.cross_tokenizer import Chunks, cross_tokenizer_tile
from ..teachers.inputs import DistillationBatch
from ..teachers.signal import Chunked, Dense, Request, Sampled, TeacherSignal, TopK


class Objective(Protocol):
    """Loss of each token, as a function of student and teacher."""

    @property
    def request(self) -> Request:
        """The request to the teacher."""
        ...

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        ...

    def to_token_losses(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores [N] with the loss of each token, [N], as `value`."""
        ...


@dataclass(frozen=True)
class Divergence:
    """Divergence between student and teacher."""

    function: Callable[[Tensor, Tensor], Tensor]  # (student, teacher) log-probabilities [n, V] -> [n]
    request: Request
    ce_coef: float = 0.0  # weight of the cross-entropy of the targets in the loss
    on_policy: bool = False  # the targets were sampled from the student
    top_k_remainder: str = "tail"  # see `TeacherOptions`

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        request = self.request
        targets = batch.targets
        tokens = request.eos.merge_ids(targets)
        if isinstance(signal, Chunked):
            tile = cross_tokenizer_tile(signal, self.function, tokens, request.temperature, self.ce_coef)
            return request.eos.wrap(tile)
        # With merged EOS ids, CE is computed on the unmerged targets and added at the end.
        ce_coef = 0.0 if request.eos else self.ce_coef
        if isinstance(signal, Dense):
            tile = teacher_tiles.dense_divergence(self.function, signal.logits, tokens, request.temperature, ce_coef)
        elif isinstance(signal, TopK):
            top = signal.ids, signal.logps, tokens, request.temperature, request.vocabulary
            if self.top_k_remainder == "residual":
                assert signal.targets is not None, "the residual estimate requires the sampled tokens"
                assert self.ce_coef == 0, "the residual estimate has no cross-entropy"
                tile = residual_reverse_kl(*top, teacher=signal.targets)
            else:
                tail = self.top_k_remainder == "tail"
                tile = top_k_divergence(self.function, *top, ce_coef=ce_coef, teacher=signal.targets, tail=tail)
        else:
            raise InputError(f"the loss requires a distribution of the teacher, not a {type(signal).__name__} signal")
        tile = request.eos.wrap(tile)
        return teacher_tiles.add_cross_entropy(tile, targets, self.ce_coef) if request.eos else tile

    def to_token_losses(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores with the loss of each token as `value`."""
        if not isinstance(signal, Chunked):
            return scores
        if self.on_policy:
            return _rollout_scores(scores, Chunks.from_signal(signal, scores.student))
        alone = scores.alone > 0
        # `value` is the loss of a token that is aligned with a single token, and otherwise ln q, from which the
        # divergence of its chunk and the CE are computed
        chunks = Chunks.from_signal(signal, torch.where(alone, scores.student, scores.value))
        chunk_divergence = chunks.on_data(self.function)
        chunk_loss = (1 - self.ce_coef) * chunk_divergence - self.ce_coef * scores.value
        token_divergence = chunk_divergence if scores.divergence is None else scores.divergence
        divergence = torch.where(alone, token_divergence, chunk_divergence)
        value = torch.where(alone, scores.value, chunk_loss)
        return scores.replace(value=value, divergence=divergence.detach(), ce=-scores.student)


@dataclass(frozen=True)
class PolicyGradient:
    """Policy gradient of the reverse KL on sampled tokens.

    A `RolloutBatch` may have rewards, which are added to the advantage, and importance weights.
    """

    request: Request

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        tokens = self.request.eos.merge_ids(batch.targets)
        if isinstance(signal, Chunked):
            tile = cross_tokenizer_tile(signal, teacher_tiles.reverse_kl, tokens, self.request.temperature)
            return self.request.eos.wrap(tile)
        if not isinstance(signal, Sampled | TopK) or signal.targets is None:
            problem = "policy_gradient requires log-probabilities of the sampled tokens"
            raise InputError(f"{problem}, which are missing in the {type(signal).__name__} signal of the teacher")
        assert isinstance(batch, RolloutBatch)
        tile = SampledPolicyGradient(
            tokens,
            signal.targets,
            self.request.temperature,
            self.request.vocabulary,
            batch.reward_advantage,
            batch.importance_logps,
        )
        return self.request.eos.wrap(tile)

    def to_token_losses(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores with the loss of each token as `value`."""
        if not isinstance(signal, Chunked):
            return scores
        chunks = Chunks.from_signal(signal, scores.student)
        return _rollout_scores(scores, chunks).replace(value=-chunks.credit * scores.value)


def _rollout_scores(scores: Scores, chunks: Chunks) -> Scores:
    """Return the scores of sampled tokens for a teacher with another tokenizer, whose tokens form chunks."""
    value, divergence = chunks.on_rollouts(scores.value, scores.alone > 0)
    return scores.replace(value=value, divergence=divergence, teacher=scores.student + chunks.gap)
