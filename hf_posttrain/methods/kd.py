"""Knowledge distillation on data: the student learns from the teacher's whole next-token distribution.

    loss = mean over trained tokens of  (1 - kd_coef) * -log q(token)  +  kd_coef * D(q, p)

q is the student's distribution, p the teacher's; D runs at `temperature`, without a T^2 factor. The teacher is scored
with the student, or once before training into a cache of its top tokens (precompute_teacher_top_k).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models.teacher import TeacherCallback, add_teacher, precompute_top_k
from ..scoring import layouts
from ..scoring import teacher_tiles as distill
from ..scoring.forward import full_logits
from ..trainer import rule_table as rules
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.loss_units import Losses
from .sft import collate_supervised


@dataclass
class KDConfig(PostTrainConfig):
    """Options of KD; every other field of TrainingArguments and PostTrainConfig works as well."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    kd_coef: float = 0.4
    """Share of the divergence in the loss; the rest is the cross-entropy of the data."""
    divergence: str = "forward_kl"
    """forward_kl, reverse_kl, jsd (with beta), skew_forward_kl, skew_reverse_kl (with skew_alpha) or tvd."""
    beta: float | None = None
    """JSD's interpolation: 0 is forward KL, 1 reverse KL; None: 0.5."""
    skew_alpha: float = 0.1
    """Share of the other distribution that skew KL mixes in."""
    temperature: float = 1.0
    """Divides both logits in the divergence."""
    completion_only_loss: bool | None = None
    """Train only the completion of prompt + completion rows; None: yes for such rows. False trains the prompt too."""
    assistant_only_loss: bool = False
    """Of `messages`, train only what assistants wrote, each turn with its end token."""
    precompute_teacher_top_k: int | None = None
    """Score the data with the teacher once, keep its top K tokens on disk, train without it; None: online."""

    def __post_init__(self):
        rules.check("kd", self)
        super().__post_init__()


class KDTrainer(PostTrainer):
    """KD of a causal LM; further arguments: `teacher_model`, with the same token ids, and `teacher_offload`, which
    keeps it on CPU between uses. Rows as for SFT.

    `compute_metrics` gets the student's full logits and shift_labels, [rows, L, V] and [rows, L].
    """

    method = "kd"
    unit = "tokens"
    config_class = KDConfig
    teacher: TeacherCallback | None

    def __init__(
        self,
        *args: Any,
        teacher_model: nn.Module | str | None = None,
        teacher_offload: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.teacher, self.vocabulary = add_teacher(self, teacher_model, teacher_offload)
        if self.args.precompute_teacher_top_k is not None:
            self.check_scoring(self.model)
            self.train_dataset = precompute_top_k(self, self.train_dataset, "train")
            self.eval_dataset = precompute_top_k(self, self.eval_dataset, "eval")
            self.score_beside(None)
            self.remove_callback(self.teacher)
            self.teacher = None  # with its memory

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: KDConfig) -> dict[str, Tensor]:
        """As for SFT, with teacher_ids and teacher_logps [N, K] where the teacher was cached."""
        batch = collate_supervised(rows, layout)
        if "teacher_ids" in rows[0]:
            order = torch.unique_consecutive(batch["owner"]).tolist()
            for name in ("teacher_ids", "teacher_logps"):
                batch[name] = torch.cat([torch.tensor(rows[i][name]) for i in order])
        return batch

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The mixed loss of each trained token, [N]."""
        config, targets = self.args, layouts.targets(batch)
        function = distill.divergence(config.divergence, config.beta, config.skew_alpha)
        if "teacher_ids" in batch:
            cache, ce_coef = (batch["teacher_ids"], batch["teacher_logps"]), 1 - config.kd_coef
            tile = distill.top_k(function, *cache, targets, config.temperature, ce_coef, self.vocabulary)
        elif self.teacher is None:
            raise InputError(
                "this data set was not scored by the teacher: with precompute_teacher_top_k, pass every data set when "
                "the trainer is built"
            )
        else:
            tile = distill.dense(function, self.teacher.side(batch), targets, config.temperature, 1 - config.kd_coef)
        weights = self.weights(batch)
        scores = self.score(model, batch, tile, weights)
        metrics = {f"distill/{name}": (scores[name], None) for name in ("ce", "divergence") if name in scores}
        return Losses(scores["value"], weights, metrics, scores.get("router_logits"))

    def predictions(self, model: nn.Module, batch: dict[str, Any], losses: Losses) -> tuple[Tensor, Tensor]:
        """Full logits [rows, L, V] and shift_labels [rows, L]: the only place where they exist."""
        return full_logits(model, batch), batch["shift_labels"]
