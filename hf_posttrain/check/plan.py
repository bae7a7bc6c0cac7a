"""What training would do: optimizer steps, tokens a step, layout, and what padding and shared prompts cost or save."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedModel

from ..rounds.config import number_of_rounds
from ..rounds.iterative_trainer import planned_rows
from ..scoring import layouts
from ..scoring.attention_selection import row_multiple
from ..scoring.layout_selection import supported_layouts
from ..scoring.layouts import Branch, Example
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig

MICRO_BATCHES = 50  # how many are laid out to measure padding and tokens


@dataclass
class Plan:
    """Of a stream, what depends on the number and lengths of rows is None."""

    rows: int | None  # prepared training rows
    processes: int  # that train together
    rows_per_step: int  # of an optimizer step, on all processes: fewer where an epoch has no more
    steps: int  # optimizer steps
    epochs: float | None  # passes over the rows
    layout: str  # how examples are laid out: shared, packed or padded
    why: str  # what decides the layout
    tokens_per_step: int | None = None  # without padding; of answers yet to be sampled, the longest possible
    trained_per_step: int | None = None  # of them, tokens that the loss counts
    padding: float | None = None  # share of the positions of laid-out batches that is padding
    rounds: str = ""  # what they are, where the run has rounds
    saved: float | None = None  # share of tokens that is not computed, since answers share their prompt

    def lines(self) -> Iterator[str]:
        of = "a stream"
        if self.rows is not None:
            of = f"{self.epochs:.3g} epoch{'s' * (self.epochs != 1)} of {self.rows} rows"
        processes = f" on {self.processes} processes" if self.processes > 1 else ""
        yield f"{self.steps} steps of {self.rows_per_step} rows{processes}, {of}"
        yield from [self.rounds] if self.rounds else []
        yield f"layout: {self.layout} ({self.why})"
        if self.tokens_per_step is not None:
            shares = f"padding {self.padding:.1%}, saved by shared prompts {self.saved:.1%}"
            yield f"about {self.tokens_per_step} tokens a step, {self.trained_per_step} of them trained; {shares}"

    def warnings(self) -> Iterator[str]:
        if self.steps < 1:
            yield "there is no optimizer step: raise train.num_train_epochs or train.max_steps"


def plan(
    rows: Any, trainer_class: Any, config: PostTrainConfig, models: Sequence[PreTrainedModel], processes: int
) -> Plan:
    """rows: of data.train, prepared. models: the policy, and the teacher if any; they need no weights."""
    fitting, why = supported_layouts(models, config.max_length)
    layout = fitting[0] if config.layout == "auto" else config.layout
    multiple = row_multiple(models, config.device)
    # with sequence parallelism several processes share each row
    parallel = getattr(config, "parallelism_config", None)
    sharing = 1 if parallel is None else parallel.sp_size
    per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * (processes // sharing)
    if not isinstance(rows, datasets.Dataset):
        return Plan(None, processes, per_step, config.max_steps, None, layout, why)
    # optimizer steps as HF's Trainer counts them: the last of an epoch may be smaller; processes that share rows draw
    # batches of their own all the same, and train on each of them together
    size = config.per_device_train_batch_size
    batches = len(rows) / (size * processes)
    batches = math.floor(batches) if config.dataloader_drop_last else math.ceil(batches)
    in_epoch = max(math.ceil(batches * sharing / config.gradient_accumulation_steps), 1)
    steps = math.ceil(in_epoch * config.num_train_epochs)
    epochs = config.num_train_epochs
    if config.max_steps > 0:
        steps = config.max_steps
        epochs = config.max_steps / in_epoch
    per_step = min(per_step, len(rows))
    # tokens, padding and what shared prompts save, of micro-batches drawn at random
    order = np.random.default_rng(0).permutation(len(rows))[: size * MICRO_BATCHES].tolist()
    counts = np.zeros(4)
    for start in range(0, len(order), size):
        examples = planned_examples([rows[n] for n in order[start : start + size]], trainer_class, config)
        # the packed layout has no padding, and a copy of the prompt for each answer
        options = {"row_multiple": multiple, "batch_class": trainer_class.collator_class.batch_class}
        batch, packed = (layouts.collate(examples, name, **options) for name in (layout, "packed"))
        weights = batch.router_weights  # 0 on padding alone
        counts += [int((weights > 0).sum()), len(batch.scored), weights.numel(), packed.input_ids.numel()]
    tokens, trained, positions, separate = counts.tolist()
    return Plan(
        len(rows),
        processes,
        per_step,
        steps,
        epochs,
        layout,
        why,
        round(tokens / len(order) * per_step),
        round(trained / len(order) * per_step),
        padding=1 - tokens / positions,
        saved=1 - tokens / separate,
        rounds=_describe_rounds(config, len(rows), steps),
    )


def _describe_rounds(config: PostTrainConfig, prompts: int, steps: int) -> str:
    """The rounds of a run in a line."""
    rounds = getattr(config, "rounds", None)
    if rounds is None:
        return ""
    each = f"{rounds.num_generations} answers to each prompt, judged by {rounds.judge}"
    if rounds.steps:
        return f"rounds of {rounds.steps} steps: {each}; rows are prompts"
    if (count := number_of_rounds(rounds, steps)) < 1:
        return ""
    fewer = f", and not {rounds.count}, of which each takes a step" if count < rounds.count else ""
    about = "about " if steps % count else ""
    return f"{count} rounds of {about}{round(steps / count)} steps{fewer} over {prompts} prompts: {each}"


def planned_examples(rows: list[dict], trainer_class: type[PostTrainer], config: Any) -> list[Example]:
    """The examples of prepared rows; rollouts that are yet to be sampled have full length."""
    if rounds := getattr(config, "rounds", None):
        rows = [made for row in rows for made in planned_rows(row, trainer_class.method, rounds)]
    examples = [example for row in rows for example in trainer_class.examples(row)]
    if not trainer_class.method.rows.sampled:
        return examples
    return [Example(e.prompt, [Branch([0] * config.max_completion_length)] * config.num_generations) for e in examples]
