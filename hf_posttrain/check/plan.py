"""Plan of a training: optimizer steps, tokens per step, layout, padding, and savings by shared prompts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedModel

from ..data.dataset_type import AnyDataset
from ..errors import count_noun
from ..rounds.config import number_of_rounds
from ..rounds.iterative_trainer import planned_rows
from ..scoring import layouts
from ..scoring.attention_selection import row_multiple
from ..scoring.layout_selection import supported_layouts
from ..scoring.layouts import Branch, Example
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig

MICRO_BATCHES = 50
"""Number of micro-batches that are laid out to measure padding and tokens."""


@dataclass
class Plan:
    """Plan of a training. For a stream, fields that depend on the number and the lengths of rows are None."""

    rows: int | None  # prepared training rows
    processes: int  # that train together
    rows_per_step: int  # of an optimizer step, on all processes; fewer if an epoch has fewer
    steps: int  # optimizer steps
    epochs: float | None  # passes over the rows
    layout: str  # of the examples: shared, packed or padded
    why: str  # reason for the layout
    tokens_per_step: int | None = None  # without padding; answers that are yet to be sampled have the largest length
    trained_per_step: int | None = None  # tokens of these that the loss counts
    padding: float | None = None  # share of the positions of laid-out batches that is padding
    rounds: str = ""  # description of the rounds, if the run has any
    saved: float | None = None  # share of tokens that is not computed because answers share their prompt

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        source = "a stream"
        if self.rows is not None:
            source = f"{self.epochs:.3g} epoch{'s' * (self.epochs != 1)} of {count_noun(self.rows, 'row')}"
        processes = f" on {self.processes} processes" if self.processes > 1 else ""
        steps = f"{count_noun(self.steps, 'step')} of {count_noun(self.rows_per_step, 'row')}"
        yield f"{steps}{processes}, {source}"
        yield from [self.rounds] if self.rounds else []
        yield f"layout: {self.layout} ({self.why})"
        if self.tokens_per_step is not None:
            shares = f"padding {self.padding:.1%}, saved by shared prompts {self.saved:.1%}"
            yield f"about {self.tokens_per_step} tokens a step, {self.trained_per_step} of them trained; {shares}"

    def warnings(self) -> Iterator[str]:
        """Yield problems that would ruin training."""
        if self.steps < 1:
            yield "there is no optimizer step. Raise train.num_train_epochs or train.max_steps"


def plan(
    rows: AnyDataset,
    trainer_class: type[PostTrainer],
    config: PostTrainConfig,
    models: Sequence[PreTrainedModel],
    processes: int,
) -> Plan:
    """Return the plan of a training.

    Args:
        rows: Prepared rows of data.train.
        trainer_class: Trainer class of the run.
        config: Config of the run.
        models: The policy, and the teacher if there is one, without weights.
        processes: Number of processes that train together.
    """
    fitting, reason = supported_layouts(models, config.max_length)
    layout = fitting[0] if config.layout == "auto" else config.layout
    multiple = row_multiple(models, config.device)
    # with sequence parallelism several processes share each row
    parallel = getattr(config, "parallelism_config", None)
    processes_per_row = 1 if parallel is None else parallel.sp_size
    size = config.per_device_train_batch_size
    rows_per_step = size * config.gradient_accumulation_steps * (processes // processes_per_row)
    if not isinstance(rows, datasets.Dataset):
        return Plan(None, processes, rows_per_step, config.max_steps, None, layout, reason)

    # optimizer steps as HF's Trainer counts them: the last of an epoch may be smaller. Processes that share rows still
    # read different batches, and train on each of them together
    batches = len(rows) / (size * processes)
    batches = math.floor(batches) if config.dataloader_drop_last else math.ceil(batches)
    steps_per_epoch = max(math.ceil(batches * processes_per_row / config.gradient_accumulation_steps), 1)
    steps = math.ceil(steps_per_epoch * config.num_train_epochs)
    epochs = config.num_train_epochs
    if config.max_steps > 0:
        steps = config.max_steps
        epochs = config.max_steps / steps_per_epoch
    rows_per_step = min(rows_per_step, len(rows))

    # tokens, padding and savings by shared prompts, measured on random micro-batches
    order = np.random.default_rng(0).permutation(len(rows))[: size * MICRO_BATCHES].tolist()
    counts = np.zeros(4)
    for start in range(0, len(order), size):
        examples = planned_examples([rows[n] for n in order[start : start + size]], trainer_class, config)
        # the packed layout has no padding, and a copy of the prompt for each answer
        options: Any = {"row_multiple": multiple, "batch_class": trainer_class.collator_class.batch_class}
        batch, packed = (layouts.collate(examples, name, **options) for name in (layout, "packed"))
        weights = batch.router_weights  # 0 on padding alone
        counts += [int((weights > 0).sum()), len(batch.scored), weights.numel(), packed.input_ids.numel()]
    tokens, trained, positions, separate = counts.tolist()
    return Plan(
        len(rows),
        processes,
        rows_per_step,
        steps,
        epochs,
        layout,
        reason,
        round(tokens / len(order) * rows_per_step),
        round(trained / len(order) * rows_per_step),
        padding=1 - tokens / positions,
        saved=1 - tokens / separate,
        rounds=_describe_rounds(config, len(rows), steps),
    )


def _describe_rounds(config: PostTrainConfig, prompts: int, steps: int) -> str:
    """Return a line about the rounds of a run; empty without rounds."""
    rounds = getattr(config, "rounds", None)
    if rounds is None:
        return ""
    answers = f"{rounds.num_generations} answers to each prompt, judged by {rounds.judge}"
    if rounds.steps:
        return f"rounds of {rounds.steps} steps: {answers}; rows are prompts"
    if (count := number_of_rounds(rounds, steps)) < 1:
        return ""
    fewer = f" (instead of {rounds.count}, because each takes a step)" if count < rounds.count else ""
    about = "about " if steps % count else ""
    round_steps = count_noun(round(steps / count), "step")
    return (
        f"{count_noun(count, 'round')}{fewer} of {about}{round_steps} over {count_noun(prompts, 'prompt')}: {answers}"
    )


def planned_examples(
    rows: Sequence[dict[str, Any]], trainer_class: type[PostTrainer], config: PostTrainConfig
) -> list[Example]:
    """Return the examples of prepared rows. Rollouts that are yet to be sampled have the largest length."""
    options: Any = config
    if rounds := getattr(config, "rounds", None):
        rows = [planned for row in rows for planned in planned_rows(row, trainer_class.method, rounds)]
    examples = [example for row in rows for example in trainer_class.examples(row)]
    if not trainer_class.method.rows.sampled:
        return examples
    branches = [Branch([0] * options.max_completion_length)] * options.num_generations
    return [Example(example.prompt, branches) for example in examples]
