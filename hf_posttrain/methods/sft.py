"""Supervised fine-tuning: the negative log-likelihood of the trained tokens.

    loss = - sum over trained tokens of log pi(token | before) / number of trained tokens

Which tokens are trained: the completion of prompt + completion rows, every token of `text` and `messages` rows, or the
assistants' turns of `messages` with assistant_only_loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, conflict
from ..data.dataset_type import AnyDatasets
from ..data.packing import pack
from ..errors import InputError
from ..options import option
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_output import Losses
from . import METHODS


@dataclass
class SupervisedOptions:
    """What is trained of the data's rows, in SFT and KD."""

    completion_only_loss: bool | None = option(
        None,
        "Train only the completion of prompt + completion rows; None: yes for such rows. False trains the prompt too.",
    )
    train_on: str | None = option(
        None,
        "Which turns of conversations are trained: all, assistant (each of the assistant's), or last (the last of "
        "them); None: as assistant_only_loss says. A turn with weight: 0 is never trained.",
    )
    assistant_only_loss: bool = option(
        False, "Of `messages`, train only what assistants wrote, each turn with its end token."
    )


@dataclass
class SFTConfig(SupervisedOptions, PostTrainConfig):
    """Options of SFT; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["sft"]
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW.")
    packing: bool = option(
        False, "Fill rows of max_length with whole examples, best-fit decreasing, each still its own document."
    )


def supervised_examples(row: dict[str, Any]) -> list[Example]:
    """A row of prompt_ids, completion_ids and completion_mask -> its example; a packed row, of lists of them -> all."""
    packed = bool(row["completion_ids"]) and isinstance(row["completion_ids"][0], list)
    rows = [row]
    if packed:
        names = [name for name in row if isinstance(row[name], list)]
        rows = [dict(zip(names, one, strict=True)) for one in zip(*(row[name] for name in names), strict=True)]
    return [Example(one["prompt_ids"], [Branch(one["completion_ids"], one.get("completion_mask"))]) for one in rows]


def apply_formatting_func(
    rows: AnyDatasets | Sequence[dict[str, Any]] | None, function: Callable[[dict[str, Any]], str], column: str
) -> Any:
    """Return rows of one column, with the text that a function makes of each row; a dict of data sets one by one.

    Raises InputError for a function that returns anything but a text.
    """

    def text_of(row: dict[str, Any]) -> dict[str, str]:
        text = function(row)
        if not isinstance(text, str):
            raise InputError(f"formatting_func must return a text for each row, not a {type(text).__name__}")
        return {column: text}

    if rows is None:
        return None
    if isinstance(rows, dict):
        return {name: apply_formatting_func(part, function, column) for name, part in rows.items()}
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(text_of, remove_columns=columns)
    return [text_of(row) for row in rows]


class SFTTrainer(PostTrainer):
    """Supervised fine-tuning of a causal LM; further argument: `formatting_func`, which makes the text of a row.

    `compute_metrics` gets full logits and shift_labels, [rows, L, V] and [rows, L].
    """

    config_class = SFTConfig
    examples = staticmethod(supervised_examples)

    def __init__(self, *args: Any, formatting_func: Callable[[dict[str, Any]], str] | None = None, **kwargs: Any):
        if formatting_func is not None:
            config = kwargs.get("args", args[1] if len(args) > 1 else None)
            column = getattr(config, "dataset_text_field", "text")
            if len(args) > 3:
                raise InputError("formatting_func requires train_dataset and eval_dataset by name")
            for name in kwargs.keys() & {"train_dataset", "eval_dataset"}:
                kwargs[name] = apply_formatting_func(kwargs[name], formatting_func, column)
        super().__init__(*args, **kwargs)

    @classmethod
    def prepare_rows(cls, rows: Any, tokenizer: PreTrainedTokenizerBase, args: Any, name: str) -> Any:
        """Tokenised rows; training rows packed where `packing` says so. Raises InputError for a stream to be packed."""
        packing = args.packing and name.startswith("train")
        if packing and not isinstance(rows, datasets.Dataset):
            raise InputError(f"{name}: {conflict(Feature.PACKING, Feature.STREAM)}")
        rows = super().prepare_rows(rows, tokenizer, args, name)
        return pack(rows, args.max_length, name) if packing else rows

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """-log pi of each trained token, [N]."""
        weights = self.weights(batch)
        scores = self.score(model, batch, LogProb(batch.targets, stats=True), weights)
        metrics = {"mean_token_accuracy": (scores.correct, None), "entropy": (scores.entropy, None)}
        return Losses(-scores.value, weights, metrics, scores.router_logits)
