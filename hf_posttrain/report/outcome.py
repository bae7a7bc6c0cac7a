"""How a run went, for the pages and the card: a few facts, what a reader should worry about, options, last values."""

import math
from typing import Any

from ..methods import METHODS
from .charts import TITLES, metrics_of, number
from .run_folder import Run

MACHINERY = (
    "output_dir", "use_cpu", "report_to", "run_name", "project", "trackio_", "logging_", "log_", "save_", "eval_",
    "per_device_eval", "dataset_num_proc", "hub_", "push_to_hub", "resume_from_checkpoint", "stop_on", "merge_lora",
    "layout", "precompute_ref_", "vllm_", "rollout", "generation_batch_size", "disable_tqdm", "dataloader_", "ddp_",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "skip_memory_metrics",
)  # fmt: skip
"""Arguments, or how they begin, on which neither the weights nor what a loss measures depend."""


def title(method: str) -> str:
    """A method in words; empty for one that this version does not know."""
    return METHODS[method].title if method in METHODS else ""


def key_metrics(method: str) -> tuple[str, ...]:
    """What tells best whether the method works, besides loss and exact match."""
    return tuple(METHODS[method].key_metrics) if method in METHODS else ()


def facts(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, remark): loss, exact match and key metrics (of evaluation where there is one), steps and time."""
    found = []
    for metric in ("loss", "exact_match", *key_metrics(run.method)):
        split = "evaluation" if f"eval_{metric}" in run.history else "training"
        if series := run.history.get(f"eval_{metric}", run.history.get(metric)):
            remark = f"{split}, from {number(series.values[0])}" if len(series.steps) > 1 else split
            found.append((TITLES.get(metric, metric), number(series.values[-1]), remark))
    taken, planned = run.steps
    epochs = run.state.get("epoch")
    remark = f"{number(epochs)} epochs" if epochs is not None else ""
    found.append(("Steps", number(taken) if taken >= planned else f"{number(taken)} of {number(planned)}", remark))
    if seconds := run.results.get("train_runtime"):
        rate = run.results.get("train_samples_per_second")
        found.append(("Time", duration(seconds), f"{number(rate)} rows a second" if rate else ""))
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
    for key in ("loss", "eval_loss"):
        series = run.history.get(key)
        broken = [step for step, value in zip(*series, strict=True) if not math.isfinite(value)] if series else []
        if broken:
            said.append(f"{key} was not finite at {len(broken)} logs, first at step {number(broken[0])}.")
    taken, planned = run.steps
    if taken < planned:
        said.append(f"The run is not over or was stopped: {number(taken)} of {number(planned)} steps were taken.")
    return said


def _dated(warning: dict[str, Any]) -> str:
    """A warning of the run with its step, unless it names one itself."""
    message = str(warning["message"])
    names_step = message.lower().startswith("step ")
    return message[0].upper() + message[1:] if names_step else f"Step {number(warning['step'])}: {message}"


def setup(run: Run) -> list[tuple[str, str]]:
    """Hyper-parameters: the arguments that are known and shape the result, and the adapter's; empty ones left out."""
    known = {name: value for name, value in run.arguments.items() if not name.startswith((*MACHINERY, "dataset_"))}
    if known.get("max_steps", -1) > 0:
        known.pop("num_train_epochs", None)
    else:
        known.pop("max_steps", None)
    rows = [("rows per optimizer step", run.record.get("rows_per_step")), *known.items()]
    rows += [(f"adapter: {name}", value) for name, value in run.lora.items()]
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
    """(metric, training, evaluation): the last logged value of every metric, "" where there is none."""
    last = {key: number(series.values[-1]) for key, series in run.history.items()}
    return [(metric, last.get(metric, ""), last.get(f"eval_{metric}", "")) for metric in metrics_of(run.history)]
