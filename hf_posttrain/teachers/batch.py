"""The micro-batch of a teacher whose input differs from that of the student.

Legend: N scored tokens of the student, n of them in a teacher's batch, M scored tokens of a teacher with another
tokenizer, D depth of `Aligner.longer`.
"""

from dataclasses import dataclass

from torch import Tensor

from ..batching.micro_batch import Deferred, MicroBatch


@dataclass
class TeacherBatch(MicroBatch):
    """Input of one teacher for a batch of the student, with separate rows of tokens, or with texts for a server.

    With another tokenizer the teacher scores its own M tokens. Chunks of common text connect them with the N tokens of
    the student, and -1 means no chunk or no token.
    """

    positions: Tensor = None  # type: ignore[assignment]  # [n], indices of these tokens among the N scored tokens
    order: Tensor = None  # type: ignore[assignment]  # [n], index of each of these tokens in the scored tokens of `texts`
    texts: Deferred | None = None  # (prompt, answer, mask of scored tokens) of each branch

    # ---- another tokenizer
    chunk: Tensor = None  # type: ignore[assignment]  # [N], chunk of a token, or `data.align.INCOMPLETE_CHARACTER`
    before: Tensor = None  # type: ignore[assignment]  # [N], the previous chunk in the same answer
    after: Tensor = None  # type: ignore[assignment]  # [N], the next chunk in the same answer
    match: Tensor = None  # type: ignore[assignment]  # [N], teacher token in a one-to-one chunk
    teacher_chunk: Tensor = None  # type: ignore[assignment]  # [M], chunk of a token of the teacher
    longer: Tensor = None  # type: ignore[assignment]  # [M, D, 2], ranges of `Aligner.teacher_only`
