"""On-policy distillation: the student is trained on its own samples, whose tokens the teacher scores.

    in each optimizer step sample K rollouts y ~ q(.|x) for every prompt of the window, in one generation call
    loss = mean over rollout tokens of  D(q, p) over the whole vocabulary        (loss_type reverse_kl, jsd, ...)
                                    or  -sg(log p(y_t) - log q(y_t)) log q(y_t)  (loss_type policy_gradient)

q is the distribution of the student and p that of the teacher, both at the sampling temperature. Rollouts are sampled
from exactly q. They depend only on the seed, the step and the rank, so a resumed run repeats them.
Sources: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543), and on-policy distillation as in ArcticTraining.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from ..data.dataset_type import AnyDataset
from ..data.lengths import check_completions, warn_if_truncated
from ..models.policy import align_generation
from ..options import option
from ..rollouts import vllm
from ..rollouts.batch import PromptCollator, RolloutBatch
from ..rollouts.builder import RolloutBuilder
from ..rollouts.interface import OnPolicyInterface
from ..rollouts.options import RewardOptions, RolloutOptions, SamplerOptions, TokenWeightOptions
from ..rollouts.policy_sampler import synchronize
from ..rollouts.reward import Reward
from ..scoring.layouts import Branch, Example
from ..scoring.teacher_tiles import divergence_function
from ..trainer.loss_output import Losses
from . import METHODS
from .distillation import DistillationConfig, DistillationTrainer
from .objective import Divergence, Objective, PolicyGradient
from .opd_diagnostics import DiagnosticsBuilder
from .opd_metrics import add_perplexities, rollout_metrics, rollout_predictions
from .opd_token_weights import add_token_weights
from .rules import POLICY_GRADIENT, ROLLOUT_LOSSES


@dataclass
class OPDConfig(DistillationConfig):
    """Options of `OPDTrainer`.

    The options of `DistillationConfig`, `PostTrainConfig` and `TrainingArguments` are valid as well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        loss_type: Name of the loss: policy_gradient (on the sampled tokens), or a divergence over the whole vocabulary,
            which is reverse_kl, jsd, forward_kl, skew_forward_kl, skew_reverse_kl, tvd or entropy_aware_kl.
        beta: Interpolation coefficient of jsd, where 0 is the forward KL and 1 the reverse KL (by default 0.5), or
            share of the other distribution in the mixture of skew_forward_kl and skew_reverse_kl (by default 0.1).
        temperature: Temperature of sampling and of the scores of student and teacher.
        max_completion_length: Maximum length of a rollout in tokens. Prompts are limited to max_length minus this.
        num_generations: Number of rollouts per prompt, K.
        disable_dropout: Set all dropout probabilities of the policy to 0, because rollouts are sampled without dropout.
        lmbda: Share of the prompts for which the student samples the answer. The others are trained on their completion
            in the data.
        rollouts: Source of the rollouts: on_policy, frozen (sampled once, before training) or replay (some from earlier
            steps), or {source: replay, fresh_fraction, replay_steps, train_max_tokens}.
        sampler: Program that samples the rollouts: policy (the trained model), vllm_colocate or vllm_server, or {kind,
            options}. vLLM gets the weights once per optimizer step.
        reward: Reward in addition to the teacher: {function: exact_match or package.module:name, coef}.
        token_weights: Weighting of the tokens: cumulative, top_share, extremes, bounded or sign, or {name, option:
            number}.
        diagnostics: Log in each logged step at which positions of the rollouts student and teacher differ, including
            the noise of training (dropout, NEFTune). Disabled with a precomputed teacher.top_k.

    Example:
        ```python
        from hf_posttrain import OPDConfig

        args = OPDConfig(output_dir="outputs/opd", loss_type="jsd", beta=0.9, max_completion_length=256)
        ```
    """

    method: ClassVar = METHODS["opd"]
    merges_eos: ClassVar = True
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    loss_type: str = option(
        "reverse_kl",
        "Name of the loss: policy_gradient (on the sampled tokens), or a divergence over the whole vocabulary, which "
        "is reverse_kl, jsd, forward_kl, skew_forward_kl, skew_reverse_kl, tvd or entropy_aware_kl.",
        choices=ROLLOUT_LOSSES,
    )
    beta: float | None = option(
        None,
        "Interpolation coefficient of jsd, where 0 is the forward KL and 1 the reverse KL (by default 0.5), or share "
        "of the other distribution in the mixture of skew_forward_kl and skew_reverse_kl (by default 0.1).",
    )
    temperature: float = option(1.0, "Temperature of sampling and of the scores of student and teacher.")
    max_completion_length: int = option(
        512, "Maximum length of a rollout in tokens. Prompts are limited to max_length minus this."
    )
    num_generations: int = option(1, "Number of rollouts per prompt, K.")
    disable_dropout: bool = option(
        True,
        "Set all dropout probabilities of the policy to 0, because rollouts are sampled without dropout.",
    )
    lmbda: float = option(
        1.0,
        "Share of the prompts for which the student samples the answer. The others are trained on their completion in "
        "the data.",
    )
    rollouts: RolloutOptions | str | dict[str, Any] | None = option(
        "on_policy",
        "Source of the rollouts: on_policy, frozen (sampled once, before training) or replay (some from earlier "
        "steps), or {source: replay, fresh_fraction, replay_steps, train_max_tokens}.",
    )
    sampler: SamplerOptions | str | dict[str, Any] | None = option(
        "policy",
        "Program that samples the rollouts: policy (the trained model), vllm_colocate or vllm_server, or {kind, "
        "options}. vLLM gets the weights once per optimizer step.",
    )
    reward: RewardOptions | str | dict[str, Any] | None = option(
        None, "Reward in addition to the teacher: {function: exact_match or package.module:name, coef}."
    )
    token_weights: TokenWeightOptions | str | dict[str, Any] | None = option(
        None, "Weighting of the tokens: cumulative, top_share, extremes, bounded or sign, or {name, option: number}."
    )
    diagnostics: bool = option(
        True,
        "Log in each logged step at which positions of the rollouts student and teacher differ, including the noise of "
        "training (dropout, NEFTune). Disabled with a precomputed teacher.top_k.",
    )

    def _validate(self) -> None:
        super()._validate()
        vllm.check_installed(self.sampler)
        if isinstance(self.reward, RewardOptions):
            Reward(self.reward)


class OPDTrainer(DistillationTrainer, OnPolicyInterface):
    """Trainer for on-policy distillation (OPD) of a causal language model.

    Rows have `prompt`, and `completion` if a reward or `lmbda` below 1 requires it. The arguments `teacher_model` and
    `teacher_offload` are described in `DistillationTrainer`. `compute_metrics` receives as predictions the summed
    log-probabilities of the rollouts [prompts, K, 2] (student, teacher), and as label_ids their lengths [prompts, K].

    Args:
        *args: Positional arguments of `DistillationTrainer`.
        **kwargs: Keyword arguments of `DistillationTrainer`.

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import OPDConfig, OPDTrainer

        rows = [{"prompt": "2 + 2 ="}, {"prompt": "3 + 4 ="}]
        trainer = OPDTrainer(
            model="Qwen/Qwen3-0.6B",
            args=OPDConfig(output_dir="outputs/opd", max_completion_length=8, max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
            teacher_model="Qwen/Qwen3-4B",
        )
        trainer.train()
        ```
    """

    config_class = OPDConfig
    collator_class = PromptCollator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.terminal_ids = self.teacher_ends
        self.ends = torch.tensor(self.terminal_ids, device=self.args.device)  # built once to avoid host copies
        align_generation(self.model, self.tokenizer, self.terminal_ids)  # the student learns these from the teacher
        self.rollout_options = self.args
        self.sampler = self.args.sampler.load()(self)
        reward = Reward(self.args.reward) if self.args.reward else None
        self.source = self.args.rollouts.load()(self)
        self.rollouts = RolloutBuilder(self, self.source, reward)
        self.diagnostics = DiagnosticsBuilder(self)
        if self.args.lmbda < 1:
            warn_if_truncated(self.train_dataset, self.args.max_completion_length)

    @classmethod
    def check_rows(  # type: ignore[override]
        cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: OPDConfig, name: str
    ) -> None:
        """Check prepared rows.

        Raises:
            InputError: Rows have no completion in the data, which the reward or `lmbda` below 1 requires.
        """
        super().check_rows(rows, tokenizer, args, name)
        if isinstance(args.reward, RewardOptions) and args.reward.function == "exact_match":
            check_completions(rows, tokenizer, f"{name}: reward exact_match compares with completions of the data")
        elif name.startswith("train") and args.lmbda < 1:
            check_completions(rows, tokenizer, "lmbda below 1 trains on completions of the data")

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the example of a row, with the prompt and its completion in the data, if any."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])] if row["completion_ids"] else [])]

    # ---- optimizer step

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train. Rollouts of an earlier training are discarded first, because the weights may have changed since."""
        self.rollouts.reset()
        return super().train(*args, **kwargs)

    def next_window(self, epoch_iterator: Any, count: int) -> list[RolloutBatch]:  # type: ignore[override]
        """Return the prompts of the next window."""
        return self.rollouts.next_window(super().next_window, epoch_iterator, count)

    def prepare_window(self, batches: list[RolloutBatch]) -> list[RolloutBatch]:  # type: ignore[override]
        """Return the micro-batches with rollouts, sampled for all of them at once, and with the signals of a server."""
        batches = self.rollouts.window(batches, self.state.global_step)
        batches = super().prepare_window(batches)
        return add_token_weights(self, batches) if self.args.token_weights else batches

    def prepare_evaluation(self) -> None:
        """Send the current weights to the sampler."""
        synchronize(self)

    def prepare_evaluation_batch(self, batch: RolloutBatch) -> RolloutBatch:  # type: ignore[override]
        """Return a batch of prompts with sampled rollouts."""
        return self.rollouts.evaluation(batch)

    def losses(self, model: nn.Module, batch: RolloutBatch) -> Losses:  # type: ignore[override]
        """Return the loss of each rollout token, [N]."""
        weights = self.weights(batch)
        token_weights = 1.0 if batch.token_weights is None else batch.token_weights
        observe = self.diagnostics.observer_factory(batch) if self.args.diagnostics else None
        scores, signal = self.distill(model, batch, weights * token_weights, observe)
        metrics = rollout_metrics(self, scores, signal, batch)
        losses = Losses(scores.value * token_weights, weights, metrics, scores.router_logits)
        if not torch.is_grad_enabled():
            losses.predictions, losses.labels = rollout_predictions(scores, batch, self.args.num_generations)
        return losses

    def build_objective(self) -> Objective:
        """Return the divergence, or the policy gradient on the sampled tokens."""
        options = self.args.teacher
        if self.args.loss_type == POLICY_GRADIENT:
            return PolicyGradient(self.request("sampled", options.top_k))
        function = divergence_function(self.args.loss_type, self.args.beta, self.args.entropy_threshold)
        request = self.request("dense", options.top_k)
        return Divergence(function, request, on_policy=True, top_k_remainder=options.top_k_remainder)

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Add perplexities to the metrics. The first training log also logs a recommendation for `rollouts`."""
        if stage == "train":
            self.diagnostics.log_advice(metrics)
        return add_perplexities(metrics)
