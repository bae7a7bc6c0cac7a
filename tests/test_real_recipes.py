"""recipes/real: the recipes load, and the driver writes rows and tables. The runs themselves are in tests/real."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_posttrain.commands.metrics import load_metric, measure
from hf_posttrain.commands.resumable_jsonl import write_rows
from hf_posttrain.data.files import read_rows
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.recipe.read import load_recipe, train_config
from hf_posttrain.trainer.output_dir import write_json
from recipes.real import experiments, make_data
from recipes.real import lab as labs

REPOSITORY = Path(__file__).parents[1]
RECIPES = sorted((REPOSITORY / experiments.HERE).glob("*.yaml"))
RESULTS = sorted((REPOSITORY / "docs/results").glob("*.json"))


def test_there_are_recipes_and_results():
    assert len(RECIPES) > 10
    assert len(RESULTS) > 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_an_experiment_loads(path):
    recipe = load_recipe(path)
    config = train_config(recipe, config_class(METHODS[recipe.method]))
    assert config.output_dir.startswith("outputs/real/")
    comments = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert "Experiment " in comments
    assert re.search(r"Takes \d+ minutes? on one of 2 CPU cores in bf16", comments)
    assert re.search(r"On a GPU, where it was not measured, expect \d+ to \d+ minutes", comments)
    assert re.search(r"`python -m recipes\.real\.experiments [a-z_]+` runs it", comments)


def test_rows_are_short_problems_passages_and_additions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_data, "HELDOUT", 2)
    problems = [{"question": f"{n}+1?" + " long" * 100 * (n == 1), "answer": f"#### {n + 1}"} for n in range(5)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    monkeypatch.setattr("sys.argv", ["make_data", "--gsm8k", str(tmp_path)])
    assert make_data.main() == 0
    written = {path.stem: [*read_rows(path)] for path in make_data.FOLDER.glob("*.jsonl")}
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
    lab = labs.Lab(tmp_path, [0, 1])
    table = labs.Table(lab, "rounds", "A note.")
    table.add("student", {"exact match": 0.5})
    table.add("rounds", {"exact match": 0.25, "minutes": 2.0})
    assert "±" not in (tmp_path / "rounds.md").read_text()
    table.add("rounds", {"exact match": 0.75, "minutes": 3.0}, 1)
    assert (tmp_path / "rounds.md").read_text().splitlines() == [
        "| | exact match | minutes | seeds |", "|---|---|---|---|", "| student | 50.0% |  | 1 |",
        "| rounds | 50.0% ± 25.0% | 2.50 ± 0.50 | 2 |", "",
        "After ± is the standard error of the seeds.", "", "A note.",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_of_results_has_the_means_of_its_files(path, tmp_path):
    table = labs.Table(labs.Lab(tmp_path, [0]), path.stem)
    table.rows = json.loads(path.read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs/results.md").read_text(encoding="utf-8")
    assert "\n".join(line for line in table.render().splitlines() if line.startswith("|")) in page


RAN = {
    "prune": {"gsm8k_lora", "prune_sft", "prune_kd", "prune_opd"}, "lora": {"gsm8k_lora"},
    "preferences": {"sums_sft", "preference_dpo", "preference_kto", "preference_cpo", "preference_kl"},
    "cross": {"cross_sft", "cross_kd", "cross_opd"}, "on_policy": {"sums_sft", "sums_kd", "sums_opd"},
    "rounds": {"sums_sft", "sums_rm", "rounds"},
}  # fmt: skip
"""Experiment -> the recipes that it runs."""


def test_each_recipe_belongs_to_an_experiment():
    assert {*RAN} == {*experiments.EXPERIMENTS}
    assert set().union(*RAN.values()) == {path.stem for path in RECIPES}


def names_in_outputs(file):
    """The first part of each path below outputs/real that a recipe reads."""
    tree = load_recipe(file).to_dict()
    tree["train"].pop("output_dir")
    return re.findall(r'"outputs/real/([^/"]+)', json.dumps(tree))


ONE_SEED = {"lora": 1, "preferences": 1, "rounds": 1, "cross": 2, "prune": 5, "on_policy": 5}
"""Experiment -> the number of rows with one seed: models before training, and runs with the first seed only."""


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_overrides_of_an_experiment_are_those_of_recipes_that_load(name, tmp_path, monkeypatch):
    """Each run is loaded instead of trained, and has results as if it had been."""
    folders = []
    recipes = set()
    logs = [{"step": 8, "loss": 1.0, "eval_runtime": 0.0, "eval_rewards/accuracies": 0.5}]
    logs += [{"step": 8, "eval_distill/reverse_kl": 0.1, "eval_generation/length": 5.0}]
    logs += [{"step": 8, "train_runtime": 60.0}]

    def python(self, *words, logged=False, lock=None):
        _, module, first, *rest = map(str, words)
        if module.endswith("trl_lora"):
            write_run(Path(first))
        elif first.endswith(".yaml"):
            recipe = load_recipe(first, rest)
            read = {word for word in json.dumps(recipe.to_dict()).split('"') if word.startswith("outputs/real/")}
            # other rows and models are those of the folder of the experiments
            assert {word.removeprefix("outputs/real/").split("/")[0] for word in read} <= {"data", "smollm2", "gemma3"}
            config = train_config(recipe, config_class(METHODS[recipe.method]))
            write_run(Path(config.output_dir))
            recipes.add(Path(first).stem)
        elif "--out" in rest:
            asked = [{"role": "user", "content": "12+3="}]
            rows = [{"prompt": "12+3=", "completion": "#### 15", "stopped": True, "messages": asked}]
            write_rows(Path(rest[rest.index("--out") + 1]), rows)
        elif first == "compare":
            Path(rest[rest.index("--output") + 1]).write_text("<svg/>")
        else:  # merge, prune, eval
            Path(rest[rest.index("--output") + 1] if "--output" in rest else rest[-1]).mkdir(parents=True)
        metrics = dict.fromkeys(
            ("answer_nll", "exact_match", "perplexity", "pair_accuracy", "stopped", "well_formed"), 0.5
        )
        return json.dumps([{"metrics": {**metrics, "answer_nll": 2.0 if "layers" in rest[0] else 1.0}}])

    def write_run(folder):
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        folders.append(folder.name)

    monkeypatch.setattr(labs.Lab, "python", python)
    monkeypatch.setattr(experiments, "find_spec", lambda name: True)
    lab = labs.Lab(tmp_path, [0, 1])
    experiments.EXPERIMENTS[name](lab)
    assert len({*folders}) == len(folders) > 1
    assert recipes == RAN[name]
    # what the recipes read when they are run alone is made by the experiment
    made = {path.name for path in tmp_path.iterdir()} | {"data", "smollm2", "gemma3"}
    assert {name for recipe in recipes for name in names_in_outputs(experiments.HERE / f"{recipe}.yaml")} <= made
    assert (tmp_path / f"{name}.md").is_file()
    seeds = [tuple(row) for row in json.loads((tmp_path / f"{name}.json").read_text()).values()]
    assert {*seeds} == {("0",), ("0", "1")}
    assert seeds.count(("0",)) == ONE_SEED[name]
    assert [*tmp_path.glob("*_answers.md")]
    before = len(folders)
    experiments.EXPERIMENTS[name](lab)
    assert len(folders) == before  # nothing is repeated


def test_what_is_complete_is_not_repeated(tmp_path, monkeypatch):
    lab = labs.Lab(tmp_path, [0], fast=True)
    commands = []

    def python(self, *words, logged=False, lock=None):
        commands.append(words)
        (tmp_path / "new").mkdir()  # an incomplete folder was removed
        return "printed"

    monkeypatch.setattr(labs.Lab, "python", python)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "half").write_text("")
    assert lab.train("rounds", "new", "train.seed=1") == tmp_path / "new"
    [words] = commands
    assert {"train.seed=1", f"train.output_dir={tmp_path / 'new'}", "train.max_steps=2"} <= {*words}
    assert lab.train("rounds", "new", "train.seed=1") == tmp_path / "new"
    assert len(commands) == 1
    with pytest.raises(SystemExit, match=r"new was made with other settings\. Delete it, or choose another folder"):
        lab.train("rounds", "new", "train.seed=2")
    shutil.rmtree(tmp_path / "new")
    lab.train("rounds", "new", "train.seed=2")
    assert (
        lab.make(tmp_path / "new", *commands[-1], recipe=load_recipe(labs.HERE / "rounds.yaml").to_dict()) == "printed"
    )
    assert len(commands) == 2


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A lab in which `python` writes its last word's file, and the files that were written."""
    written = []

    def python(self, *words, logged=False, lock=None):
        written.append(Path(words[-1]).name)
        Path(words[-1]).write_text("[]")

    monkeypatch.setattr(labs.Lab, "python", python)
    return labs.Lab(tmp_path, [0]), written


def test_what_was_made_of_something_that_is_made_again_is_made_again(files):
    lab, written = files
    student, sampled, judged = (lab.home / name for name in ("student", "sampled.jsonl", "judged.jsonl"))

    def make_all():
        lab.make(student, "train", student)
        lab.make(sampled, "sample", student, sampled)
        lab.write_rows(lab.home / "answers.jsonl", [{"text": "a"}], sampled)
        lab.make(judged, "judge", lab.home / "answers.jsonl", judged)

    make_all()
    make_all()
    assert written == ["student", "sampled.jsonl", "judged.jsonl"]
    student.unlink()
    make_all()
    make_all()
    assert written == ["student", "sampled.jsonl", "judged.jsonl"] * 2


def test_a_run_whose_settings_follow_from_a_measured_time_is_made_again_with_that_run(files):
    lab, written = files
    sft, longer = lab.home / "sft", lab.home / "longer"

    def make_both(rows):
        lab.make(sft, "train", sft)
        lab.make(longer, "train", f"data.train.limit={rows}", longer, also=[sft])

    make_both(300)
    make_both(300)
    assert written == ["sft", "longer"]
    sft.unlink()
    make_both(310)
    assert written == ["sft", "longer"] * 2
    with pytest.raises(SystemExit, match="longer was made with other settings"):
        make_both(320)


def test_a_process_holds_its_lock_after_the_driver_is_killed(tmp_path):
    lab = labs.Lab(tmp_path, [0])
    file = tmp_path / "rows.lock"
    with ThreadPoolExecutor() as pool:
        with labs.only_one(file) as lock:
            sleeping = pool.submit(lab.python, "-c", "import time; time.sleep(2)", lock=lock)
            time.sleep(0.5)
        with file.open("a") as another, pytest.raises(BlockingIOError):
            labs.lock_file(another)
        sleeping.result()
    with labs.only_one(file):
        pass


def test_what_was_interrupted_is_made_again(files, monkeypatch):
    lab, written = files
    out = lab.home / "rows.jsonl"
    lab.make(out, "sample", out)
    out.unlink()

    def interrupted(self, *words, logged=False, lock=None):
        out.write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(labs.Lab, "python", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.make(out, "sample", out)
    lab.make(out, "sample", out)
    assert out.read_text() == "[]"
    assert written == ["rows.jsonl"] * 2


def test_a_process_waits_for_another_that_makes_the_same(files):
    lab, written = files
    out = lab.home / "rows.jsonl"
    lock = lab.record(out).with_suffix(".lock")
    lock.parent.mkdir()
    with ThreadPoolExecutor() as pool:
        with labs.only_one(lock):
            waiting = pool.submit(lab.make, out, "sample", out)
            time.sleep(0.2)
            assert not written
        waiting.result()
    assert written == ["rows.jsonl"]


def test_minutes_are_without_those_of_evaluation(tmp_path):
    logs = [{"loss": 1.0}, {"eval_loss": 1.0, "eval_runtime": 2.5}, {"train_runtime": 8.0}, {"eval_runtime": 1.5}]
    lab = labs.Lab(tmp_path, [0])
    run = tmp_path / "run"
    run.mkdir()
    write_json(lab.record(run), {"seconds": 13.0})
    (run / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    assert labs.training_seconds(run) == 5.5
    assert lab.minutes(run, run) == {"minutes": 0.3, "minutes of training": pytest.approx(11 / 60)}


def test_a_fast_call_does_not_write_to_the_folder_of_full_runs(capsys):
    with pytest.raises(SystemExit):
        experiments.main(["rounds", "--fast", "--output", "outputs/real"])
    assert "--fast does not write to outputs/real" in capsys.readouterr().err


def test_the_share_of_well_formed_answers():
    metric = load_metric(str(experiments.HERE / "well_formed"))
    answers = ["2 + 2 = 4\n#### 4", "#### 1,200.5 ", "#### 4 apples", "is #### 4"]
    assert measure("well_formed", metric, answers, answers) == {"well_formed": 0.5}
