"""The section `rounds` of a recipe: short forms, what is refused and where, `--check`, and what a run leaves."""

import json
import shutil

import pytest
from hub_for_tests import small_rounds
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer

from hf_posttrain import run
from hf_posttrain.errors import InputError
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.report.page import list_facts
from hf_posttrain.report.run_folder import read_run

RECIPE = """\
method: dpo
model: {name_or_path: tiny}
data:
  train: {path: rows.jsonl}
  eval: {path: rows.jsonl, limit: 3}
rounds:
  count: 2
  num_generations: 4
  max_completion_length: 8
  judge: exact_match
train: {output_dir: out, max_length: 40, use_cpu: true, num_train_epochs: 1, per_device_train_batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    byte_tokenizer().save_pretrained("tiny")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [json.dumps({"prompt": f"{n}+1=", "completion": f"#### {n + 1}"}) for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tmp_path


def read(folder, *overrides):
    return load_recipe(folder / "recipe.yaml", ["train.max_length=600", *overrides]).rounds


def test_short_forms_stand_for_the_whole_section(folder):
    assert (read(folder, "rounds=4").count, read(folder, "rounds=4").num_generations) == (4, 8)
    assert read(folder, "rounds={}").count == 3
    assert read(folder, "rounds={steps: 1}").count is None
    assert read(folder, "rounds=null") is None
    assert read(folder).judge.by == "exact_match"
    assert vars(read(folder, "rounds.judge=mine:grade")).get("judge").name == "mine:grade"
    assert read(folder, "rounds.judge=http://localhost:8000").judge.by == "url"
    assert read(folder, "rounds.judge={by: model, name: tiny}").judge.name == "tiny"


def test_the_resolved_recipe_is_read_again(folder):
    recipe = load_recipe(folder / "recipe.yaml", ["rounds.pair.take=all"])
    (folder / "again.yaml").write_text(recipe.to_yaml())
    again = load_recipe(folder / "again.yaml")
    assert again.rounds == recipe.rounds
    assert "rounds" not in load_recipe(folder / "recipe.yaml", ["rounds=null"]).to_dict()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rounds.cuont=3"], "unknown key rounds.cuont; did you mean 'count'?"),
        (["rounds.judge={by: exact_macth}"], "did you mean 'exact_match'?"),
        (["rounds.judge=exact"], "rounds.judge.by must be exact_match"),
        (["rounds.steps=2"], "command line: rounds.steps cannot be combined with count"),
        (["rounds.num_generations=1"], "command line: rounds.num_generations must be at least 2, because"),
        (["rounds.pair.threshold=1"], "rounds.pair.threshold is only valid with labels"),
        (["rounds.judge={by: model}"], "rounds.judge.name is missing"),
        (["rounds.judge={by: model, name: nowhere/at/all}"], "rounds.judge.name: nowhere/at/all: no such folder"),
        (["rounds.judge={by: model, name: adapter}"], "adapter is an adapter. Merge it with `hf-posttrain merge`"),
        (["rounds.judge.opponents=2"], "rounds.judge is 'exact_match'. Set rounds.judge to a mapping"),
        (["rounds.judge=nowhere:grade"], "function 'nowhere:grade'"),
        (["rounds.max_completion_length=40"], "recipe.yaml:11: train.max_length=40 must exceed rounds.max_completion"),
        (["train.precompute_ref_log_probs=true"], "precompute_ref_log_probs cannot be combined with rounds"),
        (["rounds.sampler=vllm_colocate"], "requires the package vllm"),
        (["rounds.sampler=vllm_server"], "rounds.sampler requires sampler.base_url"),
        (["data.train.streaming=true", "train.max_steps=3"], "rounds cannot be combined with a stream of rows"),
        (["method=opd", "teacher.name_or_path=tiny"], "rounds cannot be combined with a method with a teacher"),
        (["train.num_generations=4"], "use rounds.num_generations"),
        (["rounds.judge=http://127.0.0.1:9"], "no server answers"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_place(overrides, said, folder, capsys):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    assert run.main(["recipe.yaml", *overrides]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert not (folder / "out").exists()


def test_rows_without_answers_are_refused_for_exact_match(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    with pytest.raises(InputError, match="exact_match compares with completions of the data"):
        run.run(load_recipe(folder / "recipe.yaml"))


def test_check_refuses_what_a_run_would_find_after_its_weights(folder, capsys):
    assert run.main(["recipe.yaml", "--check", "rounds.judge={by: model, name: tiny}"]) == 2
    assert "judge: tiny is Qwen3ForCausalLM. A reward model must be a sequence classifier" in capsys.readouterr().err
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    assert run.main(["recipe.yaml", "--check"]) == 2
    assert "judge exact_match compares with completions of the data. 2 of 2" in capsys.readouterr().err


def test_check_says_how_many_rounds_there_are_in_few_steps(folder, capsys):
    assert run.main(["recipe.yaml", "--check", "rounds.count=5", "train.max_steps=2"]) in (0, 1)
    assert "2 rounds (instead of 5, because each takes a step) of 1 step over 9 prompts" in capsys.readouterr().out
    assert run.main(["recipe.yaml", "--check", "rounds.count=2", "train.max_steps=5"]) in (0, 1)
    assert "2 rounds of about 2 steps over 9 prompts" in capsys.readouterr().out


def test_check_says_what_the_rounds_are(folder, capsys):
    assert run.main(["recipe.yaml", "--check"]) in (0, 1)
    page = capsys.readouterr().out
    assert "2 rounds of 3 steps over 9 prompts: 4 answers to each prompt, judged by exact_match" in page
    assert "generation" in page.partition("Memory")[2]
    online = "rounds={steps: 1, num_generations: 2, max_completion_length: 8}"
    assert run.main(["recipe.yaml", "--check", online]) in (0, 1)
    assert "rounds of 1 steps: 2 answers to each prompt" in capsys.readouterr().out


def test_probe_runs_a_step_of_a_round(folder, capsys):
    assert run.main(["recipe.yaml", "--check", "--probe", *small_rounds()]) in (0, 1)
    page = capsys.readouterr().out
    assert "a step of 4 rows of up to 20 tokens" in page  # a prompt of 4, two answers of 8 tokens
    assert "the run has no more steps" not in page  # which is of the probe


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_folder_reports_the_rounds_before(folder):
    options = "train.save_strategy=steps", "train.save_steps=2", "train.num_train_epochs=2"
    assert run.main(["recipe.yaml", *small_rounds(), *options]) == 0
    (folder / "out").rename(folder / "before")
    auto = ["train.resume_from_checkpoint=before/checkpoint-10"]
    assert run.main(["recipe.yaml", *small_rounds(), *options, *auto]) == 0
    first, second = (read_run(folder / name) for name in ("before", "out"))
    assert [one["step"] for one in first.rounds] == [0, 6]
    assert second.rounds == first.rounds
    assert second.record["arguments"]["num_train_epochs"] == 2  # as it was given: over the rows of a round


@pytest.mark.slow
def test_a_run_into_the_folder_of_another_says_how_that_goes_on(folder, caplog):
    assert run.main(["recipe.yaml", *small_rounds(), "train.save_strategy=steps", "train.save_steps=2"]) == 0
    assert "earlier run" not in caplog.text
    assert run.main(["recipe.yaml", *small_rounds(), "train.save_strategy=no"]) == 0
    assert "checkpoint-6 belongs to an earlier run, whose model and report are overwritten. To resume" in caplog.text
    rows = [{"prompt": "1+1=", "chosen": str(n), "rejected": "no"} for n in range(9)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    others = "rounds=null", "data.train.path=pairs.jsonl", "data.eval=null"
    others += ("train.resume_from_checkpoint=out/checkpoint-6",)
    with pytest.raises(InputError, match=r"other settings: .*rounds: then .*, now None"):
        run.run(load_recipe(folder / "recipe.yaml", others))


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "its files lack 'added_tokens'"), ('{"added_tokens": [], "model": {}}', "data did not match")],
)
def test_a_judge_with_a_broken_tokenizer_is_said_in_a_line(text, said, folder, capsys):
    shutil.copytree("tiny", "broken")
    (folder / "broken" / "tokenizer.json").write_text(text)
    assert run.main(["recipe.yaml", "rounds.judge={by: teacher, name: broken}"]) == 2
    assert f"error: command line: tokenizer broken: {said}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_leaves_its_rounds_in_report_and_card(folder):
    assert run.main(["recipe.yaml", *small_rounds(), "train.eval_strategy=epoch", "train.logging_steps=1"]) == 0
    page, card = ((folder / "out" / name).read_text() for name in ("report.html", "README.md"))
    assert "Results of each round" in page
    assert "Score" in [name for name, *_ in list_facts(read_run(folder / "out"))]
    assert "2 rounds on the model&#39;s own answers: 4 answers to each prompt at temperature 1" in page
    assert "judged by function hub" in card
    assert "### Rounds" in card
    assert sum(line.startswith("| 2 | ") for line in card.partition("### Rounds")[2].splitlines()) == 1
    results = json.loads((folder / "out" / "all_results.json").read_text())
    assert {"eval_score", "eval_best_score"} <= results.keys()
    assert sorted(path.name for path in (folder / "out" / "_rounds").iterdir()) == ["1.jsonl", "2.jsonl", "rounds.json"]
    assert run.main(["pair", "out/_rounds/2.jsonl", "--method", "kto", "--unfinished", "--out", "kto.jsonl"]) == 0
    # evaluated afterwards, the page has that too
    assert run.main(["eval", "out", "--data", "rows.jsonl", "--max_completion_length", "4"]) == 0
    from hf_posttrain import report

    report.write("out")
    assert "Evaluations by hf-posttrain eval" in (folder / "out" / "report.html").read_text()
    assert "### Later evaluations" in (folder / "out" / "README.md").read_text()
