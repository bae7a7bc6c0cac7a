"""The teacher of KD and OPD: held by a callback, scored beside the student or once into a cache of top tokens."""

import logging
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..engines import engine, launch
from ..errors import InputError
from ..recipe.read import ModelSection
from ..scoring import forward as scoring
from ..scoring.teacher_tiles import Teacher
from ..scoring.tiles import Tile, TileFunction
from . import load as models
from .score_cache import Frozen, cached, model_key, rows_key, score_rows

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
        """`scoring.score` of the teacher without gradient."""
        with torch.no_grad(), self.frozen.accelerator.autocast(), self.frozen as model:
            return scoring.score(model, batch, tile)

    def side(self, batch: dict[str, Any]) -> Teacher:
        """The teacher's head and its hidden states at the scored positions, for a tile function."""
        leaves = engine.shards(self.frozen.accelerator) or self.frozen.offload  # after the forward
        with torch.no_grad(), self.frozen.accelerator.autocast(), self.frozen as model:
            head, hidden = scoring.hidden_states(model, batch, copy_head=leaves)
        return Teacher(head, hidden.to(head.dtype or hidden.dtype))


def add_teacher(trainer: Any, model: nn.Module | str | None, offload: bool) -> tuple[TeacherCallback, int]:
    """The trainer's teacher, and the number of token ids that both models have. Raises InputError: `check_teacher`."""
    model = check_teacher(model, trainer.model, trainer.tokenizer)
    launch.check_model(model, trainer.args)
    teacher = TeacherCallback(model, trainer.accelerator, offload)
    trainer.add_callback(teacher)
    trainer.score_beside(teacher.frozen)
    return teacher, min(model.config.get_text_config().vocab_size for model in trainer.scored)


def check_teacher(teacher: nn.Module | str | None, student: nn.Module, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The teacher, loaded if it is a name, after comparing what is known of its vocabulary with the student's.

    Raises InputError for a missing teacher, the student itself, and different token ids (padding aside).
    """
    if teacher is None:
        raise InputError("teacher_model is missing: pass a model, or its name or folder")
    if not isinstance(teacher, str) and scoring.causal_lm(teacher) is scoring.causal_lm(student):
        raise InputError("teacher_model is the student itself: pass a copy (copy.deepcopy) to distil from its start")
    name = teacher if isinstance(teacher, str) else getattr(teacher.config, "_name_or_path", "")
    if isinstance(teacher, str):
        teacher = models.load_model(ModelSection(name_or_path=teacher), trainable=False)
    sizes = [scoring.causal_lm(m).config.get_text_config().vocab_size for m in (student, teacher)]
    try:
        theirs = models.load_tokenizer(ModelSection(name_or_path=name)) if name else None
    except InputError:
        theirs = None  # a model in memory whose tokenizer cannot be found: its size is all there is to compare
    if theirs is not None:
        models.check_same_vocabulary(tokenizer, theirs, *sizes)
    else:
        models.check_tokenizer_fits(tokenizer, sizes[1], "the student (with the teacher's model)")
    return teacher


# ---- a teacher that is scored once


class TopTokens:
    """Tile function: the K largest log-probabilities at a temperature and their ids, as stats of [n, K]."""

    def __init__(self, k: int, temperature: float, vocabulary: int):
        self.k, self.temperature, self.vocabulary = k, temperature, vocabulary

    def __call__(self, logits: Tensor, rows: slice, need_grad: bool, room: Tensor) -> Tile:
        """[n, V] -> Tile; its value is not used."""
        logps = torch.log_softmax(logits[:, : self.vocabulary] / self.temperature, dim=-1)
        top, ids = logps.topk(min(self.k, logps.shape[-1]), dim=-1)
        return Tile(top[:, 0], None, {"logps": top, "ids": ids})


def precompute_top_k(trainer: Any, rows: Any, name: str) -> Any:
    """Rows with teacher_ids and teacher_logps, [trained tokens][K] each, from the cache on disk or scored now.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    if rows is None:
        return None
    if isinstance(rows, dict):
        return {key: precompute_top_k(trainer, part, f"{name} {key}") for key, part in rows.items()}
    if not isinstance(rows, datasets.Dataset):
        raise InputError("precompute_teacher_top_k needs a data set of known length, not a stream")
    args = trainer.args
    vocabulary = sorted(trainer.tokenizer.get_vocab().items())
    key = [
        model_key(trainer.teacher.model), rows_key(rows), vocabulary, args.precompute_teacher_top_k, args.temperature,
        args.bf16, args.fp16, trainer.vocabulary,
    ]  # fmt: skip
    found = cached(key, lambda: _score_rows(trainer, rows, name), "teacher", trainer.accelerator)
    trainer.teacher.frozen.release()
    return datasets.concatenate_datasets([rows, found], axis=1)


def _score_rows(trainer: Any, rows: datasets.Dataset, name: str) -> datasets.Dataset:
    """Every row's top tokens, in the order of the rows."""
    args = trainer.args
    tile = TopTokens(args.precompute_teacher_top_k, args.temperature, trainer.vocabulary)

    def score(batch: dict, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        scores = trainer.teacher.score(batch, tile)
        own = [batch["owner"] == number for number in range(count)]
        return [(scores["ids"][o].int().cpu().numpy(), scores["logps"][o].float().cpu().numpy()) for o in own]

    found = score_rows(trainer, rows, args.per_device_eval_batch_size, score, f"Teacher's top tokens of {name}")
    ids, logps = zip(*found, strict=True)
    return datasets.Dataset.from_dict({"teacher_ids": list(ids), "teacher_logps": list(logps)})
