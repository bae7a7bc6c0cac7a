"""Real vLLM servers for the tests of this folder, which `make test-vllm` runs."""

import shutil
from pathlib import Path

import pytest
from served_for_tests import EXACT, UNTIED, VLLM, saved, served_model, serving


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not VLLM.exists():
                item.add_marker(pytest.mark.skip(reason=f"no vLLM at {VLLM}: make vllm, or set VLLM=path/to/bin/vllm"))


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Folder of models that are served."""
    folder = tmp_path_factory.mktemp("served")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def qwen(home):
    """Takes all weights of a Qwen3, tied or not. It begins with random ones."""
    saved(served_model(), home / "qwen")
    with serving(home / "qwen", "--load-format", "dummy", *UNTIED, *EXACT) as server:
        yield server


@pytest.fixture(scope="session")
def llama(home):
    """Takes all weights of a Llama, or adapters on those that it has."""
    saved(served_model("llama"), home / "llama")
    with serving(home / "llama", "--enable-lora", "--max-lora-rank", "8", *EXACT) as server:
        yield server


@pytest.fixture(scope="session")
def teacher(home):
    """Scores: a Qwen3 with its own head, which gives log-probabilities of all tokens."""
    saved(served_model(seed=9, tie_word_embeddings=False), home / "teacher")
    with serving(home / "teacher", "--max-logprobs", "-1") as server:
        yield server
