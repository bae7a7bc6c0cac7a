"""`hf-posttrain compare RUN RUN ...`: several runs in one page, what differs between them, which values are best."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, printable
from ..recipe.cli import print_output
from . import page
from .charts import format_number, make_charts
from .run_folder import Run, read_run

# Metrics of which more is better; `loss` is better lower, of runs with the same loss
OF_ANSWERS = ("exact_match",)  # on the same prompts, whatever the options
OF_SCORES = ("mean_token_accuracy", "rewards/accuracies")  # of the same tokens
OF_OPTIONS = ("generation/stopped",)  # where a loss is comparable
OF_JUDGED = ("score", "best_score")  # of the same prompts, with SAMPLING alike
SAMPLING = ("judge", "num_generations", "temperature", "max_completion_length")
NOT_OF_THE_LOSS = (  # arguments, or how they begin, that change how a loss is lowered and not what it measures
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
    """The command: write the page and say where; returns 0. Raises InputError for a folder without a run."""
    parser = argparse.ArgumentParser(
        prog="hf-posttrain compare",
        allow_abbrev=False,
        description="Lay runs side by side in one page: curves, last values, what differs in their recipes, samples.",
        epilog="example: hf-posttrain compare outputs/first outputs/second --output compare.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's output_dir, or a checkpoint")
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        type=Path,
        default=Path("compare.html"),
        help="the page (default: compare.html)",
    )
    arguments = parser.parse_args(argv)
    file = arguments.output
    text, table = render_comparison(arguments.runs, file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {file} cannot be written ({error.strerror})") from error
    print_output("\n".join([*table, "", str(file)]))
    return 0


def render_comparison(folders: Sequence[Path], output: Path) -> tuple[str, list[str]]:
    """(the page, lines of its table of last values); its links to reports are relative to `output`. Raises InputError
    for fewer than two runs, or none.
    """
    if len({folder.resolve() for folder in folders}) < 2:
        raise InputError("compare needs at least two different runs: hf-posttrain compare outputs/a outputs/b")
    # In the page a run is told by its name, in the order of the command.
    runs = dict(zip(name_runs(folders), map(read_run, folders), strict=True))
    reason = explain_incomparable([*runs.values()])
    # Links to the reports that are there, and each prompt with what every run that was asked it answered
    links: dict[str, str] = {}
    prompts: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        if (file := run.folder.resolve() / page.NAME).exists():
            links[name] = Path(os.path.relpath(file, output.resolve().parent)).as_posix()
        for sample in run.samples:
            entry = prompts.setdefault(sample["prompt"], {"prompt": sample["prompt"], "answers": {}})
            entry["answers"][name] = sample["after"]
            entry["expected"] = entry.get("expected") or sample.get("expected")
    settings = [run.recipe or _settings(run) for run in runs.values()]
    finals = rank_last_values([*runs.values()], reason)
    text = page.render(
        "compare.html",
        runs=runs,
        links=links,
        reason=reason,
        prompts=[*prompts.values()],
        facts={name: {fact: value for fact, value, _ in page.list_facts(run)} for name, run in runs.items()},
        warnings=[f"{name}: {warning}" for name, run in runs.items() for warning in page.list_warnings(run)],
        drawn=make_charts({name: run.history for name, run in runs.items()}),
        finals=finals,
        differences=list_differences(settings),
    )
    return text, write_table([*runs], finals)


def _settings(run: Run) -> dict[str, Any]:
    """What stands in for the recipe of a run that Python has started."""
    model = {"name_or_path": run.base_model, "lora": run.lora or None}
    data = {split: run.record.get(f"{split}_rows") for split in ("train", "eval")}
    return {"method": run.method, "model": model, "data": data, "train": run.arguments}


def write_table(names: list[str], finals: list[tuple[str, list[tuple[str, bool]]]]) -> list[str]:
    """The last values as lines for a terminal: a column for each run, * behind the best of a row."""
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
    """A short name for each folder: its path below the folder that all are in."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(shared).as_posix() for path in paths]


def explain_incomparable(runs: list[Run]) -> str:
    """Why the losses of these runs cannot be set against each other; empty where they can."""
    # Of the options that differ, the first on which the value of a loss depends
    differing = [name for name, *_ in list_differences([run.arguments for run in runs])]
    options = [f"{name} differs" for name in differing if not f"{name}=".startswith(NOT_OF_THE_LOSS)]
    return next(iter([*_explain_other_scores(runs), *options, *_explain_other_tokens(runs)]), "")


def _explain_other_scores(runs: list[Run]) -> list[str]:
    """Why not even how answers are ranked or tokens guessed can be set against each other."""
    referring = [run for run in runs if run.method_spec and run.method_spec.second == "reference"]
    found: dict[str, set] = {
        "methods": {run.method for run in runs},
        "trainers": {run.record.get("trainer") for run in runs},  # None: the method's own
        "evaluation data": _evaluated(runs),
        "teachers": {(run.recipe.get("teacher") or {}).get("name_or_path") for run in runs},
        "reference models": {(run.base_model, (run.recipe.get("model") or {}).get("adapter")) for run in referring},
        "second models": {run.record.get("second_model") for run in runs} - {None},  # None: it is within the policy
    }
    losses = ["loss_type differs"] * (len({str(run.arguments.get("loss_type")) for run in runs}) > 1)
    return [f"their {what} differ" for what, known in found.items() if len(known) > 1] + losses


def _evaluated(runs: list[Run]) -> set[str]:
    """What the runs are evaluated on; without a recipe, the rows that came of it."""
    return {str(run.sources["eval"] or run.record.get("eval_rows")) for run in runs}


def _explain_other_tokens(runs: list[Run]) -> list[str]:
    """The same for what has come of the same data: another tokenizer, template, mask or length makes other tokens."""
    known = {str(run.record["eval_rows"]) for run in runs if run.record.get("eval_rows")}
    return ["the tokens of their evaluation data differ"] * (len(known) > 1)


def rank_last_values(runs: list[Run], reason: str) -> list[tuple[str, list[tuple[str, bool]]]]:
    """(metric and split, for each run its value and: is it the best?), the latter among evaluations that measure the
    same. reason: of `explain_incomparable`; with one, losses get no mark.
    """
    answers = {str(run.record["eval_answers"]) for run in runs if run.record.get("eval_answers")}
    marked: tuple[str, ...] = OF_ANSWERS if len(_evaluated(runs)) == 1 and len(answers) < 2 else ()
    judged = [[run.rounds_section.get(name) for name in SAMPLING] for run in runs]
    by = (runs[0].rounds_section.get("judge") or {}).get("by")  # of url, shares of wins among a model's own answers
    if marked and by != "url" and all(one == judged[0] for one in judged):
        marked += OF_JUDGED
    if not _explain_other_scores(runs) and not _explain_other_tokens(runs):
        marked += OF_SCORES
    if not reason:
        marked += OF_OPTIONS
    keys = {key for run in runs for key in run.history}
    rows = []
    for key in sorted(keys, key=lambda k: (k.removeprefix("eval_") != "loss", not k.startswith("eval_"), k)):
        metric = key.removeprefix("eval_")
        held_out = key.startswith("eval_")
        last = [run.last.get(key) for run in runs]
        # 1: more is better, -1: less is better, 0: neither. No run is the best of equal ones.
        sign = 1 if metric in marked else -1 if metric == "loss" and not reason else 0
        ranks = {sign * value: format_number(value) for value in last if value is not None and math.isfinite(value)}
        best = ranks[max(ranks)] if sign and held_out and len({*ranks.values()}) > 1 else None
        texts = ["" if value is None else format_number(value) for value in last]
        cells = [(text, text == best) for text in texts]
        rows.append((f"{metric} ({'evaluation' if held_out else 'training'})", cells))
    return rows


def list_differences(trees: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """(dotted key, a value for each tree) where the values are not all the same.

    Where a tree has null in the place of a section, as of `lora`, every key of the section is null; "not given" stands
    for a key that a tree lacks otherwise.
    """
    flat = [_flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for tree in flat for key in tree if key != "train.output_dir")
    sections = {".".join(parts[:n]) for parts in (key.split(".") for key in keys) for n in range(1, len(parts))}
    rows = [(key, *(_value_in(tree, key) for tree in flat)) for key in keys if key not in sections]
    return [row for row in rows if len(set(row[1:])) > 1]


def _value_in(flat: dict[str, Any], key: str) -> str:
    """Return the value of a dotted key as a page shows it."""
    parts = key.split(".")
    above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    found = next((name for name in above if name in flat), None)
    return "not given" if found is None else page.format_option(flat[found])


def _flatten(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flatten(value, f"{above}{name}.") if isinstance(value, dict) and value else {above + name: value}
    return found
