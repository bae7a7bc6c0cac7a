"""One optimizer step of any method through its real trainer: the loss, and the gradient of every trained tensor."""

import copy
import os
import random
from pathlib import Path

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification, TrainerCallback

from hf_posttrain import report
from hf_posttrain.generation import rollout
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods import config_class, trainer_class
from hf_posttrain.trainer import saving

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
TIMES = ("runtime", "per_second", "peak_memory", "total_flos", "train_loss")
METHODS = tuple(TABLE)
"""Names of all methods."""
DEVICE = {"use_cpu": False, "bf16": False} if os.environ.get("TEST_DEVICE") == "cuda" else {"use_cpu": True}
"""Options of `trainer_for`: tests train in float32 on the GPU with `TEST_DEVICE=cuda`, else on CPU."""


def names_where(test):
    """The methods whose row of the table passes a test."""
    return [name for name, method in TABLE.items() if test(method)]


def usual(method):
    """Options that tests have unless they say otherwise."""
    row = TABLE[method]
    options = {"max_completion_length": 6} if row.rows.sampled else {}
    return options | ({"precompute_ref_log_probs": False} if row.second == "reference" else {})


def has_head(method, architecture):
    """Whether transformers has the method's head for an architecture: not all have a sequence classifier."""
    config = type(tiny_model(architecture).config)
    return TABLE[method].head == "language" or config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def second_model(method, architecture="qwen3", seed=9, teachers_only=True):
    """Another model alongside the policy: the teacher of methods with one, and on request an explicit reference."""
    wanted = TABLE[method].second == "teacher" or (TABLE[method].second and not teachers_only)
    return tiny_model(architecture, seed=seed) if wanted else None


def quick(*names, among):
    """All of them as parameters, those that are not named marked slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in among]


def every_other(among):
    """All of them as parameters, every second one marked slow."""
    return quick(*[*among][::2], among=among)


def token_rows(method, count=8, seed=0):
    """Already tokenised rows of unequal lengths; some completions have a hole in their mask."""
    draw = random.Random(seed)
    ids = lambda low, high: [draw.randrange(250) for _ in range(draw.randint(low, high))]  # noqa: E731
    rows = []
    for n in range(count):
        row = {"prompt_ids": ids(1, 9), "completion_ids": ids(2, 8), "chosen_ids": ids(1, 8), "rejected_ids": ids(1, 8)}
        mask = [1] * len(row["completion_ids"])
        if n % 3 == 0:
            mask[len(mask) // 2] = 0
        row |= {"completion_mask": mask, "label": n % 3 != 1, "margin": (n % 3) / 2}
        rows.append({name: row[name] for name in TABLE[method].rows.columns if name in row})
    return datasets.Dataset.from_list(rows)


def trainer_for(method, model, rows, tmp_path, second=None, eval_rows=None, callbacks=None, **config):
    """The method's trainer on `DEVICE` with a constant learning rate; nothing is clipped, saved or reported.

    second: the teacher, or an explicit reference.
    """
    row = TABLE[method]
    model = as_reward_model(model) if row.head == "score" else model
    peft_config, tokenizer = config.pop("peft_config", None), config.pop("tokenizer", None)
    config = {
        "output_dir": str(tmp_path), "max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "activation_checkpointing": False, "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    } | DEVICE | usual(method) | config  # fmt: skip
    kwargs = {} if second is None else {f"{'ref' if row.second == 'reference' else row.second}_model": second}
    return trainer_class(row)(
        model, config_class(row)(**config), None, rows, eval_rows, tokenizer or byte_tokenizer(),
        peft_config=peft_config, callbacks=callbacks, **kwargs,
    )  # fmt: skip


def train_with_report(trainer):
    """Train, save and write the report, as README has it, and return the text of the model card."""
    folder = Path(trainer.args.output_dir)
    report.follow(trainer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    report.write(folder)
    return (folder / "README.md").read_text(encoding="utf-8")


def as_reward_model(model):
    """A sequence classifier with one label on the backbone of a causal LM, with a score layer of a fixed seed."""
    if "ForSequenceClassification" in type(model).__name__:
        return model
    if isinstance(model, peft.PeftModel):
        model.base_model.model = as_reward_model(model.get_base_model())
        model.base_model.model.score.requires_grad_(False)
        return model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    torch.manual_seed(0)
    reward_model = AutoModelForSequenceClassification.from_config(config).to(model.dtype)
    setattr(reward_model, reward_model.base_model_prefix, model.base_model)
    return reward_model.eval()


def policy_of(trainer):
    """The model inside the wrappers."""
    return trainer.accelerator.unwrap_model(trainer.model_wrapped)


def logged(trainer):
    """What a run logged, without its times and memory, which differ from run to run."""
    return [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in trainer.state.log_history]


def logs_and_weights(trainer, lora):
    """What a run logged, without its times, and its trained weights, whole on rank 0; all ranks call it."""
    logs = logged(trainer)
    state = saving.full_state_dict(trainer, adapter_only=lora) or policy_of(trainer).state_dict()
    return logs, {name: tensor.cpu().clone() for name, tensor in state.items() if not lora or "lora_" in name}


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None})


def one_step(method, model, rows, tmp_path, **config):
    """(loss, {name: gradient}) of the first step on a copy of the model."""
    keep = Gradients()
    trainer = trainer_for(method, copy.deepcopy(model), rows, tmp_path, callbacks=[keep], **config)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keep.steps[0]


def assert_same_step(found, expected, relative=1e-5):
    """Equal losses, and ||dg|| / ||g|| of each tensor within `relative` (tiny tensors: within 1e-6 of the whole)."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    whole = torch.sqrt(sum((g.double() ** 2).sum() for g in expected[1].values()))
    assert whole > 0
    for name, g in expected[1].items():
        error, size = (found[1][name] - g).double().norm(), g.double().norm()
        assert error <= max(relative * size, 1e-6 * whole), f"{name}: {error / size:.2e} of its norm"


def assert_same_run(found, expected):
    """Equal (logs, trained weights) of runs on one process and on several, up to rounding in float32."""
    (logs, weights), (expected_logs, expected_weights) = found, expected
    for own, theirs in zip(logs, expected_logs, strict=True):
        assert own == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert weights.keys() == expected_weights.keys()
    for key, tensor in expected_weights.items():
        torch.testing.assert_close(weights[key].float(), tensor.float(), rtol=1e-4, atol=2e-5, msg=key)


def fake_generate(model, prompts, max_new_tokens, terminal_ids, *args, **kwargs):
    """Rollouts that depend on the prompt and on how often it was asked for alone, in place of sampling."""
    seen, rollouts = {}, []
    for prompt in map(tuple, prompts):
        seen[prompt] = seen.get(prompt, 0) + 1
        draw = random.Random(sum(prompt) + 1000 * seen[prompt])
        rollouts.append([draw.randrange(250) for _ in range(draw.randint(1, max_new_tokens - 1))] + [terminal_ids[0]])
    return rollouts


def fix_rollouts(monkeypatch):
    """Replace sampling by `fake_generate`."""
    monkeypatch.setattr(rollout, "generate", fake_generate)
