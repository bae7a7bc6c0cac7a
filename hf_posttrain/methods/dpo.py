"""Direct preference optimization and related losses of preference pairs.

    a = log pi(chosen) - log ref(chosen),  c = the same for the rejected answer, summed over trained tokens
    loss = mean over pairs of  sum_i loss_weights_i * loss_type_i(a, c, lengths)  - nll_coef * log pi(chosen) / |chosen|

Both answers of a pair are scored in one forward pass. The losses are defined in `losses.preference`. By default the
reference is a frozen copy of the initial policy.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from ..batching.sequence_padding import positions_in_sequence
from ..errors import InputError
from ..losses.names import DISCOPOP_TAU, F_DIVERGENCES, SIMPO_GAMMA
from ..losses.preference import PAIRED, PairedOptions, Pairs, sft
from ..models.reference import make_reference
from ..monitoring.symptoms import as_list
from ..options import option
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..trainer.base import PostTrainer
from ..trainer.config import ReferenceOptions
from ..trainer.loss_output import Losses
from . import METHODS
from .rules import PAIRED_LOSSES, REFERENCE_FREE_LOSSES, no_reference


@dataclass
class DPOConfig(ReferenceOptions):
    """Options of `DPOTrainer`.

    The options of `ReferenceOptions`, `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        disable_dropout: Set all dropout probabilities of the policy to 0, so that it initially equals its reference.
        beta: Strength of the regularization toward the reference. None means 0.1, or 2 with simpo.
        loss_type: Name of a loss, or a list of losses to add. The names are the keys of `losses.preference.PAIRED`.
        loss_weights: Weights of the losses in loss_type. None means 1 for each.
        label_smoothing: Assumed probability of a wrong label, for sigmoid (cDPO), robust (below 0.5) and exo_pair
            (above 0).
        simpo_gamma: Target reward margin of simpo.
        discopop_tau: Temperature at which discopop mixes its logistic and its exponential part.
        f_divergence_type: Divergence from the reference that the loss regularizes: reverse_kl, forward_kl,
            js_divergence or alpha_divergence.
        f_alpha_divergence_coef: Coefficient alpha of alpha_divergence.
        ld_alpha: Weight of the tokens of an answer beyond the length of the shorter one (LD-DPO). None means 1.
        use_weighting: Weight each pair by the probability of its answers under the policy (WPO).
        nll_coef: Weight of the NLL per token of the chosen answer, which keeps its log-probability from falling.

    Example:
        ```python
        from hf_posttrain import DPOConfig

        args = DPOConfig(output_dir="outputs/dpo", beta=0.05, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])
        ```
    """

    method: ClassVar = METHODS["dpo"]
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    disable_dropout: bool = option(
        True, "Set all dropout probabilities of the policy to 0, so that it initially equals its reference."
    )
    beta: float | None = option(
        None, "Strength of the regularization toward the reference. None means 0.1, or 2 with simpo."
    )
    loss_type: list[str] | str = option(
        help="Name of a loss, or a list of losses to add. The names are the keys of `losses.preference.PAIRED`.",
        default_factory=lambda: ["sigmoid"],
        choices=PAIRED_LOSSES,
    )
    loss_weights: list[float] | None = option(None, "Weights of the losses in loss_type. None means 1 for each.")
    label_smoothing: float = option(
        0.0, "Assumed probability of a wrong label, for sigmoid (cDPO), robust (below 0.5) and exo_pair (above 0)."
    )
    simpo_gamma: float = option(SIMPO_GAMMA, "Target reward margin of simpo.")
    discopop_tau: float = option(
        DISCOPOP_TAU, "Temperature at which discopop mixes its logistic and its exponential part."
    )
    f_divergence_type: str = option(
        "reverse_kl",
        "Divergence from the reference that the loss regularizes: reverse_kl, forward_kl, js_divergence or "
        "alpha_divergence.",
        choices=F_DIVERGENCES,
    )
    f_alpha_divergence_coef: float = option(0.5, "Coefficient alpha of alpha_divergence.")
    ld_alpha: float | None = option(
        None, "Weight of the tokens of an answer beyond the length of the shorter one (LD-DPO). None means 1."
    )
    use_weighting: bool = option(False, "Weight each pair by the probability of its answers under the policy (WPO).")
    nll_coef: float = option(
        0.0, "Weight of the NLL per token of the chosen answer, which keeps its log-probability from falling."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss_type = as_list(self.loss_type)
        if self.beta is None:
            self.beta = 2.0 if "simpo" in self.loss_type else 0.1

    @property
    def uses_reference(self) -> bool:
        """Return whether a loss in `loss_type` uses a reference."""
        return not {*as_list(self.loss_type)} <= REFERENCE_FREE_LOSSES


@dataclass(frozen=True)
class LengthDesensitization:
    """Weights of tokens in LD-DPO: `alpha` beyond the length of the shorter answer of a pair, 1 before.

    Source: Liu et al. 2024 (arXiv 2409.06411), eq. 10.
    """

    alpha: float

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the weight of each scored token, [N]."""
        ones = torch.ones_like(batch.owner, dtype=torch.float32)
        shared = batch.per_branch(ones).view(-1, 2).amin(1).repeat_interleave(2)
        is_shared = positions_in_sequence(batch.owner) < shared[batch.owner]
        return torch.where(is_shared, 1.0, self.alpha)


def pair_examples(row: dict[str, Any]) -> list[Example]:
    """Return the example of a row, a prompt whose two branches are the chosen and the rejected answer."""
    return [Example(row["prompt_ids"], [Branch(row["chosen_ids"]), Branch(row["rejected_ids"])])]


class DPOTrainer(PostTrainer):
    """Trainer for direct preference optimization (DPO) of a causal language model.

    Rows have `prompt`, `chosen` and `rejected`. `compute_metrics` receives as predictions the log-probabilities [B, 4]
    (chosen, rejected, and both under the reference), and as label_ids the numbers of trained tokens [B, 2].

    Args:
        *args: Positional arguments of `PostTrainer`.
        ref_model: Reference model, or its name or folder. None means a frozen copy of the initial policy.
        **kwargs: Keyword arguments of `PostTrainer`.

    Raises:
        InputError: `ref_model` shares trained weights with the policy, or no loss of `loss_type` uses a reference.

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import DPOConfig, DPOTrainer

        rows = [
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            {"prompt": "3 + 4 =", "chosen": " 7", "rejected": " 1"},
        ]
        trainer = DPOTrainer(
            model="Qwen/Qwen3-0.6B",
            args=DPOConfig(output_dir="outputs/dpo", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
        ```
    """

    config_class = DPOConfig
    examples = staticmethod(pair_examples)

    def __init__(self, *args: Any, ref_model: nn.Module | str | None = None, **kwargs: Any) -> None:
        # Before the model is loaded and the data are prepared. Without a Config, the default loss uses a reference.
        config = kwargs.get("args", args[1] if len(args) > 1 else None)
        if ref_model is not None and isinstance(config, DPOConfig) and not config.uses_reference:
            raise InputError(f"ref_model has no effect: {no_reference(as_list(config.loss_type))}. Remove ref_model")
        super().__init__(*args, **kwargs)
        self.token_weights = None if self.args.ld_alpha is None else LengthDesensitization(self.args.ld_alpha)
        self.reference = None
        if self.args.uses_reference:
            self.reference = make_reference(self, ref_model, token_weights=self.token_weights)

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """Return the loss of each pair, [B]."""
        # Score the reference first, before the policy's activations are kept for the backward pass.
        zeros = torch.zeros_like(batch.row, dtype=torch.float32).view(-1, 2)
        ref_logps = self.reference.logps(model, batch) if self.reference else zeros
        scores = self.score(model, batch, LogProb(batch.targets, collision=self.args.use_weighting))
        weighted = scores.value if self.token_weights is None else scores.value * self.token_weights(batch)
        logps = batch.per_branch(weighted).view(-1, 2)
        lengths = batch.per_branch(torch.ones_like(scores.value)).view(-1, 2)
        if self.reference:
            self.reference.check_start(logps, ref_logps, lengths, batch.index)

        args = self.args
        pairs = Pairs(logps, ref_logps, lengths, args.f_divergence_type, args.f_alpha_divergence_coef)
        options = PairedOptions(args.beta, args.label_smoothing, args.simpo_gamma, args.discopop_tau)
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        terms = [weight * PAIRED[name](pairs, options) for name, weight in zip(args.loss_type, weights, strict=True)]
        if args.nll_coef:
            terms.append(args.nll_coef * sft(pairs, options))
        predictions = torch.cat([logps, ref_logps], dim=1).detach()
        router_logits = scores.router_logits
        values = torch.stack(terms).sum(0)
        if args.use_weighting:
            # Zhou et al. 2024, eq. 2 (arXiv 2406.11827), with the weights relative to those of a sample of the policy
            collision = scores.stats["log_collision"]  # type: ignore[index]
            mean_logps = batch.per_branch(scores.value.detach() - collision).view(-1, 2) / lengths
            values = values * mean_logps.sum(1).exp()
        metrics = self._metrics(Pairs(logps.detach(), ref_logps, lengths))
        return Losses(values, self.weights(batch), metrics, router_logits, predictions, lengths)

    def _metrics(self, pairs: Pairs) -> dict[str, tuple[Tensor, None]]:
        """Return the metrics of pairs without gradient.

        The implicit rewards are beta times the log-ratios to the reference. Without a reference, they are beta times
        the mean log-probability per token.
        """
        beta = self.args.beta
        if self.reference is None:
            chosen_means, rejected_means = pairs.means
            return pair_metrics(beta * chosen_means, beta * rejected_means, pairs.logps)
        chosen_logratios, rejected_logratios = pairs.log_ratios
        metrics = pair_metrics(beta * chosen_logratios, beta * rejected_logratios, pairs.logps)
        return metrics | {"logps/chosen_change": (chosen_logratios, None)}


def pair_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor) -> dict[str, tuple[Tensor, None]]:
    """Return the metrics that all methods on pairs log.

    Args:
        chosen: Rewards of the chosen answers, [B].
        rejected: Rewards of the rejected answers, [B].
        logps: Log-probabilities of both answers, [B, 2].
    """
    chosen_logps, rejected_logps = logps.unbind(1)
    return reward_metrics(chosen, rejected) | {
        "logps/chosen": (chosen_logps, None),
        "logps/rejected": (rejected_logps, None),
    }


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, None]]:
    """Return the metrics of the rewards of the chosen and the rejected answers, [B] each."""
    return {
        "rewards/chosen": (chosen, None),
        "rewards/rejected": (rejected, None),
        "rewards/margins": (chosen - rejected, None),
        "rewards/accuracies": ((chosen > rejected).float(), None),
    }
