"""On-policy distillation: the student answers, the teacher scores each token of the answer, the student moves to it.

    each optimizer step: sample K rollouts y ~ q(.|x) for every prompt of the window, in one generation call
    loss = mean over rollout tokens of  D(q, p) over the whole vocabulary        (loss_type reverse_kl, jsd, ...)
                                    or  -sg(log p(y_t) - log q(y_t)) log q(y_t)  (loss_type policy_gradient)

q is the student's distribution and p the teacher's, both at the sampling temperature, and rollouts are drawn from
exactly q. Rollouts depend on (seed, step, rank) alone, so a resumed run repeats them.
Sources: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543), and on-policy distillation as in ArcticTraining.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..data.lengths import check_answered, warn_if_cut
from ..errors import InputError
from ..generation import rollout, vllm
from ..generation.backends import make_backend
from ..losses.divergence import policy_gradient
from ..losses.token_weights import Tokens, weigh
from ..models.add_teacher import add_teacher, find_across, find_stop_outcome
from ..models.prepare import align_generation
from ..models.served_teacher import ask_server
from ..models.teacher import by_teacher
from ..scoring import teacher_tiles
from ..scoring.chunks import Chunks, alignment
from ..scoring.forward import eval_mode, per_branch, targets
from ..scoring.head import LogProb
from ..scoring.layouts import IGNORE, Branch, Collator, Example, Later, reading_of, share_out
from ..scoring.top_tokens import residual, top_k
from ..trainer.base import PostTrainer
from ..trainer.loss_units import Losses, row_weights
from . import METHODS
from .distillation import DistillationConfig, check_teacher
from .opd_diagnostics import look_at
from .opd_reward import Reward, group_advantage
from .opd_rollouts import SOURCES, Live
from .rules import POLICY_GRADIENT, named_options

EVALUATION = 2**31
"""Stands for the step in the seed of an evaluation's rollouts, which are then the same at every evaluation."""


@dataclass
class OPDConfig(DistillationConfig):
    """Options of OPD; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["opd"]
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss_type: str = "reverse_kl"
    """policy_gradient (sampled tokens), or over the whole vocabulary reverse_kl, jsd, forward_kl, skew_*_kl, tvd."""
    beta: float | None = None
    """JSD's interpolation: 0 is forward KL, 1 reverse KL; None: 0.5."""
    skew_alpha: float = 0.1
    """Share of the other distribution that skew KL mixes in."""
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
    discount: float = 0.0
    """policy_gradient: how much a token is credited with the advantage of those after it."""
    rollouts: str = "live"
    """Which rollouts: live, of the policy of now; frozen, sampled once as it begins; replay, some live and some of the
    last steps."""
    fresh: float = 0.25
    """Of rollouts: replay, the share of each step's prompts that is sampled anew."""
    replay_windows: int = 16
    """Of rollouts: replay, from how many steps before the others are drawn."""
    horizon: dict | int | str | None = None  # str is for HfArgumentParser, and refused
    """Sample and train only the first tokens of a rollout: a number, or {from, to, steps}, which grows evenly over the
    first steps; None: all."""
    teacher_rest: str = "tail"
    """Of teacher_top_k, what stands for the other tokens: tail (one bucket, a lower bound) or residual (the sampled
    token, unbiased)."""
    precompute_teacher_top_k: int | None = None
    """Of rollouts: frozen: score them once with the teacher; its top K tokens are kept on disk, the rest as one."""
    reward: dict | None = None
    """A reward beside the teacher: {function: exact_match or package.module:name, coef, when: with or after, start}."""
    token_weights: dict | str | None = None
    """Which tokens count more: cumulative, top_share, extremes, bounded or sign, or {name, option: number}."""
    diagnostics: bool = True
    """Log where along a rollout student and teacher differ, every logging_steps steps, with a forward of both more. Not
    with precompute_teacher_top_k."""
    generation_batch_size: int | None = None
    """Most rollouts in one generation call; None: the whole window at once, on a GPU as many as its free memory takes.
    What is drawn depends on it: with a number a GPU that has other work draws the same."""
    one_stop_outcome: bool = True
    """Count all terminal ids of student and teacher as one outcome in the loss, where there are several."""
    rollout: str = "transformers"
    """What samples: transformers, with the model that trains, or vllm, which gets the weights once a step."""
    vllm_mode: str | None = None
    """Where vLLM runs: colocate (None), in each training process on its GPU, or server, one that vllm serve started."""
    vllm_server_base_url: str | None = None
    """Of vllm_mode server, such as http://localhost:8000; it must see output_dir, and serve this run alone."""
    vllm_check_steps: int | None = None
    """Compare log-probabilities of vLLM and student after the first and every so many transfers of weights; None: 20.
    """
    rollout_ahead: int = 0
    """Of vllm_mode server: 1 samples the next step's rollouts while this one trains, by weights one step old."""
    vllm_gpu_memory_utilization: float | None = None
    """Of vllm_mode colocate: the share of the GPU's memory that vLLM keeps for itself; None: 0.3."""

    def __post_init__(self):
        super().__post_init__()
        vllm.check_installed(self)
        if self.reward:
            Reward(**self.reward)
        if self.rollout == "vllm":
            self.vllm_mode, self.vllm_check_steps = self.vllm_mode or "colocate", self.vllm_check_steps or 20


class PromptCollator(Collator):
    """Keeps prompts as they are: `roll_out` makes them a batch, once they have answers."""

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        """`index` [rows], `prompts`, and their `input_ids` for metrics that ask for inputs, -100 behind each."""
        prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
        index = torch.tensor([row.get("index", -1) for row in rows])
        return {"index": index, "prompts": Later(rows), "input_ids": pad_sequence(prompts, True, IGNORE)}


class OPDTrainer(PostTrainer):
    """OPD of a causal LM; further arguments: `teacher_model` (a model, its name, a TeacherSection, or a dict of them by
    `teacher_names`), and `teacher_offload`, which keeps it on CPU between uses. Rows: prompt (and completion).

    `compute_metrics` gets summed log-probabilities of the rollouts [prompts, K, 2] (student, teacher) and their lengths
    [prompts, K] as label_ids.
    """

    config_class = OPDConfig
    collator_class = PromptCollator

    def __init__(self, *args: Any, teacher_model: Any = None, teacher_offload: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        teacher_model = check_teacher(self.args, teacher_model)
        self.teacher, self.vocabulary = add_teacher(self, teacher_model, teacher_offload)
        self.terminal_ids, self.stop = find_stop_outcome(self, self.args.one_stop_outcome)
        self.across = find_across(self)
        self.ends = torch.tensor(self.terminal_ids, device=self.args.device)  # once: a copy from the host waits
        align_generation(self.model, self.tokenizer, self.terminal_ids)  # the student learns to write these too
        if self.data_collator.pictures and (self.args.rollout == "vllm" or self.args.rollouts == "replay"):
            option = "rollout: vllm" if self.args.rollout == "vllm" else "rollouts: replay"
            raise InputError(f"{option} shows prompts' pictures to nobody yet: drop it, or model.images")
        self.backend = make_backend(self, self.args)
        self.reward = Reward(**self.args.reward) if self.args.reward else None
        self.live, self.source = Live(self), SOURCES[self.args.rollouts](self)
        self.upcoming: list[dict[str, Any]] = []  # the next step's micro-batches, with `rollout_ahead`
        self.upcoming_of: Any = None
        self.synchronised: int | None = None  # the step whose weights are where rollouts are sampled
        if self.args.lmbda < 1:
            warn_if_cut(self.train_dataset, self.args.max_completion_length)

    @classmethod
    def check_rows(cls, rows: Any, tokenizer: Any, args: Any, name: str) -> None:
        """As PostTrainer has it. Raises InputError where a reward, or a share of prompts that are not sampled, wants an
        answer of the data that is missing."""
        super().check_rows(rows, tokenizer, args, name)
        if args.reward and args.reward.get("function") == "exact_match":
            check_answered(rows, tokenizer, f"{name}: reward exact_match compares with completions of the data")
        elif name.startswith("train") and args.lmbda < 1:
            check_answered(rows, tokenizer, "lmbda below 1 trains on completions of the data")

    @staticmethod
    def examples(row: dict) -> list[Example]:
        """The prompt with its completion in the data, where it has one."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])] if row["completion_ids"] else [])]

    # ---- rollouts

    def horizon_at(self, step: int) -> int:
        """The longest rollout at an optimizer step, in tokens."""
        asked = self.args.horizon
        if isinstance(asked, dict):
            share = min(step / asked["steps"], 1.0)
            asked = round(asked["from"] + share * (asked["to"] - asked["from"]))
        return asked or self.args.max_completion_length

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As PostTrainer has it; the weights may have changed since the last one."""
        self.synchronised, self.upcoming = None, []
        return super().train(*args, **kwargs)

    def prepare_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollouts of all micro-batches, from one generation call."""
        if self.args.rollouts != "frozen":
            rollout.synchronise(self)
        batches = self.roll_out(batches, self.state.global_step)
        if self.upcoming:
            rows = [row for batch in self.upcoming for row in batch["prompts"].items]
            seed, (asked, _) = self._seed(self.state.global_step + 1), self._asked(rows, self.state.global_step + 1)
            longest = self.horizon_at(self.state.global_step + 1)
            self.backend.begin([row["prompt_ids"] for row in asked], seed, longest)
        if not self.teacher.dense:
            batches = ask_server(self, batches, self.top_k)
        if self.args.diagnostics and self.teacher.dense and not self.across and "teacher_ids" not in batches[0]:
            look_at(self, batches)
        return self._weigh(batches) if self.args.token_weights else batches

    def next_window(self, epoch_iterator: Any, count: int) -> list[dict[str, Any]]:
        """As PostTrainer has it; with `rollout_ahead` the window behind it is read as well, within a pass."""
        if not self.args.rollout_ahead:
            return super().next_window(epoch_iterator, count)
        batches = self.upcoming if self.upcoming_of is epoch_iterator else []
        batches = batches or super().next_window(epoch_iterator, count)
        self.upcoming, self.upcoming_of = [], epoch_iterator
        if self.state.global_step + 1 < self.state.max_steps:
            self.upcoming = super().next_window(epoch_iterator, self.args.gradient_accumulation_steps)
        return batches

    def prepare_evaluation(self) -> None:
        """Evaluation samples too."""
        rollout.synchronise(self)

    def roll_out(self, batches: list[dict], *seed: int) -> list[dict]:
        """Batches of prompts -> batches with K rollouts of each prompt as branches or (a share 1 - lmbda) its data."""
        args, rows = self.args, [row for batch in batches for row in batch["prompts"].items]
        own_seed, evaluating = self._seed(*seed), seed[0] == EVALUATION
        longest = args.max_completion_length if evaluating else self.horizon_at(seed[0])
        asked, sampled = self._asked(rows, *seed)
        with rollout.seeded(self.accelerator.device, *own_seed):
            torch.rand(len(rows))  # those of `_asked`
            answered = (self.live if evaluating else self.source).answer(asked, own_seed, longest)
        scores = None if evaluating else self.source.scores(asked)
        columns = [{"sampled": True} for _ in asked]
        if self.reward:
            grades = self.reward.grades(self.tokenizer, asked, answered).tolist()
            columns = [{"sampled": True, "grades": own} for own in grades]
        done, examples = iter(zip(answered, columns, columns if scores is None else scores, strict=True)), []
        known: list[Any] = []
        for row, own in zip(rows, sampled, strict=True):
            ids = row["completion_ids"]
            given = (row["prompt_ids"], [ids]), {"sampled": False}, [{"sampler_logps": [math.nan] * len(ids)}]
            (prompt, answers), more, of_each = next(done) if own else given
            seen = row.get("images") or ()
            examples.append(Example(prompt, [Branch(ids[:longest]) for ids in answers], more, seen, reading_of(row)))
            known.append(of_each)
        if not all(branch.ids for example in examples for branch in example.branches):
            raise InputError("lmbda below 1 trains on completions of the data, and a row has none")
        return self._lay_out(batches, examples, None if scores is None else known)

    def _seed(self, *seed: int) -> tuple[int, ...]:
        """Of this rank's rollouts of a step, or of an evaluation."""
        return self.args.seed, *seed, self.accelerator.process_index

    def _asked(self, rows: list[dict], *seed: int) -> tuple[list[dict], list[bool]]:
        """Those of the rows that the student answers, and of each row whether it is one of them."""
        with rollout.seeded(self.accelerator.device, *self._seed(*seed)):
            sampled = (torch.rand(len(rows)) < (1.0 if seed[0] == EVALUATION else self.args.lmbda)).tolist()
        return [row for row, own in zip(rows, sampled, strict=True) if own], sampled

    def _lay_out(self, batches: list[dict], examples: list[Example], known: list[list[dict]] | None) -> list[dict]:
        """Micro-batches on the device, of as many rows as `batches` and of about as many tokens as each other. known:
        what was said beforehand of each branch, lists of one number, or K, for each token."""
        tokens = [len(one.prompt) + sum(len(branch.ids) for branch in one.branches) for one in examples]
        groups = share_out(tokens, [len(batch["prompts"].items) for batch in batches])
        columns = [name for name in ("index", "row_weights") if name in batches[0]]
        rows = {name: torch.cat([batch[name] for batch in batches]) for name in columns}
        made = []
        for group in map(sorted, groups):
            batch = self.data_collator.lay_out([examples[row] for row in group])
            rollouts = (branch.ids for row in group for branch in examples[row].branches)
            batch["repeated"] = torch.tensor([*map(rollout.repeated_share, rollouts)])
            if known:
                lengths = [len(branch.ids) for row in group for branch in examples[row].branches]
                scores = [of_branch for row in group for of_branch in known[row]]
                order = torch.unique_consecutive(batch["owner"]).tolist()
                batch |= {name: torch.cat([torch.tensor(scores[n][name][: lengths[n]]) for n in order])
                          for name in scores[0]}  # fmt: skip
            made.append(self._prepare_inputs(batch | {name: values[group] for name, values in rows.items()}))
        return made

    def _weigh(self, batches: list[dict]) -> list[dict]:
        """Each micro-batch with `token_weights` [N], of the window: students and teacher score it once more, before the
        first backward, so that the weights do not depend on how the window is cut."""
        scored = []
        for batch in batches:
            with torch.no_grad(), eval_mode(self.model_wrapped), self.accelerator.autocast():
                scores = self.compare(self.model_wrapped, batch, None)
            gap = scores["teacher"] - scores["student"]
            divergence = scores.get("divergence", -gap)
            scored.append(Tokens(scores["student"], scores["teacher"], divergence, batch["owner"], self.weights(batch)))
        name, options = named_options(self.args.token_weights)
        found = weigh(Tokens.of(scored, self.accelerator), name, options).split([len(each.student) for each in scored])
        return [batch | {"token_weights": w} for batch, w in zip(batches, found, strict=True)]

    # ---- losses

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The loss of each rollout token, [N]."""
        if "shift_labels" not in batch:  # evaluation
            [batch] = self.roll_out([batch], EVALUATION, int(batch["index"][0]) % 2**32)
        weights, more = self.weights(batch), batch.get("token_weights", 1.0)
        scores = self.compare(model, batch, weights * more)
        values = scores["value"] * more
        lengths = per_branch(torch.ones_like(values), batch)
        metrics = self._metrics(scores, batch, lengths)
        result = Losses(values, weights, metrics, scores.get("router_logits"))
        if not torch.is_grad_enabled():  # in evaluation every prompt has K rollouts
            shape = len(batch["index"]), self.args.num_generations
            summed = [per_branch(scores[name], batch).view(shape) for name in ("student", "teacher")]
            result.predictions, result.labels = torch.stack(summed, dim=-1), lengths.view(shape)
        return result

    @property
    def top_k(self) -> int:
        """How many of the teacher's top tokens the loss compares with; 0: it needs none, or all."""
        return self.args.teacher_top_k or self.args.precompute_teacher_top_k or 0

    def compare(self, model: nn.Module, batch: dict, weights: Tensor | None) -> dict[str, Any]:
        """The loss of each token as `value`, and what it is made of, [N] each. weights: what each will count."""
        args, tokens, temperature = self.args, self.stop.of(targets(batch)), self.args.temperature
        if self.across:
            return self._by_chunk(model, batch, tokens)
        if args.loss_type == POLICY_GRADIENT:
            return self._policy_gradient(model, batch, tokens, weights)
        function = teacher_tiles.divergence(args.loss_type, args.beta, args.skew_alpha)
        if self.top_k:
            known = self._known(batch, tokens)
            given = known["teacher_ids"], known["teacher_logps"], tokens, temperature, self.vocabulary
            by_rest: Any = residual if args.teacher_rest == "residual" else partial(top_k, function)
            tile = by_rest(*given, teacher=known["teacher_own"])
        else:
            states = self.teacher.states(batch, self.stop)
            tile = teacher_tiles.dense(function, states, tokens, temperature, ce_coef=0.0)
        return self.score(model, batch, self.stop(tile), weights)

    def _known(self, batch: dict, tokens: Tensor) -> dict[str, Tensor]:
        """What the teacher says of `tokens` and, with a top_k, its top tokens: it may have been asked beforehand."""
        if "teacher_own" in batch:
            return batch
        return self.teacher.top(batch, self.top_k, tokens, self.args.temperature, self.vocabulary, self.stop)

    def _by_chunk(self, model: nn.Module, batch: dict, tokens: Tensor) -> dict[str, Any]:
        """`compare` with a teacher that has its own tokenizer: see `scoring.chunks`."""
        args, view = self.args, self.teacher.seen(batch)
        sampled = args.loss_type == POLICY_GRADIENT
        read = self.across.read(self.teacher, batch, not sampled, args.temperature)
        function = teacher_tiles.divergence("reverse_kl" if sampled else args.loss_type, args.beta, args.skew_alpha)
        tile = self.across.tile(function, read, view["match"], tokens, args.temperature)
        scores = self.score(model, batch, tile)
        chunks = Chunks.of(view, scores["student"], read.own)
        value, divergence = chunks.on_rollouts(scores["value"], scores["alone"] > 0)
        if sampled:
            value = -chunks.credit * scores["value"]
        teacher = scores["student"] + chunks.gap
        return scores | {"value": value, "divergence": divergence, "teacher": teacher}

    def _policy_gradient(self, model: nn.Module, batch: dict, tokens: Tensor, weights: Tensor | None) -> dict[str, Any]:
        """Sampled tokens alone. With a discount the advantage needs the rest of the rollout first."""
        temperature, discount = self.args.temperature, self.args.discount
        teacher = self._known(batch, tokens)["teacher_own"]
        share, extra = 1.0, None
        if self.reward:
            share, coef = self.reward.shares(self.state.global_step / max(self.state.max_steps, 1))
            extra = coef * group_advantage(batch["grades"]).flatten()[batch["owner"]]
        if discount == 0:
            common = temperature, self.vocabulary, share, extra, self._sampler(batch)
            tile = teacher_tiles.SampledPolicyGradient(tokens, teacher, *common)
            return self.score(model, batch, self.stop(tile), weights)
        scores = self.score(model, batch, self.stop(LogProb(tokens, temperature, True, self.vocabulary)))
        student = scores["value"].detach()
        advantage = share * teacher_tiles.credited(teacher - student, batch["owner"], discount)
        advantage = advantage if extra is None else advantage + extra
        advantage = advantage * teacher_tiles.importance(student, self._sampler(batch))
        value = policy_gradient(scores["value"], advantage)
        return scores | {"value": value, "student": student, "teacher": teacher}

    def _sampler(self, batch: dict) -> Tensor | None:
        """ln q of the tokens [N] as they were sampled, where that was by other weights; NaN where it does not count."""
        if not self.args.rollout_ahead or "sampler_logps" not in batch:
            return None
        return batch["sampler_logps"].masked_fill(self._merged(targets(batch)), math.nan)

    def _merged(self, tokens: Tensor) -> Tensor:
        """Which tokens are one of several ends that count as one outcome: their ln q is that of all together."""
        return torch.isin(tokens, self.stop.ids) if self.stop else torch.zeros_like(tokens, dtype=torch.bool)

    def _metrics(self, scores: dict, batch: dict, lengths: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Means over the tokens that the student sampled itself (not over the data's completions) and over rollouts."""
        student, teacher = scores["student"], scores["teacher"]
        gap = teacher - student
        rolled = (batch["sampled"] * row_weights(batch))[batch["row"]]  # [rollouts]
        own = rolled[batch["owner"]]  # [N]
        ends = torch.isin(targets(batch), self.ends)
        stopped = per_branch(ends.float(), batch)  # a rollout has at most one such token, its last
        # one that the horizon cut, and not its own length, neither stopped nor failed to
        cut = (stopped == 0) & (lengths < self.args.max_completion_length)
        # the mean of -gap over sampled tokens is an estimate of the reverse KL, where that is not the loss itself
        reverse_kl = scores["divergence"] if self.args.loss_type == "reverse_kl" else -gap
        metrics = {
            "logprob/student": (student, own), "logprob/teacher": (teacher, own), "logprob/gap": (gap, own),
            "distill/advantage": (gap, own), "distill/reverse_kl": (reverse_kl, own),
            "generation/length": (lengths, rolled), "generation/stopped": (stopped, rolled * ~cut),
            "generation/repeated": (batch["repeated"], rolled),
        }  # fmt: skip
        if "sampler_logps" in batch:
            away, one = batch["sampler_logps"] - student, own * ~self._merged(targets(batch))
            metrics |= {"sampling/kl": (away, one), "sampling/logp_difference": (away.abs(), one)}
        metrics |= by_teacher(self.teacher, batch, "distill/reverse_kl", reverse_kl, own)
        if self.across:
            metrics |= alignment(self.teacher.seen(batch), scores["alone"], own)
        if self.reward:
            grades, counts = batch["grades"], row_weights(batch)
            metrics |= {"reward/mean": (grades.mean(1), counts), "reward/spread": (grades.std(1, correction=0), counts)}
        return metrics | ({"entropy": (scores["entropy"], own)} if "entropy" in scores else {})

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexities of the rollouts, from the mean log-probabilities."""
        for name in ("student", "teacher"):
            if f"logprob/{name}" in metrics:
                metrics[f"perplexity/{name}"] = math.exp(min(-metrics[f"logprob/{name}"], 700))
        return metrics
