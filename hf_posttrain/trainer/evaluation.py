"""Evaluation: the training losses without gradient, added up exactly over the whole set.

    Evaluating   what PostTrainer changes in how HF's Trainer evaluates and predicts
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import has_length

from ..engines import engine
from ..errors import InputError
from ..generation.exact_match import exact_match
from . import loss_units as units
from .loss_units import Losses
from .metrics import Meter, Pace
from .saving import Saving


class Evaluating(Saving):
    """Evaluates by a method's own losses, on rows that may be raw."""

    data_collator: Any
    tokenizer: Any
    losses: Any
    _note: Any
    prepare: Any
    finish_metrics: Any
    check_scoring: Any
    meters: dict[str, Meter]
    pace: Pace
    ready: bool

    def prediction_step(
        self, model: nn.Module, inputs: dict, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The training losses without gradient, added up exactly; predictions for `compute_metrics`."""
        inputs = self._prepare_inputs(units.weigh(inputs, self.accelerator))
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = self.losses(model, inputs)
            self._note("eval", losses)
            mean = (losses.values * losses.weights).sum() / losses.weights.sum().clamp(min=1)
            if prediction_loss_only:
                return mean, None, None
            return mean, *self.predictions(model, inputs, losses)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """HF's. For evaluation and `predict` it takes raw rows too, and lays out a row for each example where
        `compute_metrics` is given rows of logits. It is not kept: HF keeps loaders by a name that such rows lack."""
        if is_training:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training)
        packed, rows = self.data_collator, self.prepare(dataset, self.tokenizer, self.args, "eval")
        if self.compute_metrics is not None:
            self.data_collator = partial(packed.func, **packed.keywords | {"layout": "padded"})
        try:
            return super()._get_dataloader(rows, description, batch_size, sampler_fn)
        finally:
            self.data_collator = packed

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """In order, however the training rows are sampled."""
        whole = self.args.world_size <= 1 and has_length(eval_dataset)
        return SequentialSampler(eval_dataset) if whole else None

    def prepare_evaluation(self) -> None:
        """What a method needs before it evaluates; all ranks call it."""

    def predictions(self, model: nn.Module, batch: dict[str, Any], losses: Losses) -> tuple[Any, Any]:
        """What `compute_metrics` is given: (predictions, label_ids)."""
        return losses.predictions, losses.labels

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """HF's loop, with means over the whole set instead of means of batch means."""
        if not self.ready and engine.changes_weights(self.accelerator):
            raise InputError("FSDP2 and DeepSpeed cannot evaluate before train(): set eval_on_start: true instead")
        self.check_scoring(self.model_wrapped)
        with self.pace.paused():
            self.prepare_evaluation()
            self.meters["eval"] = Meter()
            output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
            metrics = self.finish_metrics("eval", self.meters["eval"].averages(self.accelerator))
            if self.args.eval_exact_match:
                metrics["exact_match"] = exact_match(self, dataloader.dataset)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output
