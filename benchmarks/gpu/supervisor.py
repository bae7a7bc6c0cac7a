"""Run each measurement in its own process, with a time limit, and write every result to disk at once.

A measurement that raises, hangs or is killed loses only what it has not recorded yet, and the next one starts. The
processes are forked from a server that has imported torch, transformers and the trainers, so that a measurement does
not spend 5 to 10 seconds on imports. CUDA must not be initialised in that server: Liger, which asks for the device when
it is imported, is not preloaded, and `PYTORCH_NVML_BASED_CUDA_CHECK` answers the same question without CUDA.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PRELOAD = "benchmarks.gpu.preload"
PROBE_SECONDS = 60
LEAST_SECONDS = 2
"""A measurement with less time than this is not started."""


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


class Records:
    """Results in a JSON Lines file. Each is one appended write, so that processes can share the file."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, part: str, case: str, record: Record) -> None:
        """Append a record and print it."""
        line = json.dumps({"part": part, "case": case} | record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        values = ", ".join(f"{name} {_short(value)}" for name, value in record.items() if not isinstance(value, list))
        print(f"{part} {case}: {values}", flush=True)

    def read(self) -> list[Record]:
        """Return all records. A last line that a killed process left unfinished is skipped."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_parts(parts: Sequence[Part], records: Records, total_seconds: float, device: str) -> None:
    """Run the parts in order, and the cases of a part in order, each within its time limits.

    A case that fails, and one for which no time is left, get a record with `error` or `left_out`.
    """
    start = time.monotonic()
    processes = _start_server(device)
    for part in parts:
        began = time.monotonic()
        deadline = min(began + part.seconds, start + total_seconds)
        print(f"== {part.letter}: {part.title}, {began - start:.0f} s after the start", flush=True)
        for case in part.cases:
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                records.add(part.letter, case.name, {"left_out": "no time left"})
                continue
            target = partial(_record_all, records, part.letter, case)
            error = run_case(processes, target, min(left, case.seconds or left))
            if error:
                records.add(part.letter, case.name, {"error": error})
        records.add(part.letter, "part", {"seconds": round(time.monotonic() - began, 1), "limit": part.seconds})


def run_case(processes: BaseContext, target: Callable[[], None], seconds: float) -> str | None:
    """Run `target` in a process for at most `seconds`. Return why it did not end well, or `None`."""
    process = processes.Process(target=_in_own_session, args=(target,))  # type: ignore[attr-defined]
    process.start()
    process.join(seconds)
    if process.is_alive():
        _kill_session(process.pid)
        process.kill()
        process.join()
        return f"killed after its limit of {seconds:.0f} s"
    _kill_session(process.pid)  # workers that it has started, such as those of torch.compile
    if process.exitcode:
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
        return f"the process ended with {name}"
    return None


def _in_own_session(target: Callable[[], None]) -> None:
    os.setsid()  # so that it can be killed together with the processes that it starts
    target()


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _record_all(records: Records, part: str, case: Case) -> None:
    """Record what a case yields, and its exception."""
    try:
        for record in case.run():
            records.add(part, case.name, record)
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        records.add(part, case.name, {"error": f"{type(error).__name__}: {message[0]}"[:300]})
    sys.stdout.flush()


def _start_server(device: str) -> BaseContext:
    """Return the context that starts processes: forked with the imports done, or fresh where CUDA does not allow it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload([PRELOAD])
    began = time.monotonic()
    error = run_case(forked, partial(_use_device, device), PROBE_SECONDS)
    print(f"== imports and first use of {device}: {time.monotonic() - began:.1f} s", flush=True)
    if error is None:
        return forked
    print(f"== a forked process cannot use {device} ({error}): each measurement imports everything anew", flush=True)
    return multiprocessing.get_context("spawn")


def _use_device(device: str) -> None:
    import torch

    assert torch.ones(2, device=device).sum().item() == 2
