"""The micro-batch of a teacher that does not read the student's rows.

Legend: N scored tokens of the student, n of them in a teacher's batch, M scored tokens of a teacher with another
tokenizer, D places that `Aligner.longer` looks ahead.
"""

from dataclasses import dataclass

from torch import Tensor

from ..batching.micro_batch import Deferred, MicroBatch


@dataclass
class TeacherBatch(MicroBatch):
    """What one teacher reads of a student's batch: its own rows of tokens, or texts for a teacher on a server.

    With another tokenizer the teacher scores M tokens of its own, and chunks of common text connect them with the N
    tokens of the student; -1 stands for none.
    """

    places: Tensor = None  # type: ignore[assignment]  # [n], which of the student's N scored tokens these are
    order: Tensor = None  # type: ignore[assignment]  # [n], which scored token of `texts` each of these is
    texts: Deferred | None = None  # (prompt, answer, mask of scored tokens) of each branch, for a server

    # ---- another tokenizer
    chunk: Tensor = None  # type: ignore[assignment]  # [N], chunk of a token; `data.align.INCOMPLETE_CHARACTER`: a cut character
    before: Tensor = None  # type: ignore[assignment]  # [N], the chunk before it in the same answer
    behind: Tensor = None  # type: ignore[assignment]  # [N], the chunk after it in the same answer
    match: Tensor = None  # type: ignore[assignment]  # [N], the teacher's token that alone forms a chunk with this one
    their_chunk: Tensor = None  # type: ignore[assignment]  # [M], chunk of a teacher's token
    longer: Tensor = None  # type: ignore[assignment]  # [M, D, 2], ranges of `Aligner.teacher_only`, empty ranges for none
