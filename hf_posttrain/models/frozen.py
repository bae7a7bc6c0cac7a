"""Frozen models that score alongside the policy: where they are kept, and the three ways to have a reference."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..engines import engine
from ..errors import InputError
from ..scoring import cpu, forward
from ..scoring.head import LogProb

logger = logging.getLogger(__name__)
REFERENCE_ADAPTER = "reference"


class Frozen:
    """A second model in eval mode and without gradients, prepared for the engine by its first use: cut over the ranks
    where the policy is. Enter it to use it; with `offload` it waits on CPU in between.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, offload: bool = False):
        model.requires_grad_(False)
        forward.enable_scoring(model)
        if accelerator.device.type == "cpu":
            cpu.attend_by_document(forward.causal_lm(model))
        self.model, self.accelerator, self.offload = model.eval(), accelerator, offload
        self.prepared = False

    def __enter__(self) -> nn.Module:
        if not self.prepared:
            self.model = engine.prepare_frozen(self.model, self.accelerator, self.offload)
            self.prepared = engine.shards(self.accelerator)
        return self.model

    def __exit__(self, *error: Any) -> None:
        if self.offload:
            self.release()

    def release(self) -> None:
        """Give back the device's memory; the next use takes it again. Shards stay where they are."""
        if not self.prepared:
            self.model.to("cpu")


def branch_logps(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Summed log-probabilities of each branch of a batch, without gradient: [B * K]."""
    with torch.no_grad(), forward.eval_mode(model):
        values = forward.score(model, batch, LogProb(forward.targets(batch)))["value"]
    return forward.per_branch(values, batch)


class AdapterOff:
    """The reference of a policy with a new adapter: its base, or a model as it is before training."""

    def logps(self, policy: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Summed log-probabilities of each branch, [B * K]. policy: the trained model, wrapped by its engine or not."""
        inner = forward.unwrapped(policy)
        if not isinstance(inner, peft.PeftModel):
            return branch_logps(policy, batch)
        with inner.disable_adapter():
            return branch_logps(policy, batch)


class AdapterCopy:
    """The reference of a policy that continues an adapter: a frozen copy of it, next to it on the one base."""

    def __init__(self, policy: peft.PeftModel):
        self.name = policy.active_adapter
        config = copy.deepcopy(policy.peft_config[self.name])
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # PiSSA and its kin would change the base once more; the weights come next
        policy.add_adapter(REFERENCE_ADAPTER, config)
        state = peft.get_peft_model_state_dict(policy, adapter_name=self.name)
        peft.set_peft_model_state_dict(policy, {key: value.clone() for key, value in state.items()}, REFERENCE_ADAPTER)
        with self._active(policy):
            pass  # leaves the copy without gradients and the policy's own adapter active

    def logps(self, policy: nn.Module, batch: dict[str, Any]) -> Tensor:
        """As `AdapterOff.logps`."""
        with self._active(forward.unwrapped(policy)):
            return branch_logps(policy, batch)

    @contextmanager
    def _active(self, policy: peft.PeftModel) -> Iterator[None]:
        """The reference adapter active inside; what was trainable is trainable again outside."""
        own = f".{REFERENCE_ADAPTER}."
        trainable = {key for key, p in policy.named_parameters() if p.requires_grad and own not in key}
        policy.set_adapter(REFERENCE_ADAPTER)
        try:
            yield
        finally:
            policy.set_adapter(self.name)
            for key, parameter in policy.named_parameters():
                parameter.requires_grad_(key in trainable)


class SecondModel:
    """A reference of its own: a frozen copy of the policy, or a model that the user gave.

    inner: how a copy of the policy is its own reference; None for a model that is one as it stands.
    """

    def __init__(self, frozen: Frozen, inner: AdapterOff | AdapterCopy | None):
        self.frozen, self.inner = frozen, inner

    def logps(self, policy: nn.Module, batch: dict[str, Any]) -> Tensor:
        """As `AdapterOff.logps`."""
        with self.frozen as model:
            return branch_logps(model, batch) if self.inner is None else self.inner.logps(model, batch)


class Reference:
    """The reference that a trainer asks: scores cached with the rows, or one of the three above.

    online: None where rows must be scored already. starts_equal: is it the policy as it was at the start?
    """

    def __init__(self, trainer: Any, online: AdapterOff | AdapterCopy | SecondModel | None, starts_equal: bool):
        self.trainer, self.online, self.starts_equal = trainer, online, starts_equal
        self.checked = False

    def logps(self, policy: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Summed log-probabilities of each branch of `trainer.reference_batch(batch)`: [B, K].

        Raises InputError where the rows were not scored beforehand and no reference was kept.
        """
        if "ref_logps" in batch:
            return batch["ref_logps"]
        if self.online is None:
            raise InputError(
                "this data set was not scored by the reference: with precompute_ref_log_probs, pass every data set "
                "when the trainer is built, or turn it off to keep a reference model"
            )
        with self.trainer.accelerator.autocast():
            return self.online.logps(policy, self.trainer.reference_batch(batch)).view(len(batch["index"]), -1)

    def check_start(self, logps: Tensor, ref: Tensor, lengths: Tensor) -> None:
        """Warn, once, where policy and reference, one model, differ before the first step. All of one shape."""
        if self.checked or not self.starts_equal or self.trainer.state.global_step or not logps.requires_grad:
            return
        self.checked = True
        gap = ((logps.detach() - ref).abs() / lengths.clamp(min=1)).max().item()
        tolerance = 1e-4 if self.trainer.exact else 5e-2
        if gap > tolerance:
            logger.warning(
                "before the first step the policy differs from its reference by %.2g in log-probability per token: is "
                "dropout on, or does the adapter's initialisation change the base?", gap,
            )  # fmt: skip
