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
    "transformers": PolicySampler,
    "colocate": VLLMInProcessSampler,
    "server": VLLMServerSampler,
}
"""By `vllm_mode`, or else by `rollout`."""
SOURCES: dict[str, type[OnPolicy]] = {"live": OnPolicy, "replay": Replay, "frozen": Frozen}
"""By the option `rollouts`."""


def build_sampler(trainer: Any, options: Any) -> Sampler:
    """Return the sampler that `options` name: rollout, vllm_*, temperature, ... of a Config or of the section rounds.

    trainer: has `vocabulary`, the ids below which may be sampled; gets `rollout_options`.
    """
    trainer.rollout_options = options
    sampler: Sampler = SAMPLERS[options.vllm_mode or options.rollout](trainer)
    return sampler
