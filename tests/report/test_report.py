"""report.write: what stands on the page, the picture and the card is what the run left; nothing of it is code.

The folders are written by hand (runs_for_tests.py). The pages in a browser: test_report_browser.py; what a run keeps
while it trains: test_follow.py; several runs in one page: test_compare.py.
"""

import json
import math
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard
from jinja2 import Environment, PackageLoader
from runs_for_tests import AUDIT, HOSTILE, RECIPE, SAMPLES, Page, leave_run, log_of

from hf_posttrain import report
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.report import card, charts
from hf_posttrain.report.card import list_papers
from hf_posttrain.report.charts import Chart, Line, format_number, smooth, thin
from hf_posttrain.report.page import format_duration, list_facts
from hf_posttrain.report.run_folder import Series, read_history, read_run


def age(folder):
    """Let all that is in the folder be of long ago."""
    for file in folder.iterdir():
        os.utime(file, (1000, 1000))


def page_of(folder):
    report.write(folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# ---- logs


def test_history_keeps_every_metric_and_the_earlier_of_two_values():
    log = [
        {"step": 2, "loss": 3.0, "epoch": 0.1, "eval_runtime": 5.0, "total_flos": 1e9},
        {"step": 1, "loss": 4.0},
        {"step": 2, "eval_loss": 1.0, "eval_samples_per_second": 7.0},
        {"step": 2, "eval_loss": 0.5, "train_loss": 3.5},
    ]
    assert read_history(log) == {
        "loss": Series((1, 2), (4.0, 3.0)),
        "eval_loss": Series((2,), (1.0,)),
    }


def test_a_long_series_is_thinned_to_points_that_were_logged_with_its_peaks():
    values = [math.sin(step / 1000) for step in range(100_000)]
    values[40_000], values[70_000], values[90_000] = 9.0, -9.0, math.nan
    short = thin(Series(tuple(range(100_000)), tuple(values)), 400)
    assert 300 < len(short.steps) <= 400
    assert short.steps[0] == 0
    assert short.steps[-1] == 99_999
    assert {40_000, 70_000, 90_000} <= set(short.steps)
    assert list(short.steps) == sorted(short.steps)
    assert all(
        value == values[step] or math.isnan(value) for step, value in zip(short.steps, short.values, strict=True)
    )


def test_a_noisy_series_gets_its_running_mean_and_a_smooth_one_none():
    """160 values that alternate between 0 and 1: two on each side of a point are averaged, at the ends those there."""
    values = [float(step % 2) for step in range(160)]
    values[100] = math.nan
    mean = smooth(Series(tuple(range(160)), tuple(values)))
    assert mean.values[:4] == pytest.approx([1 / 3, 2 / 4, 2 / 5, 3 / 5])
    assert mean.values[99:102] == pytest.approx([3 / 4, 2 / 4, 3 / 4])
    assert mean.values[-1] == pytest.approx(2 / 3)
    assert smooth(Series(tuple(range(149)), tuple(values[:149]))) is None
    assert smooth(Series(tuple(range(1000)), tuple(map(math.sqrt, range(1000))))) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.431249, "0.4312"), (1234.6, "1,235"), (1234, "1,234"), (5e-7, "5e-07"), (-0.1, "-0.1"), (3.0, "3"),
        (math.nan, "nan"), (math.inf, "inf"), (None, "none"), (0, "0"),
        (1e300, "1e+300"),
    ],
)  # fmt: skip
def test_number(value, text):
    assert format_number(value) == text


# ---- charts


def shapes(*lines):
    """The SVG of a chart, as {class: what has it}: paths as their parts, [[x, y], ...], and elements."""
    found = {}
    for shape in ElementTree.fromstring(f"<svg>{charts.draw_svg(Chart('', '', '', lines))}</svg>"):
        parts = [part.split() for part in shape.get("d", "").split("M")[1:]]
        course = [[[float(x), float(y)] for x, y in zip(part[::2], part[1::2], strict=True)] for part in parts]
        found.setdefault(shape.get("class"), []).append(course if shape.tag == "path" else shape)
    return found


def line(values, steps=None, **more):
    return Line("loss", 0, Series(tuple(range(len(values)) if steps is None else steps), tuple(values)), **more)


def test_a_line_stands_where_its_values_are():
    """0 and 1 are the lowest and highest ticks, so 0.5 is half way between them, and step 5 of 10 half way across."""
    found = shapes(line((0.0, 0.5, 1.0), (0, 5, 10)))
    [[[first, middle, last]]] = found["line c0"]
    lowest, *_, highest = found["grid"]
    assert lowest == [[[first[0], first[1]], [last[0], first[1]]]]
    assert highest == [[[first[0], last[1]], [last[0], last[1]]]]
    assert middle == pytest.approx([(first[0] + last[0]) / 2, (first[1] + last[1]) / 2], abs=0.1)
    assert 0 < first[0] < last[0] < charts.WIDTH
    assert 0 < last[1] < first[1] < charts.HEIGHT
    labels = {text.text: float(text.get("y")) for text in found["y"]}
    assert labels["0.0"] > labels["0.2"] > labels["1.0"]
    assert float(found["x"][0].get("x")) == first[0]
    assert [(mark.get("cx"), mark.get("cy")) for mark in found["mark c0"]] == [
        (f"{x:g}", f"{y:g}") for x, y in (first, middle, last)
    ]  # fmt: skip


def test_a_line_is_broken_where_a_value_is_not_finite():
    chart = Chart("", "", "", (line((1.0, math.nan, 2.0, math.inf, 3.0, 4.0)),))
    found = shapes(*chart.lines)
    [parts] = found["line c0"]
    assert [len(part) for part in parts] == [1, 1, 2]
    assert [mark[0].text for mark in found["mark c0"]] == [
        "loss, step 0: 1", "loss, step 2: 2", "loss, step 4: 3", "loss, step 5: 4",
    ]  # fmt: skip
    assert "2 non-finite" in in_words(chart)
    assert [row[1] for row in charts.tabulate(chart)[0]] == ["1", "nan", "2", "inf", "3", "4"]
    assert shapes(line((math.nan, math.inf)))["line c0"] == [[]]


def test_evaluation_is_dashed_and_what_was_logged_faint_under_its_running_mean():
    noisy, smooth = [step % 2 for step in range(200)], [step / 200 for step in range(200)]
    found = shapes(line(noisy), line(smooth), line((0.5, 0.4), (100, 200), dash="dashed"))
    assert {name: len(shapes) for name, shapes in found.items() if "c0" in name} == {
        "faint c0": 1, "line c0": 2, "line c0 dashed": 1, "mark c0 dashed": 2,
    }  # fmt: skip
    [[faint]], [[[mean], _]] = found["faint c0"], [found["line c0"]]
    assert max(y for _, y in mean[5:-5]) - min(y for _, y in mean[5:-5]) < 0.3 * (faint[0][1] - faint[1][1])


def test_a_chart_in_a_page_has_classes_alone_for_the_page_to_colour():
    """No ids, which could be those of another chart; no fonts, colours or links of matplotlib's own."""
    drawn = charts.draw_svg(Chart("", "", "", (line(range(40)), line((1.0, 2.0), dash="dashed"))))
    assert set(re.findall(r" (\S+)=", drawn)) == {"class", "d", "x", "y", "cx", "cy", "r"}
    assert set(re.findall(r"<(\w+)", drawn)) == {"path", "text", "circle", "title"}
    assert len(drawn) < 2500


def test_names_of_lines_are_text_in_a_chart(tmp_path):
    drawn = charts.draw_svg(Chart(HOSTILE, HOSTILE, HOSTILE, (Line(HOSTILE, 0, Series((1,), (2.0,))),)))
    assert "<script" not in drawn
    assert ElementTree.fromstring(f"<svg>{drawn}</svg>").find("circle/title").text == f"{HOSTILE}, step 1: 2"


def in_words(chart):
    environment = Environment(loader=PackageLoader("hf_posttrain.report"), trim_blocks=True, lstrip_blocks=True)
    known = {"charts": charts, "format_number": charts.format_number}
    return str(environment.get_template("parts.html").make_module(known).description(chart))


def test_a_chart_is_said_in_words():
    chart = Chart("", "", "", (Line("x", 0, Series((0, 5, 10), (0.0, 0.5, 1.0))),))
    expected = "x: from 0 at step 0, to 1 at step 10, lowest 0 at step 0, highest 1 at step 10."
    assert in_words(chart) == expected
    broken = Line("y", 1, Series((0, 1), (math.nan, math.inf)))
    assert in_words(chart._replace(lines=(*chart.lines, broken))) == f"{expected} y: no finite value."


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.9984, 1.0), ["0.9980", "0.9985", "0.9990", "0.9995", "1.0000"]),
        ((2.0, 2.0), ["1.0", "1.5", "2.0", "2.5", "3.0"]),
        ((0.0, 0.0), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ((0.0, 5e-7), ["0", "1e-7", "2e-7", "3e-7", "4e-7", "5e-7"]),
        ((0.0, 45_000.0), ["0", "10k", "20k", "30k", "40k", "50k"]),
        ((0.001, 0.0015), ["0.001", "0.0011", "0.0012", "0.0013", "0.0014", "0.0015"]),
        ((0.001, 0.0021), ["0.001", "0.00125", "0.0015", "0.00175", "0.002", "0.00225"]),
        ((-123_456.4, -123_456.0), ["-123.4564k", "-123.4563k", "-123.4562k", "-123.4561k", "-123.456k"]),
        ((-6.0, -4.0), ["-6.0", "-5.5", "-5.0", "-4.5", "-4.0"]),
        ((math.nan, math.nan), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ((-1e300, 1e300), ["-1e+294M", "-5e+293M", "0", "5e+293M", "1e+294M"]),
    ],
)
def test_labels_tell_ticks_apart(values, labels):
    *found, step = [text.text for text in shapes(line(values))["y"]]
    assert step == "step"
    assert found == labels


def test_training_and_evaluation_share_a_chart_and_unknown_metrics_have_their_own():
    log = [{"step": 1, "loss": 1.0, "rewards/chosen": 0.1, "rewards/rejected": 0.2, "my_score": 3, "logprob/gap": 0.1},
           {"step": 1, "eval_loss": 2.0, "eval_my_score": 4}]  # fmt: skip
    drawn = charts.make_charts({"run": read_history(log)})
    found = {chart.title: [(line.label, line.dash) for line in chart.lines] for chart in drawn}
    assert found == {
        "Loss": [("training", ""), ("evaluation", "dashed")],
        "Rewards": [("chosen, training", ""), ("rejected, training", "")],
        "my_score": [("training", ""), ("evaluation", "dashed")],
    }


def test_losses_of_sources_share_a_chart_after_the_loss():
    log = [
        {"step": 1, "loss": 1.0, "loss/math": 0.5, "loss/data/chat": 2.0, "kl": 0.1},
        {"step": 1, "eval_loss/math": 3.0},
    ]
    drawn = charts.make_charts({"run": read_history(log)})
    assert [chart.title for chart in drawn] == ["Loss", "Loss by source or value", "KL estimate"]
    assert [line.label for line in drawn[1].lines] == ["chat, training", "math, training", "math, evaluation"]


def test_every_metric_of_the_trainers_has_a_chart_of_its_kind():
    """Keys that trainers log stand in double quotes with a slash; see the methods' `_metrics`."""
    known = {metric for kind in charts.KINDS for metric in kind.metrics} | {*charts.NOT_CHARTED}
    package = os.path.dirname(os.path.dirname(report.__file__))
    for name in METHODS:
        with open(f"{package}/methods/{name}.py", encoding="utf-8") as file:
            logged = set(re.findall(r'"((?:rewards|logps|logprob|distill|generation|perplexity)/\w+)"', file.read()))
        assert logged <= known, name


# ---- the page


def test_the_numbers_on_the_page_are_those_of_the_log(tmp_path):
    page = page_of(leave_run(tmp_path / "run"))
    rows = page.table("Loss")
    assert [row[:2] for row in rows] == [[str(step), format_number(2.0 / step)] for step in range(1, 21)]
    assert [row[2] for row in rows if row[2]] == [format_number(0.2 + 0.5), format_number(0.1 + 0.5)]
    assert page.table("Reward margin")[-1] == ["20", "2.5"]
    assert ["loss", "0.1", "0.6"] in page.table("Last logged values")
    assert "Loss0.6evaluation, from 0.7" in re.sub(r"\s*\n\s*", "", page.words)


def test_what_the_run_left_is_on_the_page(tmp_path):
    record = {
        "method": "dpo", "arguments": {"learning_rate": 5e-7, "beta": 0.1, "loss_type": ["sigmoid"]},
        "rows_per_step": 64, "engine": "ddp, 2 processes", "device": "cpu", "versions": {"torch": "2.13.0"},
        "warnings": [
            {"step": 7, "message": "the policy never leaves the reference"}, {"step": 9, "message": "step 8: no end"},
        ],
        "reporters": {"W&B": "https://wandb.ai/a/b/runs/1", "TensorBoard": "tensorboard --logdir out/runs"},
    }  # fmt: skip
    results = {"train_runtime": 75.2, "train_samples_per_second": 12.5}
    page = page_of(leave_run(tmp_path / "run", audit=AUDIT, samples=SAMPLES, run=record, all_results=results))
    assert ["dropped: empty completion", "10", "17, 301"] in page.table("Training data")
    assert ["truncated: prompt trimmed", "131", "3, 9, 12, 40, 41"] in page.table("Training data")
    assert page.table("Training data: tokens")[0] == ["prompt", "3", "40", "90", "120", "200", "44.25"]
    options = dict(page.table("Hyper-parameters"))
    expected = {"rows per optimizer step": "64", "learning_rate": "5e-07", "loss_type": "sigmoid"}
    assert expected.items() <= options.items()
    assert ["torch", "2.13.0"] in page.table("Environment")
    assert "https://wandb.ai/a/b/runs/1" in page.links
    assert "TensorBoard: tensorboard --logdir out/runs" in " ".join(page.words.split())
    for text in ("1 min 15 s", "Step 7: the policy never leaves the reference", "Step 8: no end",
                 AUDIT["warnings"][0], "1 + 1 =", "name_or_path: Qwen/Qwen3-0.6B"):  # fmt: skip
        assert text in page.words


def test_nothing_on_the_page_is_code_or_comes_from_elsewhere(tmp_path):
    recipe = RECIPE | {"model": {"name_or_path": HOSTILE}, "train": {HOSTILE: HOSTILE}}
    sample = dict.fromkeys(("prompt", "before", "after", "expected"), HOSTILE)
    record = {"warnings": [{"step": 1, "message": HOSTILE}], "versions": {HOSTILE: HOSTILE}, "lora": {HOSTILE: HOSTILE}}
    audit = {"warnings": [HOSTILE], "data": {HOSTILE: {"classes": {HOSTILE: 1}}}}
    log = [entry | {HOSTILE: 1.0} for entry in log_of()]
    folder = leave_run(tmp_path / "<b>run", log, recipe=recipe, samples=[sample], run=record, audit=audit)
    page = page_of(folder)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.words.count(HOSTILE) >= 12
    assert page.loads == ["data:,"]
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in (folder / "report.html").read_text()


def test_a_page_of_the_trainer_state_alone(tmp_path):
    folder = leave_run(tmp_path / "run", recipe=None)
    page = page_of(folder)
    assert "The base model is not recorded" in page.words
    assert "Recipe" not in page.words
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert ModelCard.load(folder / "README.md").data.library_name == "transformers"


def test_a_run_that_has_logged_nothing_yet(tmp_path):
    folder = leave_run(tmp_path / "run", log=[], taken=0)
    assert "No values have been logged yet" in page_of(folder).words
    assert not (folder / "curves.png").exists()
    assert "curves.png" not in (folder / "README.md").read_text()


def test_a_partial_run_is_read_from_its_newest_checkpoint(tmp_path):
    for step in (5, 10):
        leave_run(tmp_path / "run" / f"checkpoint-{step}", log_of(step), taken=step)
    page = page_of(tmp_path / "run")
    assert len(page.table("Loss")) == 10
    assert "10 of 20 steps were taken" in page.words


def test_a_checkpoint_that_is_newer_than_the_end_of_an_earlier_run(tmp_path):
    """A fresh run into the same folder: results and recipe of the one before are not shown as its own."""
    folder = leave_run(tmp_path / "run", all_results={"train_runtime": 75.2})
    age(folder)
    leave_run(folder / "checkpoint-5", log_of(5, loss=lambda step: 9.0 / step), taken=5, recipe=None)
    run = read_run(folder)
    assert run.steps == (5, 20)
    assert (run.recipe, run.results) == ({}, {})
    os.utime(folder / "checkpoint-5" / "trainer_state.json", (500, 500))
    assert read_run(folder).results == {"train_runtime": 75.2}


def test_a_copied_folder_is_read_as_the_run_itself(tmp_path):
    """Copies have other times: a checkpoint's state may be the file that was written last."""
    folder = leave_run(tmp_path / "run", all_results={"train_runtime": 75.2})
    leave_run(folder / "checkpoint-5", log_of(5), taken=5)
    age(folder)
    run = read_run(folder)
    assert (run.steps, run.results) == ((20, 20), {"train_runtime": 75.2})
    assert run.recipe


def test_a_resumed_run_is_read_from_its_checkpoint_though_its_log_is_no_longer(tmp_path):
    folder = leave_run(tmp_path / "run", [{"loss": 1.0, "step": 10}, {"train_runtime": 5.0, "step": 10}], 10, 10)
    os.utime(folder / "trainer_state.json", (1000, 1000))
    leave_run(folder / "checkpoint-20", [{"loss": 1.0, "step": 10}, {"loss": 0.5, "step": 20}], 20, 20)
    assert read_run(folder).steps == (20, 20)


def test_a_folder_with_the_times_of_another_clock_is_read(tmp_path):
    """From an archive of another time zone: all files are older than the start that run.json has."""
    started = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
    folder = leave_run(tmp_path / "run", all_results={"train_runtime": 75.2}, run=started)
    age(folder)
    run = read_run(folder)
    assert (run.steps, run.results) == ((20, 20), {"train_runtime": 75.2})
    assert run.recipe


def test_checkpoints_of_an_earlier_run_are_not_those_of_a_fresh_one(tmp_path):
    leave_run(tmp_path, log_of(loss=lambda step: 9.0 / step))
    started = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
    (tmp_path / "run.json").write_text(json.dumps({"started": started.isoformat()}))
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    for number, hours in ((100, -1), (10, 1)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": number}))
        os.utime(folder / "trainer_state.json", (started.timestamp() + 3600 * hours,) * 2)
    os.utime(tmp_path / "trainer_state.json", (started.timestamp() - 3600,) * 2)
    assert read_run(tmp_path).steps[0] == 10
    # nothing is known yet of a run without a checkpoint
    os.utime(tmp_path / "checkpoint-10" / "trainer_state.json", (started.timestamp() - 3600,) * 2)
    assert (read_run(tmp_path).steps[0], read_run(tmp_path).history) == (0, {})


@pytest.mark.parametrize(("count", "told"), [(2, False), (4, True)])
def test_exact_match_is_set_against_the_divergence(tmp_path, count, told):
    """1 - sqrt(KL), by hand."""
    logs = [{"step": n, "eval_exact_match": 1 - n / 10, "eval_distill/reverse_kl": (n / 10) ** 2} for n in range(count)]
    leave_run(tmp_path, logs, recipe={"method": "opd"})
    facts = {name: rest for name, *rest in list_facts(read_run(tmp_path))}
    assert facts.get("Exact match by KL") == (["1.00 - 1.00 sqrt(KL)", "4 evaluations, R2 1.00"] if told else None)


def test_an_accuracy_does_not_start_from_ties(tmp_path):
    log = [{"step": step, "eval_rewards/accuracies": value} for step, value in ((0, 0.0), (5, 0.6), (10, 0.8))]
    leave_run(tmp_path, log, recipe={"method": "dpo"})
    facts = {value: remark for _, value, remark in list_facts(read_run(tmp_path))}
    assert facts["0.8"] == "evaluation, from 0.6"


def test_the_best_weights_are_named_and_the_curve_is_that_of_training(tmp_path):
    """HF loads the best weights at the end, which are evaluated once more, at the last step."""
    log = [{"step": 2, "eval_loss": 1.5}, {"step": 8, "eval_loss": 3.5}, {"step": 8, "eval_loss": 1.5}]
    recipe = {"method": "sft", "train": {"load_best_model_at_end": True}}
    leave_run(tmp_path, log, taken=8, planned=8, recipe=recipe)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    (tmp_path / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": "runs/checkpoint-2"}))
    run = read_run(tmp_path)
    assert run.history["eval_loss"].values == (1.5, 3.5)
    assert run.last["eval_loss"] == 1.5
    assert ("Loss", "1.5", "evaluation, from 1.5") in list_facts(run)
    assert ("Weights of step", "2", "the best evaluation, not the last") in list_facts(run)
    report.write(tmp_path)
    assert "The weights are from step 2" in (tmp_path / "README.md").read_text()
    # in Python nothing evaluates them again
    state |= {"best_model_checkpoint": "runs/checkpoint-2", "log_history": log[:2]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(tmp_path).last["eval_loss"] == 1.5
    # a checkpoint has the weights of its own step
    checkpoint = leave_run(tmp_path / "checkpoint-8", log[:2], taken=8, planned=9, recipe=recipe)
    (checkpoint / "trainer_state.json").write_text((tmp_path / "trainer_state.json").read_text())
    assert (read_run(checkpoint).best_step, read_run(checkpoint).last["eval_loss"]) == (None, 3.5)


def test_an_answer_of_white_space_is_told_in_words(tmp_path):
    leave_run(tmp_path, log_of(), samples=[{"prompt": "p", "before": "\n" * 90, "after": "good"}])
    report.write(tmp_path)
    words = Page((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert "only white space (90 characters)" in words


def test_recipe_and_results_that_are_older_than_the_start_are_of_an_earlier_run(tmp_path):
    """The run's own trainer_state.json is there: it was stopped, or came from Python. 1000 s is 00:16:40."""
    folder = leave_run(tmp_path / "run", all_results={"train_runtime": 75.2})
    for started, known in (("1970-01-01T00:16:40+00:00", True), ("1970-01-01T00:16:41+00:00", False)):
        leave_run(folder, all_results={"train_runtime": 75.2}, run={"method": "kto", "started": started})
        for name in ("recipe.yaml", "all_results.json"):
            os.utime(folder / name, (1000, 1000))
        run = read_run(folder)
        assert (run.method, bool(run.recipe), bool(run.recipe_text)) == ("dpo" if known else "kto", known, known)
        assert bool(run.results) is known


def test_access_tokens_are_nowhere(tmp_path):
    secrets = {"hub_token": "hf_secret1", "push_to_hub_token": "hf_secret2"}
    data = {"train": [{"path": "x.jsonl", "a_token": "secret3"}]}
    recipe = RECIPE | {"train": RECIPE["train"] | secrets, "data": data}
    folder = leave_run(tmp_path / "run", recipe=recipe, run={"arguments": {"my_token": "secret4", "other_token": None}})
    page = page_of(folder)
    for name in ("report.html", "README.md"):
        assert "secret" not in (folder / name).read_text()
    assert "hub_token: <hidden>" in page.words.replace("'", "")
    assert dict(page.table("Hyper-parameters"))["my_token"] == "<hidden>"
    assert "other_token" not in dict(page.table("Hyper-parameters"))
    text = "# mine\nmethod: sft\ntrain: {hub_token: null, max_length: 7}\n"  # nothing to hide: as it stands
    (folder / "recipe.yaml").write_text(text)
    assert read_run(folder).recipe_text == text


def test_a_loss_that_was_not_finite_is_named(tmp_path):
    log = log_of(loss=lambda step: math.nan if step in (7, 8) else 1.0)
    page = page_of(leave_run(tmp_path / "run", log))
    assert "loss is not finite, first at step 7 (number of logs: 2)." in page.words


def test_a_hundred_thousand_logs_make_a_small_page(tmp_path):
    log = [{"step": step, "loss": math.sin(step) + 2 / step} for step in range(1, 100_001)]
    folder = leave_run(tmp_path / "run", log, 100_000, 100_000)
    page = page_of(folder)
    assert (folder / "report.html").stat().st_size < 100_000
    assert page.table("Loss")[0] == ["1", format_number(math.sin(1) + 2)]
    assert len(page.table("Loss")) < 200
    assert "a selection of the logged steps" in next(caption for caption in page.tables if caption.startswith("Loss"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, None, "run contains no run, since neither the folder nor a checkpoint-* in it has a trainer_state.json"),
        ("trainer_state.json", "{", "trainer_state.json cannot be read as JSON"),
        ("samples.json", "{}", "samples.json must contain a list, not a dict"),
        ("recipe.yaml", "a: [", "recipe.yaml:1: YAML syntax error"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path, name, content, message):
    folder = tmp_path / "run"
    folder.mkdir()
    if name:
        leave_run(folder)
        (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        report.write(folder)
    with pytest.raises(InputError, match="there is no folder"):
        report.write(tmp_path / "nowhere")


def test_reading_a_folder_takes_neither_torch_nor_matplotlib():
    code = (
        "import sys, hf_posttrain.report.compare, hf_posttrain.report.page\n"
        "assert not {'torch', 'matplotlib', 'jinja2', 'huggingface_hub', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_key_metrics_that_are_shown_first(tmp_path, method):
    keys = METHODS[method].key_metrics
    log = [{"step": 1, "loss": 0.5} | {f"eval_{key}": 0.25 for key in keys}]
    facts = list_facts(read_run(leave_run(tmp_path / "run", log, recipe=RECIPE | {"method": method})))
    assert [name for name, _, _ in facts] == ["Loss", *(charts.TITLES[key] for key in keys), "Steps"]


@pytest.mark.parametrize(("seconds", "text"), [(9.81, "9.81 s"), (75.2, "1 min 15 s"), (7500, "2 h 5 min")])
def test_duration(seconds, text):
    assert format_duration(seconds) == text


# ---- the picture


def test_the_picture_has_a_chart_for_each_metric(tmp_path):
    from matplotlib.image import imread

    few, many = leave_run(tmp_path / "few"), leave_run(tmp_path / "many", log_of(kl=math.cos, grad_norm=abs))
    sizes = []
    for folder in (few, many):
        report.write(folder)
        pixels = imread(folder / "curves.png")
        assert pixels[..., :3].std() > 0.02  # something is drawn
        sizes.append(pixels.shape[0])
    assert (pixels[-150:, -250:, :3] == 1).all()  # nothing where a sixth chart would be
    assert sizes[1] > sizes[0]  # 3 charts are one row, 5 are two


def test_names_with_dollars_are_drawn_as_they_are(tmp_path):
    folder = leave_run(tmp_path / "lr_$^$_x", log_of(**{"$\\frac$": abs, "$_$": abs}))
    report.write(folder)
    assert (folder / "curves.png").exists()


# ---- the card


def test_the_card_has_what_the_hub_expects(tmp_path):
    report.write(leave_run(tmp_path / "run"))
    model_card = ModelCard.load(tmp_path / "run" / "README.md")
    assert model_card.data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B", "datasets": ["trl-lib/ultrafeedback_binarized"],
        "library_name": "transformers", "model_name": "run", "pipeline_tag": "text-generation",
        "tags": ["hf_posttrain", "dpo", "generated_from_trainer"],
    }  # fmt: skip
    assert "| loss | 0.1 | 0.6 |" in model_card.text
    assert "| beta | 0.1 |" in model_card.text
    assert "- Evaluation: `rows/heldout.jsonl`, the first 500 rows" in model_card.text
    paper = METHODS["dpo"].paper
    assert model_card.text.rstrip().endswith(f"""```bibtex
@article{{{paper.key},
  title = {{{{{paper.title}}}}},
  author = {{{paper.authors}}},
  year = {{2023}},
  eprint = {{2305.18290}},
  archivePrefix = {{arXiv}},
  url = {{https://arxiv.org/abs/2305.18290}}
}}
```""")
    assert "![Curves of the run" in model_card.text


def test_the_card_names_no_folder_of_this_machine_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "sft").mkdir(parents=True)
    recipe = RECIPE | {"model": {"name_or_path": "outputs/sft"}, "data": {"train": {"path": "rows/x.jsonl"}}}
    report.write(leave_run(tmp_path / "run", recipe=recipe))
    data = ModelCard.load(tmp_path / "run" / "README.md").data
    assert data.base_model is None
    assert data.datasets is None
    (tmp_path / "outputs" / "sft").rmdir()  # moved since, but the run remembers
    report.write(leave_run(tmp_path / "run", recipe=recipe, run={"base_model_is_local": True}))
    assert ModelCard.load(tmp_path / "run" / "README.md").data.base_model is None


def test_the_card_of_a_run_from_python_loads_from_the_folder_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.write(leave_run(Path("outputs/run"), recipe=None))
    assert 'name = "outputs/run"' in (tmp_path / "outputs" / "run" / "README.md").read_text()
    report.write(leave_run(tmp_path / "outputs" / "other", recipe=None))  # no folder of this machine
    assert 'name = "other"' in (tmp_path / "outputs" / "other" / "README.md").read_text()


@pytest.mark.parametrize(
    ("readme", "stays"),
    [
        ("# Mine\n", True), ("---\n{}\n---\n[More Information Needed]\n", False),
        ("<!-- This model card has been generated automatically according to the information the Trainer had access to"
         " -->", False),
    ],
)  # fmt: skip
def test_a_readme_that_somebody_wrote_stays(tmp_path, readme, stays):
    folder = leave_run(tmp_path / "run")
    (folder / "README.md").write_text(readme)
    report.write(folder)
    assert ((folder / "README.md").read_text() == readme) is stays
    assert (folder / "README.hf_posttrain.md").exists() is stays
    leave_run(folder, log_of(loss=lambda step: 7.0))
    report.write(folder)  # our own is written again
    assert "| loss | 7 | 7.5 |" in (folder / ("README.hf_posttrain.md" if stays else "README.md")).read_text()


def test_markdown_in_names_stays_text(tmp_path):
    report.write(leave_run(tmp_path / "run", recipe=RECIPE | {"train": {"a|b": HOSTILE}}))
    [row] = [line for line in (tmp_path / "run" / "README.md").read_text().splitlines() if line.startswith("| a")]
    assert row.startswith(r"| a\|b | \<script\>alert")
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_a_readme_in_another_encoding_stays(tmp_path):
    folder = leave_run(tmp_path / "run")
    (folder / "README.md").write_bytes(b"# Mod\xe8le\n")
    report.write(folder)
    assert (folder / "README.md").read_bytes() == b"# Mod\xe8le\n"
    assert (folder / "README.hf_posttrain.md").exists()


def test_papers_cited():
    DPO, KTO, GKD = (METHODS[name].paper for name in ("dpo", "kto", "opd"))
    assert list_papers(METHODS["dpo"], {"loss_type": ["sigmoid"]}, False) == [DPO]
    cited = list_papers(METHODS["dpo"], {"loss_type": ["ipo", "ipo_sum", "sigmoid"]}, True)
    assert [paper.arxiv for paper in cited] == [DPO.arxiv, "2310.12036", "2106.09685"]
    assert list_papers(METHODS["kto"], {"loss_type": "kto"}, False) == [KTO]
    assert list_papers(METHODS["opd"], {}, False) == [GKD]
    assert list_papers(METHODS["sft"], {}, False) == []
    assert DPO.key == "rafailov2023direct"


def test_every_loss_with_a_paper_of_its_own_is_cited():
    """The docstring of each loss in `losses` names its arXiv number."""
    from hf_posttrain.losses.preference import PAIRED
    from hf_posttrain.losses.unpaired import UNPAIRED

    for name, function in (PAIRED | UNPAIRED).items():
        numbers = set(re.findall(r"arXiv (\d{4}\.\d{5})", function.__doc__ or ""))
        method = "dpo" if name in PAIRED else "kto"
        if name != "sft":  # a term of others, not a method
            assert numbers & {paper.arxiv for paper in list_papers(METHODS[method], {"loss_type": name}, False)}, name


def test_hub_names():
    assert card.is_hub_name("Qwen/Qwen3-0.6B")
    for name in ("gpt2", "/data/model", "a/b/c", "rows/x.jsonl", "../a", "tests/data.csv", ""):
        assert not card.is_hub_name(name), name


def test_json_of_python_is_read(tmp_path):
    """json writes NaN and Infinity, which is how trainer_state.json has them."""
    folder = leave_run(tmp_path / "run", [{"step": 1, "loss": math.inf, "grad_norm": math.nan}])
    assert "Infinity" in (folder / "trainer_state.json").read_text()
    assert json.loads((folder / "trainer_state.json").read_text())["log_history"][0]["loss"] == math.inf
    assert ["1", "inf"] in page_of(folder).table("Loss")
