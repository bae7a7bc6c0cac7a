"""Rollouts that are sampled once, before the first optimizer step, and cached on disk (arXiv 2610.11291)."""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import datasets
from accelerate.utils import gather_object

from ..data.teacher_prompts import TEACHER_COLUMNS
from ..errors import InputError
from ..generation import rollout
from ..models import score_cache
from ..scoring.layouts import Branch, Example, teacher_input_of
from ..teachers.cache import frozen_head, scores_key, storable_scores
from ..teachers.columns import to_columns
from ..teachers.signal import Request, Teacher
from .completion import Completion, Rollout
from .interface import OnPolicyInterface
from .source import OnPolicy

logger = logging.getLogger(__name__)
PROMPT_COLUMNS = ("prompt_ids", "images")
"""Columns of prepared rows that the policy reads."""
CHUNK_SIZE = 64
"""Number of prompts that are sampled in one call. Random numbers depend on it, and not on the number of ranks."""


class Frozen(OnPolicy):
    """Samples once, from the policy at the start of the run."""

    @property
    def reports_logps(self) -> bool:
        """False: the cache has no log-probabilities."""
        return False

    def __init__(self, trainer: OnPolicyInterface) -> None:
        super().__init__(trainer)
        self.trainer: OnPolicyInterface = trainer
        self.policy_key = score_cache.model_key(trainer.model)
        self.dataset: Any = None  # the data set with the prompts
        self.completions: Any = []  # the completions of each of its rows, as ids
        self.teacher_scores: Any = None  # scores of the completions by the teacher, with `teacher.precompute`
        self.positions: dict[int, int] = {}  # the `index` of a row -> its position in the data set

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Return the rollouts of these rows, sampled at the first call of a run or taken from the cache."""
        if self.dataset is not self.trainer.train_dataset:
            has_moved = self.dataset is not None or self.trainer.state.global_step > 0
            self.dataset = self.trainer.train_dataset
            sampled = self._load_or_sample(has_moved)
            self.completions = sampled["rollout_ids"]
            self.teacher_scores = None
            if self.trainer.args.teacher.precompute:
                self.teacher_scores = self._load_or_score(sampled)["teacher"]
                self.teacher.release()  # an evaluation moves it to the device again
            self.positions = {number: position for position, number in enumerate(self.dataset["index"])}

        rollouts = []
        for row in rows:
            position = self.positions[row["index"]]
            completions = [Completion(ids) for ids in self.completions[position]]
            scores = None if self.teacher_scores is None else self.teacher_scores[position]
            rollouts.append(Rollout(row["prompt_ids"], completions, scores))
        return rollouts

    @property
    def teacher(self) -> Teacher:
        """The trainer's teacher, which exists wherever it scores the rollouts."""
        assert self.trainer.teacher is not None
        return self.trainer.teacher

    def _load_or_sample(self, has_moved: bool) -> datasets.Dataset:
        """Return `rollout_ids` of all rows, K each. All ranks call it.

        has_moved: whether the policy has been trained since the start of the run.
        """
        trainer = self.trainer
        args = self.trainer.args
        prompts = self.dataset.select_columns([name for name in PROMPT_COLUMNS if name in self.dataset.column_names])
        key = [
            self.policy_key,
            score_cache.rows_key(prompts, trainer),
            args.num_generations,
            args.temperature,
            self.max_tokens(),
            args.seed,
            trainer.terminal_ids,
            trainer.vocabulary,
            args.sampler.fingerprint(),
            args.bf16,
            args.fp16,
        ]

        def sample() -> list[list[dict[str, Any]]]:
            if has_moved:
                raise InputError(
                    "rollouts: frozen: the rollouts of these rows are no longer in the cache of data sets, and the "
                    "policy has been trained since the start of the run. Train from the start, with a new trainer"
                )
            logger.info("sampling %d rollouts of each of %d prompts, once", args.num_generations, len(prompts))
            return [self._sample(prompts)]

        return score_cache.load_or_compute(key, len(prompts), sample, "rollouts", trainer.accelerator)

    def _sample(self, prompts: datasets.Dataset) -> list[dict[str, Any]]:
        """Sample chunks of prompts, which the ranks divide among themselves; each chunk has its own random numbers."""
        self.trainer.sampler.synchronize()
        accelerator = self.trainer.accelerator
        starts = range(0, len(prompts), CHUNK_SIZE)
        world = accelerator.num_processes
        rank = accelerator.process_index

        sampled = {}
        for first in range(0, len(starts), world):  # equally many calls on each rank; the last chunk may be empty
            number = first + rank
            chunk = range(number * CHUNK_SIZE, min((number + 1) * CHUNK_SIZE, len(prompts)))
            rows = prompts.select(chunk).to_list() if chunk else []
            seed = (self.trainer.args.seed, number)
            with rollout.seeded(accelerator.device, *seed):
                sampled[number] = super().rollouts(rows, seed, self.max_tokens())

        chunks = {number: rollouts for part in gather_object([sampled]) for number, rollouts in part.items()}
        return [
            {"rollout_ids": [completion.ids for completion in answer.completions]}
            for _, rollouts in sorted(chunks.items())
            for answer in rollouts
        ]

    def _load_or_score(self, sampled: datasets.Dataset) -> datasets.Dataset:
        """Return `teacher` of all rows, K x {teacher_ids, ...} each. All ranks call it."""
        trainer = self.trainer
        args = self.trainer.args
        names = [name for name in (*PROMPT_COLUMNS, *TEACHER_COLUMNS) if name in self.dataset.column_names]
        rows = datasets.concatenate_datasets([self.dataset.select_columns(names), sampled], axis=1)
        request: Request = trainer.request("dense", args.teacher.top_k)
        key = [
            self.teacher.key(),
            score_cache.rows_key(rows, trainer),
            *scores_key(trainer, request),
            score_cache.layout_key(trainer),
        ]

        def lay_out(prompt_rows: Sequence[dict[str, Any]]) -> Any:
            """Return the batch of the rollouts of some rows."""
            examples = [
                Example(
                    row["prompt_ids"],
                    [*map(Branch, row["rollout_ids"])],
                    images=row.get("images") or (),
                    teacher_input=teacher_input_of(row),
                )
                for row in prompt_rows
            ]
            return trainer._prepare_inputs(trainer.data_collator.lay_out(examples))

        if request.kind == "dense":
            trainer.teacher_head = frozen_head(self.teacher, lay_out([rows[0]]), request)

        def score(prompts: Any) -> list[dict[str, Any]]:
            prompt_rows = prompts.prompts.items
            batch = lay_out(prompt_rows)
            scores = storable_scores(self.teacher, batch, request)
            answers = iter([to_columns(scores, batch.owner == number) for number in range(len(batch.row))])
            return [{"teacher": [*islice(answers, args.num_generations)]} for _ in prompt_rows]

        def compute() -> Iterator[list[dict[str, Any]]]:
            title = "Scores of frozen rollouts by the teacher"
            return score_cache.score_rows(trainer, rows, args.per_device_eval_batch_size, score, title)

        return score_cache.load_or_compute(key, len(rows), compute, "teacher", trainer.accelerator)

    def max_tokens(self) -> int:
        """Return the length of the longest rollout of all steps; a `train_max_tokens` that grows truncates to less."""
        return max(self.trainer.rollouts.max_new_tokens(step) for step in (0, 2**31))
