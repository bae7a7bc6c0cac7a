"""What a student learns from a teacher's signal: a divergence, or a policy gradient on sampled tokens.

    Divergence        D(q, p) over the whole vocabulary or the teacher's top k, mixed with the cross-entropy of the data
    PolicyGradient    -sg(A) ln q of the sampled tokens, A = ln p - ln q

q is the student's distribution and p the teacher's, both at the temperature of the request. `tile` gives the tile
function for `PostTrainer.score`; `complete` turns its scores into the loss of each token, which differs from `value`
only where a teacher with another tokenizer is compared by chunks of text.

Legend: N scored tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InputError
from ..scoring import teacher_tiles
from ..scoring.forward import Scores
from ..scoring.head import TileFunction
from ..scoring.policy_gradient import SampledPolicyGradient
from ..scoring.top_tokens import residual, top_k
from ..teachers.cross_tokenizer import Chunks, cross_tokenizer_tile
from ..teachers.inputs import DistillationBatch
from ..teachers.signal import Chunked, Dense, Request, Sampled, TeacherSignal, TopK


class Objective(Protocol):
    """A loss of each token."""

    @property
    def request(self) -> Request:
        """What it needs from the teacher."""
        ...

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        ...

    def complete(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores with the loss of each token as `value`."""
        ...


@dataclass(frozen=True)
class Divergence:
    """A divergence between student and teacher."""

    function: Callable[[Tensor, Tensor], Tensor]  # of log-probabilities (student, teacher), [n, V] -> [n]
    request: Request
    ce_coef: float = 0.0  # share of the cross-entropy of the targets in the loss
    on_policy: bool = False  # the targets were sampled from the student
    unbiased_remainder: bool = False  # of the top k: the sampled token stands for the tokens outside of it

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        request = self.request
        targets = batch.targets
        tokens = request.eos.merge_ids(targets)
        if isinstance(signal, Chunked):
            tile = cross_tokenizer_tile(signal, self.function, tokens, request.temperature, self.ce_coef)
            return request.eos.wrap(tile)
        # where EOS ids are merged, the cross-entropy is of the targets before merging
        ce_coef = 0.0 if request.eos else self.ce_coef
        if isinstance(signal, Dense):
            tile = teacher_tiles.dense(self.function, signal.logits, tokens, request.temperature, ce_coef)
        elif isinstance(signal, TopK):
            common = signal.ids, signal.logps, tokens, request.temperature, request.vocabulary
            if self.unbiased_remainder and signal.targets is not None:
                tile = residual(*common, teacher=signal.targets)
            else:
                tile = top_k(self.function, *common, ce_coef=ce_coef, teacher=signal.targets)
        else:
            raise InputError("the teacher gave no distribution")
        tile = request.eos.wrap(tile)
        return teacher_tiles.beside_cross_entropy(tile, targets, self.ce_coef) if request.eos else tile

    def complete(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores with the loss of each token as `value`."""
        if not isinstance(signal, Chunked):
            return scores
        if self.on_policy:
            return _on_rollouts(scores, Chunks.from_signal(signal, scores.student))
        alone = scores.alone > 0
        # of a token that is not alone its ln q is known, which makes both parts of the loss
        chunks = Chunks.from_signal(signal, torch.where(alone, scores.student, scores.value))
        apart = chunks.on_data(self.function)
        mixed = (1 - self.ce_coef) * apart - self.ce_coef * scores.value
        divergence = torch.where(alone, apart if scores.divergence is None else scores.divergence, apart)
        value = torch.where(alone, scores.value, mixed)
        return scores.replace(value=value, divergence=divergence.detach(), ce=-scores.student)


@dataclass(frozen=True)
class PolicyGradient:
    """The policy gradient of the reverse KL on sampled tokens.

    A `RolloutBatch` may add a reward to the advantage, and importance weights.
    """

    request: Request

    def tile(self, signal: TeacherSignal, batch: DistillationBatch) -> TileFunction:
        """Return the tile function of a batch."""
        tokens = self.request.eos.merge_ids(batch.targets)
        if isinstance(signal, Chunked):
            tile = cross_tokenizer_tile(signal, teacher_tiles.reverse_kl, tokens, self.request.temperature)
            return self.request.eos.wrap(tile)
        if not isinstance(signal, Sampled | TopK) or signal.targets is None:
            raise InputError("the teacher gave no log-probabilities of the sampled tokens")
        tile = SampledPolicyGradient(
            tokens,
            signal.targets,
            self.request.temperature,
            self.request.vocabulary,
            getattr(batch, "reward_advantage", None),
            getattr(batch, "importance_logps", None),
        )
        return self.request.eos.wrap(tile)

    def complete(self, scores: Scores, signal: TeacherSignal) -> Scores:
        """Return the scores with the loss of each token as `value`."""
        if not isinstance(signal, Chunked):
            return scores
        chunks = Chunks.from_signal(signal, scores.student)
        return _on_rollouts(scores, chunks).replace(value=-chunks.credit * scores.value)


def _on_rollouts(scores: Scores, chunks: Chunks) -> Scores:
    """Return the scores of sampled tokens compared by chunks."""
    value, divergence = chunks.on_rollouts(scores.value, scores.alone > 0)
    return scores.replace(value=value, divergence=divergence, teacher=scores.student + chunks.gap)
