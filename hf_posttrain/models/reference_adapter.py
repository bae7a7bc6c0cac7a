"""The reference of a policy that continues an adapter: a frozen copy of the adapter, next to it on the one base."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
from torch import Tensor, nn

from ..scoring import forward
from .frozen import branch_logps

NAME = "reference"
"""Of the copy, among the policy's adapters."""


class AdapterCopy:
    """Puts the copy into the policy; called as `frozen.branch_logps`, it scores with the copy."""

    def __init__(self, policy: peft.PeftModel):
        self.trained = policy.active_adapter
        config = copy.deepcopy(policy.peft_config[self.trained])
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # PiSSA and the like would change the base once more; the weights come next
        policy.add_adapter(NAME, config)
        state = peft.get_peft_model_state_dict(policy, adapter_name=self.trained)
        peft.set_peft_model_state_dict(policy, {key: value.clone() for key, value in state.items()}, NAME)
        with self._active(policy):
            pass  # leaves the copy without gradients and the policy's own adapter active

    def __call__(self, policy: nn.Module, batch: dict[str, Any]) -> Tensor:
        with self._active(forward.unwrapped(policy)):
            return branch_logps(policy, batch)

    @contextmanager
    def _active(self, policy: peft.PeftModel) -> Iterator[None]:
        """The copy in the trained adapter's place inside; what was trainable is trainable again outside."""
        # PEFT makes an adapter trainable when it activates it, so remember what was
        trainable = {key for key, p in policy.named_parameters() if p.requires_grad and f".{NAME}." not in key}
        policy.set_adapter(NAME)
        try:
            yield
        finally:
            policy.set_adapter(self.trained)
            for key, parameter in policy.named_parameters():
                parameter.requires_grad_(key in trainable)


@contextmanager
def without_reference_adapter(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor] | None]:
    """Keep the copy out of what is saved: inside, PEFT knows neither its config nor its tensors.

    state: what would be saved, None for the model's own state_dict; gives what is.
    """
    configs = getattr(model, "peft_config", {})
    config = configs.pop(NAME, None)
    if config is None:
        yield state
        return
    whole = model.state_dict() if state is None else state
    try:
        yield {name: tensor for name, tensor in whole.items() if f".{NAME}." not in name}
    finally:
        configs[NAME] = config
