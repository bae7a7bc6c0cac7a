"""Rollouts that are sampled once, before the first optimizer step, and kept on disk (arXiv 2610.11291)."""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

import datasets
from accelerate.utils import gather_object

from ..data.teacher_prompts import TEACHER_COLUMNS
from ..errors import InputError
from ..generation import rollout
from ..models import score_cache
from ..scoring.layouts import Branch, Example, teacher_input_of
from ..teachers.signal import Request, Teacher, TopK
from .completion import Completion, Rollout
from .interface import OnPolicyInterface
from .source import OnPolicy

logger = logging.getLogger(__name__)
PROMPT_COLUMNS = ("prompt_ids", "images")
"""Columns of what is answered."""
CHUNK_SIZE = 64
"""Prompts that are sampled in one call: random numbers depend on it, and not on the number of ranks."""


class Frozen(OnPolicy):
    """Samples once, from the policy as it was at the start."""

    @property
    def reports_logps(self) -> bool:
        """False: the cache has no log-probabilities."""
        return False

    def __init__(self, trainer: OnPolicyInterface):
        super().__init__(trainer)
        self.trainer: OnPolicyInterface = trainer
        self.start = score_cache.model_key(trainer.model)
        self.of: Any = None  # the data set that is answered
        self.known: Any = []  # the rollouts of each of its rows
        self.scored: Any = None  # and what the teacher said of them, where that is asked for
        self.place: dict[int, int] = {}  # from a row's `index` to its place in it

    def rollouts(self, rows: Sequence[dict[str, Any]], seed: Sequence[int], max_new_tokens: int) -> list[Rollout]:
        """Return the rollouts of these rows, sampled at the first call of a run or taken from the cache."""
        if self.of is not self.trainer.train_dataset:
            moved = self.of is not None or self.trainer.state.global_step > 0
            self.of = self.trainer.train_dataset
            sampled = self._sampled(moved)
            self.known = sampled["rollout_ids"]
            self.scored = None
            if self.trainer.args.teacher.precompute:
                self.scored = self._scored(sampled)["teacher"]
                self.teacher.release()  # an evaluation brings it back
            self.place = {number: place for place, number in enumerate(self.of["index"])}
        found = []
        for row in rows:
            place = self.place[row["index"]]
            completions = [Completion(ids) for ids in self.known[place]]
            found.append(Rollout(row["prompt_ids"], completions, None if self.scored is None else self.scored[place]))
        return found

    @property
    def teacher(self) -> Teacher:
        """The trainer's teacher, which is there where it scores the rollouts."""
        assert self.trainer.teacher is not None
        return self.trainer.teacher

    def _sampled(self, moved: bool) -> datasets.Dataset:
        """`rollout_ids` of all rows: K each. moved: has the policy been trained since it began? All ranks call it."""
        trainer = self.trainer
        args = self.trainer.args
        prompts = self.of.select_columns([name for name in PROMPT_COLUMNS if name in self.of.column_names])
        key = [
            self.start,
            score_cache.rows_key(prompts, trainer),
            args.num_generations,
            args.temperature,
            self.longest(),
            args.seed,
            trainer.terminal_ids,
            trainer.vocabulary,
            args.sampler.kind,
            args.bf16,
            args.fp16,
        ]

        def sample() -> datasets.Dataset:
            if moved:
                raise InputError(
                    "rollouts: frozen: those of these rows are no longer in the cache of data sets, and the policy has "
                    "been trained since it began: train from the start, with a new trainer"
                )
            logger.info("sampling %d rollouts of each of %d prompts, once", args.num_generations, len(prompts))
            return self._sample(prompts)

        return score_cache.load_or_compute(key, len(prompts), sample, "rollouts", trainer.accelerator)

    def _sample(self, prompts: datasets.Dataset) -> datasets.Dataset:
        """In pieces, which the ranks share out; each piece has random numbers of its own."""
        self.trainer.sampler.synchronise()
        accelerator = self.trainer.accelerator
        starts = range(0, len(prompts), CHUNK_SIZE)
        world = accelerator.num_processes
        rank = accelerator.process_index
        found = {}
        for first in range(0, len(starts), world):  # as many calls on every rank: some end with an empty piece
            number = first + rank
            piece = range(number * CHUNK_SIZE, min((number + 1) * CHUNK_SIZE, len(prompts)))
            rows = prompts.select(piece).to_list() if piece else []
            seed = (self.trainer.args.seed, number)
            with rollout.seeded(accelerator.device, *seed):
                found[number] = super().rollouts(rows, seed, self.longest())
        pieces = {number: piece for part in gather_object([found]) for number, piece in part.items()}
        return datasets.Dataset.from_list(
            [
                {"rollout_ids": [each.ids for each in one.completions]}
                for _, piece in sorted(pieces.items())
                for one in piece
            ]
        )

    def _scored(self, sampled: datasets.Dataset) -> datasets.Dataset:
        """`teacher` of all rows: K x {teacher_ids, ...} each. All ranks call it."""
        trainer = self.trainer
        args = self.trainer.args
        read = [name for name in (*PROMPT_COLUMNS, *TEACHER_COLUMNS) if name in self.of.column_names]
        rows = datasets.concatenate_datasets([self.of.select_columns(read), sampled], axis=1)
        merged = trainer.eos.ids.tolist()
        request: Request = trainer.request("dense", args.teacher.top_k)
        key = [
            self.teacher.key(),
            score_cache.rows_key(rows, trainer),
            request.top_k,
            args.temperature,
            trainer.vocabulary,
            args.bf16,
            args.fp16,
            merged,
            score_cache.layout_key(trainer),
        ]

        def score(prompts: Any) -> list[dict[str, Any]]:
            given = prompts.prompts.items
            examples = [
                Example(
                    row["prompt_ids"],
                    [*map(Branch, row["rollout_ids"])],
                    images=row.get("images") or (),
                    teacher_input=teacher_input_of(row),
                )
                for row in given
            ]
            batch = trainer._prepare_inputs(trainer.data_collator.lay_out(examples))
            signal = self.teacher.signal(batch, request)
            assert isinstance(signal, TopK)
            assert signal.targets is not None
            columns = {"teacher_ids": signal.ids, "teacher_logps": signal.logps, "teacher_own": signal.targets}
            of_each = iter(range(len(batch.row)))
            return [
                {
                    "teacher": [
                        {name: values[batch.owner == n].tolist() for name, values in columns.items()}
                        for n in islice(of_each, args.num_generations)
                    ]
                }
                for _ in given
            ]

        def compute() -> datasets.Dataset:
            title = "Scores of frozen rollouts by the teacher"
            size = args.per_device_eval_batch_size
            return datasets.Dataset.from_list(score_cache.score_rows(trainer, rows, size, score, title))

        return score_cache.load_or_compute(key, len(rows), compute, "teacher", trainer.accelerator)

    def longest(self) -> int:
        """The longest rollout of all steps: a horizon that grows cuts them as it is."""
        return max(self.trainer.rollouts.max_new_tokens(step) for step in (0, 2**31))
