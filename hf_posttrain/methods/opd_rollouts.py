"""Which rollouts OPD trains on.

live    sampled by the policy of now, at each optimizer step
replay  a share `fresh` of each window live; in the place of the other prompts, those of the last `replay_windows`
        windows with the rollouts that they had (LSPD)
frozen  sampled once, by the policy as it began, and kept on disk; the loss compares student and teacher on them as on
        others (arXiv 2610.11291)

Each has `answer`, which is called inside the trainer's `rollout.seeded`: rows of the data -> prompts with K rollouts.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from transformers.trainer_callback import ExportableState, TrainerCallback

from ..data.teacher_rows import COLUMNS as FOR_TEACHER
from ..errors import InputError
from ..generation import rollout
from ..models import score_cache
from ..scoring.forward import targets
from ..scoring.layouts import Branch, Example, Prompt, reading_of

logger = logging.getLogger(__name__)
Answered = tuple[list[int], list[list[int]]]
"""A prompt and its rollouts, token ids."""
PROMPT = ("prompt_ids", "images")
"""Columns of what is answered."""
PIECE = 64
"""Prompts that frozen rollouts are sampled for at once: random numbers depend on it, and not on the ranks."""


class Live:
    """The policy of now."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def answer(self, rows: Sequence[dict], seed: Sequence[int], longest: int) -> list[Answered]:
        """Each row's prompt and K rollouts of at most `longest` tokens."""
        prompts, count = [Prompt.of(row) for row in rows], self.trainer.args.num_generations
        found = self.trainer.backend.generate(prompts, seed, longest)
        return [(prompt, found[n * count : (n + 1) * count]) for n, prompt in enumerate(prompts)]

    def scores(self, rows: Sequence[dict]) -> list[list[dict[str, list]]] | None:
        """What is known beforehand of each rollout of the rows that were answered last: `sampler_logps`, of its tokens
        where they were drawn, if that was not in the student itself."""
        logps, count = self.trainer.backend.logps, self.trainer.args.num_generations
        if logps is None:
            return None
        known = [{"sampler_logps": own} for own in logps]
        return [known[n * count : (n + 1) * count] for n in range(len(rows))]


class Replay(Live, TrainerCallback, ExportableState):
    """Some of the policy of now, the rest of the last windows, of all ranks; they are saved with a checkpoint."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.windows: deque[list[Answered]] = deque(maxlen=trainer.args.replay_windows)
        self.newest: list[Answered] | None = None  # of a step that is not done yet
        trainer.add_callback(self)

    def answer(self, rows: Sequence[dict], seed: Sequence[int], longest: int) -> list[Answered]:
        """As many as there are rows; where nothing was sampled yet, all live."""
        kept = [one for window in self.windows for one in window]
        count = min(math.ceil(self.trainer.args.fresh * len(rows)), len(rows)) if kept else len(rows)
        live = super().answer(rows[:count], seed, longest)
        wanted = len(rows) - count  # none a second time before all were chosen
        rounds = [torch.randperm(len(kept)) for _ in range(-(-wanted // len(kept)) if kept else 0)]
        chosen = torch.cat(rounds)[:wanted].tolist() if rounds else []
        self.newest = gather_object(live)
        return live + [kept[number] for number in chosen]

    def scores(self, rows: Sequence[dict]) -> list[list[dict[str, list]]] | None:
        """Nothing: most rollouts are of another policy."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: one text, since trainer_state.json gives each number of a list a line of its own. HF
        sets it as an attribute when training resumes."""
        return {"args": {}, "attributes": {"text": json.dumps(list(self.windows), separators=(",", ":"))}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Now it is one of the last: a checkpoint that is saved while a step is under way does not have it twice."""
        if self.newest is not None:
            self.windows.append(self.newest)
        self.newest = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or with the windows of the checkpoint that training resumes from."""
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        kept = kept[-1] if isinstance(kept, list) else kept
        self.windows.clear()
        self.newest = None
        self.windows.extend(json.loads(kept["attributes"]["text"]) if kept else [])


class Frozen(Live):
    """The policy as it began."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.start = score_cache.model_key(trainer.model)
        self.of: Any = None  # the data set that is answered
        self.known: Any = []  # the rollouts of each of its rows
        self.scored: Any = None  # and what the teacher said of them, where that is asked for
        self.place: dict[int, int] = {}  # from a row's `index` to its place in it

    def answer(self, rows: Sequence[dict], seed: Sequence[int], longest: int) -> list[Answered]:
        """The rollouts of these rows, sampled at the first call of a run or taken from the cache."""
        if self.of is not self.trainer.train_dataset:
            moved = self.of is not None or self.trainer.state.global_step > 0
            self.of = self.trainer.train_dataset
            sampled = self._sampled(moved)
            self.known, self.scored = sampled["rollout_ids"], None
            if self.trainer.args.precompute_teacher_top_k is not None:
                self.scored = self._scored(sampled)["teacher"]
                self.trainer.teacher.release()  # an evaluation brings it back
            self.place = {number: place for place, number in enumerate(self.of["index"])}
        return [(row["prompt_ids"], self.known[self.place[row["index"]]]) for row in rows]

    def scores(self, rows: Sequence[dict]) -> list[list[dict[str, list]]] | None:
        """Of each rollout: `teacher_ids`, `teacher_logps` [tokens][K], and `teacher_own`, of the tokens themselves."""
        return None if self.scored is None else [self.scored[self.place[row["index"]]] for row in rows]

    def _sampled(self, moved: bool) -> datasets.Dataset:
        """`rollout_ids` of all rows: K each. moved: has the policy been trained since it began? All ranks call it."""
        trainer, args = self.trainer, self.trainer.args
        prompts = self.of.select_columns([name for name in PROMPT if name in self.of.column_names])
        key = [
            self.start, score_cache.rows_key(prompts, trainer), args.num_generations, args.temperature, self.longest(),
            args.seed, trainer.terminal_ids, trainer.vocabulary, args.rollout, args.bf16, args.fp16,
        ]  # fmt: skip

        def sample() -> datasets.Dataset:
            if moved:
                raise InputError(
                    "rollouts: frozen: those of these rows are no longer in the cache of data sets, and the policy has "
                    "been trained since it began: train from the start, with a new trainer"
                )
            logger.info("sampling %d rollouts of each of %d prompts, once", args.num_generations, len(prompts))
            return self._sample(prompts)

        return score_cache.cached(key, len(prompts), sample, "rollouts", trainer.accelerator)

    def _sample(self, prompts: datasets.Dataset) -> datasets.Dataset:
        """In pieces, which the ranks share out; each piece has random numbers of its own."""
        self.trainer.backend.synchronise()
        accelerator, starts = self.trainer.accelerator, range(0, len(prompts), PIECE)
        world, rank, found = accelerator.num_processes, accelerator.process_index, {}
        for first in range(0, len(starts), world):  # as many calls on every rank: some end with an empty piece
            number = first + rank
            piece = range(number * PIECE, min((number + 1) * PIECE, len(prompts)))
            rows = prompts.select(piece).to_list() if piece else []
            seed = (self.trainer.args.seed, number)
            with rollout.seeded(accelerator.device, *seed):
                found[number] = super().answer(rows, seed, self.longest())
        pieces = {number: piece for part in gather_object([found]) for number, piece in part.items()}
        return datasets.Dataset.from_list(
            [{"rollout_ids": answers} for _, piece in sorted(pieces.items()) for _, answers in piece]
        )

    def _scored(self, sampled: datasets.Dataset) -> datasets.Dataset:
        """`teacher` of all rows: K x {teacher_ids, ...} each. All ranks call it."""
        trainer, args = self.trainer, self.trainer.args
        read = [name for name in (*PROMPT, *FOR_TEACHER) if name in self.of.column_names]
        rows = datasets.concatenate_datasets([self.of.select_columns(read), sampled], axis=1)
        one = trainer.stop.ids.tolist()
        top_k = args.precompute_teacher_top_k
        key = [
            trainer.teacher.key(), score_cache.rows_key(rows, trainer), top_k, args.temperature,
            trainer.vocabulary, args.bf16, args.fp16, one, score_cache.layout_key(trainer),
        ]  # fmt: skip

        def score(prompts: dict) -> list[dict]:
            given = prompts["prompts"].items
            examples = [
                Example(row["prompt_ids"], [*map(Branch, row["rollout_ids"])], pictures=row.get("images") or (),
                        reading=reading_of(row)) for row in given
            ]  # fmt: skip
            batch = trainer._prepare_inputs(trainer.data_collator.lay_out(examples))
            tokens = trainer.stop.of(targets(batch))
            columns = trainer.teacher.top(batch, top_k, tokens, args.temperature, trainer.vocabulary, trainer.stop)
            of_each = iter(range(len(batch["row"])))
            return [
                {"teacher": [{name: values[batch["owner"] == n].tolist() for name, values in columns.items()}
                             for n in islice(of_each, args.num_generations)]} for _ in given
            ]  # fmt: skip

        def compute() -> datasets.Dataset:
            title = "Scores of frozen rollouts by the teacher"
            size = args.per_device_eval_batch_size
            return datasets.Dataset.from_list(score_cache.score_rows(trainer, rows, size, score, title))

        return score_cache.cached(key, len(rows), compute, "teacher", trainer.accelerator)

    def longest(self) -> int:
        """The longest rollout of all steps: a horizon that grows cuts them as it is."""
        return max(self.trainer.horizon_at(step) for step in (0, 2**31))


SOURCES: dict[str, type[Live]] = {"live": Live, "replay": Replay, "frozen": Frozen}
"""By the option `rollouts`."""
