"""Reward modeling: a sequence classifier with one label learns which of two answers is better.

    r(x, y) = output of the score layer at the last token of prompt and answer
    loss = mean over pairs of  -log s(r(chosen) - r(rejected) - margin) + center_rewards_coefficient (r_c + r_r)^2

The first term is the negative log-likelihood of the Bradley-Terry model (Ouyang et al. 2022, arXiv 2203.02155, eq. 1),
with the margin of Llama 2 (arXiv 2307.09288, eq. 2). The second term keeps the mean of the rewards near 0 (Eisenstein
et al. 2023, arXiv 2312.09244, eq. 2). Both answers are scored in one forward pass after a shared prompt.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..batching.micro_batch import MicroBatch
from ..options import option
from ..scoring.head import Reward
from ..scoring.layouts import Collator, Example, branch_with_reward
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_output import Losses
from . import METHODS
from .dpo import reward_metrics


@dataclass
class RewardConfig(PostTrainConfig):
    """Options of `RewardTrainer`.

    The options of `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        disable_dropout: Set all dropout probabilities of the model to 0.
        center_rewards_coefficient: Weight of the squared sum of both rewards, which keeps their mean near 0. None
            disables the term.

    Example:
        ```python
        from hf_posttrain import RewardConfig

        args = RewardConfig(output_dir="outputs/rm", center_rewards_coefficient=0.01)
        ```
    """

    method: ClassVar = METHODS["rm"]
    learning_rate: float = option(1e-4, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set all dropout probabilities of the model to 0.")
    center_rewards_coefficient: float | None = option(
        None,
        "Weight of the squared sum of both rewards, which keeps their mean near 0. None disables the term.",
    )


@dataclass
class RewardBatch(MicroBatch):
    """A micro-batch of preference pairs with margins."""

    margin: Tensor = None  # type: ignore[assignment]  # [B], smallest difference of the rewards


class RewardCollator(Collator):
    """Lays out pairs with their margins."""

    batch_class = RewardBatch


class RewardTrainer(PostTrainer):
    """Trainer for a reward model, a sequence classifier with one label.

    Rows have `prompt`, `chosen` and `rejected`, and optionally `margin`. The trainer takes the arguments of
    `PostTrainer`; a language model that is passed by name gets a new score layer. `compute_metrics` receives as
    predictions the rewards [B, 2] (chosen, rejected), and as label_ids the margins [B].

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import RewardConfig, RewardTrainer

        rows = [
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            {"prompt": "3 + 4 =", "chosen": " 7", "rejected": " 1"},
        ]
        trainer = RewardTrainer(
            model="Qwen/Qwen3-0.6B",
            args=RewardConfig(output_dir="outputs/rm", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
        ```
    """

    config_class = RewardConfig
    collator_class = RewardCollator

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the example of a row, a prompt whose two branches are the chosen and the rejected answer."""
        branches = [branch_with_reward(row["chosen_ids"]), branch_with_reward(row["rejected_ids"])]
        return [Example(row["prompt_ids"], branches, {"margin": row["margin"]})]

    def losses(self, model: nn.Module, batch: RewardBatch) -> Losses:  # type: ignore[override]
        """Return the loss of each pair, [B]."""
        scores = self.score(model, batch, Reward())
        rewards = batch.per_branch(scores.value).view(-1, 2)
        chosen, rejected = rewards.unbind(1)
        values = -logsigmoid(chosen - rejected - batch.margin)
        if self.args.center_rewards_coefficient:
            values = values + self.args.center_rewards_coefficient * (chosen + rejected) ** 2

        predictions = rewards.detach()
        metrics = reward_metrics(*predictions.unbind(1))
        return Losses(values, self.weights(batch), metrics, scores.router_logits, predictions, batch.margin)
