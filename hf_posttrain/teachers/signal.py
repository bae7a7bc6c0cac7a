"""Interface of a teacher, and the signals that it returns for the scored tokens of a batch.

A loss describes its needs as a `Request`. `Teacher.signal` returns one of four signals:

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
    """Request of a loss to its teacher."""

    kind: Literal["dense", "top_k", "sampled"]
    temperature: float  # divides the teacher's logits
    vocabulary: int  # number of token ids that all models have
    eos: MergedEOS
    top_k: int = 0


@dataclass(frozen=True)
class Dense:
    """Whole distribution of the teacher at each scored token."""

    logits: TeacherLogits


@dataclass(frozen=True)
class TopK:
    """Most likely tokens of the teacher at each scored token."""

    ids: Tensor  # [N, K]
    logps: Tensor  # [N, K], at the temperature of the request
    targets: Tensor | None = None  # [N], log-probabilities of the targets, None if they were not stored

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
    """Log-probability of each target under the teacher."""

    targets: Tensor  # [N], at the temperature of the request

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`."""
        return type(self)(self.targets.to(device, non_blocking=non_blocking))


class SelectableLogits(TeacherLogits, Protocol):
    """Logits at the M tokens of a teacher with another tokenizer."""

    def select(self, positions: Tensor) -> TeacherLogits:
        """Return the logits at positions [N], each in [0, M)."""
        ...


@dataclass(frozen=True)
class Chunked:
    """Signal of a teacher with another tokenizer about its own M tokens, see `cross_tokenizer`."""

    batch: TeacherBatch
    ids: Tensor  # [S], ids of the student for the tokens that both tokenizers have
    teacher_ids: Tensor  # [S], ids of the teacher for the same tokens
    targets: Tensor  # [M], log-probabilities of the targets of the teacher
    states: SelectableLogits | None = None  # whole distributions, if the teacher returns them
    start_probs: Tensor | None = None  # [M], see `cross_tokenizer.start_probability`, given together with `states`


@dataclass(frozen=True)
class HiddenStates:
    """Precomputed input of the head of the teacher at each scored token, from which the head makes a `Dense` signal."""

    hidden: Tensor  # [N, H], in the dtype of the head

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`."""
        return type(self)(self.hidden.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory."""
        return type(self)(self.hidden.pin_memory())


TeacherSignal: TypeAlias = Dense | TopK | Sampled | Chunked


class Teacher(Protocol):
    """Interface of a teacher. Its scores have no gradient.

    Attributes:
        name: Name of one of several teachers, empty for a single teacher.
        description: Description in checkpoints, next to a hash of the weights.
        dense: Whether the teacher returns its whole distribution. A server returns only the top k.
        aligner: Aligner of a teacher with another tokenizer, else None.
        vocabulary: Number of token ids of the teacher. Ids that the student lacks are ignored.
        models: Models in memory. The trainer chooses a layout that also suits them, and checks how they score.
    """

    name: str
    description: str
    dense: bool
    aligner: Aligner | None
    vocabulary: int
    models: Sequence[FrozenModel]

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Return the signal for the scored tokens of a batch. All ranks call it."""
        ...

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> list[TeacherSignal] | None:
        """Return the signals for all batches of a window, or None if that is not faster than one batch at a time."""
        ...

    def join_collective(self, batch: MicroBatch) -> None:
        """Take part in the collective operations of `signal` on a rank without tokens for this teacher.

        It is only called for one of several teachers.
        """
        ...

    def key(self) -> object:
        """Return the cache key of the scores, which differs from that of any other teacher."""
        ...

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer."""
        ...

    def release(self) -> None:
        """Free the device memory until the next use."""
        ...
