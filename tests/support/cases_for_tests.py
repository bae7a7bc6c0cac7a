"""Measurements that end badly, for the supervisor of the GPU benchmarks. A process that runs one imports no more."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time


def two_results():
    yield {"value": 1}
    yield {"value": 2}


def raises():
    yield {"value": 1}
    raise ValueError("no such kernel\nand more")


def hangs():
    yield {"value": 1}
    subprocess.Popen(["sleep", "612"])  # as torch.compile starts workers
    time.sleep(600)
    yield {"value": 2}


def is_killed():
    yield {"value": 1}
    os.kill(os.getpid(), signal.SIGKILL)


def exits():
    yield {"value": 1}
    os._exit(3)


def reports_and_hangs():
    yield {"pid": os.getpid()}
    time.sleep(600)


def fails_if_forked(device):
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        raise RuntimeError("CUDA error: initialization error")


def interrupted(out):
    """The command, with a part whose measurement hangs, and one after it."""
    from benchmarks.gpu import __main__, supervisor
    from benchmarks.gpu.supervisor import Case, Part

    supervisor.PRELOAD = "json"
    hanging = Part("a", "hangs", 60, [Case("hangs", reports_and_hangs)])
    parts = [hanging, Part("b", "never", 60, [Case("never", two_results)])]
    __main__.parts_of = lambda *_: parts
    sys.argv = ["gpu", "--device", "cpu", "--tiny", "--parts", "ab", "--out", out]
    return __main__.main()
