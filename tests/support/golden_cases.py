"""Three optimizer steps of every method, loss, teacher, layout and adapter on tiny models, for `tests/test_golden.py`.

`CASES` maps the name of a case to its `Case`; `record` trains it and returns what `tests/golden.json` stores:

    loss, grad_norm     one number per optimizer step
    eval_loss           after the last step
    logs                SHA-256 of all logged metrics, without durations, memory and OPD's diagnostics
    weights             SHA-256 of the trained weights

Write the file again with `python -m tests.record_golden`, and only for a change of numbers that the changelog explains.
"""

import hashlib
import itertools
import json
import platform
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer, gpt2_tokenizer
from training_for_tests import LORA, logs_and_weights, second_model, token_rows, trainer_for

from hf_posttrain.methods.rules import (
    CONTRASTIVE_LOSSES,
    DIVERGENCES,
    PAIRED_LOSSES,
    POLICY_GRADIENT,
    REFERENCE_FREE_LOSSES,
    UNPAIRED_LOSSES,
)
from hf_posttrain.models.config import TeacherSection
from hf_posttrain.rollouts.options import TOKEN_WEIGHTS

LAYOUTS = ("shared", "packed", "padded")


@dataclass(frozen=True)
class Case:
    """One training run."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)  # of the method's Config
    teacher: str = "local"  # a key of `TEACHERS`
    architecture: str = "qwen3"
    sampled: bool = False  # sample rollouts from the policy, in place of `fake_generate`
    layout: str = "shared"
    lora: bool = False


DIAGNOSTIC = re.compile("position/|distill/(student_entropy|teacher_entropy|top1_agreement|near_mass|special_share)")
TEACHERS = ("local", "several", "mixed", "self", "ema", "served", "across", "prompt")
"""One model in memory; two by row; one in memory and one served; the student's first weights; their moving average; a
server; a model with another tokenizer; and a model that reads another prompt."""
OTHER_EOS = 256
"""A special id that ends the answers of the local teacher where `merge_eos` merges it with the student's EOS."""

VARIATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
"""Name -> (method, options of its Config, other fields of `Case`)."""


def _vary(method: str, name: str, options: dict[str, Any], **fields: Any) -> None:
    VARIATIONS[f"{method}-{name}"] = method, options, fields


for loss in ("nll", "dft", "eaft"):
    _vary("sft", loss, {"loss_type": loss})
_vary("sft", "neftune", {"neftune_noise_alpha": 5.0})
_vary("sft", "capped_logits", {}, architecture="gemma2")
_vary("sft", "experts", {"router_aux_loss_coef": 0.01}, architecture="qwen3_moe")
for loss in PAIRED_LOSSES:
    _vary("dpo", loss, {"loss_type": loss} | ({"label_smoothing": 1e-3} if loss == "exo_pair" else {}))
_vary("dpo", "smoothed", {"label_smoothing": 0.1})
_vary("dpo", "mixed", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0]})
_vary("dpo", "nll_coef", {"nll_coef": 0.5})
_vary("dpo", "cached_reference", {"precompute_ref_log_probs": True})
_vary("dpo", "windowed", {}, architecture="mistral")
for loss in UNPAIRED_LOSSES:
    _vary("kto", loss, {"loss_type": loss})
_vary("kto", "weights", {"desirable_weight": "auto", "undesirable_weight": 0.7})
_vary("kto", "cached_reference", {"precompute_ref_log_probs": True})
for loss in CONTRASTIVE_LOSSES:
    _vary("cpo", loss, {"loss_type": loss})
_vary("cpo", "no_nll", {"cpo_alpha": 0.0})
_vary("rm", "center", {"center_rewards_coefficient": 0.01})
for divergence in DIVERGENCES:
    _vary("kd", divergence, {"divergence": divergence})
    _vary("kd", f"{divergence}-top_k", {"divergence": divergence, "teacher": {"top_k": 8}})
    _vary("opd", divergence, {"loss_type": divergence})
    _vary("opd", f"{divergence}-top_k", {"loss_type": divergence, "teacher": {"top_k": 8}})
_vary("kd", "temperature", {"temperature": 0.7, "kd_coef": 1.0})
_vary("kd", "cached_top_k", {"teacher": {"top_k": 8, "precompute": True}})
_vary("kd", "cached_hidden_states", {"teacher": {"precompute": True}})
_vary("kd", "generalized", {"teacher": {"top_k": 8, "top_k_remainder": "generalized"}})
_vary("kd", "merged_eos", {"teacher": {"merge_eos": True}})
_vary("kd", "capped_logits", {"divergence": "reverse_kl"}, architecture="gemma2")
_vary("opd", POLICY_GRADIENT, {"loss_type": POLICY_GRADIENT})

_vary("opd", "temperature", {"temperature": 0.7})
_vary("opd", "several_rollouts", {"num_generations": 2})
_vary("opd", "replay", {"rollouts": {"source": "replay", "fresh_fraction": 0.5}})
_vary("opd", "frozen", {"rollouts": "frozen"})
_vary("opd", "frozen-cached_top_k", {"rollouts": "frozen", "teacher": {"top_k": 8, "precompute": True}})
_vary("opd", "frozen-cached_hidden_states", {"rollouts": "frozen", "teacher": {"precompute": True}})
_vary("opd", "residual", {"teacher": {"top_k": 8, "top_k_remainder": "residual"}})
_vary("opd", "data_share", {"lmbda": 0.5})
_vary("opd", "horizon", {"rollouts": {"train_max_tokens": {"from": 2, "to": 6, "steps": 3}}})
_vary("opd", "no_diagnostics", {"diagnostics": False})
_vary("opd", "merged_eos", {"teacher": {"merge_eos": True}})
_vary("opd", "capped_logits", {"loss_type": POLICY_GRADIENT}, architecture="gemma2")
_vary("opd", "reward", {
    "loss_type": POLICY_GRADIENT, "num_generations": 2, "reward": {"function": "exact_match", "coef": 0.5},
})  # fmt: skip
_vary("opd", "sampled", {"num_generations": 2}, sampled=True)
_vary("opd", f"sampled-{POLICY_GRADIENT}", {"loss_type": POLICY_GRADIENT}, sampled=True)
_vary("opd", "sampled-replay", {"rollouts": "replay"}, sampled=True)
_vary("opd", "sampled-frozen", {"rollouts": "frozen", "seed": 1}, sampled=True)
for weights, kind in TOKEN_WEIGHTS.kinds.items():
    options = {"loss_type": POLICY_GRADIENT} if kind.requires_advantage else {}
    _vary("opd", f"token_weights-{weights}", options | {"token_weights": weights})
for method, teacher in itertools.product(("kd", "opd"), TEACHERS[1:]):
    common: dict[str, Any] = {"teacher": {"top_k": 8}} if teacher in ("mixed", "served") else {}
    _vary(method, f"teacher_{teacher}", common, teacher=teacher)
    name = "divergence" if method == "kd" else "loss_type"
    _vary(method, f"teacher_{teacher}-jsd", common | {name: "jsd"}, teacher=teacher)
for teacher in TEACHERS[1:]:
    _vary("opd", f"teacher_{teacher}-{POLICY_GRADIENT}", {"loss_type": POLICY_GRADIENT}, teacher=teacher)

CASES = {
    f"{name}-{layout}-{'lora' if lora else 'full'}": Case(method, options, layout=layout, lora=lora, **fields)
    for name, (method, options, fields) in VARIATIONS.items()
    for layout, lora in itertools.product(LAYOUTS, (False, True))
}
"""Every variation in every layout, with all weights trained and with LoRA."""
QUICK = {f"{name}-{LAYOUTS[number % 3]}-{('full', 'lora')[number // 3 % 2]}" for number, name in enumerate(VARIATIONS)}
"""One case of each variation."""


def machine() -> str:
    """Return what the rounding of float32 depends on: processor, its instructions and caches, threads, and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    told = sorted({line for line in lines if line.startswith(("model", "stepping", "cache size", "flags"))})
    processor = hashlib.sha256("\n".join([platform.processor(), *told]).encode()).hexdigest()[:12]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"processor {processor}, {torch.get_num_threads()} threads, {versions}"


def rows_of(case: Case, count: int, seed: int) -> datasets.Dataset:
    """Tokenised rows, with the columns that the teacher of the case reads."""
    rows = token_rows(case.method, count, seed).to_list()
    for number, row in enumerate(rows):
        if case.teacher in ("several", "mixed"):
            row["teacher"] = "a" if number % 3 else "b"
        if case.teacher in ("self", "ema", "prompt", "across"):
            row["teacher_prompt_ids"] = [3, number + 1, *row["prompt_ids"]]
        if case.method == "kd" and case.teacher == "across":
            row["completion_mask"] = [1] * len(row["completion_ids"])
        if case.options.get("reward") and number % 2:
            row["completion_ids"] = [*row["completion_ids"][:2], 258]
    return datasets.Dataset.from_list(rows)


def teacher_of(case: Case, url: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """The second model of the case, and the options that it needs."""
    if case.method not in ("kd", "opd"):
        loss = case.options.get("loss_type")
        free = isinstance(loss, str) and loss in REFERENCE_FREE_LOSSES
        return None if free else second_model(case.method, case.architecture, teachers_only=False), {}
    if case.teacher in ("self", "ema"):
        average = {"ema": 0.5} if case.teacher == "ema" else {}
        section = TeacherSection(self="ema" if average else "start", **average)
        return section, {"teacher": {"prompt": "{{ prompt }}"}}
    if case.teacher == "prompt":
        return tiny_model(seed=9), {"teacher": {"prompt": "{{ prompt }}"}}
    if case.teacher == "several":
        return {"a": tiny_model(seed=5), "b": tiny_model(seed=9)}, {"teacher": {"names": ["a", "b"]}}
    if case.teacher == "across":
        gpt2_tokenizer().save_pretrained(folder)
        return tiny_model(seed=5, vocab_size=420), {"teacher": {"tokenizer": folder}}
    if case.teacher in ("served", "mixed"):
        byte_tokenizer().save_pretrained(folder)
        tiny_model(seed=5).config.save_pretrained(folder)
        section = TeacherSection(url=url, name_or_path=folder)
        if case.teacher == "served":
            return section, {}
        return {"a": tiny_model(seed=9), "b": section}, {"teacher": {"names": ["a", "b"]}}
    teacher = tiny_model(case.architecture, seed=9)
    if case.options.get("teacher", {}).get("merge_eos"):
        teacher.generation_config.eos_token_id = OTHER_EOS
    return teacher, {}


def trainer_of(case: Case, url: str, folder: str) -> Any:
    """The case's trainer. url: the server of `TEACHERS`' served teacher."""
    second, options = teacher_of(case, url, folder)
    if "teacher" in options and "teacher" in case.options:
        options["teacher"] |= case.options["teacher"]
    more = {"peft_config": peft.LoraConfig(**LORA)} if case.lora else {}
    return trainer_for(
        case.method, tiny_model(case.architecture), rows_of(case, 12, 0), folder, second,
        eval_rows=rows_of(case, 4, 1), max_steps=3, learning_rate=1e-2 if case.lora else 1e-3, max_grad_norm=1.0,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, per_device_eval_batch_size=2,
        layout=case.layout, **case.options | options, **more,
    )  # fmt: skip


def record(case: Case, url: str) -> dict[str, Any]:
    """Train the case for three steps."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, url, folder)
        trainer.train()
        eval_loss = trainer.evaluate()["eval_loss"]
        logs, weights = logs_and_weights(trainer, case.lora)
    logs = [{name: value for name, value in log.items() if not DIAGNOSTIC.match(name)} for log in logs]
    steps = [log for log in logs if "loss" in log]
    weights = {name: weights[name] for name in sorted(weights)}
    return {
        "loss": [log["loss"] for log in steps],
        "grad_norm": [float(log["grad_norm"]) for log in steps],
        "eval_loss": eval_loss,
        "logs": hashlib.sha256(json.dumps(logs, sort_keys=True, default=float).encode()).hexdigest()[:16],
        "weights": hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()[:16],
    }
