"""What teachers read of a micro-batch.

A teacher may read another prompt (one with the solution, for example), be one of several that share the rows, or have
another tokenizer. It then has its own `TeacherBatch`, laid out together with the student's batch. With the student's
tokenizer the n-th scored token of both batches is the same, so that a tile function for one fits the other. A teacher
on a server has texts instead of rows of tokens.

Legend: N scored tokens of the student, n of them in a teacher's batch, M scored tokens of a teacher with another
tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..batching.micro_batch import Deferred, MicroBatch
from ..data.align import Aligner
from ..scoring.layouts import Branch, Collator, Example, TeacherInput
from .batch import TeacherBatch
from .signal import TeacherSignal, TopK

STUDENT_INPUT = TeacherInput()
"""Of an example that the teacher reads as the student does."""


@dataclass
class DistillationBatch(MicroBatch):
    """A micro-batch with the inputs of teachers, and with what a teacher has said about it before the step."""

    teacher_inputs: dict[str, TeacherBatch] | None = None  # by the name of the teacher; None: it reads this batch
    teacher_signal: TeacherSignal | None = None  # from a cache or a server, before the step

    def per_token(self, values: Sequence[Any]) -> Tensor:
        """Join lists of values, one for the scored tokens of each branch, to values of all scored tokens, [N, ...]."""
        order = torch.unique_consecutive(self.owner).tolist()  # in which the batch has its branches
        return torch.cat([torch.tensor(values[number]) for number in order])


def teacher_batch(batch: MicroBatch, name: str) -> MicroBatch:
    """Return what a teacher reads of a student's batch."""
    inputs = batch.teacher_inputs if isinstance(batch, DistillationBatch) else None
    return batch if inputs is None else inputs[name]


@dataclass(frozen=True)
class TeacherInputs:
    """Lays out what teachers read."""

    aligners: Mapping[str, Aligner]  # of teachers with another tokenizer, by name
    served: Set[str]  # names of teachers on servers

    def __call__(
        self, examples: Sequence[Example], batch: MicroBatch, lay_out: Callable[..., Any]
    ) -> dict[str, TeacherBatch] | None:
        """Return the batch of each teacher by its name; None where the one teacher reads the student's batch.

        lay_out: `layouts.collate` in the student's layout.
        """
        readings = [self._aligned(example) for example in examples]
        of_teacher: dict[str, list[int]] = {}
        for number, reading in enumerate(readings):
            of_teacher.setdefault(reading.teacher, []).append(number)
        same = all(reading.prompt is None and reading.aligned is None for reading in readings)
        if same and not self.served and of_teacher.keys() == {""}:
            return None

        first_branch = [0, *accumulate(len(example.branches) for example in examples)]
        batches = {}
        for name, numbers in of_teacher.items():
            theirs = [_teacher_example(examples[n], readings[n]) for n in numbers]
            if name in self.served:
                texts = [(one.prompt, branch.ids, branch.mask) for one in theirs for branch in one.branches]
                read = TeacherBatch(texts=Deferred(texts))
            else:
                read = lay_out(theirs, batch_class=TeacherBatch)
            if readings[numbers[0]].aligned is not None:
                aligned = [one for n in numbers for one in readings[n].aligned or ()]
                batches[name] = _connect_chunks(batch, read, aligned)
            else:
                branches = torch.cat([torch.arange(first_branch[n], first_branch[n + 1]) for n in numbers])
                batches[name] = _in_order(batch, read, branches)
        return batches

    def _aligned(self, example: Example) -> TeacherInput:
        """Return what the teacher reads of an example, with the answers in the tokens of its own tokenizer."""
        reading = example.teacher_input or STUDENT_INPUT
        aligner = self.aligners.get(reading.teacher)
        if aligner is None:
            return reading
        return replace(reading, aligned=[aligner(branch.ids) for branch in example.branches])


@dataclass
class DistillationCollator(Collator):
    """Lays out rows for student and teacher, with the teacher's top k where the rows have it."""

    teacher_inputs: TeacherInputs | None = None
    batch_class = DistillationBatch

    def lay_out(self, examples: Sequence[Example]) -> MicroBatch:
        """Lay out examples with the inputs of teachers."""
        batch = super().lay_out(examples)
        if self.teacher_inputs is None:
            return batch
        return batch.replace(teacher_inputs=self.teacher_inputs(examples, batch, self.collate))

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Lay out prepared rows."""
        batch = super().__call__(rows)
        if "teacher_ids" not in rows[0]:
            return batch
        assert isinstance(batch, DistillationBatch)
        ids, logps = (batch.per_token([row[name] for row in rows]) for name in ("teacher_ids", "teacher_logps"))
        return batch.replace(teacher_signal=TopK(ids, logps))


def _teacher_example(example: Example, reading: TeacherInput) -> Example:
    """The example as the teacher has it."""
    prompt = example.prompt if reading.prompt is None else reading.prompt
    if reading.aligned is None:
        return replace(example, prompt=prompt, columns={})
    return Example(prompt, [Branch(one.ids) for one in reading.aligned])


def _in_order(batch: MicroBatch, read: TeacherBatch, branches: Tensor) -> TeacherBatch:
    """Return the batch with `places`, and its scored tokens in the student's order.

    branches: the student's number of each branch of the read.
    """
    # the tokens of a branch stand in order in both: sorted by branch both have the same tokens at the same places
    sorted_tokens = torch.argsort(batch.owner, stable=True)
    sorted_tokens = sorted_tokens[torch.isin(batch.owner[sorted_tokens], branches)]
    places, rank = sorted_tokens.sort()
    if read.texts is not None:
        return read.replace(places=places, order=rank)
    theirs = torch.argsort(branches[read.owner], stable=True)[rank]
    return read.replace(places=places, scored=read.scored[theirs], owner=read.owner[theirs])


def _connect_chunks(batch: MicroBatch, read: TeacherBatch, aligned: Sequence[Any]) -> TeacherBatch:
    """Return the batch of a teacher with its own tokenizer, with the chunks that connect both models' tokens."""
    base = 0
    tokens = 0
    mine = []
    before = []
    behind = []
    theirs = []
    match = []
    for one in aligned:
        mine.append(_offset_indices(one.chunks, base))
        before.append(_offset_indices([max(n - 1, -1) for n in one.chunks], base))
        behind.append(_offset_indices([n + 1 if 0 <= n < one.count - 1 else -1 for n in one.chunks], base))
        theirs.append(_offset_indices(one.teacher_chunks, base))
        match.append(_offset_indices(one.match, tokens))
        base = base + one.count
        tokens = tokens + len(one.ids)
    order = torch.argsort(batch.owner, stable=True)
    back = torch.argsort(order)
    of_mine = {"chunk": mine, "before": before, "behind": behind, "match": match}
    read = read.replace(
        their_chunk=torch.cat(theirs), **{name: torch.cat(parts)[back] for name, parts in of_mine.items()}
    )
    if read.texts is not None:
        return read
    by_branch = torch.argsort(read.owner, stable=True)
    longer = _pad_ranges([ranges for one in aligned for ranges in one.longer])
    return read.replace(scored=read.scored[by_branch], owner=read.owner[by_branch], longer=longer)


def _pad_ranges(rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return rows of ranges as one tensor [rows, most, 2], filled up with empty ranges."""
    most = max(map(len, rows), default=0)
    filled = [[*ranges, *[(0, 0)] * (most - len(ranges))] for ranges in rows]
    return torch.tensor(filled, dtype=torch.long).view(len(rows), most, 2)


def _offset_indices(numbers: Sequence[int], by: int) -> Tensor:
    """The numbers raised by `by`, but for -1."""
    given = torch.tensor(numbers, dtype=torch.long)
    return given.where(given < 0, given + by)
