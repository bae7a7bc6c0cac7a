"""Kahneman-Tversky optimisation: single answers, each labelled desirable or not.

    r = log pi(y|x) - log ref(y|x) of a row's own completion, summed over its tokens
    KL = max(0, mean over the window of log pi(y'|x) - log ref(y'|x)), y' the completion of another prompt's row
    loss = mean over rows of  w_D (1 - s(beta (r - KL))) if desirable,  w_U (1 - s(beta (KL - r))) if not

The window is all micro-batches of an optimizer step on all ranks, so the loss does not depend on the batch size, which
may be 1, nor on the mix of labels in a batch. In evaluation it is the whole set. y' is fixed by a seeded permutation.
The KL of a window must be known before its first backward, so y' is scored beforehand, without gradient.
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
from ..capabilities import Feature, conflict
from ..data.dataset_type import AnyDataset
from ..data.row_schema import class_weights
from ..errors import InputError
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
from .kto_pairing import RunningMean, find_partners

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(ReferenceOptions):
    """Options of KTO; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["kto"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(
        True, "Set every dropout of the policy to 0, so that it starts equal to its reference."
    )
    beta: float = option(0.1, "Strength of the pull to the reference.")
    loss_type: str = option(
        "kto", "kto, apo_zero_unpaired (no KL estimate) or bco (the running mean of rewards in place of the KL)."
    )
    desirable_weight: float | str = option(
        1.0, "Weight of desirable rows; auto: as many as needed for both classes to weigh the same, never below 1."
    )
    undesirable_weight: float | str = option(1.0, "Weight of undesirable rows; auto as above.")


@dataclass
class KTOBatch(MicroBatch):
    """A micro-batch of unpaired feedback."""

    label: Tensor = None  # type: ignore[assignment]  # bool [B], desirable or not
    pairs: Deferred | None = None  # examples with the completion and the mismatched one, where the loss has a KL
    kl: Tensor = None  # type: ignore[assignment]  # [B], log-ratio of the mismatched completion, 0 without one
    shift: Tensor = None  # type: ignore[assignment]  # scalar, what the loss subtracts from a log-ratio: the mean KL, or BCO's delta
    share: Tensor | None = None  # scalar, share of this micro-batch in the window


class KTOCollator(Collator):
    """Lays out each row's own completion; where there is a KL estimate, `pairs` has the mismatched one as well."""

    batch_class = KTOBatch

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Lay out prepared rows."""
        batch = super().__call__(rows)
        if "mismatch_ids" not in rows[0]:
            return batch
        pairs = []
        for row in rows:
            answers = [Branch(row["completion_ids"]), Branch(row["mismatch_ids"])]
            pairs.append(Example(row["prompt_ids"], answers, pictures=row.get("images") or ()))
        return batch.replace(pairs=Deferred(pairs))


def resolve_class_weights(rows: AnyDataset | None, args: KTOConfig) -> tuple[float, float]:
    """Return the weights of desirable and undesirable rows. Raises InputError where `auto` finds labels of one kind."""
    labels = rows["label"] if rows is not None and "label" in (rows.column_names or ()) else None
    return class_weights(args.desirable_weight, args.undesirable_weight, labels)


class KTOTrainer(PostTrainer):
    """KTO of a causal LM; further argument: `ref_model`. Rows: prompt, completion, label; or pairs, split in two.

    `compute_metrics` gets log-probabilities [B, 2] (policy, reference) and, as label_ids, the labels [B].
    """

    config_class = KTOConfig
    collator_class = KTOCollator

    def __init__(self, *args: Any, ref_model: nn.Module | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.learn_of_rows(self.train_dataset)
        self.reference = make_reference(self, ref_model, self.reference_batches)
        self.delta = self.stateful["mean_reward"] = RunningMean(self.accelerator)
        self.evaluated: list[Tensor] = []
        self.add_callback(self.delta)

    @classmethod
    def prepare_rows(cls, rows: Any, tokenizer: PreTrainedTokenizerBase, args: Any, name: str) -> Any:
        """Tokenised rows, each with the mismatched completion of its partner. Raises InputError for a stream."""
        if not isinstance(rows, datasets.Dataset):
            raise InputError(f"{name}: {conflict(Feature.MISMATCHED_PAIRS, Feature.STREAM)}")
        if "mismatch_ids" in rows.column_names:
            return rows
        rows = super().prepare_rows(rows, tokenizer, args, name)
        if args.loss_type != "kto":
            return rows
        answers = rows.select(find_partners(rows, args.seed, name))["completion_ids"]
        if args.max_length is not None:  # cut to fit behind this prompt, one token at least
            space = [max(1, args.max_length - len(prompt)) for prompt in rows["prompt_ids"]]
            answers = [ids[:most] for ids, most in zip(answers, space, strict=True)]
        return rows.add_column("mismatch_ids", list(answers))

    @classmethod
    def check_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> None:
        """As PostTrainer has it. Raises InputError for weights that want labels of both kinds."""
        super().check_rows(rows, tokenizer, args, name)
        if name.startswith("train"):
            resolve_class_weights(rows, args)

    def prepare_replaced(self) -> None:
        """As PostTrainer has it; the classes may be other ones."""
        super().prepare_replaced()
        self.learn_of_rows(self.train_dataset)
        labelled = "label" in (getattr(self.train_dataset, "column_names", None) or ())  # in rounds they are prompts
        if labelled and "auto" in (self.args.desirable_weight, self.args.undesirable_weight):
            logger.info("class weights: desirable %.3g, undesirable %.3g", *self.class_weights)

    def learn_of_rows(self, rows: AnyDataset | None) -> None:
        """The weights of both classes."""
        self.class_weights = resolve_class_weights(rows, self.args)

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """The row's own completion, and its label."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])], {"label": bool(row["label"])})]

    # ---- the KL of a window

    def prepare_window(self, batches: list[KTOBatch]) -> list[KTOBatch]:  # type: ignore[override]
        """Each micro-batch with the reference's scores and the shift of the window."""
        # First pass, without gradient: the reference scores y; where the loss has a KL, policy and reference score y'
        # too, of every micro-batch. So the second pass (`losses`, with gradient) asks the policy for y alone.
        batches = [self.estimate(self.model_wrapped, self._prepare_inputs(batch)) for batch in batches]
        # One number for all micro-batches and ranks: BCO's delta, or the mean KL, which the loss clamps at 0.
        if self.args.loss_type == "bco":
            shift = self.delta.mean.to(self.accelerator.device, torch.float32)
        else:
            kl = torch.cat([b.kl for b in batches])
            weights = torch.cat([self.weights(b) for b in batches])
            total, count = self.accelerator.reduce(torch.stack([(kl * weights).sum(), weights.sum()]), "sum")
            shift = total / count.clamp(min=1)  # in rounds a window may have no row
        # its metrics count once for each window
        share = torch.full_like(shift, 1 / len(batches))
        return [batch.replace(shift=shift, share=share) for batch in batches]

    def estimate(self, model: nn.Module, batch: KTOBatch) -> KTOBatch:
        """Add `ref_logps` [B, 1 or 2], the reference's scores of y and y'; `kl` [B], the log-ratios of y' (or 0)."""
        if batch.pairs is None:
            ref = self.reference.logps(model, batch)
            return batch.replace(ref_logps=ref, kl=torch.zeros_like(ref[:, 0]))
        alone = self._lay_out(batch.pairs, first=1)
        ref = self.reference.logps(model, batch, self.reference_batches(batch, alone))
        with self.accelerator.autocast():
            mismatch = branch_logps(model, alone)
        return batch.replace(ref_logps=ref, kl=mismatch - ref[:, 1])

    def reference_batches(self, batch: KTOBatch, alone: MicroBatch | None = None) -> list[MicroBatch]:
        """The batches that the reference scores for training: y and y' of each row, where there is a y'.

        In half precision y and y' by themselves, as the policy scores them: in other shapes products round otherwise,
        and the policy would not begin at its reference. In float32 both behind one prompt, which is read once.
        alone: the batch of y', if it was laid out already.
        """
        if batch.pairs is None:
            return [batch]
        if self.exact:
            return [self.both_completions(batch)]
        return [batch, alone or self._lay_out(batch.pairs, first=1)]

    def both_completions(self, batch: KTOBatch) -> MicroBatch:
        """Return each row's own completion and the mismatched one, where there is one, after one prompt."""
        return batch if batch.pairs is None else self._lay_out(batch.pairs, first=0)

    def _lay_out(self, pairs: Deferred, first: int) -> MicroBatch:
        """The prompts with their completions from number `first` on."""
        examples = [replace(one, branches=one.branches[first:]) for one in pairs.items]
        return self._prepare_inputs(self.data_collator.lay_out(examples))

    # ---- losses

    def prepare_evaluation(self) -> None:
        """Forget what an earlier evaluation has left."""
        self.evaluated = []

    def losses(self, model: nn.Module, batch: KTOBatch) -> Losses:  # type: ignore[override]
        """One weighted loss for each row, [B]."""
        part: MicroBatch = batch
        # In evaluation no backward waits for the KL, so both completions are scored in one pass of each model.
        if evaluating := batch.shift is None:
            part = self.both_completions(batch)
            batch = batch.replace(ref_logps=self.reference.logps(model, batch, [part]))
        scores = self.score(model, part, LogProb(part.targets))
        logps = part.per_branch(scores.value).view(len(batch.index), -1)
        lengths = part.per_branch(torch.ones_like(scores.value)).view_as(logps)
        # The window of an evaluation is the whole set: this shift is of the batch, and `finish_metrics` takes the loss
        # again with the exact one.
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
            evaluated = torch.stack([log_ratio, label.to(log_ratio), batch.kl], dim=1)
            self.evaluated.append(evaluated[weights > 0].cpu())
        metrics = self._metrics(logps, log_ratio, batch, weights)
        predictions = torch.stack([logps, ref], dim=1).detach()
        return Losses(values, weights, metrics, scores.router_logits, predictions, label)

    def row_losses(self, log_ratio: Tensor, label: Tensor, shift: Tensor) -> Tensor:
        """The loss of each row with its class weight, [B]; shift: KL estimate (clamped here) or BCO's delta."""
        if self.args.loss_type == "kto":
            shift = shift.clamp(min=0)
        losses = UNPAIRED[self.args.loss_type](log_ratio, label, shift, self.args.beta)
        desirable, undesirable = self.class_weights
        return losses * torch.where(label, desirable, undesirable)

    def _metrics(
        self, logps: Tensor, log_ratio: Tensor, batch: KTOBatch, weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
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
        """The margin of the class means; in evaluation the loss again, with the KL of the whole set."""
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if stage == "eval" and self.evaluated:
            parts = gather_object(self.evaluated) if self.accelerator.num_processes > 1 else self.evaluated
            log_ratio, label, kl = torch.cat(parts).double().unbind(1)
            if self.args.loss_type == "kto":
                metrics |= {"kl": kl.mean().item(), "kl_clamped": float(kl.mean() < 0)}
            shift = self.delta.mean if self.args.loss_type == "bco" else kl.mean()
            metrics["loss"] = self.row_losses(log_ratio, label.bool(), shift.to(log_ratio)).mean().item()
        return metrics
