"""A real `vllm serve` in a process of its own, for the tests of tests/served; `make vllm` makes its environment."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import urllib3
from models_for_tests import tiny_model
from processes_for_tests import free_port
from tokenizers_for_tests import byte_tokenizer

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("VLLM", ROOT / ".venv-vllm" / "bin" / "vllm"))
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
}  # fmt: skip
UNTIED = ("--hf-overrides", '{"tie_word_embeddings": false}')
"""For a tied student: on CPU vLLM packs the head once, and keeps it."""
EXACT = ("--logprobs-mode", "processed_logprobs")


def served_model(name="qwen3", seed=0, **changes):
    """A tiny model that vLLM's attention on CPU takes: heads of 32."""
    return tiny_model(name, seed=seed, head_dim=32, hidden_size=64, **changes)


def saved(model, folder):
    """The model with its tokenizer in a folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


class Running:
    """A server in a process group of its own."""

    def __init__(self, folder, *arguments, port=None, log=None, dtype="float32", **environment):
        self.folder, self.log = Path(folder), Path(log or f"{folder}.log")
        port = free_port() if port is None else port
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        command = [VLLM, "serve", folder, "--generation-config", "vllm", "--max-model-len", "512", "--dtype", dtype,
                   "--port", str(port), "--host", "127.0.0.1", "--enforce-eager", *arguments]  # fmt: skip
        with self.log.open("w") as file:
            given = os.environ | ENVIRONMENT | environment
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=file, stderr=file, env=given, start_new_session=True
            )

    def wait(self, seconds=300):
        """Until it answers."""
        pool, end = urllib3.PoolManager(retries=False), time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if pool.request("GET", f"{self.url}/health", timeout=5).status == 200:
                    return self
            except urllib3.exceptions.HTTPError:
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve is not there: {self.log.read_text()[-3000:]}")

    def stop(self, number=signal.SIGTERM):
        """End the whole group."""
        for each in (number, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, each)
                self.process.wait(30)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def serving(folder, *arguments, **options):
    server = Running(folder, *arguments, **options)
    try:
        yield server.wait()
    finally:
        server.stop()
