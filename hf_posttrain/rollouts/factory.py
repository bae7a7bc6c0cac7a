"""The samplers and the sources of rollouts, by the options that name them."""

from typing import Any

from .completion import Sampler
from .frozen import Frozen
from .policy_sampler import PolicySampler
from .replay import Replay
from .source import OnPolicy
from .vllm_in_process import VLLMInProcessSampler
from .vllm_server import VLLMServerSampler

SAMPLERS: dict[str, Any] = {
    "policy": PolicySampler,
    "vllm_colocate": VLLMInProcessSampler,
    "vllm_server": VLLMServerSampler,
}
"""By the kind of the option `sampler`."""
SOURCES: dict[str, type[OnPolicy]] = {"on_policy": OnPolicy, "replay": Replay, "frozen": Frozen}
"""By the option `rollouts`."""


def build_sampler(trainer: Any, options: Any) -> Sampler:
    """Return the sampler that `options` name: sampler, temperature, ... of a Config or of the section rounds.

    trainer: has `vocabulary`, the ids below which may be sampled; gets `rollout_options`.
    """
    trainer.rollout_options = options
    sampler: Sampler = SAMPLERS[options.sampler.kind](trainer)
    return sampler
