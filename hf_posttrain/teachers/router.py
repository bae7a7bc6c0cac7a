"""Routing of rows to several teachers. Each row names the teacher that scores it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..models.frozen import FrozenModel
from ..scoring.teacher_tiles import TeacherLogits
from .inputs import DistillationBatch
from .local import LocalTeacher
from .served import ServedTeacher
from .signal import Dense, Request, Sampled, TeacherSignal, TopK


@dataclass(frozen=True)
class LogitsByRow:
    """Logits of several teachers, see `teacher_tiles.TeacherLogits`. Each has the tokens at its positions, in order."""

    parts: Sequence[tuple[Tensor, TeacherLogits]]
    vocabulary: int  # number of token ids that all teachers have

    def logits(self, rows: slice) -> Tensor:
        """Return logits [n, V]. The caller may overwrite them."""
        out: Tensor | None = None
        for positions, source in self.parts:
            bounds = torch.tensor([rows.start, rows.stop], device=positions.device)
            low, high = torch.searchsorted(positions, bounds).tolist()
            if low == high and out is not None:
                continue
            logits = source.logits(slice(low, high))[:, : self.vocabulary]
            if out is None:
                out = logits.new_zeros(rows.stop - rows.start, self.vocabulary)
            out[positions[low:high] - rows.start] = logits
        assert out is not None
        return out


class TeacherRouter(TrainerCallback):
    """Several teachers by name, of which each scores the rows that name it.

    As a callback it frees the memory of the teachers after training.

    Args:
        teachers: The teachers by name.
        vocabulary: Number of token ids that all models have.
    """

    name = ""
    aligner = None

    def __init__(self, teachers: Mapping[str, LocalTeacher | ServedTeacher], vocabulary: int) -> None:
        self.teachers = dict(teachers)
        self.vocabulary = vocabulary
        for name, teacher in self.teachers.items():
            teacher.name = name

    @property
    def models(self) -> list[FrozenModel]:
        """Models in memory of all teachers."""
        return [model for teacher in self.teachers.values() for model in teacher.models]

    @property
    def description(self) -> str:
        """Description of all teachers in checkpoints."""
        return " ".join(filter(None, (teacher.description for teacher in self.teachers.values())))

    @property
    def dense(self) -> bool:
        """Whether all teachers return their whole distribution."""
        return all(teacher.dense for teacher in self.teachers.values())

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Score each token with the teacher of its row, see `signal.Teacher`."""
        signals = [(positions, teacher.signal(batch, request)) for teacher, positions in self._scorers(batch)]
        if request.kind == "dense":
            sources = [(positions, signal.logits) for positions, signal in signals if isinstance(signal, Dense)]
            return Dense(LogitsByRow(sources, self.vocabulary))

        def combine(name: str) -> Tensor:
            """Return the values of all tokens, given an attribute of the signals of single teachers."""
            parts = [(positions, getattr(signal, name)) for positions, signal in signals]
            combined: Tensor = parts[0][1].new_zeros(len(batch.scored), *parts[0][1].shape[1:])
            for positions, values in parts:
                combined[positions] = values
            return combined

        if request.kind == "sampled":
            return Sampled(combine("targets"))
        return TopK(combine("ids"), combine("logps"), combine("targets"))

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> None:
        """Return None, because batches are scored one at a time."""

    def _scorers(self, batch: MicroBatch) -> Iterator[tuple[LocalTeacher | ServedTeacher, Tensor]]:
        """Yield each teacher that has tokens of the batch, and their positions.

        A sharded teacher, or one on a server, must be called on all ranks in the same order. On a rank without tokens
        for it, `join_collective` is called instead.
        """
        assert isinstance(batch, DistillationBatch)
        inputs = batch.teacher_inputs or {}
        for name, teacher in self.teachers.items():
            if name in inputs:
                yield teacher, inputs[name].positions
            else:
                teacher.join_collective(batch)

    def key(self) -> object:
        """Return the cache keys of all teachers by name."""
        return {name: teacher.key() for name, teacher in self.teachers.items()}

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer of any teacher."""
        ends = [end for teacher in self.teachers.values() for end in teacher.ends(tokenizer, template_kwargs)]
        return list(dict.fromkeys(ends))

    def release(self) -> None:
        """Free the device memory of all teachers."""
        for teacher in self.teachers.values():
            teacher.release()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Free the device memory. A later evaluation loads the teachers again."""
        self.release()

    def metrics(
        self, batch: DistillationBatch, name: str, values: Tensor, weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return a metric of tokens for each teacher.

        Args:
            batch: The micro-batch.
            name: Name of the metric, to which that of the teacher is appended.
            values: Values of the tokens, [N].
            weights: Weights of the tokens, [N].
        """
        metrics = {}
        for teacher in self.teachers:
            scored = torch.zeros_like(weights)
            if batch.teacher_inputs and teacher in batch.teacher_inputs:
                scored[batch.teacher_inputs[teacher].positions] = 1
            metrics[f"{name}_{teacher}"] = values, weights * scored
        return metrics
