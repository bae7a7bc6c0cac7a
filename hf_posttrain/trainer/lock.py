"""One run at a time in an output_dir."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import InputError

logger = logging.getLogger(__name__)
NAME = "_lock"  # a name that Trainer does not push to the hub


@contextmanager
def held(args: Any) -> Iterator[None]:
    """Inside, no other process trains in `args.output_dir`; the first rank holds it for all. May be nested.

    The system lets a lock go with the process that holds it, however that ends. Raises InputError where it is held.
    """
    if args.process_index != 0:
        yield
        return
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # one object for each path, so that `train` may be called inside the command's own
    lock = FileLock(folder.resolve() / NAME, is_singleton=True, thread_local=False)
    try:
        lock.acquire(timeout=0)
        with suppress(OSError):
            (folder / NAME).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        holder = ""
        with suppress(OSError):
            holder = (folder / NAME).read_text(encoding="utf-8").strip()
        raise InputError(
            f"output_dir: another run ({holder or 'a process'}) trains in {folder}: wait for it, or set another"
        ) from None
    except (OSError, NotImplementedError) as error:  # a file system without locks
        logger.info("%s is not locked against a second run (%s)", folder, error)
    try:
        yield
    finally:
        lock.release()
