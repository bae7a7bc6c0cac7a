"""Iterative training with any method: sample answers from the current policy, judge them, pair them, and train on them.

    for each round:
        y_1 .. y_K ~ policy(.|x)  for every prompt x of the round        sample_and_judge.py
        a score for each y                                               judges/
        rows of the method's kind from x, y and the scores               pairing.py
        for each optimizer step of the round: its share of the rows, with the method's own loss

The data hold prompts, and right answers if the judge requires them. per_device_train_batch_size counts prompts, as in
on-policy distillation. A run has as many optimizer steps as it would have with the prompts as rows, for any number of
rows of a round. With `count` a round is one pass (or num_train_epochs passes) over all prompts. With `steps` it has
that number of optimizer steps and their prompts. With steps: 1 every step trains on answers of the weights that it
changes.

One `train()` runs all rounds, with the optimizer, schedule, engine and report of any other run. Checkpoints store the
rows of the round, and each round ends with one. Answers of a round that was interrupted are reused (`RoundFiles`).
"""

import copy
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, check_features, conflict_message
from ..data.dataset_type import AnyDataset
from ..data.lengths import check_completions, tokens_per_row
from ..data.prepare import prepare, prompt_key, to_prepared_rows
from ..data.row_schema import PROMPTS
from ..errors import InputError
from ..generation.completions_client import ServerError
from ..models.load import sampling_vocab_size
from ..models.score_cache import score_rows
from ..rollouts import vllm
from ..rollouts.interface import SamplingInterface
from ..rollouts.policy_sampler import synchronize
from ..scoring.forward import causal_lm
from ..scoring.layouts import balance_groups
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.method_spec import Method
from .config import RoundsSection, make_section, number_of_rounds, resolve_threshold, rounds_features, rounds_problems
from .iteration_log import log_round, summarize
from .iteration_state import Round
from .judges import make_judge
from .pairing import SelectedRows, pair_up
from .sample_and_judge import RoundFiles, RoundInterrupted, ScoredCompletions, round_files, sample_and_judge

logger = logging.getLogger(__name__)
EVALUATION = 2**31
"""Takes the place of the round in the seed of an evaluation's answers, which are then equal in every evaluation."""


def in_rounds(trainer_class: type[PostTrainer], section: RoundsSection | Mapping[str, Any] | int) -> Any:
    """Return a subclass of a trainer whose data are prompts, and which makes its rows as a section describes.

    Args:
        trainer_class: Trainer of a method without a teacher.
        section: A RoundsSection, a mapping of its keys, or a number of rounds.

    Raises:
        InputError: The options of the section cannot be combined, or not with the method.
    """
    section = make_section(section)
    method = trainer_class.method
    if method.second == "teacher":
        raise InputError(conflict_message(Feature.ROUNDS, Feature.TEACHER))
    if method.head == "score":
        raise InputError(conflict_message(Feature.ROUNDS, Feature.REWARD_MODEL))
    if section.reference == "round" and method.second != "reference":
        problem = f"rounds.reference: round requires a method with a reference, and {method.name} has none"
        raise InputError(f"{problem}. Remove it")
    for names, problem in rounds_problems(section, method.rows):
        raise InputError(f"rounds: {problem}" if problem.startswith(names) else f"rounds.{names[0]}: {problem}")
    collator = type("RoundCollator", (_RoundCollator, trainer_class.collator_class), {})
    attributes = {"section": section, "collator_class": collator, "__module__": trainer_class.__module__}
    subclass: Any = type(trainer_class.__name__, (InRounds, trainer_class), attributes)
    score_metric = {} if section.judge.by == "url" else {"rounds/score": "score"}  # shares of wins are 0.5 on average
    subclass.method = replace(method, key_metrics={**score_metric, **method.key_metrics})
    subclass.data_method = replace(method, rows=PROMPTS)
    return subclass


def config_for_rounds(args: Any, section: RoundsSection) -> Any:
    """Return a copy of a Config that describes all rounds, or the Config itself if it already does.

    Raises InputError for options that cannot be combined with rounds.
    """
    if getattr(args, "rounds", None) is section:
        return args
    args = copy.copy(args)
    if args.max_length is not None and args.max_length <= section.max_completion_length:
        other = f"rounds.max_completion_length={section.max_completion_length}"
        problem = f"max_length={args.max_length} must exceed {other}, so that prompts have tokens"
        raise InputError(f"{problem}. Raise max_length, or lower max_completion_length")
    if getattr(args, "precompute_ref_log_probs", None):
        raise InputError(conflict_message(Feature.REFERENCE_CACHE, Feature.ROUNDS))
    if getattr(args, "sync_ref_model", False):
        raise InputError(conflict_message(Feature.SYNC_REFERENCE, Feature.ROUNDS))
    if args.parallelism_config and args.parallelism_config.sp_size > 1:
        raise InputError(conflict_message(Feature.SEQUENCE_PARALLEL, Feature.ROUNDS))
    if hasattr(args, "precompute_ref_log_probs"):
        args.precompute_ref_log_probs = False
    if args.metric_for_best_model == "loss" and args.load_best_model_at_end:  # HF's default: evaluations have no loss
        args.metric_for_best_model = "score"
        args.greater_is_better = True
    if section.judge.by == "url" and str(args.metric_for_best_model).removeprefix("eval_") in ("score", "best_score"):
        problem = "scores of judge url are shares of wins among answers of one model, which cannot compare two models"
        fix = "Set it to exact_match, or remove load_best_model_at_end"
        raise InputError(f"metric_for_best_model: {problem}. {fix}")
    args.passes = args.num_train_epochs  # over the rows of a round
    if section.count is not None:
        args.num_train_epochs *= section.count
    args.rounds = section
    args.max_completion_length = section.max_completion_length
    args.keep_asked = True
    args.snapshot_options()
    return args


class _RoundCollator:
    """Returns only the numbers of prompts, which tell a step how many prompts it has."""

    def __call__(self, rows: list[dict]) -> MicroBatch:
        """Return the numbers of prompts, or a batch of the rows of a round."""
        if "asked" in rows[0]:
            return MicroBatch(index=torch.tensor([row["index"] for row in rows]))
        return super().__call__(rows)  # type: ignore[misc]


class InRounds(PostTrainer, SamplingInterface):
    """Mixin that `in_rounds` puts before the trainer of a method."""

    section: ClassVar[RoundsSection]
    train_dataset: Any
    warned_about_empty_step = False
    use_longest_answers = False
    """Whether rows are made of the longest possible answers, as a probe requires."""

    def __init__(self, model: nn.Module | str | None = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        section = self.section
        args = config_for_rounds(args or self.config_class(output_dir="outputs"), section)
        if kwargs.get("compute_metrics") is not None:
            reason = "because an evaluation samples answers, and has no predictions"
            raise InputError(f"compute_metrics cannot be combined with rounds, {reason}. Remove it")
        vllm.check_installed(section)
        self.reference_per_round = section.reference == "round" and self.method.second == "reference"
        super().__init__(model, args, *rest, **kwargs)
        if self.reference_per_round and getattr(self, "reference", None) is None:
            problem = "rounds.reference: round has no effect: the loss does not use a reference"
            raise InputError(f"{problem}. Remove rounds.reference")
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        if not all(isinstance(rows, datasets.Dataset | None) for rows in (self.train_dataset, *sets)):
            raise InputError(conflict_message(Feature.ROUNDS, Feature.STREAM))
        images = {Feature.IMAGES: "images"} if self.data_collator.vision_inputs else {}
        check_features(rounds_features(section) | images)
        self.vocabulary = sampling_vocab_size(self.tokenizer, causal_lm(self.model).config)
        self.rollout_options = section
        self.sampler = section.sampler.load()(self)
        self.judge = make_judge(section.judge, self.tokenizer, self.args.device)
        self.judge.stays = section.steps is not None
        self.round = self.stateful["round"] = Round(self)
        # before the anomaly monitor, which acts before a checkpoint is saved
        self.callback_handler.callbacks.insert(self.callback_handler.callbacks.index(self.anomaly_monitor), self.round)

    @classmethod
    def prepare_rows(
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Return prompts, with the right answers of the data if there are any.

        Raises InputError for a missing answer that the judge requires.
        """
        prepared = prepare(rows, cls.data_method, tokenizer, args, name)
        if cls.section.judge.by == "exact_match":
            check_completions(prepared, tokenizer, f"{name}: judge exact_match compares with completions of the data")
        return prepared

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as PostTrainer does. The weights may have changed since the last training."""
        self.synchronized = None
        self.rows_ran_out = False

        def filter_hf(record: logging.LogRecord) -> bool:
            """Return False for HF's wrong guess about training that ends before the first step of a pass."""
            expected = self.rows_ran_out or self.preemption.preempted
            return not (expected and "not to be a single sample" in record.getMessage())

        hf_logger = logging.getLogger("transformers.trainer")
        hf_logger.addFilter(filter_hf)
        try:
            return super().train(*args, **kwargs)
        finally:
            hf_logger.removeFilter(filter_hf)

    # ---- rows of each step

    @property
    def windows(self) -> list[int]:
        """Number of micro-batches of each optimizer step of a pass over the prompts, on each rank.

        The last step may have fewer than the others.
        """
        count = self.args.gradient_accumulation_steps
        rows = self.args.train_batch_size * self.args.world_size
        batches = len(self.train_dataset) / rows
        total = math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)
        return [count] * (total // count) + ([total % count] if total % count else []) or [count]

    def round_of(self, step: int) -> int:
        """Return the number of the round of optimizer step `step`, from 0."""
        if self.section.steps:
            return step // self.section.steps
        return step * number_of_rounds(self.section, self.state.max_steps) // self.state.max_steps

    def steps_of(self, number: int) -> range:
        """Return the optimizer steps of a round."""
        if self.section.steps:
            first = number * self.section.steps
            end = (number + 1) * self.section.steps
            return range(first, min(end, self.state.max_steps))
        count = number_of_rounds(self.section, self.state.max_steps)
        return range(*(-(-n * self.state.max_steps // count) for n in (number, number + 1)))

    def next_window(self, epoch_iterator: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """Return micro-batches of rows of the current round. Begins the next round if this is its first step."""
        step = self.state.global_step
        random_state = torch.get_rng_state()
        count = len([*islice(epoch_iterator, count)])  # the same on all ranks
        if count and self.round_of(step) != self.round.number:
            try:
                self.begin_round(self.round_of(step))
            except (RoundInterrupted, ServerError) as error:
                torch.set_rng_state(random_state)  # for the checkpoint: a resumed run samples its first batch again
                if isinstance(error, RoundInterrupted):
                    return []
                raise
        if not count or self.rows_ran_out:
            return []
        self.round.order = self.round.order or self._assign_rows_to_steps()
        chosen = self.round.order[step - self.steps_of(self.round.number).start]
        sizes = [len(part) for part in np.array_split(chosen, self.accelerator.num_processes * count)]
        groups = balance_groups([int(self.round.tokens[n]) for n in chosen], sizes)
        first = self.accelerator.process_index * count
        return [self._micro_batch([int(chosen[n]) for n in sorted(group)]) for group in groups[first : first + count]]

    def _micro_batch(self, numbers: list[int]) -> MicroBatch:
        """Return a batch of these rows of the round.

        Without numbers it has one row of weight 0, because every rank takes every step.
        """
        rows = self.round.rows.select(numbers).to_list() if numbers else [self._blank_row()]
        batch = self.data_collator(rows)
        return batch.replace(row_weights=torch.full((len(rows),), float(bool(numbers))))

    def _blank_row(self) -> dict[str, Any]:
        """Return a row that can be laid out and scored."""
        if len(self.round.rows):
            return self.round.rows[0]
        row = make_row(self.train_dataset[0], self.method, [self.terminal_ids[:1]] * len(self.method.rows.answers))
        return row | ({"ref_logps": [0.0] * max(2, len(self.method.rows.answers))} if self.reference_per_round else {})

    def set_rows(self, number: int, rows: datasets.Dataset) -> None:
        """Train on these rows in the steps of round `number`."""
        self.round.number = number
        self.round.rows = rows
        self.round.order = []
        self.round.tokens = tokens_per_row(rows) if len(rows) else np.zeros(0)
        try:
            self.on_dataset_ready(rows)
        except InputError as error:  # the labels of this round may all be equal
            self.on_dataset_ready(None)
            logger.log(logging.DEBUG if self.section.steps else logging.WARNING, "round %d: %s", number + 1, error)

    def _assign_rows_to_steps(self) -> list[np.ndarray]:
        """Return the numbers of the rows of each step of the round.

        Each pass over the rows has another order. A step gets rows in proportion to its micro-batches, at least one.
        """
        steps = self.steps_of(self.round.number)
        size = len(self.round.rows)
        windows = self.windows
        passes = 1.0
        shares = np.array([windows[step % len(windows)] for step in steps], dtype=float)
        if self.section.count:
            passes = self.args.passes if self.args.max_steps <= 0 else shares.sum() / sum(windows)
        total = max(round(size * passes), len(steps)) if size else 0
        seeds = [(self.args.seed, self.round.number, number) for number in range(-(-total // max(size, 1)))]
        orders = [np.random.default_rng(seed).permutation(size) for seed in seeds]
        order = np.concatenate([*orders, np.zeros(0, dtype=np.int64)])[:total]

        # one row for each step, and a share of the others
        least = min(1, size)
        others = np.round(np.cumsum(shares) / shares.sum() * (total - least * len(steps))).astype(int)
        ends = others + least * np.arange(1, len(steps) + 1)
        return np.split(order, ends[:-1])

    # ---- a round

    def begin_round(self, number: int) -> None:
        """Sample, judge and pair answers, so that the steps of this round have rows. All ranks call it.

        Raises:
            InputError: The first round gives no row.
            ServerError: A server that samples or judges is lost.
            RoundInterrupted: The run is asked to end.
        """
        began = time.perf_counter()
        section = self.section
        with self.throughput.paused():
            prompts = self._prompts_of(number)
            synchronize(self)
            seed = self.args.seed, number
            # online a round is as short as a step, and is simply sampled again
            files = RoundFiles(None) if section.steps else round_files(self, prompts, *seed)
            self.round.folder_in_progress = files.folder
            judged = sample_and_judge(self, prompts, seed, f"round {number + 1}: answers", files)
            rows, selected = self._make_rows(prompts, judged)
            if not len(rows) and not number and section.count:
                reasons = ", ".join(f"{count} prompts: {reason}" for reason, count in selected.left_out.most_common())
                raise InputError(f"rounds: the first round gives no row to train on ({reasons})")
            if self.reference_per_round and len(rows):
                rows = self._add_reference_scores(rows)
            self.set_rows(number, rows)
            self.round.folder_in_progress = None
            log_round(self, prompts, judged, selected, time.perf_counter() - began)
        if not len(rows) and section.count:
            logger.warning("round %d gives no row to train on. Training ends", number + 1)
            self.rows_ran_out = self.control.should_training_stop = True

    def _prompts_of(self, number: int) -> datasets.Dataset:
        """Return all prompts. With `steps`, return the part for the round of an endless sequence of permutations."""
        if self.section.count:
            return self.train_dataset
        steps = self.steps_of(number)
        windows = self.windows
        size = len(self.train_dataset)
        rows = self.args.train_batch_size * self.args.world_size

        def prompts_in(steps: Iterable[int]) -> int:
            return sum(windows[step % len(windows)] for step in steps) * rows

        before = prompts_in(range(steps.start))
        count = prompts_in(steps)
        passes = range(before // size, (before + count - 1) // size + 1)
        order = np.concatenate([np.random.default_rng((self.args.seed, n)).permutation(size) for n in passes])
        first = before - passes[0] * size
        return self.train_dataset.select(order[first : first + count])

    def _make_rows(self, prompts: datasets.Dataset, judged: list[ScoredCompletions]) -> tuple[Any, SelectedRows]:
        """Return prepared rows of the method's kind, possibly none, and the selection that they are made from."""
        kind = self.method.rows
        section = self.section
        stopped = [[ids[-1] in self.terminal_ids for ids in completions.answers] for completions in judged]
        # an answer of a terminal id alone is empty
        answers = [
            [() if ids[0] in self.terminal_ids else tuple(ids) for ids in completions.answers] for completions in judged
        ]
        scores = [completions.scores for completions in judged]
        threshold = resolve_threshold(section.pair, section.judge.by)
        selected = pair_up(kind, answers, scores, stopped, section.pair, threshold)

        prepared: list[dict[str, Any]] = []
        for prompt, completions, rows_of_prompt in zip(prompts, judged, selected.rows, strict=True):
            chosen = [
                make_row(prompt, self.method, [completions.answers[n] for n in row.answers], row.label)
                for row in rows_of_prompt
            ]
            for row in planned_rows(prompt, self.method, section) if self.use_longest_answers else chosen:
                key = prompt_key(prompt["prompt_ids"], prompt.get("images") or ())
                prepared.append({"images": None, **row, "prompt_key": key, "index": len(prepared)})

        rows = to_prepared_rows(prepared, kind, with_images=self.data_collator.vision_inputs is not None)
        args = copy.copy(self.args)
        args.keep_asked = False
        try:
            # "train": packed if the method packs its training rows; not by this class, which prepares prompts
            rows = super().prepare_rows(rows, self.tokenizer, args, "train") if prepared else rows
        except InputError as error:
            if not section.steps:
                raise
            # the step is too small for a loss over several prompts
            if not self.warned_about_empty_step:
                logger.warning("a step has no rows to train on, and others may have none either: %s", error)
            self.warned_about_empty_step = True
            selected.left_out[str(error)] += len(prepared)
            rows = rows.select([])
            selected.rows = [[] for _ in selected.rows]
        return rows, selected

    def _add_reference_scores(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Return the rows with scores of the current policy, which is the reference of this round."""
        reference: Any = replace(self.reference, as_reference=nullcontext)  # type: ignore[attr-defined]

        def score(batch: MicroBatch) -> list[list[float]]:
            return reference.logps(self.model_wrapped, batch).float().tolist()

        size = self.args.per_device_eval_batch_size
        parts = score_rows(self, rows, size, score, "Scores by the reference")
        return rows.add_column("ref_logps", [scores for part in parts for scores in part])

    # ---- evaluation

    def evaluate_rows(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, float]]:
        """Sample and judge answers to the prompts, with the same random numbers in each evaluation."""
        synchronize(self)
        rows: Any = dataloader.dataset
        judged = sample_and_judge(self, rows, (self.args.seed, EVALUATION), "evaluation: answers", RoundFiles(None))
        return EvalLoopOutput(None, None, {}, len(rows)), summarize(judged, self.terminal_ids)  # type: ignore[arg-type]


def make_row(
    prompt: Mapping[str, Any], method: Method, answers: Sequence[list[int]], label: bool | None = True
) -> dict[str, Any]:
    """Return a prepared row of a prompt and as many answers as rows of the method have."""
    row = {"prompt_ids": prompt["prompt_ids"], "index": 0, "label": label, "completion_mask": [1] * len(answers[0])}
    row |= dict(zip(method.rows.answers, answers, strict=True))
    return row | ({"images": prompt["images"]} if "images" in prompt else {})


def planned_rows(prompt: Mapping[str, Any], method: Method, section: RoundsSection) -> list[dict[str, Any]]:
    """Return as many rows as a prompt can give, with the longest possible answers."""
    takes_all = section.pair.take == "all" or (section.pair.take is None and method.rows.labeled)
    count = section.num_generations if takes_all else 2 if method.rows.labeled else 1
    count = count * (count - 1) // 2 if takes_all and method.rows.paired else count
    answers = [[0] * section.max_completion_length] * len(method.rows.answers)
    return [make_row(prompt, method, answers)] * count
