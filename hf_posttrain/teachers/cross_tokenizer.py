"""Student against a teacher with a tokenizer of its own, by chunks of common text (`data.align`).

    one token against one    the divergence over the ids that both have, each side's distribution over those alone,
                             where these distributions are MIN_SHARED_MASS of what each model expects there; elsewhere as the
                             next
    n tokens against m       the chunk as a whole: ln q and ln p of it are the sums over its tokens
                             on rollouts  -sg(A) ln q of each token, with the advantage A = ln p - ln q of the chunk and
                                          of those before and behind it
                             on data      the divergence of two outcomes, this chunk or anything else: a lower bound,
                                          never below 0, 0 where both give it the same probability
    no common text           on rollouts  a token that the teacher cannot say: ln p is UNSAYABLE_LOGP, or a student that is told
                                          off elsewhere would end there; nothing of a character that the rollout's end
                                          has cut
                             on data      nothing

Why those around it: where a chunk ends is not known before the next one begins. To a teacher that writes 95 as one
token, 9 is a number that ends there; a student that writes digit by digit decides that with the token behind it, which
so bears on both chunks. For the same reason a teacher with all its probability on tokens that the student lacks says
nothing by the few that both have.

How much of a teacher's expectation its distribution after 9 is: the teacher may have reached this text by 9, or be
within 95, 96, ... . With r the probability of the first, given the text up to there,

    r = 1 / (1 + sum over longer tokens w of p(w) / p(9)),     p at the place of the 9,

the teacher's expectation is r p(. after 9) + (1 - r) (what continues these w). So r times the probability of the common
ids after 9 must be MIN_SHARED_MASS: then what is left out changes the distribution by 1 - MIN_SHARED_MASS at most, in total variation. A
longer token may begin several tokens earlier; p(9) is then the product over these tokens. Tokens that the student has
as well are not counted: both models decided against them.

Legend: N tokens of the student, M of the teacher, n of a tile, V vocabulary, S ids that both have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from .signal import Chunked, Request

MIN_SHARED_MASS = 0.9
"""What each model must expect of the common ids in all for a comparison in full, as a probability."""
UNSAYABLE_LOGP = -14.0
"""ln p of what a teacher cannot say: special tokens within an answer, and what is no text."""
MIN_LONGER_MASS = 1e-14
"""What longer tokens of a teacher have at least: a difference of running sums of probabilities is known to 1e-16."""
MIN_COMPLEMENT = 1e-6
"""What of a chunk's probability is left to anything else at least, so that its logarithm is finite."""


class CrossTokenizerTeacher:
    """A teacher with another tokenizer, in memory or on a server."""

    name = ""

    def __init__(self, teacher: Any, aligner: Aligner, eos: MergedEOS, ends: list[int], device: torch.device):
        """teacher: a `LocalTeacher` or a `ServedTeacher`. eos: of the student. ends: of the teacher's answers."""
        ids, their_ids = shared_ids(aligner.student_bytes, aligner.teacher_bytes)
        first = eos.ids[:1].tolist() or aligner.terminal_ids[:1]  # which rows end with
        pairs = [(i, j) for i, j in zip(ids, their_ids, strict=True) if i not in aligner.terminal_ids and j not in ends]
        pairs += [(end, aligner.teacher_eos_id) for end in first]
        self.teacher = teacher
        self.aligner = aligner
        self.ids, self.their_ids = (torch.tensor(side, device=device) for side in zip(*pairs, strict=True))
        self.their_eos = MergedEOS(torch.tensor(ends, device=device), eos.temperature)
        self.lacking = torch.tensor(aligner.teacher_only, dtype=torch.long, device=device)

    @property
    def dense(self) -> bool:
        """Whether the teacher gives its whole distribution."""
        return bool(self.teacher.dense)

    @property
    def description(self) -> str:
        """What a checkpoint stores about it."""
        return str(self.teacher.description)

    def signal(self, batch: MicroBatch, request: Request) -> Chunked:
        """Score a batch by one forward of the teacher, see `signal.Teacher`."""
        read = teacher_batch(batch, self.teacher.name)
        assert isinstance(read, TeacherBatch)
        common = read, self.ids, self.their_ids
        if not self.dense:
            return Chunked(*common, self.teacher.target_logps(batch, self.their_eos.ids.tolist()))
        tokens = self.their_eos.merge_ids(read.targets)
        if request.kind == "sampled":
            tile = self.their_eos.wrap(LogProb(tokens, request.temperature))
            return Chunked(*common, self.teacher.score(read, tile).value.float())
        states = self.teacher.states(read, self.their_eos)
        targets = []
        longer = []
        for rows, logps in states.tiles(request.temperature):
            targets.append(logps.gather(-1, tokens[rows, None])[:, 0])
            longer.append(self.longer(logps, read.longer[rows]))
        of_targets = torch.cat(targets).float()
        shares = start_probability(of_targets, torch.cat(longer).float())
        return Chunked(*common, of_targets, states, shares)

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> None:
        """Return None: each batch is scored by itself."""

    def longer(self, logps: Tensor, ranges: Tensor) -> Tensor:
        """Return the logarithms [n, D] of the probability of the tokens in `ranges` [n, D, 2] of `Aligner.teacher_only`.

        logps: log-probabilities [n, V] of the teacher. A token of its tokenizer that its head lacks has probability 0.
        """
        size = logps.shape[-1]
        probs = logps.index_select(-1, self.lacking.clamp(max=size - 1)).exp()
        probs = probs.masked_fill_(self.lacking >= size, 0.0)
        # the tokens of a range are neighbours, so its sum is a difference of two running sums
        upto = probs.cumsum(-1, dtype=torch.float64)

        def before(places: Tensor) -> Tensor:
            return torch.where(places > 0, upto.gather(-1, (places - 1).clamp(min=0)), 0.0)

        first, last = ranges.unbind(-1)
        found = (before(last) - before(first)).clamp(min=0.0)
        return torch.where(first < last, found.clamp(min=MIN_LONGER_MASS), found).log().to(logps.dtype)

    def key(self) -> Any:
        """Return what distinguishes its scores from those of another teacher."""
        return self.teacher.key()

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return none: its ids are not the student's."""
        return []

    def release(self) -> None:
        """Free the memory of the device until the next use."""
        self.teacher.release()


def cross_tokenizer_tile(
    signal: Chunked,
    function: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    temperature: float,
    ce_coef: float = 0.0,
) -> TileFunction:
    """Return the tile function of a student against such a teacher.

    Where one token faces one token, the value is the divergence, mixed with the cross-entropy by `ce_coef`. Elsewhere,
    and everywhere without whole distributions, it is ln q of `tokens` [N]. stats: `student`, ln q of `tokens`;
    `divergence`; and `alone`, 1 where the value is the divergence.
    """
    if signal.states is None or signal.reached is None or not len(signal.targets):  # none of the answers is a text

        def log_prob(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            tile = LogProb(tokens, temperature)(logits, rows, need_grad, buffer)
            return Tile(tile.value, tile.grad, {"student": tile.value, "alone": torch.zeros_like(tile.value)})

        return log_prob
    match = signal.batch.match
    ids = signal.ids
    their_ids = signal.their_ids
    theirs = match.clamp(min=0)
    states = signal.states.select(theirs)
    expected = signal.reached[theirs]

    def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        whole_q = log_softmax(at_temperature(logits, temperature))
        whole_p = log_softmax(at_temperature(states.logits(rows), temperature))
        of_target = whole_q.gather(-1, tokens[rows, None])[:, 0]
        q = whole_q[:, ids]
        p = whole_p[:, their_ids]
        on_ids, on_their_ids = (side.detach().exp().sum(-1) for side in (q, p))
        q = log_softmax(q)
        p = log_softmax(p)
        divergence = function(q, p)
        mixed = (1 - ce_coef) * divergence - ce_coef * of_target if ce_coef else divergence
        alone = (match[rows] >= 0) & (torch.minimum(on_ids, on_their_ids * expected[rows]) >= MIN_SHARED_MASS)
        stats = {"student": of_target, "divergence": divergence, "alone": alone.float()}
        return torch.where(alone, mixed, of_target), stats

    return autograd_tile(value)


def start_probability(own: Tensor, longer: Tensor) -> Tensor:
    """Return the probability [M] that a teacher's token begins where it does, given the text before it.

    own: log-probability of each token [M]. longer: logarithm of the probability of all tokens that the student lacks,
    that begin where a token does and extend over the end of the d-th token after it [M, D].
    """
    own, text, against = own.clamp(min=-1e30), torch.zeros_like(own), [torch.zeros_like(own)]
    for depth in range(longer.shape[1]):
        by = depth + 1
        text = text + _shift(own, by, 0.0)
        against.append(_shift(longer[:, depth], by, -torch.inf) - text)
    return (-torch.stack(against).logsumexp(0)).exp()


def _shift(values: Tensor, by: int, fill: float) -> Tensor:
    """Return the values [M] moved `by` places towards the end."""
    return torch.nn.functional.pad(values, (by, 0), value=fill)[: len(values)]


@dataclass(frozen=True)
class Chunks:
    """ln q and ln p of chunks, at each of the student's tokens [N]: of the chunk that it is of."""

    student: Tensor  # ln q, with the gradient of what it was made of
    teacher: Tensor  # ln p
    size: Tensor  # how many of the student's tokens it has
    known: Tensor  # is there one?
    gap: Tensor  # A in equal parts over the chunk's tokens, without gradient
    credit: Tensor  # A of the chunk and of those before and behind it, without gradient

    @classmethod
    def from_signal(cls, signal: Chunked, student: Tensor) -> "Chunks":
        """Student [N]: ln q of each token of the student."""
        read = signal.batch
        teacher = signal.targets
        mine = read.chunk
        theirs = read.their_chunk
        around = (read.before, read.behind)
        none = len(student)  # chunks are fewer than the student's tokens: a place for what is in none
        where = mine.where(mine >= 0, none)
        zeros = student.new_zeros(none + 1)
        q = zeros.index_add(0, where, student)
        p = zeros.index_add(0, theirs.where(theirs >= 0, none), teacher.to(student.dtype))
        size = zeros.index_add(0, where, torch.ones_like(student))
        advantage = (p - q).detach().masked_fill(torch.arange(none + 1, device=q.device) == none, 0.0)
        credit = advantage[where] + sum(advantage[other.where(other >= 0, none)] for other in around)
        foreign = (UNSAYABLE_LOGP - student).detach().masked_fill(mine == INCOMPLETE_CHARACTER, 0.0)
        known = mine >= 0
        gap = torch.where(known, advantage[where] / size[where], foreign)
        return cls(q[where], p[where], size[where], known, gap, torch.where(known, credit, foreign))

    def on_rollouts(self, value: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of each token, its divergence without gradient), where `value` is ln q of tokens that are not `alone`,
        and of those that are their divergence already.
        """
        moving = -self.credit * value
        estimated = moving + (-self.gap - moving).detach()
        return torch.where(alone, value, estimated), torch.where(alone, value, -self.gap).detach()

    def on_data(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The divergence of two outcomes, each of a chunk's tokens an equal part of it, [N]."""
        q, p = (torch.stack([ln, _log_complement(ln)], -1) for ln in (self.student, self.teacher))
        return torch.where(self.known, function(q, p) / self.size, 0.0)


def alignment_metrics(read: TeacherBatch, alone: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metrics: the shares of the student's tokens that face one token of the teacher, that are compared with it
    in full (`alone` [N]), and that have no common text. weights [N]: which count.
    """
    return {
        "align/one_to_one": ((read.match >= 0).float(), weights),
        "align/in_full": (alone, weights),
        "align/unaligned": ((read.chunk < 0).float(), weights),
    }


def _log_complement(ln: Tensor) -> Tensor:
    """Ln (1 - e^ln), finite."""
    return torch.log1p(-ln.exp().clamp(max=1 - MIN_COMPLEMENT))
