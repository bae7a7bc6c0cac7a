"""Keeps samples.json in output_dir: greedy answers to a few prompts before the first step and after the last.

Training gives the same numbers with and without, since nothing is drawn and the generators' state is restored; the time
counts into train_runtime. An error is a warning, unless other ranks would wait for this one.
"""

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from transformers import TrainerCallback

from ..engines import engine
from ..generation import rollout
from .record import warn_on_error, write_json

logger = logging.getLogger(__name__)
NAME = "samples.json"
COUNT = 4
LONGEST = 96  # tokens of an answer, at most
OPENING = 16  # tokens that a text without a prompt is continued from, at most
FAILED = "sample answers are missing"


class Samples(TrainerCallback):
    """Asks before and after training; says in the log where it cannot."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, NAME)
        self.asked: list[tuple[list[int], list[int]]] = []
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engine is ready by now: the answers of before, or of a resumed run those that were kept."""
        self.asked, self.samples = [], []
        trainer, resumed = self.trainer, state.global_step > 0
        if problem := find_obstacle(trainer):
            logger.info("no sample answers before and after training: %s", problem)
            return
        with warn_on_error(FAILED, raised=engine.shards(trainer.accelerator)):
            asked = pick_questions(trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset)
            answers = [None] * len(asked) if resumed else self.generate(asked)
            # Set only now: where this failed, on_train_end does not try again.
            self.asked = asked
            if not state.is_world_process_zero:
                return
            decode = trainer.tokenizer.decode
            for (prompt, right), answer in zip(asked, answers, strict=True):
                expected = {"expected": decode(right, skip_special_tokens=True)} if right else {}
                self.samples.append({"prompt": decode(prompt), "before": answer, "after": None} | expected)
            if resumed:
                # Whatever the file of the run that is resumed holds
                with warn_on_error("sample answers from before training are missing"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else []
                    before = {sample["prompt"]: sample["before"] for sample in earlier}
                    for sample in self.samples:
                        sample["before"] = before.get(sample["prompt"])
                    if not all(sample["prompt"] in before for sample in self.samples):
                        lacking = f"{self.file} of the resumed run lacks them"
                        logger.info("no sample answers from before training: %s", lacking)
            with warn_on_error(FAILED):  # other ranks do not wait for the file
                write_json(self.file, self.samples)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The answers of after; none where SIGTERM asks for a quick end."""
        if not self.asked or self.trainer.preemption.happened:
            return
        with warn_on_error(FAILED, raised=engine.shards(self.trainer.accelerator)):
            for sample, answer in zip(self.samples, self.generate(self.asked), strict=False):  # other ranks have none
                sample["after"] = answer
            if state.is_world_process_zero:
                with warn_on_error(FAILED):
                    write_json(self.file, self.samples)

    def generate(self, asked: list[tuple[list[int], list[int]]]) -> list[Any]:
        """A text for each question on the first process, none on others; all ranks call it."""
        trainer = self.trainer
        prompts = [prompt for prompt, _ in asked] if trainer.is_world_process_zero() else []
        with rollout.seeded(trainer.accelerator.device, trainer.args.seed):
            found = trainer.generate(prompts, LONGEST, batch_size=COUNT)
        texts = trainer.tokenizer.batch_decode(found, skip_special_tokens=True) if found else []
        ends = trainer.terminal_ids
        return [text if ids[-1] in ends else f"{text} …" for text, ids in zip(texts, found, strict=True)]


def find_obstacle(trainer: Any) -> str | None:
    """Why the policy should not be asked: whole weights on one device, or whole rows, may be out of its reach."""
    args = trainer.args
    if trainer.train_dataset is None and trainer.eval_dataset is None:
        return "there are no rows"
    if args.parallelism_config is not None and args.parallelism_config.sp_size > 1:
        return "with sequence parallelism the model cannot generate"
    # To generate, FSDP and ZeRO gather the whole model on each device; it fits for sure only where the run does that.
    generates = args.eval_exact_match or getattr(args, "rollout", None) == "transformers"
    if engine.shards(trainer.accelerator) and not generates:
        return "they would gather all weights on each device, for which eval_exact_match: true would ask as well"
    return None


def pick_questions(rows: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, ids of the right answer, or none) of a few prepared rows, packed or not: evenly spread over a data
    set (of a dict the first), the first of a stream."""
    if isinstance(rows, dict):
        rows = next(iter(rows.values()))
    if isinstance(rows, datasets.Dataset):
        rows = rows.select(sorted({n * len(rows) // COUNT for n in range(COUNT)}) if len(rows) else [])
    elif isinstance(rows, datasets.IterableDataset):
        rows = rows.take(COUNT)
    return [_read_question(row) for row in islice(rows, COUNT)]


def _read_question(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    prompt, answer = row["prompt_ids"], row.get("chosen_ids") or row.get("completion_ids") or []
    if answer and isinstance(answer[0], list):  # packed
        return _read_question({name: value[0] for name, value in row.items() if isinstance(value, list)})
    if len(prompt) < 2:  # a text: its beginning is the prompt
        opening = max(1, min(OPENING, len(answer) // 2))
        return [*prompt, *answer[:opening]], answer[opening:]
    # In a conversation of many turns, the answer ends with the first of them.
    mask = row.get("completion_mask") or []
    first_turn = answer[: mask.index(0)] if 0 in mask else answer
    return prompt, first_turn if row.get("label", True) else []
