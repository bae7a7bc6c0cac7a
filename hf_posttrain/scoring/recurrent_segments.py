"""Layers that keep a state (linear attention, state spaces, short convolutions) over one row in pieces.

Attention is told by a mask what a token sees; such a layer sees whatever stands before. So inside it the pieces of a
row (a prompt, a branch: `attention.find_segments`) become rows of their own: prompts first, and each branch goes on
from the convolution and recurrent states that its prompt left, with gradients through them. All else of the model still
computes the one row, without padding and each prompt once.

It is done by the layer's own forward and the cache that it takes for generation, which is all we know of it.

Legend: L row length, P prompts, B branches, H hidden size.
"""

import functools
import inspect
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

CACHE = ("cache", "past_key_values", "cache_params")
MASK = ("attention_mask", "conv_mask")
"""The names that forwards have for their cache (`cache` from transformers 5.24 on), and for a mask of padding."""
ALIKE = 32
"""Tokens: kernels compute linear attention in chunks of 64."""


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that keep a state in a cache: by what their forwards ask the cache for."""
    kinds = {type(module) for module in model.modules()}
    keeping = {kind for kind in kinds if "update_conv_state" in _names_in_forward(kind)}
    return [module for module in model.modules() if type(module) in keeping]


def _names_in_forward(kind: Any) -> tuple[str, ...]:
    """What the code of a class's forward names."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code.co_names if code else ()


def _named(kind: Any, names: Sequence[str]) -> str:
    parameters = inspect.signature(inspect.unwrap(kind.forward)).parameters
    return next((name for name in names if name in parameters), "")


def takes_pieces(model: nn.Module) -> bool:
    """Return whether all layers that keep a state take a cache and a mask by names that are known."""
    return all(_named(kind, CACHE) and _named(kind, MASK) for kind in {*map(type, stateful_layers(model))})


def compute_by_piece(model: nn.Module) -> bool:
    """Let layers that keep a state take the pieces of a row. Are there any?"""
    module: Any
    layers = stateful_layers(model) if takes_pieces(model) else []
    for module in layers:
        kind: Any = type(module)
        module.forward = MethodType(_by_piece(kind), module)
    return bool(layers)


def got_pieces(model: nn.Module) -> bool:
    """Was each layer that keeps a state told of pieces in the model's last forward? Some models do not hand on what
    they are called with.
    """
    return all(getattr(layer, "got_pieces", False) for layer in stateful_layers(model))


@dataclass
class SegmentTables:
    """Where the pieces of a row are: tables of rows of about equal length, each [n, longest of them]. An index of -1 is
    padding: of prompts on the left, of branches on the right.
    """

    prompts: list[Tensor]  # places in the row; none where no branch has another piece before it
    branches: list[tuple[Tensor, Tensor]]  # the same, and [n] the prompt that each goes on from, as `prompts` have them
    back: Tensor  # [L]: the place of each token among those of all tables

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]], device: torch.device) -> "SegmentTables":
        """sizes: (queries, keys) of each piece, as `attention.find_segments` has them."""
        starts = np.cumsum([0, *(queries for queries, _ in sizes)])
        places = [np.arange(start, start + queries) for start, (queries, _) in zip(starts, sizes, strict=False)]
        # a piece that is followed by one with more keys than queries is its prompt
        goes_on = [keys > queries for queries, keys in sizes]
        prompts = [n for n, (later, after) in enumerate(pairwise([*goes_on, False])) if after and not later]
        branches = sorted({*range(len(sizes))} - {*prompts})
        lengths = [queries for queries, _ in sizes]
        tables = [(_of_like_length(chosen, lengths), side) for chosen, side in ((prompts, 0), (branches, 1))]
        made = [[_table([places[n] for n in group], side) for group in groups] for groups, side in tables]
        # the number of the last prompt up to each piece, in the order of the tables; one more for none
        order = {n: number for number, n in enumerate(n for group in tables[0][0] for n in group)}
        last = lambda n: order[prompts[bisect(prompts, n) - 1]] if goes_on[n] else len(prompts)  # noqa: E731
        begins = [np.array([*map(last, group)]) for group in tables[1][0]]
        every = np.concatenate([table.ravel() for table in (*made[0], *made[1])])
        back = np.empty(starts[-1], dtype=np.int64)
        back[every[every >= 0]] = np.flatnonzero(every >= 0)
        there = lambda values: torch.from_numpy(values).to(device)  # noqa: E731
        branches_there = [*zip(map(there, made[1]), map(there, begins), strict=True)]
        return cls([*map(there, made[0])], branches_there, there(back))


def _of_like_length(pieces: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Pieces in groups whose shortest is at least half as long as the longest, or as ALIKE."""
    groups: list[list[int]] = []
    for n in sorted(pieces, key=lambda n: -lengths[n]):
        if groups and 2 * max(lengths[n], ALIKE) >= lengths[groups[-1][0]]:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _table(places: list[np.ndarray], padded_side: int) -> np.ndarray:
    """Rows of equal length, at least 2 (of a single token layers write into the state that they are given)."""
    longest = max([2, *map(len, places)])
    ends = [(longest - len(row), 0) if padded_side == 0 else (0, longest - len(row)) for row in places]
    return np.stack([np.pad(row, end, constant_values=-1) for row, end in zip(places, ends, strict=True)])


class RecurrentStates:
    """The states of one layer, which its forward takes in place of the model's cache. Their keys are `state_idx`."""

    record_past = False
    """Read by layers of transformers 5.20."""

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}

    @classmethod
    def of_all(cls, several: Sequence["RecurrentStates"]) -> "RecurrentStates":
        """Those of several batches, one after the other."""
        new = cls()
        for name in ("conv_states", "recurrent_states"):
            for number in getattr(several[0], name):
                getattr(new, name)[number] = torch.cat([getattr(each, name)[number] for each in several])
        return new

    def continued(self, begins: Tensor) -> "RecurrentStates":
        """The states that branches begin with: those of their prompts, or zeros, which is what none means."""
        new = RecurrentStates()
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(self, name).items():
                padding = [0, 0] * (state.ndim - 1) + [0, 1]
                getattr(new, name)[number] = pad(state, padding).index_select(0, begins)
        return new

    @property
    def layers(self) -> Mapping[int, "RecurrentStates"]:
        """The layers of a cache: transformers 5.20 reads `cache.layers[layer_idx].conv_states[state_idx]`."""
        return defaultdict(lambda: self)

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        """Return whether the layer continues another piece. Called by layers of transformers 5.20."""
        return state_idx in self.conv_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is none before."""
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is none before."""
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution, [n, channels, kernel size]; all that it needs now are returned."""
        before = self.conv_states.get(state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        size = conv_kernel_size or whole.shape[-1]
        whole = pad(whole, (max(size - whole.shape[-1], 0), 0))
        self.conv_states[state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep a state; it is returned."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@functools.cache
def _by_piece(kind: Any) -> Callable[..., Any]:
    """The forward of a layer class that takes `pieces`."""
    signature = inspect.signature(inspect.unwrap(kind.forward))
    cache = _named(kind, CACHE)
    mask = _named(kind, MASK)
    first = list(signature.parameters)[1]

    @functools.wraps(kind.forward)
    def forward(layer: Any, *args: Any, pieces: SegmentTables | None = None, **kwargs: Any) -> Any:
        layer.got_pieces = pieces is not None
        if pieces is None:
            return kind.forward(layer, *args, **kwargs)
        given = signature.bind(layer, *args, **kwargs).arguments
        given.pop("kwargs", None)  # bounds of documents, for kernels that are not asked
        row = given.pop(first).squeeze(0)  # [L, H]
        del given["self"]
        rows = lambda table: row[table.clamp(min=0)]  # noqa: E731

        def compute(table: Tensor, states: RecurrentStates | None, padding: Tensor | None) -> Tensor:
            options = given | {first: rows(table), cache: states, mask: padding}
            return kind.forward(layer, **options).flatten(0, 1)

        left = [RecurrentStates() for _ in pieces.prompts]  # by each table of prompts
        tables = zip(pieces.prompts, left, strict=True)
        found = [compute(table, states, (table >= 0).to(row.dtype)) for table, states in tables]
        before = RecurrentStates.of_all(left) if left else None
        found += [compute(table, before and before.continued(begins), None) for table, begins in pieces.branches]
        return torch.cat(found).index_select(0, pieces.back)[None]

    return forward
