"""Differences of student and teacher by position in the rollout, measured in the tiles of the loss.

In a logged step `Diagnostics` compares the logits of both models before the loss uses them. The student does not run
again. The teacher runs again only for a loss that does not use its whole distribution (policy gradient, or top k).

Legend: N scored tokens, n tokens of a tile, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from ..batching.sequence_padding import positions_in_sequence
from ..data.chat import special_ids
from ..rollouts.batch import RolloutBatch
from ..rollouts.interface import OnPolicyInterface
from ..scoring.head import Tile, TileFunction
from ..scoring.teacher_tiles import TeacherLogits
from ..teachers.cross_tokenizer import CrossTokenizerTeacher
from ..teachers.eos import MergedEOS
from ..teachers.signal import HiddenStates

logger = logging.getLogger(__name__)

BUCKETS = 8
"""Number of parts of max_completion_length for which metrics are logged separately."""
NEAR_TOKENS = 16
"""Number of the student's most likely tokens whose probability under the teacher is logged."""
MIN_AGREEMENT = 0.8
"""Top-1 agreement from which on-policy rollouts are recommended. They were better than frozen rollouts for models with
high agreement at the start, and worse for others (arXiv 2610.11291)."""
STATS_PREFIX = "diagnostics/"
"""Prefix of the results of `compare_logits` among the stats of a loss."""
SCRATCH_SIZE = 2**20
"""Number of logits that are compared at once on CPU, so that they stay in the cache."""
BLOCK_SIZE = 64
"""Size of the blocks whose maxima are computed first. argmax and topk of all logits take ten times as long on CPU."""


def compare_logits(
    student: Tensor, teacher: Tensor, temperature: float, ends: Tensor, special: Tensor, scratch: list[Tensor]
) -> dict[str, Tensor]:
    """Compare the distributions of student and teacher over the same V tokens.

    Args:
        student: Logits [n, V], which are overwritten.
        teacher: Logits [n, V] of the same dtype.
        temperature: Temperature that divides all logits.
        ends: Ids that end an answer.
        special: Ids of special tokens.
        scratch: Three tensors [n, V] for intermediate results.

    Returns:
        Eight results by name, [n] each. `kl` is the reverse KL, and `special` its part on the ids `special`.
        `student_entropy` and `teacher_entropy` are the entropies. `agreement` is 1 where both have the same most likely
        token. `near` is the probability under the teacher of the NEAR_TOKENS most likely tokens of the student.
        `student_stop` and `teacher_stop` are the probabilities of `ends`.
    """
    z = student if temperature == 1 else student.div_(temperature)
    t = teacher if temperature == 1 else torch.div(teacher, temperature, out=scratch[2])
    z_best, near = _largest(z, NEAR_TOKENS)
    t_best, tokens = _largest(t, NEAR_TOKENS)
    agreement = near[:, 0] == tokens[:, 0]

    # Subtract the largest logit first, because differences of larger numbers would be lost to rounding. Clamp, because
    # 0 x -inf would be NaN.
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

    # In place, because the allocation of [n, V] costs more on CPU than the computation.
    results["teacher_entropy"] = p_sum.log() - p.mul_(t).sum(-1) / p_sum
    difference = t.neg_().add_(z).add_(offset[:, None])
    results["student_entropy"] = q_sum.log() - z.mul_(q).sum(-1) / q_sum
    results["kl"] = difference.mul_(q).sum(-1) / q_sum
    return results


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits in descending order and their tokens, [n, count] each.

    They are in the blocks with the largest maxima. A vocabulary that is not a multiple of BLOCK_SIZE is a single block.
    """
    size = BLOCK_SIZE if logits.shape[-1] % BLOCK_SIZE == 0 else logits.shape[-1]
    blocks = logits.unflatten(-1, (-1, size))
    chosen = blocks.amax(-1).topk(min(count, blocks.shape[1])).indices
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, size)).flatten(1)
    largest, index = candidates.topk(min(count, candidates.shape[-1]))
    return largest, chosen.gather(-1, index // size) * size + index % size


@dataclass
class Diagnostics:
    """Comparison of student and teacher in the tiles of a loss, for one batch."""

    teacher: TeacherLogits
    tokens: int  # N of the batch
    eos: MergedEOS
    temperature: float
    ends: Tensor  # ids that end an answer
    special: Tensor  # ids of special tokens
    teacher_logits: Tensor | None = None  # of the current tile
    scratch: list[Tensor] = field(default_factory=list)
    results: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by the first token of the tile

    def logits(self, rows: slice) -> Tensor:
        """Return the logits [n, V] of the teacher, see `TeacherLogits`, which are computed once per tile."""
        if self.teacher_logits is None:
            self.teacher_logits = self.teacher.logits(rows)
        return self.teacher_logits

    def observe(self, tile: TileFunction) -> TileFunction:
        """Return the tile function of a loss with the results of `compare_logits` among its stats."""

        def observed(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
            if rows.start not in self.results:  # a backward may run the tiles again
                self.results[rows.start] = self._compare(logits, rows)
            result = tile(logits, rows, need_grad, buffer)
            self.teacher_logits = None  # the loss may have overwritten them
            return Tile(result.value, result.grad, result.stats | self.results[rows.start])

        return observed

    def _compare(self, logits: Tensor, rows: slice) -> dict[str, Tensor]:
        """Return the results of a tile, with STATS_PREFIX before their names."""
        teacher_logits = self.logits(rows)
        size = min(logits.shape[-1], teacher_logits.shape[-1])
        dtype = torch.promote_types(logits.dtype, teacher_logits.dtype)
        step = max(1, len(logits) if logits.is_cuda else SCRATCH_SIZE // size)
        if not self.scratch:
            self.scratch = [logits.new_empty(step, size, dtype=dtype) for _ in range(4)]
        parts = []
        for start in range(0, max(len(logits), 1), step):  # a batch without tokens has an empty tile
            part = logits[start : start + step, :size]
            student, *scratch = (buffer[: len(part)] for buffer in self.scratch)
            student.copy_(part)
            if self.eos:
                self.eos.merge_logits(student)
            teacher = teacher_logits[start : start + step, :size].to(dtype)
            parts.append(compare_logits(student, teacher, self.temperature, self.ends, self.special, scratch))
        if rows.stop >= self.tokens:  # free the memory for the backward
            self.scratch = []
        return {STATS_PREFIX + name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def diagnostic_metrics(
    stats: dict[str, Tensor], rollout: Tensor, counts: Tensor, max_tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metrics of the diagnostics as (values, weights) by name, for a `MetricAverager`.

    Args:
        stats: Results of `compare_logits`, [N].
        rollout: Number of the rollout of each token, [N].
        counts: Weight of each token, [N].
        max_tokens: Maximum length of a rollout in tokens.
    """
    bucket = (positions_in_sequence(rollout) * BUCKETS // max_tokens).clamp(max=BUCKETS - 1)
    kl = stats["kl"]
    metrics = {
        "distill/student_entropy": (stats["student_entropy"], counts),
        "distill/teacher_entropy": (stats["teacher_entropy"], counts),
        "distill/top1_agreement": (stats["agreement"], counts),
        "distill/near_mass": (stats["near"], counts),
        # a ratio of sums, as the weight of each token is its KL
        "distill/special_share": (stats["special"] / kl.clamp(min=1e-30), counts * kl.clamp(min=0)),
    }
    for name in ("kl", "teacher_entropy", "student_stop", "teacher_stop"):
        for part in range(BUCKETS):
            metrics[f"position/{name}_{part + 1}"] = stats[name], counts * (bucket == part)
    return metrics


def rollout_advice(averages: dict[str, float], rollouts: str) -> str | None:
    """Return a text about the agreement of student and teacher, with a recommendation for `rollouts`.

    Args:
        averages: Averages of `diagnostic_metrics` in the first logged step.
        rollouts: Kind of the source of rollouts.

    Returns:
        The text, or None if nothing was sampled.
    """
    if "distill/top1_agreement" not in averages:
        return None
    agreement = averages["distill/top1_agreement"]
    text = (
        f"student and teacher have the same most likely token for {agreement:.0%} of the tokens of the first rollouts, "
        f"and the {NEAR_TOKENS} most likely tokens of the student have {averages['distill/near_mass']:.0%} of the "
        "probability under the teacher"
    )
    if agreement < MIN_AGREEMENT and rollouts == "on_policy":
        return f"{text}. With low agreement, rollouts: frozen may train better, and samples only once"
    if agreement >= MIN_AGREEMENT and rollouts == "frozen":
        return f"{text}. With high agreement, rollouts: on_policy usually trains better"
    return text


def is_logged_step(state: TrainerState, args: TrainingArguments) -> bool:
    """Return whether the metrics of the current step are logged. With logging_strategy epoch those of all steps are."""
    if args.logging_strategy == "steps":
        is_due = (state.global_step + 1) % max(int(state.logging_steps), 1) == 0
    else:
        is_due = args.logging_strategy == "epoch"
    return is_due or (args.logging_first_step and state.global_step == 0)


class DiagnosticsBuilder:
    """Builder of the diagnostics for the batches of a trainer."""

    def __init__(self, trainer: OnPolicyInterface) -> None:
        self.trainer = trainer
        self.ends = self._tensor(trainer.terminal_ids)
        self.special = self._tensor(special_ids(trainer.tokenizer))

    def _tensor(self, ids: Iterable[int]) -> Tensor:
        """Return the ids that both models have."""
        common_ids = sorted(i for i in ids if i < self.trainer.vocabulary)
        return torch.tensor(common_ids, dtype=torch.long, device=self.trainer.args.device)

    def observer_factory(self, batch: RolloutBatch) -> Callable[[TeacherLogits], Diagnostics] | None:
        """Return a function that builds the diagnostics of a batch from the logits of the teacher.

        Returns None in a step that is not logged, and if `can_compare` is False.
        """
        trainer = self.trainer
        due = torch.is_grad_enabled() and is_logged_step(trainer.state, trainer.args)
        if not due or not self.can_compare(batch):
            return None
        return partial(
            Diagnostics,
            tokens=len(batch.scored),
            eos=trainer.eos,
            temperature=trainer.args.temperature,
            ends=self.ends,
            special=self.special,
        )

    def can_compare(self, batch: RolloutBatch) -> bool:
        """Return whether student and teacher can be compared over the whole vocabulary."""
        if isinstance(batch.teacher_signal, HiddenStates):
            return True
        teacher = self.trainer.teacher
        same_tokenizer = not isinstance(teacher, CrossTokenizerTeacher)
        return bool(teacher and teacher.dense and same_tokenizer and batch.teacher_signal is None)

    def log_advice(self, metrics: dict[str, float]) -> None:
        """Log the recommendation for `rollouts`, in the first log of a run."""
        is_first = not any("loss" in log for log in self.trainer.state.log_history)
        text = rollout_advice(metrics, self.trainer.args.rollouts.kind) if is_first else None
        if text:
            logger.info("%s", text)
