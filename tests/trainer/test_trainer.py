"""PostTrainer: its own check of the scoring, refusals, metrics, non-finite losses, drop-in use, what is saved."""

import abc
import copy
import dataclasses
import importlib.util
import json
import logging
import pickle
import re
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import accelerate
import datasets
import numpy as np
import peft
import pytest
import torch
from models_for_tests import tiny_model
from rows_for_tests import methods_of, raw_row
from safetensors.torch import load_file
from tokenizers_for_tests import byte_tokenizer
from torch import nn
from training_for_tests import (
    LORA,
    METHODS,
    Gradients,
    assert_same_step,
    fix_rollouts,
    names_where,
    one_step,
    second_model,
    token_rows,
    trainer_for,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

import hf_posttrain
from hf_posttrain import CPOConfig, DPOConfig, DPOTrainer, KDConfig, OPDTrainer, RewardConfig, SFTConfig, SFTTrainer
from hf_posttrain.data.row_schema import SUPERVISED
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods import config_class
from hf_posttrain.models.load import apply_config_options
from hf_posttrain.recipe.sections import Source
from hf_posttrain.report.run_folder import read_run
from hf_posttrain.scoring import attention, layout_selection, parity_check
from hf_posttrain.scoring import forward as scoring
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layouts import Branch, Example, collate


def second_for(method):
    return second_model(method, seed=9)


# ---- the check of the first batch


def test_training_on_cpu_shows_no_warning_of_pinned_memory(tmp_path):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, use_cpu=False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trainer.train()
    assert not [each for each in shown if "pin_memory" in str(each.message)]


def test_scoring_checks_itself_for_every_architecture():
    for name in ("qwen3", "gemma2", "cohere"):
        model = tiny_model(name)
        scoring.enable_scoring(model)
        for layout in ("shared", "packed", "padded"):
            assert parity_check.parity_error(model, layout) < 1e-4


class Odd(nn.Linear):
    """A head that does more than a linear layer, whatever the config says."""

    def forward(self, hidden):
        return super().forward(hidden) + torch.sin(3 * super().forward(hidden))


class LogitsPlus(type(tiny_model("cohere"))):
    """A causal LM that changes its logits after the head, unknown to the config."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.7
        return output


def test_a_head_that_is_more_than_linear_is_run_as_a_module(tmp_path):
    model = tiny_model("llama")
    odd = Odd(32, 300, bias=False)
    odd.weight = model.lm_head.weight
    model.lm_head = odd
    scoring.enable_scoring(model)
    assert parity_check.parity_error(model, "shared") < 1e-4


@pytest.mark.parametrize("method", names_where(lambda method: method.head == "language"))
def test_unknown_steps_after_the_head_fall_back_to_the_models_own_logits(method, tmp_path, caplog, monkeypatch):
    fix_rollouts(monkeypatch)
    model, scaled = tiny_model("cohere"), tiny_model("cohere", logit_scale=0.25 * 1.7)
    model.__class__ = LogitsPlus  # the same function, without saying so in the config
    with caplog.at_level(logging.WARNING):
        found = one_step(method, model, token_rows(method), tmp_path, second=second_for(method))
    assert "Its own forward is used" in caplog.text
    caplog.clear()
    expected = one_step(method, scaled, token_rows(method), tmp_path, second=second_for(method))
    assert "Its own forward is used" not in caplog.text
    assert_same_step(found, expected)


def test_a_model_that_ignores_the_mask_falls_back_to_padded_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(attention, "arguments", lambda model, batch: {"attention_mask": batch.attention_mask})
    trainer = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "differ from its own forward in layout shared. Using padded" in caplog.text
    assert trainer.data_collator.layout == "padded"
    explicit = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, layout="shared")
    with pytest.raises(InputError, match="Use layout=padded"):
        explicit.train()


def test_layouts_are_chosen_by_what_the_model_can_take():
    sdpa, flash, hybrid = tiny_model(), tiny_model(), tiny_model()
    flash.config._attn_implementation = "flash_attention_2"
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    assert layout_selection.choose_layout([sdpa], "auto") == "shared"
    assert layout_selection.choose_layout([flash], "auto") == "packed"
    assert layout_selection.choose_layout([sdpa, flash], "auto") == "packed"
    assert layout_selection.choose_layout([sdpa, hybrid], "auto") == "padded"
    with pytest.raises(InputError, match=r"linear_attention.*Use layout='padded'"):
        layout_selection.choose_layout([hybrid], "shared")


def test_rows_are_filled_as_cheaply_as_can_be():
    """Short examples share long rows, without padding; long ones, whose attention is dear, stay alone."""
    short = collate([Example([1] * 40, [Branch([2] * size)]) for size in (200, 90, 60, 30, 20, 5)], "shared")
    real = int((short["document"] >= 0).sum())
    assert real == 6 * 40 + 405 - 6
    assert short["document"].numel() <= 1.02 * real
    long = collate([Example([1] * 40, [Branch([2] * size)]) for size in (6000, 5500, 5000)], "shared")
    assert long["input_ids"].shape == (3, 6039)
    assert "document" not in long


def test_padding_of_a_long_row_stays_within_the_positions_of_its_documents():
    """A model may have learned no position beyond (GPT-2), or scale by the largest one (longrope)."""
    batch = collate([Example([1] * 10, [Branch([2] * size)]) for size in (91, 51, 51)], "shared")
    assert batch["input_ids"].shape[1] > 101 > batch["position_ids"].max()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=101, n_embd=16, n_layer=1, n_head=2))
    scoring.enable_scoring(model)
    assert scoring.score(model, batch, LogProb(batch.targets)).value.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_flex_attention_equals_sdpa_on_gpu(method, tmp_path):
    steps = []
    for implementation in ("sdpa", "flex_attention"):
        model = tiny_model().cuda()
        model.set_attn_implementation(implementation)
        steps.append(
            one_step(method, model, token_rows(method), tmp_path, second=second_for(method), use_cpu=False, bf16=False)
        )
    assert_same_step(steps[1], steps[0], relative=1e-3)


# ---- drop-in use


def test_metrics_callbacks_and_best_model_work_as_in_hf(tmp_path):
    seen = []

    def compute_metrics(prediction):
        logits, labels = prediction.predictions, prediction.label_ids
        seen.append((logits.shape, labels.shape))
        predicted, labels = logits.argmax(-1)[:, :-1], labels[:, 1:]  # as everywhere with HF
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}

    trainer = SFTTrainer(
        tiny_model(),
        SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, max_steps=6, eval_strategy="steps", eval_steps=2, save_steps=2,
            metric_for_best_model="accuracy", load_best_model_at_end=True, report_to="none", learning_rate=1e-3,
        ),
        None, token_rows("sft"), token_rows("sft", 12, seed=4).select(range(5)), byte_tokenizer(),
        compute_metrics=compute_metrics, callbacks=[EarlyStoppingCallback(5)],
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"])
    assert trainer.state.best_model_checkpoint
    assert seen[0][0] == (5, seen[0][1][1], 300)  # a row for each example, though the layout packs them
    packed = trainer.data_collator([trainer.eval_dataset[i] for i in range(5)])
    assert packed["input_ids"].shape[0] < 5


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("eval_distill/reverse_kl", False), ("distill/divergence", False), ("eval_kl", False), ("eval_loss", False),
     ("distill/ce", False), ("eval_rewards/margins", True), ("mean_token_accuracy", True), ("exact_match", True)],
)  # fmt: skip
def test_the_best_of_a_metric_that_should_fall_is_the_lowest(metric, rises, tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "metric_for_best_model": metric, "eval_exact_match": True}
    assert SFTConfig(**common).greater_is_better is rises
    assert SFTConfig(**common, greater_is_better=not rises).greater_is_better is not rises
    config = SFTConfig(**common, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 1},
                       eval_strategy="epoch")  # fmt: skip
    assert config.lr_scheduler_kwargs == {"patience": 1, "mode": "max" if rises else "min"}


def test_a_best_metric_that_does_not_exist_is_told(tmp_path):
    rows = token_rows("sft", 4)
    for evaluated, schedule in ((rows, "linear"), ({"a": rows, "b": rows}, "reduce_lr_on_plateau")):
        trainer = trainer_for(
            "sft", tiny_model(), rows, tmp_path, eval_rows=evaluated, eval_strategy="steps", eval_steps=1,
            max_steps=2, metric_for_best_model="eval_b_loss", lr_scheduler_type=schedule,
        )  # fmt: skip
        if evaluated is rows:
            with pytest.raises(InputError, match=r"is set to 'eval_b_loss', which is not found .* are: .'eval_loss'"):
                trainer.train()
        else:
            trainer.train()
    with pytest.raises(InputError, match="requires eval_exact_match: true"):
        SFTConfig(output_dir=str(tmp_path), metric_for_best_model="eval_exact_match")


def test_scores_that_another_trainer_made_are_not_taken(tmp_path):
    """A teacher that is the student teaches nothing; top-k rows of another teacher would."""
    settings = {"teacher": {"top_k": 4, "precompute": True}, "max_steps": 1}
    other = trainer_for("kd", tiny_model(), token_rows("kd"), tmp_path, second=tiny_model(seed=5), **settings)
    other.train()
    same = trainer_for("kd", tiny_model(), other.train_dataset, tmp_path / "same", second=tiny_model(), kd_coef=1.0,
                       max_steps=1)  # fmt: skip
    assert "teacher_ids" in other.train_dataset.column_names
    same.train()
    assert next(log["loss"] for log in same.state.log_history if "loss" in log) == pytest.approx(0, abs=1e-5)


def test_rows_of_ids_that_have_an_index_are_cut_all_the_same(tmp_path):
    """As pandas' reset_index gives them."""
    rows = token_rows("sft", 6).to_list()
    rows = datasets.Dataset.from_list([{**row, "index": n} for n, row in enumerate(rows)])
    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, max_length=6)
    lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in trainer.train_dataset]
    assert max(lengths) == 6


def test_the_best_model_by_a_metric_of_ours(tmp_path):
    """Our metrics are in what evaluate() returns, so one can name the best checkpoint; random state loads safely."""
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, eval_rows=token_rows("dpo", 5, seed=4), max_steps=4,
        learning_rate=1e-2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        metric_for_best_model="rewards/margins", greater_is_better=True, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    margins = {log["step"]: log["eval_rewards/margins"] for log in trainer.state.log_history if "eval_loss" in log}
    best = max(margins, key=margins.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_rewards/margins"] == pytest.approx(margins[best], rel=1e-5)
    again = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path)
    again._load_rng_state(str(tmp_path / "checkpoint-4"))  # weights_only, in transformers


@pytest.mark.parametrize(("method", "shape"), [("dpo", (5, 4)), ("kto", (5, 2)), ("opd", (5, 1, 2))])
def test_compute_metrics_gets_log_probs_of_each_example(method, shape, tmp_path):
    seen = []
    trainer = trainer_for(
        method, tiny_model(), token_rows(method), tmp_path, second=second_for(method), eval_rows=token_rows(method, 5),
    )  # fmt: skip
    trainer.compute_metrics = lambda p: (seen.append((p.predictions.shape, np.asarray(p.label_ids).shape)), {"x": 1.0})[
        1
    ]
    assert trainer.evaluate()["eval_x"] == 1.0
    assert seen[0][0] == shape
    assert seen[0][1][0] == 5


@pytest.mark.parametrize("method", TABLE)
def test_streams_train(method, tmp_path):
    rows = token_rows(method).to_iterable_dataset()
    trainer = trainer_for(method, tiny_model(), rows, tmp_path, second=second_for(method), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_the_order_of_a_stream_is_told(tmp_path, caplog):
    rows = token_rows("sft").to_iterable_dataset()
    with caplog.at_level(logging.INFO):
        trainer_for("sft", tiny_model(), rows, tmp_path, max_steps=2)
    assert "train: a stream is read in its own order" in caplog.text
    with pytest.raises(InputError, match="group_by_length cannot be combined with a stream of rows"):
        trainer_for("sft", tiny_model(), rows, tmp_path, max_steps=2, train_sampling_strategy="group_by_length")


@pytest.mark.parametrize("method", METHODS)
def test_raw_rows_in_a_list_train(method, tmp_path):
    raw = raw_row(TABLE[method].rows, "1+1=", "2", "3")
    rows = [raw, raw | {"prompt": "1+2="}]
    trainer = trainer_for(method, tiny_model(), rows, tmp_path, second=second_for(method))
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


IN_CI = (("kto", "torch"), ("sft", "transform"))
FORMS = [
    pytest.param(method, form, marks=[] if (method, form) in IN_CI else pytest.mark.slow)
    for form in ("torch", "numpy", "pandas", "arrow", "transform", "stream") for method in ("sft", "kto")
]  # fmt: skip


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_rows_with_a_format_train_as_they_do_without(method, form, tmp_path):
    """Text, ids and labels as tensors, arrays or frames; a transform of the user's is kept."""
    raw = [raw_row(TABLE[method].rows, f"{i}+1=", str(i + 1), label=i < 4) for i in range(8)]
    for rows in (datasets.Dataset.from_list(raw), token_rows(method)):
        losses = []
        for given in (rows, formatted(rows, form)):
            trainer = trainer_for(method, tiny_model(), given, tmp_path, max_steps=2, learning_rate=1e-3)
            trainer.train()
            losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert losses[1] == losses[0]


def test_a_transform_is_made_once(tmp_path):
    rows = token_rows("dpo", 4)
    end = lambda batch: batch | {"chosen_ids": [[*ids, 258] for ids in batch["chosen_ids"]]}  # noqa: E731
    trainer = trainer_for("dpo", tiny_model(), rows.with_transform(end), tmp_path, precompute_ref_log_probs=False)
    assert [row["chosen_ids"] for row in trainer.train_dataset] == [[*row["chosen_ids"], 258] for row in rows]
    raw = datasets.Dataset.from_list([{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(4)])
    renamed = lambda batch: {"prompt": batch["question"], "completion": batch["answer"]}  # noqa: E731
    trainer = trainer_for("sft", tiny_model(), raw.with_transform(renamed), tmp_path)
    given = raw.rename_columns({"question": "prompt", "answer": "completion"})
    assert trainer.train_dataset[:] == trainer_for("sft", tiny_model(), given, tmp_path).train_dataset[:]


def formatted(rows, form):
    if form == "transform":
        return rows.with_transform(lambda batch: batch)
    return rows.to_iterable_dataset().with_format("torch") if form == "stream" else rows.with_format(form)


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_is_exact_for_every_batch_size(method, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    results = []
    for size in (1, 2, 7):
        trainer = trainer_for(
            method, tiny_model(), token_rows(method), tmp_path, second=second_for(method),
            eval_rows=token_rows(method, 7, seed=4), per_device_eval_batch_size=size,
        )  # fmt: skip
        hung = ("second", "runtime", "time", "kl_clamped")  # on the clock, or on the sign of a KL of equal models
        results.append({k: v for k, v in trainer.evaluate().items() if not k.endswith(hung)})
    assert results[1] == pytest.approx(results[0], rel=1e-5, abs=1e-5)  # the KL of equal models is rounding alone
    assert results[2] == pytest.approx(results[0], rel=1e-5, abs=1e-5)


def test_exact_match_answers_greedily(tmp_path):
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(8)]
    trainer = trainer_for(
        "sft", tiny_model(), rows, tmp_path, eval_rows=rows, max_steps=150, learning_rate=1e-2, eval_exact_match=True,
        per_device_train_batch_size=8, eval_max_completion_length=4,
    )  # fmt: skip
    before = trainer.evaluate()["eval_exact_match"]
    trainer.train()
    assert before < 0.5
    assert trainer.evaluate()["eval_exact_match"] == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_other_rows_are_evaluated_and_predicted_raw(method, tmp_path):
    """`evaluate(rows)` and `predict(rows)` take what the trainer takes, and rows that it has prepared already."""
    trainer = trainer_for(method, tiny_model(), token_rows(method), tmp_path, second=second_for(method))
    raw = token_rows(method, 5, seed=6)
    expected = trainer.evaluate(raw)["eval_loss"]
    prepared = trainer.prepare(raw, trainer.tokenizer, trainer.args, "eval")
    assert trainer.evaluate(prepared)["eval_loss"] == expected
    assert trainer.predict(raw).metrics["test_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("metrics", [False, True], ids=["alone", "with compute_metrics"])
@pytest.mark.parametrize("method", methods_of(SUPERVISED))
def test_predictions_are_a_row_for_each_example_in_order(method, metrics, tmp_path):
    """Whatever the layout, which otherwise fills up rows with several examples, the longest first."""
    trainer = trainer_for(method, tiny_model(), token_rows(method), tmp_path, second=second_for(method))
    trainer.compute_metrics = (lambda prediction: {"x": 1.0}) if metrics else None
    rows = token_rows(method, 10, seed=6)
    found = trainer.predict(rows)
    for row, ids in zip(rows, found.label_ids, strict=True):
        trained = np.array(row["completion_ids"])[np.array(row["completion_mask"], dtype=bool)]
        assert ids[ids != -100].tolist() == trained.tolist()
    assert found.predictions.shape[0] == 10


@pytest.mark.parametrize("method", METHODS)
def test_an_incomplete_batch_is_dropped_in_training_alone(method, tmp_path):
    rows, config = token_rows(method, 7, seed=6), {"per_device_eval_batch_size": 3, "layout": "padded"}
    found = []
    for drop in (False, True):
        trainer = trainer_for(
            method, tiny_model(), token_rows(method), tmp_path, second=second_for(method), eval_rows=rows,
            dataloader_drop_last=drop, **config,
        )  # fmt: skip
        assert len(trainer.predict(rows).predictions) == 7
        found.append(trainer.evaluate()["eval_loss"])
        assert trainer.args.dataloader_drop_last == drop
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["sft", "opd"])
def test_what_is_trained_does_not_depend_on_how_often_it_is_evaluated(method, tmp_path):
    """With dropout, whose random numbers an evaluation must not use up."""
    losses = []
    for config in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}):
        trainer = trainer_for(
            method, tiny_model(attention_dropout=0.1), token_rows(method), tmp_path, second=second_for(method),
            eval_rows=token_rows(method, 3), max_steps=3, learning_rate=1e-3, **config,
        )  # fmt: skip
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("method", METHODS)
def test_metrics_may_ask_for_inputs(method, tmp_path):
    """A row for each example, of a pair the chosen answer: the prompt and what follows it, -100 behind."""
    rows, seen = token_rows(method, 7, seed=6), []
    trainer = trainer_for(
        method, tiny_model(), token_rows(method), tmp_path, second=second_for(method), eval_rows=rows,
        per_device_eval_batch_size=3, include_for_metrics=["inputs"],
    )  # fmt: skip
    trainer.compute_metrics = lambda prediction: (seen.append(prediction), {"x": 1.0})[1]
    trainer.evaluate()
    assert len(seen[0].predictions) == len(seen[0].inputs) == 7
    for row, ids in zip(rows, seen[0].inputs, strict=True):
        answer = [] if TABLE[method].rows.sampled else row[TABLE[method].rows.answers[0]]
        whole, ids = row["prompt_ids"] + answer, ids[ids != -100].tolist()
        assert len(ids) >= len(row["prompt_ids"])
        assert ids == whole[: len(ids)]
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] is not None


@pytest.mark.parametrize("method", METHODS)
def test_sampling_by_length_works(method, tmp_path):
    trainer = trainer_for(
        method, tiny_model(), token_rows(method), tmp_path, second=second_for(method), max_steps=2,
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2


# ---- what must be noticed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not supported"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "Use constant_with_warmup"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "'no' is a string, which templates treat as true"),
        ({"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}}, "would replace the head, which"),
        ({"use_liger_kernel": True, "torch_compile": True}, "Remove one of the two"),
        ({"layout": "rows"}, "is not one of"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, "offload requires a GPU"),
        ({"activation_checkpointing_kwargs": "true"}, "must be a mapping, not 'true'"),
        ({"max_length": 1}, "must be at least 2"), ({"router_aux_loss_coef": 0.1}, "model has no load-balancing loss"),
        ({"bf16_full_eval": True}, "casts the weights that are trained afterwards"),
        ({"fp16_full_eval": True}, "is not supported"),
        ({"include_num_input_tokens_seen": "non_padding"}, "Use all"), ({"max_grad_norm": None}, "Use 0 to disable"),
        ({"auto_find_batch_size": True}, "Trainer restarts at step 0 with trained weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_raises(config, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **config)


@pytest.mark.parametrize(
    ("name", "advice"), [("truncation_mode", "truncated from the left first"), ("packing_strategy", "best-fit")]
)
def test_fields_of_trl_that_do_not_exist_say_what_to_use(name, advice, tmp_path):
    with pytest.raises(InputError, match=f"SFTConfig has no {name}.*{advice}"):
        SFTConfig(output_dir=str(tmp_path), **{name: "wrapped"})
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, learning_rate=1e-4)
    assert copy.deepcopy(config).learning_rate == pickle.loads(pickle.dumps(config)).learning_rate == 1e-4


def test_values_that_change_nothing_are_taken(tmp_path):
    same = {"model_init_kwargs": None, "packing_strategy": "bfd", "eos_token": None, "pad_to_multiple_of": None,
            "padding_free": True, "loss_type": "nll", "tokenizer": None, "top_k": 0}  # fmt: skip
    assert SFTConfig(str(tmp_path), use_cpu=True, **same).max_length == 1024
    KDConfig(str(tmp_path), use_cpu=True, seq_kd=False)
    DPOConfig(str(tmp_path), use_cpu=True, f_divergence_type="reverse_kl", f_alpha_divergence_coef=1.0, use_vllm=False)
    CPOConfig(str(tmp_path), use_cpu=True, label_smoothing=0.0)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (SFTConfig, {"max_lenght": 1}, r"SFTConfig has no max_lenght; did you mean 'max_length'\?"),
        (SFTConfig, {"tokenizer": "x"}, "pass processing_class to the trainer$"),
        (KDConfig, {"lmbda": 0.5}, "OPDConfig"),
    ],
)
def test_users_of_python_are_told_of_python(config, given, message, tmp_path):
    with pytest.raises((TypeError, InputError), match=message) as raised:
        config(str(tmp_path), use_cpu=True, **given)
    assert "section" not in str(raised.value)


def test_arguments_of_other_trainers_get_an_answer(tmp_path):
    model, config, rows = tiny_model(), SFTConfig(str(tmp_path), use_cpu=True, report_to="none"), token_rows("sft")
    for given, message in (
        ({"tokenizer": byte_tokenizer()}, "SFTTrainer has no tokenizer: pass processing_class to the trainer"),
        ({"train_dataset": datasets.DatasetDict(train=rows, test=rows)}, r"is a dict of train, test\. Pass one of"),
        ({"data_collator": rows}, r"\(the third argument, a Dataset, is data_collator\)"),
        ({"processing_class": object()}, "must be a tokenizer or a processor, not object"),
        ({"args": model}, r"not a Qwen3ForCausalLM\. Name all arguments after the model"),
    ):
        given = {"args": config, "processing_class": byte_tokenizer(), "train_dataset": rows} | given
        with pytest.raises(InputError, match=message):
            SFTTrainer(model, **given)
    with pytest.raises(TypeError, match="SFTTrainer has no callback; did you mean 'callbacks'"):
        SFTTrainer(model, config, callback=[])
    # the order is that of transformers.Trainer
    trainer = SFTTrainer(model, config, None, rows, rows.select([0]), byte_tokenizer(), formatting_func=None)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, 1)


def test_a_method_that_only_trls_trainers_would_call_is_refused():
    named = {"dpo_loss": "losses", "_prepare_dataset": "prepare", "generate_on_policy_outputs": "generate"}
    for name, instead in named.items():
        said = f"Mixin.{name}: PostTrainer does not call this method of TRL. Override `{instead}`"
        with pytest.raises(InputError, match=re.escape(said)):
            type("Own", (type("Mixin", (), {name: lambda self: None}), DPOTrainer), {})


@pytest.mark.slow  # when such workers are collected, torch waits five seconds for each
def test_workers_of_a_data_loader_that_stay_do_not_keep_the_folder(tmp_path):
    config = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **config)
    trainer.train()
    trainer.train()


def test_a_dict_without_data_sets_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^eval: the dict has no data set"):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, eval_rows={})


def test_classes_of_trl_are_named():
    for name in ("GKDTrainer", "DistillationConfig"):
        with pytest.raises(ImportError, match=f"hf_posttrain has no {name}: use .*OPD"):
            getattr(hf_posttrain, name)
    assert not hasattr(hf_posttrain, "Nonsense")


@pytest.mark.parametrize("method", METHODS)
def test_hugging_faces_argument_parser_reads_every_config(method, tmp_path):
    parser = HfArgumentParser(config_class(TABLE[method]))
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--gradient_checkpointing", "--stop_on=nan"]
    (args,) = parser.parse_args_into_dataclasses(given)
    assert (args.bf16, args.gradient_checkpointing, args.stop_on, args.fsdp) == (False, True, "nan", None)
    assert parser.parse_args(["--fsdp", "--bf16"]).fsdp is True
    assert "--chat_template_kwargs" in parser.format_help()
    if method == "opd":
        written = ["--rollouts", '{"train_max_tokens": 6}', "--token_weights", "top_share", "--sampler", "policy"]
        (args,) = parser.parse_args_into_dataclasses([*given, *written])
        assert (args.rollouts.train_max_tokens, args.token_weights.share, args.sampler.kind) == (6, 0.5, "policy")


def test_other_arguments_than_the_config_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"must be a SFTConfig, not a TrainingArguments\. Build a SFTConfig"):
        SFTTrainer(tiny_model(), TrainingArguments(str(tmp_path), use_cpu=True))


def test_replacing_collator_or_loss_is_refused(tmp_path):
    for name in ("data_collator", "compute_loss_func"):
        with pytest.raises(InputError, match="are not supported, because the method defines"):
            SFTTrainer(
                tiny_model(),
                SFTConfig(str(tmp_path), use_cpu=True),
                train_dataset=token_rows("sft"),
                processing_class=byte_tokenizer(),
                **{name: print},
            )


def test_a_second_adapter_and_a_frozen_model_are_refused(tmp_path):
    adapted = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(InputError, match="already has an adapter"):
        trainer_for(
            "sft", adapted, token_rows("sft"), tmp_path, peft_config=peft.LoraConfig(target_modules="all-linear")
        )
    with pytest.raises(InputError, match="nothing to train"):
        trainer_for("sft", tiny_model().requires_grad_(False), token_rows("sft"), tmp_path)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_model_that_is_replaced_is_refused(method, tmp_path):
    """HF's train would move nothing at all: it runs the old model, with an optimizer of the new one."""
    rows = token_rows(method)
    for peft_config in (None, peft.LoraConfig(target_modules=["q_proj"])):
        trainer = trainer_for(method, tiny_model(), rows, tmp_path, eval_rows=rows, peft_config=peft_config)
        trainer.model = tiny_model(seed=1)
        for use in (trainer.train, trainer.evaluate):
            with pytest.raises(InputError, match=r"trainer\.model was replaced"):
                use()


def test_a_non_finite_loss_is_shown_and_its_step_named(tmp_path, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=4, logging_steps=4)
    real = trainer.losses

    def losses(model, batch):
        found = real(model, batch)
        found.values = found.values * (float("nan") if trainer.state.global_step == 2 else 1.0)
        return found

    trainer.losses = losses
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "not finite at step 3" in caplog.text
    assert np.isnan(trainer.state.log_history[0]["loss"])


def test_accumulation_is_no_mean_of_means(tmp_path):
    """Micro-batches of 1 and 9 trained tokens: the loss is the mean over 10 tokens."""
    rows = datasets.Dataset.from_list(
        [{"prompt_ids": [1, 2], "completion_ids": list(range(10, 10 + n)), "completion_mask": [1] * n} for n in (1, 9)]
    )
    sizes = {"per_device_train_batch_size": 1}
    single = [one_step("sft", tiny_model(), rows.select([i]), tmp_path, **sizes)[0] for i in (0, 1)]
    both = one_step("sft", tiny_model(), rows, tmp_path, gradient_accumulation_steps=2, **sizes)[0]
    assert both == pytest.approx((1 * single[0] + 9 * single[1]) / 10, rel=1e-5)
    assert abs(both - sum(single) / 2) > 0.05


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_last_window_of_an_epoch_may_be_a_partial_one(method, tmp_path):
    """10 rows, window 4: the third step is the mean over the last two rows, not over four."""
    rows, keep = token_rows(method, 10), Gradients()
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    trainer = trainer_for(method, tiny_model(), rows, tmp_path, callbacks=[keep], max_steps=3, **sizes)
    trainer.train()
    found = trainer.state.log_history[2]["loss"], keep.steps[2]
    alone = one_step(method, tiny_model(), rows.select([8, 9]), tmp_path, per_device_train_batch_size=2)
    assert_same_step(found, alone)


@pytest.mark.parametrize("takes", [False, True])
def test_accumulation_does_not_ask_the_models_class(takes, tmp_path, monkeypatch):
    """Where a model's class says that it takes no number of items (Gemma 3's), HF divides by the number of batches."""
    model = tiny_model("gemma3")
    monkeypatch.setattr(type(model), "accepts_loss_kwargs", takes, raising=False)
    sizes = [{"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size} for size in (1, 8)]
    runs = [one_step("sft", model, token_rows("sft"), tmp_path, **each) for each in sizes]
    assert_same_step(runs[1], runs[0])


def test_packed_documents_do_not_leak_into_each_other(tmp_path):
    """On sdpa, policy and frozen model: changing one document leaves the scores of the other as they are."""
    model = tiny_model()
    scoring.enable_scoring(model)
    scores = []
    for first in ([9, 8, 7, 6], [5, 5, 5, 5]):
        batch = collate([Example(first, [Branch([1, 2])]), Example([3, 4], [Branch([5, 6, 7])])], "packed")
        from hf_posttrain.models.frozen import branch_logps

        scores.append(branch_logps(model, batch))
    assert scores[0][0] != scores[1][0]
    assert scores[0][1] == pytest.approx(scores[1][1].item(), abs=1e-5)


# ---- what is saved


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_saved_model_stops_where_it_was_trained_to(lora, tmp_path):
    config = {"peft_config": peft.LoraConfig(target_modules="all-linear")} if lora else {}
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **config)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    generation = GenerationConfig.from_pretrained(tmp_path / "saved")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    assert end in ids
    if not lora:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name])
        assert model.generation_config.eos_token_id == generation.eos_token_id
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"activation_checkpointing": False}, False), ({"gradient_checkpointing": False}, False)],
)
def test_activation_checkpointing_is_on_unless_said_otherwise(given, expected, tmp_path):
    """By either name, in a copy of the config too, and as the model is really trained."""
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to="none", **given)
    trainer = SFTTrainer(tiny_model(), config, None, token_rows("sft"), None, byte_tokenizer())
    trainer.train()
    layers = [m for m in trainer.model.modules() if hasattr(m, "gradient_checkpointing")]
    assert any(layer.gradient_checkpointing for layer in layers) == expected
    assert dataclasses.replace(config, activation_checkpointing=not expected).activation_checkpointing != expected


def test_a_cpu_run_has_no_bf16(tmp_path):
    assert trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path).args.bf16 is False


# ---- found in review


@pytest.mark.parametrize("method", names_where(lambda method: not method.rows.sampled))
def test_a_stream_trains_on_every_token(method, tmp_path):
    """Accelerate would cut each tensor of a streamed batch to the number of its rows."""
    expected = one_step(method, tiny_model(), token_rows(method), tmp_path, second=second_for(method))
    stream = token_rows(method).to_iterable_dataset()
    assert_same_step(one_step(method, tiny_model(), stream, tmp_path, second=second_for(method)), expected)
    with pytest.raises(InputError, match="because they split batches by rows"):
        trainer_for(method, tiny_model(), stream, tmp_path, accelerator_config={"split_batches": True})


@pytest.mark.parametrize("method", METHODS)
def test_a_step_in_bf16_on_cpu_is_that_of_float32_within_rounding(method, tmp_path, monkeypatch):
    """A number of bf16 is right to 0.4 %: so is the loss; the whole gradient to 2 to 5 %, and as long."""
    fix_rollouts(monkeypatch)
    steps = []
    for bf16 in (False, True):
        torch.manual_seed(3)
        second = second_model(method, "llama", 9)
        steps.append(one_step(method, tiny_model("llama"), token_rows(method), tmp_path, second=second, bf16=bf16))
    (loss, gradients), (rounded_loss, rounded) = steps
    assert rounded_loss == pytest.approx(loss, rel=4e-3)
    exact, found = (torch.cat([each.double().flatten() for each in side.values()]) for side in (gradients, rounded))
    assert 0 < (found - exact).norm() < 0.06 * exact.norm()
    assert found.dot(exact) / exact.dot(exact) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("method", "config", "adapted"),
    [(m, {}, False) for m in METHODS] + [pytest.param(m, {}, True, marks=pytest.mark.slow) for m in METHODS]
    + [("opd", {"loss_type": "policy_gradient"}, adapted) for adapted in (False, True)],
)  # fmt: skip
def test_bf16_autocast_trains_near_float32(method, config, adapted, tmp_path, monkeypatch):
    """On CPU autocast; the head's late gradient must use the forward's dtype."""
    fix_rollouts(monkeypatch)
    losses = {}
    for bf16 in (False, True):
        torch.manual_seed(3)
        head = "score" if TABLE[method].head == "score" else "lm_head"
        lora = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=[head]) if adapted else None
        trainer = trainer_for(
            method, tiny_model("llama"), token_rows(method), tmp_path, bf16=bf16, peft_config=lora, max_steps=2,
            second=second_model(method, "llama", 9), learning_rate=1e-3, **config,
        )  # fmt: skip
        trainer.train()
        losses[bf16] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[True] == pytest.approx(losses[False], rel=0.1, abs=0.05)


def test_the_first_of_several_bad_steps_is_named_even_without_a_log(tmp_path, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=5, logging_steps=100)
    real = trainer.losses

    def losses(model, batch):
        found = real(model, batch)
        found.values = found.values * (float("nan") if trainer.state.global_step >= 2 else 1.0)
        return found

    trainer.losses = losses
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("not finite at step 3") == 1


def test_sampling_by_length_evaluates_in_order(tmp_path):
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, eval_rows=token_rows("sft", 5),
        train_sampling_strategy="group_by_length", eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_compute_metrics_gets_every_rollout(tmp_path):
    seen = []
    trainer = trainer_for(
        "opd", tiny_model(), token_rows("opd"), tmp_path, second=tiny_model(seed=9), eval_rows=token_rows("opd", 7),
        num_generations=3, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.compute_metrics = lambda p: (seen.append((p.predictions.shape, p.label_ids.shape)), {"x": 1.0})[1]
    trainer.evaluate()
    assert seen == [((7, 3, 2), (7, 3))]


def test_a_tokenizer_without_pad_serves_rollouts(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    args = trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, second=tiny_model(seed=9)).args
    trainer = OPDTrainer(tiny_model(), args, None, token_rows("opd"), None, tokenizer, teacher_model=tiny_model(seed=9))
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("method", names_where(lambda method: method.second))
def test_the_policy_is_not_its_own_second_model(method, tmp_path):
    model = tiny_model()
    lora = peft.LoraConfig(target_modules="all-linear")
    with pytest.raises(InputError, match="itself"):
        trainer_for(method, model, token_rows(method), tmp_path, second=model, peft_config=lora)


@pytest.mark.slow
def test_predict_after_evaluate_with_persistent_workers_sees_its_own_rows(tmp_path):
    trainer = trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, eval_rows=token_rows("sft", 5), dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )  # fmt: skip
    first = trainer.evaluate()["eval_loss"]
    other = token_rows("sft", 3, seed=8)
    assert trainer.predict(other).metrics["test_loss"] != first
    assert trainer.evaluate()["eval_loss"] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "adapted", "warns"),
    [
        ("bfloat16", False, True),
        *(pytest.param(*case, False, marks=pytest.mark.slow) for case in (("float32", False), ("bfloat16", True))),
    ],
)
def test_bfloat16_fully_trained_warns_with_the_reason(dtype, adapted, warns, tmp_path, caplog):
    lora = peft.LoraConfig(target_modules="all-linear") if adapted else None
    with caplog.at_level(logging.WARNING):
        trainer_for("sft", tiny_model().to(getattr(torch, dtype)), token_rows("sft"), tmp_path, peft_config=lora)
    assert ("weights moved by 1.4 %" in caplog.text) == warns


@pytest.mark.parametrize("stream", [False, True])
def test_a_training_without_a_step_is_an_error(stream, tmp_path):
    """Three rows, of batches of four that are dropped unless full, or of a stream in windows of four batches."""
    rows = token_rows("sft", 3)
    rows, config = (rows.to_iterable_dataset(), {}) if stream else (rows, {"dataloader_drop_last": True})
    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, gradient_accumulation_steps=4, **config)
    with pytest.raises(InputError, match="no step was trained, because the data set has fewer rows than a batch"):
        trainer.train()


def test_an_optimizer_that_lacks_weights_is_refused(tmp_path):
    """Made before the adapter was, it has the base's weights, which are frozen, and would train nothing."""
    args, rows = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1), token_rows("sft")
    model, other = tiny_model(), tiny_model()
    lora = peft.LoraConfig(target_modules="all-linear")
    for given, peft_config in ((model, lora), (other, None)):
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        with pytest.raises(InputError, match=r"the optimizer lacks (\d+) of \1 weights that are trained \(such as"):
            SFTTrainer(model, args, None, rows, None, byte_tokenizer(), peft_config=peft_config,
                       optimizers=(optimizer, None))  # fmt: skip
        model = tiny_model()
    optimizer = torch.optim.SGD(model.model.layers.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"\(such as model.embed_tokens.weight\)"):
        SFTTrainer(model, args, None, rows, None, byte_tokenizer(), optimizers=(optimizer, None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SFTTrainer(model, args, None, rows, None, byte_tokenizer(), optimizers=(optimizer, None)).train()


def test_model_init_is_refused_with_what_to_do_instead(tmp_path):
    """A reference, an adapter and prepared rows are made from one model and one config."""
    given = {"processing_class": byte_tokenizer(), "train_dataset": token_rows("sft")}
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    for model in (None, tiny_model()):
        with pytest.raises(InputError, match=r"model_init is not supported, .* build a trainer for each trial"):
            SFTTrainer(model, args, model_init=tiny_model, **given)
    with pytest.raises(InputError, match="build a trainer for each trial"):
        SFTTrainer(tiny_model(), args, **given).hyperparameter_search()


@pytest.mark.parametrize("drawn", [3, 7, 9, 13])
def test_every_row_that_a_sampler_of_the_users_draws_counts(drawn, tmp_path):
    """As many as the data have, fewer or more; in training and evaluation."""
    order = [n % 9 for n in range(drawn)]
    rows, seen = token_rows("sft", 9), []
    trainer = trainer_for(
        "sft", tiny_model(), rows, tmp_path, eval_rows=rows, max_steps=-1, num_train_epochs=1, logging_steps=99,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer._get_train_sampler = trainer._get_eval_sampler = lambda rows=None: order
    losses = trainer.losses
    trainer.losses = lambda model, batch: seen.append(batch) or losses(model, batch)
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    for batches in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert [n for batch in batches for n in batch["index"].tolist()] == order
        assert all(batch["row_weights"].all() for batch in batches)
    del trainer._get_eval_sampler
    rows = datasets.Dataset.from_list(token_rows("sft", 9)).select(order)
    assert found == pytest.approx(trainer.evaluate(rows)["eval_loss"], rel=1e-6)


def test_a_compiled_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="Pass the original model"):
        trainer_for("sft", torch.compile(tiny_model()), token_rows("sft"), tmp_path)


def test_no_reporters_may_be_null(tmp_path):
    assert trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, report_to=None).args.report_to == []


@pytest.mark.parametrize("lora", [{}, {"peft_config": peft.LoraConfig(**LORA)}], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("own", "temperature", "longest"),
    [
        (GenerationConfig(temperature=0.6, do_sample=True, max_new_tokens=77), 0.6, 77),
        (GenerationConfig(temperature=0.6, max_new_tokens=77), 0.6, 77),  # which HF would refuse to save
        (GenerationConfig(length_penalty=0.8, max_new_tokens=77), None, None),  # and this, sampled or not
        (None, None, None),
    ],
)
def test_a_generation_config_that_replaces_the_models_is_saved(own, temperature, longest, lora, tmp_path, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **lora)
    trainer.model.generation_config = copy.deepcopy(own)
    trainer.save_model()
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.temperature, saved.max_new_tokens) == (temperature, longest)
    assert saved.eos_token_id == trainer.terminal_ids[0]
    assert ("replaced by the default one" in caplog.text) is (own is not None and longest is None)


def test_batch_rebalance_is_refused(tmp_path):
    with pytest.raises(InputError, match="Use random or group_by_length"):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, train_sampling_strategy="batch_rebalance")


def test_the_log_names_what_runs(tmp_path, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, gradient_accumulation_steps=2)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert "training on engine single, 1 process, 8 rows a step, no mixed precision" in caplog.text


def test_an_optimizer_without_its_package_is_told_with_the_config(tmp_path):
    if importlib.util.find_spec("galore_torch"):
        pytest.skip("galore_torch is installed")
    with pytest.raises(InputError, match=r"^optim: You need to install `galore_torch`") as raised:
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, optim="galore_adamw", optim_target_modules=["q"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", METHODS)
def test_training_rows_can_be_replaced_by_raw_ones(method, tmp_path, monkeypatch):
    """As trainers of transformers let it: `trainer.train_dataset = rows` before train."""
    fix_rollouts(monkeypatch)
    rows, logs = [raw_row(TABLE[method].rows, f"{n}+1=", str(n), "x") for n in range(8)], []
    for given in (rows, token_rows(method)):
        trainer = trainer_for(method, tiny_model(), given, tmp_path, second=second_model(method), learning_rate=1e-3)
        trainer.train_dataset = rows
        trainer.train()
        logs.append(trainer.state.log_history[0]["loss"])
    assert logs[0] == logs[1]


@pytest.mark.parametrize(
    "rows", ["data.jsonl", iter([{"prompt": "a"}]), ["a text"]], ids=["a path", "an iterator", "texts"]
)
def test_what_is_no_data_set_is_one_line(rows, tmp_path):
    with pytest.raises(InputError, match=r"is not a data set\. Pass"):
        trainer_for("sft", tiny_model(), rows, tmp_path)


@pytest.mark.parametrize("where", ["train", "eval", "replaced", "teacher"])
def test_tokens_that_the_model_lacks_are_told_at_construction(where, tmp_path):
    """One that no row has does no harm, such as Gemma 3's placeholder for pictures in its models of text."""
    method, model, rows = "kd" if where == "teacher" else "sft", tiny_model(vocab_size=300), token_rows("sft")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra {n}>" for n in range(50)])
    odd = datasets.Dataset.from_list([rows[0] | {"prompt_ids": [1, 301]}])
    second = model if where == "teacher" else None
    model = tiny_model(vocab_size=310) if where == "teacher" else model

    def build(train, evaluated=None):
        trainer = trainer_for(method, model, train, tmp_path, second=second, eval_rows=evaluated, tokenizer=tokenizer)
        if where == "replaced":
            trainer.train_dataset = odd
            trainer.train()

    given = {"eval": (rows, odd), "replaced": (rows,)}
    if where != "replaced":
        build(rows)
    with pytest.raises(InputError, match=r"uses id 301 \('<extra 42>'\), but the model has only 300 tokens"):
        build(*given.get(where, (odd,)))


def test_replaced_rows_are_cut_and_weighed_anew(tmp_path):
    rows, options = token_rows("kto", 9), {"max_length": 6, "desirable_weight": "auto", "undesirable_weight": "auto"}
    other = rows.map(lambda row: {"label": not row["label"]})
    trainer = trainer_for("kto", tiny_model(), rows, tmp_path, **options)
    assert trainer.class_weights == (1.0, 2.0)
    trainer.train_dataset = other
    trainer.train()
    assert trainer.class_weights == (2.0, 1.0)
    built = trainer_for("kto", tiny_model(), other, tmp_path, **options)
    assert trainer.train_dataset[:] == built.train_dataset[:]


def test_rows_that_a_cached_reference_has_not_seen_are_one_line(tmp_path):
    config = {"precompute_ref_log_probs": True}
    trainer = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config)
    trainer.train_dataset = [raw_row(TABLE["dpo"].rows)]
    with pytest.raises(
        InputError, match="Cannot compute reference log-probs for a dataset passed to the trainer after"
    ):
        trainer.train()


def test_rows_in_python_have_all_the_columns_of_each_and_are_read_as_those_of_a_file(tmp_path):
    """Whatever the first row has, and with arguments as they were written."""
    calls = [{"x": 1, "no": None}, {"x": 0.5}]
    rows = [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "f", "arguments": call}}]}]} for call in calls
    ]  # fmt: skip
    rows[1] |= {"system": "Rule.", "tools": [{"name": "f"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = byte_tokenizer()
    turn = "{{ m.role }}{{ m.content }}{{ m.tool_calls }}<|im_end|>"
    tokenizer.chat_template = f"{{{{ tools }}}}{{% for m in messages %}}{turn}{{% endfor %}}"
    made = [
        trainer_for("sft", tiny_model(), given, tmp_path, tokenizer=tokenizer).train_dataset[:]
        for given in (rows, load(Source(str(tmp_path / "rows.jsonl"))), rows[::-1])
    ]
    assert made[0] == made[1]
    assert made[0]["completion_ids"] == made[2]["completion_ids"][::-1]
    assert "Rule." in tokenizer.decode(made[0]["completion_ids"][1])
    with pytest.raises(InputError, match="train: the values of a column have incompatible types"):
        trainer_for("sft", tiny_model(), [{"text": "a"}, {"text": 5}], tmp_path)


def test_rows_that_another_trainer_scored_are_not_taken_in_evaluation_or_later_either(tmp_path):
    common = {"precompute_ref_log_probs": True, "max_steps": 1, "eval_rows": token_rows("dpo")}
    one = trainer_for("dpo", tiny_model(seed=1), token_rows("dpo"), tmp_path, **common)
    other = trainer_for("dpo", tiny_model(seed=2), token_rows("dpo"), tmp_path, **common)
    wanted = other.evaluate()["eval_loss"]
    assert other.evaluate(one.eval_dataset)["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert other.evaluate()["eval_loss"] == wanted
    other.train_dataset = one.train_dataset
    with pytest.raises(InputError, match="Cannot compute reference log-probs"):
        other.train()


def test_the_seed_is_of_a_new_adapters_weights_too(tmp_path):
    def weights(seed):
        torch.rand(3)
        lora = peft.LoraConfig()
        trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, peft_config=lora, seed=seed)
        return torch.cat([w.flatten() for name, w in trainer.model.named_parameters() if "lora_A" in name])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_column_that_a_format_hides_is_not_read(tmp_path):
    rows = datasets.Dataset.from_list([{"text": "1+1=2", "prompt": "q", "completion": "a"}])
    hidden = trainer_for("sft", tiny_model(), rows.with_format(columns=["text"]), tmp_path).train_dataset[:]
    assert hidden == trainer_for("sft", tiny_model(), rows.select_columns("text"), tmp_path).train_dataset[:]


BEST_IS_FIRST = {  # the loss falls, and the highest is wanted
    "max_steps": 4, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
    "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True,
}  # fmt: skip


def weights_of(folder):
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_the_best_step_is_saved_by_this_run_or_told(tmp_path, caplog):
    """A checkpoint of that step which an earlier run has left in the folder is none of this one."""
    rows = token_rows("sft")
    trainer_for("sft", tiny_model(seed=1), rows, tmp_path, **BEST_IS_FIRST | {"eval_steps": 1, "save_steps": 1},
                eval_rows=rows).train()  # fmt: skip

    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = True  # at steps that are not saved, too

    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, eval_rows=rows, callbacks=[Evaluate()], **BEST_IS_FIRST)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    assert trainer.state.best_global_step == 1
    assert "checkpoint-1 was not saved or is missing. The weights are of the last step" in caplog.text
    assert torch.equal(weights_of(tmp_path), weights_of(tmp_path / "checkpoint-4"))
    assert read_run(tmp_path).best_step is None


def test_a_run_whose_folder_was_moved_ends_with_its_best_weights(tmp_path):
    rows, first = token_rows("sft"), tmp_path / "first"
    trainer_for("sft", tiny_model(), rows, first, eval_rows=rows, **BEST_IS_FIRST).train()
    moved, other = first.rename(tmp_path / "moved"), tmp_path / "other"
    # another run is where the first was, and one more where this goes on
    for place in (first, other):
        trainer_for("sft", tiny_model(seed=1), rows, place, eval_rows=rows, **BEST_IS_FIRST).train()
    again = trainer_for("sft", tiny_model(), rows, other, eval_rows=rows, **BEST_IS_FIRST)
    again.train(resume_from_checkpoint=str(moved / "checkpoint-4"))
    again.save_model()
    assert torch.equal(weights_of(other), weights_of(moved / "checkpoint-2"))


def test_the_best_checkpoint_is_kept_however_the_resumed_one_is_spelled(tmp_path, monkeypatch):
    """It was deleted as one of the oldest, and the run ended without a model."""
    monkeypatch.chdir(tmp_path)
    rows, config = token_rows("sft"), BEST_IS_FIRST | {"eval_steps": 1, "save_steps": 1}
    trainer_for("sft", tiny_model(), rows, "run", eval_rows=rows, **config).train()
    again = trainer_for("sft", tiny_model(), rows, "run", eval_rows=rows, save_total_limit=2, **config)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.state.best_global_step == 1
    assert sorted(path.name for path in Path("run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-4"]


def test_evaluations_between_saves_are_refused_where_the_best_is_loaded(tmp_path):
    with pytest.raises(InputError, match="a checkpoint at each evaluation, not save_steps=4 and eval_steps=2"):
        trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **BEST_IS_FIRST | {"save_steps": 4})


def offloaded():
    model = tiny_model()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def on_disk():
    """A model that `device_map` has placed on CPU and on disk."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama").save_pretrained(folder)
        places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        return AutoModelForCausalLM.from_pretrained(
            folder, device_map=places | {"lm_head": "cpu"}, offload_folder=f"{folder}/offload"
        )


def compiled_in_place(part=lambda model: model):
    model = tiny_model()
    part(model).compile(backend="eager")
    return model


def compiled_forward():
    model = tiny_model()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


UNUSUAL = {
    "wrapped in DataParallel": lambda: torch.nn.DataParallel(tiny_model()),
    "the model is compiled. Pass it": compiled_in_place,
    "model of the model is compiled": lambda: compiled_in_place(lambda model: model.model),
    r"layers.1 of the model is compiled": lambda: compiled_in_place(lambda model: model.model.layers[1]),
    "the model is compiled. Pass it as": compiled_forward,
    "are offloaded": offloaded,
    r"are offloaded \(device_map\)": on_disk,
}


@pytest.mark.parametrize("role", ["policy", "teacher", "reference"])
@pytest.mark.parametrize("message", UNUSUAL)
def test_a_model_that_is_not_plain_is_refused(message, role, tmp_path):
    method = {"policy": "sft", "teacher": "kd", "reference": "dpo"}[role]
    given = (UNUSUAL[message](), None) if role == "policy" else (tiny_model(), UNUSUAL[message]())
    with pytest.raises(InputError, match=message):
        trainer_for(method, given[0], token_rows(method), tmp_path, given[1])


@pytest.mark.slow
def test_layers_that_torch_compile_compiled_may_be_compiled_again(tmp_path):
    model = tiny_model()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "activation_checkpointing": False}
    for _ in range(2):
        trainer_for("sft", model, token_rows("sft"), tmp_path, **options).train()


LATER = {  # attribute, value -> message, or None where it is honoured
    "model_init_kwarg": ({"dtype": "bfloat16"}, "has no effect: .*did you mean 'model_init_kwargs'"),
    "max_seq_length": (7, "has no effect: use max_length"), "padding": (True, "SFTConfig has no such option"),
    "bf16": (True, "was changed to True after SFTConfig was built"), "torch_compile": (True, "was changed"),
    "layout": ("rows", "is not one of"), "max_steps": (0, "num_train_epochs|max_steps"),
    "model_init_kwargs": ({"dtype": "bfloat16"}, "is already loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_what_is_assigned_to_args_later_is_honoured_or_refused(name, tmp_path):
    value, message = LATER[name]
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, num_train_epochs=0.5 if name != "max_steps" else 0.0001)
    if name == "max_steps":
        args.num_train_epochs = 0
    setattr(args, name, value)
    with pytest.raises(InputError, match=message):
        SFTTrainer(tiny_model(), args, train_dataset=token_rows("sft"), processing_class=byte_tokenizer())


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_either_name_of_checkpointing_may_be_assigned_later(name, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    setattr(args, name, False)
    trainer = SFTTrainer(tiny_model(), args, train_dataset=token_rows("sft"), processing_class=byte_tokenizer())
    assert (trainer.args.activation_checkpointing, trainer.args.gradient_checkpointing) == (False, False)
    SFTTrainer(tiny_model(), args, train_dataset=token_rows("sft"), processing_class=byte_tokenizer())


@pytest.mark.parametrize("later", [False, True])
def test_model_init_kwargs_are_those_of_the_model_that_is_loaded(later, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    wanted = {"dtype": "bfloat16", "attn_implementation": "eager", "device_map": None}
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, **({} if later else {"model_init_kwargs": wanted}))
    if later:
        args.model_init_kwargs = wanted
        args.trust_remote_code = False
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=token_rows("sft"))
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    for wrong in ({"dtype": "bf17"}, {"no_such_option": 1}):
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=wrong)
        with pytest.raises((InputError, TypeError), match=r"bf17|no_such_option"):
            SFTTrainer(str(tmp_path / "model"), args, train_dataset=token_rows("sft"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"atn_implementation": "eager"}, "has 'atn_implementation'; did you mean 'attn_implementation'?"),
        ({"rope_scalin": {}}, "neither from_pretrained nor the config of"),
        ({"max_position_embedings": 8}, "did you mean 'max_position_embeddings'?"),
        ({"dtpe": "bfloat16"}, "did you mean 'dtype'?"),
        ({"revision": "v2"}, "revision='v2' cannot be loaded by name. Download it"),
        ({"use_safetensors": False}, "use_safetensors=False requires trust_remote_code=True"),
        ({"load_in_4bit": True}, "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True)"),
        ({"from_tf": True}, "transformers no longer reads it"),
        ({"tp_plan": "auto"}, "tp_plan='auto' is not supported. Remove it. To shard it, use FSDP2 or ZeRO-3"),
        ({"distributed_config": {"tp_size": 2}}, "is not supported. Remove it. To shard it, use FSDP2 or ZeRO-3"),
        ({"output_loading_info": True}, "A trainer takes the model alone"),
    ],
)
def test_model_init_kwargs_that_nothing_reads_are_refused(wrong, message, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=wrong)
    with pytest.raises(InputError, match=f"^model_init_kwargs.*: .*{re.escape(message)}"):
        SFTTrainer(str(tmp_path / "model"), args, train_dataset=token_rows("sft"))


@pytest.mark.parametrize("passed", [False, True])
def test_a_chat_template_file_replaces_the_template_of_the_tokenizer(passed, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer(None).save_pretrained(tmp_path / "model")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "own.jinja").write_text(template)
    rows = [{"prompt": [{"role": "user", "content": "2?"}], "completion": [{"role": "assistant", "content": "4"}]}]
    args = SFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, chat_template_path=str(tmp_path / "own.jinja"))
    tokenizer = {"processing_class": byte_tokenizer()} if passed else {}
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=rows, **tokenizer)
    row = trainer.train_dataset[0]
    assert trainer.tokenizer.decode(row["prompt_ids"]) == "[user]2?<|im_end|>[assistant]"
    assert trainer.tokenizer.decode(row["completion_ids"]) == "4<|im_end|>"
    trainer.save_model()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    args.chat_template_path = "Qwen/Qwen3-4B"
    with pytest.raises(InputError, match="chat_template_path must be a Jinja file: there is no file Qwen/Qwen3-4B"):
        SFTTrainer(str(tmp_path / "model"), args, train_dataset=rows, **tokenizer)


def test_model_init_kwargs_of_scripts_and_fields_of_the_config_are_read(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    usual = {"revision": "main", "low_cpu_mem_usage": True, "device_map": None, "quantization_config": None}
    usual |= {"use_safetensors": True, "load_in_4bit": False, "output_loading_info": False}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    wanted = usual | {"use_cache": False, "attention_dropout": 0.25, "rope_scaling": rope}
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=wanted)
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=token_rows("sft"))
    assert trainer.model.config.attention_dropout == 0.25
    assert trainer.model.model.layers[0].self_attn.attention_dropout == 0.25


def test_fields_of_a_part_of_the_config_are_set_in_it():
    parts = {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 1}}
    config = AutoConfig.for_model("gemma3", **parts)
    left = apply_config_options(config, {"text_config": {"attention_dropout": 0.5}, "num_attention_heads": 2, "odd": 1})
    assert left == {"odd": 1}
    text = config.get_text_config()
    assert (text.attention_dropout, text.num_attention_heads, text.num_hidden_layers) == (0.5, 2, 2)
    assert apply_config_options(AutoConfig.for_model("gpt2"), {"num_hidden_layers": 3}) == {}
    read_only = {"to_dict": 1, "use_return_dict": False}
    assert apply_config_options(config, read_only) == read_only


def test_use_safetensors_holds_whatever_code_is_trusted(tmp_path):
    """Pickled weights are read where remote code is trusted, unless safetensors are asked for."""
    model = tiny_model()
    model.config.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    for trusted, safe, loads in ((True, None, True), (True, False, True), (True, True, False), (False, None, False)):
        kwargs = {"trust_remote_code": trusted, "use_safetensors": safe}
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs=kwargs)
        with nullcontext() if loads else pytest.raises(InputError, match="safetensors"):
            SFTTrainer(str(tmp_path / "model"), args, train_dataset=token_rows("sft"))


def test_a_stream_is_not_read_where_the_tokenizer_is_given(tmp_path):
    read = []

    def rows():
        for row in token_rows("sft"):
            read.append(1)
            yield row

    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1)
    before = []
    for given in (byte_tokenizer(), None):
        read.clear()
        tiny_model().save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        stream = datasets.IterableDataset.from_generator(rows)
        SFTTrainer(str(tmp_path / "model"), args, train_dataset=stream, processing_class=given)
        before.append(len(read))
    assert before[0] < before[1]  # the first row says whether a processor is needed


def test_a_trainer_may_have_an_abstract_base(tmp_path):
    class Own(SFTTrainer, abc.ABC):
        pass

    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    Own(tiny_model(), args, train_dataset=token_rows("sft"), processing_class=byte_tokenizer())


OF_TRL = [
    (lambda o: SFTConfig(o, use_cpu=True, loss_type="chunked_nll"), None),
    (lambda o: CPOConfig(o, use_cpu=True, loss_type="sigmoid"), None),
    (lambda o: RewardConfig(o, use_cpu=True, loss_type="nll"), None),
    (lambda o: RewardConfig(o, use_cpu=True, loss_type="sigmoid"), "this method has one loss"),
    (lambda o: CPOConfig(o, use_cpu=True, loss_type="aot"), "is not one of sigmoid, hinge, ipo, simpo"),
    (lambda o: DPOConfig(o, use_cpu=True, loss_type=["sft", "aot"]), "loss_type='aot' is not supported, because"),
    (lambda o: SFTConfig(o, use_cpu=True, loss_type="sigmoid"), "is not one of nll, chunked_nll, dft"),
    (lambda o: KDConfig(o, use_cpu=True, loss_type="jsd"), "distillation on data calls it divergence"),
    (lambda o: hf_posttrain.SFTTrainer(tiny_model(), tiny_model(), args=None), "is args, which is also a keyword"),
    (lambda o: SFTTrainer(tiny_model(), SFTConfig(o, use_cpu=True)), "`train_dataset` is required"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_TRL)))
def test_what_scripts_of_trl_say_is_taken_or_answered(number, tmp_path):
    call, message = OF_TRL[number]
    if message is None:
        taken = "chunked_nll", "sigmoid", None
        assert getattr(call(str(tmp_path)), "loss_type", None) == taken[number]
        return
    with pytest.raises((InputError, ImportError), match=message):
        call(str(tmp_path))


@pytest.mark.parametrize("method", ["sft", "dpo", "kd"])
def test_the_models_that_trls_users_look_at(method, tmp_path):
    second = tiny_model(seed=9) if method == "kd" else None
    trainer = trainer_for(method, tiny_model(), token_rows(method), tmp_path, second)
    assert trainer.teacher_model is second
    assert (trainer.ref_model is not None) == (method == "dpo")
    assert trainer.ref_model is not trainer.model
    assert trainer.aux_loss_enabled is False
    trainer.train_dataset = None
    with pytest.raises(InputError, match="`train_dataset` is required"):
        trainer.train()


def test_a_mixin_between_our_trainers_and_that_of_transformers_is_reached(tmp_path):
    """All that replaces a method of Trainer calls the next one."""
    called = []

    def watched(name):
        def method(self, *args, **kwargs):
            called.append(name)
            return getattr(super(Between, self), name)(*args, **kwargs)

        return method

    names = ("training_step", "evaluation_loop", "_get_dataloader", "_maybe_log_save_evaluate", "_save_checkpoint",
             "_save", "_load_optimizer_and_scheduler", "_init_training_state", "_get_output_dir", "log", "train",
             "create_model_card")  # fmt: skip
    Between = type("Between", (Trainer,), {name: watched(name) for name in names})
    mine = type("Mine", (SFTTrainer, Between), {})
    rows = token_rows("sft")
    args = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, save_steps=1, eval_strategy="steps", report_to="none"
    )
    trainer = mine(tiny_model(), args, train_dataset=rows, eval_dataset=rows, processing_class=byte_tokenizer())
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    trainer.create_model_card()
    assert {*called} == {*names}
