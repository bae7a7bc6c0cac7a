"""Direct preference optimisation and its family, both answers of a pair in one pass.

    a = log pi(chosen) - log ref(chosen),  c = the same of the rejected answer, summed over trained tokens
    loss = mean over pairs of  sum_i loss_weights_i * loss_type_i(a, c, lengths)  + nll_coef * NLL(chosen) / |chosen|

The losses are in `losses.preference`; the reference is the policy as it was when the trainer was built.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from ..errors import InputError
from ..losses.preference import PAIRED, PairedOptions, Pairs
from ..models.reference import make_reference
from ..monitoring.symptoms import listed
from ..options import option
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..trainer.base import PostTrainer
from ..trainer.config import ReferenceOptions
from ..trainer.loss_output import Losses
from . import METHODS
from .rules import REFERENCE_FREE_LOSSES


@dataclass
class DPOConfig(ReferenceOptions):
    """Options of DPO; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["dpo"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(
        True, "Set every dropout of the policy to 0, so that it starts equal to its reference."
    )
    beta: float | None = option(None, "Strength of the pull to the reference; None: 0.1, and 2 for simpo.")
    loss_type: list[str] | str = option(
        help="One loss, or a list of them to combine: the names in `losses.preference.PAIRED`.",
        default_factory=lambda: ["sigmoid"],
    )
    loss_weights: list[float] | None = option(None, "Weight of each loss of the list; None: all 1.")
    label_smoothing: float = option(
        0.0, "Probability that a label is wrong, for sigmoid (cDPO), robust (below 0.5) and exo_pair (above 0)."
    )
    simpo_gamma: float = option(0.5, "SimPO's target margin.")
    nll_coef: float = option(
        0.0, "Adds this much of the chosen answer's NLL per token: against falling chosen log-probabilities."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss_type = listed(self.loss_type)
        if self.beta is None:
            self.beta = 2.0 if "simpo" in self.loss_type else 0.1


def pair_examples(row: dict[str, Any]) -> list[Example]:
    """A prompt with two branches: the chosen answer and the rejected one."""
    return [Example(row["prompt_ids"], [Branch(row["chosen_ids"]), Branch(row["rejected_ids"])])]


class DPOTrainer(PostTrainer):
    """DPO of a causal LM; further argument: `ref_model`. Rows: prompt, chosen, rejected.

    `compute_metrics` gets log-probabilities [B, 4] (chosen, rejected, and both under the reference) and, as label_ids,
    trained lengths [B, 2].
    """

    config_class = DPOConfig
    examples = staticmethod(pair_examples)

    def __init__(self, *args: Any, ref_model: nn.Module | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        needs_reference = not {*self.args.loss_type} <= REFERENCE_FREE_LOSSES
        if ref_model is not None and not needs_reference:
            raise InputError(f"loss_type {', '.join(self.args.loss_type)} uses no reference: drop ref_model")
        self.reference = make_reference(self, ref_model) if needs_reference else None

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """One loss for each pair, [B]."""
        # the reference first: the policy's activations, which the backward needs, do not exist yet
        none = torch.zeros_like(batch.row, dtype=torch.float32).view(-1, 2)
        ref_logps = self.reference.logps(model, batch) if self.reference else none
        scores = self.score(model, batch, LogProb(batch.targets))
        logps = batch.per_branch(scores.value).view(-1, 2)
        lengths = batch.per_branch(torch.ones_like(scores.value)).view(-1, 2)
        if self.reference:
            self.reference.check_start(logps, ref_logps, lengths, batch.index)

        pairs = Pairs(logps, ref_logps, lengths)
        args = self.args
        options = PairedOptions(args.beta, args.label_smoothing, args.simpo_gamma)
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        terms = [w * PAIRED[name](pairs, options) for name, w in zip(args.loss_type, weights, strict=True)]
        if args.nll_coef:
            terms.append(args.nll_coef * PAIRED["sft"](pairs, options))
        predictions = torch.cat([logps, ref_logps], dim=1).detach()
        router_logits = scores.router_logits
        values = torch.stack(terms).sum(0)
        return Losses(values, self.weights(batch), self._metrics(pairs), router_logits, predictions, lengths)

    def _metrics(self, pairs: Pairs) -> dict[str, tuple[Tensor, None]]:
        """Implicit rewards beta a and beta c (reference-free losses: beta times the mean log-probability)."""
        a, c = pairs.log_ratios
        chosen, rejected = (self.args.beta * each.detach() for each in ((a, c) if self.reference else pairs.means))
        change = {"logps/chosen_change": (a, None)} if self.reference else {}
        return pair_metrics(chosen, rejected, pairs.logps) | change


def pair_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor) -> dict[str, tuple[Tensor, None]]:
    """What every method on pairs logs: rewards [B] of both answers, and their log-probabilities [B, 2]."""
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return {name: (values, None) for name, values in metrics.items()}
