"""HTTP client of a server that completes and scores token ids: `vllm serve`, or another one with OpenAI's protocol.

urllib3 makes retries, pauses between them, and keeps connections open. Problems are raised as ServerError with a
message of one line. The client is written for vLLM 0.32 and tested with it (tests/served), see
entrypoints/openai/completion/protocol.py.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import urllib3
from accelerate.utils import gather_object
from urllib3.exceptions import HTTPError, ReadTimeoutError, SSLError

from ..errors import InputError

MAX_CONNECTIONS = 256
"""Maximum number of open requests of a process."""
LOG_INTERVAL = 10.0
"""Seconds between two log lines about lost connections. Otherwise each of many requests would have its own line."""
RETRIES = urllib3.Retry(
    total=8,
    read=1,
    backoff_factor=0.5,
    backoff_max=30,
    status_forcelist=(429, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)
"""Retries, for a minute and a half if the server does not respond. It may be restarting."""
TIMEOUT = urllib3.Timeout(connect=10, read=1800)
"""Timeout in seconds. A rollout waits for earlier ones."""
UNMODIFIED_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters for the model's own distribution, whatever its generation config is."""
API_KEY = "OPENAI_API_KEY"
"""Environment variable of the key for servers."""
REQUEST_TIMEOUT = 408
"""HTTP status of a request that timed out."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class RetryLogFilter(logging.Filter):
    """Rewords urllib3's log lines about failed attempts, and passes one of them in LOG_INTERVAL seconds."""

    last = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged, and reword its message."""
        if not str(record.msg).startswith("Retrying"):
            return True
        now = time.monotonic()
        if now - self.last <= LOG_INTERVAL:
            return False
        self.last = now
        if isinstance(record.args, tuple) and len(record.args) == 3:
            _, error, path = record.args
            record.msg = "no answer to %s (%s), trying again"
            record.args = (path, _error_reason(error))
        return True


logging.getLogger("urllib3.connectionpool").addFilter(RetryLogFilter())


class ServerError(InputError):
    """A server does not respond, rejects a request, or its response is invalid.

    Args:
        message: The message.
        status: HTTP status, 0 without a response, or REQUEST_TIMEOUT if it took too long.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server.

    The key of the environment variable OPENAI_API_KEY is sent, but never over a network without encryption.

    Args:
        url: URL of the server. A trailing /v1, which some clients require, is removed.
        option: Option that sets the URL, for messages.
        requirements: Path -> how to start a server that has this path, for messages.
    """

    def __init__(self, url: str, option: str, requirements: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.option = option
        self.requirements = requirements or {}
        parts = urlsplit(self.url)
        key = os.environ.get(API_KEY)
        is_private = parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")
        headers = {"Authorization": f"Bearer {key}"} if key and is_private else {}
        self.key_advice = f"The key in {API_KEY} is not accepted"
        if not key:
            self.key_advice = f"Set {API_KEY} to the key of the server"
        elif not is_private:
            self.key_advice = f"The key in {API_KEY} was not sent, because the URL is not https. Use https"
        self.pool = urllib3.PoolManager(maxsize=MAX_CONNECTIONS, headers=headers, timeout=TIMEOUT, retries=RETRIES)

    def get(self, path: str, **options: Any) -> Any:
        """Return the JSON response to a GET request. Raise ServerError if it fails."""
        return self._request("GET", path, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        """Return the JSON response to a POST request. Raise ServerError if it fails."""
        return self._request("POST", path, json=body, **options)

    def _request(self, method: str, path: str, **options: Any) -> Any:
        url = self.url + path
        try:
            response = self.pool.request(method, url, **options)
        except HTTPError as error:
            if isinstance(reason := getattr(error, "reason", None) or error, ReadTimeoutError):
                raise ServerError(
                    f"{self.option}: {url} took too long ({_error_reason(reason)})", REQUEST_TIMEOUT
                ) from error
            fix = "Start it, or correct the URL"
            if isinstance(reason, SSLError):
                fix = "To trust its certificate, set SSL_CERT_FILE to the file of the certificate"
            raise ServerError(f"{self.option}: no server answers at {url} ({_error_reason(reason)}). {fix}") from error
        text = response.data.decode(errors="replace")
        if response.status != 200:
            is_missing = response.status == 404 and path in self.requirements
            hint = f". {self.requirements[path]}" if is_missing else ""
            if response.status in (401, 403):
                hint = f". {self.key_advice}"
            raise ServerError(
                f"{self.option}: {url} answered {response.status} ({_error_message(text)}){hint}", response.status
            )
        try:
            return json.loads(text) if text and not text.startswith("Success") else text
        except ValueError as error:
            raise ServerError(
                f"{self.option}: {url} did not return JSON ({_error_message(text)}). Check that the URL is correct"
            ) from error

    def model_info(self, **options: Any) -> dict[str, Any]:
        """Return the server's description of its model: id, root (a name or folder), max_model_len.

        Raises:
            ServerError: If the server does not respond, without retries.
        """
        models = self.get("/v1/models", retries=False, **options)
        try:
            return models["data"][0]  # the base is first, then adapters
        except (TypeError, LookupError) as error:
            raise ServerError(f"{self.option}: {self.url}/v1/models lists no model: {str(models)[:200]}") from error

    def vllm_config(self) -> dict[str, Any] | None:
        """Return the config of vLLM, or None without its development mode (VLLM_SERVER_DEV_MODE=1)."""
        try:
            return self.get("/server_info?config_format=json")["vllm_config"]
        except ServerError as error:
            if error.status in (404, 405):
                return None
            raise

    def complete(self, body: dict[str, Any], prompt: Sequence[int]) -> list[dict[str, Any]]:
        """Return the choices for a prompt of token ids.

        Raises:
            ServerError: If the server returns no token ids, or has not read the ids of the prompt.
        """
        ids = list(prompt)
        choices = self.post("/v1/completions", body | {"prompt": ids, "return_token_ids": True})["choices"]
        for choice in choices:
            if choice.get("token_ids") is None:
                raise ServerError(f"{self.option}: {self.url} returns no token ids (return_token_ids). Use vLLM")
            if choice.get("prompt_token_ids", ids) != ids:
                raise ServerError(
                    f"{self.option}: {self.url} did not read the token ids that were sent. Start it with the tokenizer "
                    "of this run"
                )
        return choices


def run_in_background(function: Callable[[], Result]) -> Future[Result]:
    """Run a function in a thread, for which the end of the process does not wait.

    The process would wait for the threads of an executor, and a server may take half an hour to respond.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is read
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def run_concurrently(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `function` for the items in order. No further calls start after an error."""
    remaining = list(enumerate(items))[::-1]
    lock = Lock()
    results = [None] * len(items)

    def work() -> None:
        try:
            while True:
                with lock:
                    if not remaining:
                        return
                    number, item = remaining.pop()
                results[number] = function(item)  # type: ignore[call-overload]
        except BaseException:
            remaining.clear()
            raise

    workers = [run_in_background(work) for _ in range(min(MAX_CONNECTIONS, len(items)))]
    wait(workers)
    for worker in workers:
        worker.result()
    return results  # type: ignore[return-value]


@contextmanager
def as_server_error() -> Iterator[None]:
    """Convert errors from an invalid response, or from a file that cannot be written, into a ServerError."""
    try:
        yield
    except InputError as error:
        raise error if isinstance(error, ServerError) else ServerError(str(error)) from error
    except OSError as error:
        raise ServerError(f"{error.filename or 'a file for the server'}: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ServerError(
            f"the response of a server is not that of vLLM ({problem}). Check that it is a supported version"
        ) from error


def raise_on_all_ranks(
    function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Return the result of `function` on each rank, or raise the InputError or ServerError of any rank on all of them.

    Without it, ranks would wait for the one that failed.
    """
    result = None
    error = None
    try:
        result = function(*args, **options)
    except InputError as raised:
        error = raised
    errors = gather_object([error and (str(error), getattr(error, "status", None))])
    if first := next(filter(None, errors), None):
        message, status = first
        raise (InputError(message) if status is None else ServerError(message, status)) from error
    return result  # type: ignore[return-value]


def ask_on_all_ranks(
    function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Call `raise_on_all_ranks` with a function that uses a server: an invalid response is a ServerError, too."""
    return raise_on_all_ranks(as_server_error()(function), *args, **options)


def _error_reason(error: object) -> str:
    """Return the message of an error of urllib3 without the connection that had it."""
    return str(error).rpartition("): ")[2]


def _error_message(text: str) -> str:
    """Return the error message in a response, in one line."""
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:500]
