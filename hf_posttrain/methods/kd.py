"""Knowledge distillation on data: the student learns from the teacher's whole next-token distribution.

    loss = mean over trained tokens of  (1 - kd_coef) * -log q(token)  +  kd_coef * D(q, p)

q is the student's distribution, p the teacher's; D runs at `temperature`, without a T^2 factor. The teacher is scored
with the student, or once before training into a cache of its top tokens (`teacher: {top_k, precompute}`).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..options import option
from ..scoring.layouts import Example, reading_of
from ..scoring.teacher_tiles import divergence
from ..teachers.cache import precompute_top_k
from ..teachers.inputs import DistillationBatch
from ..trainer.loss_output import Losses
from . import METHODS
from .distillation import DistillationConfig, DistillationTrainer
from .objective import Divergence
from .sft import SupervisedOptions, supervised_examples


@dataclass
class KDConfig(SupervisedOptions, DistillationConfig):
    """Options of KD; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["kd"]
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW.")
    kd_coef: float = option(0.4, "Share of the divergence in the loss; the rest is the cross-entropy of the data.")
    divergence: str = option("forward_kl", "forward_kl, reverse_kl, jsd, skew_forward_kl, skew_reverse_kl or tvd.")
    beta: float | None = option(
        None,
        "Interpolation of jsd, where 0 is forward KL and 1 reverse KL (by default 0.5), or the share of the other "
        "distribution that skew_forward_kl and skew_reverse_kl mix in (by default 0.1).",
    )
    temperature: float = option(1.0, "Divides both logits in the divergence.")


class KDTrainer(DistillationTrainer):
    """KD of a causal LM. Rows as for SFT; for the teacher see `DistillationTrainer`.

    `compute_metrics` gets the student's full logits and shift_labels, [rows, L, V] and [rows, L].
    """

    config_class = KDConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.teacher.precompute and self.teacher is not None:
            precompute_top_k(self, self.teacher, self.build_objective().request)
            self.drop_teacher()

    def build_objective(self) -> Divergence:
        """Return the divergence, mixed with the cross-entropy of the data."""
        args = self.args
        request = self.request("dense", args.teacher.top_k)
        function = divergence(args.divergence, args.beta)
        return Divergence(function, request, ce_coef=1 - args.kd_coef)

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the examples of SFT; the teacher may read another prompt."""
        reading = reading_of(row)
        return [replace(example, reading=reading) for example in supervised_examples(row)]

    def losses(self, model: nn.Module, batch: DistillationBatch) -> Losses:  # type: ignore[override]
        """Return the mixed loss of each trained token, [N]."""
        weights = self.weights(batch)
        scores, signal = self.distill(model, batch, weights)
        assert scores.divergence is not None
        metrics = self.teacher_metrics(batch, signal, scores, scores.divergence, "distill/divergence", weights)
        metrics["distill/divergence"] = scores.divergence, None
        if scores.ce is not None:
            metrics["distill/ce"] = scores.ce, None
        return Losses(scores.value, weights, metrics, scores.router_logits)
