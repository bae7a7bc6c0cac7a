"""Contrastive preference optimisation: pairs without a reference, and the NLL of the chosen answer.

    loss = mean over pairs of  -log s(beta (log pi(chosen) - log pi(rejected)))  +  cpo_alpha * NLL(chosen) / |chosen|

Log-probabilities are summed over trained tokens; the second term keeps the chosen answers likely.
Source: Xu et al. 2024 (arXiv 2401.08417); the NLL is taken per token, as the authors' code does.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..batching.micro_batch import MicroBatch
from ..losses.preference import PAIRED, PairedOptions, Pairs
from ..options import option
from ..scoring.head import LogProb
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_output import Losses
from . import METHODS
from .dpo import pair_examples, pair_metrics


@dataclass
class CPOConfig(PostTrainConfig):
    """Options of CPO; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["cpo"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set every dropout of the policy to 0.")
    beta: float = option(0.1, "How steeply the preference loss falls with the difference of the log-probabilities.")
    cpo_alpha: float = option(1.0, "Weight of the chosen answer's NLL per token; 0 leaves it out.")


class CPOTrainer(PostTrainer):
    """CPO of a causal LM. Rows: prompt, chosen, rejected.

    `compute_metrics` gets log-probabilities [B, 2] (chosen, rejected) and, as label_ids, trained lengths [B, 2].
    """

    config_class = CPOConfig
    examples = staticmethod(pair_examples)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """One loss for each pair, [B]."""
        scores = self.score(model, batch, LogProb(batch.targets))
        logps = batch.per_branch(scores.value).view(-1, 2)
        lengths = batch.per_branch(torch.ones_like(scores.value)).view(-1, 2)

        # DPO's loss with a reference to which all answers are equally likely
        pairs = Pairs(logps, torch.zeros_like(logps), lengths)
        options = PairedOptions(self.args.beta)
        nll = PAIRED["sft"](pairs, options)
        values = PAIRED["sigmoid"](pairs, options) + self.args.cpo_alpha * nll
        chosen, rejected = (self.args.beta * logps.detach()).unbind(1)
        metrics = pair_metrics(chosen, rejected, logps.detach()) | {"nll_loss": (nll, None)}
        return Losses(values, self.weights(batch), metrics, scores.router_logits, logps.detach(), lengths)
