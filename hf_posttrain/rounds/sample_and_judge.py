"""Answers to many prompts, judged, in pieces that the ranks share out and that a run which was killed finds again."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import xxhash
from accelerate.utils import gather_object

from ..errors import InputError
from ..generation import rollout
from ..generation.completions_client import ServerError
from ..models.score_cache import rows_key, weights_key
from ..monitoring.progress import TaskProgress
from ..scoring.forward import unwrap_model
from ..scoring.layouts import Prompt
from ..trainer.output_dir import write_json
from .config import RoundsSection
from .judges.question import make_question

logger = logging.getLogger(__name__)
FOLDER = "_rounds"
"""In output_dir; by its first letter HF does not push it to the hub: it has the prompts."""
CHUNK_SIZE = 64
ONLINE_CHUNK_SIZE = 8
"""Prompts that are answered at once: random numbers depend on it, and not on the ranks. Online there are few."""
WEIGHT_SAMPLE = 64  # values of each weight that tell one policy from another


@dataclass
class ScoredCompletions:
    """A prompt's answers."""

    answers: list[list[int]]
    scores: list[float | None]  # None where the judge gave none


class RoundInterrupted(Exception):
    """SIGTERM or Ctrl-C asks for an end while a round is drawn: its pieces that are done are kept."""


class RoundFiles:
    """Files of finished pieces, in a folder that is named after all that they depend on; without one there are none."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def read(self) -> dict[int, list[ScoredCompletions]]:
        """Those that are there and whole, by their number."""
        found = {}
        for file in self.folder.glob("*.json") if self.folder else ():
            with suppress(OSError, ValueError, TypeError):
                found[int(file.stem)] = [
                    ScoredCompletions(*one) for one in json.loads(file.read_text(encoding="utf-8"))
                ]
        return found

    def write(self, number: int, piece: list[ScoredCompletions]) -> None:
        """One of them, whole or not at all."""
        if self.folder is not None:
            write_json(self.folder / f"{number}.json", [[one.answers, one.scores] for one in piece], indent=None)


def round_files(trainer: Any, prompts: datasets.Dataset, *seed: int) -> RoundFiles:
    """Where the pieces of a round are. All ranks call it: the key has the policy's weights."""
    args = trainer.args
    options = trainer.rollout_options
    weights = weights_key(unwrap_model(trainer.model).state_dict(keep_vars=True), sample=WEIGHT_SAMPLE)
    judge = raise_on_all_ranks(trainer.judge.key)
    key = [
        weights,
        rows_key(prompts, trainer),
        seed,
        options.fingerprint(),
        judge,
        trainer.terminal_ids,
        args.bf16,
        args.fp16,
    ]
    name = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    [name, *_] = gather_object([name])  # of a model that is cut over ranks, the first one's
    return RoundFiles(Path(args.output_dir, FOLDER, f"pieces-{name}"))


def sample_and_judge(
    trainer: Any, prompts: datasets.Dataset, seed: Sequence[int], title: str, pieces: RoundFiles
) -> list[ScoredCompletions]:
    """Answers of the policy to each prompt, judged, on all ranks. All ranks call it.

    trainer: has a `sampler`, its `rollout_options` and a `judge`. What is drawn depends on (*seed, piece) and not on
    the number of ranks. Raises InputError and ServerError of a judge or sampler, and Stopped between pieces that are
    kept, on all ranks.
    """
    accelerator = trainer.accelerator
    longest = trainer.rollout_options.max_completion_length
    world = accelerator.num_processes
    rank = accelerator.process_index
    count = trainer.rollout_options.num_generations
    size = chunk_size(trainer.rollout_options)
    # 1. pieces that any rank has on its disk count as done; each is told by the first rank that has it
    mine = pieces.read()
    have = gather_object([sorted(mine)])
    mine = {n: piece for n, piece in mine.items() if not any(n in other for other in have[:rank])}
    done = {n for numbers in have for n in numbers}
    todo = [n for n in range(-(-len(prompts) // size)) if n not in done]
    if done:
        logger.info("%s: %d of %d pieces were done before", title, len(done), len(done) + len(todo))
    # 2. the others, one of each rank at a time: as many calls on each, since a cut model needs all ranks
    with trainer.judge, TaskProgress(len(prompts), title, "prompt", shown=rank == 0) as steps:
        for first in range(0, len(todo), world):
            if pieces.folder is not None and trainer.preemption.should_stop(trainer.state, trainer.control):
                raise RoundInterrupted
            number = todo[first + rank] if first + rank < len(todo) else None
            place = range(0) if number is None else range(number * size, min((number + 1) * size, len(prompts)))
            rows = prompts.select(place).to_list() if number is not None else []
            of_piece = (*seed, 0 if number is None else number)
            with rollout.seeded(accelerator.device, *of_piece):
                sampled = trainer.sampler.sample([*map(Prompt.from_row, rows)], count, longest, of_piece)
            answers = [[completion.ids for completion in completions] for completions in sampled]
            questions = [
                make_question(row, own, trainer.tokenizer, trainer.terminal_ids)
                for row, own in zip(rows, answers, strict=True)
            ]
            # in the last lap a rank may have none, and no judge is asked about nothing
            scores = raise_on_all_ranks(partial(trainer.judge.score, questions) if questions else list)
            if number is not None:
                mine[number] = [ScoredCompletions(*one) for one in zip(answers, scores, strict=True)]
                pieces.write(number, mine[number])
            steps.add(min(size * world, len(prompts) - steps.done))
    # 3. in the prompts' order, on all ranks
    everyone = {n: piece for part in gather_object([mine]) for n, piece in part.items()}
    return [one for _, piece in sorted(everyone.items()) for one in piece]


def chunk_size(section: RoundsSection) -> int:
    """Prompts of a piece."""
    return ONLINE_CHUNK_SIZE if section.steps else CHUNK_SIZE


def raise_on_all_ranks(ask: Callable[[], Any]) -> Any:
    """What `ask` gives on each rank. Raises the InputError of any rank on all of them, which would wait for it."""
    found = None
    error = None
    try:
        found = ask()
    except InputError as raised:
        error = raised
    told = gather_object([error and (str(error), getattr(error, "status", None))])
    if first := next(filter(None, told), None):
        said, status = first
        raise (InputError(said) if status is None else ServerError(said, status)) from error
    return found
