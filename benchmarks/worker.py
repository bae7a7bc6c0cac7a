"""One training run of one side, in a process of its own so that its peak memory is its own.

    python -m benchmarks.worker SPEC.json       the spec of `benchmarks.run`; the result is written to spec["result"]

Both sides: AdamW, float32, no activation checkpointing, no evaluation, no saving, the same batches in the same order.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import psutil
from transformers import AutoTokenizer, TrainerCallback

from .setting import build_model

GB = 2**30


class Clock(TrainerCallback):
    """The time at the end of each optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self.times.append(time.perf_counter())


def common(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments that both sides take."""
    return {
        "output_dir": spec["folder"] + "/out", "per_device_train_batch_size": spec["batch"], "num_train_epochs": 1,
        "optim": "adamw_torch", "learning_rate": 1e-6, "lr_scheduler_type": "constant", "max_length": 1024,
        "train_sampling_strategy": "sequential", "logging_steps": 10**6, "save_strategy": "no", "eval_strategy": "no",
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip


def ours(spec: dict[str, Any], rows: list[dict], **given: Any) -> Any:
    """The trainer of hf_posttrain."""
    import hf_posttrain

    method = spec["method"]
    options: dict[str, Any] = {"precompute_ref_log_probs": True} if spec["cached"] else {}
    if method == "kd":  # what GKD at lmbda 0 minimises
        options = {"kd_coef": 1.0, "divergence": "forward_kl"}
        given["teacher_model"] = build_model(Path(spec["folder"]), seed=1)
    config, trainer = (getattr(hf_posttrain, method.upper() + kind) for kind in ("Config", "Trainer"))
    args = config(**common(spec), activation_checkpointing=False, **options)
    return trainer(args=args, train_dataset=datasets.Dataset.from_list(rows), **given)


def trl(spec: dict[str, Any], rows: list[dict], **given: Any) -> Any:
    """TRL's trainer for it: its fused head is the default, its activation checkpointing is turned off."""
    import trl
    from trl.experimental import gkd

    method = spec["method"]
    options: dict[str, Any] = {"precompute_ref_log_probs": True} if spec["cached"] else {}
    module: Any = trl
    name = method.upper()
    if method == "kd":
        module, name = gkd, "GKD"
        options = {"lmbda": 0.0, "beta": 0.0, "temperature": 1.0}
        given["teacher_model"] = build_model(Path(spec["folder"]), seed=1)
        roles = (("user", "prompt"), ("assistant", "completion"))
        rows = [{"messages": [{"role": role, "content": row[column]} for role, column in roles]} for row in rows]
    elif method in ("dpo", "kto") and not spec["cached"]:
        given["ref_model"] = build_model(Path(spec["folder"]), seed=0)  # it would load the reference by name
    args = getattr(module, f"{name}Config")(**common(spec), gradient_checkpointing=False, **options)
    return getattr(module, f"{name}Trainer")(args=args, train_dataset=datasets.Dataset.from_list(rows), **given)


SIDES = {"ours": ours, "trl": trl}


def trained_tokens(trainer: Any) -> int:
    """Tokens that the loss is over in one pass: the check that both sides do the same work."""
    total = 0
    for batch in trainer.get_train_dataloader():
        if "completion_mask" in batch:
            total += int(batch["completion_mask"].sum())
        else:
            total += int((batch["shift_labels" if "shift_labels" in batch else "labels"] != -100).sum())
    return total


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Rows per second after the first step, and memory in GB: the peak, and how much of it came after the model."""
    rows = [json.loads(line) for line in Path(spec["rows"]).read_text(encoding="utf-8").splitlines()]
    folder, clock = Path(spec["folder"]), Clock()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), build_model(folder, seed=0)
    before = psutil.Process().memory_info().rss
    trainer = SIDES[spec["side"]](spec, rows, model=model, processing_class=tokenizer, callbacks=[clock])
    loss = trainer.train().training_loss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds = clock.times[-1] - clock.times[0]
    return {
        "rows_per_second": spec["batch"] * (len(clock.times) - 1) / seconds,
        "peak_gb": peak / GB,
        "added_gb": (peak - before) / GB,
        "loss": loss,
        "tokens": trained_tokens(trainer),
        "steps": len(clock.times),
    }


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(measure(given)), encoding="utf-8")
