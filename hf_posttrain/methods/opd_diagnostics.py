"""Where along a rollout student and teacher differ, from the tiles of the loss.

In a step that is logged `Diagnostics` compares the logits of both models before the loss does. The student does not run
again; nor does the teacher, unless the loss reads less than its whole distribution (a policy gradient, or its top k).

Legend: N scored tokens, n tokens of a tile, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from ..data.chat import special_ids
from ..losses.divergence import places
from ..rollouts.batch import RolloutBatch
from ..rollouts.interface import OnPolicyInterface
from ..scoring.head import Tile, TileFunction
from ..scoring.teacher_tiles import TeacherLogits
from ..teachers.cross_tokenizer import CrossTokenizerTeacher
from ..teachers.eos import MergedEOS

logger = logging.getLogger(__name__)

BUCKETS = 8
"""Parts of the longest rollout that are logged by themselves."""
NEAR_TOKENS = 16
"""Number of the student's most likely tokens whose probability by the teacher is logged."""
MIN_AGREEMENT = 0.8
"""The share of common best tokens from which rollouts should be live. Where two models agreed much at the start, live
rollouts were better than frozen ones, and elsewhere worse (arXiv 2610.11291)."""
STATS_PREFIX = "diagnostics/"
"""Of the results of `compare_logits` among the scores of a loss."""
SCRATCH_SIZE = 2**20
"""On CPU: logits that are compared at once, in memory that is still in the cache."""
BLOCK_SIZE = 64
"""Logits whose largest one is found first: torch's argmax and topk take ten times as long on CPU."""


def compare_logits(
    student: Tensor, teacher: Tensor, temperature: float, ends: Tensor, special: Tensor, scratch: list[Tensor]
) -> dict[str, Tensor]:
    """Compare two distributions over the same V tokens. Return eight results, [n] each.

    `kl` is the reverse KL and `special` its part on the ids `special`; `student_entropy` and `teacher_entropy`;
    `agreement` is 1 where both have the same best token, `near` the teacher's probability of the student's NEAR_TOKENS best
    tokens, and `student_stop` and `teacher_stop` are the probabilities of `ends`.

    student, teacher: logits [n, V] of one dtype; those of the student are overwritten. scratch: three tensors [n, V].
    """
    z = student if temperature == 1 else student.div_(temperature)
    t = teacher if temperature == 1 else torch.div(teacher, temperature, out=scratch[2])
    z_best, near = _largest(z, NEAR_TOKENS)
    t_best, tokens = _largest(t, NEAR_TOKENS)
    agreement = near[:, 0] == tokens[:, 0]

    # Differences to the largest logit come first: sums of logits would leave rounding alone. 0 x -inf would be NaN.
    z = z.sub_(z_best[:, :1]).clamp_(min=-1e30)
    t = torch.sub(t, t_best[:, :1], out=scratch[2]).clamp_(min=-1e30)
    q = torch.exp(z, out=scratch[0])
    p = torch.exp(t, out=scratch[1])
    q_sum = q.sum(-1)
    p_sum = p.sum(-1)
    offset = p_sum.log() - q_sum.log()  # ln q - ln p = z - t + offset
    results = {
        "special": (q[:, special] * (z[:, special] - t[:, special] + offset[:, None])).sum(-1) / q_sum,
        "agreement": agreement.float(),
        "near": p.gather(-1, near).sum(-1) / p_sum,
        "student_stop": q[:, ends].sum(-1) / q_sum,
        "teacher_stop": p[:, ends].sum(-1) / p_sum,
    }

    # In place: a fresh [n, V] costs more on CPU than what fills it.
    results["teacher_entropy"] = p_sum.log() - p.mul_(t).sum(-1) / p_sum
    difference = t.neg_().add_(z).add_(offset[:, None])
    results["student_entropy"] = q_sum.log() - z.mul_(q).sum(-1) / q_sum
    results["kl"] = difference.mul_(q).sum(-1) / q_sum
    return results


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits in order, and their tokens, [n, count] each.

    They are in the blocks with the largest maxima. A vocabulary that is no multiple of BLOCK_SIZE is one block.
    """
    size = BLOCK_SIZE if logits.shape[-1] % BLOCK_SIZE == 0 else logits.shape[-1]
    blocks = logits.unflatten(-1, (-1, size))
    chosen = blocks.amax(-1).topk(min(count, blocks.shape[1])).indices
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, size)).flatten(1)
    largest, place = candidates.topk(min(count, candidates.shape[-1]))
    return largest, chosen.gather(-1, place // size) * size + place % size


@dataclass
class Diagnostics:
    """Compares a student with a teacher in the tiles of a loss. It is made for one batch."""

    teacher: TeacherLogits
    tokens: int  # N of the batch
    eos: MergedEOS
    temperature: float
    ends: Tensor  # ids that end an answer
    special: Tensor  # ids of special tokens
    theirs: Tensor | None = None  # the teacher's logits of the current tile
    scratch: list[Tensor] = field(default_factory=list)
    found: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # results by the first token of a tile

    def logits(self, rows: slice) -> Tensor:
        """Return the teacher's logits [n, V] as `TeacherLogits`, those that were just compared."""
        if self.theirs is None:
            self.theirs = self.teacher.logits(rows)
        return self.theirs

    def observe(self, tile: TileFunction) -> TileFunction:
        """Return the tile function of a loss with the results of `compare_logits` among its stats, under STATS_PREFIX."""

        def observed(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            if rows.start not in self.found:  # a backward may run the tiles once more
                self.found[rows.start] = self._compare(logits, rows)
            result = tile(logits, rows, need_grad, buffer)
            self.theirs = None  # the loss may have overwritten it
            return Tile(result.value, result.grad, result.stats | self.found[rows.start])

        return observed

    def _compare(self, logits: Tensor, rows: slice) -> dict[str, Tensor]:
        theirs = self.logits(rows)
        size = min(logits.shape[-1], theirs.shape[-1])
        dtype = torch.promote_types(logits.dtype, theirs.dtype)
        step = max(1, len(logits) if logits.is_cuda else SCRATCH_SIZE // size)
        if not self.scratch:
            self.scratch = [logits.new_empty(step, size, dtype=dtype) for _ in range(4)]
        parts = []
        for start in range(0, max(len(logits), 1), step):  # a batch without tokens has one empty tile
            part = logits[start : start + step, :size]
            student, *scratch = (each[: len(part)] for each in self.scratch)
            student.copy_(part)
            if self.eos:
                self.eos.merge_logits(student)
            teacher = theirs[start : start + step, :size].to(dtype)
            parts.append(compare_logits(student, teacher, self.temperature, self.ends, self.special, scratch))
        if rows.stop >= self.tokens:  # the backward has need of the memory
            self.scratch = []
        return {STATS_PREFIX + name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def diagnostic_metrics(
    stats: dict[str, Tensor], rollout: Tensor, counts: Tensor, longest: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> (values, weights) for a MetricAverager.

    stats: of `compare_logits`, [N]; rollout [N]: the rollout of each token; counts [N]: whether it counts; longest: the
    longest rollout in tokens.
    """
    bucket = (places(rollout) * BUCKETS // longest).clamp(max=BUCKETS - 1)
    kl = stats["kl"]
    metrics = {
        "distill/student_entropy": (stats["student_entropy"], counts),
        "distill/teacher_entropy": (stats["teacher_entropy"], counts),
        "distill/top1_agreement": (stats["agreement"], counts),
        "distill/near_mass": (stats["near"], counts),
        # a share of sums: each token weighs as much as its KL
        "distill/special_share": (stats["special"] / kl.clamp(min=1e-30), counts * kl.clamp(min=0)),
    }
    for name in ("kl", "teacher_entropy", "student_stop", "teacher_stop"):
        for part in range(BUCKETS):
            metrics[f"position/{name}_{part + 1}"] = stats[name], counts * (bucket == part)
    return metrics


def rollout_advice(averages: dict[str, float], rollouts: str) -> str | None:
    """Return how near student and teacher are, and which rollouts that suggests. None where nothing was sampled.

    averages: of `diagnostic_metrics`, of the first step that is logged; rollouts: the option.
    """
    if "distill/top1_agreement" not in averages:
        return None
    agreement = averages["distill/top1_agreement"]
    text = f"student and teacher have the same best token at {agreement:.0%} of the first rollouts' tokens, and the "
    text += f"student's {NEAR_TOKENS} best hold {averages['distill/near_mass']:.0%} of the teacher's mass"
    if agreement < MIN_AGREEMENT and rollouts == "on_policy":
        return f"{text}: so far apart, rollouts: frozen is worth a try, which samples once"
    if agreement >= MIN_AGREEMENT and rollouts == "frozen":
        return f"{text}: so near, rollouts: on_policy teaches more, as the student moves on from where it began"
    return text


def is_logged_step(state: TrainerState, args: TrainingArguments) -> bool:
    """Return whether the current step is logged, by logging_steps and logging_first_step."""
    first = args.logging_first_step and state.global_step == 0
    return first or (state.global_step + 1) % max(int(state.logging_steps), 1) == 0


class DiagnosticsBuilder:
    """Builds the diagnostics of the batches of a trainer."""

    def __init__(self, trainer: OnPolicyInterface):
        self.trainer = trainer
        self.ends = self._tensor(trainer.terminal_ids)
        self.special = self._tensor(special_ids(trainer.tokenizer))

    def _tensor(self, ids: Iterable[int]) -> Tensor:
        """Return those ids that both models have."""
        known = sorted(i for i in ids if i < self.trainer.vocabulary)
        return torch.tensor(known, dtype=torch.long, device=self.trainer.args.device)

    def of(self, batch: RolloutBatch) -> Callable[[TeacherLogits], Diagnostics] | None:
        """Return a function that builds the diagnostics of a batch from the teacher's logits.

        None for a step that is not logged, and where `compares_whole` is False.
        """
        trainer = self.trainer
        due = torch.is_grad_enabled() and is_logged_step(trainer.state, trainer.args)
        if not due or not self.compares_whole(batch):
            return None
        return partial(
            Diagnostics,
            tokens=len(batch.scored),
            eos=trainer.eos,
            temperature=trainer.args.temperature,
            ends=self.ends,
            special=self.special,
        )

    def compares_whole(self, batch: RolloutBatch) -> bool:
        """Return whether student and teacher can be compared over the whole vocabulary."""
        teacher = self.trainer.teacher
        one_tokenizer = not isinstance(teacher, CrossTokenizerTeacher)
        return bool(teacher and teacher.dense and one_tokenizer and batch.teacher_signal is None)

    def log_advice(self, metrics: dict[str, float]) -> None:
        """Log which rollouts the first log of a run suggests."""
        args = self.trainer.args
        state = self.trainer.state
        first_log = 1 if args.logging_first_step else max(int(state.logging_steps), 1)
        text = rollout_advice(metrics, args.rollouts.kind) if state.global_step == first_log else None
        if text:
            logger.info("%s", text)
