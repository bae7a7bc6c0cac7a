"""What OPD logs of a window beyond its loss: where along a rollout student and teacher differ.

Measured without gradient on the rollouts of a step that is logged: one more pass of both models.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState, TrainingArguments

from ..data.chat import special_ids
from ..losses.divergence import log_softmax, places, reverse_kl
from ..scoring.forward import eval_mode
from ..scoring.head import Tile, TileFunction
from ..scoring.teacher_tiles import TeacherStates, at_temperature
from ..trainer.loss_units import Meter

logger = logging.getLogger(__name__)
BUCKETS = 8
"""Parts of the longest rollout that are logged by themselves."""
NEAR = 16
"""The student's most likely tokens, on which the teacher's mass is looked at."""
NEAR_ENOUGH = 0.8
"""The share of common best tokens from which rollouts should be live. Where two models agreed much at the start, live
rollouts were better than frozen ones, and elsewhere worse (arXiv 2610.11291)."""


def compare(teacher: TeacherStates, temperature: float, ends: Tensor, special: Tensor) -> TileFunction:
    """Tile function without gradient. stats, [n] each: `kl` of student to teacher, its part on `special` ids, both
    entropies, `agreement` (1 where both have the same best token), `near` (the teacher's mass on the student's NEAR
    best tokens), and the mass of `ends` by each."""

    def tile(logits: Tensor, rows: slice, need_grad: bool, buffer: Tensor) -> Tile:
        theirs = teacher.logits(rows)
        size = min(logits.shape[-1], theirs.shape[-1])
        q, p = (log_softmax(at_temperature(side[:, :size], temperature)) for side in (logits, theirs))
        q, p = q.clamp(min=-1e30), p.clamp(min=-1e30)
        best, found = q.topk(min(NEAR, size)).indices, reverse_kl(q, p)
        stats = {
            "kl": found, "special": (q[:, special].exp() * (q - p)[:, special]).sum(-1),
            "student_entropy": -(q.exp() * q).sum(-1), "teacher_entropy": -(p.exp() * p).sum(-1),
            "agreement": (q.argmax(-1) == p.argmax(-1)).float(), "near": p.gather(-1, best).exp().sum(-1),
            "student_stop": q[:, ends].exp().sum(-1), "teacher_stop": p[:, ends].exp().sum(-1),
        }  # fmt: skip
        return Tile(found, None, stats)

    return tile


def metrics_of(stats: dict[str, Tensor], rollout: Tensor, counts: Tensor, longest: int) -> dict[str, tuple]:
    """Name -> (values, weights) for a Meter. stats: of `compare`, [N]; rollout, counts: [N], whose token each is, and
    whether it counts."""
    bucket = (places(rollout) * BUCKETS // longest).clamp(max=BUCKETS - 1)
    found = {
        "distill/student_entropy": (stats["student_entropy"], counts),
        "distill/teacher_entropy": (stats["teacher_entropy"], counts),
        "distill/top1_agreement": (stats["agreement"], counts), "distill/near_mass": (stats["near"], counts),
        # a share of sums: each token weighs as much as its KL
        "distill/special_share": (stats["special"] / stats["kl"].clamp(min=1e-30), counts * stats["kl"].clamp(min=0)),
    }  # fmt: skip
    for name in ("kl", "teacher_entropy", "student_stop", "teacher_stop"):
        for part in range(BUCKETS):
            found[f"position/{name}_{part + 1}"] = stats[name], counts * (bucket == part)
    return found


def overlap(averages: dict[str, float], rollouts: str) -> str | None:
    """How near student and teacher are, with the advice that follows from it; None where nothing was sampled. averages:
    of `metrics_of`, before the first step; rollouts: as the option."""
    if "distill/top1_agreement" not in averages:
        return None
    agreed = averages["distill/top1_agreement"]
    said = f"student and teacher have the same best token at {agreed:.0%} of the first rollouts' tokens, and the "
    said += f"student's {NEAR} best hold {averages['distill/near_mass']:.0%} of the teacher's mass"
    if agreed < NEAR_ENOUGH and rollouts == "live":
        return f"{said}: so far apart, rollouts: frozen is worth a try, which samples once"
    if agreed >= NEAR_ENOUGH and rollouts == "frozen":
        return f"{said}: so near, rollouts: live teaches more, as the student moves on from where it began"
    return said


def is_due(state: TrainerState, args: TrainingArguments) -> bool:
    """Is the step that begins now logged, by logging_steps and logging_first_step?"""
    first = args.logging_first_step and state.global_step == 0
    return first or (state.global_step + 1) % max(int(state.logging_steps), 1) == 0


def diagnose(trainer: Any, batch: dict[str, Any]) -> dict[str, tuple]:
    """The metrics of one micro-batch of rollouts. All ranks call it."""
    given = trainer.terminal_ids, special_ids(trainer.tokenizer)
    named = ({i for i in ids if i < trainer.vocabulary} for ids in given)
    ends, special = (torch.tensor(sorted(ids), dtype=torch.long, device=trainer.args.device) for ids in named)
    with torch.no_grad(), eval_mode(trainer.model_wrapped), trainer.accelerator.autocast():
        states = trainer.teacher.states(batch, trainer.stop)
        tile = trainer.stop(compare(states, trainer.args.temperature, ends, special))
        stats = trainer.score(trainer.model_wrapped, batch, tile)
    sampled = batch["sampled"][batch["row"]]
    counts = trainer.weights(batch) * sampled[batch["owner"]]
    return metrics_of(stats, batch["owner"], counts, trainer.args.max_completion_length)


def look_at(trainer: Any, batches: list[dict[str, Any]]) -> None:
    """Measure a window of rollouts for the log, where its step is logged, and before the first step for the advice. All
    ranks call it."""
    first, due = trainer.state.global_step == 0, is_due(trainer.state, trainer.args)
    if not (first or due):
        return
    found = Meter()
    for batch in batches:
        for name, pair in diagnose(trainer, batch).items():
            found.add(name, *pair)
    for name, total in found.totals.items() if due else ():
        trainer.meters["train"].add_pair(name, total)
    if first and (said := overlap(found.averages(trainer.accelerator), trainer.args.rollouts)):
        logger.info("%s", said)
