"""Frozen models in a training step: a second model that moves to the device and back, and scores of the reference.

`reference` and `teachers` create them, and `score_cache` stores their scores on disk.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from ..trainer.base import PostTrainer

logger = logging.getLogger(__name__)


class FrozenModel:
    """A second model, which is on the device inside `with frozen as model`.

    The first use prepares the model for the engine, which shards its weights if it shards the policy.

    Args:
        model: The model.
        accelerator: The accelerator of the trainer.
        offload: Whether the model is on CPU between uses.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, offload: bool = False) -> None:
        model.requires_grad_(False)
        forward.enable_scoring(model)
        choose_attention(forward.causal_lm(model), accelerator.device)
        self.model = model.eval()
        self.accelerator = accelerator
        self.offload = offload
        self.sharded = engine.shards_weights(accelerator)
        self.on_device = False

    def __enter__(self) -> nn.Module:
        # in most steps the model is on the device already
        if not self.on_device:
            self.model = engine.prepare_frozen(self.model, self.accelerator, self.offload)
            self.on_device = True
        return self.model

    def __exit__(self, *error: object) -> None:
        if self.offload:
            self.release()

    def release(self) -> None:
        """Move the model to CPU until the next use. Shards stay on their devices."""
        if not (self.sharded and self.on_device):
            self.model.to("cpu")
            self.on_device = False


def precast_linear_weights(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Cast the weights of linear layers to the dtype to which autocast casts them at each use, and return the model.

    This halves their memory and gives the same numbers to the last bit. Weights of an embedding are not cast. No weight
    is cast if the engine shards the model, since it requires one dtype.
    """
    if not engine.shards_weights(accelerator):
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        with accelerator.autocast():
            for layer, dtype in forward.autocast_linear_layers(model, accelerator.device):
                if id(layer.weight) not in embedded:
                    layer.weight.data = layer.weight.data.to(dtype)
    return model


def shares_trained_weights(frozen: nn.Module, policy: nn.Module) -> bool:
    """Return whether a model to be frozen is the policy or shares trained weights with it.

    Otherwise its weights would change in training, or weights of the policy would be frozen.
    """
    trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    same = forward.causal_lm(frozen) is forward.causal_lm(policy)
    return same or any(id(parameter) in trained for parameter in frozen.parameters())


TokenWeights = Callable[[MicroBatch], Tensor]
"""Function of a batch that returns the weights [N] with which log-probabilities of tokens are summed."""


def branch_logps(model: nn.Module, batch: MicroBatch, token_weights: TokenWeights | None = None) -> Tensor:
    """Return the summed log-probabilities of each branch of a batch, without gradient, [B * K]."""
    with torch.no_grad(), forward.eval_mode(model):
        values = forward.score(model, batch, LogProb(batch.targets)).value
    return batch.per_branch(values if token_weights is None else values * token_weights(batch))


@dataclass
class Reference:
    """The reference of a trainer, which scores batches."""

    trainer: "PostTrainer"
    as_reference: Callable[[Any], AbstractContextManager[Any]] | None
    """Returns a context in which the model is the reference. None: rows must have scores already, or the policy must be
    untrained and equal to its reference."""
    frozen_model: FrozenModel | None
    """The model that scores, a copy of the policy or the user's model. None: the policy itself."""
    split_batch: Callable[..., list[MicroBatch]] | None
    """Returns the batches that are scored one after the other instead of a batch, if they differ."""
    starts_equal: bool
    """Whether the reference is the policy as it was at the start."""
    token_weights: TokenWeights | None = None
    """Weights of the tokens in the sums. None: 1."""
    checked: bool = False
    """Whether `check_start` has run."""

    def logps(self, policy: nn.Module, batch: MicroBatch, parts: list[MicroBatch] | None = None) -> Tensor:
        """Return the summed log-probabilities of the K branches of each example, [B, K].

        Args:
            policy: The policy, which scores if there is no second model.
            batch: The batch.
            parts: Batches with its branches, instead of the result of `split_batch`.

        Raises:
            InputError: If the rows were not scored in advance and no reference was kept.
        """
        if batch.ref_logps is not None:  # scored before training
            return batch.ref_logps
        as_reference = self.as_reference
        if as_reference is None and self.starts_equal and not self.trainer.ready:
            as_reference = nullcontext  # before training the policy is its own reference
        if as_reference is None:
            raise InputError(
                "Cannot compute reference log-probs for a dataset passed to the trainer after it was built, because "
                "precompute_ref_log_probs keeps no reference model. Pass every data set when the trainer is built, or "
                "remove the option"
            )
        with self.trainer.accelerator.autocast(), self.frozen_model or nullcontext(policy) as model:
            parts = parts or ([batch] if self.split_batch is None else self.split_batch(batch))
            with as_reference(forward.unwrap_model(model)):
                logps = [branch_logps(model, part, self.token_weights).view(len(batch.index), -1) for part in parts]
                return torch.cat(logps, dim=1)

    def check_start(self, logps: Tensor, ref_logps: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Warn once if policy and reference, which start equal, differ before the first step.

        Args:
            logps: Log-probabilities by the policy, [B] or [B, K].
            ref_logps: Log-probabilities by the reference, [B] or [B, K].
            lengths: Number of tokens, [B] or [B, K].
            rows: Numbers of the rows, [B].

        Raises:
            InputError: If the base, on which the adapter of the reference is, is trained, too.
        """
        if self.checked or not self.starts_equal or self.trainer.state.global_step or not logps.requires_grad:
            return
        self.checked = True
        policy = forward.unwrap_model(self.trainer.model)
        if self.frozen_model is None and self.as_reference not in (None, nullcontext):
            trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
            if base := [name for name in trained if not is_adapter_weight(policy, name)]:
                raise InputError(
                    f"{base[0]} was frozen when the trainer was built, and the reference would change with it. "
                    "Unfreeze it before the trainer is built"
                )
        gap = ((logps.detach() - ref_logps).abs() / lengths.clamp(min=1)).view(len(rows), -1).amax(1)
        if len(differing := rows[gap > (1e-4 if self.trainer.is_float32 else 5e-2)]):
            logger.warning(
                "before the first step the policy differs from its reference by %.2g in log-probability per token, in "
                "%d of %d rows, prepared row %d first. Check whether dropout or NEFTune noise is on, whether the "
                "initialization of the adapter changes the base, and whether another model has scored these rows",
                gap.max(),
                len(differing),
                len(rows),
                differing[0],
            )
