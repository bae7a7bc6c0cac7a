"""Examples -> one micro-batch of tensors: a batch is prompts with branches.

An example is a prompt and K continuations of it (DPO: chosen and rejected; SFT: the completion). `collate` lays B of
them out as rows of R x L tokens, in one of three layouts that give the same scores:

shared   [p0 .. p(n-2)] [p(n-1) a1 a2 ..] [p(n-1) b1 b2 ..]: the prompt once; a branch begins with its own copy of the
         last prompt token, so the position that predicts a trained token lies inside its branch
packed   every branch a document with its own copy of the prompt, all in one row, for FlashAttention
padded   every branch a row, for architectures that take no custom mask

Rows of `shared` hold several examples: one row for attention that takes it in pieces, otherwise as many rows as cost
least, padding and attention together. A branch's last token predicts nothing and is not an input. Positions restart at
0 in each document and at n-1 in each branch.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..batching.micro_batch import MicroBatch
from ..errors import InputError
from . import attention
from .vision_inputs import VisionInputs

IGNORE = -100
"""The label of a position that predicts nothing."""
ATTENTION_LENGTH = 4096
"""The row length at which attention is taken to cost as much as the rest; by FLOPs that is at 6 x the hidden size."""
ROW_COUNTS = 32  # about how many numbers of rows are tried


@dataclass(frozen=True)
class Branch:
    """One continuation of a prompt."""

    ids: Sequence[int]  # its tokens, at least one
    mask: Sequence[int] | None = None  # 1 where a token is trained; None trains all


@dataclass(frozen=True)
class TeacherInput:
    """What a teacher reads of an example: see `teacher_view`."""

    teacher: str = ""  # which of several
    prompt: Sequence[int] | None = None  # in place of the example's own
    aligned: Sequence[Any] | None = None  # of each branch `data.align.Aligned`, for a teacher with its own tokenizer


@dataclass(frozen=True)
class Example:
    """A prompt of at least one token (a lone BOS, or the first token, where there is no other) and its branches."""

    prompt: Sequence[int]
    branches: Sequence[Branch]
    columns: Mapping[str, Any] = field(default_factory=dict)  # more values, such as a label; each name a tensor [B]
    pictures: Sequence[Any] = ()  # in the order in which the tokens of their features stand in prompt and branch
    reading: TeacherInput | None = None  # what a teacher reads in its place, where that is something else


class Prompt(list[int]):
    """Ids of a prompt, with its pictures."""

    pictures: Sequence[Any] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Prompt":
        """That of a prepared row."""
        prompt = cls(row["prompt_ids"])
        prompt.pictures = row.get("images") or ()
        return prompt


def reading_of(row: dict[str, Any]) -> TeacherInput | None:
    """What a prepared row says of its teacher, if anything."""
    teacher = row.get("teacher")
    prompt = row.get("teacher_prompt_ids")
    return TeacherInput(teacher or "", prompt or None) if teacher or prompt else None


@dataclass
class Collator:
    """Prepared rows -> a micro-batch. The trainer owns it, and may change its layout."""

    examples: Callable[[dict[str, Any]], list[Example]]  # the examples of a row: one, or those of a packed row
    layout: str  # shared, packed or padded
    row_multiple: int | None = None  # see `collate`
    pictures: Any = None  # `vision_inputs.VisionInputs` of a vision-language model
    batch_class: ClassVar[type[MicroBatch]] = MicroBatch

    def collate(self, examples: Sequence[Example], batch_class: type[MicroBatch]) -> MicroBatch:
        """`collate` in this layout."""
        return collate(
            examples, self.layout, row_multiple=self.row_multiple, pictures=self.pictures, batch_class=batch_class
        )

    def lay_out(self, examples: Sequence[Example]) -> MicroBatch:
        """Lay out examples; a subclass adds fields."""
        return self.collate(examples, self.batch_class)

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Lay out the examples of prepared rows, with the scores that the rows have from before training.

        `row` is the place of each branch's row in this list.
        """
        examples_of_rows = [_with_pictures(self.examples(row), row.get("images")) for row in rows]
        batch = self.lay_out([example for examples in examples_of_rows for example in examples])
        numbers = [n for n, examples in enumerate(examples_of_rows) for one in examples for _ in one.branches]
        batch = batch.replace(index=torch.tensor([row.get("index", -1) for row in rows]), row=torch.tensor(numbers))
        if "ref_logps" in rows[0]:
            batch = batch.replace(ref_logps=torch.tensor([row["ref_logps"] for row in rows]))
        return batch


def _with_pictures(examples: list[Example], pictures: Any) -> list[Example]:
    """The examples of a row with its pictures, which are a list of lists where several are packed."""
    if not pictures:
        return examples
    each = pictures if isinstance(pictures[0], list) else [pictures]
    return [replace(example, pictures=own) for example, own in zip(examples, each, strict=True)]


@dataclass
class Document:
    """One attention document: parallel arrays over its tokens."""

    ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray  # 0 for what every token of the document may see, k >= 1 for branch k
    targets: np.ndarray  # the token that a position predicts where that is trained, else IGNORE
    weights: np.ndarray  # how many branches share the token: `router_weights`, which are 0 on padding
    owners: np.ndarray  # for each scored position, in order: the number of its branch, counted over all examples
    rope: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))  # three positions of each token, for M-RoPE
    pictures: Sequence[Any] = ()


def collate(
    examples: Sequence[Example],
    layout: str,
    pad_id: int = 1,
    row_multiple: int | None = None,
    pictures: Any = None,
    batch_class: type[MicroBatch] = MicroBatch,
) -> MicroBatch:
    """Lay out B examples as a micro-batch. The examples may differ in their number of branches.

    pad_id: any token, but for Gemma 3n, which divides by the norm of embeddings: that of its own padding, 0, is 0.
    row_multiple: where the shared and packed layouts are to be one row, what its length is made a multiple of.
    pictures: `vision_inputs.VisionInputs`, for examples that have some.
    batch_class: has a field for each of the examples' columns.
    The number of a branch is counted over all examples (example * K + branch where all have K); `row` is the number of
    its example. Raises InputError where there is no token at all.
    """
    # in the other layouts each branch is a document with its own copy of the prompt
    alone = [replace(example, branches=[branch]) for example in examples for branch in example.branches]
    documents = _documents(examples if layout == "shared" else alone, pictures)
    if not any(len(document.ids) for document in documents):
        raise InputError("a micro-batch has no token: no answer has one to train on, no prompt more than one")
    if layout == "padded":
        rows = [[document] for document in documents]
    elif layout == "packed" or row_multiple:
        rows = [documents]
    else:
        rows = _cheapest_rows(documents)
    tensors: dict[str, Any] = _to_tensors(rows, pad_id, 1 if layout == "padded" else row_multiple or 1)
    tensors["row"] = torch.tensor([number for number, example in enumerate(examples) for _ in example.branches])
    for name in examples[0].columns:
        tensors[name] = torch.tensor([example.columns[name] for example in examples])
    batch = batch_class(**tensors)
    length = batch.input_ids.shape[1]

    # plain causal attention is enough where each row is a single document without branches
    plain = not any(len(row) > 1 or row[0].branch.any() for row in rows)
    if layout == "padded" or (plain and not row_multiple):
        batch = batch.replace(document=None, branch=None)
    elif layout == "packed" or row_multiple:
        segments = attention.find_segments([document.branch for document in documents], length)
        batch = batch.replace(segments=segments)
    if layout == "padded":
        lengths = torch.tensor([len(row[0].ids) for row in rows])
        batch = batch.replace(
            attention_mask=(torch.arange(length) < lengths[:, None]).long(),
            # no position beyond the row's own: some models choose their rotary frequencies by the largest
            position_ids=torch.minimum(batch.position_ids, (lengths - 1).clamp(min=0)[:, None]),
        )

    if pictures is None:
        return batch.replace(rope_positions=None)
    shown = [picture for row in rows for document in row for picture in document.pictures]
    return pictures.add_to(batch, shown)


def _documents(examples: Sequence[Example], pictures: VisionInputs | None = None) -> list[Document]:
    """One document an example: its prompt once, then its branches."""
    documents = []
    owner = count()
    for example in examples:
        prompt = np.asarray(example.prompt)
        start = len(example.prompt) - 1
        several = len(example.branches) > 1
        none = np.empty(0, dtype=np.int64)
        # the prompt's last token is left to the branches: there it predicts the first token of each
        seen_by_all = np.zeros(start, dtype=np.int64)
        untrained = np.full(start, IGNORE)
        shared_by = np.full(start, len(example.branches))
        parts = [Document(prompt[:-1], np.arange(start), seen_by_all, untrained, shared_by, none)]
        for k, branch in enumerate(example.branches):
            parts.append(_continued(prompt[-1:], branch, start, k + 1 if several else 0, next(owner)))
        columns = zip(*(list(vars(part).values())[:6] for part in parts), strict=True)
        joined: Any = map(np.concatenate, columns)
        document = Document(*joined)
        document.rope = np.repeat(document.positions[:, None], 3, axis=1)
        if example.pictures:
            assert pictures is not None, "a picture needs a model that sees"
            document.pictures = example.pictures
            wholes = [pictures.positions([*example.prompt, *each.ids], example.pictures) for each in example.branches]
            place = 0
            for part, whole in zip(parts, [wholes[0], *wholes], strict=True):
                document.rope[place : place + len(part.ids)] = whole[part.positions]
                place += len(part.ids)
        documents.append(document)
    return documents


def _continued(last_prompt_id: np.ndarray, branch: Branch, start: int, number: int, owner: int) -> Document:
    """[last prompt token, branch without its last token] with the branch as targets, up to the last trained one."""
    # inputs and targets are shifted by one here: position i reads token i - 1 of the branch and predicts token i
    ids = targets = np.asarray(branch.ids)
    if branch.mask is not None:
        targets = np.where(np.asarray(branch.mask, dtype=bool), ids, IGNORE)
    trained = np.flatnonzero(targets != IGNORE)
    size = int(trained[-1]) + 1 if len(trained) else 0
    inputs = np.concatenate([last_prompt_id, ids[: max(size - 1, 0)]])[:size]
    ones = np.ones(size, dtype=np.int64)
    owners = np.full(len(trained), owner)
    return Document(inputs, np.arange(start, start + size), number * ones, targets[:size], ones, owners)


def _cheapest_rows(documents: list[Document]) -> list[list[Document]]:
    """The documents in rows of about equal length, in the number of rows that costs least.

    Fewer rows have less padding; longer ones have more pairs of tokens in attention.
    """
    lengths = [len(document.ids) for document in documents]
    step = 1 + len(documents) // ROW_COUNTS

    def cost(rows: list[list[int]]) -> float:  # of a pass, in tokens through the layers
        longest = max(sum(lengths[number] for number in row) for row in rows)
        return len(rows) * longest * (1 + longest / ATTENTION_LENGTH)

    counts = range(1, len(documents) + 1, step)
    cheapest = min((share_out(lengths, [len(documents)] * n) for n in counts), key=cost)
    return [[documents[number] for number in row] for row in cheapest]


def share_out(costs: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Numbers of the items in each group: group g has at most sizes[g] of them, all groups cost about the same.

    Greedy: the most expensive item first, each into the cheapest group that is not full. All items must fit.
    """
    groups: list[list[int]] = [[] for _ in sizes]
    open_groups = [(0, group) for group, size in enumerate(sizes) if size]  # a heap
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, group = open_groups[0]
        groups[group].append(item)
        if len(groups[group]) < sizes[group]:
            heapq.heapreplace(open_groups, (cost + costs[item], group))
        else:
            heapq.heappop(open_groups)
    return groups


def _to_tensors(rows: list[list[Document]], pad_id: int, multiple: int) -> dict[str, Tensor]:
    """The tensors that all layouts have, of rows whose length is a multiple of `multiple`. Positions of padding go on
    counting, but not beyond the largest real one, which may be the model's last.
    """
    longest = max(sum(len(d.ids) for d in row) for row in rows)
    shape = len(rows), -(-longest // multiple) * multiple
    fill = {"ids": pad_id, "positions": 0, "targets": IGNORE, "weights": 0, "branch": 0}
    columns = {name: np.full(shape, value, dtype=np.int64) for name, value in fill.items()}
    rope = np.zeros((*shape, 3), dtype=np.int64)
    document_ids = np.full(shape, -1)
    top = max((int(document.positions.max(initial=0)) for row in rows for document in row), default=0)
    for r, row in enumerate(rows):
        for name, table in columns.items():
            values = np.concatenate([getattr(document, name) for document in row])
            table[r, : len(values)] = values
        rope[r, : len(values)] = np.concatenate([document.rope for document in row])
        # padding behind the row
        end = len(values)
        document_ids[r, :end] = np.repeat(np.arange(len(row)), [len(document.ids) for document in row])
        last = columns["positions"][r, end - 1] if end else -1
        columns["positions"][r, end:] = np.minimum(np.arange(last + 1, last + 1 + shape[1] - end), top)
    shift_labels = torch.from_numpy(columns["targets"])
    return {
        "input_ids": torch.from_numpy(columns["ids"]),
        "position_ids": torch.from_numpy(columns["positions"]),
        "shift_labels": shift_labels,
        "rope_positions": torch.from_numpy(rope).permute(2, 0, 1),
        "router_weights": torch.from_numpy(columns["weights"]),
        "document": torch.from_numpy(document_ids),
        "branch": torch.from_numpy(columns["branch"]),
        "scored": (shift_labels.flatten() != IGNORE).nonzero().squeeze(-1),
        "owner": torch.from_numpy(np.concatenate([document.owners for row in rows for document in row])),
    }
