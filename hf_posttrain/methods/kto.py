"""Kahneman-Tversky optimisation: single answers, each labelled desirable or not.

    r = log pi(y|x) - log ref(y|x) of a row's own completion, summed over its tokens
    KL = max(0, mean over the window of log pi(y'|x) - log ref(y'|x)), y' the completion of another prompt's row
    loss = mean over rows of  w_D (1 - s(beta (r - KL))) if desirable,  w_U (1 - s(beta (KL - r))) if not

The window is all micro-batches of an optimizer step on all ranks, so the loss does not depend on the batch size, which
may be 1, nor on the mix of labels in a batch. In evaluation it is the whole set. y' is fixed by a seeded permutation.

The KL of a window must be known before its first backward. So y' is scored beforehand, without gradient; or beside y in
one pass [prompt, y, y'], where that is cheaper: in evaluation, and in a window of one micro-batch if prompts are long.
"""

import logging
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..data.packing import lengths_of
from ..errors import InputError
from ..losses import UNPAIRED
from ..models.reference import Reference
from ..models.score_cache import branch_logps
from ..scoring import layouts
from ..scoring.layouts import Branch, Example, per_branch
from ..scoring.tiles import LogProb
from ..trainer import rule_table as rules
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_units import Losses
from .kto_pairing import RunningMean, class_weights, partners

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(PostTrainConfig):
    """Options of KTO; every other field of TrainingArguments and PostTrainConfig works as well."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    disable_dropout: bool = True
    """Set every dropout of the policy to 0, so that it starts equal to its reference."""
    beta: float = 0.1
    """Strength of the pull to the reference."""
    loss_type: str = "kto"
    """kto, apo_zero_unpaired (no KL estimate) or bco (the running mean of rewards in place of the KL)."""
    desirable_weight: float | str = 1.0
    """Weight of desirable rows; auto: as many as needed for both classes to weigh the same, never below 1."""
    undesirable_weight: float | str = 1.0
    """Weight of undesirable rows; auto as above."""
    precompute_ref_log_probs: bool | None = None
    """Score the data with the reference once, before training, into a cache on disk. True: and keep no second model
    while training; None: where more than one pass over the data is planned."""
    precompute_ref_batch_size: int | None = None
    """Batch size of that; None: per_device_eval_batch_size."""

    def __post_init__(self):
        rules.check("kto", self)
        super().__post_init__()


class KTOTrainer(PostTrainer):
    """KTO of a causal LM; further argument: `ref_model`. Rows: prompt, completion, label; or pairs, split in two.

    `compute_metrics` gets log-probabilities [B, 2] (policy, reference) and, as label_ids, the labels [B].
    """

    method = "kto"
    unit = "examples"
    config_class = KTOConfig

    def __init__(self, *args: Any, ref_model: nn.Module | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        labels = None if self.train_dataset is None else self.train_dataset["label"]
        self.class_weights = class_weights(self.args.desirable_weight, self.args.undesirable_weight, labels)
        self.reference = Reference(self, ref_model)
        self.delta = RunningMean(self.accelerator)
        self.one_pass = self.args.disable_dropout and self.router_coef == 0 and _has_long_prompts(self.train_dataset)
        if self.one_pass and self.args.gradient_accumulation_steps == 1:
            logger.info("KL: scored in one pass with the rows' own completions, since prompts are long")
        self.evaluated: list[Tensor] = []
        self.add_callback(self.delta)

    @classmethod
    def prepare_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> Any:
        """Tokenised rows, each with the mismatched completion of its partner. Raises InputError for a stream."""
        if not isinstance(rows, datasets.Dataset):
            raise InputError(f"{name}: KTO needs a data set of known length, not a stream: rows are paired with others")
        if "mismatch_ids" in rows.column_names:
            return rows
        rows = super().prepare_rows(rows, tokenizer, args, name)
        if args.loss_type != "kto":
            return rows
        answers = rows.select(partners(rows, args.seed, name))["completion_ids"]
        mismatched = [
            _cut(ids, prompt, args.max_length) for ids, prompt in zip(answers, rows["prompt_ids"], strict=True)
        ]
        return rows.add_column("mismatch_ids", mismatched)

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: KTOConfig) -> dict[str, Any]:
        """Rows -> a batch of own completions, `label` [B], and where there is a KL estimate two more batches:

        `mismatch` with the partner's completion, and `pair` with own and partner's completion.
        """
        batch: dict[str, Any] = {"index": torch.tensor([row["index"] for row in rows])}
        batch["label"] = torch.tensor([bool(row["label"]) for row in rows])
        own = [Example(row["prompt_ids"], [Branch(row["completion_ids"])]) for row in rows]
        batch |= layouts.collate(own, layout)
        if "mismatch_ids" in rows[0]:
            others = [Branch(row["mismatch_ids"]) for row in rows]
            mismatched = [Example(row["prompt_ids"], [branch]) for row, branch in zip(rows, others, strict=True)]
            batch["mismatch"] = layouts.collate(mismatched, layout)
            pairs = [Example(one.prompt, [*one.branches, branch]) for one, branch in zip(own, others, strict=True)]
            batch["pair"] = layouts.collate(pairs, layout)
        if "ref_logps" in rows[0]:
            batch["ref_logps"] = torch.tensor([row["ref_logps"] for row in rows])
        return batch

    def prepare_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each micro-batch with the reference's scores and the shift of the window, unless `losses` finds it."""
        batches = [self._prepare_inputs(batch) for batch in batches]
        if len(batches) == 1 and self.one_pass and self.data_collator.keywords["layout"] == "shared":
            return batches
        batches = [self.estimate(self.model_wrapped, batch) for batch in batches]
        shift = self._window_shift(batches)
        return [batch | {"shift": shift} for batch in batches]

    def _window_shift(self, batches: list[dict]) -> Tensor:
        """BCO's delta, or the mean KL over the window and all ranks, not clamped: a scalar."""
        if self.args.loss_type == "bco":
            return self.delta.mean.to(self.accelerator.device, torch.float32)
        kl, weights = (torch.cat(parts) for parts in zip(*((b["kl"], self.weights(b)) for b in batches), strict=True))
        total, count = self.accelerator.reduce(torch.stack([(kl * weights).sum(), weights.sum()]), "sum")
        return total / count

    def estimate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Add `ref_logps` [B, 1 or 2] and `kl` [B], the log-ratios of the mismatched completions (0 without)."""
        ref, size = self._reference(model, batch), len(batch["index"])
        if "mismatch" not in batch:
            return batch | {"ref_logps": ref, "kl": torch.zeros_like(ref[:, 0])}
        with self.accelerator.autocast():
            mismatch = branch_logps(model, batch["mismatch"], size, 1)[:, 0]
        return batch | {"ref_logps": ref, "kl": mismatch - ref[:, 1]}

    def _reference(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The reference's log-probabilities of the own and (for a KL estimate) the mismatched completions, [B, K]."""
        return self.reference.logps(model, batch, batch.get("pair", batch), 2 if "pair" in batch else 1)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Also forgets what an evaluation that was broken off has left."""
        self.evaluated = []
        return super().evaluation_loop(*args, **kwargs)

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """One weighted loss for each row, [B]."""
        size, label, whole = len(batch["index"]), batch["label"], "shift" not in batch
        part = batch["pair"] if whole and "pair" in batch else batch
        branches = 1 if part is batch else 2
        ref = self._reference(model, batch) if whole else batch["ref_logps"]
        scores = self.score(model, part, LogProb(layouts.targets(part)))
        logps = per_branch(scores["value"], part["owner"], size, branches)
        lengths = per_branch(torch.ones_like(scores["value"]), part["owner"], size, branches)
        if whole:
            batch = self._with_shift(batch, (logps.detach() - ref)[:, 1:])
        logps, ref = logps[:, :1], ref[:, :1]
        self.reference.check_start(logps, ref, lengths[:, :1])

        log_ratio = (logps - ref)[:, 0]
        values, weights = self.row_losses(log_ratio, label, batch["shift"]), self.weights(batch)
        if logps.requires_grad:
            self.delta.add(self.args.beta * log_ratio, weights)
        else:
            evaluated = torch.stack([log_ratio, label.to(log_ratio), batch["kl"]], dim=1)
            self.evaluated.append(evaluated[weights > 0].cpu())
        metrics = self._metrics(logps[:, 0], log_ratio, batch, weights)
        predictions = torch.cat([logps, ref], dim=1).detach()
        return Losses(values, weights, metrics, scores.get("router_logits"), predictions, label)

    def _with_shift(self, batch: dict[str, Any], kl: Tensor) -> dict[str, Any]:
        """Add `kl` [B] from the log-ratios of the mismatched completions, [B, 1] or [B, 0], and the shift.

        In evaluation that is provisional: the exact one comes when the set is through.
        """
        batch = batch | {"kl": kl.sum(1)}
        if torch.is_grad_enabled() or self.args.loss_type == "bco":
            return batch | {"shift": self._window_shift([batch])}
        return batch | {"shift": batch["kl"].mean()}

    def row_losses(self, log_ratio: Tensor, label: Tensor, shift: Tensor) -> Tensor:
        """The loss of each row with its class weight, [B]; shift: KL estimate (clamped here) or BCO's delta."""
        if self.args.loss_type == "kto":
            shift = shift.clamp(min=0)
        losses = UNPAIRED[self.args.loss_type](log_ratio, label, shift, self.args.beta)
        desirable, undesirable = self.class_weights
        return losses * torch.where(label, desirable, undesirable)

    def _metrics(
        self, logps: Tensor, log_ratio: Tensor, batch: dict, weights: Tensor
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        label, shift = batch["label"], batch["shift"]
        desirable, undesirable = weights * label, weights * ~label
        rewards = self.args.beta * log_ratio.detach()
        metrics = {
            "rewards/chosen": (rewards, desirable), "rewards/rejected": (rewards, undesirable),
            "rewards/accuracies": (torch.where(label, rewards > 0, rewards < 0).float(), weights),
            "logps/chosen": (logps, desirable), "logps/rejected": (logps, undesirable),
            "logps/chosen_change": (log_ratio, desirable),
        }  # fmt: skip
        if self.args.loss_type == "kto":
            metrics |= {"kl": (shift, None), "kl_clamped": ((shift < 0).float(), None)}
        if self.args.loss_type == "bco":
            metrics["delta"] = (shift, None)
        return metrics

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """The margin of the class means; in evaluation the loss again, with the KL of the whole set."""
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if stage == "eval" and self.evaluated:
            parts = gather_object(self.evaluated) if self.accelerator.num_processes > 1 else self.evaluated
            log_ratio, label, kl = torch.cat(parts).double().unbind(1)
            self.evaluated = []
            if self.args.loss_type == "kto":
                metrics |= {"kl": kl.mean().item(), "kl_clamped": float(kl.mean() < 0)}
            shift = self.delta.mean if self.args.loss_type == "bco" else kl.mean()
            metrics["loss"] = self.row_losses(log_ratio, label.bool(), shift.to(log_ratio)).mean().item()
        return metrics


def _has_long_prompts(rows: Any) -> bool:
    """Does reading the prompts twice cost more than a backward through the mismatched completions, 2 forwards?"""
    if rows is None or "mismatch_ids" not in rows.column_names:
        return False
    prompts, others = (lengths_of(rows, name).sum() for name in ("prompt_ids", "mismatch_ids"))
    return bool(prompts > 2 * others)


def _cut(ids: list[int], prompt: list[int], max_length: int | None) -> list[int]:
    """The mismatched completion, cut to fit behind this prompt, one token at least."""
    return ids if max_length is None else ids[: max(1, max_length - len(prompt))]
