"""What a teacher reads of a micro-batch, where that is not the student's own rows.

A teacher may have another prompt (one with the solution, say), be one of several that share out the examples, or have a
tokenizer of its own. It then has a batch of its own, a view, made with the student's. Of equal tokenizers the view's
scored positions are put into the order of the student's, so that its n-th token is the student's: whatever scores the
student's batch scores the view as well. A server has no batch but texts.

Legend: N scored tokens of the student, n of them in a view, M scored tokens of a teacher with its own tokenizer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .layouts import Branch, Example, Later, Reading

WHOLE = Reading()
"""Of an example of which the teacher reads what the student does."""


def make_views(
    examples: Sequence[Example], batch: dict[str, Any], lay_out: Callable, served: Collection[str]
) -> dict[str, Any]:
    """`views` {teacher: batch} of a student's batch; {} where there is one teacher, which reads the same.

    served: teachers that are servers; theirs are {"texts": Later([(prompt, answer, which of its tokens are scored)])}.
    A view has `places` [n], where its tokens are among the student's; across tokenizers see `_across`.
    """
    readings = [example.reading or WHOLE for example in examples]
    of_each: dict[str, list[int]] = {}
    for number, reading in enumerate(readings):
        of_each.setdefault(reading.teacher, []).append(number)
    if not served and of_each.keys() == {""} and all(r.prompt is None and r.aligned is None for r in readings):
        return {}
    starts = [0, *accumulate(len(example.branches) for example in examples)]
    views = {}
    for name, numbers in of_each.items():
        texts = name in served
        theirs = [_as_read(examples[n], readings[n]) for n in numbers]
        branches = torch.cat([torch.arange(starts[n], starts[n + 1]) for n in numbers])
        if readings[numbers[0]].aligned is not None:
            of_branches = [one for n in numbers for one in readings[n].aligned or ()]
            views[name] = _across(batch, {} if texts else lay_out(theirs), of_branches)
        else:
            views[name] = _in_order(batch, {} if texts else lay_out(theirs), branches)
        if texts:
            views[name]["texts"] = Later([(one.prompt, branch.ids, branch.mask) for one in theirs
                                          for branch in one.branches])  # fmt: skip
    return {"views": views}


def _as_read(example: Example, reading: Reading) -> Example:
    """The example as the teacher has it."""
    prompt = example.prompt if reading.prompt is None else reading.prompt
    if reading.aligned is None:
        return replace(example, prompt=prompt, columns={})
    return Example(prompt, [Branch(one.ids) for one in reading.aligned])


def _in_order(batch: dict[str, Any], view: dict[str, Any], branches: Tensor) -> dict[str, Any]:
    """The view with `places`, its scored tokens in the student's order. branches: the student's number of each branch
    of the view. Of texts, which have no batch, `order` says which token of theirs, in a row, each place is."""
    # tokens of a branch stand in order in both: sorted by branch both have the same tokens at the same places
    mine = torch.argsort(batch["owner"], stable=True)
    mine = mine[torch.isin(batch["owner"][mine], branches)]
    places, rank = mine.sort()
    if not view:
        return {"places": places, "order": rank}
    theirs = torch.argsort(branches[view["owner"]], stable=True)[rank]
    return view | {name: view[name][theirs] for name in ("scored", "owner")} | {"places": places}


def _across(batch: dict[str, Any], view: dict[str, Any], aligned: Sequence[Any]) -> dict[str, Any]:
    """The view of a teacher with its own tokenizer, with what lays its M tokens alongside the student's N:

    chunk [N] and their_chunk [M], the number of the chunk of text that a token is of, -1 where none is common to both,
    LEFT_OUT of half a character at the end;
    before and behind [N], those of the chunks before and behind it in the same answer, -1 where there is none;
    match [N], the teacher's token that forms a chunk with this one token, -1 where there is none;
    longer [M, D, 2], ranges of `Aligner.lacking`, see `Aligner.longer`: 0, 0 for none.
    """
    base, tokens = 0, 0
    mine, before, behind, theirs, match = [], [], [], [], []
    for one in aligned:
        mine.append(_moved(one.chunks, base))
        before.append(_moved([max(n - 1, -1) for n in one.chunks], base))
        behind.append(_moved([n + 1 if 0 <= n < one.count - 1 else -1 for n in one.chunks], base))
        theirs.append(_moved(one.their_chunks, base))
        match.append(_moved(one.match, tokens))
        base, tokens = base + one.count, tokens + len(one.ids)
    order = torch.argsort(batch["owner"], stable=True)
    back = torch.argsort(order)
    of_mine = {"chunk": mine, "before": before, "behind": behind, "match": match}
    found = {name: torch.cat(parts)[back] for name, parts in of_mine.items()}
    found["their_chunk"] = torch.cat(theirs)
    if not view:
        return found
    theirs_first = torch.argsort(view["owner"], stable=True)
    found["longer"] = _filled([ranges for one in aligned for ranges in one.longer])
    return view | {name: view[name][theirs_first] for name in ("scored", "owner")} | found


def _filled(rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return rows of ranges as one tensor [rows, most, 2], filled up with empty ranges."""
    most = max(map(len, rows), default=0)
    filled = [[*ranges, *[(0, 0)] * (most - len(ranges))] for ranges in rows]
    return torch.tensor(filled, dtype=torch.long).view(len(rows), most, 2)


def _moved(numbers: Sequence[int], by: int) -> Tensor:
    """The numbers raised by `by`, but for -1."""
    given = torch.tensor(numbers, dtype=torch.long)
    return given.where(given < 0, given + by)
