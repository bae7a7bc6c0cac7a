"""`--check` agrees with the run: of drawn recipes it lets those pass that train a step, and no others.

A recipe is the number that it is drawn by (`support/combinations_for_tests.py`). Each goes through the whole command
twice in this process: with `--check`, and as a run of one step that evaluates and saves. Of the exit codes of
`--check`, 1 is for data that would not train well: such a run takes its step too.
"""

import json
import math
import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from combinations_for_tests import combination, make_shelf

from hf_posttrain import report, run
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.yaml_tree import write_tree
from hf_posttrain.report import callbacks

CHUNK, QUICK, ALL = 25, 25, 3300  # 100 take 55 s of CPU time
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and torch's, of odd adapters


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """The folder with all that the recipes name."""
    folder, here = tmp_path_factory.mktemp("shelf"), Path.cwd()
    os.chdir(folder)
    make_shelf(folder)
    os.chdir(here)
    return folder


@pytest.fixture
def command(shelf, monkeypatch, capsys):
    """Function of a recipe and arguments: the exit code, the lines of errors on stderr, and what is on stdout."""
    monkeypatch.chdir(shelf)
    # other tests look at the report and at long sample answers, which take most of the time
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(callbacks, "MAX_NEW_TOKENS", 4)

    def call(recipe, *arguments):
        Path("recipe.yaml").write_text(write_tree(recipe))
        environment = dict(os.environ)
        capsys.readouterr()
        code = run.main(["recipe.yaml", *arguments])
        os.environ.clear()
        os.environ.update(environment)
        said = capsys.readouterr()
        return code, [line for line in said.err.splitlines() if line.startswith("error: ")], said.out

    return call


def disagreement(recipe, command):
    """(what `--check` found, what is wrong: empty where it agrees with the run)."""
    code, refused, page = command(recipe, "--check")
    ended, failed, _ = command(recipe)
    results = Path("out/train_results.json")
    loss = json.loads(results.read_text())["train_loss"] if ended == 0 else math.nan
    shutil.rmtree("out", ignore_errors=True)
    if code in (0, 1):
        found = "passes" if code == 0 else "warns"
        if code == 1 and "\nwarning: " not in page:
            return found, "exit code 1 without a warning"
        if ended != 0 or not math.isfinite(loss):
            return found, f"it {found}, and the run has exit code {ended}, loss {loss}: {failed}"
        return found, ""
    if ended == 0:
        return "refuses", f"it refuses what trains: {refused}"
    # One line of each, which says the same: a place may be before it where the recipe is to blame.
    whole = [lines[0] if len(lines) == 1 else "" for lines in (refused, failed)]
    said = [re.sub(r"^error: (recipe\.yaml:\d+: )?", "", line) for line in whole]
    clear = all(line.isprintable() and 0 < len(line) < InputError.MAX_LENGTH + 40 for line in whole)
    if (code, ended) != (2, 2) or said[0] != said[1] or not clear:
        return "refuses", f"exit codes {code} and {ended}: {refused} | {failed}"
    return "refuses", ""


SLOW = [pytest.param(start, marks=pytest.mark.slow) for start in range(QUICK, ALL, CHUNK)]


@pytest.mark.parametrize("start", [*range(0, QUICK, CHUNK), *SLOW])
def test_check_lets_pass_what_trains_a_step(command, capsys, start):
    began, counts, wrong = time.process_time(), Counter(), []
    for number in range(start, start + CHUNK):
        recipe = combination(number)
        found, problem = disagreement(recipe, command)
        counts[found] += 1
        if problem:
            wrong.append(f"\ncombination({number}): {problem}\n{write_tree(recipe)}")
    with capsys.disabled():
        print(f"\n{start} to {start + CHUNK - 1}: {dict(counts)}, {time.process_time() - began:.0f} s of CPU time")
    assert not wrong, "".join(wrong)
    assert counts["passes"] + counts["warns"] > CHUNK // 5
    assert counts["refuses"] > CHUNK // 10


# ---- what `--check` did not find before


def plain(method, rows="strings", model="qwen3", **train):
    """A recipe that is right but for what `train` changes, or the rows."""
    recipe = {"method": method, "model": {"name_or_path": model}, "data": {"train": {"path": f"{rows}.jsonl"}}}
    usual = {"output_dir": "out", "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    usual |= {"max_completion_length": 4} if METHODS[method].rows.sampled else {}
    if METHODS[method].second == "teacher":
        recipe["teacher"] = {"name_or_path": model}
    return recipe | {"train": usual | {"save_strategy": "no", "disable_tqdm": True} | train}


def streamed(recipe):
    recipe["data"]["train"]["streaming"] = True
    return recipe


def changed(recipe, **model):
    """The recipe with more in its section of the model."""
    return recipe | {"model": recipe["model"] | model}


ALORA = {"lora": {"r": 2, "alora_invocation_tokens": [65]}}


@pytest.mark.parametrize(
    "recipe",
    [changed(plain("sft"), **ALORA), streamed(changed(plain("sft"), **ALORA)), changed(plain("sft"), adapter="alora")],
    ids=["new", "stream", "saved"],
)
def test_check_lets_an_alora_pass(command, recipe):
    """Without the option, both the run and the check turn activation checkpointing off."""
    assert disagreement(recipe, command) == ("passes", "")


REFUSED = {
    "no_classifier": (
        changed(plain("rm", model="hybrid"), lora={"r": 2, "trainable_token_indices": [1, 2]}),
        "model hybrid (lfm2) has no sequence classifier",
    ),
    "no_replication": (
        changed(plain("sft", model="hybrid"), lora={"r": 2, "layer_replication": [[0, 1], [0, 1]]}),
        "layer_replication is not supported for a model with recurrent layers",
    ),
    "no_experts": (plain("sft", router_aux_loss_coef=0.01), "this model has no load-balancing loss"),
    "no_merge": (changed(plain("sft", merge_lora=True), lora={"r": 2, "lora_bias": True}), "PEFT cannot merge"),
    "adapter_of_another": (changed(plain("sft", model="bos"), adapter="whole"), "was not trained on bos"),
    "adapter_of_another_teacher": (
        plain("kd", model="bos") | {"teacher": {"name_or_path": "bos", "adapter": "whole"}}, "was not trained on bos"
    ),
    "adapter_of_another_size": (changed(plain("sft"), adapter="wide"), "adapter wide does not fit qwen3"),
    "no_option_of_checkpointing": (
        plain("sft", activation_checkpointing_kwargs={"every_n_layer": 2}), "did you mean 'every_n_layers'?"
    ),
    "no_layer_checkpointed": (plain("sft", gradient_checkpointing_kwargs={"every_n_layers": 0}), "layers must be"),
    "checkpointed_alora": (
        changed(plain("sft", activation_checkpointing=True), lora={"r": 2, "alora_invocation_tokens": [65]}),
        "alora_invocation_tokens cannot be combined with activation_checkpointing",
    ),
    "layout": (plain("sft", model="short", layout="packed", max_length=200), "layout='packed' is not supported here"),
    "longer_rope": (plain("opd", model="short", max_length=200), "the model has other rotary frequencies"),
    "average_in_bf16": (
        changed(plain("kd", "taught"), dtype="bfloat16")
        | {"teacher": {"self": "ema", "prompt": "{{ prompt }} {{ hint }}"}},
        "an average of torch.bfloat16 weights does not move",
    ),
    "no_answers": (plain("opd", "empty_answers", lmbda=0.5), "lmbda below 1 trains on completions of the data"),
    "auto_of_one_label": (plain("kto", "good", loss_type="bco", desirable_weight="auto"), "`auto` requires rows of"),
    "few_rows": (plain("sft", "one", dataloader_drop_last=True), "a batch of 2 requires more rows than the data"),
    "short_stream": (streamed(plain("sft", gradient_accumulation_steps=3)), "4 rows, and a step takes 6"),
    "grouped_stream": (streamed(plain("sft", train_sampling_strategy="group_by_length")), "cannot be combined"),
    "referenced_stream": (streamed(plain("dpo", precompute_ref_log_probs=True)), "cannot be combined"),
    "taught_stream": (streamed(plain("kd", teacher={"top_k": 5, "precompute": True})), "cannot be combined"),
    "frozen_stream": (streamed(plain("opd", rollouts="frozen")), "rollouts: frozen cannot be combined with a stream"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_check_refuses_what_the_trainer_refuses(command, name):
    recipe, problem = REFUSED[name]
    code, [line], _ = command(recipe, "--check")
    assert code == 2
    assert problem in line
    assert disagreement(recipe, command) == ("refuses", "")


def test_a_stream_may_fill_the_last_batch_of_a_step_in_part(command):
    recipe = streamed(plain("sft", per_device_train_batch_size=3, gradient_accumulation_steps=2))
    assert disagreement(recipe, command) == ("passes", "")
    recipe["train"]["dataloader_drop_last"] = True
    assert disagreement(recipe, command) == ("refuses", "")


def test_an_evaluation_on_a_stream_is_scored_by_the_reference_as_it_comes(command):
    recipe = plain("dpo", max_steps=4, eval_strategy="epoch")
    recipe["data"]["eval"] = {"path": "strings_eval.jsonl", "streaming": True}
    assert disagreement(recipe, command) == ("passes", "")


def test_what_the_trainer_says_of_a_model_is_a_note_of_the_check(command):
    recipe = changed(plain("sft"), dtype="bfloat16")
    code, _, page = command(recipe, "--check")
    assert code == 0
    assert page.count("all weights are trained in torch.bfloat16") == 1
