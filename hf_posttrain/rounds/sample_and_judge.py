"""Judged answers to many prompts, in chunks that the ranks divide among themselves.

Finished chunks are files, so that a run that was killed continues with them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import xxhash
from accelerate.utils import gather_object

from ..generation import rollout
from ..generation.completions_client import raise_on_all_ranks
from ..models.score_cache import rows_key, weights_key
from ..monitoring.progress import TaskProgress
from ..scoring.forward import unwrap_model
from ..scoring.layouts import Prompt
from ..trainer.output_dir import write_json
from .config import RoundsSection
from .judges.question import make_question

if TYPE_CHECKING:
    from .iterative_trainer import InRounds

logger = logging.getLogger(__name__)
FOLDER = "_rounds"
"""Folder in output_dir. HF does not push it to the Hub, because of its first letter: it has the prompts."""
CHUNK_SIZE = 64
"""Number of prompts that are answered at once. Random numbers depend on it, and not on the number of ranks."""
ONLINE_CHUNK_SIZE = 8
"""Number of prompts that are answered at once in online training, where a round has few prompts."""
WEIGHT_SAMPLE = 64
"""Number of values of each weight that are hashed to distinguish policies."""


@dataclass
class ScoredCompletions:
    """The answers to a prompt, and their scores."""

    answers: list[list[int]]
    scores: list[float | None]  # None for an answer that the judge did not score


class RoundInterrupted(Exception):
    """SIGTERM or Ctrl-C has requested the end of the run while a round is sampled. Finished chunks are kept."""


class RoundFiles:
    """Files of finished chunks, in a folder with a name that hashes everything they depend on.

    Without a folder nothing is stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self) -> dict[int, list[ScoredCompletions]]:
        """Return the finished chunks by number. Incomplete files are skipped."""
        chunks = {}
        for file in self.folder.glob("*.json") if self.folder else ():
            with suppress(OSError, ValueError, TypeError):
                chunks[int(file.stem)] = [
                    ScoredCompletions(*fields) for fields in json.loads(file.read_text(encoding="utf-8"))
                ]
        return chunks

    def write(self, number: int, chunk: list[ScoredCompletions]) -> None:
        """Write a chunk atomically."""
        if self.folder is not None:
            entries = [[completions.answers, completions.scores] for completions in chunk]
            write_json(self.folder / f"{number}.json", entries, indent=None)


def round_files(trainer: "InRounds", prompts: datasets.Dataset, *seed: int) -> RoundFiles:
    """Return the chunk files of a round. All ranks call it: the name of the folder depends on the policy's weights."""
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
    [name, *_] = gather_object([name])  # ranks of a sharded model have different weights: the first one's name counts
    return RoundFiles(Path(args.output_dir, FOLDER, f"pieces-{name}"))


def sample_and_judge(
    trainer: "InRounds", prompts: datasets.Dataset, seed: Sequence[int], title: str, files: RoundFiles
) -> list[ScoredCompletions]:
    """Return the judged answers of the policy to each prompt, on all ranks. All ranks call it.

    The answers depend on (*seed, number of the chunk) and not on the number of ranks.

    Args:
        trainer: Trainer with a `sampler`, its `rollout_options` and a `judge`.
        prompts: Prepared rows of the prompts.
        seed: Seed of the answers.
        title: Title of the progress bar.
        files: Files of finished chunks.

    Raises:
        InputError: The judge or the sampler raised it on any rank; likewise ServerError.
        RoundInterrupted: The run is asked to end, between two chunks that are stored.
    """
    accelerator = trainer.accelerator
    max_new_tokens = trainer.rollout_options.max_completion_length
    world = accelerator.num_processes
    rank = accelerator.process_index
    count = trainer.rollout_options.num_generations
    size = chunk_size(trainer.rollout_options)

    # 1. chunks on the disk of any rank are finished; the first rank that has one returns it
    chunks = files.read()
    numbers_of_ranks = gather_object([sorted(chunks)])
    chunks = {n: chunk for n, chunk in chunks.items() if not any(n in numbers for numbers in numbers_of_ranks[:rank])}
    finished = {n for numbers in numbers_of_ranks for n in numbers}
    remaining = [n for n in range(-(-len(prompts) // size)) if n not in finished]
    if finished:
        logger.info("%s: %d of %d chunks are already done", title, len(finished), len(finished) + len(remaining))

    # 2. the remaining chunks, one per rank at a time: equally many calls on each, as a sharded model needs all ranks
    with trainer.judge, TaskProgress(len(prompts), title, "prompt", shown=rank == 0) as progress:
        for first in range(0, len(remaining), world):
            if files.folder is not None and trainer.preemption.should_stop(trainer.state, trainer.control):
                raise RoundInterrupted
            number = remaining[first + rank] if first + rank < len(remaining) else None
            indices = range(0) if number is None else range(number * size, min((number + 1) * size, len(prompts)))
            rows = prompts.select(indices).to_list() if number is not None else []
            chunk_seed = (*seed, 0 if number is None else number)
            with rollout.seeded(accelerator.device, *chunk_seed):
                sampled = trainer.sampler.sample([*map(Prompt.from_row, rows)], count, max_new_tokens, chunk_seed)
            answers = [[completion.ids for completion in completions] for completions in sampled]
            questions = [
                make_question(row, answers_of_row, trainer.tokenizer, trainer.terminal_ids)
                for row, answers_of_row in zip(rows, answers, strict=True)
            ]
            # in the last iteration a rank may have no chunk, and a judge is never called without questions
            score: Callable[[], list[Any]] = partial(trainer.judge.score, questions) if questions else list
            scores = raise_on_all_ranks(score)
            if number is not None:
                chunks[number] = [ScoredCompletions(*fields) for fields in zip(answers, scores, strict=True)]
                files.write(number, chunks[number])
            progress.add(min(size * world, len(prompts) - progress.done))

    # 3. all chunks on all ranks, in the order of the prompts
    all_chunks = {n: chunk for part in gather_object([chunks]) for n, chunk in part.items()}
    return [completions for _, chunk in sorted(all_chunks.items()) for completions in chunk]


def chunk_size(section: RoundsSection) -> int:
    """Return the number of prompts of a chunk."""
    return ONLINE_CHUNK_SIZE if section.steps else CHUNK_SIZE
