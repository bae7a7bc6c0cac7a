"""The parts of a run, each rehearsed on the longest rows, and the bytes that it needs beside weights at its peak.

    training_step        forward and backward
    evaluation           losses without gradient
    scoring_beforehand   by the reference, or by the teacher for its top tokens
    generation           rollouts, or answers for eval_exact_match
    phases_of            those that a run has
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..generation.rollout import Sampler, can_decode, decode
from ..models.reference import planned_twice as is_cheaper
from ..scoring.forward import causal_lm, eval_mode
from ..scoring.top_tokens import TopTokens
from .live import Live, nbytes
from .placement import Engine
from .rehearsal import longest

MOST_ROWS = 32
"""Rows in a rehearsed batch; what more of them need is in proportion."""


@dataclass(frozen=True)
class Phase:
    """A part of a run at its peak."""

    name: str
    beyond: int
    """Bytes of tensors beside weights, gradients and the optimizer's state."""
    gradients: bool = False
    """Do gradients exist?"""
    optimizer: bool = True
    """Does the optimizer's state exist?"""
    second: bool = True
    """Is the reference or teacher on the device, if there is one?"""
    whole: bool = False
    """Does each device gather all weights of the policy?"""


def training_step(trainer: Any, rows: list[dict]) -> int:
    """Forward and backward of one micro-batch, or of a second one beside the first's gradients: bytes without these."""
    model, accumulated = trainer.model.train(), min(trainer.args.gradient_accumulation_steps, 2)
    with _watched(trainer) as live:
        for batch in trainer.prepare_window([_collated(trainer, rows) for _ in range(accumulated)]):
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, batch)
            loss.backward()
            del loss  # with its graph, as in `Trainer.training_step`
        gradients = nbytes(p.grad for p in model.parameters() if p.grad is not None)
        peak = live.peak
        model.zero_grad()
    return peak - gradients


def evaluation(trainer: Any, rows: list[dict]) -> int:
    """The losses of a batch without gradient."""
    trainer.model.eval()
    with _watched(trainer) as live, torch.no_grad(), trainer.accelerator.autocast():
        trainer.losses(trainer.model, _collated(trainer, rows))
    return live.peak


def scoring_beforehand(trainer: Any, scores: "Scores", rows: list[dict]) -> int:
    """A batch scored by the reference or, for its top tokens, by the teacher."""
    with _watched(trainer) as live:
        batch = _collated(trainer, rows)
        if scores.top_k:
            trainer.teacher.score(batch, TopTokens(scores.top_k, trainer.args.temperature, trainer.vocabulary))
        else:
            trainer.reference.online.logps(trainer.model, trainer.reference_batch(batch))
    return live.peak


def teachers_pass(trainer: Any, rows: list[dict]) -> int:
    """An offloaded teacher's forward, while it is on the device."""
    with _watched(trainer) as live:
        [batch] = trainer.prepare_window([_collated(trainer, rows)])
        trainer.teacher.states(batch)
    return live.peak


def generation(trainer: Any, prompts: list[list[int]], copies: int, new_tokens: int, temperature: float | None) -> int:
    """`copies` answers to each prompt in one call, at its two peaks: prompts just read, and the cache full."""
    model = causal_lm(trainer.model)
    vocabulary = getattr(trainer, "vocabulary", model.config.get_text_config().vocab_size)

    def peak(prompts: list[list[int]], count: int, after_reading: bool) -> int:
        """after_reading: without that of reading the prompts."""
        with _watched(trainer) as live, torch.no_grad(), eval_mode(trainer.model), trainer.accelerator.autocast():
            first = live.restart if after_reading else lambda: None
            decode(model, prompts, count, [-1], _Drawn(temperature, vocabulary, first))
        return live.peak

    def reading(prompts: list[list[int]]) -> int:
        return peak([prompt for prompt in prompts for _ in range(copies)], 1, after_reading=False)

    full = [[0] * (len(prompts[0]) + new_tokens - 2)] * (len(prompts) * copies)  # equal prompts are read once
    return max(in_proportion(reading, prompts), peak(full, 2, after_reading=True))


@dataclass(frozen=True)
class _Drawn(Sampler):
    """A sampler whose memory counts, and that always draws the same token."""

    at_first: Callable[[], None]
    """Called before the first token: what to do when the prompts have been read."""
    calls: list[None] = field(default_factory=list)

    def __call__(self, logits: Tensor) -> Tensor:
        """[n, V] -> [n], real."""
        if not self.calls:
            self.at_first()
        self.calls.append(None)
        super().__call__(logits)
        return torch.zeros(len(logits), dtype=torch.long)


def in_proportion(measure: Callable[[list], int], rows: list) -> int:
    """`measure(rows)`; of more than MOST_ROWS, on the straight line through MOST_ROWS and half of them."""
    if len(rows) <= MOST_ROWS:
        return measure(rows)
    half, most = measure(rows[: MOST_ROWS // 2]), measure(rows[:MOST_ROWS])
    return most + (most - half) * (len(rows) - MOST_ROWS) // (MOST_ROWS // 2)


@contextmanager
def _watched(trainer: Any) -> Iterator[Live]:
    second = trainer.second_model.model if trainer.second_model is not None else torch.nn.Module()
    known = [tensor for model in (trainer.model, second) for tensor in (*model.parameters(), *model.buffers())]
    with Live(known) as live:
        yield live


def _collated(trainer: Any, rows: list[dict]) -> dict[str, Any]:
    return dict(trainer.data_collator(rows))



# ---- which of them a run has


def phases_of(trainer: Any, config: Any, rows: dict[str, Any], engine: Engine) -> Iterator[Phase]:
    """Those of a run with `config` on prepared rows, {"train": ..., "eval": ...}."""
    scores, leaves = Scores.of(trainer, config), False
    train = longest(rows["train"], config.per_device_train_batch_size, columns(trainer))
    if scores.kept:
        size = getattr(config, "precompute_ref_batch_size", None) or config.per_device_eval_batch_size
        beyond = in_proportion(partial(scoring_beforehand, trainer, scores), longest(rows["train"], size))
        itself = scores.drops_model and not trainer.method.rows.masked and engine.name in ("single", "ddp")
        yield Phase("scoring beforehand", beyond, optimizer=False, second=not itself)
        leaves = scores.drops_model or (engine.gpu and not engine.shards)
    elif engine.gpu and trainer.second_model is not None and trainer.second_model.offload:
        beyond = in_proportion(partial(teachers_pass, trainer), train)
        yield Phase("the teacher's pass", beyond, gradients=config.gradient_accumulation_steps > 1)
        leaves = True
    step = in_proportion(partial(training_step, trainer), scores.beside(train))
    yield Phase("training step", step, gradients=True, second=not leaves)
    if rows.get("eval") is not None:
        evaluated = longest(rows["eval"], config.per_device_eval_batch_size, columns(trainer))
        beyond = in_proportion(partial(evaluation, trainer), scores.beside(evaluated))
        yield Phase("evaluation", beyond, second=not leaves)
    for name, call in _generations(trainer, config, rows):
        yield Phase(name, call(), second=not leaves, whole=True)


@dataclass(frozen=True)
class Scores:
    """What of the reference or teacher is computed before training and kept on disk."""

    top_k: int | None
    """The teacher's tokens."""
    reference: bool
    """The reference's log-probabilities."""
    drops_model: bool
    """Is the second model gone then?"""

    @classmethod
    def of(cls, trainer: Any, config: Any) -> "Scores":
        """trainer: a rehearsed one, whose own arguments keep nothing."""
        top_k, asked = (getattr(config, f"precompute_{name}", None) for name in ("teacher_top_k", "ref_log_probs"))
        has = getattr(trainer, "reference", None) is not None
        return cls(top_k, has and (is_cheaper(trainer) if asked is None else asked), bool(top_k or asked))

    @property
    def kept(self) -> bool:
        """Is anything computed beforehand?"""
        return bool(self.top_k or self.reference)

    def beside(self, rows: list[dict]) -> list[dict]:
        """The rows with such scores; their values do not matter."""
        if self.reference:
            return [row | {"ref_logps": [0.0] * branches(row)} for row in rows]
        if self.top_k:
            scored = [[0] * self.top_k]
            counts = [sum(row.get("completion_mask") or [1] * len(row["completion_ids"])) for row in rows]
            return [
                row | {"teacher_ids": scored * n, "teacher_logps": [[0.0] * self.top_k] * n}
                for row, n in zip(rows, counts, strict=True)
            ]
        return rows


def branches(row: dict) -> int:
    """Of a row that a reference scores."""
    return 2 if "chosen_ids" in row or "mismatch_ids" in row else 1


def columns(trainer: Any) -> tuple[str, ...]:
    """What makes a row long: of OPD's the prompt alone, since its answer is not in the data."""
    return ("prompt_ids",) if trainer.method.rows.sampled else ()


def _generations(trainer: Any, config: Any, rows: dict[str, Any]) -> Iterator[tuple[str, Callable[[], int]]]:
    if not can_decode(causal_lm(trainer.model)):
        return
    if getattr(config, "rollout", None) == "transformers":
        copies, window = config.num_generations, config.per_device_train_batch_size * config.gradient_accumulation_steps
        most = -(-(config.generation_batch_size or window * copies) // copies)
        prompts = [row["prompt_ids"] for row in longest(rows["train"], min(window, most), ("prompt_ids",))]
        length, temperature = config.max_completion_length, config.temperature
        yield "generation", partial(generation, trainer, prompts, copies, length, temperature)
    if config.eval_exact_match and rows.get("eval") is not None:
        prompts = [row["prompt_ids"] for row in longest(rows["eval"], config.eval_batch_size, ("prompt_ids",))]
        yield "greedy answers", partial(generation, trainer, prompts, 1, config.eval_max_completion_length, None)
