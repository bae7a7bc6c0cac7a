"""Tensors of a micro-batch, with a documented shape for each.

Legend: B examples, K branches per example, R rows of tokens, L row length, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypedDict, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers.utils import ModelOutput


class Segments(TypedDict):
    """Segments (a prompt or a branch) of one row of L tokens, for attention without a mask."""

    cu_seq_lens_q: Tensor  # int32 [segments + 1], start of the queries of each segment
    cu_seq_lens_k: Tensor  # int32 [segments + 1], start of the keys of each segment
    max_length_q: int
    max_length_k: int
    sizes: list[tuple[int, int]]  # number of queries and keys of each segment
    gathered: Tensor | None  # [keys], indices of all keys in the row; None if the keys are the row itself


@dataclass(frozen=True)
class Deferred:
    """Items that are laid out later in the step. They are unchanged when a batch moves to a device."""

    items: list[Any]


@dataclass
class MicroBatch(ModelOutput):
    """B examples with K branches each, as R rows of L tokens.

    Absent fields are None, and are not keys of the mapping interface, which Trainer and Accelerate use. A method adds
    fields in a subclass. `replace` and `dataclasses.replace` return a changed copy.
    """

    # ---- tokens
    input_ids: Tensor = None  # type: ignore[assignment]  # [R, L]
    position_ids: Tensor = None  # type: ignore[assignment]  # [R, L]
    shift_labels: Tensor = None  # type: ignore[assignment]  # [R, L], id to predict at each position, -100 for none
    router_weights: Tensor = None  # type: ignore[assignment]  # [R, L], branches that share a token, 0 for padding

    # ---- scored tokens, branches and rows
    scored: Tensor = None  # type: ignore[assignment]  # [N], indices in `shift_labels.flatten()` that have a target
    owner: Tensor = None  # type: ignore[assignment]  # [N], branch of each scored token
    target_weights: Tensor | None = None  # [N], weight of each scored token in the loss; None: 1
    row: Tensor = None  # type: ignore[assignment]  # [branches], dataset row of each branch
    index: Tensor = None  # type: ignore[assignment]  # [dataset rows], number in the dataset, -1 if unknown
    groups: Deferred | None = None  # value of `log_loss_by` of each branch
    row_weights: Tensor | None = None  # [dataset rows], 0 for a row that only completes the last batch of a pass

    # ---- attention
    attention_mask: Tensor | None = None  # [R, L], only in the padded layout
    document: Tensor | None = None  # [R, L], attention document of each token, -1 for padding
    branch: Tensor | None = None  # [R, L], branch of each token within its document, 0 for the prompt
    segments: Segments | None = None  # only if the batch is one row

    # ---- images
    vision_inputs: dict[str, Tensor] | None = None  # inputs of the vision encoder
    blank_image: bool | None = None  # `vision_inputs` hold a blank image to which no token attends
    image_numbers: Tensor | None = None  # [R, L], number of the image within the row, 0 for text
    rope_positions: Tensor | None = None  # [3, R, L], positions of M-RoPE

    # ---- scores from before the step
    ref_logps: Tensor | None = None  # [B, K], log-probabilities of the branches under the reference

    @property
    def targets(self) -> Tensor:
        """Tokens to predict at the scored positions, [N]."""
        return self.shift_labels.flatten()[self.scored]

    @property
    def weights_of_rows(self) -> Tensor:
        """1 for each dataset row that counts, 0 for the others, [dataset rows]."""
        if self.row_weights is None:
            return torch.ones(len(self.index), device=self.index.device)
        return self.row_weights

    def per_branch(self, values: Tensor) -> Tensor:
        """Sum values [N] of the scored tokens over each branch, [B * K], the branches of an example in order."""
        return values.new_zeros(len(self.row)).index_add(0, self.owner, values)

    def per_token(self, values: Sequence[Any]) -> Tensor:
        """Concatenate values of the scored tokens of each branch to values of all scored tokens, [N, ...]."""
        order = torch.unique_consecutive(self.owner).tolist()  # order of the branches in the batch
        return torch.cat([torch.as_tensor(values[number]) for number in order])

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def update(self, *changes: Any, **more: Any) -> None:
        """Change some fields in place.

        `ModelOutput` rejects this, but torch's `default_convert` calls it on a copy.
        """
        for name, value in dict(*changes, **more).items():
            self[name] = value

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return a copy on `device`. Unlike Trainer's own transfer it casts nothing, so that counts stay exact."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**send_to_device(values, device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory. `DataLoader` calls this method."""
        return self.replace(**{name: _pin_memory(value) for name, value in self.items()})


Batch = TypeVar("Batch", bound=MicroBatch)


def _pin_memory(value: object) -> Any:
    """Return a copy of a value with its tensors in pinned memory."""
    if hasattr(value, "pin_memory"):  # a tensor, or a batch within a batch, which is a dict too
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pin_memory(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_pin_memory(item) for item in value]
    return value
