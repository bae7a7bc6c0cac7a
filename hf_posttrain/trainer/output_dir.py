"""The folder that a run writes to: one run at a time in it, and what is said where its disk has no space."""

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import InputError
from ..monitoring.progress import GIB
from . import checkpoint

logger = logging.getLogger(__name__)
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "_lock"  # a name that Trainer does not push to the hub
_held: set[Path] = set()  # folders that this process has locked
_UNWRITABLE = re.compile(
    r"No space left on device|File too large|Disk quota exceeded|Input/output error|Read-only file system"
    r"|PytorchStreamWriter failed|iostream error|unexpected pos \d+"
)  # what Python, safetensors, tokenizers and torch say of a write that failed


def write_json(file: Path, content: Any, indent: int | None = 1) -> None:
    """Write the file, whole or not at all; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.tmp")
    new.write_text(json.dumps(content, indent=indent, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    new.replace(file)


def lock_file(file: Any) -> None:
    """Lock an open file until it is closed, or the process that holds it ends, however it does. Raises BlockingIOError
    where another process has it.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # a file system without locks
        logger.info("%s is not locked against other processes (%s)", file.name, error)


@contextmanager
def exclusive_access(args: Any) -> Iterator[None]:
    """Inside, no other process trains in `args.output_dir`; the first rank holds it for all. May be nested.

    The system lets a lock go with the process that holds it, however that ends. Raises InputError where it is held.
    """
    folder = Path(args.output_dir).resolve()
    if args.process_index != 0 or fcntl is None or folder in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "a process"
            raise InputError(
                f"output_dir: another run ({holder}) trains in {args.output_dir}: wait for it, or set another"
            ) from None
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        _held.add(folder)
        try:
            yield
        finally:
            _held.remove(folder)
            with suppress(OSError):  # workers of a data loader that stay have the file open, and would keep the lock
                fcntl.flock(file, fcntl.LOCK_UN)


def min_checkpoint_bytes(model: nn.Module) -> int:
    """What trained weights take on disk at least."""
    return sum(getattr(w, "ds_numel", w.numel()) * w.element_size() for w in model.parameters() if w.requires_grad)


def check_space(folder: str | Path, wanted: int) -> None:
    """Raises InputError where the disk of `folder` has less than so many bytes left."""
    place = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < wanted:
        raise InputError(
            f"{folder} has {free / GIB:.3g} GiB left, and a checkpoint takes {wanted / GIB:.3g} GiB at least: "
            "free some, or set output_dir, save_total_limit or save_only_model"
        )


@contextmanager
def input_error_on_write(folder: str | Path) -> Iterator[None]:
    """A disk that is full, or takes no more for another reason, is an InputError; each library words it otherwise."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        said = _UNWRITABLE.search(str(error))
        if said or isinstance(error, InputError):
            shutil.rmtree(Path(folder, checkpoint.SAVING_FOLDER), ignore_errors=True)  # gives space back
        if said is None or isinstance(error, InputError):
            raise
        raise InputError(
            f"{folder} could not be written ({said[0]}, {shutil.disk_usage(folder).free / GIB:.3g} GiB left): complete"
            " checkpoints stay; free some space and go on with resume_from_checkpoint: auto"
        ) from error
