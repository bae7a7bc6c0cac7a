"""Kahneman-Tversky optimization on single answers that are labeled desirable or undesirable.

    r = log pi(y|x) - log ref(y|x) of the completion y of a row, summed over its tokens
    KL = max(0, mean over the window of log pi(y'|x) - log ref(y'|x)), y' the completion of a row with another prompt
    loss = mean over rows of  w_D (1 - s(beta (r - KL))) if desirable,  w_U (1 - s(beta (KL - r))) if not

The window consists of all micro-batches of an optimizer step on all ranks. The loss therefore depends neither on the
batch size, which may be 1, nor on the mix of labels in a batch. In evaluation the window is the whole dataset. A seeded
permutation assigns y' to each row. The KL of a window must be known before its first backward, so y' is scored before
that, without gradient.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import datasets
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import Deferred, MicroBatch
from ..data.dataset_type import AnyDataset
from ..data.row_schema import class_weights
from ..losses.unpaired import UNPAIRED
from ..models.frozen import branch_logps
from ..models.reference import make_reference
from ..options import option
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Collator, Example
from ..trainer.base import PostTrainer
from ..trainer.config import ReferenceOptions
from ..trainer.loss_output import Losses
from . import METHODS
from .kto_pairing import RunningMean, add_mismatches
from .rules import UNPAIRED_LOSSES

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(ReferenceOptions):
    """Options of `KTOTrainer`.

    The options of `ReferenceOptions`, `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        disable_dropout: Set all dropout probabilities of the policy to 0, so that it initially equals its reference.
        beta: Strength of the regularization toward the reference.
        loss_type: Name of the loss: kto, apo_zero_unpaired (without the KL estimate), or bco (with the running mean of
            rewards in place of the KL).
        desirable_weight: Weight of desirable rows. auto starts from 1 and raises it until both classes have the same
            total weight.
        undesirable_weight: Weight of undesirable rows, a number or auto, see desirable_weight.

    Example:
        ```python
        from hf_posttrain import KTOConfig

        args = KTOConfig(output_dir="outputs/kto", beta=0.05, desirable_weight="auto")
        ```
    """

    method: ClassVar = METHODS["kto"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(
        True, "Set all dropout probabilities of the policy to 0, so that it initially equals its reference."
    )
    beta: float = option(0.1, "Strength of the regularization toward the reference.")
    loss_type: str = option(
        "kto",
        "Name of the loss: kto, apo_zero_unpaired (without the KL estimate), or bco (with the running mean of rewards "
        "in place of the KL).",
        choices=UNPAIRED_LOSSES,
    )
    desirable_weight: float | str = option(
        1.0,
        "Weight of desirable rows. auto starts from 1 and raises it until both classes have the same total weight.",
    )
    undesirable_weight: float | str = option(1.0, "Weight of undesirable rows, a number or auto, see desirable_weight.")


@dataclass
class KTOBatch(MicroBatch):
    """A micro-batch of unpaired feedback."""

    label: Tensor = None  # type: ignore[assignment]  # bool [B], True for desirable
    pairs: Deferred | None = None  # examples with y and y', if the loss uses the KL
    kl: Tensor = None  # type: ignore[assignment]  # [B], log-ratio of y', or 0
    shift: Tensor = None  # type: ignore[assignment]  # scalar, subtracted from log-ratios: the mean KL, or delta of BCO
    share: Tensor | None = None  # scalar, weight of this micro-batch in the metrics of the window


class KTOCollator(Collator):
    """Lays out the completions y. If the rows have mismatched completions, `pairs` keeps the examples with y and y'."""

    batch_class = KTOBatch

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Lay out prepared rows."""
        batch = super().__call__(rows)
        if "mismatch_ids" not in rows[0]:
            return batch
        pairs = []
        for row in rows:
            completions = [Branch(row["completion_ids"]), Branch(row["mismatch_ids"])]
            pairs.append(Example(row["prompt_ids"], completions, images=row.get("images") or ()))
        return batch.replace(pairs=Deferred(pairs))


def resolve_class_weights(rows: AnyDataset | None, args: KTOConfig) -> tuple[float, float]:
    """Return the weights of desirable and undesirable rows.

    Raises:
        InputError: A weight is `auto`, and all labels are the same.
    """
    labels = rows["label"] if isinstance(rows, datasets.Dataset) and "label" in rows.column_names else None
    return class_weights(args.desirable_weight, args.undesirable_weight, labels)


class KTOTrainer(PostTrainer):
    """Trainer for Kahneman-Tversky optimization (KTO) of a causal language model.

    Rows have `prompt`, `completion` and `label`. A row with `prompt`, `chosen` and `rejected` becomes two rows.
    `compute_metrics` receives as predictions the log-probabilities [B, 2] (policy, reference), and as label_ids the
    labels [B].

    Args:
        *args: Positional arguments of `PostTrainer`.
        ref_model: Reference model, or its name or folder. None means the policy at the time when the trainer is built.
        **kwargs: Keyword arguments of `PostTrainer`.

    Raises:
        InputError: `ref_model` shares trained weights with the policy.

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import KTOConfig, KTOTrainer

        rows = [
            {"prompt": "2 + 2 =", "completion": " 4", "label": True},
            {"prompt": "3 + 4 =", "completion": " 1", "label": False},
        ]
        trainer = KTOTrainer(
            model="Qwen/Qwen3-0.6B",
            args=KTOConfig(output_dir="outputs/kto", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
        ```
    """

    config_class = KTOConfig
    collator_class = KTOCollator

    def __init__(self, *args: Any, ref_model: nn.Module | str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_dataset_ready(self.train_dataset)
        self.reference = make_reference(self, ref_model, self.reference_batches)
        self.delta = self.stateful["mean_reward"] = RunningMean(self.accelerator)
        self.eval_values: list[Tensor] = []  # log-ratio, label and KL of each evaluated row, [B, 3]
        self.add_callback(self.delta)

    @classmethod
    def prepare_rows(  # type: ignore[override]
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: KTOConfig, name: str
    ) -> Any:
        """Return tokenized rows, each with the completion y' of its partner in `mismatch_ids`."""
        if "mismatch_ids" in (rows.column_names or ()):
            return rows
        rows = super().prepare_rows(rows, tokenizer, args, name)
        return add_mismatches(rows, args.max_length, args.seed, name) if args.loss_type == "kto" else rows

    @classmethod
    def check_rows(  # type: ignore[override]
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: KTOConfig, name: str
    ) -> None:
        """Check prepared rows.

        Raises:
            InputError: A class weight is `auto`, and all labels of the training rows are the same.
        """
        super().check_rows(rows, tokenizer, args, name)
        if name.startswith("train"):
            resolve_class_weights(rows, args)

    def prepare_new_dataset(self) -> None:
        """Prepare a replaced training dataset, and update the class weights."""
        super().prepare_new_dataset()
        self.on_dataset_ready(self.train_dataset)
        labeled = "label" in (getattr(self.train_dataset, "column_names", None) or ())  # in rounds the rows are prompts
        if labeled and "auto" in (self.args.desirable_weight, self.args.undesirable_weight):
            logger.info("class weights: desirable %.3g, undesirable %.3g", *self.class_weights)

    def on_dataset_ready(self, rows: AnyDataset | None) -> None:
        """Set the weights of both classes."""
        self.class_weights = resolve_class_weights(rows, self.args)

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the example of a row, with its completion y and its label."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])], {"label": bool(row["label"])})]

    # ---- the KL of a window

    def prepare_window(self, batches: list[KTOBatch]) -> list[KTOBatch]:  # type: ignore[override]
        """Return the micro-batches with the reference scores and the shift of the window."""
        # First pass, without gradient: the reference scores y of every micro-batch. If the loss uses the KL, policy and
        # reference also score y'. In the second pass (`losses`, with gradient) the policy then scores only y.
        batches = [self.score_reference(self.model_wrapped, self._prepare_inputs(batch)) for batch in batches]
        # The shift is one number for all micro-batches and ranks. It is delta of BCO, or the mean KL, which the loss
        # clamps at 0.
        if self.args.loss_type == "bco":
            shift = self.delta.mean.to(self.accelerator.device, torch.float32)
        else:
            kl = torch.cat([b.kl for b in batches])
            weights = torch.cat([self.weights(b) for b in batches])
            total, count = self.accelerator.reduce(torch.stack([(kl * weights).sum(), weights.sum()]), "sum")
            shift = total / count.clamp(min=1)  # in rounds a window may have no rows
        # the metrics of the shift count once per window
        share = torch.full_like(shift, 1 / len(batches))
        return [batch.replace(shift=shift, share=share) for batch in batches]

    def score_reference(self, model: nn.Module, batch: KTOBatch) -> KTOBatch:
        """Return the batch with the reference scores of y and y', `ref_logps` [B, 1 or 2], and with `kl` [B]."""
        if batch.pairs is None:
            ref = self.reference.logps(model, batch)
            return batch.replace(ref_logps=ref, kl=torch.zeros_like(ref[:, 0]))
        mismatches = self._lay_out(batch.pairs, first=1)
        ref = self.reference.logps(model, batch, self.reference_batches(batch, mismatches))
        with self.accelerator.autocast():
            mismatch = branch_logps(model, mismatches)
        return batch.replace(ref_logps=ref, kl=mismatch - ref[:, 1])

    def reference_batches(self, batch: KTOBatch, mismatches: MicroBatch | None = None) -> list[MicroBatch]:
        """Return the batches that the reference scores for training, with y and, if there is one, y' of each row.

        In half precision y and y' are in separate batches, like those that the policy scores. Products of other shapes
        are rounded differently, and the policy would not be equal to its reference at the start. In float32 both share
        one prompt, which is processed once.

        Args:
            batch: A micro-batch of y.
            mismatches: The batch of y', if it has been laid out before.
        """
        if batch.pairs is None:
            return [batch]
        if self.is_float32:
            return [self.both_completions(batch)]
        return [batch, mismatches or self._lay_out(batch.pairs, first=1)]

    def both_completions(self, batch: KTOBatch) -> MicroBatch:
        """Return the batch with y and, if there is one, y' of each row after a shared prompt."""
        return batch if batch.pairs is None else self._lay_out(batch.pairs, first=0)

    def _lay_out(self, pairs: Deferred, first: int) -> MicroBatch:
        """Return the batch of the examples without the completions before number `first`."""
        examples = [replace(example, branches=example.branches[first:]) for example in pairs.items]
        return self._prepare_inputs(self.data_collator.lay_out(examples))

    # ---- losses

    def prepare_evaluation(self) -> None:
        """Discard the values of an earlier evaluation."""
        self.eval_values = []

    def losses(self, model: nn.Module, batch: KTOBatch) -> Losses:  # type: ignore[override]
        """Return the loss of each row with its class weight, [B]."""
        scored: MicroBatch = batch
        # Evaluation has no backward that requires the KL first, so each model scores y and y' in one forward pass.
        if evaluating := batch.shift is None:
            scored = self.both_completions(batch)
            batch = batch.replace(ref_logps=self.reference.logps(model, batch, [scored]))
        scores = self.score(model, scored, LogProb(scored.targets))
        logps = scored.per_branch(scores.value).view(len(batch.index), -1)
        lengths = scored.per_branch(torch.ones_like(scores.value)).view_as(logps)
        # The window of an evaluation is the whole dataset. The shift here is that of the batch, and `finish_metrics`
        # computes the loss again with the exact shift.
        if evaluating:
            assert batch.ref_logps is not None
            kl = (logps - batch.ref_logps)[:, 1:].sum(1)
            batch = batch.replace(kl=kl, shift=self.delta.mean.to(kl) if self.args.loss_type == "bco" else kl.mean())
        assert batch.ref_logps is not None
        logps = logps[:, 0]
        ref = batch.ref_logps[:, 0]
        label = batch.label
        self.reference.check_start(logps, ref, lengths[:, 0], batch.index)

        log_ratio = logps - ref
        values = self.row_losses(log_ratio, label, batch.shift)
        weights = self.weights(batch)
        if logps.requires_grad:
            self.delta.add(self.args.beta * log_ratio, weights)
        else:
            values_of_rows = torch.stack([log_ratio, label.to(log_ratio), batch.kl], dim=1)
            self.eval_values.append(values_of_rows[weights > 0].cpu())
        metrics = self._metrics(logps, log_ratio, batch, weights)
        predictions = torch.stack([logps, ref], dim=1).detach()
        return Losses(values, weights, metrics, scores.router_logits, predictions, label)

    def row_losses(self, log_ratio: Tensor, label: Tensor, shift: Tensor) -> Tensor:
        """Return the loss of each row with its class weight, [B].

        Args:
            log_ratio: Log-ratios of policy and reference, [B].
            label: True for desirable rows, [B].
            shift: Estimate of the KL, which is clamped here, or delta of BCO; a scalar.
        """
        if self.args.loss_type == "kto":
            shift = shift.clamp(min=0)
        losses = UNPAIRED[self.args.loss_type](log_ratio, label, shift, self.args.beta)
        desirable, undesirable = self.class_weights
        return losses * torch.where(label, desirable, undesirable)

    def _metrics(
        self, logps: Tensor, log_ratio: Tensor, batch: KTOBatch, weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return the metrics of a micro-batch."""
        label = batch.label
        shift = batch.shift
        share = batch.share
        desirable = weights * label
        undesirable = weights * ~label
        rewards = self.args.beta * log_ratio.detach()
        metrics: dict[str, tuple[Tensor, Tensor | None]] = {
            "rewards/chosen": (rewards, desirable),
            "rewards/rejected": (rewards, undesirable),
            "rewards/accuracies": (torch.where(label, rewards > 0, rewards < 0).float(), weights),
            "logps/chosen": (logps, desirable),
            "logps/rejected": (logps, undesirable),
            "logps/chosen_change": (log_ratio, desirable),
        }
        if self.args.loss_type == "kto":
            metrics |= {"kl": (shift, share), "kl_clamped": ((shift < 0).float(), share)}
        if self.args.loss_type == "bco":
            metrics["delta"] = (shift, share)
        return metrics

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Add the margin of the class means. In evaluation compute the loss with the KL of the whole dataset."""
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if stage == "eval" and self.eval_values:
            parts = gather_object(self.eval_values) if self.accelerator.num_processes > 1 else self.eval_values
            log_ratio, label, kl = torch.cat(parts).double().unbind(1)
            if self.args.loss_type == "kto":
                metrics |= {"kl": kl.mean().item(), "kl_clamped": float(kl.mean() < 0)}
            shift = self.delta.mean if self.args.loss_type == "bco" else kl.mean()
            metrics["loss"] = self.row_losses(log_ratio, label.bool(), shift.to(log_ratio)).mean().item()
        return metrics
