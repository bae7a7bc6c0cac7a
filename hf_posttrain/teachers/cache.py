"""Cache on disk of the top k of the teacher for prepared rows."""

from typing import TYPE_CHECKING, Any

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature
from ..models import score_cache
from .signal import Request, Teacher, TopK

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface


def precompute_top_k(trainer: "TrainerInterface", teacher: Teacher, request: Request) -> None:
    """Add the columns teacher_ids and teacher_logps, [trained tokens][K] each, to the datasets of a trainer.

    The cache key consists of the weights of the teacher, the token ids of the rows, the tokenizer, K, the temperature
    and the precision.

    Raises:
        InputError: A dataset is a stream.
    """
    args = trainer.args
    trainer.check_scoring(trainer.model)
    merged_ids = request.eos.ids.tolist()
    key = [
        teacher.key(),
        sorted(trainer.tokenizer.get_vocab().items()),
        request.top_k,
        args.temperature,
        args.bf16,
        args.fp16,
        request.vocabulary,
        *([merged_ids] if merged_ids else []),
    ]

    def score(batch: MicroBatch) -> list[dict[str, Any]]:
        signal = teacher.signal(batch, request)
        assert isinstance(signal, TopK)
        ids = signal.ids.int().cpu().numpy()
        logps = signal.logps.float().cpu().numpy()
        masks = [(batch.owner == number).cpu().numpy() for number in range(len(batch.index))]
        return [{"teacher_ids": ids[mask], "teacher_logps": logps[mask]} for mask in masks]

    score_cache.add_scores(trainer, Feature.PRECOMPUTE, "teacher", key, args.per_device_eval_batch_size, score)
