"""The longest batch, run for real: one optimizer step with the weights, in a folder that is thrown away.

    probe    what it took, and for OPD what the student samples
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import datasets
import numpy as np
import torch

from ..data.packing import lengths_of
from ..methods import METHODS
from ..recipe import build as parts
from ..recipe.keys import train_fields
from ..recipe.sections import Recipe
from ..scoring import teacher_tiles
from ..scoring.forward import targets as targets_of
from ..watch.pace import peak_memory
from .memory import longest

PROMPTS = 4
"""Of OPD, sampled for the statistics of rollouts."""
SPAN = 32
"""Tokens of a rollout that one figure of its KL is of."""
_ONCE = {
    "max_steps": 1, "train_sampling_strategy": "sequential", "eval_strategy": "no", "save_strategy": "no",
    "load_best_model_at_end": False, "eval_on_start": False, "resume_from_checkpoint": None, "report_to": "none",
    "logging_strategy": "no", "dataloader_num_workers": 0, "push_to_hub": False, "disable_tqdm": True,
    "desirable_weight": 1.0, "undesirable_weight": 1.0, "stop_on": None,
}  # fmt: skip
"""Of the train section, in place of what the recipe says."""


@dataclass
class Rollouts:
    """What the student samples."""

    lengths: list[int]
    """Tokens of each rollout."""
    stopped: float
    """Share that ended by itself, before max_completion_length."""
    kl_by_position: list[float]
    """Mean reverse KL of student to teacher in nats, of tokens 0 to 31, 32 to 63, ..."""


@dataclass
class Probe:
    """What an optimizer step on the longest batch took."""

    rows: int
    """Of a micro-batch, the longest there are."""
    longest: int
    """Tokens of the longest of them."""
    seconds: float
    """Of the step."""
    peak_bytes: int
    """Most memory held: of the GPU by tensors, on CPU by the whole process."""
    loss: float
    """Of that batch, before the step."""
    rollouts: Rollouts | None = None
    """Of OPD."""

    def lines(self) -> Iterator[str]:
        """The text for people."""
        yield (
            f"a step of {self.rows} rows of up to {self.longest} tokens: {self.seconds:.1f} s, "
            f"{self.peak_bytes / 2**30:.2f} GiB at most, loss {self.loss:.4g}"
        )
        if self.rollouts:
            lengths, stopped = self.rollouts.lengths, self.rollouts.stopped
            yield (
                f"{len(lengths)} rollouts: {np.mean(lengths):.0f} tokens ({min(lengths)} to {max(lengths)}), "
                f"{stopped:.0%} ended by themselves"
            )
            spans = (f"{SPAN * n}: {kl:.3g}" for n, kl in enumerate(self.rollouts.kl_by_position))
            yield f"KL to the teacher from token {', '.join(spans)}"

    def warnings(self) -> Iterator[str]:
        """What would ruin training."""
        if not np.isfinite(self.loss):
            yield f"the loss of the longest batch is {self.loss}"
        if self.rollouts and self.rollouts.stopped == 0:
            yield "no rollout ended by itself: raise train.max_completion_length, or train the student by SFT first"


def probe(recipe: Recipe, tokenizer: Any, peft_config: Any, rows: Any) -> Probe:
    """One step on the longest rows of `rows` (prepared; of a stream its first ones). Every rank calls it.

    Raises what training would: OutOfMemoryError too.
    """
    names = {field.name for field in fields(train_fields(recipe.method))}
    with tempfile.TemporaryDirectory() as folder:
        once = {name: value for name, value in _ONCE.items() if name in names} | {"output_dir": folder}
        trainer_class, config = parts.configure(replace(recipe, train=recipe.train | once))
        step = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        chosen = datasets.Dataset.from_list(longest(rows, step))
        trainer = trainer_class(
            args=config, processing_class=tokenizer, peft_config=peft_config, train_dataset=chosen,
            **parts.load_models(recipe, config),
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics = trainer.train().metrics
        ids = [lengths_of(chosen, name) for name in chosen.column_names if name.endswith("_ids")]
        rollouts = sampled(trainer, chosen) if METHODS[recipe.method].rows.sampled else None
    return Probe(
        min(config.per_device_train_batch_size, len(chosen)), int(np.sum(ids, axis=0).max()), metrics["train_runtime"],
        peak_memory(config.device), metrics["train_loss"], rollouts,
    )  # fmt: skip


def sampled(trainer: Any, rows: datasets.Dataset) -> Rollouts:
    """Rollouts of the first prompts: lengths, stops, and the KL of student to teacher by position."""
    drawn = [rows[number] for number in range(min(PROMPTS, len(rows)))]
    [batch] = trainer.roll_out([trainer.data_collator(drawn)], 0)
    targets, owner = targets_of(batch), batch["owner"]
    reverse_kl = teacher_tiles.divergence("reverse_kl", None, 0.5)
    with torch.no_grad():
        states, temperature = trainer.teacher.states(batch), trainer.args.temperature
        tile = teacher_tiles.dense(reverse_kl, states, targets, temperature, ce_coef=0.0)
        kl = trainer.score(trainer.model_wrapped, batch, tile)["value"]
    lengths = torch.bincount(owner, minlength=len(batch["sampled"]))
    order = owner.argsort(stable=True)  # branch after branch, each in its own order
    place = torch.arange(len(owner), device=owner.device) - (lengths.cumsum(0) - lengths)[owner[order]]
    means = torch.bincount(place // SPAN, weights=kl[order].double()) / torch.bincount(place // SPAN)
    ends = torch.isin(batch["last_id"], torch.tensor(trainer.terminal_ids, device=owner.device))
    return Rollouts(lengths.tolist(), ends.double().mean().item(), means.tolist())
