"""Layouts of a micro-batch: examples, which are prompts with branches, become rows of tokens.

An example is a prompt with K continuations (DPO: chosen and rejected; SFT: the completion). `collate` lays out B
examples as R rows of L tokens, in one of three layouts that give the same scores:

shared   [p0 .. p(n-2)] [p(n-1) a1 a2 ..] [p(n-1) b1 b2 ..]: the prompt once. A branch begins with its own copy of the
         last prompt token, so that the position that predicts a trained token lies inside its branch
packed   each branch is a document with its own copy of the prompt, all in one row, for FlashAttention
padded   each branch is a row, for architectures that do not support a custom mask

Rows of `shared` hold several examples: one row for attention by segment, otherwise the number of rows with the lowest
cost of padding and attention together. The last token of a branch predicts nothing and is not an input. Positions
restart at 0 in each document and at n-1 in each branch.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..batching.micro_batch import Deferred, MicroBatch
from ..data.loss_groups import groups_of_branches
from ..errors import InputError
from . import attention
from .vision_inputs import VisionInputs

IGNORE = -100
"""Label of a position that predicts nothing."""
ATTENTION_LENGTH = 4096
"""Row length at which attention is assumed to cost as much as all other layers. By FLOPs it is 6 x the hidden size."""
ROW_COUNTS = 32  # approximate number of row counts that are tried


@dataclass(frozen=True)
class Branch:
    """One continuation of a prompt."""

    ids: Sequence[int]  # at least one token
    mask: Sequence[int] | None = None  # 1 for trained tokens; None trains all tokens
    weights: Sequence[float] | None = None  # of the tokens in the loss; None: 1

    @property
    def trained_weights(self) -> Sequence[float]:
        """Weights of the trained tokens."""
        mask = self.mask or [1] * len(self.ids)
        return [weight for weight, is_trained in zip(self.weights or (), mask, strict=True) if is_trained]


def branch_with_reward(ids: Sequence[int]) -> Branch:
    """Return a branch whose last token has the only scored position, at which a reward model reads the score.

    A token is appended, because the last token of a branch is not an input. Its id has no effect.
    """
    return Branch([*ids, 0], [0] * len(ids) + [1])


@dataclass(frozen=True)
class TeacherInput:
    """Input of a teacher that differs from the student's. See `teachers.inputs`."""

    teacher: str = ""  # name of the teacher, if there are several
    prompt: Sequence[int] | None = None  # replaces the prompt of the example
    aligned: Sequence[Any] | None = None  # `data.align.Aligned` of each branch, for a teacher with its own tokenizer


@dataclass(frozen=True)
class Example:
    """A prompt with its branches.

    The prompt has at least one token: a lone BOS, or the first token of the text if there is no other prompt.
    """

    prompt: Sequence[int]
    branches: Sequence[Branch]
    columns: Mapping[str, Any] = field(default_factory=dict)  # further values, such as a label, each a tensor [B]
    images: Sequence[Any] = ()  # in the order of their tokens in prompt and branch
    teacher_input: TeacherInput | None = None  # None if the teacher reads the example itself


class Prompt(list[int]):
    """Token ids of a prompt, with its images."""

    images: Sequence[Any] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Prompt":
        """Return the prompt of a prepared row."""
        prompt = cls(row["prompt_ids"])
        prompt.images = row.get("images") or ()
        return prompt


def teacher_input_of(row: Mapping[str, Any]) -> TeacherInput | None:
    """Return the teacher's input of a prepared row, or None if the row defines none."""
    teacher = row.get("teacher")
    prompt = row.get("teacher_prompt_ids")
    return TeacherInput(teacher or "", prompt or None) if teacher or prompt else None


@dataclass
class Collator:
    """Callable that makes a micro-batch of prepared rows. The trainer owns it, and may change its layout."""

    examples: Callable[[dict[str, Any]], list[Example]]  # examples of a row: one, or several for a packed row
    layout: str  # shared, packed or padded
    row_multiple: int | None = None  # see `collate`
    vision_inputs: VisionInputs | None = None  # for a vision-language model
    batch_class: ClassVar[type[MicroBatch]] = MicroBatch

    def collate(self, examples: Sequence[Example], batch_class: type[MicroBatch]) -> MicroBatch:
        """Call `collate` with the layout of this collator."""
        return collate(
            examples,
            self.layout,
            row_multiple=self.row_multiple,
            vision_inputs=self.vision_inputs,
            batch_class=batch_class,
        )

    def lay_out(self, examples: Sequence[Example]) -> MicroBatch:
        """Lay out examples. Subclasses add fields."""
        return self.collate(examples, self.batch_class)

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Lay out the examples of prepared rows, with scores from before training if the rows have them.

        The field `row` of the batch is the index of each branch's row in this list.
        """
        examples_of_rows = [_with_images(self.examples(row), row.get("images")) for row in rows]
        batch = self.lay_out([example for examples in examples_of_rows for example in examples])

        numbers = [n for n, examples in enumerate(examples_of_rows) for example in examples for _ in example.branches]
        batch = batch.replace(index=torch.tensor([row.get("index", -1) for row in rows]), row=torch.tensor(numbers))
        if "group" in rows[0]:
            counts = [[len(example.branches) for example in examples] for examples in examples_of_rows]
            batch = batch.replace(groups=Deferred(groups_of_branches(counts, [row["group"] for row in rows])))
        if "ref_logps" in rows[0]:
            batch = batch.replace(ref_logps=torch.tensor([row["ref_logps"] for row in rows]))
        return batch


def _with_images(examples: list[Example], images: Sequence[Any] | None) -> list[Example]:
    """Return the examples of a row with its images, which are a list of lists for a packed row."""
    if not images:
        return examples
    images_of_examples = images if isinstance(images[0], list) else [images]
    return [replace(example, images=part) for example, part in zip(examples, images_of_examples, strict=True)]


@dataclass
class Document:
    """One attention document, as parallel arrays over its tokens."""

    ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray  # 0 for tokens that every token of the document may attend to, k >= 1 for branch k
    targets: np.ndarray  # token that a position predicts if it is trained, else IGNORE
    weights: np.ndarray  # number of branches that share the token: `router_weights`, which are 0 on padding
    owners: np.ndarray  # for each scored position, in order, the number of its branch, counted over all examples
    rope: np.ndarray = field(default_factory=partial(np.empty, (0, 3)))  # three positions of each token, for M-RoPE
    images: Sequence[Any] = ()


def collate(
    examples: Sequence[Example],
    layout: str,
    pad_id: int = 1,
    row_multiple: int | None = None,
    vision_inputs: VisionInputs | None = None,
    batch_class: type[MicroBatch] = MicroBatch,
) -> MicroBatch:
    """Lay out B examples as a micro-batch. The examples may differ in their number of branches.

    Branches are numbered over all examples (example * K + branch if all examples have K). The field `row` is the number
    of each branch's example.

    Args:
        examples: Examples, at least one.
        layout: `shared`, `packed` or `padded`.
        pad_id: Id of padding. Any token, except for Gemma 3n, which divides by the norm of embeddings: the embedding of
            its own padding id, 0, is 0.
        row_multiple: Makes the shared and packed layouts one row, whose length is a multiple of this number.
        vision_inputs: Required for examples with images.
        batch_class: Class with a field for each of the examples' columns.

    Raises:
        InputError: If the examples have no token at all.
    """
    # in layouts other than `shared`, each branch is a document with its own copy of the prompt
    single_branch = [replace(example, branches=[branch]) for example in examples for branch in example.branches]
    documents = _documents(examples if layout == "shared" else single_branch, vision_inputs)
    if not any(len(document.ids) for document in documents):
        raise InputError(
            "a micro-batch has no tokens, because no answer has a trained token and no prompt has more than one token. "
            "Remove such rows"
        )

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
    if single_branch[0].branches[0].weights is not None:
        weights = [example.branches[0].trained_weights for example in single_branch]
        batch = batch.replace(target_weights=batch.per_token(weights))
    length = batch.input_ids.shape[1]

    # plain causal attention is enough if each row is a single document without branches
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
            # no position exceeds the row's own, because some models choose their rotary frequencies by the largest one
            position_ids=torch.minimum(batch.position_ids, (lengths - 1).clamp(min=0)[:, None]),
        )

    if vision_inputs is None:
        return batch.replace(rope_positions=None)
    images = [image for row in rows for document in row for image in document.images]
    return vision_inputs.add_to(batch, images)


def _documents(examples: Sequence[Example], vision_inputs: VisionInputs | None = None) -> list[Document]:
    """Return one document per example: its prompt once, then its branches."""
    documents = []
    owner = count()
    for example in examples:
        prompt = np.asarray(example.prompt)
        start = len(example.prompt) - 1
        several = len(example.branches) > 1

        # the last prompt token belongs to the branches, where it predicts the first token of each
        no_owners = np.empty(0, dtype=np.int64)
        no_branch = np.zeros(start, dtype=np.int64)
        untrained = np.full(start, IGNORE)
        shared_by = np.full(start, len(example.branches))
        parts = [Document(prompt[:-1], np.arange(start), no_branch, untrained, shared_by, no_owners)]
        for k, branch in enumerate(example.branches):
            parts.append(_branch_document(prompt[-1:], branch, start, k + 1 if several else 0, next(owner)))

        columns = zip(*(list(vars(part).values())[:6] for part in parts), strict=True)
        joined: Any = map(np.concatenate, columns)
        document = Document(*joined)
        document.rope = np.repeat(document.positions[:, None], 3, axis=1)

        if example.images:
            assert vision_inputs is not None, "images require a vision-language model"
            document.images = example.images
            texts = [[*example.prompt, *branch.ids] for branch in example.branches]
            rope_positions = [vision_inputs.positions(text, example.images) for text in texts]
            offset = 0
            for part, positions in zip(parts, [rope_positions[0], *rope_positions], strict=True):
                document.rope[offset : offset + len(part.ids)] = positions[part.positions]
                offset += len(part.ids)
        documents.append(document)
    return documents


def _branch_document(last_prompt_id: np.ndarray, branch: Branch, start: int, number: int, owner: int) -> Document:
    """Return [last prompt token, branch without its last token] with the branch as targets, up to the last trained one.

    Args:
        last_prompt_id: The last token of the prompt, [1].
        branch: Continuation.
        start: Position of the last prompt token.
        number: Number of the branch within its document.
        owner: Number of the branch within the batch.
    """
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
    """Distribute documents over rows of about equal length, in the number of rows with the lowest cost.

    Fewer rows have less padding. Longer rows have more pairs of tokens in attention.
    """
    lengths = [len(document.ids) for document in documents]
    step = 1 + len(documents) // ROW_COUNTS

    def cost(rows: list[list[int]]) -> float:  # of a forward, in tokens
        row_length = max(sum(lengths[number] for number in row) for row in rows)
        return len(rows) * row_length * (1 + row_length / ATTENTION_LENGTH)

    counts = range(1, len(documents) + 1, step)
    cheapest = min((balance_groups(lengths, [len(documents)] * n) for n in counts), key=cost)
    return [[documents[number] for number in row] for row in cheapest]


def balance_groups(costs: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Distribute items over groups of about the same total cost.

    The algorithm is greedy: the most expensive item first, each into the cheapest group that is not full.

    Args:
        costs: Cost of each item.
        sizes: Largest number of items of each group. All items must fit.

    Returns:
        The indices of the items of each group.
    """
    groups: list[list[int]] = [[] for _ in sizes]
    open_groups = [(0, group) for group, size in enumerate(sizes) if size]  # a heap
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost, group = open_groups[0]
        groups[group].append(item)
        if len(groups[group]) < sizes[group]:
            heapq.heapreplace(open_groups, (cost + costs[item], group))
        else:
            heapq.heappop(open_groups)
    return groups


def _to_tensors(rows: list[list[Document]], pad_id: int, multiple: int) -> dict[str, Tensor]:
    """Return the tensors that all layouts have, for rows whose length is a multiple of `multiple`.

    Positions continue in the padding, but not beyond the largest real position, which may be the model's last.
    """
    row_length = max(sum(len(document.ids) for document in row) for row in rows)
    shape = len(rows), -(-row_length // multiple) * multiple
    fill = {"ids": pad_id, "positions": 0, "targets": IGNORE, "weights": 0, "branch": 0}
    columns = {name: np.full(shape, value, dtype=np.int64) for name, value in fill.items()}
    rope = np.zeros((*shape, 3), dtype=np.int64)
    document_ids = np.full(shape, -1)
    last_position = max((int(document.positions.max(initial=0)) for row in rows for document in row), default=0)

    for r, row in enumerate(rows):
        for name, table in columns.items():
            values = np.concatenate([getattr(document, name) for document in row])
            table[r, : len(values)] = values
        rope[r, : len(values)] = np.concatenate([document.rope for document in row])

        # padding after the row
        end = len(values)
        document_ids[r, :end] = np.repeat(np.arange(len(row)), [len(document.ids) for document in row])
        last = columns["positions"][r, end - 1] if end else -1
        columns["positions"][r, end:] = np.minimum(np.arange(last + 1, last + 1 + shape[1] - end), last_position)

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
