"""Rendering of the templates of pages and cards, and the facts, warnings and tables that they contain."""

import math
from typing import Any

import numpy as np

from . import charts
from .charts import TITLES, format_number, list_metrics
from .run_folder import Run

NAME = "report.html"
# Arguments, or their prefixes, that affect neither the weights nor the definition of the loss
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
TIED_METRICS = ("rewards/accuracies",)
"""Metrics that only compare equal values before the first step."""


def render(template: str, **content: Any) -> str:
    """Render a file of templates/. Templates can call charts.py and the functions below, and HTML is escaped.

    Args:
        template: Name of the file.
        content: Variables of the template.
    """
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
    """Return (name, value, remark) of loss, exact match, key metrics, steps and time."""
    facts = []
    # values of evaluation replace those from training, if there are any
    for metric in ("loss", "exact_match", "score", *(run.method_spec.key_metrics if run.method_spec else ())):
        key, split = (f"eval_{metric}", "evaluation") if f"eval_{metric}" in run.history else (metric, "training")
        if series := run.history.get(key):
            # at step 0 the policy equals its reference, so that all pairs are ties, which is not an accuracy of 0
            values = zip(*series, strict=True)
            first = next((value for step, value in values if step or metric not in TIED_METRICS), None)
            remark = f"{split}, from {format_number(first)}" if len(series.steps) > 1 else split
            facts.append((TITLES.get(metric, metric), format_number(run.last[key]), remark))
    facts += _exact_match_by_kl(run)

    (taken, planned) = run.steps
    epochs = run.state.get("epoch")
    remark = "" if epochs is None else f"epochs: {format_number(epochs)}"
    facts.append(("Steps", f"{taken:,} of {planned:,}" if taken < planned else f"{taken:,}", remark))
    if run.best_step:
        facts.append(("Weights of step", f"{run.best_step:,}", "the best evaluation, not the last"))
    if seconds := run.results.get("train_runtime"):
        rate = run.results.get("train_samples_per_second")
        facts.append(("Time", format_duration(seconds), f"rows per second: {format_number(rate)}" if rate else ""))
    return facts


def _exact_match_by_kl(run: Run) -> list[tuple[str, str, str]]:
    """Return a linear fit of exact match against the square root of the KL to the teacher, if both were evaluated.

    The relation is nearly linear (arXiv 2609.32722), and the constant is the exact match of a student that equals the
    teacher.
    """
    exact_match = run.history.get("eval_exact_match")
    reverse_kl = run.history.get("eval_distill/reverse_kl")
    if not (exact_match and reverse_kl):
        return []
    kl_by_step = dict(reverse_kl.finite())
    points = np.array(
        [(kl_by_step[step] ** 0.5, value) for step, value in exact_match.finite() if kl_by_step.get(step, -1) >= 0]
    )
    if len(points) < 3 or np.ptp(points[:, 0]) == 0:
        return []
    slope, constant = np.polyfit(points[:, 0], points[:, 1], 1)
    r_squared = np.corrcoef(points[:, 0], points[:, 1])[0, 1] ** 2
    formula = f"{constant:.2f} {'-' if slope < 0 else '+'} {abs(slope):.2f} sqrt(KL)"
    return [("Exact match by KL", formula, f"{len(points)} evaluations, R2 {r_squared:.2f}")]


def format_duration(seconds: float) -> str:
    """Format a duration, such as 12 s, 3 min 20 s and 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.3g} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def list_warnings(run: Run) -> list[str]:
    """Return the warnings of the data audit and of the run, and problems in its logs."""
    warnings = [str(text) for text in run.audit.get("warnings", [])]
    for warning in run.record.get("warnings", []):
        # start with the step, unless the message does so itself
        message = str(warning["message"])
        has_step = message.lower().startswith("step ")
        warnings.append(f"S{message[1:]}" if has_step else f"Step {format_number(warning['step'])}: {message}")
    for key in ("loss", "eval_loss"):
        points = zip(*run.history.get(key, ((), ())), strict=True)
        if steps := [step for step, value in points if not math.isfinite(value)]:
            first = format_number(steps[0])
            warnings.append(f"{key} is not finite, first at step {first} (number of logs: {len(steps)}).")
    taken, planned = run.steps
    if taken < planned:
        warnings.append(f"The run is not finished: {taken:,} of {planned:,} steps were taken.")
    return warnings


def list_options(run: Run) -> list[tuple[str, str]]:
    """Return the hyper-parameters that affect the result, including options of the adapter, without empty ones."""
    left_out = (*MACHINERY, "dataset_")
    options = {name: value for name, value in run.arguments.items() if not f"{name}=".startswith(left_out)}
    # only one of the two limits of a run's length has an effect
    options.pop("num_train_epochs" if options.get("max_steps", -1) > 0 else "max_steps", None)
    rows = [("rows per optimizer step", run.record.get("rows_per_step")), *options.items()]
    rows += [(f"adapter: {name}", value) for name, value in run.lora.items()]
    return [(name, format_option(value)) for name, value in rows if value not in (None, "", [], {})]


def format_option(value: object) -> str:
    """Format the value of an option as in a recipe, and lists with commas."""
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
    """Return (metric, training, evaluation) with the last logged values of every metric, "" for a missing value."""
    last = {key: format_number(value) for key, value in run.last.items()}
    return [(metric, last.get(metric, ""), last.get(f"eval_{metric}", "")) for metric in list_metrics(run.history)]


def list_rounds(run: Run) -> list[tuple[str, ...]]:
    """Return the values of each round in the order of ROUND_COLUMNS."""
    keys = ("round", "score", "best_score", "stopped", "length", "rows")
    rows = []
    for entry in run.rounds:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in entry.get("reasons", {}).items())
        rows.append((*(format_number(entry[key]) if key in entry else "" for key in keys), reasons or "0"))
    return rows


def list_evaluations(run: Run) -> list[tuple[str, str, str]]:
    """Return (data or task, metric, value) of the evaluations after the run."""
    return [
        (str(entry.get("data") or entry.get("task") or ""), name, format_number(value))
        for entry in run.evaluations
        for name, value in entry.get("metrics", {}).items()
    ]


def describe_rounds(run: Run) -> str:
    """Describe the rounds of a run, its sampling and its judge, or return "" for a run without rounds."""
    section = run.rounds_section
    if not section:
        return ""
    judge = section.get("judge") or {}
    judge_name = " ".join(str(judge[key]) for key in ("by", "name") if judge.get(key)) or "exact_match"
    rounds = f"{section.get('count')} rounds"
    if section.get("steps"):
        rounds = f"rounds of {section['steps']} optimizer steps"
    temperature = f"temperature {section.get('temperature'):g}"
    sampling = f"{section.get('num_generations')} answers to each prompt at {temperature}"
    return f"{rounds} on the model's own answers: {sampling}, judged by {judge_name}"
