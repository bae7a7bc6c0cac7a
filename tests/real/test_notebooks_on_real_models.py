"""The notebooks of docs/notebooks with a pretrained model in place of the small one, two steps of each run."""

import re

import nbformat
import pytest
from notebooks_for_tests import NOTEBOOKS, execute
from on_real_models import found

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Jupyter's packages
]
FOLDERS = {"sft_dpo_lora": ("sft", "dpo"), "on_policy_distillation": ("opd",), "rounds": ("rounds",)}
"""Folders that the runs of a notebook write."""
FEWER = {
    r"max_steps=\d+": "max_steps=2",
    r'split="train"': 'split="train[:8]"',
    r"limit: 512": "limit: 8",
    r"heldout\.jsonl\}\}": "heldout.jsonl, limit: 8}}",
    r"num_generations: 8": "num_generations: 2",
    # an option of Qwen3's template, about which --check warns for others
    r"\\n  chat_template_kwargs: \{enable_thinking: false\}": "",
    # SmolLM2 has no right answers
    r"judge: exact_match": "judge: {{by: teacher, name: {MODEL}}}",
    r"--max_completion_length 64": "--max_completion_length 8 --limit 4",
}
"""Pattern in a cell -> what makes the run shorter, or possible with SmolLM2."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_a_pretrained_model(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r'^(MODEL|TEACHER) = "[^"]*"', rf'\1 = "{found("smollm2")}"', cell.source, flags=re.M)
        for pattern, shorter in FEWER.items():
            cell.source = re.sub(pattern, shorter, cell.source)
    execute(notebook, tmp_path, monkeypatch)
    outputs = tmp_path / "outputs" / "notebooks"
    assert not (outputs / "student").exists()
    for folder in FOLDERS[path.stem]:
        assert (outputs / folder / "adapter_model.safetensors").is_file()
