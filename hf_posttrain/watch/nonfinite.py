"""The first micro-batch whose loss was not finite, found without waiting for the device at every step."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEPT = 32
"""Micro-batches that are kept until their losses are read: at each log, or when there are so many."""
OF_BATCH = (
    "index", "row_weights", "label", "ref_logps", "shift",
    "input_ids", "position_ids", "shift_labels", "router_weights",
)  # fmt: skip
"""What is kept of a batch, not copied: some 32 bytes a token, where the rest would be ten times that."""


@dataclass
class Noted:
    """A micro-batch and its loss, both still on the device."""

    step: int
    loss: Tensor
    """A scalar."""
    batch: dict[str, Tensor]


class Nonfinite:
    """Keeps micro-batches until their losses are known, and of those that were not finite the first, on each rank."""

    def __init__(self) -> None:
        self.pending: list[Noted] = []
        self.first: Noted | None = None
        self.steps = 0

    def note(self, loss: Tensor, step: int, batch: dict[str, Any]) -> None:
        """Remember the loss (a scalar) of a micro-batch; every KEPT of them the device is waited for."""
        self.steps = step
        if self.first is None:
            self.pending.append(Noted(step, loss.detach(), {name: batch[name] for name in OF_BATCH if name in batch}))
        if len(self.pending) >= KEPT:
            self._read()

    def _read(self) -> None:
        """Forget what was finite."""
        if self.pending:
            bad = (~torch.stack([noted.loss for noted in self.pending]).isfinite()).tolist()
            self.first = next((noted for noted, is_bad in zip(self.pending, bad, strict=True) if is_bad), None)
            self.pending = []

    def first_step(self, accelerator: Any) -> tuple[int, list[int]] | None:
        """(the first step with a loss that was not finite, the ranks that had it), or None. All ranks call it."""
        self._read()
        step = torch.tensor(torch.inf if self.first is None else float(self.first.step), device=accelerator.device)
        steps = accelerator.gather(step[None]).tolist()
        ranks = [rank for rank, found in enumerate(steps) if found == min(steps)]
        return None if min(steps) == torch.inf else (int(min(steps)), ranks)

    def save(self, path: Path, tokenizer: Any) -> str | None:
        """Write this rank's first such micro-batch for `torch.load`: step, loss, rows (their `index` in the prepared
        data, -1 where it has none), text (of each row of tokens) and the tensors themselves.

        Returns why it could not be kept, such as a full disk, in a line; it does not raise, since other ranks wait.
        """
        try:
            self._write(path, tokenizer)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeErrors
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return str(getattr(error, "strerror", None) or error).partition("\n")[0]
        return None

    def _write(self, path: Path, tokenizer: Any) -> None:
        if (noted := self.first) is None:
            return
        batch = {name: tensor.cpu() for name, tensor in noted.batch.items()}
        real = [ids[weights > 0] for ids, weights in zip(batch["input_ids"], batch["router_weights"], strict=True)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "step": noted.step, "loss": noted.loss.item(), "rows": batch["index"].tolist(),
                "text": tokenizer.batch_decode(real), "batch": batch,
            },
            path,
        )  # fmt: skip
