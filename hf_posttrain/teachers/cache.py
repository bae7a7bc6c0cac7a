"""The teacher's top k of prepared rows, scored once and kept on disk."""

from typing import TYPE_CHECKING, Any

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature
from ..models import score_cache
from .signal import Request, Teacher, TopK

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface


def precompute_top_k(trainer: "TrainerInterface", teacher: Teacher, request: Request) -> None:
    """Add the columns teacher_ids and teacher_logps, [trained tokens][K] each, to the trainer's datasets.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    args = trainer.args
    trainer.check_scoring(trainer.model)
    merged = request.eos.ids.tolist()
    key = [
        teacher.key(),
        sorted(trainer.tokenizer.get_vocab().items()),
        request.top_k,
        args.temperature,
        args.bf16,
        args.fp16,
        request.vocabulary,
        *([merged] if merged else []),
    ]

    def score(batch: MicroBatch) -> list[dict[str, Any]]:
        signal = teacher.signal(batch, request)
        assert isinstance(signal, TopK)
        ids = signal.ids.int().cpu().numpy()
        logps = signal.logps.float().cpu().numpy()
        masks = [(batch.owner == number).cpu().numpy() for number in range(len(batch.index))]
        return [{"teacher_ids": ids[mask], "teacher_logps": logps[mask]} for mask in masks]

    score_cache.add_scores(trainer, Feature.PRECOMPUTE, "teacher", key, args.per_device_eval_batch_size, score)
