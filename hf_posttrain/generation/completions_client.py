"""A server that completes and scores token ids over HTTP: `vllm serve`, or another one with OpenAI's protocol.

Retries, pauses between them and open connections are urllib3's. What goes wrong is a ServerError of one line.
Written against vLLM 0.32 and tested with it (tests/served): entrypoints/openai/completion/protocol.py.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any, TypeVar

import urllib3
from accelerate.utils import gather_object
from urllib3.exceptions import HTTPError, ReadTimeoutError

from ..errors import InputError

MAX_CONNECTIONS = 256
"""Requests that a process has open at a server."""
LOG_INTERVAL = 10.0
"""Seconds between two lines about lost connections: each of many requests has its own."""
RETRIES = urllib3.Retry(
    total=8,
    read=1,
    backoff_factor=0.5,
    backoff_max=30,
    status_forcelist=(429, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)
"""Of a server that has answered before: a minute and a half for one that is not there, which may be starting again."""
TIMEOUT = urllib3.Timeout(connect=10, read=1800)
"""Seconds; a rollout waits for those before it."""
UNMODIFIED_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling from the model's own distribution, whatever its generation config says."""
REQUEST_TIMEOUT = 408
"""What HTTP calls a request that timed out."""
Asked = TypeVar("Asked")
Found = TypeVar("Found")


class RetryLogFilter(logging.Filter):
    """Passes one of urllib3's lines about a try that failed, in other words, and no other for LOG_INTERVAL seconds."""

    last = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Retrying"):
            return True
        now = time.monotonic()
        if now - self.last <= LOG_INTERVAL:
            return False
        self.last = now
        if isinstance(record.args, tuple) and len(record.args) == 3:
            _, error, path = record.args
            record.msg = "no answer to %s (%s): it is asked again"
            record.args = (path, _reason(error))
        return True


logging.getLogger("urllib3.connectionpool").addFilter(RetryLogFilter())


class ServerError(InputError):
    """A server is not there, refuses, or answers otherwise than it must. status: of HTTP, 0 where nothing answered,
    REQUEST_TIMEOUT where it took too long.
    """

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Server:
    """A server at `url`. option: what names it to the user, for messages. needs: path -> what a server that has no such
    path was started without.
    """

    def __init__(self, url: str, option: str, needs: Mapping[str, str] | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")  # which some clients want at its end
        self.option = option
        self.needs = needs or {}
        self.pool = urllib3.PoolManager(maxsize=MAX_CONNECTIONS, timeout=TIMEOUT, retries=RETRIES)

    def get(self, path: str, **options: Any) -> Any:
        """What it answers, from JSON. Raises ServerError."""
        return self._ask("GET", path, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        """What it answers to `body`. Raises ServerError."""
        return self._ask("POST", path, json=body, **options)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        url = self.url + path
        try:
            answer = self.pool.request(method, url, **options)
        except HTTPError as error:
            if isinstance(reason := getattr(error, "reason", None) or error, ReadTimeoutError):
                raise ServerError(f"{self.option}: {url} took too long ({_reason(reason)})", REQUEST_TIMEOUT) from error
            where = f"no server answers at {url} ({_reason(reason)})"
            raise ServerError(f"{self.option}: {where}: start it, or correct the URL") from error
        text = answer.data.decode(errors="replace")
        if answer.status != 200:
            hint = f": {self.needs[path]}" if answer.status == 404 and path in self.needs else ""
            raise ServerError(f"{self.option}: {url} answered {answer.status} ({_error_message(text)}){hint}", answer.status)
        try:
            return json.loads(text) if text and not text.startswith("Success") else text
        except ValueError as error:
            raise ServerError(f"{self.option}: {url} answered no JSON ({_error_message(text)}): is it that server?") from error

    def model_info(self, **options: Any) -> dict[str, Any]:
        """What it says of its model: id, root (a name or folder), max_model_len. Raises ServerError at once where it
        cannot be asked.
        """
        listed = self.get("/v1/models", retries=False, **options)
        try:
            return listed["data"][0]  # the base, then adapters
        except (TypeError, LookupError) as error:
            raise ServerError(f"{self.option}: {self.url}/v1/models names no model: {str(listed)[:200]}") from error

    def vllm_config(self) -> dict[str, Any] | None:
        """VLLM's own, which it tells in development mode alone (VLLM_SERVER_DEV_MODE=1); None: it does not."""
        try:
            return self.get("/server_info?config_format=json")["vllm_config"]
        except ServerError as error:
            if error.status in (404, 405):
                return None
            raise

    def complete(self, body: dict[str, Any], prompt: Sequence[int]) -> list[dict[str, Any]]:
        """Its choices for one prompt of token ids. Raises ServerError where it read other ids, or gives none."""
        given = list(prompt)
        choices = self.post("/v1/completions", body | {"prompt": given, "return_token_ids": True})["choices"]
        for choice in choices:
            if choice.get("token_ids") is None:
                raise ServerError(f"{self.option}: {self.url} gives no token ids (return_token_ids): it must be vLLM")
            if choice.get("prompt_token_ids", given) != given:
                raise ServerError(f"{self.option}: {self.url} read other token ids than it was sent: another tokenizer")
        return choices


def run_in_background(function: Callable[[], Result]) -> Future[Result]:
    """What `function` gives, from a thread that the end of the process does not wait for (it would for an executor's,
    and a server may take half an hour to answer).
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def run_concurrently(function: Callable[[Item], Result], asked: Sequence[Item]) -> list[Result]:
    """`function` of each, in order; requests wait for the server together. After an error no more are begun."""
    left = list(enumerate(asked))[::-1]
    lock = Lock()
    found = [None] * len(asked)

    def work() -> None:
        try:
            while True:
                with lock:
                    if not left:
                        return
                    number, each = left.pop()
                found[number] = function(each)  # type: ignore[call-overload]
        except BaseException:
            left.clear()
            raise

    workers = [run_in_background(work) for _ in range(min(MAX_CONNECTIONS, len(asked)))]
    wait(workers)
    for worker in workers:
        worker.result()
    return found  # type: ignore[return-value]


@contextmanager
def as_server_error() -> Iterator[None]:
    """Makes a ServerError of what is raised of an answer that lacks what it must have, or of a file not written."""
    try:
        yield
    except InputError as error:
        raise error if isinstance(error, ServerError) else ServerError(str(error)) from error
    except OSError as error:
        raise ServerError(f"{error.filename or 'a file for the server'}: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ServerError(f"a server answered otherwise than vLLM does ({said}): is it one, and which?") from error


def raise_on_all_ranks(ask: Callable[[], Result]) -> Result:
    """What `ask` gives on each rank. Raises the ServerError of any rank on all of them, which would wait for it; an
    answer that lacks what it must have is one too.
    """
    found = None
    error = None
    try:
        with as_server_error():
            found = ask()
    except ServerError as raised:
        error = raised
    told = gather_object([error and (str(error), error.status)])
    if first := next(filter(None, told), None):
        raise ServerError(*first) from error
    return found  # type: ignore[return-value]


def _reason(error: Any) -> str:
    """What an error of urllib3 says, without the connection that had it."""
    return str(error).rpartition("): ")[2]


def _error_message(text: str) -> str:
    """What a server says of its own error, in one line."""
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:500]
