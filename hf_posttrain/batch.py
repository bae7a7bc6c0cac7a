"""Examples -> one micro-batch of tensors: a batch is prompts with branches.

An example is a prompt and K continuations of it (DPO: chosen and rejected; SFT: the completion). `collate` lays B of
them out as rows of R x L tokens, in one of three layouts that give the same scores:

shared   [p0 .. p(n-2)] [p(n-1) a1 a2 ..] [p(n-1) b1 b2 ..]: the prompt once; a branch begins with its own copy of the
         last prompt token, so the position that predicts a trained token lies inside its branch
packed   every branch a document with its own copy of the prompt, all in one row, for FlashAttention
padded   every branch a row, for architectures that take no custom mask

Rows of `shared` are filled first-fit-decreasing and never longer than the longest example. A branch's last token
predicts nothing and is not an input. Positions restart at 0 in each document and at n-1 in each branch.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import torch
from torch import Tensor

LAYOUTS = ("auto", "shared", "packed", "padded")
IGNORE = -100


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
    """One attention document: parallel lists over its tokens."""

    ids: list[int]
    positions: list[int]
    branch: list[int]
    """0 for what every token of the document may see, k >= 1 for branch k."""
    targets: list[int]
    """The token that a position predicts where that is trained, else IGNORE."""
    owners: list[int]
    """For each scored position, in order: the number of its branch, counted over all examples."""
    weights: list[int]
    """How many branches share the token (the router's auxiliary loss counts it so often)."""


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
        rows = _first_fit_decreasing(documents)
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
        prefix, start, branches = list(example.prompt[:-1]), len(example.prompt) - 1, len(example.branches)
        document = Document(prefix, list(range(start)), [0] * start, [IGNORE] * start, [], [branches] * start)
        for k, branch in enumerate(example.branches):
            _append(document, example.prompt[-1], branch, start, k + 1 if branches > 1 else 0, next(owner))
        documents.append(document)
    return documents


def _separate(examples: Sequence[Example]) -> list[Document]:
    """One document a branch, each with its own copy of the prompt."""
    return _shared([Example(example.prompt, [branch]) for example in examples for branch in example.branches])


def _append(document: Document, last_prompt_id: int, branch: Branch, start: int, number: int, owner: int) -> None:
    """Add [last prompt token, branch without its last token] with the branch as targets, up to the last trained one."""
    size, targets = len(branch.ids), list(branch.ids)
    if branch.mask is not None and not all(branch.mask):
        size -= next((i for i, trained in enumerate(reversed(branch.mask)) if trained), size)
        targets = [token if trained else IGNORE for token, trained in zip(targets[:size], branch.mask, strict=False)]
    document.ids += [last_prompt_id, *branch.ids[: size - 1]][:size]
    document.positions += range(start, start + size)
    document.branch += [number] * size
    document.targets += targets
    document.owners += [owner] * (size - targets.count(IGNORE))
    document.weights += [1] * size


def _first_fit_decreasing(documents: list[Document]) -> list[list[Document]]:
    """Fill rows no longer than the longest document, longest first, each into the first row that has room."""
    capacity = max((len(d.ids) for d in documents), default=0)
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in sorted(documents, key=lambda d: -len(d.ids)):
        size = len(document.ids)
        row = next((i for i, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(document)
        room[row] -= size
    return rows


def _to_tensors(rows: list[list[Document]], pad_id: int) -> dict[str, Tensor]:
    """What every layout ships. Padding goes on counting positions, so that a lone document shows no seam."""
    length = max(sum(len(d.ids) for d in row) for row in rows)
    columns: dict[str, list[list[int]]] = {name: [] for name in ("ids", "positions", "targets", "weights")}
    for row in rows:
        for name, lines in columns.items():
            lines.append([value for document in row for value in getattr(document, name)])
        last = columns["positions"][-1][-1] if columns["positions"][-1] else -1
        missing = length - len(columns["ids"][-1])
        columns["ids"][-1] += [pad_id] * missing
        columns["positions"][-1] += range(last + 1, last + 1 + missing)
        columns["targets"][-1] += [IGNORE] * missing
        columns["weights"][-1] += [0] * missing
    shift_labels = torch.tensor(columns["targets"])
    return {
        "input_ids": torch.tensor(columns["ids"]),
        "position_ids": torch.tensor(columns["positions"]),
        "shift_labels": shift_labels,
        "router_weights": torch.tensor(columns["weights"]),
        "scored": (shift_labels.flatten() != IGNORE).nonzero().squeeze(-1),
        "owner": torch.tensor([owner for row in rows for document in row for owner in document.owners]).long(),
    }


def _needs_mask(rows: list[list[Document]]) -> bool:
    """Plain causal attention is enough where each row is a single document without branches."""
    return any(len(row) > 1 or any(row[0].branch) for row in rows)


def _document_ids(rows: list[list[Document]], shape: torch.Size) -> dict[str, Tensor]:
    """document [R, L], -1 on padding, and branch [R, L]."""
    document, branch = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    for r, row in enumerate(rows):
        ends = [0, *accumulate(len(d.ids) for d in row)]
        for number, d in enumerate(row):
            document[r, ends[number] : ends[number + 1]] = number
            branch[r, ends[number] : ends[number + 1]] = torch.tensor(d.branch)
    return {"document": document, "branch": branch}


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
