"""Measurements that end badly, for the supervisor of the GPU benchmarks. A process that runs one imports no more."""

import os
import signal
import subprocess
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
