"""Cache on disk of the scores of a teacher for prepared rows: its top k, or its hidden states.

The hidden states before the head take 2 H bytes per token in half precision, for a hidden size H. The head computes the
whole distribution from them.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature
from ..errors import InputError
from ..models import score_cache
from ..scoring.forward import LMHead
from .columns import to_columns
from .local import TeacherStates, copy_head
from .signal import Dense, HiddenStates, Request, Teacher, TopK

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface


def precompute_scores(trainer: "TrainerInterface", teacher: Teacher, request: Request) -> LMHead | None:
    """Add the scores of a teacher to the datasets of a trainer.

    The cache key consists of the weights of the teacher, the token ids of the rows, the tokenizer, the precision, and
    for a top k also of K and the temperature.

    Returns:
        A copy of the head of the teacher if the scores are hidden states, else None.

    Raises:
        InputError: A dataset is a stream, or the teacher has no hidden states and `request` is not about a top k.
    """
    trainer.check_scoring(trainer.model)
    key = [teacher.key(), sorted(trainer.tokenizer.get_vocab().items()), *scores_key(trainer, request)]

    def score(batch: MicroBatch) -> list[dict[str, Any]]:
        scores = storable_scores(teacher, batch, request)
        if isinstance(scores, TopK):
            scores = TopK(scores.ids, scores.logps)  # the loss does not read those of the targets
        return [to_columns(scores, batch.owner == number) for number in range(len(batch.index))]

    score_cache.add_scores(trainer, Feature.PRECOMPUTE, "teacher", key, trainer.args.per_device_eval_batch_size, score)
    if request.kind == "top_k":
        return None
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.scored_rows[-1][0]]))
    return frozen_head(teacher, batch, request)


def scores_key(trainer: "TrainerInterface", request: Request) -> list[Any]:
    """Return all on which the scores depend besides the teacher and the rows."""
    args = trainer.args
    precision = [args.bf16, args.fp16]
    if request.kind == "dense":
        return ["hidden states", *precision]
    return [request.top_k, args.temperature, *precision, request.vocabulary, request.eos.ids.tolist()]


def storable_scores(teacher: Teacher, batch: MicroBatch, request: Request) -> TopK | HiddenStates:
    """Return the top k of a teacher, or the hidden states behind its whole distribution.

    Raises:
        InputError: The teacher has no hidden states, and `request` is not about a top k.
    """
    if request.kind == "dense":
        return HiddenStates(_states(teacher, batch, request).hidden)
    signal = teacher.signal(batch, request)
    assert isinstance(signal, TopK)
    return signal


def frozen_head(teacher: Teacher, batch: MicroBatch, request: Request) -> LMHead:
    """Return a copy of the head of a teacher, which scores a batch for this. All ranks call it.

    Raises:
        InputError: The teacher has no hidden states, or its head is not a plain linear layer.
    """
    return copy_head(_states(teacher, batch, request).head)


def _states(teacher: Teacher, batch: MicroBatch, request: Request) -> TeacherStates:
    """Return the head and the hidden states of a teacher."""
    signal = teacher.signal(batch, request)
    states = signal.logits if isinstance(signal, Dense) else None
    if not isinstance(states, TeacherStates) or isinstance(states.head.module, nn.Identity):
        problem = "teacher.precompute without teacher.top_k requires a teacher in memory with hidden states and a head"
        raise InputError(f"{problem}. Set teacher.top_k to the number of tokens to keep for each position")
    return states
