"""Examples -> one micro-batch of tensors: a batch is prompts with branches.

An example is a prompt and K continuations of it (DPO: chosen and rejected; SFT: the completion). `collate` lays B of
them out as rows of R x L tokens, in one of three layouts that give the same scores:

shared   [p0 .. p(n-2)] [p(n-1) a1 a2 ..] [p(n-1) b1 b2 ..]: the prompt once; a branch begins with its own copy of the
         last prompt token, so the position that predicts a trained token lies inside its branch
packed   every branch a document with its own copy of the prompt, all in one row, for FlashAttention
padded   every branch a row, for architectures that take no custom mask

Rows of `shared` hold several examples: as many rows as cost least, padding and attention together. A branch's last
token predicts nothing and is not an input. Positions restart at 0 in each document and at n-1 in each branch.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
ATTENTION_LENGTH = 4096
"""So long a row costs attention as much as the layers: about 6 x hidden size by count, for small models less."""
ROW_COUNTS = 32
"""How many numbers of rows are compared."""


@dataclass(frozen=True)
class Branch:
    """One continuation of a prompt."""

    ids: Sequence[int]
    """Its tokens, at least one."""
    mask: Sequence[int] | None = None
    """1 where a token is trained; None trains all."""


@dataclass(frozen=True)
class Example:
    """A prompt of at least one token (a lone BOS, or the first token, where there is no other) and its branches."""

    prompt: Sequence[int]
    branches: Sequence[Branch]


@dataclass
class Document:
    """One attention document: parallel arrays over its tokens."""

    ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray
    """0 for what every token of the document may see, k >= 1 for branch k."""
    targets: np.ndarray
    """The token that a position predicts where that is trained, else IGNORE."""
    weights: np.ndarray
    """How many branches share the token (the router's auxiliary loss counts it so often)."""
    owners: np.ndarray
    """For each scored position, in order: the number of its branch, counted over all examples."""


def collate(examples: Sequence[Example], layout: str, pad_id: int = 0) -> dict[str, Tensor]:
    """B examples -> the tensors of a micro-batch. The examples may differ in their number of branches.

    Returns input_ids, position_ids, shift_labels, router_weights [R, L]; document, branch [R, L] where a mask is
    needed (document is -1 on padding); attention_mask [R, L] in the padded layout;
    scored [N], indices into R * L of the positions with a target, in order, and owner [N], the number of their branch,
    counted over all examples (example * K + branch where all have K); row [branches], the number of their example.
    """
    documents = _shared(examples) if layout == "shared" else _separate(examples)
    if layout == "packed":
        rows = [documents]
    elif layout == "padded":
        rows = [[document] for document in documents]
    else:
        rows = _cheapest_rows(documents)
    batch = _to_tensors(rows, pad_id)
    batch["row"] = torch.tensor([number for number, example in enumerate(examples) for _ in example.branches])
    if layout == "shared" and _needs_mask(rows):
        batch |= _document_ids(rows, batch["input_ids"].shape)
    if layout == "padded":
        lengths = torch.tensor([len(row[0].ids) for row in rows])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def _shared(examples: Sequence[Example]) -> list[Document]:
    """One document an example: its prompt once, then its branches."""
    documents, owner = [], count()
    for example in examples:
        prompt, start = np.asarray(example.prompt), len(example.prompt) - 1
        several = len(example.branches) > 1
        parts = [_prefix(prompt[:-1], len(example.branches))]
        for k, branch in enumerate(example.branches):
            parts.append(_continued(prompt[-1:], branch, start, k + 1 if several else 0, next(owner)))
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        documents.append(Document(*map(np.concatenate, columns)))
    return documents


def _separate(examples: Sequence[Example]) -> list[Document]:
    """One document a branch, each with its own copy of the prompt."""
    return _shared([Example(example.prompt, [branch]) for example in examples for branch in example.branches])


def _prefix(ids: np.ndarray, branches: int) -> Document:
    """The prompt but its last token, which no branch trains."""
    size, none = len(ids), np.empty(0, dtype=np.int64)
    everyone, untrained = np.zeros(size, dtype=np.int64), np.full(size, IGNORE)
    return Document(ids, np.arange(size), everyone, untrained, np.full(size, branches), none)


def _continued(last_prompt_id: np.ndarray, branch: Branch, start: int, number: int, owner: int) -> Document:
    """[last prompt token, branch without its last token] with the branch as targets, up to the last trained one."""
    ids = targets = np.asarray(branch.ids)
    if branch.mask is not None:
        targets = np.where(np.asarray(branch.mask, dtype=bool), ids, IGNORE)
    trained = np.flatnonzero(targets != IGNORE)
    size = int(trained[-1]) + 1 if len(trained) else 0
    shown = np.concatenate([last_prompt_id, ids[: max(size - 1, 0)]])[:size]
    ones = np.ones(size, dtype=np.int64)
    owners = np.full(len(trained), owner)
    return Document(shown, np.arange(start, start + size), number * ones, targets[:size], ones, owners)


def _cheapest_rows(documents: list[Document]) -> list[list[Document]]:
    """The documents in rows of about equal length, in the number of rows that costs least.

    Fewer rows have less padding; longer ones have more pairs of tokens in attention.
    """
    step = 1 + len(documents) // ROW_COUNTS
    return min((_levelled(documents, count) for count in range(1, len(documents) + 1, step)), key=_cost)


def _levelled(documents: list[Document], count: int) -> list[list[Document]]:
    """`count` rows: the longest document first, each into the shortest row."""
    rows: list[list[Document]] = [[] for _ in range(count)]
    shortest = [(0, number) for number in range(count)]  # a heap
    for document in sorted(documents, key=lambda d: -len(d.ids)):
        length, number = shortest[0]
        rows[number].append(document)
        heapq.heapreplace(shortest, (length + len(document.ids), number))
    return rows


def _cost(rows: list[list[Document]]) -> float:
    """Of a pass over the rows, in tokens through the layers alone."""
    length = max(sum(len(document.ids) for document in row) for row in rows)
    return len(rows) * length * (1 + length / ATTENTION_LENGTH)


def _to_tensors(rows: list[list[Document]], pad_id: int) -> dict[str, Tensor]:
    """What every layout ships. Padding goes on counting positions, so that a lone document shows no seam, but not
    beyond those of the documents: a model may have no more."""
    shape = len(rows), max(sum(len(d.ids) for d in row) for row in rows)
    fill = {"ids": pad_id, "positions": 0, "targets": IGNORE, "weights": 0}
    columns = {name: np.full(shape, value, dtype=np.int64) for name, value in fill.items()}
    top = max((int(document.positions.max(initial=0)) for row in rows for document in row), default=0)
    for r, row in enumerate(rows):
        for name, table in columns.items():
            values = np.concatenate([getattr(document, name) for document in row])
            table[r, : len(values)] = values
        end = len(values)
        last = columns["positions"][r, end - 1] if end else -1
        columns["positions"][r, end:] = np.minimum(np.arange(last + 1, last + 1 + shape[1] - end), top)
    shift_labels = torch.from_numpy(columns["targets"])
    return {
        "input_ids": torch.from_numpy(columns["ids"]),
        "position_ids": torch.from_numpy(columns["positions"]),
        "shift_labels": shift_labels,
        "router_weights": torch.from_numpy(columns["weights"]),
        "scored": (shift_labels.flatten() != IGNORE).nonzero().squeeze(-1),
        "owner": torch.from_numpy(np.concatenate([document.owners for row in rows for document in row])),
    }


def _needs_mask(rows: list[list[Document]]) -> bool:
    """Plain causal attention is enough where each row is a single document without branches."""
    return any(len(row) > 1 or row[0].branch.any() for row in rows)


def _document_ids(rows: list[list[Document]], shape: torch.Size) -> dict[str, Tensor]:
    """document [R, L], -1 on padding, and branch [R, L]."""
    document, branch = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
    for r, row in enumerate(rows):
        ends = [0, *accumulate(len(d.ids) for d in row)]
        for number, d in enumerate(row):
            document[r, ends[number] : ends[number + 1]] = number
            branch[r, ends[number] : ends[number + 1]] = d.branch
    return {"document": torch.from_numpy(document), "branch": torch.from_numpy(branch)}


def balanced(costs: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Numbers of the items in each group, in order: group g has sizes[g] of them, all groups cost about the same.

    The dearest item first, each into the cheapest group that has room; sum(sizes) is the number of items.
    """
    groups: list[list[int]] = [[] for _ in sizes]
    sums = [0] * len(sizes)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen = min((g for g in range(len(sizes)) if len(groups[g]) < sizes[g]), key=lambda g: sums[g])
        groups[chosen].append(item)
        sums[chosen] += costs[item]
    return [sorted(group) for group in groups]


def per_branch(values: Tensor, owner: Tensor, examples: int, branches: int) -> Tensor:
    """Sum the values [N] of each branch: -> [B, K]."""
    sums = values.new_zeros(examples * branches).index_add(0, owner, values)
    return sums.view(examples, branches)


def targets(batch: dict[str, Tensor]) -> Tensor:
    """The tokens to predict at the scored positions, [N]."""
    return batch["shift_labels"].flatten()[batch["scored"]]
