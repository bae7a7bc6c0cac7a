"""`hf-posttrain eval MODEL --data FILE`: how good a model's answers are, in numbers that are kept with its run.

What is computed depends on the columns of the data: prompts are answered greedily, answers are scored, pairs compared.
`--tasks` runs benchmarks of EleutherAI's lm-eval. What loads models is imported once it is needed: --help is quick.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InputError, error_context, join_names, path_hint
from ..models.config import ADAPTER_CONFIG, ModelSection, section_from_name
from ..recipe.cli import Parser, number_type, print_output
from ..recipe.sections import Source
from .metrics import load_metric, load_tasks, measure, run_tasks
from .results import EVALUATIONS, RESULTS, as_table, results_folder, store_result
from .resumable_jsonl import ResumableBatches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .inference import InferenceModel

UNFINISHED = ".eval_answers.part"
"""File of the greedy answers of a command that has not ended."""
ANSWER_METRICS = "exact_match, stopped, length"
SCORE_METRICS = "perplexity, answer_nll"
PAIR_METRICS = "pair_accuracy, pair_accuracy_per_token"
"""What is computed of greedy answers, of the data's answers and of pairs."""
_READING = ("max_length", "image_folder", "apply_chat_template", "chat_template_kwargs")
_OF_DATA = (*_READING, "limit", "columns", "images", "chat_template", "max_completion_length", "metrics")
_OF_TASKS = (
    "limit",
    "num_fewshot",
    "task_folder",
    "max_length",
    "apply_chat_template",
    "chat_template",
    "chat_template_kwargs",
)
"""Options that rows are read by, and those that evaluations of data and of tasks are kept with."""
_SWITCH = {"action": "store_true"}
_SEVERAL = {"nargs": "+", "default": [], "metavar": "NAME"}
_NUMBER = {"type": number_type(1), "metavar": "N"}
_FOLDER = {"metavar": "FOLDER"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"metavar": "FILE"}, "a .jsonl, .json, .csv or .parquet file, a folder or a hub name"),
    "split": ({"default": "train"}, "split of a hub data set or saved DatasetDict (train)"),
    "limit": (_NUMBER, "the first N rows, of the data and of each task"),
    "adapter": (_FOLDER, "a PEFT adapter on MODEL"),
    "metrics": (_SEVERAL, "of the package evaluate, for greedy answers: names, or folders with a script of that name"),
    "max_completion_length": (_NUMBER | {"default": 256}, "longest greedy answer in tokens (256)"),
    "max_length": (_NUMBER | {"type": number_type(2)}, "longest prompt with its answer in tokens, cut as in training"),
    "batch_size": (_NUMBER | {"default": 8}, "rows at once (8): no number depends on it"),
    "images": (_SWITCH, "the model sees, and the rows have pictures"),
    "image_folder": (_FOLDER, "where relative paths of pictures start"),
    "apply_chat_template": (_SWITCH, "prompts of plain text become a user's turn"),
    "tasks": (_SEVERAL, "tasks of lm-eval, which pip install 'hf_posttrain[eval]' brings"),
    "task_folder": (_FOLDER, "with --tasks: where tasks of your own are, as .yaml"),
    "num_fewshot": (_NUMBER | {"type": number_type(0)}, "with --tasks: examples before each question (the task's own)"),
    "output": (
        _FOLDER | {"type": Path},
        f"where the numbers are kept, in {EVALUATIONS} and {RESULTS} (MODEL, where it"
        " is a run's output_dir; otherwise they are only printed)",
    ),
    "json": (_SWITCH, "print the numbers for machines"),
}
_EXAMPLES = """examples:
  hf-posttrain eval outputs/mine --data test.jsonl
  hf-posttrain eval Qwen/Qwen3-0.6B --data test.jsonl --columns prompt=question completion=answer --limit 200
  hf-posttrain eval outputs/mine --tasks gsm8k arc_easy --num_fewshot 5 --output results
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the numbers and keep them; returns the exit code. Raises InputError for what cannot be evaluated."""
    given = parse(argv)
    folder = results_folder(given)
    with redirect_stdout(sys.stderr):  # where packages and scripts may print
        found = evaluate_model(given)
        if folder:
            store_result(folder, found)
            (folder / UNFINISHED).unlink(missing_ok=True)
    print_output(json.dumps(found, indent=2, ensure_ascii=False) if given.json else "\n".join(map(as_table, found)))
    return 0


def evaluate_model(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The evaluations that are asked for: of the data, and of each task. What the user gave is read before weights."""
    section = find_model(given)
    section.chat_template = given.chat_template
    metrics = {Path(name).stem: load_metric(name) for name in given.metrics}
    tasks = load_tasks(given) if given.tasks else None
    from ..models.load import check_model, is_vision_only, load_tokenizer
    from .inference import InferenceModel

    with error_context(f"the base of {given.model}" if section.adapter == given.model else "MODEL"):
        config = check_model(section)
        section.images |= given.images or is_vision_only(config)
        tokenizer = load_tokenizer(section)
    if tasks and given.apply_chat_template and not tokenizer.chat_template:
        raise InputError(f"--apply_chat_template: the tokenizer of {given.model} has no chat template")
    rows = read_rows(given, tokenizer) if given.data else None
    if rows and metrics and not any(row["completion_ids"] for row in rows.asked):
        raise InputError(f"--metrics: {given.data} has no prompts with an answer to compare with")
    answerer = InferenceModel(section, given.chat_template_kwargs, tokenizer)
    found = []
    if rows:
        computed = {"metrics": evaluate_rows(answerer, rows, given, metrics), "left_out": rows.left_out}
        count = max(map(len, (rows.asked, rows.scored, rows.pairs)))
        found = [{"data": given.data, "split": given.split, "rows": count} | computed]
    found += run_tasks(answerer, given, *tasks) if tasks else []
    about = {
        "model": str(Path(given.model)),
        "adapter": given.adapter,
        "version": __version__,
        "dtype": str(answerer.model.dtype).removeprefix("torch."),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    for entry in found:
        chosen = {name: getattr(given, name) for name in (_OF_DATA if "data" in entry else _OF_TASKS)}
        entry |= about | {"options": {name: value for name, value in chosen.items() if value or type(value) is int}}
    return found


# ---- what is evaluated


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Raises InputError for values and combinations that mean nothing."""
    parser = Parser(
        prog="hf-posttrain eval",
        usage="hf-posttrain eval MODEL [--data FILE] [--tasks NAME ...] [OPTIONS]",
        description="Exact match, perplexity, accuracy on pairs and other metrics of a model; benchmarks of lm-eval.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a run's output_dir, another folder, or a hub name")
    for name, (reading, meaning) in _OPTIONS.items():
        parser.add_argument(f"--{name}", help=meaning, **reading)
    parser.add_shared("columns", "chat_template", "chat_template_kwargs")
    given = parser.parse_args(argv)
    if not given.data and not given.tasks:
        parser.error("nothing to evaluate: add --data FILE or --tasks NAME")
    for name, needed in {"metrics": "data", "columns": "data", "task_folder": "tasks", "num_fewshot": "tasks"}.items():
        if getattr(given, name) not in (None, []) and not getattr(given, needed):
            parser.error(f"--{name} goes with --{needed}: add that, or drop --{name}")
    given.columns = dict(given.columns)
    known = [
        *f"{ANSWER_METRICS}, {SCORE_METRICS}, {PAIR_METRICS}".split(", "),
        *(Path(name).stem for name in given.metrics),
    ]
    if twice := next((name for name in known if known.count(name) > 1), None):
        parser.error(f"--metrics: there is one {twice} already: drop it, or give its folder another name")
    if given.task_folder and not os.path.isdir(given.task_folder):
        parser.error(f"--task_folder: there is no folder {given.task_folder}{path_hint(Path(given.task_folder))}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("eval runs in one process, and was started in several: drop the launcher")
    return given


def find_model(given: argparse.Namespace) -> ModelSection:
    """The model to load: of an adapter's folder, which may be a run's, its base with it."""
    folder = Path(given.model)
    if given.adapter and (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise InputError(f"{folder} is an adapter, and --adapter names another: give its base as MODEL")
    return section_from_name(given.model, given.adapter)


@dataclass
class EvaluationRows:
    """Prepared rows of the data, by what is done with them; a row may be in several lists."""

    asked: list[dict[str, Any]] = field(default_factory=list)  # whose prompts are answered
    scored: list[dict[str, Any]] = field(default_factory=list)  # whose answers are scored
    pairs: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what is not computed, and why


def read_rows(given: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase") -> EvaluationRows:
    """The rows of --data. Raises InputError for the first bad row, and where the columns hold nothing to evaluate."""
    from ..data import row_schema
    from ..data.column_inference import suggest_format
    from ..data.formats import detect_format, canonical_name
    from ..data.prepare import prepare
    from ..data.sources import load
    from .inference import PromptReader, data_options

    raw = load(Source(given.data, None, given.split, given.columns or None, given.limit), "--data")
    columns = [canonical_name(column, raw.column_names) for column in raw.column_names]
    options = {name: getattr(given, name) for name in _READING} | {"keep_asked": False}

    def form(kind: row_schema.RowKind) -> list[str]:
        try:
            return detect_format(columns, PromptReader("eval", kind)).split(" + ")
        except InputError:
            return []

    def read(kind: row_schema.RowKind, **more: Any) -> list[dict[str, Any]]:
        how = data_options(**options, **more)
        return list(prepare(raw, PromptReader("eval", kind), tokenizer, how, Path(given.data).name))

    near = suggest_format(
        list(islice(raw, 20)), [PromptReader("eval", kind) for kind in (row_schema.SUPERVISED, row_schema.PREFERENCE)]
    )
    other = [] if near is None or near.missing else [f"{a}={b}" for a, b in near.columns.items() if a != b]
    advice = f"; try --columns {' '.join(other)}" if other else ""
    single = form(row_schema.SUPERVISED) or form(row_schema.PROMPTS)
    rows = EvaluationRows()
    if {"completion", "reference"} <= {*columns}:  # of a file that `sample` or `judge` wrote
        told = "column reference: answers are compared with column completion; give the file that was sampled from"
        rows.left_out.append(told)
    if form(row_schema.PREFERENCE):
        rows.pairs = read(row_schema.PREFERENCE)
        if not {"completion", "output", "completion_ids"} & {*single}:
            rows.left_out.append(f"{ANSWER_METRICS}, {SCORE_METRICS}: pairs have no single right answer")
            return rows
    elif single:
        rows.left_out.append(f"{PAIR_METRICS}: no columns chosen and rejected")
    else:
        wanted = "prompt and completion; messages; text; prompt, chosen and rejected; or prompt alone"
        raise InputError(f"{given.data}: eval reads {wanted}, and the columns are {join_names(columns)}{advice}")
    if "label" in form(row_schema.UNPAIRED):
        labelled = read(row_schema.UNPAIRED)
        rows.asked = rows.scored = [row for row in labelled if row["label"]]
        if wrong := len(labelled) - len(rows.asked):
            rows.left_out.append(f"{wrong} rows: their label is false")
    elif single in (["messages"], ["prompt"], ["prompt_ids"]):
        rows.asked = read(row_schema.PROMPTS)  # a conversation is answered at its last turn, and scored in all turns
        try:
            rows.scored = read(row_schema.SUPERVISED, train_on="assistant") if single == ["messages"] else []
        except InputError as error:
            rows.left_out.append(f"{SCORE_METRICS}: {error}")
    else:
        rows.asked = rows.scored = read(row_schema.SUPERVISED)
    if rows.asked and not any(row["completion_ids"] for row in rows.asked):
        lacking = "exact_match" if single == ["messages"] else f"exact_match, {SCORE_METRICS}"
        rows.left_out.append(f"{lacking}: the rows have no right answers{advice}")
    if single in (["text"], ["input_ids"]) or all(len(row["prompt_ids"]) < 2 for row in rows.asked):
        rows.asked = []
        rows.left_out.append(f"{ANSWER_METRICS}: the rows have no prompts to answer")
    if not rows.asked and not rows.scored:
        raise InputError(f"{given.data}: there is nothing to evaluate: {'; '.join(rows.left_out)}")
    return rows


# ---- metrics of rows


def evaluate_rows(
    answerer: "InferenceModel", rows: EvaluationRows, given: argparse.Namespace, metrics: dict[str, Any]
) -> dict[str, float]:
    """{metric: value} of all that the rows allow."""
    found: dict[str, float] = {}
    if rows.scored:
        logps = score_answers(answerer, rows.scored, "completion_ids", given.batch_size)
        masks = [row.get("completion_mask") or [1] * len(row["completion_ids"]) for row in rows.scored]
        counted = (zip(own, mask, strict=True) for own, mask in zip(logps, masks, strict=True))
        nll = -fmean(value for tokens in counted for value, on in tokens if on)
        found = {"perplexity": math.exp(nll) if nll < 700 else math.inf, "answer_nll": nll}
    if rows.pairs:
        chosen, rejected = (
            score_answers(answerer, rows.pairs, f"{name}_ids", given.batch_size) for name in ("chosen", "rejected")
        )
        totals: dict[str, Callable] = dict(zip(PAIR_METRICS.split(", "), (math.fsum, fmean), strict=True))
        for name, total in totals.items():
            found[name] = fmean(total(good) > total(bad) for good, bad in zip(chosen, rejected, strict=True))
    return (judge_answers(answerer, rows, given, metrics) if rows.asked else {}) | found


def judge_answers(
    answerer: "InferenceModel", rows: EvaluationRows, given: argparse.Namespace, metrics: dict[str, Any]
) -> dict[str, float]:
    """{metric: value} of greedy answers to the prompts, and of how they compare with the data's answers."""
    from ..generation.exact_match import ExactMatch, first_turn
    from ..generation.rollout import until_terminal
    from ..scoring.layouts import Prompt

    prompts = [Prompt.of(row) for row in rows.asked]
    ends = answerer.ends
    some = lambda numbers: answerer.generate([prompts[n] for n in numbers], given.max_completion_length)  # noqa: E731
    kept = resumable_answers(answerer, rows.asked, given)
    answers = run_in_batches(some, [*map(len, prompts)], given.batch_size, "answering", kept)
    found: dict[str, float] = {"stopped": fmean(ids[-1] in ends for ids in answers), "length": fmean(map(len, answers))}
    # an answer without an end was cut by max_length, unless none has one: rows of ids may lack them
    right = [until_terminal(first_turn(row), ends) for row in rows.asked]
    known = [n for n, ids in enumerate(right) if ids and ids[-1] in ends] or [n for n, ids in enumerate(right) if ids]
    if known and len(known) < len(right):
        lost = f"exact_match{' and --metrics' if metrics else ''} of {len(right) - len(known)} rows"
        rows.left_out.append(f"{lost}: their answers are missing, or cut by --max_length")
    texts = [[answerer.text(each[n]) for n in known] for each in (answers, right)]
    for name, metric in {"exact_match": ExactMatch(), **metrics}.items() if known else ():
        found |= measure(name, metric, *texts)
    return found


def resumable_answers(
    answerer: "InferenceModel", asked: list[dict[str, Any]], given: argparse.Namespace
) -> ResumableBatches:
    """Where greedy answers are kept until the command has ended: in the folder of its results, if there is one."""
    if (folder := results_folder(given)) is None:
        return ResumableBatches(None, {})
    import datasets

    from ..data.images import versions
    from ..models.score_cache import numeric_config, rows_key, weights_key

    described = f"{numeric_config(answerer.model)} {sorted(answerer.ends)}"
    key = {
        "version": __version__,
        "model": weights_key(answerer.model.state_dict(), described, sample=64),
        "prompts": rows_key(datasets.Dataset.from_list([{"prompt_ids": row["prompt_ids"]} for row in asked])),
        "images": versions(row.get("images") for row in asked),
        "max_completion_length": given.max_completion_length,
        "batch_size": given.batch_size,
    }
    return ResumableBatches(folder / UNFINISHED, json.loads(json.dumps(key)))


def score_answers(answerer: Any, rows: list[dict[str, Any]], column: str, size: int) -> list[list[float]]:
    """Log-probabilities of the tokens of each row's answer, which is in this column. Raises InputError for NaN."""
    from ..scoring.layouts import Prompt

    pairs = [(Prompt.of(row), row[column]) for row in rows]
    some = lambda numbers: answerer.logps(*zip(*(pairs[n] for n in numbers), strict=True))  # noqa: E731
    found = run_in_batches(some, [len(prompt) + len(answer) for prompt, answer in pairs], size, "scoring")
    if math.isnan(sum(map(sum, found))):
        raise InputError(f"{answerer.section.name_or_path}: the model's logits are NaN: its weights are broken")
    return found


def run_in_batches(
    work: Callable[[list[int]], list], lengths: list[int], size: int, what: str, kept: ResumableBatches | None = None
) -> list:
    """What `work` makes of all rows' numbers, in order: it is given `size` of them at a time, of about one length.

    kept: results of an earlier try, and where those of this one are kept.
    """
    from ..monitoring.progress import TaskProgress

    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    kept = kept or ResumableBatches(None, {})
    with TaskProgress(len(lengths), what, "row") as steps:
        for first in range(0, len(order), size):
            numbers = order[first : first + size]
            if not kept.found.keys() >= {*numbers}:
                kept.add(dict(zip(numbers, work(numbers), strict=True)))
            steps.add(len(numbers))
    return [kept.found[n] for n in range(len(lengths))]
