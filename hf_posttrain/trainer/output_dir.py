"""Output folder of a run: exclusive access, atomic files, and errors of a full disk."""

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainingArguments

from ..errors import InputError
from ..monitoring.progress import GIB
from . import checkpoint

logger = logging.getLogger(__name__)
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "_lock"  # Trainer does not push files with an underscore to the Hub
_locked_folders: set[Path] = set()
_WRITE_ERRORS = re.compile(
    r"No space left on device|File too large|Disk quota exceeded|Input/output error|Read-only file system"
    r"|PytorchStreamWriter failed|iostream error|unexpected pos \d+"
)
"""Messages of Python, safetensors, tokenizers and torch about a failed write."""


def write_json(file: Path, content: object, indent: int | None = 1) -> None:
    """Write a JSON file atomically. Create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.tmp")
    new.write_text(json.dumps(content, indent=indent, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    new.replace(file)


def lock_file(file: IO[Any]) -> None:
    """Lock an open file until it is closed or the process ends, also by a kill.

    Raises:
        BlockingIOError: If another process has locked the file.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # a file system without locks
        logger.info("%s is not locked against other processes (%s)", file.name, error)


@contextmanager
def exclusive_access(args: TrainingArguments) -> Iterator[None]:
    """Lock `args.output_dir` against other runs. The first rank holds the lock for all. Calls may be nested.

    The operating system releases the lock when the process ends, also by a kill.

    Raises:
        InputError: If another run holds the lock.
    """
    folder = Path(str(args.output_dir)).resolve()
    if args.process_index != 0 or fcntl is None or folder in _locked_folders:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "a process"
            problem = f"output_dir: another run ({holder}) trains in {args.output_dir}"
            raise InputError(f"{problem}. Wait for it, or set another output_dir") from None
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        _locked_folders.add(folder)
        try:
            yield
        finally:
            _locked_folders.remove(folder)
            with suppress(OSError):  # data loader workers may still have the file open, which would keep the lock
                fcntl.flock(file, fcntl.LOCK_UN)


def min_checkpoint_bytes(model: nn.Module) -> int:
    """Return a lower bound of the size of a checkpoint: the trained weights, in bytes."""
    return sum(getattr(w, "ds_numel", w.numel()) * w.element_size() for w in model.parameters() if w.requires_grad)


def check_space(folder: str | Path, required_bytes: int) -> None:
    """Raise InputError if the disk of a folder, which need not exist, has less than the required space."""
    absolute = Path(folder).absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < required_bytes:
        required = required_bytes / GIB
        raise InputError(
            f"{folder} has {free / GIB:.3g} GiB left, and a checkpoint requires at least {required:.3g} GiB. "
            "Free disk space, or set output_dir, save_total_limit or save_only_model"
        )


@contextmanager
def input_error_on_write(folder: str | Path) -> Iterator[None]:
    """Convert the errors that libraries raise about a full or read-only disk into an InputError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        write_error = _WRITE_ERRORS.search(str(error))
        if write_error or isinstance(error, InputError):
            shutil.rmtree(Path(folder, checkpoint.SAVING_FOLDER), ignore_errors=True)  # frees its space
        if write_error is None or isinstance(error, InputError):
            raise
        free = shutil.disk_usage(folder).free / GIB
        raise InputError(
            f"{folder} could not be written ({write_error[0]}, {free:.3g} GiB left). Complete checkpoints are kept. "
            "Free disk space and resume with resume_from_checkpoint: auto"
        ) from error
