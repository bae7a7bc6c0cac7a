"""vLLM's engine in the training process itself: this environment, with vLLM's own packages behind ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served_for_tests import VLLM


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_weights_in_memory_arrive_at_every_transfer(kind, tmp_path):
    """And rollouts are drawn as they are scored, at a temperature of 0.8."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([VLLM.parent / "python", "-c", ask], text=True).strip()
    script = Path(__file__).with_name("colocated.py")
    done = subprocess.run([sys.executable, script, site, tmp_path, kind], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["transfers"]) == len(found["rollouts"]) == 4
    assert max(found["transfers"] + found["rollouts"]) < 1e-4
