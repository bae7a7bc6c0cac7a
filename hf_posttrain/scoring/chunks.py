"""Student against a teacher with a tokenizer of its own, by chunks of common text (`data.align`).

    one token against one    the divergence over the ids that both have, each side's distribution over those alone,
                             where these distributions are SHARED of what each model expects there; elsewhere as the
                             next
    n tokens against m       the chunk as a whole: ln q and ln p of it are the sums over its tokens
                             on rollouts  -sg(A) ln q of each token, with the advantage A = ln p - ln q of the chunk and
                                          of those before and behind it
                             on data      the divergence of two outcomes, this chunk or anything else: a lower bound,
                                          never below 0, 0 where both give it the same probability
    no common text           on rollouts  a token that the teacher cannot say: ln p is UNSAID, or a student that is told
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
ids after 9 must be SHARED: then what is left out changes the distribution by 1 - SHARED at most, in total variation. A
longer token may begin several tokens earlier; p(9) is then the product over these tokens. Tokens that the student has
as well are not counted: both models decided against them.

Legend: N tokens of the student, M of the teacher, n of a tile, V vocabulary, S ids that both have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.align import LEFT_OUT, Aligner, shared_ids
from ..losses.divergence import log_softmax
from .forward import targets
from .head import LogProb, Tile, TileFunction
from .stop_outcome import StopOutcome
from .teacher_tiles import TeacherStates, at_temperature, differentiated

SHARED = 0.9
"""What each model must expect of the common ids in all for a comparison in full, as a probability."""
UNSAID = -14.0
"""ln p of what a teacher cannot say: special tokens within an answer, and what is no text."""
SMALLEST = 1e-14
"""What longer tokens of a teacher have at least: a difference of running sums of probabilities is known to 1e-16."""
LEAST = 1e-6
"""What of a chunk's probability is left to anything else at least, so that its logarithm is finite."""


class Across:
    """How a student is compared with such a teacher. temperature: of both models' tokens."""

    def __init__(self, aligner: Aligner, stop: StopOutcome, ends: list[int], device: torch.device):
        mine, theirs = shared_ids(aligner.mine, aligner.theirs)
        first = stop.ids[:1].tolist() or aligner.ends[:1]  # which rows end with
        pairs = [pair for pair in zip(mine, theirs, strict=True) if pair[0] not in aligner.ends and pair[1] not in ends]
        pairs += [(end, aligner.their_end) for end in first]
        self.mine, self.theirs = (torch.tensor(side, device=device) for side in zip(*pairs, strict=True))
        self.stop, self.their_stop = stop, StopOutcome(torch.tensor(ends, device=device), stop.temperature)
        self.lacking = torch.tensor(aligner.lacking, dtype=torch.long, device=device)

    def read(self, teacher: Any, batch: dict[str, Any], whole: bool, temperature: float) -> "Read":
        """What the teacher says, by one forward. whole: with its distributions, where it has them."""
        if not teacher.dense:
            return Read(teacher.own(batch, self.their_stop.ids.tolist()))
        view = teacher.seen(batch)
        tokens = self.their_stop.of(targets(view))
        if not whole:
            return Read(teacher.score(batch, self.their_stop(LogProb(tokens, temperature)))["value"].float())
        states = teacher.states(batch, self.their_stop)
        own, longer = [], []
        for rows, logps in states.tiles(temperature):
            own.append(logps.gather(-1, tokens[rows, None])[:, 0])
            longer.append(self.longer(logps, view["longer"][rows]))
        found = torch.cat(own).float()
        return Read(found, states, reached(found, torch.cat(longer).float()))

    def longer(self, logps: Tensor, ranges: Tensor) -> Tensor:
        """Return the logarithms [n, D] of the probability of the tokens in `ranges` [n, D, 2] of `Aligner.lacking`.

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
        return torch.where(first < last, found.clamp(min=SMALLEST), found).log().to(logps.dtype)

    def tile(
        self, function: Callable[[Tensor, Tensor], Tensor], read: "Read", match: Tensor, tokens: Tensor,
        temperature: float, ce_coef: float = 0.0,
    ) -> TileFunction:  # fmt: skip
        """Tile function: of one token against one, by `match` [N], the divergence, mixed with the cross-entropy by
        `ce_coef`; of others (of all, without whole distributions) ln q. stats: `student`, ln q of `tokens`,
        `divergence`, and `alone`: which of both the value is."""
        whole = read.whole
        if whole is None or read.reached is None or not len(whole.hidden):  # none: nothing of the answers is a text

            def own_alone(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
                found = LogProb(tokens, temperature)(logits, rows, need_grad, buffer)
                return Tile(found.value, found.grad, {"student": found.value, "alone": torch.zeros_like(found.value)})

            return self.stop(own_alone)
        theirs = match.clamp(min=0)
        states = TeacherStates(whole.head, whole.hidden[theirs], whole.stop)
        expected = read.reached[theirs]

        def value(logits: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            whole_q = log_softmax(at_temperature(logits, temperature))
            whole_p = log_softmax(at_temperature(states.logits(rows), temperature))
            own, q, p = whole_q.gather(-1, tokens[rows, None])[:, 0], whole_q[:, self.mine], whole_p[:, self.theirs]
            on_mine, on_theirs = (side.detach().exp().sum(-1) for side in (q, p))
            q, p = log_softmax(q), log_softmax(p)
            apart = function(q, p)
            mixed = (1 - ce_coef) * apart - ce_coef * own if ce_coef else apart
            alone = (match[rows] >= 0) & (torch.minimum(on_mine, on_theirs * expected[rows]) >= SHARED)
            stats = {"student": own, "divergence": apart, "alone": alone.float()}
            return torch.where(alone, mixed, own), stats

        return self.stop(differentiated(value))


@dataclass(frozen=True)
class Read:
    """A teacher's scores of its own tokens."""

    own: Tensor  # ln p of each [M]
    whole: TeacherStates | None = None  # the distributions they are of, where the teacher gives them
    reached: Tensor | None = None  # the probability of the place of each [M], see `reached`; given with `whole`


def reached(own: Tensor, longer: Tensor) -> Tensor:
    """Return the probability [M] that a teacher's token begins where it does, given the text before it.

    own: log-probability of each token [M]. longer: logarithm of the probability of all tokens that the student lacks,
    that begin where a token does and extend over the end of the d-th token after it [M, D].
    """
    own, text, against = own.clamp(min=-1e30), torch.zeros_like(own), [torch.zeros_like(own)]
    for depth in range(longer.shape[1]):
        by = depth + 1
        text = text + _later(own, by, 0.0)
        against.append(_later(longer[:, depth], by, -torch.inf) - text)
    return (-torch.stack(against).logsumexp(0)).exp()


def _later(values: Tensor, by: int, fill: float) -> Tensor:
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
    def of(cls, view: dict[str, Any], student: Tensor, teacher: Tensor) -> "Chunks":
        """student [N] and teacher [M]: ln q and ln p of each token."""
        mine, theirs, around = view["chunk"], view["their_chunk"], (view["before"], view["behind"])
        none = len(student)  # chunks are fewer than the student's tokens: a place for what is in none
        where = mine.where(mine >= 0, none)
        zeros = student.new_zeros(none + 1)
        q = zeros.index_add(0, where, student)
        p = zeros.index_add(0, theirs.where(theirs >= 0, none), teacher.to(student.dtype))
        size = zeros.index_add(0, where, torch.ones_like(student))
        advantage = (p - q).detach().masked_fill(torch.arange(none + 1, device=q.device) == none, 0.0)
        credit = advantage[where] + sum(advantage[other.where(other >= 0, none)] for other in around)
        foreign, known = (UNSAID - student).detach().masked_fill(mine == LEFT_OUT, 0.0), mine >= 0
        gap = torch.where(known, advantage[where] / size[where], foreign)
        return cls(q[where], p[where], size[where], known, gap, torch.where(known, credit, foreign))

    def on_rollouts(self, value: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of each token, its divergence without gradient), where `value` is ln q of tokens that are not `alone`,
        and of those that are their divergence already."""
        moving = -self.credit * value
        estimated = moving + (-self.gap - moving).detach()
        return torch.where(alone, value, estimated), torch.where(alone, value, -self.gap).detach()

    def on_data(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The divergence of two outcomes, each of a chunk's tokens an equal part of it, [N]."""
        q, p = (torch.stack([ln, _rest(ln)], -1) for ln in (self.student, self.teacher))
        return torch.where(self.known, function(q, p) / self.size, 0.0)


def alignment(view: dict[str, Any], alone: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metrics: the shares of the student's tokens that face one token of the teacher, that are compared with it
    in full (`alone` [N]), and that have no common text. weights [N]: which count."""
    return {
        "align/one_to_one": ((view["match"] >= 0).float(), weights),
        "align/in_full": (alone, weights),
        "align/unaligned": ((view["chunk"] < 0).float(), weights),
    }


def _rest(ln: Tensor) -> Tensor:
    """ln (1 - e^ln), finite."""
    return torch.log1p(-ln.exp().clamp(max=1 - LEAST))
