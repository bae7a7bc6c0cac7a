"""What samples a trainer's rollouts: its own model, or vLLM in this process or behind a server."""

from typing import Any

from . import rollout, vllm, vllm_server

BACKENDS: dict[str, Any] = {
    "transformers": rollout.OwnModel, "colocate": vllm.Colocated, "server": vllm_server.Served,
}  # fmt: skip
"""By vllm_mode, or else by rollout."""


def make_backend(trainer: Any, options: Any) -> Any:
    """The backend that `options` name: rollout, vllm_*, num_generations, temperature, ... of a Config or a section.

    trainer: has `vocabulary`, the ids that may be drawn are below it; gets `rollout_options`.
    """
    trainer.rollout_options = options
    return BACKENDS[options.vllm_mode or options.rollout](trainer)
