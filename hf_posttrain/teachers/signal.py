"""What a teacher says about the scored tokens of a batch, and the interface of a teacher.

A loss states what it needs as a `Request`; `Teacher.signal` answers with one of four signals:

    Dense      the whole distribution, computed tile by tile
    TopK       the k most likely tokens
    Sampled    only the log-probability of the target
    Chunked    a teacher with another tokenizer, see `cross_tokenizer`

Legend: N scored tokens, n tokens of a tile, V vocabulary, K tokens of the top k, M tokens of another tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..data.align import Aligner
from ..models.frozen import FrozenModel
from ..scoring.teacher_tiles import TeacherLogits
from .batch import TeacherBatch
from .eos import MergedEOS


@dataclass(frozen=True)
class Request:
    """What a loss needs from its teacher."""

    kind: Literal["dense", "top_k", "sampled"]
    temperature: float  # divides the teacher's logits
    vocabulary: int  # number of ids that all models have
    eos: MergedEOS
    top_k: int = 0


@dataclass(frozen=True)
class Dense:
    """The teacher's whole distribution at each scored token."""

    logits: TeacherLogits


@dataclass(frozen=True)
class TopK:
    """The teacher's most likely tokens at each scored token."""

    ids: Tensor  # [N, K]
    logps: Tensor  # [N, K], at the temperature of the request
    targets: Tensor | None = None  # [N], log-probabilities of the targets; None where they were not kept

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`."""
        targets = None if self.targets is None else self.targets.to(device, non_blocking=non_blocking)
        ids = self.ids.to(device, non_blocking=non_blocking)
        return type(self)(ids, self.logps.to(device, non_blocking=non_blocking), targets)

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory."""
        targets = None if self.targets is None else self.targets.pin_memory()
        return type(self)(self.ids.pin_memory(), self.logps.pin_memory(), targets)


@dataclass(frozen=True)
class Sampled:
    """The teacher's log-probability of each target."""

    targets: Tensor  # [N], at the temperature of the request

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`."""
        return type(self)(self.targets.to(device, non_blocking=non_blocking))


class SelectableLogits(TeacherLogits, Protocol):
    """Logits of a teacher's own M tokens."""

    def select(self, positions: Tensor) -> TeacherLogits:
        """Return the logits at some positions [N], each in [0, M)."""
        ...


@dataclass(frozen=True)
class Chunked:
    """What a teacher with another tokenizer says about its own M tokens, see `cross_tokenizer`."""

    batch: TeacherBatch
    ids: Tensor  # [S], the student's ids that both tokenizers have
    their_ids: Tensor  # [S], the teacher's ids of the same tokens
    targets: Tensor  # [M], log-probabilities of its targets
    states: SelectableLogits | None = None  # its whole distributions, where it gives them
    reached: Tensor | None = None  # [M], probability that a token begins where it does; given with `states`


TeacherSignal: TypeAlias = Dense | TopK | Sampled | Chunked


class Teacher(Protocol):
    """A teacher of any kind. Scores are without gradient."""

    name: str
    """Which of several teachers it is; empty for a single one."""
    description: str
    """What a checkpoint stores about it, next to a hash of its weights."""
    dense: bool
    """Whether it gives its whole distribution; a server gives only its top k."""
    aligner: Aligner | None
    """Of a teacher with another tokenizer."""
    vocabulary: int
    """Number of its token ids. Those that the student lacks are left out."""
    models: Sequence[FrozenModel]
    """Its models in memory: the trainer chooses a layout that suits them too, and checks how they score."""

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Return what the teacher says about the scored tokens of a batch. All ranks call it."""
        ...

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> list[TeacherSignal] | None:
        """Return the signals of a whole window where that is faster than one batch at a time; otherwise None."""
        ...

    def join_collective(self, batch: MicroBatch) -> None:
        """Take part in what all ranks do in `signal`, on a rank without tokens for this teacher. Only called for one of
        several teachers.
        """
        ...

    def key(self) -> Any:
        """Return what distinguishes its scores from those of another teacher, for caches."""
        ...

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer."""
        ...

    def release(self) -> None:
        """Free the memory of the device until the next use."""
        ...
