"""Inputs of teachers for a micro-batch.

A teacher may read another prompt (for example one with the solution), be one of several that share the rows, or have
another tokenizer. It then has a separate `TeacherBatch`, which is laid out together with the batch of the student. With
the tokenizer of the student the n-th scored token of both batches is the same, so that both can use the same tile
function. The batch of a teacher on a server has texts instead of rows of tokens.

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
from ..data.align import Aligner, Alignment
from ..scoring.layouts import Branch, Collator, Example, TeacherInput
from .batch import TeacherBatch
from .columns import from_columns
from .signal import HiddenStates, TeacherSignal

STUDENT_INPUT = TeacherInput()
"""Input of a teacher that reads the example of the student."""


@dataclass
class DistillationBatch(MicroBatch):
    """Micro-batch with the inputs of teachers, and with the signal of a teacher that was computed before the step."""

    teacher_inputs: dict[str, TeacherBatch] | None = None  # by teacher; None if it reads this batch
    teacher_signal: TeacherSignal | HiddenStates | None = None  # from a cache or a server


def teacher_batch(batch: MicroBatch, name: str) -> MicroBatch:
    """Return the input of a teacher for a batch of the student."""
    inputs = batch.teacher_inputs if isinstance(batch, DistillationBatch) else None
    return batch if inputs is None else inputs[name]


@dataclass(frozen=True)
class TeacherInputs:
    """Builds the inputs of teachers for the examples of a batch.

    Attributes:
        aligners: Aligners of the teachers with another tokenizer, by name.
        served: Names of the teachers on servers.
    """

    aligners: Mapping[str, Aligner]
    served: Set[str]

    def __call__(
        self, examples: Sequence[Example], batch: MicroBatch, lay_out: Callable[..., Any]
    ) -> dict[str, TeacherBatch] | None:
        """Return the batch of each teacher by name, or None if the only teacher reads the batch of the student.

        Args:
            examples: The examples of the batch.
            batch: The batch of the student.
            lay_out: `layouts.collate` with the layout of the student.
        """
        inputs = [self._teacher_input(example) for example in examples]
        numbers_by_teacher: dict[str, list[int]] = {}
        for number, teacher_input in enumerate(inputs):
            numbers_by_teacher.setdefault(teacher_input.teacher, []).append(number)
        is_same = all(teacher_input.prompt is None and teacher_input.aligned is None for teacher_input in inputs)
        if is_same and not self.served and numbers_by_teacher.keys() == {""}:
            return None

        first_branch = [0, *accumulate(len(example.branches) for example in examples)]
        batches = {}
        for name, numbers in numbers_by_teacher.items():
            teacher_examples = [_teacher_example(examples[n], inputs[n]) for n in numbers]
            if name in self.served:
                texts = [
                    (example.prompt, branch.ids, branch.mask)
                    for example in teacher_examples
                    for branch in example.branches
                ]
                input_batch = TeacherBatch(texts=Deferred(texts))
            else:
                input_batch = lay_out(teacher_examples, batch_class=TeacherBatch)
            if inputs[numbers[0]].aligned is not None:
                alignments = [alignment for n in numbers for alignment in inputs[n].aligned or ()]
                batches[name] = _connect_chunks(batch, input_batch, alignments)
            else:
                branches = torch.cat([torch.arange(first_branch[n], first_branch[n + 1]) for n in numbers])
                batches[name] = _match_order(batch, input_batch, branches)
        return batches

    def _teacher_input(self, example: Example) -> TeacherInput:
        """Return the input of the teacher for an example, with the answers in the tokens of its tokenizer."""
        teacher_input = example.teacher_input or STUDENT_INPUT
        aligner = self.aligners.get(teacher_input.teacher)
        if aligner is None:
            return teacher_input
        return replace(teacher_input, aligned=[aligner(branch.ids) for branch in example.branches])


@dataclass
class DistillationCollator(Collator):
    """Lays out rows for student and teacher, with the scores of the teacher if the rows have them."""

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
        assert isinstance(batch, DistillationBatch)
        return batch.replace(teacher_signal=from_columns(rows, batch.per_token))


def _teacher_example(example: Example, teacher_input: TeacherInput) -> Example:
    """Return the example that the teacher reads."""
    prompt = example.prompt if teacher_input.prompt is None else teacher_input.prompt
    if teacher_input.aligned is None:
        return replace(example, prompt=prompt, columns={})
    return Example(prompt, [Branch(alignment.ids) for alignment in teacher_input.aligned])


def _match_order(batch: MicroBatch, teacher_batch: TeacherBatch, branches: Tensor) -> TeacherBatch:
    """Return the batch of a teacher with `positions`, and with its scored tokens in the order of the student.

    Args:
        batch: The batch of the student.
        teacher_batch: The batch of the teacher.
        branches: Number in the batch of the student of each branch of the teacher.
    """
    # The tokens of a branch are in order in both batches. Sorted by branch, both therefore have the same tokens.
    sorted_tokens = torch.argsort(batch.owner, stable=True)
    sorted_tokens = sorted_tokens[torch.isin(batch.owner[sorted_tokens], branches)]
    positions, rank = sorted_tokens.sort()
    if teacher_batch.texts is not None:
        return teacher_batch.replace(positions=positions, order=rank)
    order = torch.argsort(branches[teacher_batch.owner], stable=True)[rank]
    return teacher_batch.replace(
        positions=positions, scored=teacher_batch.scored[order], owner=teacher_batch.owner[order]
    )


def _connect_chunks(batch: MicroBatch, teacher_batch: TeacherBatch, alignments: Sequence[Alignment]) -> TeacherBatch:
    """Return the batch of a teacher with another tokenizer, with the chunks that connect the tokens of both models."""
    num_chunks = 0
    num_tokens = 0
    parts: dict[str, list[Tensor]] = {"chunk": [], "before": [], "after": [], "match": []}
    teacher_chunks = []
    for alignment in alignments:
        chunks = alignment.chunks
        before = [max(n - 1, -1) for n in chunks]
        after = [n + 1 if 0 <= n < alignment.count - 1 else -1 for n in chunks]
        parts["chunk"].append(_offset_indices(chunks, num_chunks))
        parts["before"].append(_offset_indices(before, num_chunks))
        parts["after"].append(_offset_indices(after, num_chunks))
        parts["match"].append(_offset_indices(alignment.match, num_tokens))
        teacher_chunks.append(_offset_indices(alignment.teacher_chunks, num_chunks))
        num_chunks = num_chunks + alignment.count
        num_tokens = num_tokens + len(alignment.ids)

    order = torch.argsort(batch.owner, stable=True)
    inverse_order = torch.argsort(order)
    columns = {name: torch.cat(tensors)[inverse_order] for name, tensors in parts.items()}
    teacher_batch = teacher_batch.replace(teacher_chunk=torch.cat(teacher_chunks), **columns)
    if teacher_batch.texts is not None:
        return teacher_batch
    by_branch = torch.argsort(teacher_batch.owner, stable=True)
    longer = _pad_ranges([ranges for alignment in alignments for ranges in alignment.longer])
    return teacher_batch.replace(
        scored=teacher_batch.scored[by_branch], owner=teacher_batch.owner[by_branch], longer=longer
    )


def _pad_ranges(rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return rows of ranges as one tensor [rows, D, 2], padded with empty ranges."""
    depth = max(map(len, rows), default=0)
    padded = [[*ranges, *[(0, 0)] * (depth - len(ranges))] for ranges in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), depth, 2)


def _offset_indices(indices: Sequence[int], offset: int) -> Tensor:
    """Return the indices plus an offset, except for negative indices, which mean none."""
    tensor = torch.tensor(indices, dtype=torch.long)
    return tensor.where(tensor < 0, tensor + offset)
