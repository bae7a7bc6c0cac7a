"""On-policy distillation: the student answers, the teacher scores each token of the answer, the student moves to it.

    each optimizer step: sample K rollouts y ~ q(.|x) for every prompt of the window, in one generation call
    loss = mean over rollout tokens of  D(q, p) over the whole vocabulary        (loss_type reverse_kl, jsd, ...)
                                    or  -sg(log p(y_t) - log q(y_t)) log q(y_t)  (loss_type policy_gradient)

q is the student's distribution and p the teacher's, both at the sampling temperature, and rollouts are drawn from
exactly q. Rollouts depend on (seed, step, rank) alone, so a resumed run repeats them.
Sources: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543), and on-policy distillation as in ArcticTraining.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..batching.micro_batch import Deferred, MicroBatch
from ..data.chat import special_ids
from ..data.lengths import check_answered, warn_if_cut
from ..errors import InputError
from ..losses.token_weights import Tokens, weigh
from ..models.policy import align_generation
from ..rollouts import vllm
from ..rollouts.batch import RolloutBatch
from ..rollouts.builder import RolloutBuilder
from ..rollouts.factory import SOURCES, build_sampler
from ..rollouts.options import RewardOptions, RolloutOptions, SamplerOptions, TokenWeightOptions, VLLMOptions
from ..rollouts.policy_sampler import synchronise
from ..rollouts.reward import Reward
from ..scoring.forward import eval_mode
from ..scoring.layouts import IGNORE, Branch, Example
from ..scoring.teacher_tiles import TeacherLogits, divergence
from ..teachers.cross_tokenizer import CrossTokenizerTeacher
from ..teachers.inputs import DistillationCollator
from ..trainer.loss_units import Losses
from . import METHODS
from .distillation import DistillationConfig, DistillationTrainer
from .objective import Divergence, Objective, PolicyGradient
from .opd_diagnostics import Diagnostics, advice, is_due
from .opd_metrics import rollout_metrics, with_perplexities
from .rules import POLICY_GRADIENT

logger = logging.getLogger(__name__)


@dataclass
class OPDConfig(DistillationConfig):
    """Options of OPD; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["opd"]
    merges_eos: ClassVar = True
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss_type: str = "reverse_kl"
    """policy_gradient (sampled tokens), or over the whole vocabulary reverse_kl, jsd, forward_kl, skew_*_kl, tvd."""
    beta: float | None = None
    """Interpolation of jsd, where 0 is forward KL and 1 reverse KL (by default 0.5), or the share of the other
    distribution that skew_forward_kl and skew_reverse_kl mix in (by default 0.1)."""
    temperature: float = 1.0
    """Of sampling and of both scores."""
    max_completion_length: int = 512
    """Longest rollout in tokens; the prompt has max_length minus this."""
    num_generations: int = 1
    """Rollouts of each prompt, K."""
    disable_dropout: bool = True
    """Set every dropout of the policy to 0: rollouts are sampled without, so they are scored without."""
    lmbda: float = 1.0
    """Share of prompts answered by the student; the others are trained on their completion in the data."""
    rollouts: RolloutOptions | str | dict[str, Any] | None = "on_policy"
    """Source of the rollouts: on_policy, frozen (sampled once, before training) or replay (some from earlier steps), or
    {source: replay, fresh_fraction, replay_steps, train_max_tokens}."""
    sampler: SamplerOptions | str | dict[str, Any] | None = "policy"
    """Program that samples the rollouts: policy (the model that trains), vllm_colocate or vllm_server, or {kind,
    options}. vLLM gets the weights once per optimizer step."""
    reward: RewardOptions | str | dict[str, Any] | None = None
    """A reward in addition to the teacher: {function: exact_match or package.module:name, coef}."""
    token_weights: TokenWeightOptions | str | dict[str, Any] | None = None
    """Which tokens count more: cumulative, top_share, extremes, bounded or sign, or {name, option: number}."""
    diagnostics: bool = True
    """Log where along a rollout student and teacher differ, in each step that is logged, with the noise of training
    (dropout, NEFTune) if there is any. Not with teacher.precompute."""

    def __post_init__(self):
        super().__post_init__()
        vllm.check_installed(self.sampler)
        if isinstance(self.reward, RewardOptions):
            Reward(self.reward)


class PromptCollator(DistillationCollator):
    """Keeps prompts as they are until `RolloutBuilder` has answered them."""

    batch_class = RolloutBatch

    def __call__(self, rows: list[dict]) -> MicroBatch:
        """Return `index`, `prompts`, and their `input_ids` followed by -100 for metrics that ask for inputs."""
        prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
        index = torch.tensor([row.get("index", -1) for row in rows])
        return RolloutBatch(index=index, prompts=Deferred(rows), input_ids=pad_sequence(prompts, True, IGNORE))


class OPDTrainer(DistillationTrainer):
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
        self.compared_ids = [
            torch.tensor(sorted(i for i in ids if i < self.vocabulary), dtype=torch.long, device=self.args.device)
            for ids in (self.terminal_ids, special_ids(self.tokenizer))
        ]  # in what diagnostics compare
        align_generation(self.model, self.tokenizer, self.terminal_ids)  # the student learns to write these too
        uses_vllm = isinstance(self.args.sampler, VLLMOptions)
        if self.data_collator.pictures and (uses_vllm or self.args.rollouts.kind == "replay"):
            option = f"sampler: {self.args.sampler.kind}" if uses_vllm else "rollouts: replay"
            raise InputError(f"{option} does not support images yet. Remove it, or model.images")
        self.sampler = build_sampler(self, self.args)
        self.reward = Reward(self.args.reward) if self.args.reward else None
        self.source = SOURCES[self.args.rollouts.kind](self)
        self.rollouts = RolloutBuilder(self, self.source, self.reward)
        self.upcoming: list[RolloutBatch] = []  # the next step's micro-batches, with a sampler that prefetches
        self.upcoming_of: Any = None
        self.synchronised: int | None = None  # the step whose weights are where rollouts are sampled
        if self.args.lmbda < 1:
            warn_if_cut(self.train_dataset, self.args.max_completion_length)

    @classmethod
    def check_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> None:
        """As PostTrainer has it. Raises InputError where a reward, or a share of prompts that are not sampled, wants an
        answer of the data that is missing."""
        super().check_rows(rows, tokenizer, args, name)
        if args.reward and args.reward.function == "exact_match":
            check_answered(rows, tokenizer, f"{name}: reward exact_match compares with completions of the data")
        elif name.startswith("train") and args.lmbda < 1:
            check_answered(rows, tokenizer, "lmbda below 1 trains on completions of the data")

    @staticmethod
    def examples(row: dict) -> list[Example]:
        """The prompt with its completion in the data, where it has one."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])] if row["completion_ids"] else [])]

    # ---- one step: rollouts, then losses

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as PostTrainer does; the weights may have changed since the last training."""
        self.synchronised, self.upcoming = None, []
        return super().train(*args, **kwargs)

    def next_window(self, epoch_iterator: Any, count: int) -> list[RolloutBatch]:  # type: ignore[override]
        """Return the next prompts. A sampler that prefetches reads those of the step after it as well, in one epoch."""
        if not getattr(self.args.sampler, "prefetch", False):
            return super().next_window(epoch_iterator, count)
        batches = self.upcoming if self.upcoming_of is epoch_iterator else []
        batches = batches or super().next_window(epoch_iterator, count)
        self.upcoming, self.upcoming_of = [], epoch_iterator
        if self.state.global_step + 1 < self.state.max_steps:
            self.upcoming = super().next_window(epoch_iterator, self.args.gradient_accumulation_steps)
        return batches

    def prepare_window(self, batches: list[RolloutBatch]) -> list[RolloutBatch]:  # type: ignore[override]
        """Answer the prompts of all micro-batches in one generation call, and ask a teacher on a server about them."""
        if self.args.rollouts.kind != "frozen":
            synchronise(self)
        batches = self.rollouts.window(batches, self.state.global_step)
        if self.upcoming:
            self.rollouts.prefetch(self.upcoming, self.state.global_step + 1)
        batches = super().prepare_window(batches)
        return self._weigh(batches) if self.args.token_weights else batches

    def prepare_evaluation(self) -> None:
        """Give the sampler the current weights."""
        synchronise(self)

    def prepare_evaluation_batch(self, batch: RolloutBatch) -> RolloutBatch:  # type: ignore[override]
        """Answer the prompts of a batch."""
        return self.rollouts.evaluation(batch)

    def losses(self, model: nn.Module, batch: RolloutBatch) -> Losses:  # type: ignore[override]
        """Return the loss of each rollout token, [N]."""
        weights = self.weights(batch)
        token_weights = 1.0 if batch.token_weights is None else batch.token_weights
        scores, signal = self.distill(model, batch, weights * token_weights, self.diagnostics_of(batch))
        values = scores["value"] * token_weights
        metrics = rollout_metrics(self, scores, signal, batch)
        result = Losses(values, weights, metrics, scores.get("router_logits"))
        if not torch.is_grad_enabled():  # in evaluation every prompt has K rollouts
            shape = len(batch.index), self.args.num_generations
            summed = [batch.per_branch(scores[name]).view(shape) for name in ("student", "teacher")]
            result.predictions = torch.stack(summed, dim=-1)
            result.labels = batch.per_branch(torch.ones_like(values)).view(shape)
        return result

    def build_objective(self) -> Objective:
        """Return the divergence, or the policy gradient on the sampled tokens."""
        args = self.args
        top_k = args.teacher.top_k
        if args.loss_type == POLICY_GRADIENT:
            return PolicyGradient(self.request("sampled", top_k))
        function = divergence(args.loss_type, args.beta)
        request = self.request("dense", top_k)
        unbiased = args.teacher.top_k_remainder == "residual"
        return Divergence(function, request, on_policy=True, unbiased_remainder=unbiased)

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Add perplexities; the first log says what its diagnostics suggest."""
        first_log = 1 if self.args.logging_first_step else max(int(self.state.logging_steps), 1)
        if stage == "train" and self.state.global_step == first_log:
            text = advice(metrics, self.args.rollouts.kind)
            if text:
                logger.info("%s", text)
        return with_perplexities(metrics)

    # ---- diagnostics and token weights

    def compares_whole(self, batch: RolloutBatch) -> bool:
        """Return whether student and teacher can be compared over the whole vocabulary."""
        one_tokenizer = not isinstance(self.teacher, CrossTokenizerTeacher)
        return bool(self.teacher and self.teacher.dense and one_tokenizer and batch.teacher_signal is None)

    def diagnostics_of(self, batch: RolloutBatch) -> Callable[[TeacherLogits], Diagnostics] | None:
        """Return what builds the diagnostics of a batch, if its step is logged and both models have whole
        distributions over the same tokens.
        """
        due = self.args.diagnostics and torch.is_grad_enabled() and is_due(self.state, self.args)
        if not due or not self.compares_whole(batch):
            return None
        ends, special = self.compared_ids
        return partial(
            Diagnostics,
            tokens=len(batch.scored),
            eos=self.eos,
            temperature=self.args.temperature,
            ends=ends,
            special=special,
        )

    def _weigh(self, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """Each micro-batch with `token_weights` [N], of the window: students and teacher score it once more, before the
        first backward, so that the weights do not depend on how the window is cut."""
        scored = []
        for batch in batches:
            with torch.no_grad(), eval_mode(self.model_wrapped), self.accelerator.autocast():
                scores, _ = self.distill(self.model_wrapped, batch, None)
            gap = scores["teacher"] - scores["student"]
            divergence = scores.get("divergence", -gap)
            scored.append(Tokens(scores["student"], scores["teacher"], divergence, batch.owner, self.weights(batch)))
        options = self.args.token_weights
        weights = weigh(Tokens.of(scored, self.accelerator), options.kind, dataclasses.asdict(options))
        of_each = weights.split([len(tokens.student) for tokens in scored])
        return [batch.replace(token_weights=w) for batch, w in zip(batches, of_each, strict=True)]
