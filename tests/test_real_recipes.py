"""recipes/real: the recipes load, and the driver writes rows and tables. The runs themselves are in tests/real."""

import json

import pytest

from hf_posttrain.commands.metrics import load_metric, measure
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.recipe.read import load_recipe, train_config
from recipes.real import experiments, make_data

RECIPES = sorted(experiments.HERE.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_an_experiment_loads(path):
    recipe = load_recipe(path)
    config = train_config(recipe, config_class(METHODS[recipe.method]))
    assert config.output_dir.startswith("outputs/real/")
    assert "Experiment" in path.read_text().splitlines()[1]


def test_each_recipe_is_run_by_the_driver():
    text = (experiments.HERE / "experiments.py").read_text()
    for path in RECIPES:
        name = path.stem.replace("preference_dpo", "preference_{method}")
        assert f'"{name}"' in text or path.stem in ("preference_kto", "preference_cpo"), path.stem


def test_rows_are_short_problems_passages_and_additions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_data, "HELDOUT", 2)
    problems = [{"question": f"{n}+1?" + " long" * 100 * (n == 1), "answer": f"#### {n + 1}"} for n in range(5)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    monkeypatch.setattr("sys.argv", ["make_data", "--gsm8k", str(tmp_path)])
    assert make_data.main() == 0
    written = {path.stem: experiments.read(path) for path in make_data.FOLDER.glob("*.jsonl")}
    assert [row["completion"] for row in written["gsm8k_train"]] == ["#### 1", "#### 3", "#### 4", "#### 5"]
    assert len(written["gsm8k_heldout"]) == 2
    texts = [row["text"] for row in written["general"]]
    assert len({*texts}) == len(texts) == make_data.PASSAGES
    assert max(map(len, texts)) <= make_data.CHARACTERS
    sums = {name: written[f"sums_{name}"] for name in make_data.ADDITIONS}
    assert {name: len(rows) for name, rows in sums.items()} == make_data.ADDITIONS
    asked = [row["prompt"].rstrip("=").split("+") for rows in sums.values() for row in rows]
    assert len({frozenset(pair) for pair in asked}) == len(asked)  # nor are there mirror images
    answers = [row["completion"] for rows in sums.values() for row in rows]
    assert answers == [f"#### {int(first) + int(second)}" for first, second in asked]


def test_a_table_has_means_and_standard_errors(tmp_path):
    lab = experiments.Lab(tmp_path, [0, 1], False)
    table = experiments.Table(lab, "rounds", "A note.")
    table.add("student", {"exact match": 0.5})
    table.add("rounds", {"exact match": 0.25, "minutes": 2.0})
    experiments.Table(lab, "rounds", "A note.").add("rounds", {"exact match": 0.75, "minutes": 3.0}, 1)  # a later run
    assert (tmp_path / "rounds.md").read_text().splitlines() == [
        "| | exact match | minutes | seeds |", "|---|---|---|---|", "| student | 50.0% |  | 1 |",
        "| rounds | 50.0% ± 25.0% | 2.50 ± 0.50 | 2 |", "", "A note.",
    ]  # fmt: skip


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_overrides_of_an_experiment_are_those_of_recipes_that_load(name, tmp_path, monkeypatch):
    """Each run is loaded instead of trained, and has results as if it had been."""
    ran = []
    logs = [{"step": 8, "loss": 1.0, "eval_runtime": 0.0, "eval_rewards/accuracies": 0.5}]
    logs += [{"step": 8, "eval_distill/reverse_kl": 0.1, "eval_generation/length": 5.0}]

    def python(self, *words, logged=False):
        _, module, first, *rest = map(str, words)
        if module.endswith("trl_lora"):
            folder = experiments.Path(first)
            folder.mkdir()
            ran.append(folder.name)
        elif first.endswith(".yaml"):
            recipe = load_recipe(first, rest)
            read = {word for word in json.dumps(recipe.to_dict()).split('"') if word.startswith("outputs/real/")}
            # other rows and models are those of the folder of the experiments
            assert {word.removeprefix("outputs/real/").split("/")[0] for word in read} <= {"data", "smollm2", "gemma3"}
            config = train_config(recipe, config_class(METHODS[recipe.method]))
            folder = experiments.Path(config.output_dir)
            folder.mkdir(parents=True)
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
            ran.append(folder.name)
        elif "--out" in rest:
            asked = [{"role": "user", "content": "12+3="}]
            rows = [{"prompt": "12+3=", "completion": "#### 15", "stopped": True, "messages": asked}]
            experiments.write(experiments.Path(rest[rest.index("--out") + 1]), rows)
        elif first == "prune":
            experiments.Path(rest[-1]).mkdir()
        metrics = dict.fromkeys(
            ("answer_nll", "exact_match", "perplexity", "pair_accuracy", "stopped", "well_formed"), 0.5
        )
        return json.dumps([{"metrics": {**metrics, "answer_nll": 2.0 if "layers" in rest[0] else 1.0}}])

    monkeypatch.setattr(experiments.Lab, "python", python)
    monkeypatch.setattr(experiments, "find_spec", lambda name: True)
    monkeypatch.setattr(experiments, "training_seconds", lambda folder: 60.0)
    for folder in ("answers", "evaluations"):
        (tmp_path / folder).mkdir()
    lab = experiments.Lab(tmp_path, [0, 1], False)
    experiments.EXPERIMENTS[name](lab)
    assert len({*ran}) == len(ran) > 1
    assert (tmp_path / f"{name}.md").is_file()
    results = json.loads((tmp_path / f"{name}.json").read_text())
    assert {tuple(seeds) for seeds in results.values()} <= {("0",), ("0", "1")}


def test_a_run_or_file_that_exists_is_not_repeated(tmp_path, monkeypatch):
    lab = experiments.Lab(tmp_path, [0], True)
    commands = []
    monkeypatch.setattr(experiments.Lab, "python", lambda self, *words, **options: commands.append(words) or "")
    (tmp_path / "new").mkdir()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "seconds.json").write_text("1.0")
    assert lab.train("rounds", "done") == tmp_path / "done"
    assert lab.write("sample", "model", out=tmp_path / "done") == tmp_path / "done"
    assert not commands
    lab.train("rounds", "new", "train.seed=1")
    [words] = commands
    assert {"train.seed=1", f"train.output_dir={tmp_path / 'new'}", "train.max_steps=2"} <= {*words}


def test_seconds_of_training_are_without_those_of_evaluation(tmp_path):
    logs = [{"loss": 1.0}, {"eval_loss": 1.0, "eval_runtime": 2.5}, {"eval_runtime": 1.5}, {"train_runtime": 8.0}]
    (tmp_path / "seconds.json").write_text("10.0\n")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    assert experiments.training_seconds(tmp_path) == 6.0
    assert experiments.speed(tmp_path) == {"minutes": 0.1}


def test_the_share_of_well_formed_answers():
    metric = load_metric(str(experiments.HERE / "well_formed"))
    answers = ["2 + 2 = 4\n#### 4", "#### 1,200.5 ", "#### 4 apples", "4"]
    assert measure("well_formed", metric, answers, answers) == {"well_formed": 0.5}
