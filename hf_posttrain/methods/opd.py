"""On-policy distillation: the student answers, the teacher scores each token of the answer, the student moves to it.

    each optimizer step: sample K rollouts y ~ q(.|x) for every prompt of the window, in one generation call
    loss = mean over rollout tokens of  D(q, p) over the whole vocabulary        (loss_type reverse_kl, jsd, ...)
                                    or  -sg(log p(y_t) - log q(y_t)) log q(y_t)  (loss_type policy_gradient)

q is the student's distribution and p the teacher's, both at the sampling temperature, and rollouts are drawn from
exactly q. Rollouts depend on (seed, step, rank) alone, so a resumed run repeats them.
Sources: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543), and on-policy distillation as in ArcticTraining.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.lengths import check_answered, warn_if_cut
from ..models.policy import align_generation
from ..options import option
from ..rollouts import vllm
from ..rollouts.batch import PromptCollator, RolloutBatch
from ..rollouts.builder import RolloutBuilder
from ..rollouts.interface import OnPolicyInterface
from ..rollouts.options import RewardOptions, RolloutOptions, SamplerOptions, TokenWeightOptions
from ..rollouts.policy_sampler import synchronise
from ..rollouts.reward import Reward
from ..scoring.layouts import Branch, Example
from ..scoring.teacher_tiles import divergence
from ..trainer.loss_output import Losses
from . import METHODS
from .distillation import DistillationConfig, DistillationTrainer
from .objective import Divergence, Objective, PolicyGradient
from .opd_diagnostics import DiagnosticsBuilder
from .opd_metrics import add_perplexities, rollout_metrics, rollout_predictions
from .opd_token_weights import add_token_weights
from .rules import POLICY_GRADIENT


@dataclass
class OPDConfig(DistillationConfig):
    """Options of OPD; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["opd"]
    merges_eos: ClassVar = True
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    loss_type: str = option(
        "reverse_kl",
        "policy_gradient (sampled tokens), or over the whole vocabulary reverse_kl, jsd, forward_kl, skew_*_kl, tvd.",
    )
    beta: float | None = option(
        None,
        "Interpolation of jsd, where 0 is forward KL and 1 reverse KL (by default 0.5), or the share of the other "
        "distribution that skew_forward_kl and skew_reverse_kl mix in (by default 0.1).",
    )
    temperature: float = option(1.0, "Of sampling and of both scores.")
    max_completion_length: int = option(512, "Longest rollout in tokens; the prompt has max_length minus this.")
    num_generations: int = option(1, "Rollouts of each prompt, K.")
    disable_dropout: bool = option(
        True, "Set every dropout of the policy to 0: rollouts are sampled without, so they are scored without."
    )
    lmbda: float = option(
        1.0, "Share of prompts answered by the student; the others are trained on their completion in the data."
    )
    rollouts: RolloutOptions | str | dict[str, Any] | None = option(
        "on_policy",
        "Source of the rollouts: on_policy, frozen (sampled once, before training) or replay (some from earlier "
        "steps), or {source: replay, fresh_fraction, replay_steps, train_max_tokens}.",
    )
    sampler: SamplerOptions | str | dict[str, Any] | None = option(
        "policy",
        "Program that samples the rollouts: policy (the model that trains), vllm_colocate or vllm_server, or {kind, "
        "options}. vLLM gets the weights once per optimizer step.",
    )
    reward: RewardOptions | str | dict[str, Any] | None = option(
        None, "A reward in addition to the teacher: {function: exact_match or package.module:name, coef}."
    )
    token_weights: TokenWeightOptions | str | dict[str, Any] | None = option(
        None, "Which tokens count more: cumulative, top_share, extremes, bounded or sign, or {name, option: number}."
    )
    diagnostics: bool = option(
        True,
        "Log where along a rollout student and teacher differ, in each step that is logged, with the noise of training "
        "(dropout, NEFTune) if there is any. Not with teacher.precompute.",
    )

    def _validate(self) -> None:
        super()._validate()
        vllm.check_installed(self.sampler)
        if isinstance(self.reward, RewardOptions):
            Reward(self.reward)


class OPDTrainer(DistillationTrainer, OnPolicyInterface):
    """OPD of a causal LM. Rows: prompt (and completion); for the teacher see `DistillationTrainer`.

    `compute_metrics` gets summed log-probabilities of the rollouts [prompts, K, 2] (student, teacher) and their lengths
    [prompts, K] as label_ids.
    """

    config_class = OPDConfig
    collator_class = PromptCollator

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.terminal_ids = self.teacher_ends
        self.ends = torch.tensor(self.terminal_ids, device=self.args.device)  # once: a copy from the host waits
        align_generation(self.model, self.tokenizer, self.terminal_ids)  # the student learns to write these too
        self.rollout_options = self.args
        self.sampler = self.args.sampler.load()(self)
        reward = Reward(self.args.reward) if self.args.reward else None
        self.source = self.args.rollouts.load()(self)
        self.rollouts = RolloutBuilder(self, self.source, reward)
        self.diagnostics = DiagnosticsBuilder(self)
        if self.args.lmbda < 1:
            warn_if_cut(self.train_dataset, self.args.max_completion_length)

    @classmethod
    def check_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> None:
        """Raise InputError for prepared rows without the answers that a reward, or a share of the prompts, requires."""
        super().check_rows(rows, tokenizer, args, name)
        if args.reward and args.reward.function == "exact_match":
            check_answered(rows, tokenizer, f"{name}: reward exact_match compares with completions of the data")
        elif name.startswith("train") and args.lmbda < 1:
            check_answered(rows, tokenizer, "lmbda below 1 trains on completions of the data")

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the prompt, with its completion in the data if it has one."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])] if row["completion_ids"] else [])]

    # ---- one step: rollouts, then losses

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as PostTrainer does. The weights may have changed since the last training."""
        self.rollouts.reset()
        return super().train(*args, **kwargs)

    def next_window(self, epoch_iterator: Any, count: int) -> list[RolloutBatch]:  # type: ignore[override]
        """Return the next prompts."""
        return self.rollouts.next_window(super().next_window, epoch_iterator, count)

    def prepare_window(self, batches: list[RolloutBatch]) -> list[RolloutBatch]:  # type: ignore[override]
        """Sample rollouts for all micro-batches at once, and ask a teacher on a server about them."""
        batches = self.rollouts.window(batches, self.state.global_step)
        batches = super().prepare_window(batches)
        return add_token_weights(self, batches) if self.args.token_weights else batches

    def prepare_evaluation(self) -> None:
        """Give the sampler the current weights."""
        synchronise(self)

    def prepare_evaluation_batch(self, batch: RolloutBatch) -> RolloutBatch:  # type: ignore[override]
        """Sample rollouts for a batch of prompts."""
        return self.rollouts.evaluation(batch)

    def losses(self, model: nn.Module, batch: RolloutBatch) -> Losses:  # type: ignore[override]
        """Return the loss of each rollout token, [N]."""
        weights = self.weights(batch)
        token_weights = 1.0 if batch.token_weights is None else batch.token_weights
        observe = self.diagnostics.of(batch) if self.args.diagnostics else None
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
        function = divergence(self.args.loss_type, self.args.beta)
        unbiased = options.top_k_remainder == "residual"
        request = self.request("dense", options.top_k)
        return Divergence(function, request, on_policy=True, unbiased_remainder=unbiased)

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Add perplexities. The first log reports what its diagnostics suggest."""
        if stage == "train":
            self.diagnostics.log_advice(metrics)
        return add_perplexities(metrics)
