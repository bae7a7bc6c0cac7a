"""The notebooks of docs/notebooks run from their first cell to their last, offline on CPU, and their models improve."""

import re

import nbformat
import pytest
from notebooks_for_tests import NOTEBOOKS, execute

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's packages


def text_of(cell):
    """The output of a cell as text."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_output_and_is_valid(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_model_improves(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, tmp_path, monkeypatch)
    shown = "\n".join(text_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    shares = re.findall(r"\((\d+), (0\.\d+)\)", shown)  # (step, exact match), of the last list
    start = max(n for n, (step, _) in enumerate(shares) if step == "0")
    assert len(shares) > start + 1
    assert float(shares[-1][1]) > float(shares[start][1])


@pytest.mark.slow
def test_a_failed_command_of_a_notebook_is_an_error(tmp_path, monkeypatch):
    cells = [nbformat.v4.new_code_cell('name = "no_such_file"'), nbformat.v4.new_code_cell("!cat {name}")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(Exception, match=r"no_such_file: No such file[\s\S]*AssertionError"):
        execute(notebook, tmp_path, monkeypatch)
