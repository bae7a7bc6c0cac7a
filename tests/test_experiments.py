"""The experiments of OPD: each is a recipe that can run, and the tables say what the runs did."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import opd, rounds
from hf_posttrain.recipe.read import load_recipe

REPOSITORY = Path(__file__).parents[1]
SETTINGS = [setting for _, settings in opd.EXPERIMENTS.values() for setting in settings.values()]


def run_of(match, kl):
    found = {"exact_match": match, "reverse_kl": kl, "stopped": 1.0, "length": 12.0, "seconds": 40.0}
    return found | {"curve": [(0, 0.5, 0.25), (9, match, kl)]}


def test_the_tables_have_means_and_spreads():
    runs = {"OPD, reverse KL": [run_of(0.8, 0.04), run_of(0.9, 0.01)]}
    runs["SFT on the teacher's answers"] = [run_of(0.6, None)] * 2
    assert {*runs} <= {*opd.EXPERIMENTS["f"][1]}
    page = [*opd.pages({"f": runs}, [(0.5, 1.0), (0.5, 1.0)])]
    assert page[0].startswith("student 50.0% (50.0% to 50.0%), teacher 100.0%")
    [row] = [line for line in page if line.startswith("| OPD, reverse KL")]
    assert row.split(" | ")[1:4] == ["85.0% (80.0% to 90.0%)", "70% (60% to 80%)", "0.025 (0.010 to 0.040)"]
    [row] = [line for line in opd.pages({"f": runs}, [(0.5, 0.5)] * 2) if line.startswith("| OPD, reverse KL")]
    assert row.split(" | ")[2] == ""  # a student as good as its teacher: no gap
    assert page[-1] == "## h: exact match = 1.00 -1.00 sqrt(reverse KL), R2 1.000 over 4 evaluations of f"


def test_every_setting_is_a_recipe_that_can_run(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(opd, "train", lambda given, recipe, folder, overrides: seen.append((recipe, overrides, folder)))
    monkeypatch.setattr(opd, "read_result", lambda folder: {"seconds": 1.0, "steps": 4})
    for setting in SETTINGS:
        opd.result_of(SimpleNamespace(out=tmp_path), setting, 0)
    assert len(seen) > len({*SETTINGS}) > 30
    asked = {(recipe, *(one for one in overrides if "steps=" not in one)) for recipe, overrides, _ in seen}
    assert len(asked) < len({folder for *_, folder in seen})  # a setting has a folder of its own
    subprocess.run([sys.executable, opd.TINY / "make_data.py"], check=True)
    for recipe, overrides, _ in seen:
        load_recipe(opd.TINY / f"{recipe.replace('without_tail', 'opd')}.yaml", overrides)


@pytest.mark.slow
def test_the_experiments_run(tmp_path):
    command = [sys.executable, "-m", "benchmarks.opd", "--fast", "--seeds", "0", "--only", "a", "e", "f", "i"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    asked = {letter: [*opd.EXPERIMENTS[letter][1]] for letter in "aefi"}
    assert {letter: [*settings] for letter, settings in found.items()} == asked
    assert (tmp_path / "results.md").read_text() in done.stdout


def test_settings_of_rounds_are_recipes_and_their_table_has_means(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(rounds, "train", lambda given, recipe, folder, overrides: seen.append((recipe, overrides)))
    subprocess.run([sys.executable, opd.TINY / "make_data.py"], check=True)
    for name in rounds.settings():
        rounds.run(SimpleNamespace(out=tmp_path, fast=False), name, 0)
    recipes = [load_recipe(opd.TINY / f"{recipe}.yaml", overrides) for recipe, overrides in seen]
    asked = [recipe.rounds.count * recipe.rounds.num_generations for recipe in recipes if recipe.rounds]
    assert asked == [24] * 6
    assert {recipe.rounds.count * recipe.train["num_train_epochs"] for recipe in recipes if recipe.rounds} == {6}
    assert recipes[-1].train["max_steps"] * recipes[-1].train["per_device_train_batch_size"] == 24 * 1024
    page = [*rounds.table({"x": [[(0, 0.5), (1, 0.6), (2, 0.7), (3, 0.8)], [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.6)]]})]
    assert page[-1] == "| x | 50.0% | 55.0% | 60.0% | 70.0% | 60.0% to 80.0% |"


@pytest.mark.slow
def test_the_experiments_of_rounds_run(tmp_path):
    command = [sys.executable, "-m", "benchmarks.rounds", "--fast", "--seeds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {*json.loads((tmp_path / "results.json").read_text())} == {*rounds.settings()}
