"""The experiments of recipes/real, two steps of each run."""

import subprocess
import sys

import pytest
from on_real_models import NAMES, found

from recipes.real import experiments, make_data

pytestmark = [pytest.mark.slow, pytest.mark.real]


def test_all_experiments_run_a_few_steps(tmp_path):
    if not (make_data.FOLDER / "gsm8k_train.jsonl").is_file():
        pytest.skip("run make real-models, which writes the rows")
    for name in NAMES:
        (tmp_path / name).symlink_to(found(name).resolve())
    command = [sys.executable, "-m", "recipes.real.experiments", "--fast", "--seeds", "0", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in experiments.EXPERIMENTS:
        assert (tmp_path / f"{name}.md").read_text() in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    ran = [line for line in again.stdout.splitlines() if " -m " in line]
    assert ran
    assert all(" -m hf_posttrain.run compare " in line for line in ran)  # only charts are drawn again
