"""Supervised fine-tuning by the negative log-likelihood of the trained tokens.

    loss = - sum over trained tokens of log pi(token | before) / number of trained tokens             (loss_type nll)
           - sum over trained tokens of sg(pi) log pi / number of trained tokens                      (loss_type dft)
           - sum over trained tokens of sg(h) log pi / number of trained tokens                      (loss_type eaft)

sg stops the gradient. The second loss is dynamic fine-tuning, Wu et al. 2025, eq. 9 (arXiv 2508.05629). The third is
entropy-adaptive fine-tuning, Diao et al. 2026 (arXiv 2601.02151): h is the entropy of the 20 most likely tokens, scaled
to [0, 1], so that tokens about which the model is certain count little.
The trained tokens are the completion of rows with prompt and completion, and all tokens of rows with `text` or
`messages`. With assistant_only_loss they are the assistant turns of `messages`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, conflict_message
from ..data.dataset_type import AnyDataset, AnyDatasets
from ..data.packing import pack
from ..errors import InputError
from ..options import option
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..scoring.weighted_log_prob import EntropyWeightedLogProb, WeightedLogProb
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_output import Losses
from ..trainer.rules import TRAINED_TURNS
from . import METHODS
from .rules import SUPERVISED_LOSSES

TILES = {"nll": LogProb, "chunked_nll": LogProb, "dft": WeightedLogProb, "eaft": EntropyWeightedLogProb}
"""Tile function of each loss."""


@dataclass
class SupervisedOptions:
    """Options of SFT and KD that select the trained tokens of a row.

    Args:
        completion_only_loss: Train only the completion of rows with prompt and completion. None means true for such
            rows. false trains the prompt too.
        train_on: Turns of conversations that are trained: all, assistant (all assistant turns), or last (the last
            assistant turn). None means assistant if assistant_only_loss is set, else all. A turn with weight: 0 is
            never trained.
        assistant_only_loss: Train only the assistant turns of `messages`, each with its end token.
        text_weights: Weights of trained tokens by regular expressions of their text, such as {'<tool_call>': 2.0}. The
            loss is the weighted mean. Other tokens have weight 1, or that of the column `span_weights`.
    """

    completion_only_loss: bool | None = option(
        None,
        "Train only the completion of rows with prompt and completion. None means true for such rows. false trains the "
        "prompt too.",
    )
    train_on: str | None = option(
        None,
        "Turns of conversations that are trained: all, assistant (all assistant turns), or last (the last assistant "
        "turn). None means assistant if assistant_only_loss is set, else all. A turn with weight: 0 is never trained.",
        choices=TRAINED_TURNS,
    )
    assistant_only_loss: bool = option(False, "Train only the assistant turns of `messages`, each with its end token.")
    text_weights: dict[str, float] | None = option(
        None,
        "Weights of trained tokens by regular expressions of their text, such as {'<tool_call>': 2.0}. The loss is the "
        "weighted mean. Other tokens have weight 1, or that of the column `span_weights`.",
    )


@dataclass
class SFTConfig(SupervisedOptions, PostTrainConfig):
    """Options of `SFTTrainer`.

    The options of `SupervisedOptions`, `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        loss_type: Name of the loss: nll (also chunked_nll), dft, which weights each token by its probability, or eaft,
            which weights it by the entropy of the model.
        packing: Pack whole examples into rows of max_length tokens by best-fit decreasing. Each example remains a
            separate document for attention.

    Example:
        ```python
        from hf_posttrain import SFTConfig

        args = SFTConfig(output_dir="outputs/sft", max_length=512, packing=True, train_on="assistant")
        ```
    """

    method: ClassVar = METHODS["sft"]
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW.")
    loss_type: str = option(
        "nll",
        "Name of the loss: nll (also chunked_nll), dft, which weights each token by its probability, or eaft, which "
        "weights it by the entropy of the model.",
        choices=SUPERVISED_LOSSES,
    )
    packing: bool = option(
        False,
        "Pack whole examples into rows of max_length tokens by best-fit decreasing. Each example remains a separate "
        "document for attention.",
    )


def supervised_examples(row: dict[str, Any]) -> list[Example]:
    """Return the example of a row with prompt_ids, completion_ids and completion_mask, or all examples of a packed row.

    The columns of a packed row are lists with one entry per example.
    """
    packed = bool(row["completion_ids"]) and isinstance(row["completion_ids"][0], list)
    rows = [row]
    if packed:
        names = [name for name in row if isinstance(row[name], list)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(row[name] for name in names), strict=True)]
    return [
        Example(
            row["prompt_ids"], [Branch(row["completion_ids"], row.get("completion_mask"), row.get("token_weights"))]
        )
        for row in rows
    ]


def apply_formatting_func(
    rows: AnyDatasets | Sequence[dict[str, Any]] | None, function: Callable[[dict[str, Any]], str], column: str
) -> Any:
    """Return rows with a single column, the text that a function returns for each row.

    Args:
        rows: A dataset, a list of rows, a dict of datasets by name, or None.
        function: Function of a row that returns its text.
        column: Name of the column.

    Returns:
        The same kind of object as `rows`.

    Raises:
        InputError: The function returns something other than a string.
    """

    def format_row(row: dict[str, Any]) -> dict[str, str]:
        text = function(row)
        if not isinstance(text, str):
            raise InputError(f"formatting_func must return a string for each row, not a {type(text).__name__}")
        return {column: text}

    if rows is None:
        return None
    if isinstance(rows, dict):
        return {name: apply_formatting_func(part, function, column) for name, part in rows.items()}
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(format_row, remove_columns=columns)
    return [format_row(row) for row in rows]


class SFTTrainer(PostTrainer):
    """Trainer for supervised fine-tuning (SFT) of a causal language model.

    Rows have `prompt` and `completion`, `messages`, or `text`. `compute_metrics` receives as predictions the logits
    [rows, L, V], and as label_ids the shift_labels [rows, L].

    Args:
        *args: Positional arguments of `PostTrainer`.
        formatting_func: Function of a raw row that returns its text. None means that the rows are used as they are.
        **kwargs: Keyword arguments of `PostTrainer`.

    Raises:
        InputError: `formatting_func` comes with datasets that are passed by position, or returns something other than
            a string; or rows that must be packed are a stream.

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import SFTConfig, SFTTrainer

        rows = [
            {"prompt": "2 + 2 =", "completion": " 4"},
            {"prompt": "3 + 4 =", "completion": " 7"},
        ]
        trainer = SFTTrainer(
            model="Qwen/Qwen3-0.6B",
            args=SFTConfig(output_dir="outputs/sft", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
        ```
    """

    config_class = SFTConfig
    examples = staticmethod(supervised_examples)

    def __init__(
        self, *args: Any, formatting_func: Callable[[dict[str, Any]], str] | None = None, **kwargs: Any
    ) -> None:
        if formatting_func is not None:
            config = kwargs.get("args", args[1] if len(args) > 1 else None)
            column = getattr(config, "dataset_text_field", "text")
            if len(args) > 3:
                problem = "formatting_func requires datasets that are passed by name"
                raise InputError(f"{problem}. Name the arguments train_dataset and eval_dataset")
            for name in kwargs.keys() & {"train_dataset", "eval_dataset"}:
                kwargs[name] = apply_formatting_func(kwargs[name], formatting_func, column)
        super().__init__(*args, **kwargs)

    @classmethod
    def prepare_rows(  # type: ignore[override]
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig, name: str
    ) -> AnyDataset:
        """Return tokenized rows. With `packing` the training rows are packed.

        Raises:
            InputError: Rows that must be packed are a stream.
        """
        packing = args.packing and name.startswith("train")
        if packing and not isinstance(rows, datasets.Dataset):
            raise InputError(f"{name}: {conflict_message(Feature.PACKING, Feature.STREAM)}")
        rows = super().prepare_rows(rows, tokenizer, args, name)
        if not packing:
            return rows
        assert args.max_length is not None  # ensured by `rules.sft_problems`
        return pack(rows, args.max_length, name)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """Return the loss of each trained token, [N]."""
        weights = self.weights(batch)
        tile = TILES[self.args.loss_type]
        scores = self.score(model, batch, tile(batch.targets, stats=True), weights)
        metrics = {"mean_token_accuracy": (scores.correct, None), "entropy": (scores.entropy, None)}
        if tile is not LogProb:
            metrics["nll"] = (-scores.student, None)
        return Losses(-scores.value, weights, metrics, scores.router_logits)
