"""In the place of a GPU: the meta device, on which what reads a value or mixes devices raises; and a count of reads."""

import contextlib
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def allow_meta(monkeypatch):
    """torch knows no autocast of the meta device: there it is never on."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def is_enabled(device=None):
        return device != "meta" and (enabled() if device is None else enabled(device))

    def context(device, *args, **kwargs):
        return contextlib.nullcontext() if device == "meta" else autocast(device, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", is_enabled)
    monkeypatch.setattr(torch, "autocast", context)


READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "multinomial", "repeat_interleave", "unique_consecutive")
"""Operations that wait for a GPU. The last three read a value within torch, where no dispatch mode sees it."""


class HostReads(TorchDispatchMode):
    """Counts what would wait for a GPU, by file."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            above = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            self.found[Path(above[-1].filename).name] += 1
        return func(*args, **(kwargs or {}))
