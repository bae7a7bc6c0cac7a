"""What training would do: optimizer steps, tokens a step, layout, and what padding and shared prompts cost or save.

    plan    prepared rows, Config, models without weights -> Plan
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedModel

from ..scoring import layouts
from ..scoring.choose_layout import able
from ..scoring.layouts import Branch, Example

MICRO_BATCHES = 50
"""How many are laid out to measure padding and tokens."""


@dataclass
class Plan:
    """What training would do."""

    rows: int | None
    """Prepared training rows; None for a stream."""
    processes: int
    """That train side by side."""
    rows_per_step: int
    """Rows of an optimizer step, on all processes."""
    steps: int
    """Optimizer steps."""
    epochs: float | None
    """Passes over the rows; None for a stream."""
    layout: str
    """How examples are laid out: shared, packed or padded."""
    why: str
    """What decides that."""
    tokens_per_step: int | None
    """Tokens of an optimizer step without padding; OPD: with rollouts of full length. None for a stream."""
    trained_per_step: int | None
    """Of them, tokens that the loss is taken of."""
    padding: float | None
    """Share of the positions of laid-out batches that are padding."""
    saved: float | None
    """Share of tokens that is not computed since answers share their prompt."""

    def lines(self) -> Iterator[str]:
        """The text for people."""
        of = f"{self.epochs:.3g} epochs of {self.rows} rows" if self.rows is not None else "a stream"
        processes = f" on {self.processes} processes" if self.processes > 1 else ""
        yield f"{self.steps} steps of {self.rows_per_step} rows{processes}, {of}"
        yield f"layout: {self.layout} ({self.why})"
        if self.tokens_per_step is not None:
            yield (
                f"about {self.tokens_per_step} tokens a step, {self.trained_per_step} of them trained;"
                f" padding {self.padding:.1%}, saved by shared prompts {self.saved:.1%}"
            )

    def warnings(self) -> Iterator[str]:
        """What would ruin training."""
        if self.steps < 1:
            yield "there is no optimizer step: raise train.num_train_epochs or train.max_steps"


def plan(rows: Any, trainer_class: Any, config: Any, models: Sequence[PreTrainedModel], processes: int) -> Plan:
    """rows: of data.train, prepared. models: the policy, and what scores beside it; they need no weights."""
    fitting, why = able(models)
    layout = fitting[0] if config.layout == "auto" else config.layout
    readers = processes // _sharing(config)
    per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * readers
    if not isinstance(rows, datasets.Dataset):
        return Plan(None, processes, per_step, config.max_steps, None, layout, why, None, None, None, None)
    steps, epochs = _steps(len(rows), config, processes)
    measured = _measured(rows, trainer_class, config, layout)
    tokens, trained = (round(measured[name] * per_step) for name in ("tokens", "trained"))
    return Plan(
        len(rows), processes, per_step, steps, epochs, layout, why, tokens, trained, measured["padding"],
        measured["saved"],
    )  # fmt: skip


def _sharing(config: Any) -> int:
    """How many processes share each row, by sequence parallelism."""
    parallel = getattr(config, "parallelism_config", None)
    return 1 if parallel is None else parallel.sp_size


def _steps(rows: int, config: Any, processes: int) -> tuple[int, float]:
    """(optimizer steps, epochs) as HF's Trainer counts them: a last step of an epoch may be smaller.

    Processes that share rows draw batches of their own, and then train on one another's in turn.
    """
    per_batch = config.per_device_train_batch_size * processes
    batches = rows // per_batch if config.dataloader_drop_last else math.ceil(rows / per_batch)
    in_epoch = max(math.ceil(batches * _sharing(config) / config.gradient_accumulation_steps), 1)
    if config.max_steps > 0:
        return config.max_steps, config.max_steps / in_epoch
    return math.ceil(in_epoch * config.num_train_epochs), config.num_train_epochs


def _measured(rows: datasets.Dataset, trainer_class: Any, config: Any, layout: str) -> dict[str, float]:
    """Of micro-batches drawn at random: `tokens` and `trained` of a row, and the shares `padding` and `saved`."""
    size = config.per_device_train_batch_size
    order = np.random.default_rng(0).permutation(len(rows))[: size * MICRO_BATCHES]
    counts = np.zeros(4)
    for start in range(0, len(order), size):
        drawn = [rows[int(number)] for number in order[start : start + size]]
        counts += _counts(_laid_out(drawn, trainer_class, config, layout))
        counts[3] += _counts(_laid_out(drawn, trainer_class, config, "packed"))[0]
    tokens, trained, positions, separate = counts
    return {
        "tokens": tokens / len(order), "trained": trained / len(order), "padding": 1 - tokens / positions,
        "saved": 1 - tokens / separate,
    }  # fmt: skip


def _laid_out(rows: list[dict], trainer_class: Any, config: Any, layout: str) -> dict:
    """A micro-batch; OPD's with rollouts of full length."""
    examples = [example for row in rows for example in trainer_class.examples(row)]
    if trainer_class.method.rows.sampled:
        branches = [Branch([0] * config.max_completion_length)] * config.num_generations
        examples = [Example(example.prompt, branches) for example in examples]
    return layouts.collate(examples, layout)


def _counts(batch: dict) -> np.ndarray:
    """[tokens, trained tokens, positions, 0] of a micro-batch; padding weighs nothing to the router."""
    weights = batch["router_weights"]
    return np.array([int((weights > 0).sum()), len(batch["scored"]), weights.numel(), 0])
