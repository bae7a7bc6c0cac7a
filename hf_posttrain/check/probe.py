"""One optimizer step on the longest batch, with the real weights, in a folder that is deleted afterwards."""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import datasets
import numpy as np
import torch
from peft import PeftConfig
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..data.dataset_type import AnyDataset
from ..data.lengths import longest_rows, token_columns, tokens_per_row
from ..errors import count_noun
from ..losses.divergence import reverse_kl
from ..methods import METHODS, config_class
from ..methods.objective import Divergence
from ..monitoring.progress import peak_memory
from ..recipe import build
from ..recipe.sections import Recipe
from ..scoring.forward import eval_mode
from ..scoring.head import LogProb
from ..teachers.self_teacher import SelfTeacher

PROMPTS = 4
"""Number of prompts that are answered for the statistics of rollouts."""
KL_SPAN = 32
"""Number of tokens of a rollout that are averaged to one KL."""
SELF_LOSS_TOLERANCE = 1e-2
"""Largest loss of a student that is its own teacher; above it student and teacher are scored differently."""
MAX_STANDARD_ERRORS = 5.0
"""Largest deviation of rollouts from the student's distribution, in standard errors."""
_ONE_STEP = {  # options for a single step that leaves no files, in place of the recipe's; few methods have all of them
    "max_steps": 1,
    "train_sampling_strategy": "sequential",
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "eval_on_start": False,
    "resume_from_checkpoint": None,
    "report_to": "none",
    "logging_strategy": "no",
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "push_to_hub": False,
    "disable_tqdm": True,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "stop_on": None,
}


@dataclass
class SampledRollouts:
    """Statistics of rollouts that the student samples."""

    lengths: list[int]  # tokens of each rollout
    stopped: float  # share that ended before max_completion_length
    kl_by_position: list[float]  # mean reverse KL to the teacher in nats, of tokens 0 to 31, 32 to 63, ...
    to_itself: float  # loss of the student as its own teacher, a mean of absolute values: 0 up to rounding
    surprise: float  # -ln q of the sampled tokens minus the entropy of q, summed, in standard errors: 0 in expectation


@dataclass
class Probe:
    """Measurements of an optimizer step on the longest batch."""

    rows: int  # of a micro-batch, the longest there are
    longest: int  # tokens of the longest of them
    seconds: float  # of the step
    peak_bytes: int  # peak memory: of the GPU by tensors, on CPU by the whole process
    loss: float  # of that batch, before the step
    rollouts: SampledRollouts | None = None  # if the student samples
    alignment: dict[str, float] | None = None  # metrics align/ of that batch, for a teacher with its own tokenizer
    estimate: int | None = None  # bytes that `memory` estimates for this step

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        expected = "" if self.estimate is None else f" (estimate: {self.estimate / 2**30:.2f})"
        measured = f"{self.seconds:.1f} s, {self.peak_bytes / 2**30:.2f} GiB at most{expected}, loss {self.loss:.4g}"
        yield f"a step of {count_noun(self.rows, 'row')} of up to {self.longest} tokens: {measured}"
        if self.alignment:
            one_to_one, in_full = (self.alignment[f"align/{name}"] for name in ("one_to_one", "in_full"))
            shares = f"{one_to_one:.1%} of its trained tokens align with one token of the teacher"
            yield f"{shares}, {in_full:.1%} are compared in full"
        if self.rollouts:
            lengths = self.rollouts.lengths
            stopped = self.rollouts.stopped
            spread = f"{np.mean(lengths):.0f} tokens ({min(lengths)} to {max(lengths)})"
            yield f"{len(lengths)} rollouts: {spread}, {stopped:.0%} ended before train.max_completion_length"
            spans = (f"{KL_SPAN * n}: {kl:.3g}" for n, kl in enumerate(self.rollouts.kl_by_position))
            yield f"KL to the teacher from token {', '.join(spans)}"
            self_loss = f"with the student as its own teacher the loss is {self.rollouts.to_itself:.1g}"
            deviation = f"{abs(self.rollouts.surprise):.1f} standard errors from the student's distribution"
            yield f"{self_loss}; rollouts are {deviation}"

    def warnings(self) -> Iterator[str]:
        """Yield problems that would ruin training."""
        if not np.isfinite(self.loss):
            yield f"the loss of the longest batch is {self.loss}"
        if self.rollouts and self.rollouts.stopped == 0:
            fix = "Raise it, or first train the student on finished answers"
            yield f"no rollout ended before train.max_completion_length. {fix}"
        if self.rollouts and self.rollouts.to_itself > SELF_LOSS_TOLERANCE:
            problem = f"with the student as its own teacher the loss is {self.rollouts.to_itself:.2g} instead of 0"
            yield f"{problem}. Student and teacher are scored differently. Please report it"
        if self.rollouts and abs(self.rollouts.surprise) > MAX_STANDARD_ERRORS:
            deviation = f"{abs(self.rollouts.surprise):.0f} standard errors from the student's distribution"
            causes = "The sampler has other weights, another temperature, or excludes tokens (top-p, top-k)"
            yield f"rollouts are {deviation}. {causes}"


def probe(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, peft_config: PeftConfig | None, rows: AnyDataset
) -> Probe:
    """Train one step on the longest rows, and return its measurements. All ranks call it.

    Raises any error of training, including OutOfMemoryError.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the policy.
        peft_config: Adapter of the policy, if it has a new one.
        rows: Prepared rows of data.train. Of a stream only the first ones are read.
    """
    method = METHODS[recipe.method]
    options = {option.name for option in fields(config_class(method))}
    # the recipe's own trainer and weights, on as many of the longest rows as a step has
    with tempfile.TemporaryDirectory() as folder:
        overrides = {name: value for name, value in _ONE_STEP.items() if name in options} | {"output_dir": folder}
        trainer_class, config = build.configure(replace(recipe, train=recipe.train | overrides))
        step = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        chosen = longest_rows(rows, step)
        trainer: Any = trainer_class(
            args=config,
            processing_class=tokenizer,
            peft_config=peft_config,
            train_dataset=chosen,
            **build.load_models(recipe, config),
        )
        trainer.use_longest_answers = True  # in rounds, whatever is sampled
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics = trainer.train().metrics
        averages = trainer.meters["train"].averages(trainer.accelerator)
        rollouts = sample_rollouts(trainer, chosen) if method.rows.sampled else None
        chosen = chosen if recipe.rounds is None else trainer.round.rows
    columns = [name for name in token_columns(chosen) if name != "mismatch_ids"]
    return Probe(
        min(config.per_device_train_batch_size, len(chosen)),
        int(tokens_per_row(chosen, columns).max()),
        metrics["train_runtime"],
        peak_memory(config.device),
        metrics["train_loss"],
        rollouts,
        {name: value for name, value in averages.items() if name.startswith("align/")} or None,
    )


def sample_rollouts(trainer: Any, rows: datasets.Dataset) -> SampledRollouts:
    """Return statistics of rollouts of the first prompts.

    Args:
        trainer: An OPDTrainer.
        rows: Prepared rows with the prompts.
    """
    trainer.args.lmbda = 1.0
    trainer.rollouts.source = trainer.rollouts.on_policy  # samples for every prompt now
    trainer.prepare_evaluation()
    prompts = [rows[number] for number in range(min(PROMPTS, len(rows)))]
    [batch] = trainer.rollouts.window([trainer.data_collator(prompts)], 0)
    tokens = batch.targets
    with torch.no_grad():
        if trainer.diagnostics.can_compare(batch):
            objective = Divergence(reverse_kl, trainer.request("dense", None))
            signal = trainer.teacher.signal(batch, objective.request)
            kl = trainer.score(trainer.model_wrapped, batch, objective.tile(signal, batch)).value.double()
        else:  # an estimate from the sampled tokens
            scores, _ = trainer.distill(trainer.model_wrapped, batch, None)
            kl = (scores.student - scores.teacher).double()
        tile = LogProb(tokens, trainer.args.temperature, stats=True, vocabulary=trainer.vocabulary)
        scored = trainer.score(trainer.model_wrapped, batch, tile)
    surprise = (-scored.value - scored.entropy).double()
    error = surprise.square().sum().sqrt().clamp(min=1e-6)
    # tokens of a rollout are in order within the batch, with tokens of other rollouts between them
    masks = [batch.owner == number for number in range(len(batch.row))]
    spans = zip_longest(*(kl[mask].split(KL_SPAN) for mask in masks), fillvalue=kl[:0])
    ends = torch.isin(tokens, trainer.ends)
    return SampledRollouts(
        [int(mask.sum()) for mask in masks],
        float(np.mean([ends[mask].any().item() for mask in masks])),
        [torch.cat(span).mean().item() for span in spans],
        self_distillation_loss(trainer, batch),
        (surprise.sum() / error).item(),
    )


def self_distillation_loss(trainer: Any, batch: MicroBatch) -> float:
    """Return the mean absolute loss of a batch if the student is its own teacher, which should be 0."""
    teacher = trainer.teacher
    trainer.teacher = SelfTeacher(trainer, nullcontext, "")
    batch = batch.replace(teacher_inputs=None, teacher_signal=None)
    try:
        with torch.no_grad(), eval_mode(trainer.model_wrapped), trainer.accelerator.autocast():
            scores, _ = trainer.distill(trainer.model_wrapped, batch, None)
    finally:
        trainer.teacher = teacher
    gap = (scores.teacher - scores.student).abs()
    divergence = gap if scores.divergence is None else scores.divergence
    return max(gap.mean().item(), divergence.abs().mean().item())
