"""Rollouts by `vllm serve`: weights as files, rollouts over HTTP, the next window's while this one trains."""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from accelerate.utils import gather_object

from ..errors import InputError
from ..scoring import forward as scoring
from .server import Server, ServerError, as_server_error, at_once, in_background, together
from .transfer import has_tied_head, scrambled
from .vllm import Backend, Sampled, max_rank, seeds_of

logger = logging.getLogger(__name__)
_NEEDS = {
    "/collective_rpc": "set VLLM_SERVER_DEV_MODE=1 in the server's environment, so that it takes weights",
    "/reset_prefix_cache": "set VLLM_SERVER_DEV_MODE=1 in the server's environment",
    "/v1/load_lora_adapter": "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""What a server that lacks a path was not started with."""


class Ahead:
    """Rollouts of the next window, which are sampled while this one trains. They are saved with a checkpoint.

    Those of the step that is under way are kept as well: after an error the last whole step is saved, and what is next
    after that are they.
    """

    FILE = "rollouts_ahead.json"

    def __init__(self, accelerator: Any, writes: bool):
        self.accelerator, self.writes = accelerator, writes
        self.asked: Any = None
        self.process: str | None = None
        self.future: Future[Any] | None = None
        self.taken: tuple[int, Any, Future[Any]] | None = None  # steps that were done then, asked, future

    def begin(self, asked: Any, sample: Callable[[], Any], process: str | None) -> None:
        """Sample in the background. asked: what identifies it; process: which start of the server samples."""
        self.asked, self.process, self.future = _as_json(asked), process, in_background(sample)

    def take(self, asked: Any, process: str | None, steps: int) -> Callable[[], Any] | None:
        """What gives the rollouts that were begun for this, where any were: they are gone then. None too where the
        server has started again meanwhile, so that it may have had other weights. steps: that are done."""
        if self.future is None or self.asked != _as_json(asked):
            return None
        future, self.future = self.future, None
        self.taken = steps, self.asked, future
        return future.result if self.process in (None, process) else None

    def wait(self) -> None:
        """Until nothing is under way."""
        if self.future is not None:
            wait([self.future])

    def save(self, folder: str) -> None:
        """Into a checkpoint; all ranks call it."""
        future = self.future
        found = together(lambda: None if future is None else future.result())  # on the ranks with none too
        everyone = gather_object([None if future is None else [self.asked, found]])
        if self.writes:
            Path(folder, self.FILE).write_text(json.dumps(everyone), encoding="utf-8")

    def give_up(self, steps: int) -> None:
        """Go back to what was under way after as many steps, which will be saved; what is lost with its server is
        none."""
        if self.taken is not None and self.taken[0] == steps:
            _, self.asked, self.future = self.taken
        self.wait()
        if self.future is not None and self.future.exception() is not None:
            self.future = None

    def begin_run(self, folder: str | None) -> None:
        """Nothing, or what a checkpoint has of this rank."""
        self.wait()  # an earlier run's requests would have this one's weights
        self.future, file = None, Path(folder or "", self.FILE)
        if folder is None or not file.exists():
            return
        known = json.loads(file.read_text(encoding="utf-8"))
        if len(known) == self.accelerator.num_processes and (mine := known[self.accelerator.process_index]):
            self.begin(mine[0], lambda: [[tuple(one) for one in group] for group in mine[1]], None)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class Served(Backend):
    """A server that `vllm serve` started; the first rank sends weights, and each rank asks for its own rollouts."""

    begun: Any = None
    checking = False

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.card = card = together(lambda: check(self.options, self.lora, trainer.args.max_length))
        self.server = _server(self.options)
        self.model, base = card["id"], scoring.causal_lm(trainer.model).name_or_path
        self.dtype, self.process = card.get("dtype"), card.get("process")
        if self.lora and card["root"] != base:
            said = "the vLLM server serves %s, and the student's base is %s: with LoRA they must be the same weights"
            logger.warning(said, card["root"], base or "a model in memory")
        if self.temporary and not runs_as_this_user(self.server.url):
            os.chmod(self.folder, 0o755)
        self.ahead: Ahead | None = None
        if self.options.rollout_ahead:
            self.ahead = Ahead(trainer.accelerator, trainer.args.should_save)
            trainer.kept_in_checkpoints.append(self.ahead)

    def _open(self) -> None:
        """Send scrambled weights; the base of a LoRA policy is the server's own."""
        if not self.lora:
            self._send(scrambled)

    def _send(self, change: Any = None) -> None:
        """The server reads the weights, or the adapter under a new name, from a folder. Raises ServerError."""
        if self.ahead:
            self.ahead.wait()  # no request may be under way while weights change
        path, previous = str(self._write(change)), self.adapter
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

        self.process = together(send)
        self._remove(self.count - 1 if self.lora else self.count)  # the newest adapter stays: vLLM may read it again

    def _call(self, method: str, **given: Any) -> None:
        self.server.post("/collective_rpc", {"method": method, **given})

    def _process(self) -> str | None:
        """Which start of the server this is, where it tells."""
        return (self.server.settings() or {}).get("instance_id") if "process" in self.card else None

    def _agreed(self, sample: Any) -> list[list[Sampled]]:
        """What `sample` gives; where the server has started again meanwhile, once more with the weights sent anew."""
        first = self.trainer.is_world_process_zero()
        for _ in range(2):
            begun, self.begun = self.begun, None
            try:
                found = together(begun or sample)
                same = together(lambda: not first or self._process() == self.process)
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

    def begin(self, prompts: Sequence[Sequence[int]], seed: Sequence[int], longest: int) -> None:
        """Sample in the background, by the weights of now, what a later `generate` of the same will ask for."""
        assert self.ahead is not None
        sample = partial(self._sample, prompts, seeds_of(prompts, seed), longest)
        self.ahead.begin((prompts, seed, longest), sample, self.process)

    def _check(self) -> None:
        self.checking = True
        try:
            super()._check()
        finally:
            self.checking = False

    def generate(self, prompts: Sequence[Sequence[int]], seed: Sequence[int], longest: int) -> list[list[int]]:
        """As the other backends; what was begun is waited for."""
        if self.ahead:
            done = self.trainer.state.global_step
            self.begun = self.ahead.take((prompts, seed, longest), self.process, done)
        return super().generate(prompts, seed, longest)

    def _sample(self, prompts: Sequence[Sequence[int]], seeds: list[int], longest: int) -> list[list[Sampled]]:
        """A request for each prompt, since each has its own seed; vLLM batches what is open."""
        shared = self.sampling | {"max_tokens": longest, "logprobs": 0, "model": self.adapter or self.model}

        def ask(number: int) -> list[Sampled]:
            choices = self.server.complete(shared | {"seed": seeds[number]}, prompts[number])
            return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

        return at_once(ask, range(len(prompts)))

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
        pids = {each.pid for each in psutil.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN and each.laddr.port == (parts.port or 80)}  # fmt: skip
        return any(pid and psutil.Process(pid).uids().real == os.getuid() for pid in pids)
    except (psutil.Error, OSError, AttributeError):  # another's, or a system that does not tell
        return False


# ---- what is refused


def check(options: Any, peft_config: Any = None, max_length: int | None = None) -> dict[str, Any]:
    """What the server, if there is one, says of itself: id, root (a name or folder) and max_model_len of its model; in
    development mode also dtype, logprobs_mode, load_format and its process.

    Raises InputError for a server that cannot be asked, takes fewer tokens than max_length, or cannot do what is
    needed, and for an adapter that vLLM cannot serve.
    """
    rank = None if peft_config is None else max_rank(peft_config)
    if options.vllm_mode != "server":
        return {}
    with as_server_error():
        return _checked(_server(options), options, rank, max_length)


def _checked(server: Server, options: Any, rank: int | None, max_length: int | None) -> dict[str, Any]:
    """`check` of a server that serves an adapter of this rank, None for whole weights."""
    card, told = server.card(), server.settings()
    longest = card.get("max_model_len") or math.inf  # others than vLLM may not say
    if max_length is not None and longest < max_length:
        problem = f"the vLLM server's --max-model-len {longest}: lower max_length, or start it with more"
        raise ServerError(f"max_length={max_length} is more than {problem}")
    if told is None:
        if rank is None:
            how = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, so that it takes weights"
            raise InputError(f"vllm_server_base_url: {server.url} is not in development mode: {how}")
        return card
    mode, lora = told["model_config"]["logprobs_mode"], told["lora_config"]
    if mode != "processed_logprobs" and (options.temperature != 1 or mode != "raw_logprobs"):
        how = f"of another distribution than rollouts are drawn from at temperature {options.temperature:g}"
        raise InputError(f"the vLLM server gives {mode}, {how}: start it with --logprobs-mode processed_logprobs")
    if rank is not None and (lora is None or lora["max_lora_rank"] < rank):
        raise InputError(f"the vLLM server takes no adapter of rank {rank}: start it with --enable-lora and "
                         f"--max-lora-rank {rank}")  # fmt: skip
    return card | {
        "dtype": str(told["model_config"]["dtype"]).removeprefix("torch."), "logprobs_mode": mode,
        "load_format": told["load_config"]["load_format"], "process": told["instance_id"],
    }  # fmt: skip


def _server(options: Any) -> Server:
    return Server(options.vllm_server_base_url, "vllm_server_base_url", _NEEDS)
