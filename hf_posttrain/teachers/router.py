"""Several teachers as one: each row of data names the teacher that scores it."""

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
    """Logits of several teachers: each has the tokens at its `places`, in order. See `teacher_tiles.TeacherLogits`."""

    parts: Sequence[tuple[Tensor, TeacherLogits]]
    vocabulary: int  # number of ids that all of them have

    def logits(self, rows: slice) -> Tensor:
        """Return logits [n, V]. The caller may overwrite them."""
        out: Tensor | None = None
        for places, source in self.parts:
            bounds = torch.tensor([rows.start, rows.stop], device=places.device)
            low, high = torch.searchsorted(places, bounds).tolist()
            if low == high and out is not None:
                continue
            logits = source.logits(slice(low, high))[:, : self.vocabulary]
            if out is None:
                out = logits.new_zeros(rows.stop - rows.start, self.vocabulary)
            out[places[low:high] - rows.start] = logits
        assert out is not None
        return out


class TeacherRouter(TrainerCallback):
    """Several teachers by name. As a callback it frees their memory after training."""

    name = ""
    aligner = None

    def __init__(self, teachers: Mapping[str, LocalTeacher | ServedTeacher], vocabulary: int):
        self.teachers = dict(teachers)
        self.vocabulary = vocabulary
        for name, teacher in self.teachers.items():
            teacher.name = name

    @property
    def models(self) -> list[FrozenModel]:
        """Those of all teachers."""
        return [model for teacher in self.teachers.values() for model in teacher.models]

    @property
    def description(self) -> str:
        """What a checkpoint stores about all of them."""
        return " ".join(filter(None, (teacher.description for teacher in self.teachers.values())))

    @property
    def dense(self) -> bool:
        """Whether all of them give their whole distribution."""
        return all(teacher.dense for teacher in self.teachers.values())

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Score each token with the teacher of its row, see `signal.Teacher`."""
        found = [(places, teacher.signal(batch, request)) for teacher, places in self._scoring(batch, request)]
        if request.kind == "dense":
            sources = [(places, signal.logits) for places, signal in found if isinstance(signal, Dense)]
            return Dense(LogitsByRow(sources, self.vocabulary))

        def joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
            """Values of each teacher's tokens -> values of all tokens."""
            whole = parts[0][1].new_zeros(len(batch.scored), *parts[0][1].shape[1:])
            for places, values in parts:
                whole[places] = values
            return whole

        if request.kind == "sampled":
            return Sampled(joined([(places, signal.targets) for places, signal in found]))
        return TopK(
            ids=joined([(places, signal.ids) for places, signal in found]),
            logps=joined([(places, signal.logps) for places, signal in found]),
            targets=joined([(places, signal.targets) for places, signal in found]),
        )

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> None:
        """Return None: each batch is scored by itself."""

    def _scoring(self, batch: MicroBatch, request: Request) -> Iterator[tuple[Any, Tensor]]:
        """Yield each teacher that has tokens of the batch, and their places.

        A teacher that is sharded, or on a server, needs a call on every rank in the same order: where it has no token
        it scores something that is thrown away.
        """
        assert isinstance(batch, DistillationBatch)
        inputs = batch.teacher_inputs or {}
        for name, teacher in self.teachers.items():
            if name in inputs:
                yield teacher, inputs[name].places
            else:
                teacher.join_collective(batch)

    def key(self) -> Any:
        """Return the keys of all teachers."""
        return {name: teacher.key() for name, teacher in self.teachers.items()}

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer for any teacher."""
        ends = [end for teacher in self.teachers.values() for end in teacher.ends(tokenizer, template_kwargs)]
        return list(dict.fromkeys(ends))

    def release(self) -> None:
        """Free the memory of all teachers."""
        for teacher in self.teachers.values():
            teacher.release()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Free the memory of the device; a later evaluation brings the teachers back."""
        self.release()

    def metrics(
        self, batch: DistillationBatch, name: str, values: Tensor, weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return a metric of tokens [N] for each teacher, under `name` and the name of the teacher."""
        metrics = {}
        for teacher in self.teachers:
            scored = torch.zeros_like(weights)
            if batch.teacher_inputs and teacher in batch.teacher_inputs:
                scored[batch.teacher_inputs[teacher].places] = 1
            metrics[f"{name}_{teacher}"] = values, weights * scored
        return metrics
