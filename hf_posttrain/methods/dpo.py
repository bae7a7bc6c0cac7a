"""Direct preference optimisation and its family, both answers of a pair in one pass.

    a = log pi(chosen) - log ref(chosen),  c = the same of the rejected answer, summed over trained tokens
    loss = mean over pairs of  sum_i loss_weights_i * loss_type_i(a, c, lengths)  + nll_coef * NLL(chosen) / |chosen|

The losses are in `losses.preference`; the reference is the policy as it was when the trainer was built.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..losses import PAIRED, REFERENCE_FREE, PairedOptions, Pairs
from ..losses.preference import sft as chosen_nll
from ..models.reference import Reference
from ..scoring import layouts
from ..scoring.layouts import Branch, Example, per_branch
from ..scoring.tiles import LogProb
from ..trainer import rule_table as rules
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_units import Losses
from .rules import losses_of

logger = logging.getLogger(__name__)


@dataclass
class DPOConfig(PostTrainConfig):
    """Options of DPO; every other field of TrainingArguments and PostTrainConfig works as well."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    disable_dropout: bool = True
    """Set every dropout of the policy to 0, so that it starts equal to its reference."""
    beta: float | None = None
    """Strength of the pull to the reference; None: 0.1, and 2 for simpo."""
    loss_type: list[str] | str = field(default_factory=lambda: ["sigmoid"])
    """One loss, or a list of them to combine: the names in `losses.preference.PAIRED`."""
    loss_weights: list[float] | None = None
    """Weight of each loss of the list; None: all 1."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, for sigmoid (cDPO), robust (below 0.5) and exo_pair (above 0)."""
    simpo_gamma: float = 0.5
    """SimPO's target margin."""
    nll_coef: float = 0.0
    """Adds this much of the chosen answer's NLL per token: against falling chosen log-probabilities."""
    precompute_ref_log_probs: bool | None = None
    """Score the data with the reference once, before training, into a cache on disk. True: and keep no second model
    while training; None: where more than one pass over the data is planned."""
    precompute_ref_batch_size: int | None = None
    """Batch size of that; None: per_device_eval_batch_size."""

    def __post_init__(self):
        rules.check("dpo", self)
        self.loss_type = losses_of(self.loss_type)
        super().__post_init__()
        if self.beta is None:
            self.beta = 2.0 if "simpo" in self.loss_type else 0.1


class DPOTrainer(PostTrainer):
    """DPO of a causal LM; further argument: `ref_model`. Rows: prompt, chosen, rejected.

    `compute_metrics` gets log-probabilities [B, 4] (chosen, rejected, and both under the reference) and, as label_ids,
    trained lengths [B, 2].
    """

    method = "dpo"
    unit = "examples"
    config_class = DPOConfig

    def __init__(self, *args: Any, ref_model: nn.Module | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.needs_reference = not set(self.args.loss_type) <= REFERENCE_FREE
        if ref_model is not None and not self.needs_reference:
            raise InputError(f"loss_type {', '.join(self.args.loss_type)} uses no reference: drop ref_model")
        self.reference = Reference(self, ref_model) if self.needs_reference else None

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: Any) -> dict[str, Tensor]:
        """Rows of prompt_ids, chosen_ids, rejected_ids -> batch with two branches an example."""
        examples = [Example(r["prompt_ids"], [Branch(r["chosen_ids"]), Branch(r["rejected_ids"])]) for r in rows]
        batch = {"index": torch.tensor([row.get("index", -1) for row in rows]), **layouts.collate(examples, layout)}
        if "ref_logps" in rows[0]:
            batch["ref_logps"] = torch.tensor([row["ref_logps"] for row in rows])
        return batch

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """One loss for each pair, [B]."""
        size = len(batch["index"])
        ref = (
            self.reference.logps(model, batch, batch, branches=2)
            if self.reference
            else batch["index"].new_zeros(size, 2).float()
        )
        scores = self.score(model, batch, LogProb(layouts.targets(batch)))
        logps = per_branch(scores["value"], batch["owner"], size, 2)
        lengths = per_branch(torch.ones_like(scores["value"]), batch["owner"], size, 2)
        if self.reference:
            self.reference.check_start(logps, ref, lengths)

        pairs = Pairs(*logps.unbind(1), *ref.unbind(1), *lengths.unbind(1))
        options = PairedOptions(self.args.beta, self.args.label_smoothing, self.args.simpo_gamma)
        weights = self.args.loss_weights or [1.0] * len(self.args.loss_type)
        terms = [w * PAIRED[name](pairs, options) for name, w in zip(self.args.loss_type, weights, strict=True)]
        values = torch.stack(terms).sum(0)
        if self.args.nll_coef:
            values = values + self.args.nll_coef * chosen_nll(pairs, options)
        predictions = torch.cat([logps, ref], dim=1).detach()
        return Losses(
            values, self.weights(batch), self._metrics(pairs), scores.get("router_logits"), predictions, lengths
        )

    def _metrics(self, pairs: Pairs) -> dict[str, tuple[Tensor, None]]:
        """Implicit rewards beta a and beta c (reference-free losses: beta times the mean log-probability)."""
        free = not self.needs_reference
        chosen = self.args.beta * (pairs.chosen_mean if free else pairs.a).detach()
        rejected = self.args.beta * (pairs.rejected_mean if free else pairs.c).detach()
        metrics = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected,
        }  # fmt: skip
        if not free:
            metrics["logps/chosen_change"] = pairs.a
        return {name: (values, None) for name, values in metrics.items()}
