"""Rollouts by `vllm serve`: weights as files, rollouts over HTTP, and optional prefetching of the next window."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
from accelerate.utils import gather_object
from peft import PeftConfig

from ..errors import InputError
from ..generation.completions_client import Server, ServerError, as_server_error, ask_on_all_ranks, run_concurrently
from ..scoring import forward as scoring
from .completion import Completion
from .interface import SamplingInterface
from .options import VLLMServerOptions
from .prefetching import PrefetchedRollouts
from .vllm import SampledTokens, VLLMSampler, max_lora_rank, prompt_seeds
from .weight_sync import WeightTransform, has_tied_head, scramble_weight

logger = logging.getLogger(__name__)
_REQUIREMENTS = {
    "/collective_rpc": "Set VLLM_SERVER_DEV_MODE=1 in the server's environment, so that it accepts weights",
    "/reset_prefix_cache": "Set VLLM_SERVER_DEV_MODE=1 in the server's environment",
    "/v1/load_lora_adapter": "Start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""Path -> fix for a server that lacks it."""


class VLLMServerSampler(VLLMSampler):
    """A server that `vllm serve` started. The first rank sends weights, and each rank requests its own rollouts."""

    prefetched_result: Callable[[], list[list[SampledTokens]]] | None = None
    """Function that waits for prefetched rollouts, for the next call of `_sample_on_all_ranks`."""
    is_checking = False

    def __init__(self, trainer: SamplingInterface) -> None:
        super().__init__(trainer)
        self.card = card = ask_on_all_ranks(check_server, self.options, self.lora, trainer.args.max_length)
        self.server = _make_server(self.options)
        self.model = card["id"]
        base = scoring.causal_lm(trainer.model).name_or_path
        self.dtype = card.get("dtype")
        self.instance_id = card.get("instance_id")
        if self.lora and card["root"] != base:
            message = (
                "the vLLM server serves %s, and the student's base is %s. With LoRA they must have the same weights"
            )
            logger.warning(message, card["root"], base or "a model in memory")
        if self.temporary and not runs_as_this_user(self.server.url):
            os.chmod(self.folder, 0o755)
        self.prefetched: PrefetchedRollouts | None = None
        if self.options.sampler.prefetch:
            self.prefetched = trainer.stateful["prefetched_rollouts"] = PrefetchedRollouts(trainer)

    def _open(self) -> None:
        """Send scrambled weights; with LoRA nothing, since the base is the server's own."""
        if not self.lora:
            self._send(scramble_weight)

    def _send(self, transform: WeightTransform | None = None) -> None:
        """Make the server load the weights, or the adapter under a new name, from a folder. Raises ServerError."""
        if self.prefetched:
            self.prefetched.wait()  # no request may be in progress while weights change
        path = str(self._write(transform))
        previous = self.adapter
        if self.lora:  # vLLM would take an adapter of a known name from its cache
            self.adapter = f"{self.folder.name}-{self.write_count}"

        def send() -> str | None:
            if not self.trainer.is_world_process_zero():
                return None
            if self.lora:
                self.server.post("/v1/load_lora_adapter", {"lora_name": self.adapter, "lora_path": path})
                with suppress(ServerError):  # a server that has restarted does not know the previous one
                    self.server.post("/v1/unload_lora_adapter", {"lora_name": previous}) if previous else None
                return self._get_instance_id()
            if self.card.get("load_format") == "dummy":  # which does not load files
                self._call("update_config", args=[{"load_config": {"load_format": "auto"}}])
            self._call("reload_weights", kwargs={"weights_path": path})
            if not self.server.post("/reset_prefix_cache", {})["success"]:
                problem = f"the vLLM server {self.server.url} has requests of other clients"
                raise ServerError(f"{problem}. Use a server that serves this run alone")
            return self._get_instance_id()

        self.instance_id = ask_on_all_ranks(send)
        # the newest adapter stays: vLLM may read it again
        self._remove(self.write_count - 1 if self.lora else self.write_count)

    def _call(self, method: str, **arguments: Any) -> None:
        self.server.post("/collective_rpc", {"method": method, **arguments})

    def _get_instance_id(self) -> str | None:
        """Return the id of the server process, which changes at each start; None if the server does not report it."""
        return (self.server.vllm_config() or {}).get("instance_id") if "instance_id" in self.card else None

    def _sample_on_all_ranks(self, sample: Callable[[], list[list[SampledTokens]]]) -> list[list[SampledTokens]]:
        """Return the result of `sample`.

        If the server has restarted in the meantime, the weights are sent again and `sample` is called once more.
        """
        first = self.trainer.is_world_process_zero()
        for _ in range(2):
            prefetched_result = self.prefetched_result
            self.prefetched_result = None
            try:
                groups = ask_on_all_ranks(prefetched_result or sample)
                same = ask_on_all_ranks(lambda: not first or self._get_instance_id() == self.instance_id)
            except ServerError as error:
                if not (self.lora and error.status == 404):  # a server that has restarted does not know the adapter
                    raise
                same = False
            if all(gather_object([same])):
                return groups
            logger.warning("the vLLM server %s has restarted. The weights are sent again", self.server.url)
            self._send()
            if not self.is_checking:
                self._check()
        raise ServerError(f"the vLLM server {self.server.url} restarts repeatedly. See its log")

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Begin to sample in the background, with the current weights, what a later `sample` returns."""
        assert self.prefetched is not None
        sample = partial(self._sample, prompts, n, prompt_seeds(prompts, seed), max_new_tokens)
        self.prefetched.begin((prompts, n, seed, max_new_tokens), sample, self.instance_id)

    def _check(self) -> None:
        self.is_checking = True
        try:
            super()._check()
        finally:
            self.is_checking = False

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt. Waits for those that were prefetched."""
        if self.prefetched:
            self.prefetched_result = self.prefetched.take((prompts, n, seed, max_new_tokens), self.instance_id)
        return super().sample(prompts, n, max_new_tokens, seed)

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        """Send one request for each prompt, because each has its own seed. vLLM batches open requests."""
        model = self.adapter or self.model
        shared = self.sampling_parameters | {"n": n, "max_tokens": max_new_tokens, "logprobs": 0, "model": model}

        def complete(number: int) -> list[SampledTokens]:
            choices = self.server.complete(shared | {"seed": seeds[number]}, prompts[number])
            return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

        return run_concurrently(complete, range(len(prompts)))

    def _likely_cause(self) -> str:
        if self.dtype is None or self.card.get("logprobs_mode") not in (None, "processed_logprobs"):
            fix = "Start it with --logprobs-mode processed_logprobs, and VLLM_SERVER_DEV_MODE=1 for a better diagnosis"
            if self.options.temperature != 1:
                return f"The server may report them at temperature 1. {fix}"
        if self.lora:
            return "Its base is not the student's, or is quantized. Serve the student's own base"
        if has_tied_head(scoring.causal_lm(self.trainer.model).config):
            return (
                "The student's head is its embedding, and a server on CPU keeps the old head. Start it with "
                "--hf-overrides '{\"tie_word_embeddings\": false}'"
            )
        return "It serves another architecture or a quantized model. Serve the student's own folder or name"


def runs_as_this_user(url: str) -> bool:
    """Return whether a process of this user listens at the port of the URL on this machine."""
    parts = urlsplit(url)
    if parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        return False
    try:
        pids = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == (parts.port or 80)
        }
        return any(pid and psutil.Process(pid).uids().real == os.getuid() for pid in pids)
    except (psutil.Error, OSError, AttributeError):  # another user's process, or a system without this information
        return False


# ---- checks before training


def check_server(options: Any, peft_config: PeftConfig | None = None, max_length: int | None = None) -> dict[str, Any]:
    """Check the server of a Config or of the section `rounds`, and return what it reports about itself.

    Args:
        options: A Config, or a section `rounds`.
        peft_config: The adapter that the server must load; None for all weights.
        max_length: Number of tokens that the server must accept.

    Returns:
        `id`, `root` (a name or folder) and `max_model_len` of its model, in development mode also `dtype`,
        `logprobs_mode`, `load_format` and `instance_id`. Empty if the sampler is no server.

    Raises:
        InputError: The server does not answer, accepts fewer tokens than max_length or lacks a feature, or vLLM cannot
            serve the adapter.
    """
    rank = None if peft_config is None else max_lora_rank(peft_config)
    if not isinstance(options.sampler, VLLMServerOptions):
        return {}
    with as_server_error():
        return _check_reported_settings(_make_server(options), options, rank, max_length)


def _check_reported_settings(server: Server, options: Any, rank: int | None, max_length: int | None) -> dict[str, Any]:
    """Check a server as `check_server` does. rank: rank of the adapter to serve, None for all weights."""
    card = server.model_info()
    settings = server.vllm_config()
    max_model_len = card.get("max_model_len") or math.inf  # servers other than vLLM may not report it
    if max_length is not None and max_model_len < max_length:
        problem = f"max_length={max_length} is more than the vLLM server's --max-model-len {max_model_len}"
        raise ServerError(f"{problem}. Lower max_length, or start the server with more")
    if settings is None:
        if rank is None:
            fix = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment, so that it accepts weights"
            raise InputError(f"sampler.base_url: {server.url} is not in development mode. {fix}")
        return card
    mode = settings["model_config"]["logprobs_mode"]
    lora = settings["lora_config"]
    if mode != "processed_logprobs" and (options.temperature != 1 or mode != "raw_logprobs"):
        reason = f"not of the distribution that is sampled from at temperature {options.temperature:g}"
        fix = "Start it with --logprobs-mode processed_logprobs"
        raise InputError(f"the vLLM server reports {mode}, which are {reason}. {fix}")
    if rank is not None and (lora is None or lora["max_lora_rank"] < rank):
        fix = f"Start it with --enable-lora and --max-lora-rank {rank}"
        raise InputError(f"the vLLM server accepts no adapter of rank {rank}. {fix}")
    return card | {
        "dtype": str(settings["model_config"]["dtype"]).removeprefix("torch."),
        "logprobs_mode": mode,
        "load_format": settings["load_config"]["load_format"],
        "instance_id": settings["instance_id"],
    }


def _make_server(options: Any) -> Server:
    return Server(options.sampler.base_url, "sampler.base_url", _REQUIREMENTS)
