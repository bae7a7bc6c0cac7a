"""Fills the templates of pages and cards; and what they say of how a run went."""

import math
from typing import Any

import numpy as np

from . import charts
from .charts import TITLES, format_number, list_metrics
from .run_folder import Run

NAME = "report.html"
# Arguments, or how they begin (with `=` the whole name), on which neither the weights nor what a loss measures depend
MACHINERY = (
    "output_dir",
    "use_cpu",
    "report_to",
    "run_name",
    "project",
    "trackio_",
    "logging_",
    "log_",
    "save_",
    "eval_",
    "per_device_eval",
    "dataset_num_proc",
    "hub_",
    "push_to_hub",
    "resume_from_checkpoint",
    "stop_on",
    "merge_lora",
    "layout",
    "precompute_ref_",
    "sampler",
    "diagnostics",
    "disable_tqdm",
    "dataloader_",
    "ddp_",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "skip_memory_metrics",
    "do_",
    "include_",
    "debug",
    "torch_empty_cache_steps",
    "ignore_data_skip",
    "remove_unused_columns",
    "enable_jit_",
    "restore_callback_",
    "batch_eval_metrics",
    "prediction_loss_only",
    "use_cache",
    "average_tokens_",
    "local_rank",
    "resume_despite",
)

ROUND_COLUMNS = ("round", "score", "best of each prompt", "ended", "tokens", "rows", "prompts without a row")
TIED = ("rewards/accuracies",)  # metrics that are of ties alone before the first step


def render(template: str, **content: Any) -> str:
    """A file of templates/, filled; in HTML everything is escaped. They may call charts.py and the functions below."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (
        list_facts,
        list_last_values,
        list_options,
        list_warnings,
        list_rounds,
        list_evaluations,
        describe_rounds,
        format_number,
    )
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"charts": charts, "round_columns": ROUND_COLUMNS}
    return environment.get_template(template).render(**content)


def list_facts(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, remark): loss, exact match and key metrics (of evaluation where there is one), steps and time."""
    found = []
    # Held-out values tell more than those of training, so they are shown where there are any.
    for metric in ("loss", "exact_match", "score", *(run.method_spec.key_metrics if run.method_spec else ())):
        key, split = (f"eval_{metric}", "evaluation") if f"eval_{metric}" in run.history else (metric, "training")
        if series := run.history.get(key):
            # at step 0 a policy prefers nothing to its reference: all are ties, which is no accuracy of 0
            first = next((value for step, value in zip(*series, strict=True) if step or metric not in TIED), None)
            remark = f"{split}, from {format_number(first)}" if len(series.steps) > 1 else split
            found.append((TITLES.get(metric, metric), format_number(run.last[key]), remark))
    found += _line_of_divergence(run)
    (taken, planned) = run.steps
    epochs = run.state.get("epoch")
    remark = "" if epochs is None else f"{format_number(epochs)} epochs"
    found.append(("Steps", f"{taken:,} of {planned:,}" if taken < planned else f"{taken:,}", remark))
    if run.best_step:
        found.append(("Weights of step", f"{run.best_step:,}", "the best evaluation, not the last"))
    if seconds := run.results.get("train_runtime"):
        rate = run.results.get("train_samples_per_second")
        found.append(("Time", format_duration(seconds), f"{format_number(rate)} rows a second" if rate else ""))
    return found


def _line_of_divergence(run: Run) -> list[tuple[str, str, str]]:
    """Exact match against the square root of the KL to the teacher, where evaluations have both: near a line
    (arXiv 2609.32722), whose constant is what a student equal to the teacher would reach.
    """
    right, apart = (run.history.get(f"eval_{name}") for name in ("exact_match", "distill/reverse_kl"))
    if not (right and apart):
        return []
    by_step = dict(apart.finite())
    points = np.array([(by_step[step] ** 0.5, value) for step, value in right.finite() if by_step.get(step, -1) >= 0])
    if len(points) < 3 or np.ptp(points[:, 0]) == 0:
        return []
    slope, constant = np.polyfit(points[:, 0], points[:, 1], 1)
    fit = np.corrcoef(points[:, 0], points[:, 1])[0, 1] ** 2
    said = f"{constant:.2f} {'-' if slope < 0 else '+'} {abs(slope):.2f} sqrt(KL)"
    return [("Exact match by KL", said, f"{len(points)} evaluations, R2 {fit:.2f}")]


def format_duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.3g} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def list_warnings(run: Run) -> list[str]:
    """What the data check and the run itself warned of, and what the logs show."""
    found = [str(text) for text in run.audit.get("warnings", [])]
    for warning in run.record.get("warnings", []):
        # The step that it came at goes first, unless the warning names one itself.
        message = str(warning["message"])
        dated = message.lower().startswith("step ")
        found.append(f"S{message[1:]}" if dated else f"Step {format_number(warning['step'])}: {message}")
    for key in ("loss", "eval_loss"):
        points = zip(*run.history.get(key, ((), ())), strict=True)
        if broken := [step for step, value in points if not math.isfinite(value)]:
            found.append(f"{key} was not finite at {len(broken)} logs, first at step {format_number(broken[0])}.")
    taken, planned = run.steps
    if taken < planned:
        found.append(f"The run is not over or was stopped: {taken:,} of {planned:,} steps were taken.")
    return found


def list_options(run: Run) -> list[tuple[str, str]]:
    """Hyper-parameters: the arguments that are known and shape the result, and the adapter's; empty ones left out."""
    left_out = (*MACHINERY, "dataset_")
    known = {name: value for name, value in run.arguments.items() if not f"{name}=".startswith(left_out)}
    # Of the two limits of a run's length, the other has no effect.
    known.pop("num_train_epochs" if known.get("max_steps", -1) > 0 else "max_steps", None)
    rows = [("rows per optimizer step", run.record.get("rows_per_step")), *known.items()]
    rows += [(f"adapter: {name}", value) for name, value in run.lora.items()]
    return [(name, format_option(value)) for name, value in rows if value not in (None, "", [], {})]


def format_option(value: object) -> str:
    """An option's value as a recipe would have it, lists with commas."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_option, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_option(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_last_values(run: Run) -> list[tuple[str, str, str]]:
    """(metric, training, evaluation): the last logged value of every metric, "" where there is none."""
    last = {key: format_number(value) for key, value in run.last.items()}
    return [(metric, last.get(metric, ""), last.get(f"eval_{metric}", "")) for metric in list_metrics(run.history)]


def list_rounds(run: Run) -> list[tuple[str, ...]]:
    """What each round gave, under ROUND_COLUMNS."""
    keys = ("round", "score", "best_score", "stopped", "length", "rows")
    found = []
    for one in run.rounds:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in one.get("reasons", {}).items())
        found.append((*(format_number(one[key]) if key in one else "" for key in keys), reasons or "0"))
    return found


def list_evaluations(run: Run) -> list[tuple[str, str, str]]:
    """(data or task, metric, value) of evaluations that were made afterwards."""
    return [
        (str(one.get("data") or one.get("task") or ""), name, format_number(value))
        for one in run.evaluations
        for name, value in one.get("metrics", {}).items()
    ]


def describe_rounds(run: Run) -> str:
    """A run's rounds, judge and what it trained on, in a sentence; "" without any."""
    given = run.rounds_section
    if not given:
        return ""
    judge = given.get("judge") or {}
    who = " ".join(str(judge[key]) for key in ("by", "name") if judge.get(key)) or "exact_match"
    many = f"rounds of {given['steps']} optimizer steps" if given.get("steps") else f"{given.get('count')} rounds"
    answers = f"{given.get('num_generations')} answers to each prompt at temperature {given.get('temperature'):g}"
    return f"{many} on the model's own answers: {answers}, judged by {who}"
