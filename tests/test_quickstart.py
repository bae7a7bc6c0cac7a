"""recipes/tiny: the quickstart runs, its rows are the ones its figures were measured on, and every recipe there loads.

Git has none of the rows: make_data.py writes them, here in `pytest_sessionstart` of conftest.py.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posttrain.generation.final_answer import final_answer
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.recipe.read import load_recipe, train_config
from hf_posttrain.run import main

REPOSITORY = Path(__file__).parents[1]
TINY = REPOSITORY / "recipes" / "tiny"
SHA256 = {
    "dpo.jsonl": "57a7ae7ed4108e639d1e81d55d4e8935d7b561812c351fbd14ba8cc50663653e",
    "few.jsonl": "ffe48990319498ce05a12dda00eee3593dab12c5ed6e4bd47f3d876e12315364",
    "heldout.jsonl": "247083f9f6441286df560c1bb0a4e8d3672841590dbf0e631c412196aa2a0072",
    "kto.jsonl": "41f82621f7fbee061adc89d3a03ec6b63e86852ef5808b1799100ce7d90d9af6",
    "prompts.jsonl": "194d9d2b09d1cebdfa50e401dcba2923c2640cf44f548db3025f1eb99a650477",
    "rm.jsonl": "5ca624f611429273015f89e080b9ba3579bd85efb983eb0cef67b5762350d743",
    "sums.jsonl": "8f9cd1a9bc15952095407c4c8f6ea993d7970fbfa4937f5526cac84f7ec41f3e",
    "train.jsonl": "7fe0d9b0eed369ee32940e7d46cf707130b650a3e6fbb061d1956f19c035e3f0",
}
"""Of the rows on which the README's exact matches were measured."""


def load_script(name):
    """A script of recipes/tiny as a module."""
    spec = importlib.util.spec_from_file_location(name, TINY / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name):
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text().splitlines()]


def test_data_files_are_what_make_data_writes(tmp_path):
    load_script("make_data").write(tmp_path / "new")
    written = sorted(path.relative_to(tmp_path / "new") for path in tmp_path.rglob("*") if path.is_file())
    kept = sorted(path.relative_to(TINY) for path in TINY.rglob("*.json*"))
    assert written == kept
    for path in written:
        assert (tmp_path / "new" / path).read_bytes() == (TINY / path).read_bytes(), path


def test_rows_are_those_of_the_measured_figures():
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in TINY.glob("*.jsonl")} == SHA256


def test_a_file_with_its_rows_is_left_alone_and_another_is_written_anew(tmp_path):
    make_data = load_script("make_data")
    make_data.write(tmp_path)
    for name in ("few.jsonl", "dpo.jsonl"):
        os.utime(tmp_path / name, (0, 0))
    cut = (tmp_path / "dpo.jsonl").read_bytes()[:1000]
    (tmp_path / "dpo.jsonl").write_bytes(cut)
    make_data.write(tmp_path)
    assert (tmp_path / "few.jsonl").stat().st_mtime == 0  # else `datasets` would cache the same rows again
    assert hashlib.sha256((tmp_path / "dpo.jsonl").read_bytes()).hexdigest() == SHA256["dpo.jsonl"]
    assert {path.name for path in tmp_path.iterdir()} == {"student", "teacher", *SHA256}  # and nothing unfinished


@pytest.fixture
def clone(tmp_path):
    """A folder with recipes/tiny as git has it."""
    shutil.copytree(TINY, tmp_path / "clone" / "recipes" / "tiny", ignore=shutil.ignore_patterns("*.jsonl"))
    return tmp_path / "clone"


def test_a_recipe_without_its_rows_says_which_command_makes_them(clone, monkeypatch, capsys):
    """The command does make them, and a mistyped name is still a mistyped name."""
    monkeypatch.chdir(clone)
    assert main(["recipes/tiny/sft_teacher.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: recipes/tiny/sft_teacher.yaml:9: data.train.path: there is no file or folder recipes/tiny/train.jsonl"
        " (run python recipes/tiny/make_data.py to create it)\n"
    )
    subprocess.run([sys.executable, "recipes/tiny/make_data.py"], check=True)
    assert main(["data", "recipes/tiny/train.jsonl"]) == 0
    capsys.readouterr()
    assert main(["data", "recipes/tiny/rain.jsonl"]) == 2
    assert capsys.readouterr().err.endswith("recipes/tiny/rain.jsonl (did you mean 'recipes/tiny/train.jsonl'?)\n")


def test_no_heldout_problem_is_trained_on_either_way_round():
    def problems(name):
        return {frozenset(row["prompt"].rstrip("=").split("+")) for row in rows(name)}

    heldout = problems("heldout")
    assert len(heldout) == 500
    for name in ("train", "few", "prompts", "dpo", "kto", "rm"):
        assert not heldout & problems(name), name


def test_solutions_are_right_and_slips_are_wrong():
    def ends_in_sum(prompt, answer):
        return final_answer(answer) == str(sum(map(int, prompt.rstrip("=").split("+"))))

    assert all(ends_in_sum(row["prompt"], row["completion"]) for name in ("train", "heldout") for row in rows(name))
    assert not any(
        ends_in_sum(row["prompt"], row["rejected"]) for name in ("dpo", "rm", "heldout") for row in rows(name)
    )
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
    config = train_config(recipe, config_class(METHODS[recipe.method]))
    assert config.use_cpu
    assert config.eval_exact_match == (METHODS[recipe.method].head == "language")


def test_the_table_of_judges_has_means_and_spreads():
    judge = load_script("judge")
    names = ("pairs of own answers", "pair_nll", "any of 8")
    seeds = ((1000.0, 0.5, 0.5), (3000.0, 0.25, 1.0))
    page = [*judge.table([dict(zip(names, values, strict=True)) for values in seeds])]
    assert page[2:] == [
        "| pairs of own answers | 2,000 | 1,000 to 3,000 |",
        "| pair_nll | 0.375 | 0.250 to 0.500 |",
        "| any of 8 | 75.0% | 50.0% to 100.0% |",
    ]


def test_one_of_eight_answers_is_selected_by_its_reward(tmp_path):
    judge = load_script("judge")
    answers = {"1+1=": [("#### 2", 0.1), ("#### 3", 0.2), ("#### 3", 0.3)], "2+2=": [("#### 5", -1.0), ("#### 4", 1.0)]}
    right = {"1+1=": "#### 2", "2+2=": "#### 4"}
    rows_ = [{"prompt": prompt, "completion": text, "score": score, "reference": right[prompt]}
             for prompt, tries in answers.items() for text, score in tries]  # fmt: skip
    judge.write(tmp_path / "heldout_by_model.jsonl", rows_)
    found = judge.best_of(tmp_path)
    assert [*found.values()] == [pytest.approx(x) for x in ((1 / 3 + 1 / 2) / 2, 0.5, 0.0, 0.5, 1.0)]


@pytest.mark.slow
def test_the_demonstration_of_judges_runs(tmp_path):
    command = [sys.executable, "-m", "recipes.tiny.judge", "--fast", "--seeds", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "results.md").read_text() in done.stdout


def test_preferences_pair_a_right_answer_with_each_different_wrong_one():
    quickstart = load_script("quickstart")
    prompts = ["101+102=", "101+103=", "101+104="]
    answers = [["3 0 2 #### 203", "3 0 3 #### 303", "3 0 3 #### 303", ""], ["#### 204"] * 4, ["#### 1"] * 4]
    assert quickstart.preferences(prompts, answers) == [
        {"prompt": "101+102=", "chosen": "3 0 2 #### 203", "rejected": "3 0 3 #### 303"}
    ]


@pytest.mark.slow
def test_quickstart_runs_and_leaves_table_and_plot(clone, tmp_path):
    command = [sys.executable, "-m", "recipes.tiny.quickstart", "--fast", "--seed", "1", "--output", str(tmp_path)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in (clone / "recipes" / "tiny").glob("*.jsonl")} == {*SHA256}
    for title in ("teacher, SFT", "student, SFT", "student, OPD", "student, DPO"):
        assert f"\n{title} " in done.stdout
    assert "it/s" in done.stderr or "s/it" in done.stderr  # progress bars
    results = json.loads((tmp_path / "quickstart.json").read_text())
    assert results["seed"] == 1
    assert [list(stage["curve"]) for stage in results["stages"]] == [["0", "1", "2"]] * 4
    for folder in ("teacher", "student", "opd", "dpo"):
        assert (tmp_path / folder / "model.safetensors").exists()
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
