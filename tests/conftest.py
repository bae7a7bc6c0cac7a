"""What every test starts from: offline, one thread, private caches, the rows of recipes/tiny (which git does not have).

Environment variables are set here, before anything imports torch or datasets, and reach subprocesses of the tests too.

    gsm8k     the folder with GSM8K's files alongside the repository; its tests are skipped where it is not there
    gpu       marker: skipped without CUDA
    long      marker of the functions that long_tests.txt lists, which `make test` leaves to `make test-ci`
"""

import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="hf_posttrain-tests-")  # a private one for each process of pytest-xdist
os.environ |= {
    "HF_HOME": _CACHE.name,
    "HF_DATASETS_CACHE": f"{_CACHE.name}/datasets",
    "HF_HUB_CACHE": f"{_CACHE.name}/hub",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU; Triton asks when it is imported


def pytest_sessionstart(session):
    """Make the rows of recipes/tiny, once: before the workers of pytest-xdist start."""
    if not hasattr(session.config, "workerinput"):
        script = Path(__file__).resolve().parents[1] / "recipes" / "tiny" / "make_data.py"
        subprocess.run([sys.executable, script], check=True)


def pytest_collection_modifyitems(items):
    """Mark the long tests, and skip what is marked `gpu` without CUDA. Torch is imported only if something is."""
    long = set(Path(__file__).with_name("long_tests.txt").read_text(encoding="utf-8").split())
    for item in items:
        if item.nodeid.partition("[")[0] in long:
            item.add_marker("long")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collection():
    """Take everything that is imported by now out of garbage collection, which Accelerate runs for each trainer.

    A collection takes 0.7 s otherwise, most of it for modules that stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)  # Python's own collections take 7 % of the tests otherwise


@pytest.fixture(scope="session")
def gsm8k():
    """The folder with train.jsonl, test.jsonl, preference.jsonl and unpaired.jsonl."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture
def hub_home(tmp_path, monkeypatch):
    """The current directory, in which the names of the Hub are folders with small models and rows."""
    from hub_for_tests import at_home, make_hub  # imports transformers

    make_hub(tmp_path / "hub")
    (tmp_path / "home").mkdir()
    at_home(tmp_path / "home", tmp_path / "hub")
    monkeypatch.chdir(tmp_path / "home")


@pytest.fixture(autouse=True)
def _same_environment():
    """Launch settings that a test leaves behind (transformers and deepspeed write them) do not reach the next one, nor
    does the log level of a rank that says nothing."""
    before, logger = dict(os.environ), logging.getLogger("hf_posttrain")
    level = logger.level
    yield
    logger.setLevel(level)
    os.environ.clear()
    os.environ.update(before)
