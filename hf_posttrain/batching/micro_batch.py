"""The tensors of one micro-batch, with a documented shape for each.

Legend: B examples, K branches per example, R rows of tokens, L row length, N scored tokens.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypedDict, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers.utils import ModelOutput


class Segments(TypedDict):
    """The pieces (a prompt or a branch) of one row of L tokens, for attention without a mask."""

    cu_seq_lens_q: Tensor  # int32 [pieces + 1], start of the queries of each piece
    cu_seq_lens_k: Tensor  # int32 [pieces + 1], start of the keys of each piece
    max_length_q: int
    max_length_k: int
    sizes: list[tuple[int, int]]  # queries and keys of each piece
    gathered: Tensor | None  # [keys], places of all keys in the row; None where queries and keys are the row as it is


@dataclass(frozen=True)
class Deferred:
    """Items that are laid out later in the step; moving a batch to a device leaves them as they are."""

    items: list[Any]


@dataclass
class MicroBatch(ModelOutput):
    """B examples with K branches each, as R rows of L tokens.

    Fields that a batch does not have are None, and are no keys of its mapping interface, which Trainer and Accelerate
    use. A method adds fields in a subclass. `replace` and `dataclasses.replace` return a changed copy.
    """

    # ---- tokens
    input_ids: Tensor = None  # type: ignore[assignment]  # [R, L]
    position_ids: Tensor = None  # type: ignore[assignment]  # [R, L]
    shift_labels: Tensor = None  # type: ignore[assignment]  # [R, L], the id to predict at a position, -100 for none
    router_weights: Tensor = None  # type: ignore[assignment]  # [R, L], branches that share a token, 0 for padding

    # ---- scored tokens, branches and rows
    scored: Tensor = None  # type: ignore[assignment]  # [N], positions of `shift_labels.flatten()` that have a target
    owner: Tensor = None  # type: ignore[assignment]  # [N], branch of each scored token
    row: Tensor = None  # type: ignore[assignment]  # [branches], row of the data to which a branch belongs
    index: Tensor = None  # type: ignore[assignment]  # [rows of data], number in the dataset, -1 for unknown
    row_weights: Tensor | None = None  # [rows of data], 0 for a row that only completes the last batch of a pass

    # ---- attention
    attention_mask: Tensor | None = None  # [R, L] of the padded layout
    document: Tensor | None = None  # [R, L], attention document of a token, -1 for padding
    branch: Tensor | None = None  # [R, L], branch of a token within its document, 0 for the prompt
    segments: Segments | None = None  # where the batch is one row

    # ---- images
    visual: dict[str, Tensor] | None = None  # inputs of the vision encoder
    blind: bool | None = None  # `visual` is a blank image, of which no token is seen
    picture: Tensor | None = None  # [R, L], number of the image within the row, 0 for text
    rope_positions: Tensor | None = None  # [3, R, L], positions of M-RoPE

    # ---- scores from before the step
    ref_logps: Tensor | None = None  # [B, K], log-probabilities of the branches under the reference

    @property
    def targets(self) -> Tensor:
        """The tokens to predict at the scored positions, [N]."""
        return self.shift_labels.flatten()[self.scored]

    @property
    def weights_of_rows(self) -> Tensor:
        """1 for each row of data that counts, 0 for others, [rows of data]."""
        if self.row_weights is None:
            return torch.ones(len(self.index), device=self.index.device)
        return self.row_weights

    def per_branch(self, values: Tensor) -> Tensor:
        """Sum values [N] of the scored tokens over each branch, [B * K], the branches of an example in order."""
        return values.new_zeros(len(self.row)).index_add(0, self.owner, values)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def update(self, *changes: Any, **more: Any) -> None:
        """Change some fields in place, which `ModelOutput` rejects; torch's `default_convert` calls it on a copy."""
        for name, value in dict(*changes, **more).items():
            self[name] = value

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`. Unlike Trainer's own transfer it casts nothing, so that counts stay exact."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**send_to_device(moved, device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory; `DataLoader` calls it."""
        return self.replace(**{name: _pinned(value) for name, value in self.items()})


Batch = TypeVar("Batch", bound=MicroBatch)


def _pinned(value: object) -> Any:
    """Return a copy of a value in pinned memory, as far as it holds tensors."""
    if hasattr(value, "pin_memory"):  # a tensor, or a batch within a batch, which is a dict too
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pinned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_pinned(each) for each in value]
    return value
