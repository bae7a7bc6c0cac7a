"""Run each measurement in its own process, with a time limit, and write every result to disk at once.

A measurement that raises, hangs or is killed loses only what it has not recorded yet, and the next one starts. The
processes are forked from a server that has imported torch, transformers and the trainers, so that a measurement does
not spend 5 to 10 seconds on imports. CUDA must not be initialised in that server: Liger, which asks for the device when
it is imported, is not preloaded, and `PYTORCH_NVML_BASED_CUDA_CHECK` answers the same question without CUDA.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PRELOAD = "benchmarks.gpu.preload"
PROBE_SECONDS = 60
START_SECONDS = 60
"""Limit for starting a process. The first one waits for the imports of the server."""
END_SECONDS = 10
"""How long to wait for a killed process. One that waits for a broken GPU may never end."""
LEAST_SECONDS = 4
"""A measurement with less time than this is not started."""
KILLED = "killed after its limit"


@dataclass(frozen=True)
class Case:
    """One measurement: a function that yields records, called in its own process.

    Args:
        name: What the records are listed under.
        run: A module-level function, or a `partial` of one, without further arguments.
        seconds: Time limit, or `None` for what the part has left.
    """

    name: str
    run: Callable[[], Iterable[Record]]
    seconds: float | None = None


@dataclass(frozen=True)
class Part:
    """Measurements that share a time limit in seconds."""

    letter: str
    title: str
    seconds: float
    cases: Sequence[Case]

    def only(self, pattern: str) -> "Part":
        """Return the part with the measurements whose names match a regular expression."""
        return replace(self, cases=[case for case in self.cases if re.search(pattern, case.name)])


class Records:
    """Results in a JSON Lines file. Each is one appended write, so that processes can share the file."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, part: str, case: str, record: Record) -> None:
        """Append a record and print it. A line that a killed process left unfinished is ended first."""
        before = self.path.read_bytes() if self.path.exists() else b""
        unfinished = bool(before) and not before.endswith(b"\n")
        line = json.dumps({"part": part, "case": case} | record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * unfinished + line + "\n")
        values = ", ".join(f"{name} {_short(value)}" for name, value in record.items() if not isinstance(value, list))
        print(f"{part} {case}: {values}", flush=True)

    def read(self) -> list[Record]:
        """Return all records. A line that a killed process left unfinished is skipped."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_parts(parts: Sequence[Part], records: Records, total_seconds: float, device: str) -> None:
    """Run the parts in order, and the cases of a part in order, each within its time limits.

    The first record is the plan. A case that fails gets a record with `error`. One for which no time is left, or that
    the limit of its part ends, gets one with `left_out`. Raises SystemExit if no process can use the device.
    """
    start = time.monotonic()
    planned = {part.letter: [case.name for case in part.cases] for part in parts}
    records.add("-", "plan", {"planned": planned, "total": total_seconds})
    processes = _usable_processes(device)
    for part in parts:
        began = time.monotonic()
        deadline = min(began + part.seconds, start + total_seconds)
        print(f"== {part.letter}: {part.title}, {began - start:.0f} s after the start", flush=True)
        for case in part.cases:
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                records.add(part.letter, case.name, {"left_out": "no time left"})
                continue
            limit = min(left, case.seconds or left)
            error = run_case(processes, partial(_record_all, records, part.letter, case), limit)
            if error and error.startswith(KILLED) and limit == left:
                records.add(part.letter, case.name, {"left_out": "ended by the limit of its part"})
            elif error:
                records.add(part.letter, case.name, {"error": error})
        records.add(part.letter, "part", {"seconds": round(time.monotonic() - began, 1), "limit": part.seconds})


def run_case(processes: BaseContext, target: Callable[[], None], seconds: float) -> str | None:
    """Run `target` in a process for at most `seconds`. Return why it did not end well, or `None`."""
    process = processes.Process(target=_in_own_session, args=(target, os.getpid()))  # type: ignore[attr-defined]
    errors: list[str] = []
    starting = threading.Thread(target=_start, args=(process, errors), daemon=True)
    starting.start()
    starting.join(START_SECONDS)
    if errors or starting.is_alive():
        return f"the process cannot be started: {errors[0] if errors else 'no answer'}"
    try:
        process.join(seconds)
        ended = not process.is_alive()
    finally:  # also after Ctrl-C, and with the processes that it has started, such as workers of torch.compile
        _kill_session(process.pid)
        process.kill()
        process.join(END_SECONDS)
    if not ended:
        return f"{KILLED} of {seconds:.0f} s"
    if process.exitcode:
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
        return f"the process ended with {name}"
    return None


def _start(process: Any, errors: list[str]) -> None:
    try:
        process.start()
    except (OSError, EOFError) as error:  # the server has died, as it does when a preloaded module raises
        errors.append(f"{type(error).__name__}: {error}")


def _in_own_session(target: Callable[[], None], supervisor: int) -> None:
    os.setsid()  # so that it can be killed together with the processes that it starts
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    target()


def _end_with(supervisor: int) -> None:
    """End this session when the supervisor is gone, so that nothing stays on the device."""
    while True:
        time.sleep(1)
        try:
            os.kill(supervisor, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _record_all(records: Records, part: str, case: Case) -> None:
    """Record what a case yields, and its exception."""
    try:
        for record in case.run():
            records.add(part, case.name, record)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        records.add(part, case.name, {"error": f"{type(error).__name__}: {message[0]}"[:300]})
    sys.stdout.flush()


def start_server() -> None:
    """Start the server of processes, which imports what they need. Do not wait for it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


def _usable_processes(device: str) -> BaseContext:
    """Return the context that starts processes: forked with the imports done, or fresh where CUDA does not allow it."""
    for method in ("forkserver", "spawn"):
        processes = multiprocessing.get_context(method)
        began = time.monotonic()
        error = run_case(processes, partial(_use_device, device), PROBE_SECONDS)
        print(f"== first use of {device} by {method}: {time.monotonic() - began:.1f} s", flush=True)
        if error is None:
            return processes
        print(f"== {device} cannot be used in a process started by {method}: {error}", flush=True)
    raise SystemExit(f"error: no process can use {device}. DRY=1 bash benchmarks/gpu.sh rehearses on CPU")


def _use_device(device: str) -> None:
    import torch

    assert torch.ones(2, device=device).sum().item() == 2
