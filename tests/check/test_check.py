"""--check: what it says of recipes whose answers are known, its exit codes, and that it trains and writes nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import peft
import pytest
import torch
import transformers
from architectures import tiny
from models_for_tests import tiny_model
from safetensors.torch import load_file
from tokenizers_for_tests import CHATML, LLAMA, bos_tokenizer, byte_tokenizer, gpt2_tokenizer
from training_for_tests import METHODS, TABLE, token_rows, trainer_for, usual
from transformers import Qwen3Config
from vllm_for_tests import Serving

from hf_posttrain import DPOTrainer, SFTTrainer, run
from hf_posttrain.check import check
from hf_posttrain.check.plan import plan
from hf_posttrain.check.probe import KL_SPAN, sample_rollouts
from hf_posttrain.data import prepare
from hf_posttrain.data.align import Aligner
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.models import load as models
from hf_posttrain.recipe.read import load_recipe

RECIPE = """\
method: sft
model: {name_or_path: tiny, from_scratch: true}
data: {train: {path: rows.jsonl}, eval: {path: held.jsonl}}
train: {output_dir: out, max_steps: 3, per_device_train_batch_size: 2, use_cpu: true}
"""


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


def write_model(path, tokenizer):
    """A config and a tokenizer: no weights, which a check has no use for."""
    Qwen3Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocab_size=300,
    ).save_pretrained(path)  # fmt: skip
    tokenizer.save_pretrained(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with recipe.yaml, ten rows to train on, three others, and models without weights."""
    write_model(tmp_path / "tiny", byte_tokenizer())
    write_model(tmp_path / "other", byte_tokenizer(LLAMA))
    write_model(tmp_path / "llama", bos_tokenizer())
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(10)])
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"{n} + 2 =", "completion": f" {n + 2}"} for n in range(3)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test where a model is loaded."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_model", load)


def checked(*overrides, **options):
    return check(load_recipe("recipe.yaml", overrides), **options)


# ---- the command


def test_what_is_not_read_is_said_once_of_each_data_set(folder, no_weights, capsys, caplog):
    turns = [{"role": "user", "name": "Jo", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for file in ("rows.jsonl", "held.jsonl"):
        write_rows(folder / file, [{"messages": turns, "extra": file}] * 3)
    run.main(["recipe.yaml", "--check"])
    shown = capsys.readouterr().out
    for said in ("does not use: key 'name' (in 3 examples)", "columns not read: extra", "all turns are trained"):
        assert (shown + caplog.text).count(said) == 2


def test_rows_are_tokenised_once_and_counted_once(folder, no_weights, capsys, monkeypatch):
    sizes, encode = [], prepare.encode

    def counted(samples, *rest):
        sizes.append(len(samples))
        return encode(samples, *rest)

    monkeypatch.setattr(prepare, "encode", counted)
    assert run.main(["recipe.yaml", "--check", "train.max_length=6"]) == 1
    assert sorted(sizes) == [3, 10]
    shown = capsys.readouterr()
    assert "10 of 10 examples are truncated" in shown.out
    assert "rows read, " not in shown.out + shown.err
    sizes.clear()
    assert run.main(["recipe.yaml", "--check", "data.train.weight=2"]) == 0
    assert "Sample: data.train (rows.jsonl), example 9" in capsys.readouterr().out
    assert sorted(sizes) == [3, 10, 20]


def test_a_sound_recipe_is_shown_without_weights_and_nothing_is_written(folder, no_weights, capsys):
    before = sorted(folder.rglob("*"))
    assert run.main(["recipe.yaml", "--check"]) == 0
    page = capsys.readouterr().out
    for words in ("3 steps of 2 rows", "0.6 epochs of 10 rows", "0 + 1 =[[ 1<|im_end|>]]", "10 rows", "It can run."):
        assert words in page
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", ["lora", "modules_to_save", "ia3"])
def test_an_adapter_that_is_continued_is_counted_as_a_new_one(folder, capsys, kind):
    configs = {
        "lora": peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        "modules_to_save": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained("tiny"))
    model.save_pretrained("tiny")
    adapted = peft.get_peft_model(model, configs[kind])
    adapted.save_pretrained("adapter")
    override = "model={name_or_path: tiny, adapter: adapter}"
    found = checked(override)
    assert found.memory.optimizer == 8 * sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert run.main(["recipe.yaml", "--check", override]) == 0
    assert "It can run." in capsys.readouterr().out
    peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM").save_pretrained("prompt")
    assert run.main(["recipe.yaml", "--check", "model={name_or_path: tiny, adapter: prompt}"]) == 2
    assert (
        "adapter prompt: PROMPT_TUNING is not supported. Use an adapter that acts only inside layers"
        in capsys.readouterr().err
    )


def test_fewer_rows_than_a_step_takes_are_the_step(folder):
    found = checked("train.per_device_train_batch_size=8", "train.gradient_accumulation_steps=2").plan
    whole = checked("train.per_device_train_batch_size=10").plan
    assert (found.rows_per_step, found.epochs) == (10, 3)
    assert (found.tokens_per_step, found.trained_per_step) == (whole.tokens_per_step, whole.trained_per_step)


def test_rollouts_by_vllm_are_planned_where_vllm_is_not(folder):
    rollouts = ["method=opd", "teacher={name_or_path: tiny, from_scratch: true}", "train.max_completion_length=8"]
    assert "generation" in checked(*rollouts).memory.phases
    by_vllm = checked(*rollouts, "train.sampler=vllm_colocate")
    assert "generation" not in by_vllm.memory.phases
    missing = "command line: on the machine that trains, train.sampler: vllm_colocate requires the package vllm"
    assert [note for note in by_vllm.notes if note.startswith(missing)]
    judged = checked("rounds={count: 1, judge: exact_match, sampler: vllm_colocate}")
    assert [note for note in judged.notes if "rounds.sampler: vllm_colocate requires the package vllm" in note]


@pytest.mark.slow
def test_json_has_the_same_and_nothing_else_is_on_stdout(folder):
    command = [sys.executable, "-m", "hf_posttrain.run", "recipe.yaml", "--check", "--probe", "--json"]
    done = subprocess.run([*command, "train.hub_token=secret"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert "secret" not in done.stdout
    assert found["probe"]["rows"] == 2
    assert found["status"] == 0
    assert found["warnings"] == []
    assert found["data"]["train"]["rows_read"] == 10
    assert found["data"]["eval"]["rows_read"] == 3
    assert found["plan"]["steps"] == 3
    assert found["given"]["max_steps"] == 3
    assert found["defaulted"]["learning_rate"] == 2e-5
    assert found["memory"]["total"] > 0


def test_exit_code_1_is_for_what_would_ruin_training(folder, capsys):
    """Two thirds of the completions are cut before their end."""
    long = [{"prompt": "p", "completion": "x" * (60 if n % 3 else 5)} for n in range(9)]
    write_rows(folder / "rows.jsonl", long)
    assert run.main(["recipe.yaml", "--check", "train.max_length=20"]) == 1
    assert "warning: train" in capsys.readouterr().out


def test_exit_code_2_is_for_what_cannot_run_and_is_json_too(folder, capsys):
    assert run.main(["recipe.yaml", "--check", "--json", "data.train.path=row.jsonl"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out) == {"status": 2, "error": said.err.splitlines()[-1].removeprefix("error: ")}


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_exit_codes_reach_the_shell(folder, code):
    write_rows(folder / "rows.jsonl", [{"prompt": "p", "completion": "yes"}] * (10 if code == 1 else 1))
    limit = "train.max_length=1" if code == 2 else "train.max_length=100"
    done = subprocess.run(
        [sys.executable, "-m", "hf_posttrain.run", "recipe.yaml", "--check", limit], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_two_processes_check_together_and_one_speaks(folder, engine):
    """Through a launcher: the plan is of both, weights are cut where the engine cuts them, and the probe is theirs."""
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "DS_ACCELERATOR": "cpu"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "hf_posttrain.run"]
    done = subprocess.run(
        [*launcher, "recipe.yaml", "--check", "--probe"],
        env=os.environ | (zero if engine == "zero3" else {}), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("3 steps of 4 rows on 2 processes") == 1
    assert f"memory on each device ({engine}, 2 processes)" in done.stdout
    assert done.stdout.count("a step of 2 rows") == 1
    assert not (folder / "out").exists()


def test_import_budget(folder):
    """A check takes seconds: it imports torch and transformers, and nothing that only training or a report needs."""
    command = [sys.executable, "-X", "importtime", "-m", "hf_posttrain.run", "recipe.yaml", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.split()[-1].partition(".")[0] for line in done.stderr.splitlines() if "import time:" in line}
    assert {"torch", "transformers", "datasets"} <= imported
    assert not {"matplotlib", "wandb", "tensorboard", "trl", "sklearn", "vllm", "playwright"} & imported


@pytest.mark.parametrize("line", [["recipes"], ["init", "--help"], ["data", "--help"], ["compare", "--help"]])
def test_a_command_without_models_imports_no_torch(line, folder):
    environment = os.environ | {"WANDB_MODE": "offline"}
    command = [sys.executable, "-X", "importtime", "-m", "hf_posttrain.run", *line]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {entry.split()[-1].partition(".")[0] for entry in done.stderr.splitlines() if "import time:" in entry}
    assert "hf_posttrain" in imported
    assert not {"torch", "transformers"} & imported


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_checked_and_probed(folder, method):
    row = TABLE[method]
    write_rows(folder / "rows.jsonl", token_rows(method))
    options = [f"train.{name}={value}" for name, value in usual(method).items()] + ["train.lr_scheduler_type=linear"]
    options += ["train.warmup_steps=0.1"]  # the probe's one step has a constant rate
    options += ["teacher={name_or_path: tiny, from_scratch: true}"] if row.second == "teacher" else []
    found = checked(f"method={method}", "data.eval=null", *options, with_probe=True)
    assert found.method == method
    assert 0 < found.probe.loss < 20
    assert (found.probe.rollouts is not None) == row.rows.sampled
    whole = max(sum(len(ids) for name, ids in row.items() if name.endswith("_ids")) for row in token_rows(method))
    assert 0 < found.probe.longest <= whole  # without KTO's other prompt
    assert found.plan.steps == 3
    assert found.tokens.answers == (0 if row.rows.sampled else len(row.rows.answers) * found.tokens.examples)
    for sample in found.tokens.samples:
        roles = list(dict.fromkeys(piece.role for piece in sample.pieces))
        assert roles == [column.removesuffix("_ids") for column in ("prompt_ids", *row.rows.answers)]
        assert ("[[" in "".join(sample.lines(color=False))) != row.rows.sampled
        assert (sample.label is not None) == row.rows.labeled
    assert "\nProbe\n  a step of 2 rows" in found.text(color=False)


# ---- tokens


def test_samples_show_what_is_trained(folder):
    write_rows(folder / "pairs.jsonl", [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}])
    [sample] = checked("method=dpo", "data={train: {path: pairs.jsonl}}").tokens.samples
    assert sample.lines(color=False) == [
        "2 + 2 =", "chosen: [[ 4<|im_end|>]]", "rejected: [[ 5<|im_end|>]]"
    ]  # fmt: skip
    assert sample.boundary == "'2 + 2 =' | ' 4<|im_end|>'"
    assert "\033[1;32m 4<|im_end|>\033[0m" in sample.lines(color=True)[1]


def test_answers_that_opd_trains_in_part_are_shown_as_trained(folder):
    given = ["method=opd", "teacher={name_or_path: other}", "data.eval=null", "train.max_completion_length=8"]
    for lmbda, trained in ((1.0, False), (0.5, True)):
        found = checked(*given, f"train.lmbda={lmbda}").tokens
        assert any(piece.trained for sample in found.samples for piece in sample.pieces) == trained
        assert bool(found.answers) == trained


def test_what_the_template_does_not_write_is_said_once(folder):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "weight": 1}]
    write_rows(folder / "rows.jsonl", [{"messages": messages}])
    assert str(checked("data.eval=null")).count("the chat template does not use: key 'weight'") == 1


def test_an_option_that_the_template_does_not_read_is_said_once(folder):
    """And not of each data set."""
    found = checked("train.apply_chat_template=true", "train.chat_template_kwargs={enable_thinking: false}")
    assert len(found.data) == 2
    assert len([warning for warning in found.warnings if "enable_thinking" in warning]) == 1


def test_a_misspelt_switch_of_the_template_is_named_where_it_stands(folder):
    """And not at the data."""
    byte_tokenizer(CHATML + "{% if enable_thinking %}{% endif %}").save_pretrained("tiny")
    said = "command line: chat_template_kwargs: the chat template does not know 'enable_thinkin'; did you mean"
    with pytest.raises(InputError, match=f"^{said} 'enable_thinking'"):
        checked("train.chat_template_kwargs={enable_thinkin: false}")


def test_each_source_has_samples_of_its_own(folder):
    found = checked("data.train=[{path: rows.jsonl}, {path: held.jsonl}]", "data.eval=null").tokens.samples
    assert [(s.source, s.row) for s in found] == [
        ("data.train.0 (rows.jsonl)", 0), ("data.train.0 (rows.jsonl)", 5), ("data.train.0 (rows.jsonl)", 9),
        ("data.train.1 (held.jsonl)", 0), ("data.train.1 (held.jsonl)", 1), ("data.train.1 (held.jsonl)", 2),
    ]  # fmt: skip


def test_edges_are_counted(folder):
    """Rows of ids: one with two BOS (256), one that ends with eos (257), one that does not."""
    ids = [([256, 256, 1], [2, 257]), ([256, 1], [2, 3]), ([256, 1], [4, 257])]
    write_rows(folder / "rows.jsonl", [{"prompt_ids": p, "completion_ids": c} for p, c in ids])
    found = checked("model.name_or_path=llama", "data.eval=null").tokens
    assert found.bos_counts == {2: 1, 1: 2}
    assert (found.ended, found.answers) == (2, 3)
    assert found.stops == {259: "<|im_end|>", 257: "</s>"}
    assert found.pad_is_eos
    assert [w.partition(". ")[0] for w in found.warnings()] == ["1 of 3 examples begin with <s> twice"]


@pytest.mark.parametrize("role", ["bos_token", "pad_token"])
def test_special_tokens_that_the_template_writes_in_each_turn_are_no_fault(role, folder):
    """SmolLM2's BOS opens turns; other tokenizers pad with a token of their template."""
    tokenizer = byte_tokenizer(CHATML)
    setattr(tokenizer, role, "<|im_start|>")
    tokenizer.save_pretrained("turns")
    tiny_model().save_pretrained("turns")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_rows(folder / "rows.jsonl", [{"messages": turns * 2}] * 3)
    found = checked("model.name_or_path=turns", "data.eval=null").tokens
    assert not [*found.warnings()]


def test_answers_that_never_end_are_warned_of(folder):
    write_rows(folder / "rows.jsonl", [{"prompt_ids": [1], "completion_ids": [n]} for n in range(5)])
    [warning] = [w for w in checked("data.eval=null").warnings if "never learn to stop" in w]
    assert warning.startswith("no answer ends with a trained <|im_end|>")


def test_padding_tokens_within_examples_are_warned_of(folder):
    """Of ids: 256 is the padding token."""
    ids = [[1, 256, 258], [1, 258], [256, 258]]
    write_rows(folder / "rows.jsonl", [{"prompt_ids": [1], "completion_ids": i} for i in ids])
    found = checked("data.eval=null").tokens
    assert found.padded == 2
    assert any(w.startswith("2 of 3 examples contain the padding token <|endoftext|>") for w in found.warnings())


def test_the_teachers_own_prompts_are_compared(folder):
    write_rows(folder / "rows.jsonl", [{"prompt": [{"role": "user", "content": "Hi"}]}] * 2)
    opd = ("method=opd", "data.eval=null", "train.max_length=100", "train.max_completion_length=8")
    same, other = (checked(*opd, f"teacher.name_or_path={name}").tokens for name in ("tiny", "other"))
    assert (same.differing_prompts, other.differing_prompts) == (0, 2)
    assert same.teacher_stops == {258: "<|im_end|>"}
    assert any("the teacher's own template renders 2 of the first 3 prompts differently" in w for w in other.warnings())


def test_what_ends_an_answer_of_both_models_is_listed(folder):
    write_rows(folder / "rows.jsonl", [{"prompt": [{"role": "user", "content": "Hi"}]}] * 2)
    shutil.copytree(folder / "tiny", folder / "ended")
    (folder / "ended" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    opd = ("method=opd", "data.eval=null", "train.max_length=100", "train.max_completion_length=8")
    found = checked(*opd, "teacher.name_or_path=ended").tokens
    assert "one outcome in the loss: <|im_end|> (258), <|endoftext|> (256)" in found.lines()
    lines = checked(*opd, "teacher.name_or_path=ended", "train.teacher.merge_eos=false").tokens.lines()
    assert any(line.startswith("one outcome in the loss: none") for line in lines)
    write_rows(folder / "rows.jsonl", [{"prompt": "Hi", "completion": "you"}] * 2)
    assert not any("one outcome" in line for line in checked("data.eval=null").tokens.lines())


ACROSS = ("method=kd", "data.eval=null", "train.completion_only_loss=true")


def test_tokens_that_face_one_of_the_teachers_are_counted(folder):
    """By hand: the teacher has longer tokens after some of the characters; with --probe its probabilities decide."""
    tokenizer = gpt2_tokenizer()
    write_model(folder / "gpt2", tokenizer)
    config = json.loads((folder / "gpt2" / "config.json").read_text())
    (folder / "gpt2" / "config.json").write_text(json.dumps(config | {"vocab_size": 520}))
    teacher = "teacher={name_or_path: gpt2, from_scratch: true, own_tokenizer: true}"
    found = checked(*ACROSS, teacher, with_probe=True)
    both = Aligner(byte_tokenizer(), tokenizer, [258], tokenizer.eos_token_id)
    answers = [both([*f" {n + 1}".encode(), 258]) for n in range(10)]
    facing = [(answer, place) for answer in answers for place in answer.match if place >= 0]
    total = sum(len(answer.chunks) for answer in answers)
    one = len(facing) / total
    assert found.tokens.alignment == {"one_to_one": one, "unaligned": 0.0}
    assert 0 < one < 1
    lines = [*found.tokens.lines()]
    said = f"alignment: {one:.1%} of the trained tokens align with one token of the teacher, 0.0% have no common text"
    assert said in lines
    assert any(line.startswith(f"compared in full: at most {one:.1%}, ") for line in lines)
    measured = found.probe.alignment
    assert 0 <= measured["align/in_full"] <= measured["align/one_to_one"] <= 1
    assert any("align with one token of the teacher" in line for line in found.probe.lines())
    same = checked(*ACROSS, "teacher={name_or_path: other, from_scratch: true, own_tokenizer: true}", with_probe=True)
    assert same.tokens.alignment is None
    assert same.probe.alignment is None


# ---- resumption and servers


@pytest.mark.parametrize("method", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "opd"))])
def test_a_check_rejects_a_resumption_that_the_run_rejects(folder, method):
    """Options and rows are compared without the weights."""
    write_rows(folder / "rows.jsonl", [{"prompt": f"{n}", "chosen": "a", "rejected": f"{n}b"} for n in range(8)])
    if method != "dpo":
        write_rows(folder / "rows.jsonl", [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(8)])
    tiny_model().save_pretrained("tiny")
    changes = [f"method={method}", "data.eval=null", "train.save_steps=2", "train.max_length=64"]
    if method == "opd":
        changes += ["teacher.name_or_path=tiny", "train.max_completion_length=4", "train.rollouts=frozen"]
    assert run.main(["recipe.yaml", *changes, "train.save_strategy=steps"]) == 0
    assert "resume_from_checkpoint" not in (folder / "out" / "recipe.yaml").read_text()
    resumed = [*changes, "train.save_strategy=steps", "train.resume_from_checkpoint=out/checkpoint-2"]
    checked(*resumed)
    for change, difference in (
        ("train.learning_rate=0.5", "learning_rate: then"),
        ("data.train.limit=6", "train_dataset: then"),
    ):
        with pytest.raises(InputError, match=f"command line: the checkpoint out/checkpoint-2 was .*: {difference}"):
            checked(*resumed, change)
        assert run.main(["recipe.yaml", *resumed, change]) == 2
    (folder / "out" / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(InputError, match="checkpoint-2 is incomplete, without optimizer"):
        checked(*resumed)
    assert run.main(["recipe.yaml", *resumed[:-1], "train.resume_from_checkpoint=out/checkpoint-3"]) == 0
    assert "resume_from_checkpoint" not in (folder / "out" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_check_compares_the_sampler_of_a_resumption(folder, monkeypatch):
    """On a machine without GPU as well, of OPD and of rounds."""
    write_rows(folder / "rows.jsonl", [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(8)])
    tiny_model().save_pretrained("tiny")
    saved = ["data.eval=null", "train.save_steps=1", "train.save_strategy=steps", "train.max_steps=2"]
    opd = [*saved, "method=opd", "teacher.name_or_path=tiny", "train.max_completion_length=4", "train.output_dir=a"]
    rounds = [*saved, "method=sft", "train.max_length=64", "train.output_dir=b",
              "rounds={count: 1, num_generations: 2, max_completion_length: 4, judge: 'graders:lengths'}",
              "rounds.pair={take: all, unfinished: true}"]  # fmt: skip
    code = "def lengths(prompts, completions, references):\n    return [float(len(text)) for text in completions]\n"
    (folder / "graders.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    for changes, key, output_dir in ((opd, "train.sampler", "a"), (rounds, "rounds.sampler", "b")):
        assert run.main(["recipe.yaml", *changes]) == 0
        resumed = [*changes, f"train.resume_from_checkpoint={output_dir}/checkpoint-1"]
        checked(*resumed)
        difference = f"{key.removeprefix('train.')}.batch_size: then None, now 2"
        with pytest.raises(InputError, match=difference):
            checked(*resumed, f"{key}.batch_size=2")
        assert run.main(["recipe.yaml", *resumed, f"{key}.batch_size=2"]) == 2
        url = "{kind: vllm_server, base_url: 'http://localhost:1'}"
        with pytest.raises(InputError, match=r"sampler.*: then 'policy', now 'vllm'"):
            checked(*resumed, f"{key}={url}")


def test_a_check_compares_the_adapter_of_a_resumption(folder):
    tiny_model().save_pretrained("tiny")
    changes = ["data.eval=null", "model.from_scratch=false", "model.lora.r=4", "train.save_steps=2"]
    changes += ["train.save_strategy=steps", "train.learning_rate=1e-3"]
    assert run.main(["recipe.yaml", *changes]) == 0
    resumed = [*changes, "train.resume_from_checkpoint=out/checkpoint-2"]
    checked(*resumed)
    with pytest.raises(InputError) as caught:
        checked(*resumed, "model.lora.r=8")
    assert "adapter.r: then 4, now 8. Restore the settings, or start a new run from its weights" in str(caught.value)
    assert "resume_despite" not in str(caught.value)


def test_an_adapter_next_to_a_full_model_is_rejected_as_by_the_run(folder):
    """And the reverse: `from_pretrained` would add one to the other."""
    tiny_model().save_pretrained("tiny")
    (folder / "out").mkdir()
    for name, overrides, kinds in (
        ("model.safetensors", ["model.lora={r: 2}"], "an adapter and holds a full model"),
        ("adapter_config.json", ["model.lora={r: 2}", "train.merge_lora=true"], "a full model and holds an adapter"),
        ("adapter_config.json", [], "a full model and holds an adapter"),
    ):
        (folder / "out" / name).write_text("{}")
        with pytest.raises(InputError, match=f"out would get {kinds}"):
            checked("train.output_dir=out", "model.from_scratch=false", *overrides)
        (folder / "out" / name).unlink()
    assert checked("train.output_dir=out", "model.from_scratch=false")


def test_notes_about_an_earlier_run_and_the_rate_of_an_adapter(folder):
    tiny_model().save_pretrained("tiny")
    adapter = ["model.from_scratch=false", "model.lora.r=4", "data.eval=null"]
    [note] = [note for note in checked(*adapter).notes if "learning_rate" in note]
    assert note.endswith("require about 10 times as much: set train.learning_rate=0.0002")
    assert not any("learning_rate" in note for note in checked(*adapter, "train.learning_rate=1e-3").notes)
    assert not any("learning_rate" in note for note in checked().notes)
    assert run.main(["recipe.yaml", "model.from_scratch=false"]) == 0
    assert any("an earlier run, whose model and report are overwritten" in note for note in checked().notes)


def test_a_check_compares_rows_with_the_length_limit_of_a_teacher_on_a_server(folder):
    tiny_model().save_pretrained("tiny")
    options = ("method=kd", "data.eval=null", "teacher.name_or_path=tiny", "train.teacher.top_k=4")
    with Serving(tiny_model(), max_model_len=9) as server:
        found = checked(*options, f"teacher.url={server.url}")
    [problem] = found.servers
    assert "rows have up to 11 tokens, and" in problem
    assert "--max-model-len of 9. Start it with 12, or lower max_length" in problem
    assert found.status == 1


# ---- plan


def planned(trainer_class, rows, **changes):
    config = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_train_epochs": 1.0, "max_steps": -1,
        "layout": "auto", "dataloader_drop_last": False, "max_length": 1024, "device": torch.device("cpu"),
    } | changes  # fmt: skip
    return plan(rows, trainer_class, SimpleNamespace(**config), [tiny_model()], changes.get("processes", 1))


def test_tokens_padding_and_savings_are_those_of_the_layout():
    """A pair of a prompt of 5 and answers of 3 and 4: 4 + 3 + 4 = 11 tokens; with a prompt for each answer they would
    be (4 + 3) + (4 + 4) = 15. Two pairs make two rows of one length: no padding. All 7 tokens of answers are trained.
    """
    row = {"prompt_ids": [1] * 5, "chosen_ids": [2] * 3, "rejected_ids": [3] * 4}
    rows = datasets.Dataset.from_list([row, row])
    found = planned(DPOTrainer, rows)
    assert (found.layout, found.tokens_per_step, found.trained_per_step, found.padding) == ("shared", 22, 14, 0)
    assert found.saved == pytest.approx(1 - 11 / 15)


def test_padding_is_counted():
    """Rows of 2 + 2 - 1 = 3 and 2 + 6 - 1 = 7 tokens, padded to 7: 4 of 14 positions."""
    rows = [{"prompt_ids": [1, 1], "completion_ids": [2] * n, "completion_mask": [1] * n} for n in (2, 6)]
    found = planned(SFTTrainer, datasets.Dataset.from_list(rows), layout="padded")
    assert found.padding == pytest.approx(4 / 14)


@pytest.mark.parametrize(
    "config",
    [
        {"num_train_epochs": 2.0},
        {"num_train_epochs": 1.5, "gradient_accumulation_steps": 2},
        {"max_steps": 3},
        {"num_train_epochs": 1.0, "gradient_accumulation_steps": 3, "dataloader_drop_last": True},
    ],
)
def test_steps_are_those_of_the_trainer(tmp_path, config):
    given = {"max_steps": -1, "per_device_train_batch_size": 2} | config
    trainer = trainer_for("sft", tiny_model(), token_rows("sft", 7), tmp_path, **given)
    trainer.train()
    assert plan(trainer.train_dataset, SFTTrainer, trainer.args, [trainer.model], 1).steps == trainer.state.global_step


# ---- probe


OPD = ("method=opd", "teacher={name_or_path: tiny, from_scratch: true}", "data.eval=null", "train.max_length=100",
       "train.max_completion_length=40", "train.num_generations=8", "train.temperature=1.3")  # fmt: skip


@pytest.mark.parametrize("options", [(), ("train.loss_type=policy_gradient",), ("train.teacher.top_k=3",)])
def test_a_probe_scores_the_student_as_its_own_teacher(folder, options):
    found = checked(*OPD, *options, with_probe=True).probe
    assert found.rollouts.to_itself < 1e-5
    assert abs(found.rollouts.surprise) < 4
    assert not any("standard errors" in warning for warning in found.warnings())


def test_a_probe_sees_rollouts_of_another_distribution(folder, monkeypatch):
    real = rollout.generate
    cold = lambda *args, temperature=None, **options: real(*args, temperature=0.1, **options)  # noqa: E731
    monkeypatch.setattr(rollout, "generate", cold)
    warnings = [*checked(*OPD, with_probe=True).probe.warnings()]
    assert any("standard errors from the student's distribution. The sampler has other" in w for w in warnings)


def test_probe_runs_the_longest_rows_for_real_and_leaves_nothing(folder, monkeypatch):
    write_rows(folder / "rows.jsonl", [{"prompt": "p" * n, "completion": "c"} for n in (3, 40, 7, 30, 5)])
    before = sorted(folder.rglob("*"))
    found = checked("data.eval=null", with_probe=True).probe
    assert (found.rows, found.longest) == (2, 42)
    assert found.peak_bytes > 2**20
    both = f"{found.peak_bytes / 2**30:.2f} GiB at most (estimate: {found.estimate / 2**30:.2f})"
    assert both in next(found.lines())
    assert 0 < found.loss < 20
    assert sorted(folder.rglob("*")) == before


def test_a_probe_takes_options_that_need_what_it_leaves_out(folder):
    """Workers that stay, and a schedule that follows evaluations."""
    options = ("train.dataloader_num_workers=1", "train.dataloader_persistent_workers=true",
               "train.dataloader_prefetch_factor=2", "train.eval_strategy=steps",
               "train.lr_scheduler_type=reduce_lr_on_plateau")  # fmt: skip
    assert checked(*options, with_probe=True).probe.rows == 2


def test_a_probe_takes_packed_rows_and_streams(folder):
    assert checked("train.packing=true", "train.max_length=32", with_probe=True).probe.rows == 2
    stream = ("data.train.streaming=true", "data.eval=null", "train.layout=padded")
    assert checked(*stream, with_probe=True).probe.rows == 2


def test_streams_that_are_mixed_by_weight_are_checked(folder):
    paths = "{path: rows.jsonl, streaming: true, weight: 0.3}, {path: held.jsonl, streaming: true, weight: 0.7}"
    found = checked(f"data.train=[{paths}]", "data.eval=null", with_probe=True)
    assert found.probe.rows == 2
    assert found.tokens.examples == 13


def test_a_probe_takes_rows_of_one_label_and_sends_nothing(folder, monkeypatch):
    """The longest rows are all desirable, which class weights `auto` refuse; a probe makes no repository on the hub."""
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *args: pytest.fail("a repository is made"))
    rows = [{"prompt": f"p{n}", "completion": "c" * (50 if n < 4 else 5), "label": n < 4} for n in range(8)]
    write_rows(folder / "rows.jsonl", rows)
    kto = ("method=kto", "data.eval=null", "train.desirable_weight=auto", "train.push_to_hub=true")
    assert checked(*kto, with_probe=True).probe.rows == 2


def test_blank_lines_of_a_sample_are_kept(folder):
    write_rows(folder / "rows.jsonl", [{"prompt": "a\n\nb", "completion": "c"}])
    assert "\n  a\n\n  b[[c<|im_end|>]]\n" in checked("data.eval=null").text(color=False)


def test_what_training_would_refuse_is_refused_unless_it_is_planned_for_elsewhere(folder, capsys):
    """No weights: here it could not train; for a launch by a file, perhaps on another machine, that is no matter."""
    scratch, zero2 = "model.from_scratch=false", Path(run.__file__).parents[1] / "accelerate_configs/zero2.yaml"
    assert run.main(["recipe.yaml", "--check", scratch]) == 2
    assert "tiny" in capsys.readouterr().err
    assert run.main(["recipe.yaml", "--check", scratch, "--config_file", str(zero2), "--device_memory", "80"]) == 0
    assert "8 processes" in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "gib", "expected"), [({}, 80, False), ({}, 0.001, True), ({"": True}, 80, True)])
def test_activation_checkpointing_is_shown_as_a_run_chooses_it(asked, gib, expected, folder):
    """A GPU that has room for all activations goes without, where the recipe leaves it open."""
    changes = [f"train.activation_checkpointing={value}" for value in asked.values()]
    zero2 = Path(run.__file__).parents[1] / "accelerate_configs/zero2.yaml"
    found = checked(*changes, config_file=zero2, memory_gib=gib)
    assert {**found.defaulted, **found.given}["activation_checkpointing"] is expected


def test_kl_by_position_is_that_of_full_logits(tmp_path):
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    rows = token_rows("opd", 4)
    trainer = trainer_for(
        "opd", student, rows, tmp_path, second=teacher, max_completion_length=KL_SPAN + 8, max_length=99
    )
    seen = []
    window = trainer.rollouts.window
    trainer.rollouts.window = lambda *args: seen.extend(window(*args)) or seen
    found = sample_rollouts(trainer, trainer.train_dataset)
    [batch] = seen
    by_position = {}
    for n in range(4):
        document = rows_of(batch, n)
        logps = [torch.log_softmax(m(document["ids"]).logits[0], -1) for m in (student, teacher)]
        kl = (logps[0].exp() * (logps[0] - logps[1])).sum(-1)[document["start"] - 1 : -1]
        assert len(kl) in found.lengths
        for place, value in enumerate(kl.tolist()):
            by_position.setdefault(place // KL_SPAN, []).append(value)
    expected = [sum(values) / len(values) for _, values in sorted(by_position.items())]
    assert found.kl_by_position == pytest.approx(expected, rel=1e-4)


def rows_of(batch, n):
    """Prompt and rollout n of a laid-out batch, [1, L], and where the rollout starts."""
    owner, flat = batch["owner"], batch["input_ids"].flatten()
    scored = batch["scored"][owner == n]
    targets = batch["shift_labels"].flatten()[scored]
    first = int(scored[0])
    start = int(batch["position_ids"].flatten()[first])
    prompt = flat[first - start : first + 1]
    return {"ids": torch.cat([prompt, targets])[None], "start": start + 1}


@pytest.mark.parametrize(
    ("has", "given", "said"),
    [("amx_bf16", [], True), (None, [], False), ("avx512_bf16", ["train.bf16=false"], False),
     ("avx512_bf16", ["train.bf16=true"], False)],
)  # fmt: skip
def test_a_processor_that_multiplies_bf16_is_named(has, given, said, folder, monkeypatch):
    notes = [note for note in check(load_recipe("recipe.yaml", given)).notes if "train.bf16=true" in note]
    assert not notes  # so small a model is not quicker
    monkeypatch.setattr("hf_posttrain.check._BF16_MIN_WIDTH", 1)
    monkeypatch.setattr("hf_posttrain.scoring.cpu.bf16_instructions", lambda: has)
    notes = [note for note in check(load_recipe("recipe.yaml", given)).notes if "train.bf16=true" in note]
    assert [f"this processor has {has}" in note for note in notes] == [True] * said


@pytest.mark.parametrize(("has", "given", "said"), [
    (False, "true", True), (False, "false", False), (True, "true", False), (None, "true", False),
])  # fmt: skip
def test_bf16_on_a_processor_without_it_is_told_to_be_slow(has, given, said, folder, monkeypatch, caplog):
    known = {} if has is None else {"avx512_bf16": has, "amx_bf16": False}  # other names on ARM
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: known)
    recipe = load_recipe("recipe.yaml", [f"train.bf16={given}"])
    notes = [note for note in check(recipe).notes if "set train.bf16=false" in note]
    assert len(notes) == said
    assert run.main(["recipe.yaml", f"train.bf16={given}", "train.max_steps=1"]) == 0
    assert caplog.text.count("slow: this processor has no bf16 instructions") == said


# ---- mixtures of experts


@pytest.mark.slow
def test_experts_that_lora_leaves_are_told_and_trained_as_advised(folder, no_weights, capsys, monkeypatch):
    """The advice of --check trains the experts, and an option that does not fit them ends both in the same line."""
    tiny("gpt_oss").save_pretrained("tiny")
    moe = ["model.from_scratch=false", "train.learning_rate=1e-2", "data.eval=null"]
    [line] = checked(*moe, "model.lora={r: 2}").adapter
    advice = "To train fused experts, set target_parameters: "
    assert line.count(advice) == 1
    assert run.main(["recipe.yaml", "--check", *moe, "model.lora={r: 2}"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(advice) == 1
    lora = f"model.lora={{r: 2, target_parameters: {line.partition(advice)[2]}}}"
    [line] = checked(*moe, lora).adapter
    assert "experts.down_proj" not in line
    dropout = ["recipe.yaml", *moe, lora, "model.lora.dropout=0.1"]
    assert run.main([*dropout, "--check"]) == 2
    said = capsys.readouterr().err
    assert "an adapter on fused experts does not work with lora_dropout != 0. Change this option, or remove" in said
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert run.main(dropout) == 2
    assert capsys.readouterr().err.splitlines()[-1] == said.splitlines()[-1]
    assert run.main(["recipe.yaml", *moe, lora]) == 0
    capsys.readouterr()
    weights = load_file("out/adapter_model.safetensors")
    trained = [name for name, weight in weights.items() if "lora_B" in name and weight.any()]
    assert len([name for name in trained if ".experts." in name]) == 2 * 4  # two parameters in each of four layers
