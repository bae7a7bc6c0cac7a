"""Supervised fine-tuning: the negative log-likelihood of the trained tokens.

    loss = - sum over trained tokens of log pi(token | before) / number of trained tokens

Which tokens are trained: the completion of prompt + completion rows, every token of `text` and `messages` rows, or the
assistants' turns of `messages` with assistant_only_loss.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn

from .. import data
from ..errors import InputError
from ..scoring import layouts
from ..scoring.forward import full_logits
from ..scoring.layouts import Branch, Example
from ..scoring.tiles import LogProb
from ..trainer import rule_table as rules
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_units import Losses


@dataclass
class SFTConfig(PostTrainConfig):
    """Options of SFT; every other field of TrainingArguments and PostTrainConfig works as well."""

    can_cut_rows: ClassVar[bool] = True
    """Sequence parallelism works."""
    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    completion_only_loss: bool | None = None
    """Train only the completion of prompt + completion rows; None: yes for such rows. False trains the prompt too."""
    assistant_only_loss: bool = False
    """Of `messages`, train only what assistants wrote, each turn with its end token."""
    packing: bool = False
    """Fill rows of max_length with whole examples, best-fit decreasing, each still its own document."""

    def __post_init__(self):
        rules.check("sft", self)
        super().__post_init__()


def collate_supervised(rows: list[dict], layout: str) -> dict[str, Tensor]:
    """Rows of prompt_ids, completion_ids, completion_mask, packed or not -> batch with one branch an example."""
    numbered = [(number, one) for number, row in enumerate(rows) for one in _unpack(row)]
    branches = [Branch(one["completion_ids"], one.get("completion_mask")) for _, one in numbered]
    examples = [Example(one["prompt_ids"], [branch]) for (_, one), branch in zip(numbered, branches, strict=True)]
    batch = {"index": torch.tensor([row.get("index", -1) for row in rows]), **layouts.collate(examples, layout)}
    return batch | {"row": torch.tensor([number for number, _ in numbered])}


def _unpack(row: dict) -> list[dict]:
    """The examples of a packed row (lists of lists), or the row itself."""
    if not row["completion_ids"] or not isinstance(row["completion_ids"][0], list):
        return [row]
    names = [name for name in row if isinstance(row[name], list)]
    columns = zip(*(row[name] for name in names), strict=True)
    return [dict(zip(names, values, strict=True)) for values in columns]


class SFTTrainer(PostTrainer):
    """Supervised fine-tuning of a causal LM.

    `compute_metrics` gets full logits and shift_labels, [rows, L, V] and [rows, L].
    """

    method = "sft"
    unit = "tokens"
    config_class = SFTConfig

    @classmethod
    def prepare_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> Any:
        """Tokenised rows; training rows packed where `packing` says so. Raises InputError for a stream to be packed."""
        packing = args.packing and name.startswith("train")
        if packing and not isinstance(rows, datasets.Dataset):
            raise InputError(f"{name}: packing needs a data set of known length, not a stream: set packing: false")
        rows = super().prepare_rows(rows, tokenizer, args, name)
        return data.pack(rows, args.max_length, name) if packing else rows

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: SFTConfig) -> dict[str, Tensor]:
        """See `collate_supervised`."""
        return collate_supervised(rows, layout)

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """-log pi of each trained token, [N]."""
        weights = self.weights(batch)
        scores = self.score(model, batch, LogProb(layouts.targets(batch), stats=True), weights)
        metrics: dict[str, tuple[Tensor, Tensor | None]] = {
            "mean_token_accuracy": (scores["correct"], None), "entropy": (scores["entropy"], None)
        }  # fmt: skip
        return Losses(-scores["value"], weights, metrics, scores.get("router_logits"))

    def predictions(self, model: nn.Module, batch: dict[str, Any], losses: Losses) -> tuple[Tensor, Tensor]:
        """Full logits [rows, L, V] and shift_labels [rows, L]: the only place where they exist."""
        return full_logits(model, batch), batch["shift_labels"]
