"""Partners of the rows for the KL estimate of KTO, and the running mean of rewards for BCO."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.dataset_type import AnyDataset
from ..errors import InputError
from ..trainer import stateful
from ..trainer.loss_output import sum_and_count

logger = logging.getLogger(__name__)
VERSION = 1
"""Version of the pairing, a part of the fingerprint by which `datasets` caches the pairs. Increase it with any change
that pairs the same rows differently."""
STREAM_CHUNK = 1000
"""Number of consecutive rows of a stream that are partners of each other."""
Columns: TypeAlias = datasets.Dataset | Mapping[str, Sequence[Any]]
"""Prepared rows by column."""


def add_mismatches(rows: AnyDataset, max_length: int | None, seed: int, name: str) -> Any:
    """Return prepared rows with the completion of each row's partner in `mismatch_ids`.

    In a stream, partners are in the same chunk of `STREAM_CHUNK` rows.
    """
    if isinstance(rows, datasets.Dataset):
        partners = find_partners(rows, seed, name)
        arrow_rows = rows.with_format("arrow")
        completions = arrow_rows.select_columns(["completion_ids"])
        paired = arrow_rows.map(
            _append_partners,
            batched=True,
            with_indices=True,
            fn_kwargs={"completions": completions, "partners": partners, "max_length": max_length},
            # the hash of all rows and partners would take longer than the pairing
            new_fingerprint=Hasher.hash([rows._fingerprint, "mismatch_ids", VERSION, max_length, seed]),
        )
        return paired.with_format(None)
    features = datasets.Features({**rows.features, "mismatch_ids": datasets.List(datasets.Value("int32"))})
    options = {"max_length": max_length, "seed": seed, "name": name}
    return rows.map(
        _pair_chunk, batched=True, batch_size=STREAM_CHUNK, with_indices=True, features=features, fn_kwargs=options
    )


def _append_partners(
    table: pa.Table, numbers: list[int], completions: datasets.Dataset, partners: np.ndarray, max_length: int | None
) -> pa.Table:
    """Append `mismatch_ids` to a part of the rows.

    Args:
        table: The part.
        numbers: Numbers of its rows.
        completions: The column `completion_ids` of all rows in the format of Arrow.
        partners: Number of the partner of each row, [rows].
        max_length: Maximum number of tokens of the prompt and the completion of the partner.
    """
    mismatches = completions[partners[numbers].tolist()]["completion_ids"].to_pylist()
    column = truncate_mismatches(mismatches, table["prompt_ids"].to_pylist(), max_length)
    return table.append_column("mismatch_ids", pa.array(column, pa.list_(pa.int32())))


def _pair_chunk(
    columns: dict[str, list[Any]], numbers: list[int], max_length: int | None, seed: int, name: str
) -> dict[str, list[Any]]:
    """Add `mismatch_ids` to a chunk of a stream. A last chunk of several is dropped if its rows have one prompt."""
    keys = columns["prompt_key"]
    if len({*keys}) == 1 and len(keys) < STREAM_CHUNK and numbers[0] > 0:
        logger.warning(
            "%s: the last %d rows of the stream are dropped, since they have the same prompt", name, len(keys)
        )
        return {**{column: [] for column in columns}, "mismatch_ids": []}
    completions = [columns["completion_ids"][partner] for partner in find_partners(columns, seed, name)]
    return {"mismatch_ids": truncate_mismatches(completions, columns["prompt_ids"], max_length)}


def truncate_mismatches(
    completions: list[list[int]], prompts: Sequence[Sequence[int]], max_length: int | None
) -> list[list[int]]:
    """Return the completions of partners, truncated to the space after each prompt, at least to one token."""
    if max_length is None:
        return completions
    sizes = [max(1, max_length - len(prompt)) for prompt in prompts]
    return [ids[:size] for ids, size in zip(completions, sizes, strict=True)]


def find_partners(rows: Columns, seed: int, name: str = "train") -> np.ndarray:
    """Return for each row the number of a row with another prompt, [rows].

    The partners are a seeded permutation where that is possible. The rows are shuffled so that rows with the same
    prompt are adjacent, and this order is shifted by the size of the largest group. No row then has a partner with its
    own prompt, provided that no prompt has more than half of the rows. With such a prompt, the rows that this
    does not separate from their own prompt get random partners.

    Raises:
        InputError: All rows have the same prompt.
    """
    _, group, sizes = np.unique(rows["prompt_key"][:], return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        problem = f"{name}: all {len(group)} rows have the same prompt, and the KL estimate of KTO requires another one"
        raise InputError(f"{problem}. Add rows with other prompts, or set loss_type: apo_zero_unpaired")
    random = np.random.default_rng(seed)
    order = np.lexsort((random.permutation(len(group)), random.permutation(len(sizes))[group]))
    partner = np.empty(len(group), dtype=np.int64)
    partner[order] = np.roll(order, -int(sizes.max()))
    clash = group[partner] == group
    if clash.any():
        logger.warning(
            "%s: one prompt has %d of %d rows, and %d of them are paired with a random row of another prompt",
            name,
            sizes.max(),
            len(group),
            clash.sum(),
        )
        others = np.flatnonzero(group != sizes.argmax())
        partner[clash] = random.choice(others, clash.sum())
    return partner


class RunningMean(TrainerCallback):
    """The delta of BCO, which is the mean reward of all rows trained so far, over all ranks.

    It is updated once per window, and checkpoints store it.
    """

    required = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.total = torch.zeros(2, dtype=torch.float64)
        self.pending: list[Tensor] = []

    @property
    def mean(self) -> Tensor:
        """The current mean, a scalar, which is 0 before the first window."""
        return self.total[0] / self.total[1].clamp(min=1)

    def add(self, rewards: Tensor, weights: Tensor) -> None:
        """Add the rewards [B] of a micro-batch, which count from the next window on. Weight 0 excludes a row."""
        self.pending.append(sum_and_count(rewards.detach(), weights))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Update the mean with the rewards of the window from all ranks."""
        if self.pending:
            window_total = self.accelerator.reduce(torch.stack(self.pending).sum(0), "sum")
            self.total = self.total.to(window_total.device) + window_total
            self.pending = []

    def reset(self) -> None:
        """Reset the mean to 0."""
        self.total = torch.zeros(2, dtype=torch.float64)
        self.pending = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sum and the number of the rewards."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the mean of a checkpoint."""
        self.total = state["total"]
        self.pending = []

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the mean of the best checkpoint if its weights were loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.reset()
            if best := stateful.read(state.best_model_checkpoint).get("mean_reward"):
                self.load_state_dict(best)
