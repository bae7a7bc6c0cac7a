"""The teacher of KD and OPD: scored alongside the student, or once into a cache of its top tokens."""

import logging
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..engines import launch
from ..errors import InputError
from ..scoring import forward
from ..scoring.head import TileFunction
from ..scoring.stop_outcome import StopOutcome
from ..scoring.teacher_tiles import TeacherStates
from ..scoring.top_tokens import TopTokens
from . import load, score_cache
from .frozen import Frozen, shares_trained_weights
from .prepare import find_terminal_ids
from .section import ModelSection

logger = logging.getLogger(__name__)


class Teacher(Frozen, TrainerCallback):
    """A second model that scores for a tile function; as a callback it leaves the device when training ends."""

    def score(self, batch: dict[str, Any], tile: TileFunction) -> dict[str, Any]:
        """`forward.score` of the teacher without gradient."""
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return forward.score(model, batch, tile)

    def states(self, batch: dict[str, Any], stop: StopOutcome) -> TeacherStates:
        """The teacher's head and its hidden states at the scored positions, for a tile function that `stop` wraps."""
        # the head is used after the forward: where its weights have left by then, they are copied
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return TeacherStates.of(model, batch, copy_head=self.sharded or self.offload, stop=stop)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back the device's memory; a later evaluation brings the teacher back by itself."""
        self.release()


def add_teacher(trainer: Any, teacher: nn.Module | str | None, offload: bool) -> tuple[Teacher, int]:
    """The trainer's teacher, loaded if it is a name, and the number of token ids that both models have.

    Raises InputError for a missing teacher, the student itself, and different token ids (padding aside).
    """
    student = forward.causal_lm(trainer.model)
    if teacher is None:
        raise InputError("teacher_model is missing: pass a model, or its name or folder")
    name = teacher if isinstance(teacher, str) else getattr(teacher.config, "_name_or_path", "")
    if isinstance(teacher, str):
        teacher = load.load_model(ModelSection(name_or_path=teacher), trainable=False)
    if shares_trained_weights(teacher, trainer.model):
        problem = "teacher_model is the student itself, or shares weights with it"
        raise InputError(f"{problem}: pass a copy (copy.deepcopy) to distil from its start")
    sizes = [model.config.get_text_config().vocab_size for model in (student, forward.causal_lm(teacher))]
    # of a model in memory the tokenizer may not be found
    theirs = None
    with suppress(InputError):
        theirs = load.load_tokenizer(ModelSection(name_or_path=name)) if name else None
    if theirs is not None:
        load.check_same_vocabulary(trainer.tokenizer, theirs)
    launch.check_model(teacher, trainer.args)
    if offload and getattr(teacher, "is_loaded_in_8bit", False):
        raise InputError("teacher offload: bitsandbytes keeps 8-bit weights on the GPU: use 4bit, or do not offload")
    added = Teacher(teacher, trainer.accelerator, offload)
    trainer.add_callback(added)
    trainer.set_second_model(added)
    return added, min(sizes)


def find_stop_outcome(trainer: Any, asked: bool) -> tuple[list[int], StopOutcome]:
    """The terminal ids of the trainer's student and teacher, and which of them are one outcome. asked: as the option
    `one_stop_outcome`."""
    theirs = find_terminal_ids(trainer.teacher.model, trainer.tokenizer, trainer.args.chat_template_kwargs)
    both = list(dict.fromkeys(trainer.terminal_ids + theirs))
    one = [i for i in both if i < trainer.vocabulary] if asked else []
    if len(one) > 1:
        names = " ".join(trainer.tokenizer.convert_ids_to_tokens(one))
        logger.info("terminal tokens that count as one outcome: %s", names)
    return both, StopOutcome(torch.tensor(one, device=trainer.accelerator.device), trainer.args.temperature)


def precompute_top_k(trainer: Any) -> None:
    """Give the trainer's rows teacher_ids and teacher_logps, [trained tokens][K] each, from the cache or scored now.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    args = trainer.args
    trainer.check_scoring(trainer.model)
    tile = TopTokens(args.precompute_teacher_top_k, args.temperature, trainer.vocabulary)
    one = trainer.stop.ids.tolist()
    key = [
        score_cache.model_key(trainer.teacher.model), sorted(trainer.tokenizer.get_vocab().items()),
        tile.k, tile.temperature, args.bf16, args.fp16, tile.vocabulary, *([one] if one else []),
    ]  # fmt: skip

    def score(batch: dict) -> list[dict[str, Any]]:
        found = trainer.teacher.score(batch, trainer.stop(tile))
        ids, logps = found["ids"].int().cpu().numpy(), found["logps"].float().cpu().numpy()
        own = [(batch["owner"] == number).cpu().numpy() for number in range(len(batch["index"]))]
        return [{"teacher_ids": ids[mask], "teacher_logps": logps[mask]} for mask in own]

    score_cache.add_scores(trainer, "precompute_teacher_top_k", "teacher", key, args.per_device_eval_batch_size, score)
    trainer.set_second_model(None)
