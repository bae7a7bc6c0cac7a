"""The command: exit codes, messages before anything heavy, the order of steps, what is resumed, what is left behind."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from rows_for_tests import raw_row
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import CHATML, bos_tokenizer, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import hf_posttrain
from hf_posttrain import SFTTrainer, report, run
from hf_posttrain.check import auto_checkpointing
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe import build
from hf_posttrain.recipe.fields import train_fields
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.trainer import rules
from hf_posttrain.trainer.checkpoint import find_checkpoint

REPOSITORY = Path(__file__).parents[1]
SFT = """\
method: sft
model: {name_or_path: tiny, from_scratch: true}
data:
  train: {path: rows.jsonl, columns: {prompt: question, completion: answer}}
train: {output_dir: out, max_steps: 2, save_steps: 1, per_device_train_batch_size: 2, use_cpu: true}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with sft.yaml, rows.jsonl, a model `tiny` and a teacher `other` of another vocabulary."""
    for name, tokenizer in (("tiny", byte_tokenizer()), ("other", bos_tokenizer())):
        Qwen3Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            intermediate_size=64, vocab_size=300,
        ).save_pretrained(tmp_path / name)  # fmt: skip
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"question": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sft.yaml").write_text(SFT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def needs(method):
    """What a method's recipe says beyond that of SFT."""
    teacher = ["teacher={name_or_path: tiny, from_scratch: true}"] if METHODS[method].second == "teacher" else []
    return [*teacher, *(["train.max_completion_length=8"] if METHODS[method].rows.sampled else [])]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_an_adapter_on_a_4bit_base_from_its_recipe(method, folder):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}  # 4-bit blocks are of 64 weights
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny", **shape)).save_pretrained("tiny")
    row = raw_row(METHODS[method].rows, "1 + 1 = ", "2", "3")
    Path("rows.jsonl").write_text("\n".join(json.dumps(row | {"prompt": f"{i} + 1 = "}) for i in range(8)))
    teacher = "\nteacher: {name_or_path: tiny, quantization: 4bit}" if METHODS[method].second == "teacher" else ""
    Path("run.yaml").write_text(
        f"method: {method}\nmodel: {{name_or_path: tiny, quantization: 4bit, lora: {{r: 4}}}}{teacher}\n"
        "data: {train: {path: rows.jsonl}}\ntrain: {output_dir: out, max_steps: 1, use_cpu: true, logging_steps: 1}\n"
    )
    assert run.main(["run.yaml", *[given for given in needs(method) if not given.startswith("teacher=")]]) == 0
    [log] = [log for log in json.loads(Path("out/trainer_state.json").read_text())["log_history"] if "loss" in log]
    assert log["grad_norm"] > 0 or method in ("opd", "kto")  # of a teacher or a partner that is the student itself
    assert Path("out/adapter_model.safetensors").exists()


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test where a model is loaded."""
    from hf_posttrain.models import load as models

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_model", load)


def error_line(capsys, *arguments):
    """main's message, after checking its exit code 2 and that the message is one line."""
    assert run.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_run_validates_its_options_once(folder, monkeypatch):
    """From the recipe to the end of training: the trainer does not repeat what the recipe has checked."""
    calls = []
    check = rules.value_problems
    monkeypatch.setattr(rules, "value_problems", lambda values: [*check(values), calls.append(1)][:-1])
    assert run.main(["sft.yaml"]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "error: there is no recipe bad.yaml"),
        ("method: [\n", "error: bad.yaml:2: YAML syntax error"),
        (
            SFT.replace("train: {path", "trian: {path"),
            "error: bad.yaml:4: unknown key data.trian; did you mean 'train'?",
        ),
        (
            SFT.replace("from_scratch: true", "from_scratch: 3"),
            "error: bad.yaml:2: model.from_scratch must be true or false",
        ),
    ],
)
def test_exit_code_2_from_python_m(folder, text, message):
    if text:
        (folder / "bad.yaml").write_text(text)
    command = [sys.executable, "-X", "importtime", "-m", "hf_posttrain.run", "bad.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert "torch" not in done.stderr


def test_console_script_and_help(folder, capsys):
    script = "import sys; from hf_posttrain.run import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script, "x.yaml"], env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 2
    with pytest.raises(SystemExit) as left:
        run.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "model.lora=null" in shown
    assert "--preprocess-only" in shown


def test_help_imports_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "hf_posttrain.run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0
    assert "torch" not in done.stderr
    assert "transformers" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.beta=1"], "command line: '--train.beta=1' must have the form section.key=value"),
        (["train.learning_rte=1"], "command line: unknown key train.learning_rte; did you mean 'learning_rate'?"),
        (["train.max_steps=5e-7"], "command line: train.max_steps must be a whole number, not 5e-07"),
        (
            ["train.load_best_model_at_end=true"],
            "command line: train.load_best_model_at_end: true requires rows to evaluate on. Set data.eval",
        ),
        (
            ["train.resume_from_checkpoint=out/x"],
            "command line: train.resume_from_checkpoint: there is no folder out/x",
        ),
        (["data.train.path=row.jsonl"], "rows.jsonl"),
        (["data.train.path=empty.jsonl"], "empty"),
        (["data.train.path=bad.jsonl"], "command line: train (bad.jsonl), row 1 (line 3): column 'completion'"),
        (["data.train.columns={prompt: qestion, completion: answer}"], "question"),
        (["data.train.columns=null"], "sft.yaml:4: "),
        (["model.name_or_path=tinny"], "did you mean 'tiny'?"),
        (
            ["model.from_scratch=false", "model.lora.dropuot=0.1"],
            "command line: unknown key model.lora.dropuot; did you mean 'dropout'?",
        ),
    ],
)
def test_mistakes_end_before_the_model_loads(folder, no_weights, capsys, overrides, message):
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"question": "q", "answer": "a"}\n\n{"question": "q", "answer": 5}\n')
    assert message in error_line(capsys, "sft.yaml", *overrides)


def test_teacher_with_another_vocabulary_ends_before_the_model_loads(folder, no_weights, capsys, monkeypatch):
    stub_method(monkeypatch, "kd")
    line = error_line(capsys, "sft.yaml", "method=kd", "teacher={name_or_path: other, from_scratch: true}")
    assert line.startswith("error: command line: student and teacher have different vocabularies")


def test_other_ranks_leave_it_to_the_first_to_say_what_is_wrong(folder, capsys, monkeypatch):
    """They are ended when it ends; one that is not ended has a mistake of its own."""
    waited = []
    monkeypatch.setattr(run.time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    assert run.main(["none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no recipe none.yaml")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run.main(["none.yaml"]) == 2
    assert waited == [(run.ERROR_DELAY, "")]
    assert capsys.readouterr().err.startswith("error: there is no recipe none.yaml")


@pytest.mark.parametrize("place", ["rows.jsonl", "rows.jsonl/deeper", "/proc/none"])
def test_an_output_dir_that_cannot_be_made_ends_before_the_model_loads(folder, no_weights, capsys, place):
    line = error_line(capsys, "sft.yaml", f"train.output_dir={place}")
    assert line.startswith("error: command line: train.output_dir: ")
    assert "rows.jsonl is a file" in line or "/proc/none cannot be created" in line


def test_a_folder_of_checkpoints_is_no_checkpoint(folder, no_weights, capsys):
    (folder / "old" / "checkpoint-3").mkdir(parents=True)
    line = error_line(capsys, "sft.yaml", "train.resume_from_checkpoint=old")
    assert "old is a folder with checkpoints. Set one of them, or auto" in line


@pytest.mark.slow
def test_true_resumes_as_in_transformers_where_there_is_a_checkpoint(folder, capsys):
    line = error_line(capsys, "sft.yaml", "train.resume_from_checkpoint=true")
    assert (
        "resume_from_checkpoint: true requires a checkpoint in out. To start a new run if there is none, set auto"
        in line
    )
    assert run.main(["sft.yaml", "train.resume_from_checkpoint=false"]) == 0
    capsys.readouterr()
    longer = "train.max_steps=3", "train.resume_despite=max_steps"
    assert run.main(["sft.yaml", "train.resume_from_checkpoint=true", *longer]) == 0
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_keeps_its_metrics(folder, capsys):
    run.main(["sft.yaml"])
    metrics = (folder / "out/all_results.json").read_text()
    assert json.loads(metrics)["train_loss"] > 0
    capsys.readouterr()
    run.main(["sft.yaml", "train.resume_from_checkpoint=auto"])
    assert (folder / "out/all_results.json").read_text() == metrics
    assert "already complete, nothing left to train" in "".join(capsys.readouterr())


def test_ctrl_c_is_130(folder, monkeypatch):
    def interrupted(recipe):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    assert run.main(["sft.yaml"]) == 130


@pytest.mark.parametrize(
    ("arguments", "module", "function"),
    [
        (["sft.yaml"], "hf_posttrain.run", "run"),
        (["sft.yaml", "--preprocess-only"], "hf_posttrain.run", "preprocess"),
        (["sft.yaml", "--check"], "hf_posttrain.check", "check"),
        (["data", "rows.jsonl"], "hf_posttrain.commands.data", "describe_file"),
        (["compare", "a", "b"], "hf_posttrain.report.compare", "read_run"),
        (["nothing.yaml"], "hf_posttrain.run", "load_recipe"),
    ],
)
def test_an_error_that_nobody_foresaw_is_3_with_its_traceback_in_a_file(
    folder, capsys, monkeypatch, arguments, module, function
):
    def broken(*args, **kwargs):
        raise ValueError("a bug\x1b[2J\nof ours")

    monkeypatch.setattr(f"{module}.{function}", broken)
    monkeypatch.setattr(run.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(sys, "argv", ["hf-posttrain", *arguments, "train.hub_token=secret"])
    assert run.main(arguments) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ValueError: a bug\\x1b[2J of ours. This error is unexpected. Please report it")
    [file] = folder.rglob("crash.txt")
    # a training leaves it in its output_dir; everything else writes nothing there
    assert (file.parent == Path("out").resolve()) == (arguments == ["sft.yaml"])
    text = file.read_text()
    assert str(file.name) in line
    assert "in broken" in text
    assert f"hf-posttrain {arguments[0]}" in text
    assert "secret" not in text


def test_an_error_of_the_system_is_3_unless_the_disk_is_full(folder, capsys, monkeypatch):
    for number, code in ((errno.ECONNREFUSED, 3), (errno.ENOSPC, 2)):

        def broken(recipe, number=number):
            raise OSError(number, os.strerror(number), "out/file")

        monkeypatch.setattr(run, "run", broken)
        assert run.main(["sft.yaml"]) == code
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_rank_leaves_its_own_traceback(folder, capsys, monkeypatch):
    def broken(recipe):
        raise ValueError(f"a bug on rank {os.environ['RANK']}")

    monkeypatch.setattr(run, "run", broken)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run.main(["sft.yaml"]) == 3
        assert f"a bug on rank {rank}" in Path(f"out/crash_rank_{rank}.txt").read_text()


def test_memory_that_runs_out_is_no_fault_of_ours(folder, capsys, monkeypatch):
    def broken(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(run, "run", broken)
    assert run.main(["sft.yaml"]) == 2
    assert "Out of memory in docs/guides/troubleshooting.md" in capsys.readouterr().err


def test_a_traceback_that_no_file_takes_is_printed(folder, capsys, monkeypatch):
    def broken(recipe):
        raise ValueError("a bug")

    monkeypatch.setattr(run, "run", broken)
    assert run.main(["sft.yaml", "train.output_dir=rows.jsonl"]) == 3
    shown = capsys.readouterr().err
    assert "in broken" in shown
    assert shown.splitlines()[-1].endswith("(above)")


def test_fp16_is_refused_without_a_gpu_and_checked_for_one(folder, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "fp16 requires a GPU" in error_line(capsys, "sft.yaml", "train.fp16=true")
    assert run.main(["sft.yaml", "train.fp16=true", "train.use_cpu=false", "--check"]) == 0


def test_bf16_trains_on_the_cpu_where_that_is_all_there_is(folder):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run.main(["sft.yaml", "train.bf16=true", "train.use_cpu=false", "train.max_steps=1"]) == 0


def test_what_torch_would_refuse_later_is_refused_at_once(folder, capsys):
    flexible = error_line(capsys, "sft.yaml", "model.attn_implementation=flex_attention")
    assert "flex_attention is not supported on CPU" in flexible
    assert "unknown section modle; did you mean 'model'?" in error_line(capsys, "sft.yaml", "modle=")
    compiled = ["sft.yaml", "train.torch_compile=true"]
    backend = error_line(capsys, *compiled, "train.torch_compile_backend=aot_eagr", "--check")
    assert "torch_compile_backend='aot_eagr' is not a backend of torch; did you mean 'aot_eager'?" in backend
    assert "did you mean 'max-autotune'?" in error_line(capsys, *compiled, "train.torch_compile_mode=max-autotun")


def test_our_warnings_are_labelled_and_noise_of_others_is_left_out(monkeypatch):
    record = logging.LogRecord("hf_posttrain.monitoring", logging.WARNING, "f", 1, "the loss is %s", ("odd",), None)
    assert run.LabeledFormatter().format(record) == "warning: the loss is odd"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run.LabeledFormatter().format(record) == "\033[33mwarning:\033[0m the loss is odd"
    for name, level in (("hf_posttrain.run", logging.INFO), ("other", logging.WARNING)):
        record.name, record.levelno = name, level
        assert run.LabeledFormatter().format(record) == "the loss is odd"
    with warnings.catch_warnings(record=True) as heard:
        run.set_up_messages()
        warnings.warn("`is_gradient_checkpointing` will be removed", FutureWarning, stacklevel=1)
        warnings.warn("the disk burns", stacklevel=1)
    assert [str(each.message) for each in heard] == ["the disk burns"]


def test_a_message_that_another_package_prints_is_not_printed_twice(capfd):
    script = "from hf_posttrain import run; run.set_up_messages(); import logging, huggingface_hub, datasets;"
    script += "logging.getLogger('silent').addHandler(logging.NullHandler());"  # as urllib3 has one
    script += "[logging.getLogger(f'{name}.x').warning(f'of {name}') for name in names]"
    names = ["huggingface_hub", "datasets", "hf_posttrain", "silent", "other"]
    subprocess.run([sys.executable, "-c", f"names = {names}; {script}"], check=True)
    shown = capfd.readouterr().err
    assert {name: shown.count(f"of {name}") for name in names} == dict.fromkeys(names, 1)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        run.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hf-posttrain {hf_posttrain.__version__}\n"


def test_a_port_in_use_is_no_fault_of_ours(folder, capsys, monkeypatch):
    def broken(recipe):
        raise torch.distributed.DistNetworkError("The server socket has failed to listen: EADDRINUSE")

    monkeypatch.setattr(run, "run", broken)
    assert run.main(["sft.yaml"]) == 2
    assert "EADDRINUSE. To change a port in use, set accelerate launch --main_process_port" in capsys.readouterr().err


def stub_method(monkeypatch, name):
    """The method becomes a Config that is SFT's and a Trainer that records its arguments."""
    from hf_posttrain.methods.sft import SFTConfig

    made = []

    class Trainer:
        preemption, has_trained, stopped = types.SimpleNamespace(preempted=False), True, None
        method, state = METHODS["sft"], types.SimpleNamespace(log_history=[], global_step=2, best_global_step=None)

        @staticmethod
        def prepare(rows, tokenizer, args, name_of_rows):
            return prepare(rows, METHODS[name], tokenizer, args, name_of_rows)

        def __init__(self, **kwargs):
            self.args, self.done, self.model = kwargs["args"], [], kwargs["model"]
            made.append((kwargs, self.done))

        def train(self, resume_from_checkpoint):
            self.done.append(("train", resume_from_checkpoint))
            return types.SimpleNamespace(metrics={"train_loss": 1.0})

        def evaluate(self):
            self.done.append("evaluate")
            return {"eval_loss": 2.0}

        def save_model(self):
            self.done.append("save_model")
            Path(self.args.output_dir).mkdir(exist_ok=True)

        def save_state(self):
            self.done.append("save_state")

        def save_metrics(self, split, metrics):
            self.done.append((split, metrics))

        def log_metrics(self, split, metrics): ...

        def is_world_process_zero(self):
            return True

    monkeypatch.setattr(auto_checkpointing, "disable_unneeded_checkpointing", lambda *given: None)
    monkeypatch.setattr(build, "config_class", lambda method: SFTConfig)
    monkeypatch.setattr(build, "trainer_class", lambda method: Trainer)
    monkeypatch.setattr(report, "follow", lambda trainer: None)
    monkeypatch.setattr(report, "write", lambda folder: made[-1][1].append("report"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "evaluations"),
    [(["train.eval_steps=1"], 2), (["train.eval_strategy=no"], 1),
     (["train.eval_steps=1", "train.load_best_model_at_end=true", "train.learning_rate=0.5", "train.seed=1"], 3)],
)  # fmt: skip
def test_the_last_step_is_evaluated_once(folder, monkeypatch, overrides, evaluations):
    """Unless the weights are those of another step by then, as the best ones of a rate that is too high."""
    made, real = [], SFTTrainer.evaluate
    monkeypatch.setattr(SFTTrainer, "evaluate", lambda self, *a, **k: made.append(real(self, *a, **k)) or made[-1])
    run.main(["sft.yaml", "data.eval={path: rows.jsonl, columns: {prompt: question, completion: answer}}",
              "train.eval_strategy=steps", *overrides])  # fmt: skip
    assert len(made) == evaluations
    kept = json.loads(Path("out/all_results.json").read_text())
    assert {key: kept[key] for key in made[-1]} == made[-1]
    assert kept["eval_loss"] > 0


def test_steps_of_a_distillation_run(folder, monkeypatch):
    made = stub_method(monkeypatch, "kd")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny")).save_pretrained("base")
    byte_tokenizer().save_pretrained("base")
    overrides = ["method=kd", "model={name_or_path: base, lora: {r: 2}}",
                 "teacher={name_or_path: tiny, from_scratch: true, offload: true}", "data.eval.path=rows.jsonl",
                 "data.eval.columns={prompt: question, completion: answer}"]  # fmt: skip
    metrics = run.run(load_recipe("sft.yaml", overrides))
    ((given, done),) = made
    assert metrics == {"train_loss": 1.0, "eval_loss": 2.0}
    assert done == [("train", None), "save_model", ("train", {"train_loss": 1.0}), "evaluate",
                    ("eval", {"eval_loss": 2.0}), "save_state", "report"]  # fmt: skip
    assert len(given["train_dataset"]) == len(given["eval_dataset"]) == 8
    assert "prompt_ids" in given["train_dataset"].column_names
    assert given["peft_config"].r == 2
    assert all(p.requires_grad for p in given["model"].parameters())
    assert not any(p.requires_grad for p in given["teacher_model"].parameters())
    assert not given["teacher_model"].training
    assert given["teacher_offload"] is True
    assert load_recipe("out/recipe.yaml").model.lora == {"r": 2}


def test_the_resolved_recipe_has_the_defaults_that_another_version_may_change(folder, monkeypatch):
    stub_method(monkeypatch, "sft")
    run.run(load_recipe("sft.yaml"))
    given, left = load_recipe("sft.yaml").train, load_recipe("out/recipe.yaml").train
    assert given.items() <= left.items()
    assert (left["learning_rate"], left["max_grad_norm"], left["max_length"]) == (2e-5, 1.0, 1024)
    known = train_fields("sft")
    assert all(left[name] == known[name].default for name in left.keys() - given.keys())
    assert not {"eval_steps", "report_to", "fp16"} & left.keys()
    # it is run again, and leaves the same
    text = Path("out/recipe.yaml").read_text()
    run.run(load_recipe("out/recipe.yaml"))
    again = load_recipe("out/recipe.yaml")
    assert again.train == left
    assert "# not set; these are the defaults" in text


def test_a_run_that_stop_on_ends_exits_with_1_and_saves_no_model(folder, capsys, monkeypatch):
    def losses(self, model, batch):
        found = sft_losses(self, model, batch)
        return dataclasses.replace(found, values=found.values * float("nan"))

    sft_losses = SFTTrainer.losses
    monkeypatch.setattr(SFTTrainer, "losses", losses)
    assert run.main(["sft.yaml", "train.stop_on=nan", "train.logging_steps=1", "train.save_strategy=no"]) == 1
    assert "stopped at step 1 (stop_on: nan)" in capsys.readouterr().err.splitlines()[-1]
    left = {path.name for path in Path("out").iterdir()}
    assert "report.html" in left
    assert not {"model.safetensors", "recipe.yaml", "all_results.json"} & left


def test_a_layer_that_lora_does_not_find_is_told_before_anything_is_written(folder, capsys):
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny")).save_pretrained("base")
    byte_tokenizer().save_pretrained("base")
    for option, problem in (
        ("target_modules: [q_prj, down_proj]", "'q_prj' matches nothing in the model; did you mean 'q_proj'?"),
        ("alpha_pattern: {q_prj: 4}", "'q_prj' matches no layer with an adapter, or only layers that match an earlier"),
        ("trainable_token_indices: [300]", "300 is not one of the 300 tokens of the model"),
    ):
        model = f"model:\n  name_or_path: base\n  lora:\n    {option}\n"
        Path("lora.yaml").write_text(SFT.replace("model: {name_or_path: tiny, from_scratch: true}\n", model))
        key = option.partition(":")[0]
        for check in ([], ["--check"]):
            line = error_line(capsys, "lora.yaml", *check)
            assert line.startswith(f"error: lora.yaml:5: peft_config (model.lora): {key}: {problem}")
    assert not Path("out").exists()


def test_a_report_that_cannot_be_made_is_no_failure(folder, capsys, caplog, monkeypatch):
    def broken(folder):
        raise OSError("no space left")

    monkeypatch.setattr(report, "write", broken)
    assert run.main(["sft.yaml"]) == 0
    assert (
        "the report could not be written (OSError: no space left). To write it, call hf_posttrain.report.write('out')"
        in caplog.text
    )
    assert Path("out/model.safetensors").exists()


def test_random_weights_are_drawn_from_the_seed(folder, monkeypatch):
    made = stub_method(monkeypatch, "sft")
    for seed in (1, 1, 2):
        run.run(load_recipe("sft.yaml", [f"train.seed={seed}"]))
    first, same, other = (given["model"].get_input_embeddings().weight for given, _ in made)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def checkpoint(path, *without):
    path.mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, path / name)
    for name, text in (("config.json", "{}"), ("trainer_state.json", '{"global_step": 1}')):
        (path / name).write_text(text)
    for name in without:
        (path / name).unlink()
    return str(path)


def test_newest_complete_checkpoint(tmp_path, caplog):
    assert find_checkpoint(tmp_path / "none") is None
    good = checkpoint(tmp_path / "checkpoint-9")
    checkpoint(tmp_path / "checkpoint-5")
    checkpoint(tmp_path / "checkpoint-10", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    checkpoint(tmp_path / "checkpoint-11", "trainer_state.json")
    checkpoint(tmp_path / "checkpoint-12", "model.safetensors")
    Path(checkpoint(tmp_path / "checkpoint-13"), "trainer_state.json").write_text('{"global_st')
    checkpoint(tmp_path / "checkpoint-14-tmp")
    assert find_checkpoint(tmp_path) == good
    assert "checkpoint-13 is incomplete, without trainer_state.json. It is skipped" in caplog.text
    assert "checkpoint-10 is incomplete, without optimizer, scheduler, random state. It is skipped" in caplog.text


def test_what_is_resumed(folder, caplog, monkeypatch):
    made = stub_method(monkeypatch, "sft")
    caplog.set_level("INFO", "hf_posttrain")
    assert find_checkpoint("out") is None
    path = checkpoint(folder / "out/checkpoint-1")
    assert find_checkpoint("out") == "out/checkpoint-1"
    run.run(load_recipe("sft.yaml", ["train.resume_from_checkpoint=auto"]))
    run.run(load_recipe("sft.yaml", [f"train.resume_from_checkpoint={path}"]))
    assert [done[0] for _, done in made] == [("train", "auto"), ("train", path)]  # auto: the first rank decides
    Path(path, "optimizer.pt").unlink()
    with pytest.raises(InputError, match=r"command line: the checkpoint .* is incomplete, without optimizer"):
        run.run(load_recipe("sft.yaml", [f"train.resume_from_checkpoint={path}"]))


def test_a_warning_about_the_data_is_logged_once(folder, caplog):
    """By `prepare`; the audit, which finds it again, stores it for the report."""
    byte_tokenizer(CHATML).save_pretrained("tiny")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run.main(["sft.yaml", "data.train.columns=null", "train.chat_template_kwargs={mode: x}"]) == 0
    warning = "train (rows.jsonl): the chat template does not use: chat_template_kwargs 'mode' (in 4 examples)"
    assert caplog.messages.count(warning) == 1
    assert json.loads(Path("out/audit.json").read_text())["warnings"].count(warning) == 1


def test_sft_end_to_end_leaves_everything_and_resumes(folder, capsys, caplog):
    assert run.main(["sft.yaml", "train.logging_steps=1"]) == 0
    counts = [line for line in caplog.messages if "rows read" in line]  # once, before the model is loaded
    assert counts == ["train (rows.jsonl): 8 rows read, 0 truncated (max_length 1024), 0 dropped"]
    left = {path.name for path in Path("out").iterdir()}
    assert left >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "recipe.yaml",
                    "trainer_state.json", "all_results.json", "checkpoint-1", "checkpoint-2", "report.html",
                    "curves.png", "README.md", "audit.json", "samples.json"}  # fmt: skip
    assert "train (rows.jsonl): tokens p50 10 p95 10 max 10" in caplog.messages  # "0 + 1 = 1" and its end
    assert json.loads(Path("out/audit.json").read_text())["data"]["train"]["rows_read"] == 8
    assert AutoModelForCausalLM.from_pretrained("out").generation_config.eos_token_id == 258
    assert AutoTokenizer.from_pretrained("out").eos_token == "<|im_end|>"
    assert json.loads(Path("out/all_results.json").read_text())["train_loss"] > 0
    longer = ["out/recipe.yaml", "train.resume_from_checkpoint=auto", "train.max_steps=3"]
    assert "max_steps: then 2, now 3" in error_line(capsys, *longer)  # a linear rate would have ended elsewhere
    assert run.main([*longer, "train.resume_despite=max_steps"]) == 0
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 3


RESUMED = [  # key of a recipe, changed between run and resume -> what is said of it; None: it changes no number
    ("data.train.limit=4", "train_dataset: then '8 rows"), ("data.train.split=train[:5]", "train_dataset"),
    ("data.train.weight=2", "train_dataset"),
    ("data.train.columns={prompt: answer, completion: question}", "train_data"),
    ("data.train.streaming=true", "train_dataset"), ("data.train.path=copy.jsonl", None), ("data.eval.limit=2", None),
    ("model.name_or_path=moved", None), ("model.dtype=bfloat16", "model.dtype: then 'torch.float32', now"),
    ("model.attn_implementation=eager", None), ("data.train.path=pairs.jsonl", "no column 'question'"),
    ("model.trust_remote_code=true", None), ("train.seed=7", "seed: then 42, now 7"), ("train.merge_lora=false", None),
    ("method=cpo", "method: then 'sft', now 'cpo'"),
]  # fmt: skip


def test_a_folder_in_the_place_of_a_file_is_told(folder, capsys):
    (folder / "zero").mkdir()
    assert "there is no file zero: it is a folder" in error_line(capsys, "sft.yaml", "--check", "--config_file", "zero")


@pytest.mark.slow
def test_a_stream_is_resumed_with_its_limits_and_weights(folder, capsys):
    usual = ["sft.yaml", "data.train.streaming=true", "data.train.limit=8"]
    assert run.main(usual) == 0
    shutil.rmtree("out/checkpoint-2")
    again = [*usual, "data.train.limit=7", "train.resume_from_checkpoint=auto"]
    assert "data.0.limit: then 8, now 7" in error_line(capsys, *again)
    assert run.main([*again, "train.resume_despite=[data, train_dataset]"]) == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [pytest.param(*row, marks=[] if n in (0, 5, 7) else pytest.mark.slow) for n, row in enumerate(RESUMED)],
)
def test_a_key_of_a_recipe_is_refused_or_changes_nothing(folder, capsys, changed, said):
    (folder / "copy.jsonl").write_text((folder / "rows.jsonl").read_text())
    shutil.copytree(folder / "tiny", folder / "moved")
    rows = [{"prompt": f"{i} + 1 = ", "chosen": "1", "rejected": "2"} for i in range(8)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    usual = ["sft.yaml", "data.eval={path: rows.jsonl, columns: {prompt: question, completion: answer}}"]
    assert run.main(usual) == 0
    weights = load_file("out/model.safetensors")
    shutil.rmtree("out/checkpoint-2")
    if changed.startswith("method"):
        usual = ["sft.yaml", "data.train={path: pairs.jsonl}"]
    again = [*usual, changed, "train.resume_from_checkpoint=auto"]
    if said is None:
        assert run.main(again) == 0
        for name, tensor in load_file("out/model.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-7)
    else:
        assert said in error_line(capsys, *again)


@pytest.mark.parametrize(
    ("method", "rows", "expected"),
    [
        ("kto", [{"prompt": "a", "completion": "b", "label": True}] * 3, "all 3 rows have the same prompt"),
        ("kto", [{"prompt": "a", "completion": "b", "label": "yes"}] * 3, "expected true or false"),
        ("dpo", [{"prompt": "a", "chosen": "b"}] * 3, "column 'rejected' is missing. dpo reads prompt + chosen"),
        ("sft", [{"messages": [{"role": "user"}]}] * 3, "row 0 (line 1): column 'messages': message 0"),
        ("sft", [{"messages": "user: hello"}] * 3, "expected a list of messages"),
        ("opd", [{"prompt": 5}] * 3, "expected a string or a list of messages"),
        *((method, [{"question": "a"}] * 3, f"are not supported by {method}") for method in METHODS),
    ],
)
def test_bad_rows_end_before_a_model_is_loaded(folder, no_weights, capsys, method, rows, expected):
    (folder / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = error_line(capsys, "sft.yaml", f"method={method}", "data.train={path: bad.jsonl}", *needs(method))
    assert "bad.jsonl" in line
    assert expected in line


def test_a_stream_for_kto_with_automatic_weights_ends_before_a_model_is_loaded(folder, no_weights, capsys):
    (folder / "rows2.jsonl").write_text(
        "\n".join(json.dumps({"prompt": str(i), "completion": "b", "label": True}) for i in range(3))
    )
    stream = "data.train={path: rows2.jsonl, streaming: true}"
    line = error_line(capsys, "sft.yaml", "method=kto", stream, "train.desirable_weight=auto")
    assert "desirable_weight or undesirable_weight: auto cannot be combined with a stream of rows" in line


def test_an_output_dir_that_is_a_file_is_refused(folder, no_weights, capsys):
    (folder / "out").write_text("mine")
    assert "out is a file, not a folder" in error_line(capsys, "sft.yaml")
    assert (folder / "out").read_text() == "mine"


def test_unquoted_no_and_options_of_another_method(folder, no_weights, capsys):
    line = error_line(capsys, "sft.yaml", "train.eval_strategy=no", "train.loss_type=sigmoid")
    assert "train.loss_type='sigmoid' is not one of nll, chunked_nll, dft" in line


def test_messages_without_a_chat_template_end_before_a_model_is_loaded(folder, no_weights, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    for path in (folder / "tiny").glob("chat_template*"):
        path.unlink()
    tokenizer.save_pretrained(folder / "tiny")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "chat.jsonl").write_text(json.dumps(row))
    line = error_line(capsys, "sft.yaml", "data.train={path: chat.jsonl}")
    assert "Set model.chat_template (--chat_template) to a" in line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.eval_strategy=steps"],
            "command line: train.eval_strategy: steps requires rows to evaluate on. Set data.eval",
        ),
        (
            ["train.eval_on_start=true"],
            "command line: train.eval_on_start: true requires rows to evaluate on. Set data.eval",
        ),
        (
            ["train.eval_exact_match=true"],
            "command line: train.eval_exact_match: true requires rows to evaluate on. Set data.eval",
        ),
        (["train.save_strategy=best"], "command line: train.save_strategy: best requires metric_for_best_model"),
        (
            ["data.train.streaming=true", "train.max_steps=-1"],
            "command line: data.train.streaming: true requires train.max_steps",
        ),
        (
            ["data.train=[{path: rows.jsonl}, {path: rows.jsonl, streaming: true}]", "train.max_steps=-1"],
            "command line: data.train.1.streaming: true requires train.max_steps",
        ),
    ],
)
def test_contradictions_end_before_the_tokenizer_loads(folder, monkeypatch, capsys, overrides, message):
    def load(recipe):
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(build, "check_models", load)
    assert error_line(capsys, "sft.yaml", *overrides).startswith("error: " + message)


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", {"text": "2+2=4"}),
        ("sft", {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}),
        ("opd", {"prompt": "2+2="}),
    ],
)
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_rows_without_prompt_or_answer_are_refused_for_exact_match(folder, no_weights, capsys, method, row, streaming):
    (folder / "eval.jsonl").write_text(json.dumps(row))
    overrides = [f"data.eval={{path: eval.jsonl, streaming: {streaming}}}", "train.eval_exact_match=true"]
    line = error_line(capsys, "sft.yaml", f"method={method}", *overrides, *needs(method))
    assert line == "error: command line: eval_exact_match requires eval rows with a prompt and an answer"


@pytest.mark.slow
def test_streamed_strings_as_chat_end_to_end(folder):
    assert run.main(["sft.yaml", "data.train.streaming=true", "train.apply_chat_template=true"]) == 0
    assert json.loads(Path("out/all_results.json").read_text())["train_loss"] > 0
