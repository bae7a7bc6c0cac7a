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
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..data.lengths import check_completions
from ..errors import InputError
from ..generation import rollout, vllm
from ..losses.divergence import policy_gradient
from ..models.prepare import align_generation, find_terminal_ids
from ..models.teacher import add_teacher
from ..scoring import teacher_tiles
from ..scoring.forward import per_branch, targets
from ..scoring.head import LogProb
from ..scoring.layouts import IGNORE, Branch, Collator, Example, Later, share_out
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_units import Losses, row_weights
from . import METHODS
from .rules import POLICY_GRADIENT

BACKENDS: dict[str, Any] = {
    "transformers": rollout.OwnModel, "colocate": vllm.Colocated, "server": vllm.Server,
}  # fmt: skip
"""What samples rollouts, by vllm_mode or else by rollout."""
EVALUATION = 2**31
"""Stands for the step in the seed of an evaluation's rollouts, which are then the same at every evaluation."""


@dataclass
class OPDConfig(PostTrainConfig):
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
    generation_batch_size: int | None = None
    """Most rollouts in one generation call; None: the whole window at once, on a GPU as many as its free memory takes.
    What is drawn depends on it: with a number a GPU that has other work draws the same."""
    rollout: str = "transformers"
    """What samples: transformers, with the model that trains, or vllm, which gets the weights once a step."""
    vllm_mode: str | None = None
    """Where vLLM runs: colocate (None), in each training process on its GPU, or server, one that vllm serve started."""
    vllm_server_base_url: str | None = None
    """Of vllm_mode server, such as http://localhost:8000; it must see output_dir, and serve this run alone."""
    vllm_gpu_memory_utilization: float | None = None
    """Of vllm_mode colocate: the share of the GPU's memory that vLLM keeps for itself; None: 0.3."""

    def __post_init__(self):
        super().__post_init__()
        vllm.check_installed(self)
        if self.rollout == "vllm":
            self.vllm_mode = self.vllm_mode or "colocate"


class PromptCollator(Collator):
    """Keeps prompts as they are: `roll_out` makes them a batch, once they have answers."""

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        """`index` [rows], `prompts`, and their `input_ids` for metrics that ask for inputs, -100 behind each."""
        prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
        index = torch.tensor([row.get("index", -1) for row in rows])
        return {"index": index, "prompts": Later(rows), "input_ids": pad_sequence(prompts, True, IGNORE)}


class OPDTrainer(PostTrainer):
    """OPD of a causal LM; further arguments: `teacher_model`, with the same token ids, and `teacher_offload`, which
    keeps it on CPU between uses. Rows: prompt (and completion).

    `compute_metrics` gets summed log-probabilities of the rollouts [prompts, K, 2] (student, teacher) and their lengths
    [prompts, K] as label_ids.
    """

    config_class = OPDConfig
    collator_class = PromptCollator

    def __init__(
        self, *args: Any, teacher_model: nn.Module | str | None = None, teacher_offload: bool = False, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.teacher, self.vocabulary = add_teacher(self, teacher_model, teacher_offload)
        theirs = find_terminal_ids(self.teacher.model, self.tokenizer, self.args.chat_template_kwargs)
        self.terminal_ids = list(dict.fromkeys(self.terminal_ids + theirs))
        align_generation(self.model, self.tokenizer, self.terminal_ids)  # the student learns to write these too
        self.rollouts = BACKENDS[self.args.vllm_mode or self.args.rollout](self)
        self.synchronised: int | None = None
        """The step whose weights are where rollouts are sampled."""
        if self.args.lmbda < 1:
            check_completions(self.train_dataset, self.args.max_completion_length)

    @staticmethod
    def examples(row: dict) -> list[Example]:
        """The prompt with its completion in the data, where it has one."""
        return [Example(row["prompt_ids"], [Branch(row["completion_ids"])] if row["completion_ids"] else [])]

    # ---- rollouts

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As PostTrainer has it; the weights may have changed since the last one."""
        self.synchronised = None
        return super().train(*args, **kwargs)

    def prepare_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollouts of all micro-batches, from one generation call."""
        self._synchronise()
        return self.roll_out(batches, self.state.global_step)

    def prepare_evaluation(self) -> None:
        """Evaluation samples too."""
        self._synchronise()

    def _synchronise(self) -> None:
        """The weights of now to where rollouts are sampled: once an optimizer step, and each time outside training."""
        step = self.state.global_step if self.is_in_train else None
        if step is None or step != self.synchronised:
            self.rollouts.synchronise()
        self.synchronised = step

    def roll_out(self, batches: list[dict], *seed: int) -> list[dict]:
        """Batches of prompts -> batches with K rollouts of each prompt as branches or (a share 1 - lmbda) its data."""
        args, rows = self.args, [row for batch in batches for row in batch["prompts"].items]
        own_seed = (args.seed, *seed, self.accelerator.process_index)
        with rollout.seeded(self.accelerator.device, *own_seed):
            share = 1.0 if seed[0] == EVALUATION else args.lmbda
            sampled = (torch.rand(len(rows)) < share).tolist()
            prompts = [row["prompt_ids"] for row, own in zip(rows, sampled, strict=True) if own]
            rollouts = iter(self.rollouts.generate(prompts, own_seed))
        examples = []
        for row, own in zip(rows, sampled, strict=True):
            answers = list(islice(rollouts, args.num_generations)) if own else [row["completion_ids"]]
            branches = [Branch(ids[: args.max_completion_length]) for ids in answers]
            examples.append(Example(row["prompt_ids"], branches, {"sampled": own}))
        if not all(branch.ids for example in examples for branch in example.branches):
            raise InputError("lmbda below 1 trains on completions of the data, and a row has none")
        return self._lay_out(batches, examples)

    def _lay_out(self, batches: list[dict], examples: list[Example]) -> list[dict]:
        """Micro-batches on the device, of as many rows as `batches` and of about as many tokens as each other."""
        tokens = [len(one.prompt) + sum(len(branch.ids) for branch in one.branches) for one in examples]
        groups = share_out(tokens, [len(batch["prompts"].items) for batch in batches])
        columns = [name for name in ("index", "row_weights") if name in batches[0]]
        rows = {name: torch.cat([batch[name] for batch in batches]) for name in columns}
        made = []
        for group in map(sorted, groups):
            batch = self.data_collator.lay_out([examples[row] for row in group])
            made.append(self._prepare_inputs(batch | {name: values[group] for name, values in rows.items()}))
        return made

    # ---- losses

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The loss of each rollout token, [N]."""
        if "shift_labels" not in batch:  # evaluation
            [batch] = self.roll_out([batch], EVALUATION, int(batch["index"][0]) % 2**32)
        weights = self.weights(batch)
        if self.args.loss_type == POLICY_GRADIENT:
            values, scores = self._policy_gradient(model, batch, weights)
        else:
            function = teacher_tiles.divergence(self.args.loss_type, self.args.beta, self.args.skew_alpha)
            states, temperature = self.teacher.states(batch), self.args.temperature
            tile = teacher_tiles.dense(function, states, targets(batch), temperature, ce_coef=0.0)
            scores = self.score(model, batch, tile, weights)
            values = scores["value"]
        lengths = per_branch(torch.ones_like(values), batch)
        metrics = self._metrics(scores, batch, lengths)
        result = Losses(values, weights, metrics, scores.get("router_logits"))
        if not torch.is_grad_enabled():  # in evaluation every prompt has K rollouts
            shape = len(batch["index"]), self.args.num_generations
            summed = [per_branch(scores[name], batch).view(shape) for name in ("student", "teacher")]
            result.predictions, result.labels = torch.stack(summed, dim=-1), lengths.view(shape)
        return result

    def _policy_gradient(self, model: nn.Module, batch: dict, weights: Tensor) -> tuple[Tensor, dict]:
        """Sampled tokens alone. With a discount the advantage needs the rest of the rollout first."""
        tokens, temperature, discount = targets(batch), self.args.temperature, self.args.discount
        teacher = self.teacher.score(batch, LogProb(tokens, temperature, vocabulary=self.vocabulary))["value"]
        if discount == 0:
            tile = teacher_tiles.SampledPolicyGradient(tokens, teacher, temperature, self.vocabulary)
            scores = self.score(model, batch, tile, weights)
            return scores["value"], scores
        scores = self.score(model, batch, LogProb(tokens, temperature, True, self.vocabulary))
        student = scores["value"].detach()
        advantage = teacher_tiles.credited(teacher - student, batch["owner"], discount)
        return policy_gradient(scores["value"], advantage), scores | {"student": student, "teacher": teacher}

    def _metrics(self, scores: dict, batch: dict, lengths: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Means over the tokens that the student sampled itself (not over the data's completions) and over rollouts."""
        student, teacher = scores["student"], scores["teacher"]
        gap = teacher - student
        rolled = (batch["sampled"] * row_weights(batch))[batch["row"]]  # [rollouts]
        own = rolled[batch["owner"]]  # [N]
        ends = torch.isin(targets(batch), torch.tensor(self.terminal_ids, device=gap.device))
        stopped = per_branch(ends.float(), batch)  # a rollout has at most one such token, its last
        # the mean of -gap over sampled tokens is an estimate of the reverse KL, where that is not the loss itself
        reverse_kl = scores["divergence"] if self.args.loss_type == "reverse_kl" else -gap
        metrics = {
            "logprob/student": (student, own), "logprob/teacher": (teacher, own), "logprob/gap": (gap, own),
            "distill/advantage": (gap, own), "distill/reverse_kl": (reverse_kl, own),
            "generation/length": (lengths, rolled), "generation/stopped": (stopped, rolled),
        }  # fmt: skip
        return metrics | ({"entropy": (scores["entropy"], own)} if "entropy" in scores else {})

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexities of the rollouts, from the mean log-probabilities."""
        for name in ("student", "teacher"):
            if f"logprob/{name}" in metrics:
                metrics[f"perplexity/{name}"] = math.exp(min(-metrics[f"logprob/{name}"], 700))
        return metrics
