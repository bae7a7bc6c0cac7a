"""The teacher of KD and OPD: scored alongside the student, or once into a cache of its top tokens."""

import logging
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..engines import engine, launch
from ..errors import InputError
from ..scoring import forward
from ..scoring.head import TileFunction
from ..scoring.teacher_tiles import TeacherStates
from ..scoring.top_tokens import TopTokens
from . import load
from .frozen import Frozen
from .score_cache import cached, model_key, rows_key, score_rows, with_scores
from .section import ModelSection

logger = logging.getLogger(__name__)


class TeacherCallback(TrainerCallback):
    """Holds the teacher: prepared for the engine by its first use, freed when training ends; it builds no graph."""

    def __init__(self, model: nn.Module, accelerator: Accelerator, offload: bool = False):
        self.frozen = Frozen(model, accelerator, offload)

    @property
    def model(self) -> nn.Module:
        """The teacher, wrapped by its engine once it was used."""
        return self.frozen.model

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the device's memory back; a later evaluation brings the teacher back by itself."""
        self.frozen.release()

    def score(self, batch: dict[str, Any], tile: TileFunction) -> dict[str, Any]:
        """`forward.score` of the teacher without gradient."""
        with torch.no_grad(), self.frozen.accelerator.autocast(), self.frozen as model:
            return forward.score(model, batch, tile)

    def states(self, batch: dict[str, Any]) -> TeacherStates:
        """The teacher's head and its hidden states at the scored positions, for a tile function."""
        leaves = engine.shards(self.frozen.accelerator) or self.frozen.offload  # after the forward
        with torch.no_grad(), self.frozen.accelerator.autocast(), self.frozen as model:
            return TeacherStates.of(model, batch, copy_head=leaves)


def add_teacher(trainer: Any, model: nn.Module | str | None, offload: bool) -> tuple[TeacherCallback, int]:
    """The trainer's teacher, and the number of token ids that both models have. Raises InputError: `check_teacher`."""
    model = check_teacher(model, trainer.model, trainer.tokenizer)
    launch.check_model(model, trainer.args)
    teacher = TeacherCallback(model, trainer.accelerator, offload)
    trainer.add_callback(teacher)
    trainer.set_second_model(teacher.frozen)
    return teacher, min(model.config.get_text_config().vocab_size for model in trainer.scored)


def check_teacher(teacher: nn.Module | str | None, student: nn.Module, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The teacher, loaded if it is a name, after comparing what is known of its vocabulary with the student's.

    Raises InputError for a missing teacher, the student itself, and different token ids (padding aside).
    """
    if teacher is None:
        raise InputError("teacher_model is missing: pass a model, or its name or folder")
    if not isinstance(teacher, str) and forward.causal_lm(teacher) is forward.causal_lm(student):
        raise InputError("teacher_model is the student itself: pass a copy (copy.deepcopy) to distil from its start")
    name = teacher if isinstance(teacher, str) else getattr(teacher.config, "_name_or_path", "")
    if isinstance(teacher, str):
        teacher = load.load_model(ModelSection(name_or_path=teacher), trainable=False)
    sizes = [forward.causal_lm(m).config.get_text_config().vocab_size for m in (student, teacher)]
    try:
        theirs = load.load_tokenizer(ModelSection(name_or_path=name)) if name else None
    except InputError:
        theirs = None  # a model in memory whose tokenizer cannot be found: its size is all there is to compare
    if theirs is not None:
        load.check_same_vocabulary(tokenizer, theirs, *sizes)
    else:
        load.check_tokenizer_fits(tokenizer, sizes[1], "the student (with the teacher's model)")
    return teacher


def precompute_top_k(trainer: Any) -> None:
    """Give the trainer's rows teacher_ids and teacher_logps, [trained tokens][K] each, from the cache or scored now.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    trainer.check_scoring(trainer.model)
    for split in ("train", "eval"):
        rows = getattr(trainer, f"{split}_dataset")
        rows = with_scores(rows, "precompute_teacher_top_k", partial(_top_tokens, trainer), split)
        setattr(trainer, f"{split}_dataset", rows)
    trainer.set_second_model(None)


def _top_tokens(trainer: Any, rows: datasets.Dataset, name: str) -> datasets.Dataset:
    """The teacher's top tokens of every row, in the order of the rows."""
    args = trainer.args
    tile = TopTokens(args.precompute_teacher_top_k, args.temperature, trainer.vocabulary)
    vocabulary = sorted(trainer.tokenizer.get_vocab().items())
    key = [
        model_key(trainer.teacher.model), rows_key(rows), vocabulary, tile.k, tile.temperature, args.bf16, args.fp16,
        tile.vocabulary,
    ]  # fmt: skip

    def score(batch: dict, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        scores = trainer.teacher.score(batch, tile)
        own = [batch["owner"] == number for number in range(count)]
        return [(scores["ids"][o].int().cpu().numpy(), scores["logps"][o].float().cpu().numpy()) for o in own]

    def compute() -> datasets.Dataset:
        title = f"Teacher's top tokens of {name}"
        ids, logps = zip(*score_rows(trainer, rows, args.per_device_eval_batch_size, score, title), strict=True)
        return datasets.Dataset.from_dict({"teacher_ids": list(ids), "teacher_logps": list(logps)})

    return cached(key, compute, "teacher", trainer.accelerator)
