"""A checkpoint is resumed by the run that wrote it: every other setting is refused by name, or changes no number.

The hunter `test_every_option_is_refused_or_changes_nothing` changes each option of a Config between run and resume.
"""

import copy
import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from training_for_tests import LORA, METHODS, logged, second_model, token_rows, trainer_for
from transformers import AutoModelForCausalLM

from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods import config_class
from hf_posttrain.models import score_cache
from hf_posttrain.trainer import checkpoint, run_fingerprint

SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3,
    "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random", "lr_scheduler_type": "linear",
    "disable_dropout": False, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 1.0, "logging_steps": 1,
}  # fmt: skip
CHANGED = {  # option -> another value of it, where that cannot be told from the one it has
    "lr_scheduler_type": "cosine", "optim": "sgd", "optim_args": "foreach=False", "optim_target_modules": "all-linear",
    "max_steps": 5, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "warmup_steps": 1,
    "lr_scheduler_kwargs": {}, "neftune_noise_alpha": 5.0, "logging_strategy": "epoch", "save_strategy": "no",
    "eval_strategy": "no", "eval_steps": 1, "eval_delay": 1, "train_sampling_strategy": "sequential",
    "log_level": "error", "log_level_replica": "error", "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "metric_for_best_model": "eval_loss",
    "accelerator_config": {"use_seedable_sampler": False}, "chat_template_kwargs": {"enable_thinking": False},
    "layout": "padded", "stop_on": "nan", "dataloader_num_workers": 1, "max_length": 9, "hub_strategy": "end",
    "data_seed": 7, "debug": "underflow_overflow", "label_names": ["labels"], "dataset_num_proc": 2,
    "include_for_metrics": ["loss"], "router_aux_loss_coef": 0.1, "save_total_limit": 1, "run_name": "other",
    "torch_empty_cache_steps": 1, "resume_despite": "beta", "length_column_name": "tokens", "ddp_timeout": 60,
    "hub_model_id": "a/b", "hub_token": "x", "hub_revision": "x", "trackio_space_id": "a/b", "project": "other",
    "loss_type": {"dpo": "ipo", "kto": "bco", "opd": "policy_gradient"}, "divergence": "reverse_kl",
    "loss_weights": [2.0], "desirable_weight": 1.5, "undesirable_weight": 1.5, "beta": 0.3,
    "sampler": {"batch_size": 1},
    "precompute_ref_batch_size": 3, "teacher": {"top_k": 4, "precompute": True}, "num_generations": 2,
    "lmbda": 0.5, "max_completion_length": 5, "output_dir": None, "eval_accumulation_steps": 1,
    "learning_rate": 5e-4, "num_train_epochs": 7, "adam_beta1": 0.8, "adam_beta2": 0.9, "weight_decay": 0.1,
    "greater_is_better": False, "packing": True, "dataset_text_field": "other", "report_to": "tensorboard",
}  # fmt: skip


REST = {"target_modules": "all-linear", "lora_dropout": 0.1}


def build(method, folder, lora=False, rows=None, model=None, second=None, dropout=0.1, **changed):
    """A trainer of SETTINGS on 13 rows: the checkpoint of step 2 is in the middle of an epoch."""
    torch.manual_seed(3)
    model = model or tiny_model(attention_dropout=dropout)
    adapter = {"peft_config": peft.LoraConfig(**LORA, lora_dropout=0.1)} if lora else {}
    return trainer_for(
        method, model, token_rows(method, 13) if rows is None else rows, folder,
        second=second or second_model(method), eval_rows=token_rows(method, 3, seed=1),
        **adapter | SETTINGS | changed,
    )  # fmt: skip


def outcome(trainer):
    """(losses of the training steps, final weights)."""
    return [log for log in logged(trainer) if "loss" in log], list(trainer.model.parameters())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(method, lora, dropout): (folder, losses, weights) of an uninterrupted run, made once."""
    made = {}

    def get(method, lora=False, dropout=0.1):
        key = method, lora, dropout
        if key not in made:
            trainer = build(method, tmp_path_factory.mktemp(method), lora, dropout=dropout)
            trainer.train()
            made[key] = trainer.args.output_dir, *outcome(trainer)
        return made[key]

    return get


def resume(whole, method, tmp_path, lora=False, dropout=0.1, **changed):
    """The outcome of a run with `changed` that goes on from step 2, in a folder of its own."""
    folder = tmp_path / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(whole(method, lora, dropout)[0], "checkpoint-2"), folder / "checkpoint-2")
    trainer = build(method, folder, lora, dropout=dropout, **changed)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return outcome(trainer)


def another(method, field, now):
    """A value of the option that is not the one it has."""
    value = CHANGED.get(field, ...)
    value = value.get(method) if field == "loss_type" else value
    if value is not ...:
        return value
    if isinstance(now, bool) or now is None:
        return not now
    return now * 2 + 1 if isinstance(now, int | float) else "other"


ASKED_FOR = {  # options that cannot be changed alone on this machine, and what a change of them asks for
    "tf32": "a GPU", "push_to_hub": "the hub",
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "a C++ compiler"),
    "parallelism_config": "several processes", "ddp_backend": "several processes", "deepspeed": "a launcher",
    "dataloader_multiprocessing_context": "workers", "ignore_data_skip": "another order of rows, by its meaning",
    "resume_from_checkpoint": "what `resume` does", "rollout": "vLLM", "sampler": "vllm_colocate",
    "local_rank": "several processes", "teacher_model_name_or_path": "no `teacher_model`",
    "teacher_model_revision": "the hub",
}  # fmt: skip
RANDOM = ("per_device_train_batch_size", "gradient_accumulation_steps", "layout")
"""Options with which dropout draws other numbers: compared without."""


def tried(whole, method, field, tmp_path):
    """ "refused: why" or "equal"; fails where losses or weights differ from those of the uninterrupted run."""
    dropout = 0.0 if field in RANDOM else 0.1
    now = getattr(build(method, tmp_path / "unused").args, field)
    changed = {} if field == "output_dir" else {field: another(method, field, now)}  # `resume` has another output_dir
    if field == "per_device_train_batch_size":
        changed["gradient_accumulation_steps"] = 4
    if field == "gradient_accumulation_steps":
        changed["per_device_train_batch_size"] = 4
    try:
        losses, weights = resume(whole, method, tmp_path, dropout=dropout, **changed)
    except InputError as error:
        message = str(error)
        assert field in message, f"{field}: {message}"  # by the Config itself, or for what differs
        return f"refused: {message}"
    _, expected, expected_weights = whole(method, dropout=dropout)
    expected = {log["step"]: log["loss"] for log in expected}
    assert losses
    for log in losses:
        assert log["loss"] == pytest.approx(expected[log["step"]], rel=1e-5), field
    for one, other in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{field}: {text}")
    return "equal"


def options(method):
    return [f.name for f in dataclasses.fields(config_class(TABLE[method])) if f.init and f.name not in ASKED_FOR]


@pytest.mark.parametrize(
    ("field", "expected"),
    [("max_length", "refused"), ("learning_rate", "refused"), ("max_steps", "refused"), ("seed", "refused"),
     ("layout", "equal"), ("eval_strategy", "equal"), ("save_steps", "equal")],
)  # fmt: skip
def test_an_option_is_refused_or_changes_nothing(field, expected, whole, tmp_path):
    assert tried(whole, "sft", field, tmp_path).partition(":")[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_refused_or_changes_nothing(method, whole, tmp_path, monkeypatch):
    """The hunter: none is accepted and changes a number."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Liger would patch transformers for all later tests
    found = {field: tried(whole, method, field, tmp_path) for field in options(method)}
    refused = [field for field, said in found.items() if said.startswith("refused")]
    print(f"{method}: {len(found)} options changed, {len(refused)} refused, {len(found) - len(refused)} equal")
    # whether something is resumed or not
    refused_at_all = ("is not supported", "needs", "requires", "cannot be combined", "is an option of")
    harmless = [found[field] for field in refused if field in run_fingerprint.UNCOMPARED_OPTIONS]
    assert not [message for message in harmless if not any(said in message for said in refused_at_all)]


def test_the_names_of_what_may_change_exist():
    known = {field.name for method in METHODS for field in dataclasses.fields(config_class(TABLE[method]))}
    assert known | {"eval_dataset"} >= run_fingerprint.UNCOMPARED_OPTIONS | run_fingerprint.EVALUATION_OPTIONS
    assert known >= run_fingerprint.OPTIMIZER_STATE_OPTIONS


# ---- other models, rows and methods


def refusal(whole, tmp_path, method="sft", written_by="sft", **changed):
    """The message that refuses to resume the checkpoint of step 2 of a run of `written_by`."""
    shutil.copytree(Path(whole(written_by)[0], "checkpoint-2"), tmp_path / "checkpoint-2")
    trainer = build(method, tmp_path, **changed)
    with pytest.raises(InputError) as raised:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda: {"method": "dpo", "written_by": "sft"}, "method: then 'sft', now 'dpo'"),
        (lambda: {"rows": token_rows("sft", 12)}, "train_dataset: then '13 rows ("),
        (lambda: {"rows": token_rows("sft", 13, seed=4)}, "train_dataset: then '13 rows ("),
        (lambda: {"model": tiny_model(rms_norm_eps=1e-5, attention_dropout=0.1)}, "model.rms_norm_eps: then 1e-06"),
        (lambda: {"model": tiny_model("llama")}, "model.class: then 'Qwen3ForCausalLM', now 'LlamaForCausalLM'"),
        (lambda: {"lora": True}, "adapter.peft_type: then None, now 'LORA'"),
        (lambda: {"method": "dpo", "written_by": "dpo", "model": tiny_model(seed=1, attention_dropout=0.1)},
         "base_weights: then "),
        (lambda: {"method": "kd", "written_by": "kd", "second": tiny_model(seed=1)}, "second_model: then "),
    ],
)  # fmt: skip
def test_another_run_is_refused_by_what_differs(changed, said, whole, tmp_path):
    message = refusal(whole, tmp_path, **changed())
    assert said in message
    assert "start a new run from its weights (model.name_or_path=" in message
    assert "train.resume_from_checkpoint=null train.output_dir=NEW)" in message


@pytest.mark.parametrize(("part", "refused"), [("non_blocking", False), ("even_batches", True)])
@pytest.mark.parametrize("value", [True, None])
def test_a_checkpoint_resumes_however_its_batches_were_copied_to_the_device(part, refused, value):
    """Older checkpoints describe it, and a run on a GPU has another default."""
    options = {"non_blocking": False, "even_batches": False}
    then, now = ({"accelerator_config": found} for found in (options, options | {part: value}))
    assert bool(run_fingerprint.differences(then, now, None, {})) is refused
    assert bool(run_fingerprint.differences(now, then, None, {})) is refused


def test_another_base_of_an_adapter_is_refused(whole, tmp_path):
    other = tiny_model(seed=1, attention_dropout=0.1)
    with pytest.raises(InputError, match="base_weights: then"):
        resume(whole, "sft", tmp_path, lora=True, model=other)
    with pytest.raises(InputError, match=r"adapter\.lora_alpha: then 8, now 4; adapter\.r: then 4, now 2"):
        resume(whole, "sft", tmp_path, lora=True, peft_config=peft.LoraConfig(r=2, lora_alpha=4, **REST))


def test_what_zero3_has_cut_is_known_by_this_ranks_part(monkeypatch):
    """Gathering each weight of a large base, to look at 64 of its values, takes minutes."""
    one_part = lambda weight: nullcontext() if weight.ndim == 1 else pytest.fail("gathered")  # noqa: E731
    monkeypatch.setattr(score_cache.sharded, "gather_parameters", one_part)
    model, keys = tiny_model().requires_grad_(False), set()
    for changed in (0.0, 0.0, 1.0):
        for weight in model.parameters():
            weight.ds_tensor = weight.flatten()[: weight.numel() // 2] + changed
        keys.add(run_fingerprint.base_weights_key(model, None, TABLE["sft"]))
    assert len(keys) == 2


def test_a_run_that_began_with_other_weights_is_refused_unless_they_are_the_checkpoints(whole, tmp_path):
    """All weights come from the checkpoint, so that those of a model that was trained anew in its folder would go."""
    with pytest.raises(InputError, match=r"start_weights: then .*set train.resume_despite: \[start_weights\]"):
        resume(whole, "sft", tmp_path, model=tiny_model(seed=1, attention_dropout=0.1))
    _, expected, expected_weights = whole("sft")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed" / "checkpoint-2", attention_dropout=0.1)
    for model, despite in ((own, None), (tiny_model(seed=1, attention_dropout=0.1), "start_weights")):
        losses, weights = resume(whole, "sft", tmp_path, model=model, resume_despite=despite)
        assert losses == expected
        assert all(map(torch.equal, weights, expected_weights))


def test_an_adapter_that_was_trained_anew_is_another_start(whole, tmp_path):
    """Of one that is continued, whose checkpoints have all its weights."""
    model = peft.get_peft_model(tiny_model(attention_dropout=0.1), peft.LoraConfig(r=4, **REST))
    build("sft", tmp_path, model=copy.deepcopy(model)).train()
    torch.nn.init.ones_(next(weight for name, weight in model.named_parameters() if "lora_B" in name))
    with pytest.raises(InputError, match="start_weights: then "):
        build("sft", tmp_path, model=model).train(resume_from_checkpoint="auto")


@pytest.mark.parametrize("fewer", [{"max_steps": 1}, {"max_steps": -1, "num_train_epochs": 0.25}])
def test_a_checkpoint_beyond_the_last_step_is_refused(fewer, tmp_path):
    """Its weights were saved as those of the shorter run. At a constant rate no other setting tells."""
    build("sft", tmp_path, lr_scheduler_type="constant").train()
    with pytest.raises(InputError, match=r"-3 is of step 3, and this run ends at 1\. Raise max_steps or num_"):
        build("sft", tmp_path, lr_scheduler_type="constant", **fewer).train(resume_from_checkpoint="auto")


def test_who_insists_may_resume_with_other_settings(whole, tmp_path):
    rows = token_rows("sft", 12)
    with pytest.raises(InputError, match=r"set train.resume_despite: \[max_grad_norm, train_dataset\]"):
        resume(whole, "sft", tmp_path, rows=rows, max_grad_norm=0.5)
    resume(whole, "sft", tmp_path, rows=rows, max_grad_norm=0.5, resume_despite=["train_dataset", "max_grad_norm"])
    # what comes with the optimizer would stay as it was
    with pytest.raises(InputError, match="A resumed optimizer keeps the former learning_rate"):
        resume(whole, "sft", tmp_path, learning_rate=0.5, resume_despite="learning_rate")


def test_files_that_do_not_fit_end_in_one_line(whole, tmp_path):
    """Who insists on another adapter is told so when it is loaded."""
    with pytest.raises(InputError, match="cannot be loaded into this run") as raised:
        resume(whole, "sft", tmp_path, lora=True, peft_config=peft.LoraConfig(r=2, **REST), resume_despite="adapter")
    assert "\n" not in str(raised.value)


def test_a_constant_rate_goes_on_for_longer(whole, tmp_path):
    runs = []
    for folder, steps in (("long", 4), ("short", 2), ("short", 4)):
        trainer = build("sft", tmp_path / folder, max_steps=steps, lr_scheduler_type="constant")
        trainer.train(resume_from_checkpoint="auto")
        runs.append(outcome(trainer))
    assert runs[0][0] == runs[2][0]
    assert all(map(torch.equal, runs[0][1], runs[2][1]))


def test_weights_alone_are_not_resumed(tmp_path):
    """Rates and moments would begin anew in the middle of the run."""
    build("sft", tmp_path, save_only_model=True).train()
    for wanted in ("auto", True):
        with pytest.raises(InputError, match="cannot be combined with save_only_model, which saves no optimizer state"):
            build("sft", tmp_path, save_only_model=True).train(resume_from_checkpoint=wanted)
    with pytest.raises(InputError, match="cannot be combined with save_only_model, which saves no optimizer state"):
        build("sft", tmp_path, save_only_model=True, resume_from_checkpoint="auto")
    for again in (False, True):
        trainer = build("sft", tmp_path, save_only_model=again)
        with pytest.raises(InputError, match=r"-2 has weights, but no optimizer, scheduler, .* start a new run"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_an_adapter_of_another_name_is_resumed_whole_and_not_by_its_weights_alone(tmp_path):
    """PEFT saves it in a folder of its name."""

    def named(folder, **options):
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
        return build("sft", folder, model=model, **options)

    named(tmp_path / "whole").train()
    assert checkpoint.find_checkpoint(tmp_path / "whole") is not None
    named(tmp_path / "alone", save_only_model=True).train()
    with pytest.raises(InputError, match="has weights, but no optimizer"):
        named(tmp_path / "alone").train(resume_from_checkpoint=str(tmp_path / "alone/checkpoint-2"))


def test_a_checkpoint_without_settings_goes_on_with_a_note(whole, tmp_path, caplog):
    shutil.copytree(Path(whole("sft")[0], "checkpoint-2"), tmp_path / "checkpoint-2")
    file = tmp_path / "checkpoint-2/trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"][checkpoint.LAUNCH_KEY]["run"]
    file.write_text(json.dumps(state))
    caplog.set_level("INFO", "hf_posttrain")
    trainer = build("sft", tmp_path, max_grad_norm=0.5)
    trainer.train(resume_from_checkpoint="auto")
    assert "does not store the settings of its run" in caplog.text


def test_a_stream_is_known_by_its_first_rows(tmp_path):
    rows = lambda seed: datasets.IterableDataset.from_generator(lambda: iter(token_rows("sft", 13, seed=seed)))  # noqa: E731
    build("sft", tmp_path, rows=rows(0)).train()
    build("sft", tmp_path, rows=rows(0)).train(resume_from_checkpoint="auto")
    with pytest.raises(InputError, match=r"train_dataset: then 'a stream \("):
        build("sft", tmp_path, rows=rows(1)).train(resume_from_checkpoint="auto")


def test_steps_of_logs_evaluations_and_saves_may_change(tmp_path):
    build("sft", tmp_path, max_steps=6).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer = build("sft", tmp_path, max_steps=6, logging_steps=3, save_steps=3, eval_steps=3)
    trainer.train(resume_from_checkpoint="auto")
    logs = trainer.state.log_history
    assert [entry["step"] for entry in logs if "eval_loss" in entry] == [2, 3, 6]
    assert [entry["step"] for entry in logs if "loss" in entry] == [1, 2, 3, 6]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3", "checkpoint-6"}
