"""Rollouts by `vllm serve`: weights as files, rollouts over HTTP, the next window's while this one trains."""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
from accelerate.utils import gather_object
from peft import PeftConfig

from ..errors import InputError
from ..generation.completions_client import Server, ServerError, as_server_error, raise_on_all_ranks, run_concurrently
from ..scoring import forward as scoring
from ..trainer.interface import TrainerInterface
from .completion import Completion
from .options import VLLMServerOptions
from .prefetching import PrefetchedRollouts
from .vllm import SampledTokens, VLLMSampler, max_lora_rank, prompt_seeds
from .weight_sync import has_tied_head, scramble_weight

logger = logging.getLogger(__name__)
_REQUIREMENTS = {
    "/collective_rpc": "set VLLM_SERVER_DEV_MODE=1 in the server's environment, so that it takes weights",
    "/reset_prefix_cache": "set VLLM_SERVER_DEV_MODE=1 in the server's environment",
    "/v1/load_lora_adapter": "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""What a server that lacks a path was not started with."""


class VLLMServerSampler(VLLMSampler):
    """A server that `vllm serve` started; the first rank sends weights, and each rank asks for its own rollouts."""

    begun: Any = None
    checking = False

    def __init__(self, trainer: TrainerInterface):
        super().__init__(trainer)
        self.card = card = raise_on_all_ranks(lambda: check_server(self.options, self.lora, trainer.args.max_length))
        self.server = _make_server(self.options)
        self.model = card["id"]
        base = scoring.causal_lm(trainer.model).name_or_path
        self.dtype = card.get("dtype")
        self.process = card.get("process")
        if self.lora and card["root"] != base:
            said = "the vLLM server serves %s, and the student's base is %s: with LoRA they must be the same weights"
            logger.warning(said, card["root"], base or "a model in memory")
        if self.temporary and not runs_as_this_user(self.server.url):
            os.chmod(self.folder, 0o755)
        self.prefetched: PrefetchedRollouts | None = None
        if self.options.sampler.prefetch:
            self.prefetched = trainer.stateful["prefetched_rollouts"] = PrefetchedRollouts(trainer)

    def _open(self) -> None:
        """Send scrambled weights; the base of a LoRA policy is the server's own."""
        if not self.lora:
            self._send(scramble_weight)

    def _send(self, change: Any = None) -> None:
        """The server reads the weights, or the adapter under a new name, from a folder. Raises ServerError."""
        if self.prefetched:
            self.prefetched.wait()  # no request may be under way while weights change
        path = str(self._write(change))
        previous = self.adapter
        if self.lora:  # vLLM would take a name that it knows from its cache
            self.adapter = f"{self.folder.name}-{self.count}"

        def send() -> str | None:
            if not self.trainer.is_world_process_zero():
                return None
            if self.lora:
                self.server.post("/v1/load_lora_adapter", {"lora_name": self.adapter, "lora_path": path})
                with suppress(ServerError):  # it has started again, and forgotten that
                    self.server.post("/v1/unload_lora_adapter", {"lora_name": previous}) if previous else None
                return self._process()
            if self.card.get("load_format") == "dummy":  # which is not for files
                self._call("update_config", args=[{"load_config": {"load_format": "auto"}}])
            self._call("reload_weights", kwargs={"weights_path": path})
            if not self.server.post("/reset_prefix_cache", {})["success"]:
                raise ServerError(f"the vLLM server {self.server.url} has requests of others: it must serve this alone")
            return self._process()

        self.process = raise_on_all_ranks(send)
        self._remove(self.count - 1 if self.lora else self.count)  # the newest adapter stays: vLLM may read it again

    def _call(self, method: str, **given: Any) -> None:
        self.server.post("/collective_rpc", {"method": method, **given})

    def _process(self) -> str | None:
        """Which start of the server this is, where it tells."""
        return (self.server.vllm_config() or {}).get("instance_id") if "process" in self.card else None

    def _agreed(self, sample: Any) -> list[list[SampledTokens]]:
        """What `sample` gives; where the server has started again meanwhile, once more with the weights sent anew."""
        first = self.trainer.is_world_process_zero()
        for _ in range(2):
            begun = self.begun
            self.begun = None
            try:
                found = raise_on_all_ranks(begun or sample)
                same = raise_on_all_ranks(lambda: not first or self._process() == self.process)
            except ServerError as error:
                if not (self.lora and error.status == 404):  # it has forgotten the adapter
                    raise
                same = False
            if all(gather_object([same])):
                return found
            logger.warning("the vLLM server %s has started again: it gets the weights once more", self.server.url)
            self._send()
            if not self.checking:
                self._check()
        raise ServerError(f"the vLLM server {self.server.url} starts again and again: see its log")

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Sample in the background, by the current weights, what a later `sample` of the same returns."""
        assert self.prefetched is not None
        sample = partial(self._sample, prompts, n, prompt_seeds(prompts, seed), max_new_tokens)
        self.prefetched.begin((prompts, n, seed, max_new_tokens), sample, self.process)

    def _check(self) -> None:
        self.checking = True
        try:
            super()._check()
        finally:
            self.checking = False

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt; wait for those that were prefetched."""
        if self.prefetched:
            self.begun = self.prefetched.take((prompts, n, seed, max_new_tokens), self.process)
        return super().sample(prompts, n, max_new_tokens, seed)

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        """Send a request for each prompt, since each has its own seed; vLLM batches what is open."""
        model = self.adapter or self.model
        shared = self.sampling | {"n": n, "max_tokens": max_new_tokens, "logprobs": 0, "model": model}

        def ask(number: int) -> list[SampledTokens]:
            choices = self.server.complete(shared | {"seed": seeds[number]}, prompts[number])
            return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

        return run_concurrently(ask, range(len(prompts)))

    def _likely(self) -> str:
        if self.dtype is None or self.card.get("logprobs_mode") not in (None, "processed_logprobs"):
            more = "start it with --logprobs-mode processed_logprobs, and VLLM_SERVER_DEV_MODE=1 for a better answer"
            if self.options.temperature != 1:
                return f"The server gives them at temperature 1, maybe: {more}"
        if self.lora:
            return "Its base is not the student's, or is quantised: serve the student's own base"
        if has_tied_head(scoring.causal_lm(self.trainer.model).config):
            return (
                "The student's head is its embedding, and a server on CPU keeps the old head: start it with "
                "--hf-overrides '{\"tie_word_embeddings\": false}'"
            )
        return "It serves another architecture or a quantised model: serve the student's own folder or name"


def runs_as_this_user(url: str) -> bool:
    """Does a process of this user listen at the url's port of this machine?"""
    parts = urlsplit(url)
    if parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        return False
    try:
        pids = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == (parts.port or 80)
        }
        return any(pid and psutil.Process(pid).uids().real == os.getuid() for pid in pids)
    except (psutil.Error, OSError, AttributeError):  # another's, or a system that does not tell
        return False


# ---- what is refused


def check_server(options: Any, peft_config: PeftConfig | None = None, max_length: int | None = None) -> dict[str, Any]:
    """What the server, if there is one, says of itself: id, root (a name or folder) and max_model_len of its model; in
    development mode also dtype, logprobs_mode, load_format and its process.

    Raises InputError for a server that cannot be asked, takes fewer tokens than max_length, or cannot do what is
    needed, and for an adapter that vLLM cannot serve.
    """
    rank = None if peft_config is None else max_lora_rank(peft_config)
    if not isinstance(options.sampler, VLLMServerOptions):
        return {}
    with as_server_error():
        return _check_reported_settings(_make_server(options), options, rank, max_length)


def _check_reported_settings(server: Server, options: Any, rank: int | None, max_length: int | None) -> dict[str, Any]:
    """`check_server` of a server that serves an adapter of this rank, None for whole weights."""
    card = server.model_info()
    told = server.vllm_config()
    longest = card.get("max_model_len") or math.inf  # others than vLLM may not say
    if max_length is not None and longest < max_length:
        problem = f"the vLLM server's --max-model-len {longest}: lower max_length, or start it with more"
        raise ServerError(f"max_length={max_length} is more than {problem}")
    if told is None:
        if rank is None:
            how = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, so that it takes weights"
            raise InputError(f"sampler.base_url: {server.url} is not in development mode: {how}")
        return card
    mode = told["model_config"]["logprobs_mode"]
    lora = told["lora_config"]
    if mode != "processed_logprobs" and (options.temperature != 1 or mode != "raw_logprobs"):
        how = f"of another distribution than rollouts are drawn from at temperature {options.temperature:g}"
        raise InputError(f"the vLLM server gives {mode}, {how}: start it with --logprobs-mode processed_logprobs")
    if rank is not None and (lora is None or lora["max_lora_rank"] < rank):
        raise InputError(
            f"the vLLM server takes no adapter of rank {rank}: start it with --enable-lora and --max-lora-rank {rank}"
        )
    return card | {
        "dtype": str(told["model_config"]["dtype"]).removeprefix("torch."),
        "logprobs_mode": mode,
        "load_format": told["load_config"]["load_format"],
        "process": told["instance_id"],
    }


def _make_server(options: Any) -> Server:
    return Server(options.sampler.base_url, "sampler.base_url", _REQUIREMENTS)
