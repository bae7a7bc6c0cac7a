"""recipes/tiny: the quickstart runs, its data files are what make_data.py writes, and every recipe there loads."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posttrain.generation.exact_match import final_answer
from hf_posttrain.recipe.build import METHODS
from hf_posttrain.recipe.read import load_recipe, train_config

REPOSITORY = Path(__file__).parents[1]
TINY = REPOSITORY / "recipes" / "tiny"


def load_script(name):
    """A script of recipes/tiny as a module."""
    spec = importlib.util.spec_from_file_location(name, TINY / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name):
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text().splitlines()]


def test_data_files_are_what_make_data_writes(tmp_path):
    load_script("make_data").write(tmp_path)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    kept = sorted(path.relative_to(TINY) for path in TINY.rglob("*.json*"))
    assert written == kept
    for path in written:
        assert (tmp_path / path).read_bytes() == (TINY / path).read_bytes(), path


def test_no_heldout_problem_is_trained_on_either_way_round():
    def problems(name):
        return {frozenset(row["prompt"].rstrip("=").split("+")) for row in rows(name)}

    heldout = problems("heldout")
    assert len(heldout) == 500
    for name in ("train", "few", "prompts", "dpo", "kto"):
        assert not heldout & problems(name), name


def test_solutions_are_right_and_slips_are_wrong():
    def ends_in_sum(prompt, answer):
        return final_answer(answer) == str(sum(map(int, prompt.rstrip("=").split("+"))))

    assert all(ends_in_sum(row["prompt"], row["completion"]) for name in ("train", "heldout") for row in rows(name))
    assert not any(ends_in_sum(row["prompt"], row["rejected"]) for name in ("dpo", "heldout") for row in rows(name))
    assert all(ends_in_sum(row["prompt"], row["completion"]) == row["label"] for row in rows("kto"))


def test_columns_and_slip_on_paper():
    make_data = load_script("make_data")
    assert make_data.columns(347, 589) == [16, 13, 9]  # 7+9, 4+8+1, 3+5+1
    assert make_data.solution(964, 494) == {"prompt": "964+494=", "completion": "8 15 14 #### 1458"}
    random = type("InTheTens", (), {"randrange": staticmethod(lambda n: 1)})  # 4+8 without the carry
    assert make_data.slip(347, 589, random) == "16 12 9 #### 926"


@pytest.mark.parametrize("path", sorted(TINY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_tiny_recipe_loads(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    recipe = load_recipe(path)
    module, config_name, _ = METHODS[recipe.method]
    config = train_config(recipe, getattr(importlib.import_module(module), config_name))
    assert config.use_cpu
    assert config.eval_exact_match


def test_preferences_pair_a_right_answer_with_each_different_wrong_one():
    quickstart = load_script("quickstart")
    prompts = ["101+102=", "101+103=", "101+104="]
    answers = [["3 0 2 #### 203", "3 0 3 #### 303", "3 0 3 #### 303", ""], ["#### 204"] * 4, ["#### 1"] * 4]
    assert quickstart.preferences(prompts, answers) == [
        {"prompt": "101+102=", "chosen": "3 0 2 #### 203", "rejected": "3 0 3 #### 303"}
    ]


def test_quickstart_runs_and_leaves_table_and_plot(tmp_path):
    command = [sys.executable, "-m", "recipes.tiny.quickstart", "--fast", "--seed", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for title in ("teacher, SFT", "student, SFT", "student, OPD", "student, DPO"):
        assert f"\n{title} " in done.stdout
    assert "it/s" in done.stderr or "s/it" in done.stderr  # progress bars
    results = json.loads((tmp_path / "quickstart.json").read_text())
    assert results["seed"] == 1
    assert [list(stage["curve"]) for stage in results["stages"]] == [["0", "1", "2"]] * 4
    for folder in ("teacher", "student", "opd", "dpo"):
        assert (tmp_path / folder / "model.safetensors").exists()
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
