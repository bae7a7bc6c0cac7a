"""The command `hf-posttrain env`, which prints what a report of a bug needs: versions, devices and settings."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..monitoring.versions import TESTED
from ..recipe.cli import Parser, print_output

OPTIONAL = (
    *("deepspeed", "bitsandbytes", "vllm", "liger-kernel", "triton", "flash-attn", "trl", "lm-eval"),
    *("wandb", "trackio", "tensorboard"),
)
"""Packages that only some options use."""
VARIABLES = (
    *("ACCELERATE_", "CUDA_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TRITON_"),
    *("TRACKIO_", "WANDB_"),
)
"""Beginnings of the names of environment variables that are listed."""
_SECRET_NAME = re.compile("TOKEN(?!IZER)|KEY|PASS|SECRET|WEBHOOK|HEADER|PROXY|AUTH|CRED|NOTES")
_HARMLESS_VALUE = re.compile(r"https?://[\w.-]+(:\d+)?/?|(?!.*://)=*[][\w.,:;/^+{}%-]*")
"""Values that are printed: hosts, numbers, words, paths and lists of them."""
_SWITCH = re.compile("0|1|true|false|yes|no|on|off", re.IGNORECASE)
"""Values that are printed for every name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    parser = Parser(
        prog="hf-posttrain env",
        description="Print versions, devices and settings, for the report of a bug.",
        epilog="Values of HF_TOKEN and similar names, texts with spaces or with equals signs inside, and URLs with a "
        "path or a user are not printed.",
    )
    parser.parse_args(argv)
    facts = [*_system(), *_packages(), *_devices(), *_settings()]
    width = max(len(name) for name, _ in facts)
    print_output("\n".join(f"{name:{width}}  {value}".rstrip() for name, value in facts))
    return 0


def _system() -> Iterator[tuple[str, str]]:
    """Yield the facts about the machine."""
    yield "hf_posttrain", __version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU cores", str(cores)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    yield "free disk", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB"


def _packages() -> Iterator[tuple[str, str]]:
    """Yield the versions of packages, with the tested version if it is another one."""
    for name in (*TESTED, *OPTIONAL):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        tested = TESTED.get(name, "")
        is_tested = not tested or installed.partition("+")[0] == tested
        yield name, installed if is_tested else f"{installed} (tested with {tested})"


def _devices() -> Iterator[tuple[str, str]]:
    """Yield the devices that torch finds."""
    import torch

    yield "CUDA of torch", str(torch.version.cuda or torch.version.hip or "none")
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    if not names:
        yield "GPU", "none"
    for number, device in enumerate(names):
        yield f"GPU {number}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB"


def _settings() -> Iterator[tuple[str, str]]:
    """Yield the environment variables that change a run, and the file of `accelerate config` if there is one."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            is_harmless = _HARMLESS_VALUE.fullmatch(value) and not _SECRET_NAME.search(name)
            is_shown = is_harmless or _SWITCH.fullmatch(value)
            yield name, value if is_shown else "(set)"
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).is_file():
        yield "accelerate config", str(default_config_file)
