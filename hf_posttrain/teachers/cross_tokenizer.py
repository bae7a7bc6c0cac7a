"""Loss of a student against a teacher with another tokenizer, by chunks of common text (`data.align`).

    one token against one    The divergence over the ids that both tokenizers have. Both distributions are restricted to
                             these ids and normalized. This requires that the ids have at least MIN_SHARED_MASS of the
                             probability of each model. Otherwise the next case applies.
    n tokens against m       The chunk as a whole. Its ln q and ln p are the sums over its tokens.
                             On rollouts: -sg(A) ln q of each token, where the advantage A is ln p - ln q of the chunk
                             plus those of the chunks before and after it.
                             On data: the divergence of two outcomes, this chunk or anything else. It is a lower bound
                             of the divergence, it is never negative, and it is 0 if both models assign the same
                             probability to the chunk.
    no common text           On rollouts: ln p is UNSAYABLE_LOGP for a token that the teacher cannot produce. Without
                             this loss the student would learn to produce such tokens, which are never penalized. Tokens
                             of an incomplete last character, which the end of a rollout has truncated, have no loss.
                             On data: no loss.

The advantage includes the neighboring chunks because the end of a chunk is only decided when the next one begins. For
a teacher that writes 95 as one token, the token 9 is a number that ends there. A student that writes digit by digit
decides this with the token after 9, which therefore affects both chunks. For the same reason the shared ids have no
information about a teacher whose probability is all on tokens that the student lacks.

The distribution of the teacher after 9 is only a part of its expectation, because a teacher that wrote the same text
may also be within the tokens 95, 96, ... . Let r be the probability that it wrote the token 9, given the text up to
there:

    r = 1 / (1 + sum over longer tokens w of p(w) / p(9)),     p at the position of the 9.

The expectation of the teacher is r p(. after 9) + (1 - r) (continuations of the tokens w). A comparison therefore
requires that r times the probability of the shared ids after 9 is at least MIN_SHARED_MASS. The omitted part then
changes the distribution by at most 1 - MIN_SHARED_MASS in total variation. A longer token may begin several tokens
earlier, and p(9) is then the product over these tokens. Tokens that the student also has are not counted, because both
models decided against them.

Legend: N tokens of the student, M of the teacher, n of a tile, V vocabulary, S shared ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..data.align import INCOMPLETE_CHARACTER, Aligner, shared_ids
from ..losses.divergence import log_softmax
from ..scoring.head import LogProb, Tile, TileFunction
from ..scoring.teacher_tiles import at_temperature, autograd_tile
from .batch import TeacherBatch
from .eos import MergedEOS
from .inputs import teacher_batch
from .served import ServedTeacher
from .signal import Chunked, Request

if TYPE_CHECKING:
    from .local import LocalTeacher

MIN_SHARED_MASS = 0.9
"""Minimum probability of the shared ids under each model for a comparison of single tokens."""
UNSAYABLE_LOGP = -14.0
"""ln p of tokens that a teacher cannot produce, such as special tokens within an answer and bytes that are not text."""
MIN_LONGER_MASS = 1e-14
"""Minimum probability of longer tokens, because differences of cumulative probabilities are only exact to 1e-16."""
MIN_COMPLEMENT = 1e-6
"""Minimum probability of anything else than a chunk, so that its logarithm is finite."""


class CrossTokenizerTeacher:
    """Teacher with another tokenizer, in memory or on a server.

    Args:
        teacher: The teacher that scores its own tokens.
        aligner: The aligner of the tokens of student and teacher.
        eos: Merged EOS ids of the student.
        ends: Ids that end an answer of the teacher.
        device: The device of the student.
    """

    name = ""

    def __init__(
        self,
        teacher: "LocalTeacher | ServedTeacher",
        aligner: Aligner,
        eos: MergedEOS,
        ends: list[int],
        device: torch.device,
    ) -> None:
        ids, teacher_ids = shared_ids(aligner.student_bytes, aligner.teacher_bytes)
        row_ends = eos.ids[:1].tolist() or aligner.terminal_ids[:1]
        pairs = [
            (i, j) for i, j in zip(ids, teacher_ids, strict=True) if i not in aligner.terminal_ids and j not in ends
        ]
        pairs += [(end, aligner.teacher_eos_id) for end in row_ends]
        self.teacher = teacher
        self.aligner = aligner
        self.ids, self.teacher_ids = (torch.tensor(side, device=device) for side in zip(*pairs, strict=True))
        self.teacher_ends = torch.tensor(ends, device=device)
        self.teacher_only = torch.tensor(aligner.teacher_only, dtype=torch.long, device=device)

    @property
    def dense(self) -> bool:
        """Whether the teacher returns its whole distribution."""
        return bool(self.teacher.dense)

    @property
    def description(self) -> str:
        """Description of the teacher in checkpoints."""
        return str(self.teacher.description)

    def signal(self, batch: MicroBatch, request: Request) -> Chunked:
        """Score a batch with one forward pass of the teacher, see `signal.Teacher`."""
        inputs = teacher_batch(batch, self.teacher.name)
        assert isinstance(inputs, TeacherBatch)
        shared = inputs, self.ids, self.teacher_ids
        if isinstance(self.teacher, ServedTeacher):
            return Chunked(*shared, self.teacher.target_logps(batch, self.teacher_ends.tolist()))

        teacher_eos = MergedEOS(self.teacher_ends, request.temperature)
        tokens = teacher_eos.merge_ids(inputs.targets)
        if request.kind == "sampled":
            tile = teacher_eos.wrap(LogProb(tokens, request.temperature))
            return Chunked(*shared, self.teacher.score(inputs, tile).value.float())

        states = self.teacher.states(inputs, teacher_eos)
        target_parts = []
        longer_parts = []
        for rows, logps in states.tiles(request.temperature):
            target_parts.append(logps.gather(-1, tokens[rows, None])[:, 0])
            longer_parts.append(self.longer_logps(logps, inputs.longer[rows]))
        target_logps = torch.cat(target_parts).float()
        start_probs = start_probability(target_logps, torch.cat(longer_parts).float())
        return Chunked(*shared, target_logps, states, start_probs)

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> None:
        """Return None, because batches are scored one at a time."""

    def longer_logps(self, logps: Tensor, ranges: Tensor) -> Tensor:
        """Return the logarithm of the total probability of the tokens in each range, [n, D].

        Args:
            logps: Log-probabilities of the teacher, [n, V]. A token of its tokenizer that its head lacks has
                probability 0.
            ranges: Ranges of `Aligner.teacher_only`, [n, D, 2].
        """
        size = logps.shape[-1]
        probs = logps.index_select(-1, self.teacher_only.clamp(max=size - 1)).exp()
        probs = probs.masked_fill_(self.teacher_only >= size, 0.0)
        # the tokens of a range are adjacent, so their sum is a difference of two cumulative sums
        cumulative = probs.cumsum(-1, dtype=torch.float64)

        def sum_before(indices: Tensor) -> Tensor:
            return torch.where(indices > 0, cumulative.gather(-1, (indices - 1).clamp(min=0)), 0.0)

        start, stop = ranges.unbind(-1)
        mass = (sum_before(stop) - sum_before(start)).clamp(min=0.0)
        return torch.where(start < stop, mass.clamp(min=MIN_LONGER_MASS), mass).log().to(logps.dtype)

    def key(self) -> object:
        """Return the cache key of the scores."""
        return self.teacher.key()

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return an empty list, because the ids are not ids of the student."""
        return []

    def release(self) -> None:
        """Free the device memory until the next use."""
        self.teacher.release()


def cross_tokenizer_tile(
    signal: Chunked,
    function: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    temperature: float,
    ce_coef: float = 0.0,
) -> TileFunction:
    """Return the tile function of a student against a teacher with another tokenizer.

    Args:
        signal: The signal of the teacher.
        function: Divergence of (student, teacher) log-probabilities [n, S] -> [n].
        tokens: Tokens of the student, [N].
        temperature: Temperature that divides all logits.
        ce_coef: Weight of the cross-entropy.

    Returns:
        A tile function. Its value is the divergence plus the weighted cross-entropy for a token that is compared with
        one token, and otherwise ln q of `tokens`. Without whole distributions of the teacher it is always ln q. The
        stats are `student` (ln q of `tokens`), `divergence`, and `alone` (1 where the value is the divergence).
    """
    # without targets, no answer of the batch is a text
    if signal.states is None or signal.start_probs is None or not len(signal.targets):

        def log_prob(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            tile = LogProb(tokens, temperature)(logits, rows, need_grad, buffer)
            return Tile(tile.value, tile.grad, {"student": tile.value, "alone": torch.zeros_like(tile.value)})

        return log_prob
    match = signal.batch.match
    ids = signal.ids
    teacher_ids = signal.teacher_ids
    teacher_positions = match.clamp(min=0)
    states = signal.states.select(teacher_positions)
    start_probs = signal.start_probs[teacher_positions]

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        full_q = log_softmax(at_temperature(logits, temperature))
        full_p = log_softmax(at_temperature(states.logits(rows), temperature))
        target_logps = full_q.gather(-1, tokens[rows, None])[:, 0]

        q = full_q[:, ids]
        p = full_p[:, teacher_ids]
        student_mass = q.detach().exp().sum(-1)
        teacher_mass = p.detach().exp().sum(-1) * start_probs[rows]
        q = log_softmax(q)
        p = log_softmax(p)
        divergence = function(q, p)
        mixed = (1 - ce_coef) * divergence - ce_coef * target_logps if ce_coef else divergence

        alone = (match[rows] >= 0) & (torch.minimum(student_mass, teacher_mass) >= MIN_SHARED_MASS)
        stats = {"student": target_logps, "divergence": divergence, "alone": alone.float()}
        return torch.where(alone, mixed, target_logps), stats

    return autograd_tile(value)


def start_probability(logps: Tensor, longer: Tensor) -> Tensor:
    """Return the probability that each token of the teacher begins at its position, given the text before it, [M].

    Args:
        logps: Log-probabilities of the tokens, [M].
        longer: Logarithms of the total probability of the tokens that the student lacks, begin at the position of a
            token, and extend beyond the end of the d-th token after it, [M, D].
    """
    logps = logps.clamp(min=-1e30)
    text_logps = torch.zeros_like(logps)
    log_ratios = [torch.zeros_like(logps)]
    for depth in range(longer.shape[1]):
        offset = depth + 1
        text_logps = text_logps + _shift(logps, offset, 0.0)
        log_ratios.append(_shift(longer[:, depth], offset, -torch.inf) - text_logps)
    return (-torch.stack(log_ratios).logsumexp(0)).exp()


def _shift(values: Tensor, offset: int, fill: float) -> Tensor:
    """Return the values [M] shifted by `offset` positions toward the end."""
    return torch.nn.functional.pad(values, (offset, 0), value=fill)[: len(values)]


@dataclass(frozen=True)
class Chunks:
    """Log-probabilities of chunks. The values are given for each token of the student, [N].

    Attributes:
        student: ln q of the chunk of the token, with gradient.
        teacher: ln p of the chunk.
        size: Number of tokens of the student in the chunk.
        known: Whether the token is in a chunk.
        gap: Advantage of the chunk, divided equally among its tokens, without gradient.
        credit: Sum of the advantages of the chunk and of the chunks before and after it, without gradient.
    """

    student: Tensor
    teacher: Tensor
    size: Tensor
    known: Tensor
    gap: Tensor
    credit: Tensor

    @classmethod
    def from_signal(cls, signal: Chunked, student: Tensor) -> "Chunks":
        """Return the chunks of a batch.

        Args:
            signal: The signal of the teacher.
            student: ln q of each token of the student, [N].
        """
        inputs = signal.batch
        chunk = inputs.chunk
        teacher_chunk = inputs.teacher_chunk
        none = len(student)  # index for tokens in no chunk, as there are at most N chunks
        index = chunk.where(chunk >= 0, none)
        zeros = student.new_zeros(none + 1)
        q = zeros.index_add(0, index, student)
        p = zeros.index_add(0, teacher_chunk.where(teacher_chunk >= 0, none), signal.targets.to(student.dtype))
        size = zeros.index_add(0, index, torch.ones_like(student))

        advantage = (p - q).detach().masked_fill(torch.arange(none + 1, device=q.device) == none, 0.0)
        neighbors = (inputs.before, inputs.after)
        credit = advantage[index] + sum(advantage[other.where(other >= 0, none)] for other in neighbors)
        unsayable = (UNSAYABLE_LOGP - student).detach().masked_fill(chunk == INCOMPLETE_CHARACTER, 0.0)
        known = chunk >= 0
        gap = torch.where(known, advantage[index] / size[index], unsayable)
        return cls(q[index], p[index], size[index], known, gap, torch.where(known, credit, unsayable))

    def on_rollouts(self, value: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of sampled tokens, and their divergences without gradient, [N] each.

        Args:
            value: Divergence of each token that is compared alone, and ln q of the others, [N].
            alone: Whether each token is compared alone, [N].
        """
        policy_gradient = -self.credit * value
        # the value of the loss is -gap, and its gradient is the policy gradient
        estimated = policy_gradient + (-self.gap - policy_gradient).detach()
        return torch.where(alone, value, estimated), torch.where(alone, value, -self.gap).detach()

    def on_data(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the divergence of two outcomes, divided equally among the tokens of a chunk, [N]."""
        q = torch.stack([self.student, _log_complement(self.student)], -1)
        p = torch.stack([self.teacher, _log_complement(self.teacher)], -1)
        return torch.where(self.known, function(q, p) / self.size, 0.0)


def alignment_metrics(inputs: TeacherBatch, alone: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the shares of tokens of the student by the form of their comparison.

    The metrics are the shares of the tokens that match one token of the teacher, that are compared with it alone, and
    that have no common text.

    Args:
        inputs: The batch of the teacher.
        alone: 1 for each token that is compared alone, [N].
        weights: Weights of the tokens, [N].
    """
    return {
        "align/one_to_one": ((inputs.match >= 0).float(), weights),
        "align/in_full": (alone, weights),
        "align/unaligned": ((inputs.chunk < 0).float(), weights),
    }


def _log_complement(logps: Tensor) -> Tensor:
    """Return ln(1 - e^logps), bounded below by ln MIN_COMPLEMENT."""
    return torch.log1p(-logps.exp().clamp(max=1 - MIN_COMPLEMENT))
