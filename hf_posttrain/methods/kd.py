"""Knowledge distillation on data: the student learns from the teacher's whole next-token distribution.

    loss = mean over trained tokens of  (1 - kd_coef) * -log q(token)  +  kd_coef * D(q, p)

q is the student's distribution, p the teacher's; D runs at `temperature`, without a T^2 factor. The teacher is scored
with the student, or once before training into a cache of its top tokens (precompute_teacher_top_k).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import InputError
from ..models.add_teacher import add_teacher, find_across, find_stop_outcome, precompute_top_k
from ..models.served_teacher import ask_server
from ..models.teacher import by_teacher
from ..scoring import teacher_tiles
from ..scoring.chunks import Chunks, alignment
from ..scoring.forward import targets
from ..scoring.layouts import Example, reading_of
from ..scoring.top_tokens import top_k
from ..trainer.base import PostTrainer
from ..trainer.loss_units import Losses
from . import METHODS
from .distillation import DistillationConfig, check_teacher
from .sft import SupervisedOptions, supervised_examples


@dataclass
class KDConfig(SupervisedOptions, DistillationConfig):
    """Options of KD; every other field of TrainingArguments and PostTrainConfig works as well."""

    method: ClassVar = METHODS["kd"]
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
    one_stop_outcome: bool = False
    """Count all terminal ids of student and teacher as one outcome in the divergence, where there are several. The
    cross-entropy teaches those of the data all the same."""
    precompute_teacher_top_k: int | None = None
    """Score the data with the teacher once, keep its top K tokens on disk, train without it; None: online."""


class KDTrainer(PostTrainer):
    """KD of a causal LM; further arguments: `teacher_model` (a model, its name, a TeacherSection, or a dict of them by
    `teacher_names`), and `teacher_offload`, which keeps it on CPU between uses. Rows as for SFT.

    `compute_metrics` gets the student's full logits and shift_labels, [rows, L, V] and [rows, L].
    """

    config_class = KDConfig
    teacher: Any

    def __init__(self, *args: Any, teacher_model: Any = None, teacher_offload: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        teacher_model = check_teacher(self.args, teacher_model)
        self.teacher, self.vocabulary = add_teacher(self, teacher_model, teacher_offload)
        _, self.stop = find_stop_outcome(self, self.args.one_stop_outcome)
        self.across = find_across(self)
        self.cached_at = self.args.temperature  # of a cache of its scores
        if self.args.precompute_teacher_top_k is not None:
            precompute_top_k(self)
            self.teacher = None  # with its memory

    @staticmethod
    def examples(row: dict) -> list[Example]:
        """As SFT has them; the teacher may read another prompt."""
        reading = reading_of(row)
        return [replace(example, reading=reading) for example in supervised_examples(row)]

    def prepare_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a server says of all micro-batches, asked for at once."""
        if self.teacher is None or self.teacher.dense:
            return batches
        return ask_server(self, batches, self.args.teacher_top_k)

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The mixed loss of each trained token, [N]."""
        config, weights = self.args, self.weights(batch)
        function = teacher_tiles.divergence(config.divergence, config.beta, config.skew_alpha)
        tokens, ce_coef = targets(batch), 1 - config.kd_coef
        if self.across:
            return self._by_chunk(model, batch, function)
        common = {"temperature": config.temperature, "targets": self.stop.of(tokens)}
        common["ce_coef"] = 0.0 if self.stop else ce_coef
        if "teacher_ids" in batch:
            if config.temperature != self.cached_at:
                raise InputError(f"temperature={config.temperature:g}: the teacher was scored at {self.cached_at:g}")
            cache = batch["teacher_ids"], batch["teacher_logps"]
            tile = top_k(function, *cache, vocabulary=self.vocabulary, **common)
        elif self.teacher is None:
            raise InputError(
                "this data set was not scored by the teacher: with precompute_teacher_top_k, pass every data set when "
                "the trainer is built"
            )
        elif k := config.teacher_top_k:
            known = self.teacher.top(batch, k, self.stop.of(tokens), config.temperature, self.vocabulary, self.stop)
            tile = top_k(function, known["teacher_ids"], known["teacher_logps"], vocabulary=self.vocabulary, **common)
        else:
            tile = teacher_tiles.dense(function, self.teacher.states(batch, self.stop), **common)
        if self.stop:  # the data's own end is a token like others to the cross-entropy
            tile = teacher_tiles.beside_cross_entropy(self.stop(tile), tokens, ce_coef)
        scores = self.score(model, batch, tile, weights)
        metrics: dict[str, Any] = {f"distill/{n}": (scores[n], None) for n in ("ce", "divergence") if n in scores}
        metrics |= by_teacher(self.teacher, batch, "distill/divergence", scores["divergence"], weights)
        return Losses(scores["value"], weights, metrics, scores.get("router_logits"))

    def _by_chunk(self, model: nn.Module, batch: dict[str, Any], function: Any) -> Losses:
        """The mixed loss with a teacher that has its own tokenizer: see `scoring.chunks`."""
        config, weights, view = self.args, self.weights(batch), self.teacher.seen(batch)
        read = self.across.read(self.teacher, batch, self.teacher.dense, 1.0)
        tokens, ce_coef = self.stop.of(targets(batch)), 1 - config.kd_coef
        tile = self.across.tile(function, read, view["match"], tokens, 1.0, ce_coef)
        scores = self.score(model, batch, tile)
        alone = scores["alone"] > 0
        # of a token that is not alone its ln q is known, which makes both parts of the loss
        chunks = Chunks.of(view, torch.where(alone, scores["student"], scores["value"]), read.own)
        apart = chunks.on_data(function)
        mixed = -ce_coef * scores["value"] + config.kd_coef * apart
        values = torch.where(alone, scores["value"], mixed)
        divergence = torch.where(alone, scores.get("divergence", apart), apart)
        metrics: dict[str, Any] = {"distill/ce": (-scores["student"], None)}
        metrics["distill/divergence"] = divergence.detach(), None
        return Losses(values, weights, metrics | alignment(view, scores["alone"], weights), scores.get("router_logits"))
