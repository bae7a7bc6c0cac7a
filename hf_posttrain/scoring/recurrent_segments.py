"""Recurrent layers (linear attention, state spaces, short convolutions) over one row in segments.

A mask tells attention to which tokens a token attends, but a recurrent layer depends on all tokens before. So inside
such a layer the segments of a row (a prompt, a branch: `attention.find_segments`) become rows of their own: prompts
first, then each branch continues from the convolution and recurrent states at the end of its prompt, with gradients
through them. The rest of the model still computes the one row, without padding and each prompt once.

The implementation calls the layer's own forward with the cache that it takes for generation. It relies on nothing else.

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

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the argument for a cache in forwards. `cache` is its name since transformers 5.24."""
MASK_ARGUMENTS = ("attention_mask", "conv_mask")
"""Names of the argument for a padding mask in forwards."""
MIN_GROUP_LENGTH = 32
"""Length in tokens up to which segments share a table. Kernels compute linear attention in chunks of 64."""


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers: those whose forward keeps a convolution state in a cache."""
    layer_classes = {type(module) for module in model.modules()}
    stateful = {layer_class for layer_class in layer_classes if "update_conv_state" in _names_in_forward(layer_class)}
    return [module for module in model.modules() if type(module) in stateful]


def _names_in_forward(layer_class: type[nn.Module]) -> tuple[str, ...]:
    """Return the names that the code of a class's forward uses."""
    code = getattr(inspect.unwrap(layer_class.forward), "__code__", None)
    return code.co_names if code else ()


def _argument_name(layer_class: type[nn.Module], names: Sequence[str]) -> str:
    """Return the first of `names` that is a parameter of a class's forward, or an empty string."""
    parameters = inspect.signature(inspect.unwrap(layer_class.forward)).parameters
    return next((name for name in names if name in parameters), "")


def supports_segments(model: nn.Module) -> bool:
    """Return whether all recurrent layers take a cache and a mask by known names."""
    return all(
        _argument_name(layer_class, CACHE_ARGUMENTS) and _argument_name(layer_class, MASK_ARGUMENTS)
        for layer_class in {*map(type, stateful_layers(model))}
    )


def enable_segments(model: nn.Module) -> bool:
    """Let the recurrent layers compute a row in segments. Return whether the model has such layers."""
    layers = stateful_layers(model) if supports_segments(model) else []
    for layer in layers:
        layer_class: Any = type(layer)
        layer.forward = MethodType(_segment_forward(layer_class), layer)
    return bool(layers)


def used_segments(model: nn.Module) -> bool:
    """Return whether all recurrent layers received segments in the model's last forward.

    Some models do not pass the arguments of their forward on to the layers.
    """
    return all(getattr(layer, "received_segments", False) for layer in stateful_layers(model))


@dataclass
class SegmentTables:
    """Indices of the segments of a row, as tables of segments of about equal length, each [n, longest segment].

    An index of -1 is padding: on the left for prompts, on the right for branches.
    """

    prompts: list[Tensor]  # indices in the row; empty if no branch continues another segment
    branches: list[
        tuple[Tensor, Tensor]
    ]  # indices in the row, and the prompt of each branch in order of `prompts`, [n]
    back: Tensor  # [L], index of each token in the concatenated tables

    @classmethod
    def from_sizes(cls, sizes: Sequence[tuple[int, int]], device: torch.device) -> "SegmentTables":
        """Build the tables from the (queries, keys) of each segment, as returned by `attention.find_segments`."""
        starts = np.cumsum([0, *(queries for queries, _ in sizes)])
        places = [np.arange(start, start + queries) for start, (queries, _) in zip(starts, sizes, strict=False)]

        # a segment that is followed by a segment with more keys than queries is the prompt of the latter
        continues = [keys > queries for queries, keys in sizes]
        prompts = [n for n, (later, after) in enumerate(pairwise([*continues, False])) if after and not later]
        branches = sorted({*range(len(sizes))} - {*prompts})
        lengths = [queries for queries, _ in sizes]
        groups_and_sides = [
            (_group_by_length(numbers, lengths), side) for numbers, side in ((prompts, 0), (branches, 1))
        ]
        tables = [[_table([places[n] for n in group], side) for group in groups] for groups, side in groups_and_sides]

        # the number of the last prompt up to each segment, in the order of the tables; one past the last for none
        order = {n: number for number, n in enumerate(n for group in groups_and_sides[0][0] for n in group)}

        def prompt_number(n: int) -> int:
            return order[prompts[bisect(prompts, n) - 1]] if continues[n] else len(prompts)

        begins = [np.array([*map(prompt_number, group)]) for group in groups_and_sides[1][0]]
        indices = np.concatenate([table.ravel() for table in (*tables[0], *tables[1])])
        back = np.empty(starts[-1], dtype=np.int64)
        back[indices[indices >= 0]] = np.flatnonzero(indices >= 0)

        def to_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        branch_tables = [*zip(map(to_device, tables[1]), map(to_device, begins), strict=True)]
        return cls([*map(to_device, tables[0])], branch_tables, to_device(back))


def _group_by_length(segments: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Group segments so that the shortest has at least half the length of the longest, or of MIN_GROUP_LENGTH."""
    groups: list[list[int]] = []
    for n in sorted(segments, key=lengths.__getitem__, reverse=True):
        if groups and 2 * max(lengths[n], MIN_GROUP_LENGTH) >= lengths[groups[-1][0]]:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _table(places: list[np.ndarray], padded_side: int) -> np.ndarray:
    """Return rows of equal length, at least 2: for a single token, layers write into the state that they are given."""
    row_length = max([2, *map(len, places)])
    padding = [(row_length - len(row), 0) if padded_side == 0 else (0, row_length - len(row)) for row in places]
    return np.stack([np.pad(row, sides, constant_values=-1) for row, sides in zip(places, padding, strict=True)])


class RecurrentStates:
    """States of one layer, which its forward takes in place of the model's cache. Their keys are `state_idx`."""

    record_past = False
    """Read by layers of transformers 5.20."""

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}

    @classmethod
    def concat(cls, parts: Sequence["RecurrentStates"]) -> "RecurrentStates":
        """Concatenate the states of several batches."""
        new = cls()
        for name in ("conv_states", "recurrent_states"):
            for number in getattr(parts[0], name):
                getattr(new, name)[number] = torch.cat([getattr(part, name)[number] for part in parts])
        return new

    def select(self, prompts: Tensor) -> "RecurrentStates":
        """Return the initial states of branches: the states of their prompts, or zeros for branches without a prompt.

        Args:
            prompts: Number of the prompt of each branch, [n]. The number of prompts means no prompt.
        """
        new = RecurrentStates()
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(self, name).items():
                padding = [0, 0] * (state.ndim - 1) + [0, 1]
                getattr(new, name)[number] = pad(state, padding).index_select(0, prompts)
        return new

    @property
    def layers(self) -> Mapping[int, "RecurrentStates"]:
        """Layers of the cache. Transformers 5.20 reads `cache.layers[layer_idx].conv_states[state_idx]`."""
        return defaultdict(lambda: self)

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        """Return whether the layer continues another segment. Called by layers of transformers 5.20."""
        return state_idx in self.conv_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a convolution state, or None if there is no earlier segment."""
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, or None if there is no earlier segment."""
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution, [n, channels, kernel size], and return all inputs of this call."""
        before = self.conv_states.get(state_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        size = conv_kernel_size or inputs.shape[-1]
        inputs = pad(inputs, (max(size - inputs.shape[-1], 0), 0))
        self.conv_states[state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep a recurrent state and return it."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@functools.cache
def _segment_forward(layer_class: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a layer class that takes `segment_tables`."""
    signature = inspect.signature(inspect.unwrap(layer_class.forward))
    cache = _argument_name(layer_class, CACHE_ARGUMENTS)
    mask = _argument_name(layer_class, MASK_ARGUMENTS)
    first = list(signature.parameters)[1]

    @functools.wraps(layer_class.forward)
    def forward(layer: Any, *args: Any, segment_tables: SegmentTables | None = None, **kwargs: Any) -> Any:
        layer.received_segments = segment_tables is not None
        if segment_tables is None:
            return layer_class.forward(layer, *args, **kwargs)

        arguments = signature.bind(layer, *args, **kwargs).arguments
        arguments.pop("kwargs", None)  # bounds of documents, for kernels that are not called here
        row = arguments.pop(first).squeeze(0)  # [L, H]
        del arguments["self"]

        def compute(table: Tensor, states: RecurrentStates | None, padding: Tensor | None) -> Tensor:
            options = arguments | {first: row[table.clamp(min=0)], cache: states, mask: padding}
            return layer_class.forward(layer, **options).flatten(0, 1)

        prompt_states = [RecurrentStates() for _ in segment_tables.prompts]  # one for each table of prompts
        tables = zip(segment_tables.prompts, prompt_states, strict=True)
        outputs = [compute(table, states, (table >= 0).to(row.dtype)) for table, states in tables]

        states = RecurrentStates.concat(prompt_states) if prompt_states else None
        branches = segment_tables.branches
        outputs += [compute(table, states and states.select(prompts), None) for table, prompts in branches]
        return torch.cat(outputs).index_select(0, segment_tables.back)[None]

    return forward
