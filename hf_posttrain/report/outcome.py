"""How a run went, in a few facts, and what a reader should worry about.

    facts(run)       (name, value, remark) of what matters first
    warnings(run)    sentences
    setup(run)       (name, value) of the hyper-parameters
    finals(run)      (metric, training, evaluation): the last values
"""

import math
from typing import Any, NamedTuple

from .history import Series, number
from .run_folder import Run

NAMES = {
    "sft": "supervised fine-tuning", "dpo": "direct preference optimisation",
    "kto": "Kahneman-Tversky optimisation", "kd": "knowledge distillation", "opd": "on-policy distillation",
}  # fmt: skip
KEY_METRICS = {
    "sft": ("mean_token_accuracy",), "dpo": ("rewards/accuracies", "rewards/margins"), "kto": ("rewards/margins", "kl"),
    "kd": ("distill/divergence",), "opd": ("distill/reverse_kl", "generation/length"),
}  # fmt: skip
"""What tells best whether a method works, beside loss and exact match; `progress` shows it too."""
LABELS = {
    "exact_match": "Exact match", "mean_token_accuracy": "Token accuracy", "rewards/accuracies": "Reward accuracy",
    "rewards/margins": "Reward margin", "kl": "KL estimate", "distill/divergence": "Divergence from teacher",
    "distill/reverse_kl": "Reverse KL to teacher", "generation/length": "Rollout length", "loss": "Loss",
}  # fmt: skip

MACHINERY = (
    "output_dir", "use_cpu", "report_to", "run_name", "project", "trackio_", "logging_", "log_", "save_", "eval_",
    "per_device_eval", "dataset_num_proc", "hub_", "push_to_hub", "resume_from_checkpoint", "stop_on", "merge_lora",
    "layout", "precompute_ref_", "vllm_", "rollout", "generation_batch_size", "disable_tqdm", "dataloader_", "ddp_",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "skip_memory_metrics",
)  # fmt: skip
"""Arguments, or how they begin, that neither the weights nor what a loss measures hang on; the recipe has them."""


class Fact(NamedTuple):
    """A number at the top of the page."""

    name: str
    value: str
    remark: str


def facts(run: Run) -> list[Fact]:
    """Loss, the method's key metrics (of evaluation where there is one), steps and time."""
    found = [_fact(run, metric) for metric in ("loss", "exact_match", *KEY_METRICS.get(run.method, ()))]
    return [fact for fact in found if fact] + _effort(run)


def _fact(run: Run, metric: str) -> Fact | None:
    held_out = f"eval_{metric}" in run.history
    series = run.history.get(f"eval_{metric}" if held_out else metric)
    if series is None:
        return None
    split = "evaluation" if held_out else "training"
    remark = f"{split}, from {number(series.values[0])}" if len(series.steps) > 1 else split
    return Fact(LABELS[metric], number(series.last), remark)


def _effort(run: Run) -> list[Fact]:
    taken, planned = run.steps
    epochs = run.state.get("epoch")
    remark = f"{number(epochs)} epochs" if epochs is not None else ""
    found = [Fact("Steps", number(taken) if taken >= planned else f"{number(taken)} of {number(planned)}", remark)]
    if seconds := run.results.get("train_runtime"):
        rate = run.results.get("train_samples_per_second")
        found.append(Fact("Time", duration(seconds), f"{number(rate)} rows a second" if rate else ""))
    return found


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def warnings(run: Run) -> list[str]:
    """What the data check and the run itself warned of, and what the logs show."""
    said = [str(text) for text in run.audit.get("warnings", [])]
    said += [_dated(item) for item in run.record.get("warnings", [])]
    broken = [found for key in ("loss", "eval_loss") if (found := _not_finite(run.history.get(key)))]
    said += broken
    taken, planned = run.steps
    if taken < planned:
        said.append(f"The run is not over or was stopped: {number(taken)} of {number(planned)} steps were taken.")
    return said


def _dated(warning: dict[str, Any]) -> str:
    """A warning of the run with its step, unless it names one itself."""
    message = str(warning["message"])
    names_step = message.lower().startswith("step ")
    return message[0].upper() + message[1:] if names_step else f"Step {number(warning['step'])}: {message}"


def _not_finite(series: Series | None) -> str:
    if series is None:
        return ""
    steps = [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
    return f"{series.key} was not finite at {len(steps)} logs, first at step {number(steps[0])}." if steps else ""


def setup(run: Run) -> list[tuple[str, str]]:
    """Hyper-parameters: the arguments that are known and shape the result, and the adapter's; empty ones left out."""
    known = {name: value for name, value in run.arguments.items() if not name.startswith((*MACHINERY, "dataset_"))}
    if known.get("max_steps", -1) > 0:
        known.pop("num_train_epochs", None)
    else:
        known.pop("max_steps", None)
    lora = run.record.get("lora") or run.recipe.get("model", {}).get("lora") or {}
    rows = [("rows per optimizer step", run.record.get("rows_per_step")), *known.items()]
    rows += [(f"adapter: {name}", value) for name, value in lora.items()]
    return [(name, shown(value)) for name, value in rows if value not in (None, "", [], {})]


def shown(value: Any) -> str:
    """An option's value as a recipe would have it, lists with commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def finals(run: Run) -> list[tuple[str, str, str]]:
    """The last logged value of every metric, training beside evaluation; "" where there is none."""
    metrics = {series.metric for series in run.history.values()}
    last = {key: number(series.last) for key, series in run.history.items()}
    ordered = sorted(metrics, key=lambda name: (name != "loss", name))
    return [(metric, last.get(metric, ""), last.get(f"eval_{metric}", "")) for metric in ordered]
