"""The command `hf-posttrain compare RUN RUN ...`, which writes a page with several runs.

The page shows curves, last values with the best ones marked, and the differences of the settings.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError, name_hint, printable
from ..recipe.cli import print_output
from . import page
from .charts import format_number, make_charts, write_image
from .run_folder import History, Run, read_run

LastValues: TypeAlias = list[tuple[str, list[tuple[str, bool]]]]
"""[(metric and split, [(value, whether it is the best) of each run])]"""
IMAGES = (".png", ".svg")
"""Formats of an image of the curves."""
# Metrics that are better if they are higher. A lower `loss` is better, for runs with the same loss.
ANSWER_METRICS = ("exact_match",)
"""Comparable on the same prompts, with any options."""
TOKEN_METRICS = ("mean_token_accuracy", "rewards/accuracies")
"""Comparable on the same tokens."""
OPTION_METRICS = ("generation/stopped",)
"""Comparable if the losses are."""
JUDGE_METRICS = ("score", "best_score")
"""Comparable on the same prompts, with equal SAMPLING_OPTIONS."""
SAMPLING_OPTIONS = ("judge", "num_generations", "temperature", "max_completion_length")
NON_LOSS_OPTIONS = (  # arguments, or their prefixes, that affect how a loss is minimized but not its definition
    *page.MACHINERY,
    "seed",
    "data_seed",
    "full_determinism",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "lr_scheduler_",
    "warmup_",
    "train_sampling_strategy",
    "per_device_",
    "gradient_",
    "optim",
    "adam_",
    "weight_decay",
    "max_grad_norm",
    "neftune_noise_alpha",
    "disable_dropout",
    "activation_",
    "bf16",
    "fp16",
    "tf32",
    "torch_compile",
    "fsdp",
    "deepspeed",
    "parallelism_config",
    "accelerator_config",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, print the last values, and return the exit code.

    Raises:
        InputError: For a folder without a run.
    """
    parser = argparse.ArgumentParser(
        prog="hf-posttrain compare",
        allow_abbrev=False,
        description="Compare runs on one page: curves, last values, differences of their recipes, sample answers.",
        epilog="example: hf-posttrain compare outputs/first outputs/second --output compare.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run, or a checkpoint")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("compare.html"),
        help="page (.html) or image of the curves (.png, .svg) to write (default: compare.html)",
    )
    parser.add_argument(
        "--metrics", metavar="NAME", nargs="+", help="only the curves of these metrics, such as eval_loss exact_match"
    )
    arguments = parser.parse_args(argv)
    file = arguments.output
    if file.suffix not in (*IMAGES, ".html"):
        raise InputError(f"--output {file} must end with {', '.join(IMAGES)} or .html")
    runs = read_runs(arguments.runs)
    curves = select_curves(runs, arguments.metrics)
    reason = explain_incomparable([*runs.values()])
    finals = rank_last_values([*runs.values()], reason)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix not in IMAGES:
            file.write_text(render_comparison(runs, curves, file, reason, finals), encoding="utf-8")
        elif not write_image(file, "", curves):
            raise InputError(f"--output {file} cannot be written, because the runs have logged no curve")
    except OSError as error:
        raise InputError(f"--output {file} cannot be written ({error.strerror})") from error
    print_output("\n".join([*write_table([*runs], finals), "", str(file)]))
    return 0


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Return the runs by a short name.

    Raises:
        InputError: For fewer than two runs, and for a folder without a run.
    """
    if len({folder.resolve() for folder in folders}) < 2:
        raise InputError("compare requires at least two different runs. Use hf-posttrain compare outputs/a outputs/b")
    return dict(zip(name_runs(folders), map(read_run, folders), strict=True))


def select_curves(runs: Mapping[str, Run], metrics: Sequence[str] | None) -> dict[str, History]:
    """Return the curves of the runs with the given metrics, whose names may start with eval_, or with all metrics.

    Raises:
        InputError: If no run has logged one of the metrics.
    """
    if metrics is None:
        return {name: run.history for name, run in runs.items()}
    logged = {key for run in runs.values() for key in run.history}
    for metric in metrics:
        if not logged & {metric, f"eval_{metric}"}:
            raise InputError(f"--metrics {metric}: no run has logged it{name_hint(metric, sorted(logged))}")
    return {
        name: {key: values for key, values in run.history.items() if {key, key.removeprefix("eval_")} & {*metrics}}
        for name, run in runs.items()
    }


def render_comparison(
    runs: Mapping[str, Run], curves: Mapping[str, History], output: Path, reason: str, finals: LastValues
) -> str:
    """Return the page.

    Args:
        runs: Name of a run -> the run.
        curves: Name of a run -> the logged values that get a chart.
        output: File of the page, to which the links to reports are relative.
        reason: Result of `explain_incomparable`.
        finals: Result of `rank_last_values`.
    """
    # links to existing reports, and each prompt with the answers of the runs
    links: dict[str, str] = {}
    prompts: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        if (file := run.folder.resolve() / page.NAME).exists():
            links[name] = Path(os.path.relpath(file, output.resolve().parent)).as_posix()
        for sample in run.samples:
            entry = prompts.setdefault(sample["prompt"], {"prompt": sample["prompt"], "answers": {}})
            entry["answers"][name] = sample["after"]
            entry["expected"] = entry.get("expected") or sample.get("expected")
    settings = [run.recipe or _settings_without_recipe(run) for run in runs.values()]
    return page.render(
        "compare.html",
        runs=runs,
        links=links,
        reason=reason,
        prompts=[*prompts.values()],
        facts={name: {fact: value for fact, value, _ in page.list_facts(run)} for name, run in runs.items()},
        warnings=[f"{name}: {warning}" for name, run in runs.items() for warning in page.list_warnings(run)],
        run_charts=make_charts(curves),
        finals=finals,
        differences=list_differences(settings),
    )


def _settings_without_recipe(run: Run) -> dict[str, Any]:
    """Return the settings of a run that was started from Python, in the form of a recipe."""
    model = {"name_or_path": run.base_model, "lora": run.lora or None}
    data = {split: run.record.get(f"{split}_rows") for split in ("train", "eval")}
    return {"method": run.method, "model": model, "data": data, "train": run.arguments}


def write_table(names: list[str], finals: LastValues) -> list[str]:
    """Return the last values as lines for a terminal, with a column for each run and * after the best of a row."""
    rows = [
        ["", *map(printable, names)],
        *([printable(metric), *(value + "*" * best for value, best in cells)] for metric, cells in finals),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return [
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))])
        for row in rows
    ]


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder, its path below the common parent folder."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(shared).as_posix() for path in paths]


def explain_incomparable(runs: list[Run]) -> str:
    """Return why the losses of the runs cannot be compared, or "" if they can."""
    # options that differ and affect the value of the loss
    differing = [name for name, *_ in list_differences([run.arguments for run in runs])]
    options = [f"{name} differs" for name in differing if not f"{name}=".startswith(NON_LOSS_OPTIONS)]
    return next(iter([*_score_differences(runs), *options, *_token_differences(runs)]), "")


def _score_differences(runs: list[Run]) -> list[str]:
    """Return why token accuracies and reward accuracies cannot be compared."""
    with_reference = [run for run in runs if run.method_spec and run.method_spec.second == "reference"]
    properties: dict[str, set[Any]] = {
        "methods": {run.method for run in runs},
        "trainers": {run.record.get("trainer") for run in runs},  # None is the trainer of the method
        "evaluation data": _evaluation_data(runs),
        "teachers": {(run.recipe.get("teacher") or {}).get("name_or_path") for run in runs},
        "reference models": {
            (run.base_model, (run.recipe.get("model") or {}).get("adapter")) for run in with_reference
        },
        "second models": {run.record.get("second_model") for run in runs} - {None},  # None: it is part of the policy
    }
    losses = ["loss_type differs"] * (len({str(run.arguments.get("loss_type")) for run in runs}) > 1)
    return [f"their {name} differ" for name, values in properties.items() if len(values) > 1] + losses


def _evaluation_data(runs: list[Run]) -> set[str]:
    """Return the evaluation data of the runs or, without a recipe, a description of the prepared rows."""
    return {str(run.sources["eval"] or run.record.get("eval_rows")) for run in runs}


def _token_differences(runs: list[Run]) -> list[str]:
    """Return why tokens of the same data differ, which depend on tokenizer, template, mask and length."""
    descriptions = {str(run.record["eval_rows"]) for run in runs if run.record.get("eval_rows")}
    return ["the tokens of their evaluation data differ"] * (len(descriptions) > 1)


def rank_last_values(runs: list[Run], reason: str) -> LastValues:
    """Return the last values of all metrics, with the best ones among comparable evaluations.

    Args:
        runs: The runs.
        reason: Result of `explain_incomparable`. If it is not empty, no loss is marked as the best.

    """
    answers = {str(run.record["eval_answers"]) for run in runs if run.record.get("eval_answers")}
    marked: tuple[str, ...] = ANSWER_METRICS if len(_evaluation_data(runs)) == 1 and len(answers) < 2 else ()
    sampling = [[run.rounds_section.get(name) for name in SAMPLING_OPTIONS] for run in runs]
    # scores of judge url are win rates among the answers of one model
    judge = (runs[0].rounds_section.get("judge") or {}).get("by")
    if marked and judge != "url" and all(options == sampling[0] for options in sampling):
        marked += JUDGE_METRICS
    if not _score_differences(runs) and not _token_differences(runs):
        marked += TOKEN_METRICS
    if not reason:
        marked += OPTION_METRICS
    keys = {key for run in runs for key in run.history}
    rows = []
    for key in sorted(keys, key=lambda k: (k.removeprefix("eval_") != "loss", not k.startswith("eval_"), k)):
        metric = key.removeprefix("eval_")
        is_eval = key.startswith("eval_")
        last = [run.last.get(key) for run in runs]
        # 1: higher is better, -1: lower is better, 0: neither. If all values are equal, none is the best.
        sign = 1 if metric in marked else -1 if metric == "loss" and not reason else 0
        ranks = {sign * value: format_number(value) for value in last if value is not None and math.isfinite(value)}
        best = ranks[max(ranks)] if sign and is_eval and len({*ranks.values()}) > 1 else None
        texts = ["" if value is None else format_number(value) for value in last]
        cells = [(text, text == best) for text in texts]
        rows.append((f"{metric} ({'evaluation' if is_eval else 'training'})", cells))
    return rows


def list_differences(trees: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return (dotted key, value in each tree) of the keys whose values differ.

    If a tree has null in place of a section such as `lora`, every key of the section is null. Another key that a tree
    lacks is "not set".
    """
    flat = [_flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for tree in flat for key in tree if key != "train.output_dir")
    sections = {".".join(parts[:n]) for parts in (key.split(".") for key in keys) for n in range(1, len(parts))}
    rows = [(key, *(_value_in(tree, key) for tree in flat)) for key in keys if key not in sections]
    return [row for row in rows if len(set(row[1:])) > 1]


def _value_in(flat: dict[str, Any], key: str) -> str:
    """Return the formatted value of a dotted key."""
    parts = key.split(".")
    parents = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    present = next((name for name in parents if name in flat), None)
    return "not set" if present is None else page.format_option(flat[present])


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
