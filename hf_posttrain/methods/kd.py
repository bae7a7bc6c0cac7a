"""Knowledge distillation on data: the student is trained toward the next-token distribution of the teacher.

    loss = mean over trained tokens of  (1 - kd_coef) * -log q(token)  +  kd_coef * D(q, p)

q is the distribution of the student, and p that of the teacher. The divergence D is computed at `temperature`, without
a factor T^2. The teacher scores each batch together with the student. With `teacher.precompute` it scores all rows
once before training, and its hidden states are cached, or with `teacher.top_k` its top tokens. With
`teacher.logprobs_column` the rows have recorded top tokens, and there is no teacher.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..losses.names import DIVERGENCES
from ..options import option
from ..scoring.layouts import Example, teacher_input_of
from ..scoring.teacher_tiles import divergence_function
from ..teachers.cache import precompute_scores
from ..teachers.inputs import DistillationBatch
from ..trainer.loss_output import Losses
from . import METHODS
from .distillation import DistillationConfig, DistillationTrainer
from .objective import Divergence
from .sft import SupervisedOptions, supervised_examples


@dataclass
class KDConfig(SupervisedOptions, DistillationConfig):
    """Options of `KDTrainer`.

    The options of `SupervisedOptions`, `DistillationConfig`, `PostTrainConfig` and `TrainingArguments` are valid as
    well.

    Args:
        learning_rate: Peak learning rate of AdamW.
        kd_coef: Weight of the divergence in the loss, from 0 to 1. The cross-entropy of the data has the remaining
            weight.
        divergence: Name of the divergence: forward_kl, reverse_kl, jsd, skew_forward_kl, skew_reverse_kl, tvd or
            entropy_aware_kl.
        beta: Interpolation coefficient of jsd, where 0 is the forward KL and 1 the reverse KL (by default 0.5), or
            share of the other distribution in the mixture of skew_forward_kl and skew_reverse_kl (by default 0.1).
        temperature: Temperature that divides the logits of student and teacher in the divergence.

    Example:
        ```python
        from hf_posttrain import KDConfig

        args = KDConfig(output_dir="outputs/kd", divergence="jsd", beta=0.5, teacher={"top_k": 20})
        ```
    """

    method: ClassVar = METHODS["kd"]
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW.")
    kd_coef: float = option(
        0.4,
        "Weight of the divergence in the loss, from 0 to 1. The cross-entropy of the data has the remaining weight.",
    )
    divergence: str = option(
        "forward_kl",
        "Name of the divergence: forward_kl, reverse_kl, jsd, skew_forward_kl, skew_reverse_kl, tvd or "
        "entropy_aware_kl.",
        choices=DIVERGENCES,
    )
    beta: float | None = option(
        None,
        "Interpolation coefficient of jsd, where 0 is the forward KL and 1 the reverse KL (by default 0.5), or share "
        "of the other distribution in the mixture of skew_forward_kl and skew_reverse_kl (by default 0.1).",
    )
    temperature: float = option(1.0, "Temperature that divides the logits of student and teacher in the divergence.")


class KDTrainer(DistillationTrainer):
    """Trainer for knowledge distillation (KD) of a causal language model on data.

    Rows have the same formats as for `SFTTrainer`. The arguments `teacher_model` and `teacher_offload` are described in
    `DistillationTrainer`. `compute_metrics` receives as predictions the logits of the student [rows, L, V], and as
    label_ids the shift_labels [rows, L].

    Args:
        *args: Positional arguments of `DistillationTrainer`.
        **kwargs: Keyword arguments of `DistillationTrainer`.

    Example:
        ```python
        from datasets import Dataset

        from hf_posttrain import KDConfig, KDTrainer

        rows = [
            {"prompt": "2 + 2 =", "completion": " 4"},
            {"prompt": "3 + 4 =", "completion": " 7"},
        ]
        trainer = KDTrainer(
            model="Qwen/Qwen3-0.6B",
            args=KDConfig(output_dir="outputs/kd", max_steps=1, report_to="none"),
            train_dataset=Dataset.from_list(rows),
            teacher_model="Qwen/Qwen3-4B",
        )
        trainer.train()
        ```
    """

    config_class = KDConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.teacher.precompute and self.teacher is not None:
            self.teacher_head = precompute_scores(self, self.teacher, self.build_objective().request)
            self.drop_teacher()

    def build_objective(self) -> Divergence:
        """Return the divergence, mixed with the cross-entropy of the data."""
        args = self.args
        options = args.teacher
        request = self.request("dense", options.top_k)
        function = divergence_function(args.divergence, args.beta, args.entropy_threshold)
        return Divergence(function, request, ce_coef=1 - args.kd_coef, top_k_remainder=options.top_k_remainder)

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the examples of SFT, with the input of the teacher if it reads another prompt."""
        teacher_input = teacher_input_of(row)
        return [replace(example, teacher_input=teacher_input) for example in supervised_examples(row)]

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
