"""The notebooks of docs/notebooks, and their execution offline in a folder."""

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))
STRICT = """
def system(command, plain=get_ipython().system):
    plain(command)
    assert _exit_code == 0, command
get_ipython().system = system
"""
"""A cell after which a failed command raises an error, which it does not in a notebook."""


def execute(notebook, folder, monkeypatch):
    """Execute a notebook in a folder, from its first cell to its last."""
    client = pytest.importorskip("nbclient", reason="pip install -e '.[notebook]'")
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[notebook]'")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    client.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
