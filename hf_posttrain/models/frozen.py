"""Frozen models in a training step: a second model on its way to the device and back, and the reference's scores.

`reference` and `teacher` make them; `score_cache` keeps their scores on disk.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from ..engines import engine
from ..errors import InputError
from ..scoring import forward
from ..scoring.attention_selection import choose_attention
from ..scoring.head import LogProb
from .adapters import is_adapter_weight

logger = logging.getLogger(__name__)


class FrozenModel:
    """A second model: `with frozen as model` brings it to the device; with `offload` it is on CPU between uses.

    Its first use prepares it for the engine, which cuts its weights over the ranks if it cuts the policy's.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, offload: bool = False):
        model.requires_grad_(False)
        forward.enable_scoring(model)
        choose_attention(forward.causal_lm(model), accelerator.device)
        self.model = model.eval()
        self.accelerator = accelerator
        self.offload = offload
        self.sharded = engine.shards_weights(accelerator)
        self.on_device = False

    def __enter__(self) -> nn.Module:
        # in most steps it is there already
        if not self.on_device:
            self.model = engine.prepare_frozen(self.model, self.accelerator, self.offload)
            self.on_device = True
        return self.model

    def __exit__(self, *error: Any) -> None:
        if self.offload:
            self.release()

    def release(self) -> None:
        """Give back the device's memory until the next use; shards stay where they are."""
        if not (self.sharded and self.on_device):
            self.model.to("cpu")
            self.on_device = False


def precast_linear_weights(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """`model` with the weights of its linear layers in the dtype to which autocast rounds them at each use: half the
    memory, and the same numbers to the last bit.

    Those of an embedding stay, and all where an engine cuts them, since it wants one dtype.
    """
    if not engine.shards_weights(accelerator):
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        with accelerator.autocast():
            for layer, low in forward.autocast_linear_layers(model, accelerator.device):
                if id(layer.weight) not in embedded:
                    layer.weight.data = layer.weight.data.to(low)
    return model


def shares_trained_weights(frozen: nn.Module, policy: nn.Module) -> bool:
    """Is a model that shall be frozen the policy, or does it hold weights that this trains? They would move there, or
    be frozen here.
    """
    trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    same = forward.causal_lm(frozen) is forward.causal_lm(policy)
    return same or any(id(parameter) in trained for parameter in frozen.parameters())


def branch_logps(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Summed log-probabilities of each branch of a batch, without gradient: [B * K]."""
    with torch.no_grad(), forward.eval_mode(model):
        values = forward.score(model, batch, LogProb(batch.targets)).value
    return batch.per_branch(values)


@dataclass
class Reference:
    """What a trainer asks for the reference's scores."""

    trainer: Any
    inside: Callable | None  # model -> a context in which it is the reference; None: all rows must be scored already
    second: FrozenModel | None  # the model that scores, a copy of the policy or the user's; None: the policy itself
    lay_out: Callable | None  # from a batch to those that are scored, one after the other, where they differ
    starts_equal: bool  # is the reference the policy as it was at the start?
    checked: bool = False  # by `check_start`

    def logps(self, policy: nn.Module, batch: MicroBatch, scored: list[MicroBatch] | None = None) -> Tensor:
        """Summed log-probabilities of the K branches of each example, [B, K]. scored: batches with its branches, in
        place of those of `lay_out`.

        Raises InputError where the rows were not scored beforehand and no reference was kept.
        """
        if batch.ref_logps is not None:  # scored before training
            return batch.ref_logps
        if self.inside is None:
            raise InputError(
                "this data set was not scored by the reference: with precompute_ref_log_probs (not supported with "
                "IterableDataset) pass every data set when the trainer is built, or turn it off to keep a reference"
            )
        with self.trainer.accelerator.autocast(), self.second or nullcontext(policy) as model:
            scored = scored or ([batch] if self.lay_out is None else self.lay_out(batch))
            with self.inside(forward.unwrap_model(model)):
                found = [branch_logps(model, part).view(len(batch.index), -1) for part in scored]
                return torch.cat(found, dim=1)

    def check_start(self, logps: Tensor, ref: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Warn, once, where policy and reference, one model, differ before the first step. All [B] or [B, K], rows
        their numbers [B]. Raises InputError where the base, on which an adapter's reference is, is trained too.
        """
        if self.checked or not self.starts_equal or self.trainer.state.global_step or not logps.requires_grad:
            return
        self.checked = True
        policy = forward.unwrap_model(self.trainer.model)
        if self.second is None and self.inside not in (None, nullcontext):
            trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
            if base := [name for name in trained if not is_adapter_weight(policy, name)]:
                problem = f"{base[0]} was frozen when the trainer was built"
                raise InputError(f"{problem}, and its reference would move with it")
        gap = ((logps.detach() - ref).abs() / lengths.clamp(min=1)).view(len(rows), -1).amax(1)
        if len(away := rows[gap > (1e-4 if self.trainer.exact else 5e-2)]):
            logger.warning(
                "before the first step the policy differs from its reference by %.2g in log-probability per token, in "
                "%d of %d rows, prepared row %d first: is dropout or NEFTune's noise on, does the adapter's "
                "initialisation change the base, or did another model score these rows?",
                gap.max(),
                len(away),
                len(rows),
                away[0],
            )
