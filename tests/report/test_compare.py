"""hf-posttrain compare: several runs in one page, what differs between them, and which values may be ranked."""

import math
import re
from pathlib import Path

import pytest
from runs_for_tests import HOSTILE, RECIPE, SAMPLES, Page, leave_run, log_of

from hf_posttrain import report
from hf_posttrain.errors import InputError
from hf_posttrain.report import compare
from hf_posttrain.report.run_folder import read_run


def with_train(**changes):
    return RECIPE | {"train": RECIPE["train"] | changes}


@pytest.fixture
def two(tmp_path):
    """Folders of two DPO runs that differ in seed and learning rate."""
    first = leave_run(tmp_path / "a", samples=SAMPLES)
    second = leave_run(
        tmp_path / "b", log_of(loss=lambda step: 1.0 / step), recipe=with_train(seed=7, learning_rate=1e-6),
        samples=[SAMPLES[0] | {"after": "11"}],
    )  # fmt: skip
    return first, second


def page_of(*folders, output=None):
    output = output or folders[0].parent / "compare.html"
    assert compare.main([*map(str, folders), "--output", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))


def test_the_page_has_values_curves_differences_and_samples(two, capsys):
    page = page_of(*two)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["a", "b"], ["loss", "(evaluation)", "0.6", "0.55*"], ["loss", "(training)", "0.1", "0.05"],
    ]  # fmt: skip
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[-1].endswith("compare.html")
    assert page.table("The last logged value")[:2] == [
        ["loss (evaluation)", "0.6", "best 0.55"], ["loss (training)", "0.1", "0.05"],
    ]  # fmt: skip
    assert page.table("Settings that differ between the runs") == [
        ["train.learning_rate", "5e-07", "1e-06"], ["train.seed", "not set", "7"],
    ]  # fmt: skip
    assert page.table("Loss (training)")[3] == ["4", "0.5", "0.25"]
    assert "script" not in page.tags
    assert page.loads == ["data:,"]
    for text in ("1 + 1 =", "11"):
        assert text in page.words


def test_the_curves_of_chosen_metrics_are_an_image_or_the_charts_of_the_page(two, tmp_path, capsys):
    def compare_with(file, *metrics):
        words = [*map(str, two), "--output", str(tmp_path / file), *(["--metrics", *metrics] if metrics else [])]
        assert compare.main(words) == 0
        return tmp_path / file

    charts = re.findall(r">([^<>]+)</text>", compare_with("loss.svg", "loss").read_text(encoding="utf-8"))
    assert {"Loss (training)", "Loss (evaluation)"} <= {*charts}
    charts = re.findall(r">([^<>]+)</text>", compare_with("eval_loss.svg", "eval_loss").read_text(encoding="utf-8"))
    assert "Loss (evaluation)" in charts
    assert "Loss (training)" not in charts
    assert compare_with("all.png").read_bytes()[:4] == b"\x89PNG"
    page = Page(compare_with("page.html", "eval_loss").read_text(encoding="utf-8"))
    assert page.table("Loss (evaluation)")
    assert "Loss (training)" not in page.words
    with pytest.raises(InputError, match=r"--metrics eval_los: no run has logged it; did you mean 'eval_loss'\?"):
        compare_with("loss.svg", "eval_los")
    with pytest.raises(InputError, match=r"--output .*loss\.pdf must end with \.png, \.svg or \.html"):
        compare_with("loss.pdf")


def test_a_section_that_one_run_lacks_is_null_in_each_of_its_keys():
    lora = {"model": {"name_or_path": "m", "lora": {"r": 4, "alpha": None}}}
    plain = {"model": {"name_or_path": "m", "lora": None}, "seed": 7}
    assert compare.list_differences([lora, plain]) == [("model.lora.r", "4", "null"), ("seed", "not set", "7")]
    evaluated = {"data": {"eval": {"path": "e.jsonl", "limit": None}}}
    assert compare.list_differences([{"data": {"eval": None}}, evaluated]) == [("data.eval.path", "null", "e.jsonl")]


def test_it_links_to_reports_that_are_there(two, tmp_path):
    report.write(two[1])
    page = page_of(*two, output=tmp_path / "pages" / "compare.html")
    assert [link for link in page.links if not link.startswith("#")] == ["../b/report.html"]


def test_names_tell_runs_apart(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other"]
    assert compare.name_runs(paths) == ["x/run", "y/run", "other"]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (with_train(seed=3, per_device_train_batch_size=2, warmup_steps=9), ""),
        (with_train(stop_on=["nan"], merge_lora=True, dataset_num_proc=4, eval_steps=5, neftune_noise_alpha=5.0), ""),
        (with_train(sampler={"kind": "vllm_colocate", "base_url": "x", "batch_size": 8}), ""),
        (with_train(precompute_ref_batch_size=4, dataloader_num_workers=2, lr_scheduler_kwargs={"a": 1}), ""),
        (with_train(teacher={"top_k": 8}), "teacher.top_k differs"),
        (with_train(dataset_text_field="body"), "dataset_text_field differs"),
        (with_train(max_length=64), "max_length differs"),
        (with_train(beta=0.5), "beta differs"),
        (with_train(loss_type="ipo"), "loss_type differs"),
        (RECIPE | {"method": "kto"}, "their methods differ"),
        (RECIPE | {"data": RECIPE["data"] | {"eval": {"path": "else.jsonl"}}}, "their evaluation data differ"),
    ],
)
def test_losses_are_ranked_only_where_they_measure_the_same(tmp_path, recipe, reason):
    runs = [
        read_run(leave_run(tmp_path / "a")),
        read_run(leave_run(tmp_path / "b", log_of(loss=lambda s: 1.0), recipe=recipe)),
    ]
    assert compare.explain_incomparable(runs) == reason
    rows = dict(compare.rank_last_values(runs, reason))
    assert [best for _, best in rows["loss (evaluation)"]] == [not reason, False]
    assert not any(best for _, best in rows["loss (training)"])


@pytest.mark.parametrize(
    ("first", "second", "losses", "scores", "answers"),
    [
        ({}, {}, "", True, True),
        ({"eval_rows": "8 rows (a)"}, {"eval_rows": "8 rows (a)"}, "", True, True),
        # another tokenizer, template, mask or length
        ({"eval_rows": "8 rows (a)"}, {"eval_rows": "8 rows (b)"}, "the tokens of their evaluation data", False, True),
        ({"eval_answers": {"a": None}}, {"eval_answers": {"a": None}}, "", True, True),  # a dict of evaluation sets
        # a file was written anew between the runs
        ({"eval_answers": "a"}, {"eval_answers": "b"}, "", True, False),
        ({"second_model": "x"}, {"second_model": "y"}, "their second models", False, True),
        ({"second_model": "x"}, {"second_model": None}, "", True, True),  # without LoRA and with it
        ({"base_model": "x"}, {"base_model": "y"}, "their reference models", False, True),
        ({"model": {"adapter": "x"}}, {"model": {"adapter": "y"}}, "their reference models", False, True),
        ({"arguments": {"beta": 1}}, {"arguments": {"beta": 2}}, "beta", True, True),
        ({"teacher": "x"}, {"teacher": "y"}, "their teachers", False, True),
        # from Python, where no recipe says what the data are
        (
            {"eval_rows": "8 rows (a)", "recipe": None},
            {"eval_rows": "8 rows (b)", "recipe": None},
            "their evaluation data",
            False,
            False,
        ),
    ],
)
def test_what_marks_are_given_for(first, second, losses, scores, answers, tmp_path):
    runs = []
    for n, facts in enumerate((first, second)):
        metrics = ("loss", "exact_match", "rewards/accuracies", "generation/stopped")
        log = [{"step": 1} | {f"eval_{metric}": n for metric in metrics}]
        recipe = facts.get("recipe", RECIPE | {
            "model": facts.get("model", {}), "teacher": {"name_or_path": facts.get("teacher", "t")}})  # fmt: skip
        record = {"method": "dpo", "base_model": "q"} | facts
        runs.append(read_run(leave_run(tmp_path / str(n), log, recipe=recipe, run=record)))
    reason = compare.explain_incomparable(runs)
    assert reason.startswith(losses)
    assert bool(reason) == bool(losses)
    rows = {name.split()[0]: any(best for _, best in cells) for name, cells in compare.rank_last_values(runs, reason)}
    of_loss = dict.fromkeys(("loss", "generation/stopped"), not losses)
    assert rows == of_loss | {"rewards/accuracies": scores, "exact_match": answers}


def test_best_is_the_highest_accuracy_whatever_the_options_and_nobody_in_a_tie(tmp_path):
    scores = (0.25, 0.75, math.nan)
    logs = [[{"step": 1, "eval_exact_match": score, "eval_rewards/accuracies": 0.5}] for score in scores]
    runs = [read_run(leave_run(tmp_path / str(n), log, recipe=with_train(beta=n))) for n, log in enumerate(logs, 1)]
    rows = dict(compare.rank_last_values(runs, "beta differs"))
    assert rows["exact_match (evaluation)"] == [
        ("0.25", False), ("0.75", True), ("nan", False),
    ]  # fmt: skip
    assert not any(best for _, best in rows["rewards/accuracies (evaluation)"])


@pytest.mark.parametrize("of_python", [False, True])
@pytest.mark.parametrize(
    ("by", "other", "marked"),
    [("exact_match", {"count": 5}, True), ("exact_match", {"temperature": 0.5}, False),
     ("exact_match", {"judge": {"by": "model", "name": "m"}}, False), ("url", {}, False)],
)  # fmt: skip
def test_scores_of_rounds_are_compared_where_answers_are_drawn_and_judged_alike(by, other, marked, of_python, tmp_path):
    rounds = {"count": 3, "judge": {"by": by}, "temperature": 1.0}
    given, runs = [rounds, rounds | other], []
    for n, score in enumerate((0.25, 0.75)):
        known = {"run": {"method": "sft", "rounds": given[n]}} if of_python else {}
        recipe = None if of_python else RECIPE | {"rounds": given[n]}
        runs.append(read_run(leave_run(tmp_path / str(n), [{"step": 1, "eval_score": score}], recipe=recipe, **known)))
    rows = dict(compare.rank_last_values(runs, "beta differs"))
    assert rows["score (evaluation)"] == [("0.25", False), ("0.75", marked)]


def test_runs_without_recipes_and_with_other_metrics(tmp_path):
    page = page_of(
        leave_run(tmp_path / "a", log_of(kl=abs), recipe=None, run={"method": "kto", "arguments": {"beta": 0.1}}),
        leave_run(tmp_path / "b", recipe=None, run={"method": "dpo", "arguments": {"beta": 0.2}}),
    )
    assert ["train.beta", "0.1", "0.2"] in page.table("Settings")
    assert ["kl (training)", "20", ""] in page.table("The last logged value")


def test_access_tokens_are_hidden(tmp_path):
    secrets = [{"hub_token": "hf_secret1", "a_token": None}, {"hub_token": "hf_secret2", "a_token": "hf_secret3"}]
    folders = [leave_run(tmp_path / f"run{n}", recipe=with_train(**found)) for n, found in enumerate(secrets)]
    page = page_of(*folders)
    assert "secret" not in (tmp_path / "compare.html").read_text()
    assert page.table("Settings") == [["train.a_token", "null", "<hidden>"]]


def test_hostile_names_are_text(tmp_path):
    log, sample = log_of(**{HOSTILE: abs}), dict.fromkeys(("prompt", "before", "after"), HOSTILE)
    folders = [leave_run(tmp_path / name, log, samples=[sample]) for name in ("<script>a", "b&amp;")]
    page = page_of(*folders)
    assert "script" not in page.tags
    assert page.words.count(HOSTILE) >= 3
    assert "<script>a" in page.words


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a"], "compare requires at least two different runs"),
        (["a", "./a"], "compare requires at least two different runs"),
        (["a", "nowhere"], "there is no folder nowhere"),
        (["a", "a/recipe.yaml"], "a/recipe.yaml: it is a file. Use"),
        (["a", "empyt"], "there is no folder empyt; did you mean 'empty'?"),
        (["a", "empty"], "empty contains no run"),
    ],
)
def test_mistakes_are_said(tmp_path, monkeypatch, folders, message):
    monkeypatch.chdir(tmp_path)
    leave_run(Path("a"))
    Path("empty").mkdir()
    with pytest.raises(InputError, match=re.escape(message)):
        compare.main(folders)
    assert not Path("compare.html").exists()


def test_an_output_that_cannot_be_written_is_said(two, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--output .* cannot be written"):
        compare.main([*map(str, two), "--output", str(tmp_path / "file" / "x.html")])


@pytest.mark.parametrize("content", ["", "[]", "model: null\n"])
def test_a_recipe_that_is_broken_off(content, two, tmp_path):
    (two[0] / "recipe.yaml").write_text(content)
    arguments = [*map(str, two), "--output", str(tmp_path / "page.html")]
    if "model" in content:
        assert compare.main(arguments) == 0
    else:
        with pytest.raises(InputError, match=r"recipe\.yaml is not a recipe"):
            compare.main(arguments)
