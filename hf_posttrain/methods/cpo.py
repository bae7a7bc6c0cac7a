"""Contrastive preference optimization: a preference loss without a reference, plus the NLL of the chosen answer.

    loss = mean over pairs of  -log s(beta (log pi(chosen) - log pi(rejected))) - cpo_alpha * log pi(chosen) / |chosen|

The first term is that of `loss_type` sigmoid. hinge, ipo and simpo are defined in `losses.preference`, with a reference
of probability 1. Log-probabilities are sums over trained tokens. The second term is the mean NLL per token. It keeps
the chosen answers likely. Source: Xu et al. 2024 (arXiv 2401.08417). The authors' code (ALMA) and TRL average the NLL
over all chosen tokens of a micro-batch. Here it is the mean of per-pair means, so that each pair has the same weight.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..batching.micro_batch import MicroBatch
from ..losses.names import SIMPO_GAMMA
from ..losses.preference import PAIRED, PairedOptions, Pairs, sft
from ..options import option
from ..scoring.head import LogProb
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_output import Losses
from . import METHODS
from .dpo import pair_examples, pair_metrics
from .rules import CONTRASTIVE_LOSSES


@dataclass
class CPOConfig(PostTrainConfig):
    """Options of `CPOTrainer`.

    The options of `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        disable_dropout: Set all dropout probabilities of the policy to 0.
        loss_type: Name of the preference loss: sigmoid, hinge, ipo or simpo.
        beta: Scale of the difference of the log-probabilities in the preference loss.
        simpo_gamma: Target reward margin of simpo.
        cpo_alpha: Weight of the NLL per token of the chosen answer. 0 disables the term.

    Example:
        ```python
        from hf_posttrain import CPOConfig

        args = CPOConfig(output_dir="outputs/cpo", beta=0.2, cpo_alpha=0.5)
        ```
    """

    method: ClassVar = METHODS["cpo"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set all dropout probabilities of the policy to 0.")
    loss_type: str = option(
        "sigmoid", "Name of the preference loss: sigmoid, hinge, ipo or simpo.", choices=CONTRASTIVE_LOSSES
    )
    beta: float = option(0.1, "Scale of the difference of the log-probabilities in the preference loss.")
    simpo_gamma: float = option(SIMPO_GAMMA, "Target reward margin of simpo.")
    cpo_alpha: float = option(1.0, "Weight of the NLL per token of the chosen answer. 0 disables the term.")


class CPOTrainer(PostTrainer):
    """Trainer for contrastive preference optimization (CPO) of a causal language model.

    Rows have `prompt`, `chosen` and `rejected`. The trainer takes the arguments of `PostTrainer`. `compute_metrics`
    receives as predictions the log-probabilities [B, 2] (chosen, rejected), and as label_ids the numbers of trained
    tokens [B, 2].

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import CPOConfig, CPOTrainer

        rows = [
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            {"prompt": "3 + 4 =", "chosen": " 7", "rejected": " 1"},
        ]
        trainer = CPOTrainer(
            model="Qwen/Qwen3-0.6B",
            args=CPOConfig(output_dir="outputs/cpo", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
        ```
    """

    config_class = CPOConfig
    examples = staticmethod(pair_examples)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """Return the loss of each pair, [B]."""
        scores = self.score(model, batch, LogProb(batch.targets))
        logps = batch.per_branch(scores.value).view(-1, 2)
        lengths = batch.per_branch(torch.ones_like(scores.value)).view(-1, 2)

        # DPO with a constant reference: ref_logps = 0.
        pairs = Pairs(logps, torch.zeros_like(logps), lengths)
        options = PairedOptions(self.args.beta, simpo_gamma=self.args.simpo_gamma)
        nll = sft(pairs, options)
        values = PAIRED[self.args.loss_type](pairs, options) + self.args.cpo_alpha * nll

        predictions = logps.detach()
        chosen_rewards, rejected_rewards = (self.args.beta * predictions).unbind(1)
        metrics = pair_metrics(chosen_rewards, rejected_rewards, predictions) | {"nll_loss": (nll.detach(), None)}
        return Losses(values, self.weights(batch), metrics, scores.router_logits, predictions, lengths)
