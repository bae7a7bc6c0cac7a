"""Evaluation of PostTrainer: the training losses without gradient, averaged exactly over the whole data set."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from ..batching.micro_batch import MicroBatch
from ..data.dataset_type import AnyDataset
from ..data.loss_groups import values_of_groups
from ..engines import engine
from ..engines.duplicate_mask import mask_duplicate_rows
from ..errors import InputError
from ..generation.exact_match import exact_match
from ..generation.rollout import preserve_rng
from ..scoring import forward
from ..scoring.layouts import IGNORE
from .group_metrics import with_group_metrics
from .interface import TrainerInterface
from .loss_output import MetricAverager


def full_logits(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the logits of a batch, [R, L, V], for `compute_metrics`. Training does not compute them."""

    def scorer(head: forward.LMHead, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": head.logits(hidden)}

    return forward.run(model, batch, scorer)["logits"]


class EvaluationMixin(TrainerInterface):
    """Methods of `PostTrainer` for evaluation."""

    def prediction_step(  # type: ignore[override]
        self, model: nn.Module, inputs: MicroBatch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Add the losses of a micro-batch to the meter.

        Returns:
            The mean loss, and the predictions and labels for `compute_metrics`.
        """
        original = inputs
        inputs = mask_duplicate_rows(inputs, self.accelerator).to(self.args.device)
        if inputs.attention_mask is not None and "inputs" in self.args.include_for_metrics:
            # Trainer passes these to `compute_metrics`. Each example is one row, a pair its chosen answer, padded with
            # -100.
            ids = inputs.input_ids.masked_fill(inputs.attention_mask == 0, IGNORE)
            original.input_ids = ids.view(len(inputs.index), -1, ids.shape[-1])[:, 0]
        with torch.no_grad(), self.compute_loss_context_manager():
            inputs = self.prepare_evaluation_batch(inputs)
            losses = self.losses(model, inputs)
            losses = losses if inputs.groups is None else with_group_metrics(self, losses, inputs)
            self.meters["eval"].add_losses(losses)
            self.meters["eval"].add("loss", losses.values, losses.weights)
            mean = losses.total / losses.weights.sum().clamp(min=1e-30)
            if prediction_loss_only:
                return mean, None, None
            if losses.predictions is None:
                # As in Trainer, labels are one position after the logits that predict them. The last token of a row is
                # missing.
                logits = full_logits(model, inputs)
                labels = inputs.shift_labels
                return mean, pad(logits, (0, 0, 0, 1)), pad(labels, (1, 0), value=IGNORE)
            return mean, losses.predictions, losses.labels

    def _get_dataloader(self, dataset: AnyDataset, *args: Any, **options: Any) -> Any:
        """Return the data loader of Trainer.

        In evaluation and `predict` the rows may be raw, and are read in order. If `compute_metrics` or the caller of
        `predict` gets rows of logits, each example is a row of the batch.
        """
        if options.get("is_training"):
            return super()._get_dataloader(dataset, *args, **options)
        collator = self.data_collator
        rows = self.without_scores(self.prepare(dataset, self.tokenizer, self.args, "eval"), self.args)
        self.groups = sorted({*self.groups, *values_of_groups(rows)})
        predicting = "test" in (*args, options.get("description")) or "inputs" in self.args.include_for_metrics
        if self.compute_metrics is not None or predicting:
            self.data_collator = replace(collator, layout="padded")
        options["dataloader_key"] = None  # not cached, because Trainer caches loaders by a name that such rows lack
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False  # the option applies only to training
        try:
            return super()._get_dataloader(rows, *args, **options)
        finally:
            self.data_collator = collator
            self.args.dataloader_drop_last = drop_last

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate as Trainer does.

        Raises:
            InputError: If the metrics of the evaluation lack `metric_for_best_model`.
        """
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except KeyError as error:
            if "metric_for_best_model" not in str(error):
                raise
            raise InputError(error.args[0]) from error

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the loop of Trainer, with means over the whole data set instead of means of batch means."""
        if not self.ready and engine.changes_weights(self.accelerator):
            raise InputError("FSDP2 and DeepSpeed cannot evaluate before train(). Set eval_on_start: true instead")
        self.check_scoring(self.model_wrapped)
        # the random state is preserved, so that dropout in training does not depend on the number of evaluations
        with self.throughput.paused(), preserve_rng(self.args.device):
            self.prepare_evaluation()
            output, metrics = self.evaluate_rows(dataloader, *args, **kwargs)
            if self.args.eval_exact_match:
                metrics["exact_match"] = exact_match(self, dataloader.dataset)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def evaluate_rows(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, float]]:
        """Return the output of Trainer, and the exact means of losses and metrics over the rows of a loader."""
        self.meters["eval"] = MetricAverager()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        return output, self.finish_metrics("eval", self.meters["eval"].averages(self.accelerator))
