"""The two sides of a benchmark: a trainer of hf_posttrain and TRL's best supported setting of the same method.

Both: AdamW, no activation checkpointing unless the spec asks for it, no evaluation, no saving, the same rows in the
same order.
"""

from pathlib import Path
from typing import Any

import datasets

from .setting import build_model, ends

NEW_TOKENS = 128
"""Longest rollout of OPD, if the spec has no `new_tokens`."""
BACKENDS = {"cuda": "inductor", "cpu": "aot_eager"}
"""Of torch.compile; on CPU it is to run, not to be quick."""


def common(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments that both sides take."""
    return {
        "output_dir": str(Path(spec["folder"], "out")),
        "per_device_train_batch_size": spec["batch"],
        "num_train_epochs": 1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1 if spec["method"] == "opd" else 10**6,  # OPD's diagnostics are part of its usual use
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "use_cpu": spec["device"] == "cpu",
        "bf16": spec["bf16"],
        "disable_tqdm": True,
        "seed": 0,
        "use_liger_kernel": spec["liger"],
    }


def row_options(spec: dict[str, Any]) -> dict[str, Any]:
    """The options of rows and their reference, which both sides have under the same names."""
    options: dict[str, Any] = {"max_length": spec["max_length"]}
    if spec["variant"] == "cached" and spec["method"] in ("dpo", "kto"):
        options |= {"precompute_ref_log_probs": True}
    return options | ({"packing": True} if spec["variant"] == "packed" else {})


def class_prefix(method: str) -> str:
    """Return how the names of the Config and the trainer of a method begin."""
    return "Reward" if method == "rm" else method.upper()


def lora(spec: dict[str, Any]) -> dict[str, Any]:
    """The adapter that both sides train, on request."""
    import peft

    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return {"peft_config": config} if spec["lora"] else {}


def ours(spec: dict[str, Any], rows: list[dict], **given: Any) -> Any:
    """The trainer of hf_posttrain."""
    import hf_posttrain

    method = spec["method"]
    longest = spec.get("new_tokens", NEW_TOKENS)
    options = row_options(spec)
    if spec["compile"]:
        options |= {"torch_compile": True, "torch_compile_backend": BACKENDS[spec["device"]]}
    if method == "kd":  # what GKD at lmbda 0 minimises
        options |= {"kd_coef": 1.0, "divergence": "forward_kl"}
    if method == "opd":  # TRL's has no limit of the prompt
        options |= {"max_completion_length": longest, "max_length": spec["max_length"] + longest}
    if method in ("kd", "opd"):
        given["teacher_model"] = build_model(spec, seed=1)
    if method == "kd" and spec["variant"] == "cached":
        options |= {"teacher": {"precompute": True}}  # its hidden states, before the steps that are measured
    config, trainer = (getattr(hf_posttrain, class_prefix(method) + kind) for kind in ("Config", "Trainer"))
    args = config(**common(spec), activation_checkpointing=spec.get("checkpointing", False), **options)
    built = trainer(args=args, train_dataset=datasets.Dataset.from_list(rows), **given, **lora(spec))
    if method == "opd":
        built.terminal_ids = ends(built.vocabulary)
    return built


def trl(spec: dict[str, Any], rows: list[dict], **given: Any) -> Any:
    """TRL's trainer for it: its fused head is the default, its activation checkpointing is turned off."""
    import trl
    from trl.experimental import cpo, gkd

    method = spec["method"]
    name = class_prefix(method)
    longest = spec.get("new_tokens", NEW_TOKENS)
    module: Any = trl
    options = row_options(spec)
    if method in ("kd", "opd"):
        given["teacher_model"] = build_model(spec, seed=1)
    if method == "kd":
        module = gkd
        name = "GKD"
        options |= {"lmbda": 0.0, "beta": 0.0, "temperature": 1.0}
        roles = (("user", "prompt"), ("assistant", "completion"))
        rows = [{"messages": [{"role": role, "content": row[column]} for role, column in roles]} for row in rows]
    elif method == "opd":
        given["model"].generation_config.eos_token_id = ends(given["model"].config.vocab_size)
        name = "Distillation"
        options = {"max_completion_length": longest, "beta": 1.0, "shuffle_dataset": False}
    elif method == "cpo":
        module = cpo
    elif method in ("dpo", "kto") and spec["variant"] != "cached" and not spec["lora"]:
        given["ref_model"] = build_model(spec, seed=0)  # it would load the reference by name
    if spec["compile"]:
        options |= {"torch_compile": True, "torch_compile_backend": BACKENDS[spec["device"]]}
    if spec["liger"]:  # it would replace the forward that TRL's fused head is in
        options["liger_kernel_config"] = {"fused_linear_cross_entropy": False}
    checkpointing = spec.get("checkpointing", False)
    args = getattr(module, f"{name}Config")(**common(spec), gradient_checkpointing=checkpointing, **options)
    trainer = getattr(module, f"{name}Trainer")
    return trainer(args=args, train_dataset=datasets.Dataset.from_list(rows), **given, **lora(spec))


SIDES = {"ours": ours, "trl": trl}
