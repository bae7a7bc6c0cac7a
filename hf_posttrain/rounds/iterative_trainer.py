"""A method's trainer in rounds: sample answers from the policy of now, judge them, pair them up, train on them, again.

    for each round:
        y_1 .. y_K ~ policy(.|x)  for every prompt x of the round        draw.py
        a score for each y                                               judges/
        rows of the method's kind from x, y and scores                   pairing.py
        for each optimizer step of the round: its share of the rows, by the method's own loss

The data hold prompts (and right answers, where the judge wants them). per_device_train_batch_size counts prompts, as in
on-policy distillation: a run has as many optimizer steps as it would have with the prompts as rows, whatever a round
gives. With `count` a round is a pass (or num_train_epochs passes) over all prompts; with `steps` it is so many
optimizer steps and their prompts, and with steps: 1 every step trains on answers of the weights that it changes.

One `train()` runs all rounds: optimizer, schedule, engine and report are those of any run. Checkpoints hold the rows of
the round, and each round ends with one; what was sampled of a round that is not done is found again (`draw.Pieces`).
"""

import copy
import logging
import math
import time
from collections.abc import Iterator, Sequence
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
from ..rollouts.policy_sampler import synchronise
from ..scoring.forward import causal_lm
from ..scoring.layouts import balance_groups
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .config import RoundsSection, make_section, number_of_rounds, resolve_threshold, rounds_features, rounds_problems
from .iteration_log import log_round, summarise
from .iteration_state import Round
from .judges import make_judge
from .pairing import SelectedRows, pair_up
from .sample_and_judge import RoundFiles, RoundInterrupted, ScoredCompletions, round_files, sample_and_judge

logger = logging.getLogger(__name__)
EVALUATION = 2**31
"""Stands for the round in the seed of an evaluation's answers, which are then drawn alike at every evaluation."""


def in_rounds(trainer_class: Any, section: Any) -> Any:
    """A class of trainers as `trainer_class`, whose data are prompts, and which makes its rows as the section says.

    section: a RoundsSection, a mapping of its keys, or a number of rounds. Raises InputError for what contradicts.
    """
    section = make_section(section)
    method = trainer_class.method
    if method.second == "teacher":
        raise InputError(conflict_message(Feature.ROUNDS, Feature.TEACHER))
    if section.reference == "round" and method.second != "reference":
        raise InputError(f"rounds.reference: round is of methods with a reference, and {method.name} has none: drop it")
    for names, problem in rounds_problems(section, method.rows):
        raise InputError(f"rounds: {problem}" if problem.startswith(names) else f"rounds.{names[0]}: {problem}")
    collator = type("RoundCollator", (_RoundCollator, trainer_class.collator_class), {})
    own = {"section": section, "collator_class": collator, "__module__": trainer_class.__module__}
    made: Any = type(trainer_class.__name__, (InRounds, trainer_class), own)
    shown = {} if section.judge.by == "url" else {"rounds/score": "score"}  # shares of wins, 0.5 on average
    made.method = replace(method, key_metrics=shown | method.key_metrics)
    made.data_method = replace(method, rows=PROMPTS)
    return made


def config_for_rounds(args: Any, section: RoundsSection) -> Any:
    """A copy of a method's Config that describes all rounds; the Config itself where it is one already. Raises
    InputError for what does not go with rounds.
    """
    if getattr(args, "rounds", None) is section:
        return args
    args = copy.copy(args)
    if args.max_length is not None and args.max_length <= section.max_completion_length:
        problem = f"no prompt next to rounds.max_completion_length={section.max_completion_length}"
        raise InputError(f"max_length={args.max_length} leaves {problem}: raise it, or lower that")
    if getattr(args, "precompute_ref_log_probs", None):
        raise InputError(conflict_message(Feature.REFERENCE_CACHE, Feature.ROUNDS))
    if args.parallelism_config and args.parallelism_config.sp_size > 1:
        raise InputError(conflict_message(Feature.SEQUENCE_PARALLEL, Feature.ROUNDS))
    if hasattr(args, "precompute_ref_log_probs"):
        args.precompute_ref_log_probs = False
    if args.metric_for_best_model == "loss" and args.load_best_model_at_end:  # HF's default: evaluations have no loss
        args.metric_for_best_model = "score"
        args.greater_is_better = True
    if section.judge.by == "url" and str(args.metric_for_best_model).removeprefix("eval_") in ("score", "best_score"):
        problem = "scores of judge url are shares of wins among a model's own answers, which compare no two models"
        raise InputError(f"metric_for_best_model: {problem}: set it to exact_match, or leave load_best_model_at_end")
    args.passes = args.num_train_epochs  # over the rows of a round
    if section.count is not None:
        args.num_train_epochs *= section.count
    args.rounds = section
    args.max_completion_length = section.max_completion_length
    args.keep_asked = True
    args.snapshot_options()
    return args


class _RoundCollator:
    """Of prompts it makes nothing but their numbers: they say how many rows a step is about."""

    def __call__(self, rows: list[dict]) -> MicroBatch:
        """As `Collator`, of the rows of a round."""
        if "asked" in rows[0]:
            return MicroBatch(index=torch.tensor([row["index"] for row in rows]))
        return super().__call__(rows)  # type: ignore[misc]


class InRounds(PostTrainer, SamplingInterface):
    """What `in_rounds` puts in front of a method's trainer."""

    section: ClassVar[RoundsSection]
    train_dataset: Any
    told = False  # that a loss cannot be taken of so few prompts
    longest = False  # are rows made of the longest answers that there may be, as a probe wants them?

    def __init__(self, model: nn.Module | str | None = None, args: Any = None, *rest: Any, **kwargs: Any):
        section = self.section
        args = config_for_rounds(args or self.config_class(output_dir="outputs"), section)
        if kwargs.get("compute_metrics") is not None:
            raise InputError("compute_metrics: in rounds an evaluation samples, and has no predictions: drop it")
        vllm.check_installed(section)
        self.reference_per_round = section.reference == "round" and self.method.second == "reference"
        super().__init__(model, args, *rest, **kwargs)
        if self.reference_per_round and getattr(self, "reference", None) is None:
            raise InputError("rounds.reference: round is of losses with a reference, and this has none: drop it")
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
        # before the guard, which looks before a checkpoint is saved
        self.callback_handler.callbacks.insert(self.callback_handler.callbacks.index(self.anomaly_monitor), self.round)

    @classmethod
    def prepare_rows(
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Prompts, with the right answers of the data where they have them. Raises InputError where the judge wants one
        that is missing.
        """
        made = prepare(rows, cls.data_method, tokenizer, args, name)
        if cls.section.judge.by == "exact_match":
            check_completions(made, tokenizer, f"{name}: judge exact_match compares with completions of the data")
        return made

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As PostTrainer has it; the weights may have changed since the last one."""
        self.synchronised = None
        self.rows_ran_out = False
        # HF guesses wrong where training ends before the first step of a pass
        expected = lambda: self.rows_ran_out or self.preemption.preempted  # noqa: E731
        quiet = lambda said: not (expected() and "not to be a single sample" in said.getMessage())  # noqa: E731
        hf = logging.getLogger("transformers.trainer")
        hf.addFilter(quiet)
        try:
            return super().train(*args, **kwargs)
        finally:
            hf.removeFilter(quiet)

    # ---- which rows a step trains on

    @property
    def windows(self) -> list[int]:
        """The micro-batches of each optimizer step of a pass over the prompts, on each rank: the last may have
        fewer.
        """
        count = self.args.gradient_accumulation_steps
        rows = self.args.train_batch_size * self.args.world_size
        batches = len(self.train_dataset) / rows
        whole = math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)
        return [count] * (whole // count) + ([whole % count] if whole % count else []) or [count]

    def round_of(self, step: int) -> int:
        """The number of the round that optimizer step `step` belongs to, from 0 on."""
        if self.section.steps:
            return step // self.section.steps
        return step * number_of_rounds(self.section, self.state.max_steps) // self.state.max_steps

    def steps_of(self, number: int) -> range:
        """The optimizer steps of a round."""
        if self.section.steps:
            first = number * self.section.steps
            end = (number + 1) * self.section.steps
            return range(first, min(end, self.state.max_steps))
        count = number_of_rounds(self.section, self.state.max_steps)
        return range(*(-(-n * self.state.max_steps // count) for n in (number, number + 1)))

    def next_window(self, epoch_iterator: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """As PostTrainer has it: micro-batches of rows of the round, which begins where it is its turn."""
        step = self.state.global_step
        random_state = torch.get_rng_state()
        count = len([*islice(epoch_iterator, count)])  # the same on all ranks
        if count and self.round_of(step) != self.round.number:
            try:
                self.begin_round(self.round_of(step))
            except (RoundInterrupted, ServerError) as error:
                torch.set_rng_state(random_state)  # of a checkpoint: a run that goes on draws for its first batch again
                if isinstance(error, RoundInterrupted):
                    return []
                raise
        if not count or self.rows_ran_out:
            return []
        self.round.order = self.round.order or self._deal()
        chosen = self.round.order[step - self.steps_of(self.round.number).start]
        sizes = [len(part) for part in np.array_split(chosen, self.accelerator.num_processes * count)]
        parts = balance_groups([int(self.round.tokens[n]) for n in chosen], sizes)
        first = self.accelerator.process_index * count
        return [self._micro_batch([int(chosen[n]) for n in sorted(part)]) for part in parts[first : first + count]]

    def _micro_batch(self, numbers: list[int]) -> MicroBatch:
        """These rows of the round; of none, a row that does not count, since every rank takes every step."""
        rows = self.round.rows.select(numbers).to_list() if numbers else [self._blank_row()]
        batch = self.data_collator(rows)
        return batch.replace(row_weights=torch.full((len(rows),), float(bool(numbers))))

    def _blank_row(self) -> dict[str, Any]:
        """A row that can be laid out and scored."""
        if len(self.round.rows):
            return self.round.rows[0]
        made = make_row(self.train_dataset[0], self.method, [self.terminal_ids[:1]] * len(self.method.rows.answers))
        return made | ({"ref_logps": [0.0] * max(2, len(self.method.rows.answers))} if self.reference_per_round else {})

    def set_rows(self, number: int, rows: datasets.Dataset) -> None:
        """Train on these rows in the steps of round `number`."""
        self.round.number = number
        self.round.rows = rows
        self.round.order = []
        self.round.tokens = tokens_per_row(rows) if len(rows) else np.zeros(0)
        try:
            self.on_dataset_ready(rows)
        except InputError as error:  # the labels of this round may all be one
            self.on_dataset_ready(None)
            logger.log(logging.DEBUG if self.section.steps else logging.WARNING, "round %d: %s", number + 1, error)

    def _deal(self) -> list[np.ndarray]:
        """Numbers of the rows of each step of the round: each pass over them in another order, dealt out by the steps'
        micro-batches, and one row at least to each step.
        """
        steps = self.steps_of(self.round.number)
        size = len(self.round.rows)
        windows = self.windows
        passes = 1.0
        shares = np.array([windows[step % len(windows)] for step in steps], dtype=float)
        if self.section.count:
            passes = self.args.passes if self.args.max_steps <= 0 else shares.sum() / sum(windows)
        total = max(round(size * passes), len(steps)) if size else 0
        seeds = [(self.args.seed, self.round.number, each) for each in range(-(-total // max(size, 1)))]
        orders = [np.random.default_rng(seed).permutation(size) for seed in seeds]
        order = np.concatenate([*orders, np.zeros(0, dtype=np.int64)])[:total]
        # one each, and of the others as many as its share of micro-batches
        least = min(1, size)
        others = np.round(np.cumsum(shares) / shares.sum() * (total - least * len(steps))).astype(int)
        ends = others + least * np.arange(1, len(steps) + 1)
        return np.split(order, ends[:-1])

    # ---- a round

    def begin_round(self, number: int) -> None:
        """Sample, judge and pair up, so that the steps of this round have rows. All ranks call it.

        Raises InputError where the first round gives no row, ServerError where a server of answers or scores is lost,
        and Stopped.
        """
        began = time.perf_counter()
        section = self.section
        with self.throughput.paused():
            prompts = self._prompts_of(number)
            synchronise(self)
            seed = self.args.seed, number
            # online a round is as short as a step: it is drawn again
            pieces = RoundFiles(None) if section.steps else round_files(self, prompts, *seed)
            self.round.drawn = pieces.folder
            judged = sample_and_judge(self, prompts, seed, f"round {number + 1}: answers", pieces)
            rows, paired = self._make_rows(prompts, judged)
            if not len(rows) and not number and section.count:
                reasons = ", ".join(f"{count} prompts: {reason}" for reason, count in paired.left_out.most_common())
                raise InputError(f"rounds: the first round gives no row to train on ({reasons})")
            if self.reference_per_round and len(rows):
                rows = self._scored(rows)
            self.set_rows(number, rows)
            self.round.drawn = None
            log_round(self, prompts, judged, paired, time.perf_counter() - began)
        if not len(rows) and section.count:
            logger.warning("round %d gives no row to train on: training ends", number + 1)
            self.rows_ran_out = self.control.should_training_stop = True

    def _prompts_of(self, number: int) -> datasets.Dataset:
        """The prompts of a round: all, or of an endless row of permutations those of its steps."""
        if self.section.count:
            return self.train_dataset
        steps = self.steps_of(number)
        windows = self.windows
        size = len(self.train_dataset)
        rows = self.args.train_batch_size * self.args.world_size
        of = lambda some: sum(windows[step % len(windows)] for step in some) * rows  # noqa: E731
        before = of(range(steps.start))
        count = of(steps)
        passes = range(before // size, (before + count - 1) // size + 1)
        order = np.concatenate([np.random.default_rng((self.args.seed, each)).permutation(size) for each in passes])
        first = before - passes[0] * size
        return self.train_dataset.select(order[first : first + count])

    def _make_rows(self, prompts: datasets.Dataset, judged: list[ScoredCompletions]) -> tuple[Any, SelectedRows]:
        """Prepared rows of the method's kind, maybe none; and how they came about."""
        kind = self.method.rows
        section = self.section
        stopped = [[ids[-1] in self.terminal_ids for ids in one.answers] for one in judged]
        # what is nothing but its end is empty
        answers = [[() if ids[0] in self.terminal_ids else tuple(ids) for ids in one.answers] for one in judged]
        threshold = resolve_threshold(section.pair, section.judge.by)
        paired = pair_up(kind, answers, [one.scores for one in judged], stopped, section.pair, threshold)
        made: list[dict[str, Any]] = []
        for prompt, one, rows in zip(prompts, judged, paired.rows, strict=True):
            chosen = [make_row(prompt, self.method, [one.answers[n] for n in row.answers], row.label) for row in rows]
            for row in planned_rows(prompt, self.method, section) if self.longest else chosen:
                key = prompt_key(prompt["prompt_ids"], prompt.get("images") or ())
                made.append({"images": None, **row, "prompt_key": key, "index": len(made)})
        rows = to_prepared_rows(made, kind, sees=self.data_collator.vision_inputs is not None)
        bare = copy.copy(self.args)
        bare.keep_asked = False
        try:
            # "train": packed where the method packs its training rows; not this class's, which makes prompts
            rows = super().prepare_rows(rows, self.tokenizer, bare, "train") if made else rows
        except InputError as error:
            if not section.steps:
                raise
            # of a window so small that a loss over several prompts cannot be taken
            if not self.told:
                logger.warning("a step without rows, as others may be: %s", error)
            self.told = True
            paired.left_out[str(error)] += len(made)
            rows = rows.select([])
            paired.rows = [[] for _ in paired.rows]
        return rows, paired

    def _scored(self, rows: datasets.Dataset) -> datasets.Dataset:
        """The rows with scores of the policy of now, which is the reference of this round."""
        reference: Any = replace(self.reference, inside=nullcontext)  # type: ignore[attr-defined]

        def score(batch: MicroBatch) -> list[list[float]]:
            return reference.logps(self.model_wrapped, batch).float().tolist()

        size = self.args.per_device_eval_batch_size
        return rows.add_column("ref_logps", score_rows(self, rows, size, score, "Scores by the reference"))

    # ---- evaluation

    def evaluate_rows(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, float]]:
        """As PostTrainer has it: answers to the prompts are sampled and judged, the same draws at each evaluation."""
        synchronise(self)
        rows = dataloader.dataset
        judged = sample_and_judge(self, rows, (self.args.seed, EVALUATION), "evaluation: answers", RoundFiles(None))
        return EvalLoopOutput(None, None, {}, len(rows)), summarise(judged, self.terminal_ids)  # type: ignore[arg-type]


def make_row(
    prompt: dict[str, Any], method: Any, answers: Sequence[list[int]], label: bool | None = True
) -> dict[str, Any]:
    """A prepared row of a prompt and as many answers as the method's rows have."""
    made = {"prompt_ids": prompt["prompt_ids"], "index": 0, "label": label, "completion_mask": [1] * len(answers[0])}
    made |= dict(zip(method.rows.answers, answers, strict=True))
    return made | ({"images": prompt["images"]} if "images" in prompt else {})


def planned_rows(prompt: dict[str, Any], method: Any, section: RoundsSection) -> list[dict[str, Any]]:
    """The rows that a prompt gives at most, with the longest answers that there may be."""
    several = section.pair.take == "all" or (section.pair.take is None and method.rows.labelled)
    count = section.num_generations if several else 2 if method.rows.labelled else 1
    count = count * (count - 1) // 2 if several and method.rows.paired else count
    longest = [[0] * section.max_completion_length] * len(method.rows.answers)
    return [make_row(prompt, method, longest)] * count
