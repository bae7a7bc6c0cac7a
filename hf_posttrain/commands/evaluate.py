"""The command `hf-posttrain eval MODEL --data FILE`, which computes metrics and stores them in the folder of the run.

The columns of the data determine the metrics: prompts are answered greedily, answers are scored and pairs are
compared. `--tasks` runs benchmarks of EleutherAI's lm-eval. Heavy imports are deferred, so that --help is quick.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from .metrics import TextMetric, load_metric, load_tasks, measure, run_tasks
from .results import EVALUATIONS, RESULTS, as_table, results_folder, store_result
from .resumable_jsonl import ResumableBatches
from .reward_metrics import reward_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .inference import InferenceModel

UNFINISHED = ".eval_answers.part"
"""File with the greedy answers of an evaluation that is not finished."""
ANSWER_METRICS = "exact_match, stopped, length"
"""Metrics of greedy answers."""
SCORE_METRICS = "perplexity, answer_nll"
"""Metrics of the answers in the data."""
PAIR_METRICS = "pair_accuracy, pair_accuracy_per_token"
"""Metrics of pairs."""
_ROW_OPTIONS = ("max_length", "image_folder", "apply_chat_template", "chat_template_kwargs")
"""Options that determine how rows are read."""
_DATA_OPTIONS = (*_ROW_OPTIONS, "limit", "columns", "images", "chat_template", "max_completion_length", "metrics")
"""Options that are stored with an evaluation of data."""
_TASK_OPTIONS = (
    "limit",
    "num_fewshot",
    "task_folder",
    "max_length",
    "apply_chat_template",
    "chat_template",
    "chat_template_kwargs",
)
"""Options that are stored with an evaluation of a task."""
_SWITCH = {"action": "store_true"}
_NAMES = {"nargs": "+", "default": [], "metavar": "NAME"}
_NUMBER = {"type": number_type(1), "metavar": "N"}
_FOLDER = {"metavar": "FOLDER"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"metavar": "FILE"}, "data: a .jsonl, .json, .csv or .parquet file, a folder or a hub name"),
    "split": ({"default": "train"}, "split of a hub dataset or saved DatasetDict (train)"),
    "limit": (_NUMBER, "evaluate only the first N rows of the data and of each task"),
    "adapter": (_FOLDER, "PEFT adapter to load on top of MODEL"),
    "metrics": (
        _NAMES,
        "metrics of the package evaluate for greedy answers: names, or folders with a script of the same name",
    ),
    "max_completion_length": (_NUMBER | {"default": 256}, "maximum length of a greedy answer in tokens (256)"),
    "max_length": (
        _NUMBER | {"type": number_type(2)},
        "maximum length of a prompt with its answer in tokens; longer rows are truncated as in training",
    ),
    "batch_size": (_NUMBER | {"default": 8}, "number of rows per batch (8); the metrics do not depend on it"),
    "images": (_SWITCH, "load a vision-language model for rows with images"),
    "image_folder": (_FOLDER, "folder that relative image paths start from"),
    "apply_chat_template": (_SWITCH, "convert prompts of plain text to a user turn"),
    "tasks": (_NAMES, "tasks of lm-eval, which pip install 'hf_posttrain[eval]' installs"),
    "task_folder": (_FOLDER, "with --tasks: folder with your own tasks as .yaml files"),
    "num_fewshot": (
        _NUMBER | {"type": number_type(0)},
        "with --tasks: number of examples before each question (default: that of the task)",
    ),
    "output": (
        _FOLDER | {"type": Path},
        f"folder that the metrics are stored in, as {EVALUATIONS} and {RESULTS} (default: MODEL if it is a run's"
        " output_dir; otherwise they are only printed)",
    ),
    "json": (_SWITCH, "print the evaluations as JSON"),
}
_EXAMPLES = """examples:
  hf-posttrain eval outputs/mine --data test.jsonl
  hf-posttrain eval Qwen/Qwen3-0.6B --data test.jsonl --columns prompt=question completion=answer --limit 200
  hf-posttrain eval outputs/mine --tasks gsm8k arc_easy --num_fewshot 5 --output results
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the metrics, and return the exit code.

    Raises:
        InputError: For invalid arguments, and for models, data and tasks that cannot be evaluated.
    """
    arguments = parse(argv)
    folder = results_folder(arguments)
    with redirect_stdout(sys.stderr):  # packages and scripts may print
        evaluations = evaluate_model(arguments)
        if folder:
            store_result(folder, evaluations)
            (folder / UNFINISHED).unlink(missing_ok=True)
    if arguments.json:
        print_output(json.dumps(evaluations, indent=2, ensure_ascii=False))
    else:
        print_output("\n".join(map(as_table, evaluations)))
    return 0


def evaluate_model(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the evaluations of the data and of each task. All input is read before the weights are loaded."""
    section = find_model(arguments)
    section.chat_template = arguments.chat_template
    metrics = {Path(name).stem: load_metric(name) for name in arguments.metrics}
    tasks = load_tasks(arguments) if arguments.tasks else None
    from ..models.load import check_model, is_vision_only, load_tokenizer, with_head
    from .inference import InferenceModel

    with error_context(f"the base of {arguments.model}" if section.adapter == arguments.model else "MODEL"):
        config = check_model(section)
        section.images |= arguments.images or is_vision_only(config)
        section = with_head(section, config)
        tokenizer = load_tokenizer(section)
    if tasks and arguments.apply_chat_template and not tokenizer.chat_template:
        problem = f"--apply_chat_template requires a chat template, which the tokenizer of {arguments.model} lacks"
        raise InputError(f"{problem}. Add --chat_template FILE")
    is_reward_model = section.head == "score"
    if tasks and is_reward_model:
        raise InputError(f"{arguments.model} is a reward model, which answers no tasks. Remove --tasks")
    rows = read_rows(arguments, tokenizer, is_reward_model) if arguments.data else None
    if rows and metrics and not any(row["completion_ids"] for row in rows.prompts):
        problem = f"--metrics requires prompts with an answer to compare with, which {arguments.data} lacks"
        raise InputError(f"{problem}. Remove --metrics")

    inference = InferenceModel(section, arguments.chat_template_kwargs, tokenizer, generates=not is_reward_model)
    evaluations = []
    if rows:
        results = {"metrics": evaluate_rows(inference, rows, arguments, metrics), "left_out": rows.left_out}
        count = max(map(len, (rows.prompts, rows.scored, rows.pairs)))
        evaluations = [{"data": arguments.data, "split": arguments.split, "rows": count} | results]
    evaluations += run_tasks(inference, arguments, *tasks) if tasks else []

    model_info = {
        "model": str(Path(arguments.model)),
        "adapter": arguments.adapter,
        "version": __version__,
        "dtype": str(inference.model.dtype).removeprefix("torch."),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    for entry in evaluations:
        options = {name: getattr(arguments, name) for name in (_DATA_OPTIONS if "data" in entry else _TASK_OPTIONS)}
        non_empty = {name: value for name, value in options.items() if value or type(value) is int}
        entry |= model_info | {"options": non_empty}
    return evaluations


# ---- arguments and rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments.

    Raises:
        InputError: For invalid values and combinations.
    """
    parser = Parser(
        prog="hf-posttrain eval",
        usage="hf-posttrain eval MODEL [--data FILE] [--tasks NAME ...] [OPTIONS]",
        description="Evaluate a model: exact match, perplexity, pair accuracy, other metrics and tasks of lm-eval.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_help = "a language model or a reward model: a run's output_dir, another folder or a hub name"
    parser.add_argument("model", metavar="MODEL", help=model_help)
    for name, (options, help_text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", help=help_text, **options)
    parser.add_shared("columns", "chat_template", "chat_template_kwargs")
    arguments = parser.parse_args(argv)

    if not arguments.data and not arguments.tasks:
        parser.error("there is nothing to evaluate. Add --data FILE or --tasks NAME")
    requirements = {"metrics": "data", "columns": "data", "task_folder": "tasks", "num_fewshot": "tasks"}
    for name, required in requirements.items():
        if getattr(arguments, name) not in (None, []) and not getattr(arguments, required):
            parser.error(f"--{name} is only valid with --{required}. Add --{required}, or remove --{name}")
    arguments.columns = dict(arguments.columns)

    names = [
        *f"{ANSWER_METRICS}, {SCORE_METRICS}, {PAIR_METRICS}".split(", "),
        *(Path(name).stem for name in arguments.metrics),
    ]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        parser.error(f"--metrics: there is already a metric {duplicate}. Remove it, or rename its folder")
    if arguments.task_folder and not os.path.isdir(arguments.task_folder):
        hint = path_hint(Path(arguments.task_folder))
        parser.error(f"--task_folder: there is no folder {arguments.task_folder}{hint}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("eval must run in one process. Start it without a launcher")
    return arguments


def find_model(arguments: argparse.Namespace) -> ModelSection:
    """Return the section of the model. The folder of an adapter, such as a run's, is loaded with its base."""
    folder = Path(arguments.model)
    if arguments.adapter and (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise InputError(f"MODEL cannot be an adapter if --adapter is set, and {folder} is one. Set MODEL to its base")
    return section_from_name(arguments.model, arguments.adapter)


@dataclass
class EvaluationRows:
    """Prepared rows of the data by use. A row may be in several lists."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    """Rows whose prompts are answered."""
    scored: list[dict[str, Any]] = field(default_factory=list)
    """Rows whose answers are scored."""
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """Rows with a chosen and a rejected answer."""
    left_out: list[str] = field(default_factory=list)
    """Metrics and rows that are left out, with the reason."""


def read_rows(
    arguments: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase", is_reward_model: bool = False
) -> EvaluationRows:
    """Return the rows of --data. A reward model reads pairs alone.

    Raises:
        InputError: For the first invalid row, and for columns that contain nothing to evaluate.
    """
    from ..data import row_schema
    from ..data.column_inference import suggest_format
    from ..data.formats import canonical_name, detect_format
    from ..data.prepare import prepare
    from ..data.sources import load
    from .inference import PromptReader, data_options

    source = Source(arguments.data, None, arguments.split, arguments.columns or None, arguments.limit)
    raw = load(source, "--data")
    columns = [canonical_name(column, raw.column_names) for column in raw.column_names]
    options = {name: getattr(arguments, name) for name in _ROW_OPTIONS} | {"keep_asked": False}

    def format_columns(kind: row_schema.RowKind) -> list[str]:
        """Return the columns of the format that rows of this kind are read from, or none."""
        try:
            return detect_format(columns, PromptReader("eval", kind)).split(" + ")
        except InputError:
            return []

    def read(kind: row_schema.RowKind, **additional_options: object) -> list[dict[str, Any]]:
        """Return the prepared rows of this kind."""
        row_options = data_options(**options, **additional_options)
        return list(prepare(raw, PromptReader("eval", kind), tokenizer, row_options, Path(arguments.data).name))

    readers = [PromptReader("eval", kind) for kind in (row_schema.SUPERVISED, row_schema.PREFERENCE)]
    suggestion = suggest_format(list(islice(raw, 20)), readers)
    mapping = {} if suggestion is None or suggestion.missing else suggestion.columns
    renames = [f"{name}={column}" for name, column in mapping.items() if name != column]
    hint = f". Try --columns {' '.join(renames)}" if renames else ""

    single = format_columns(row_schema.SUPERVISED) or format_columns(row_schema.PROMPTS)
    rows = EvaluationRows()
    if {"completion", "reference"} <= {*columns}:  # a file that `sample` or `judge` wrote
        problem = "column reference: answers are compared with column completion"
        rows.left_out.append(f"{problem}. Use the file that was sampled from")
    if is_reward_model:
        if not format_columns(row_schema.REWARD_PAIRS):
            problem = f"a reward model requires pairs (prompt, chosen and rejected), not {join_names(columns)}"
            raise InputError(f"{arguments.data}: {problem}{hint or '. Rename columns with --columns NAME=COLUMN'}")
        rows.pairs = read(row_schema.REWARD_PAIRS)
        return rows
    if format_columns(row_schema.PREFERENCE):
        rows.pairs = read(row_schema.PREFERENCE)
        if not {"completion", "output", "completion_ids"} & {*single}:
            rows.left_out.append(f"{ANSWER_METRICS}, {SCORE_METRICS}: pairs have no single right answer")
            return rows
    elif single:
        rows.left_out.append(f"{PAIR_METRICS}: there are no columns chosen and rejected")
    else:
        formats = "prompt and completion; messages; text; prompt, chosen and rejected; or only prompt"
        problem = f"the columns must be {formats}, not {join_names(columns)}"
        raise InputError(f"{arguments.data}: {problem}{hint or '. Rename them with --columns NAME=COLUMN'}")

    if "label" in format_columns(row_schema.UNPAIRED):
        labeled = read(row_schema.UNPAIRED)
        rows.prompts = rows.scored = [row for row in labeled if row["label"]]
        if false_labels := len(labeled) - len(rows.prompts):
            rows.left_out.append(f"rows with label false: {false_labels}")
    elif single in (["messages"], ["prompt"], ["prompt_ids"]):
        rows.prompts = read(row_schema.PROMPTS)  # a conversation is answered at its last turn, and scored in all turns
        try:
            rows.scored = read(row_schema.SUPERVISED, train_on="assistant") if single == ["messages"] else []
        except InputError as error:
            rows.left_out.append(f"{SCORE_METRICS}: {error}")
    else:
        rows.prompts = rows.scored = read(row_schema.SUPERVISED)

    if rows.prompts and not any(row["completion_ids"] for row in rows.prompts):
        metrics = "exact_match" if single == ["messages"] else f"exact_match, {SCORE_METRICS}"
        rows.left_out.append(f"{metrics}: the rows have no right answers{hint}")
    if single in (["text"], ["input_ids"]) or all(len(row["prompt_ids"]) < 2 for row in rows.prompts):
        rows.prompts = []
        rows.left_out.append(f"{ANSWER_METRICS}: the rows have no prompts to answer")
    if not rows.prompts and not rows.scored:
        raise InputError(f"{arguments.data}: there is nothing to evaluate. {'; '.join(rows.left_out)}")
    return rows


# ---- metrics of rows


def evaluate_rows(
    inference: "InferenceModel", rows: EvaluationRows, arguments: argparse.Namespace, metrics: Mapping[str, TextMetric]
) -> dict[str, float]:
    """Return the value of every metric that can be computed from the rows."""
    if inference.section.head == "score":
        return reward_metrics(*reward_pairs(inference, rows.pairs, arguments.batch_size))
    values: dict[str, float] = {}
    if rows.scored:
        logps = score_answers(inference, rows.scored, "completion_ids", arguments.batch_size)
        masks = [row.get("completion_mask") or [1] * len(row["completion_ids"]) for row in rows.scored]
        masked = (zip(answer, mask, strict=True) for answer, mask in zip(logps, masks, strict=True))
        nll = -fmean(logp for tokens in masked for logp, is_counted in tokens if is_counted)
        values = {"perplexity": math.exp(nll) if nll < 700 else math.inf, "answer_nll": nll}
    if rows.pairs:
        chosen, rejected = (
            score_answers(inference, rows.pairs, f"{name}_ids", arguments.batch_size) for name in ("chosen", "rejected")
        )
        reductions: dict[str, Callable[[list[float]], float]] = dict(
            zip(PAIR_METRICS.split(", "), (math.fsum, fmean), strict=True)
        )
        for name, reduce in reductions.items():
            values[name] = fmean(reduce(good) > reduce(bad) for good, bad in zip(chosen, rejected, strict=True))
    return (judge_answers(inference, rows, arguments, metrics) if rows.prompts else {}) | values


def judge_answers(
    inference: "InferenceModel", rows: EvaluationRows, arguments: argparse.Namespace, metrics: Mapping[str, TextMetric]
) -> dict[str, float]:
    """Return the metrics of greedy answers to the prompts, compared with the answers of the data."""
    from ..generation.exact_match import ExactMatch, first_turn
    from ..generation.rollout import truncate_at_terminal
    from ..scoring.layouts import Prompt

    prompts = [Prompt.from_row(row) for row in rows.prompts]
    terminal_ids = inference.terminal_ids

    def generate(numbers: list[int]) -> list[list[int]]:
        """Return greedy answers to the prompts with these numbers."""
        return inference.generate([prompts[n] for n in numbers], arguments.max_completion_length)

    stored = resumable_answers(inference, rows.prompts, arguments)
    answers = run_in_batches(generate, [*map(len, prompts)], arguments.batch_size, "answering", stored)
    values: dict[str, float] = {
        "stopped": fmean(ids[-1] in terminal_ids for ids in answers),
        "length": fmean(map(len, answers)),
    }

    # An answer without a terminal id was truncated by max_length, unless none has one: rows of ids may lack them.
    references = [truncate_at_terminal(first_turn(row), terminal_ids) for row in rows.prompts]
    complete = [n for n, ids in enumerate(references) if ids and ids[-1] in terminal_ids]
    known = complete or [n for n, ids in enumerate(references) if ids]
    if known and len(known) < len(references):
        names = "exact_match and --metrics" if metrics else "exact_match"
        problem = "their answers are missing, or truncated by --max_length"
        rows.left_out.append(f"{names} of some rows ({len(references) - len(known)}): {problem}")

    predicted_texts = [inference.text(answers[n]) for n in known]
    reference_texts = [inference.text(references[n]) for n in known]
    for name, metric in {"exact_match": ExactMatch(), **metrics}.items() if known else ():
        values |= measure(name, metric, predicted_texts, reference_texts)
    return values


def resumable_answers(
    inference: "InferenceModel", rows: list[dict[str, Any]], arguments: argparse.Namespace
) -> ResumableBatches:
    """Return the storage of greedy answers in the folder of the results, or a temporary one if there is none.

    An interrupted evaluation resumes from it. It is deleted when the evaluation is finished.
    """
    if (folder := results_folder(arguments)) is None:
        return ResumableBatches(None, {})
    import datasets

    from ..data.images import image_versions
    from ..models.score_cache import numeric_config, rows_key, weights_key

    settings = f"{numeric_config(inference.model)} {sorted(inference.terminal_ids)}"
    key = {
        "version": __version__,
        "model": weights_key(inference.model.state_dict(), settings, sample=64),
        "prompts": rows_key(datasets.Dataset.from_list([{"prompt_ids": row["prompt_ids"]} for row in rows])),
        "images": image_versions(row.get("images") for row in rows),
        "max_completion_length": arguments.max_completion_length,
        "batch_size": arguments.batch_size,
    }
    return ResumableBatches(folder / UNFINISHED, json.loads(json.dumps(key)))


def score_answers(
    inference: "InferenceModel", rows: list[dict[str, Any]], column: str, batch_size: int
) -> list[list[float]]:
    """Return the log-probability of each token of the answers in a column.

    Raises:
        InputError: For logits that are NaN.
    """
    from ..scoring.layouts import Prompt

    pairs = [(Prompt.from_row(row), row[column]) for row in rows]

    def score(numbers: list[int]) -> list[list[float]]:
        """Return the log-probabilities of the rows with these numbers."""
        prompts, answers = zip(*(pairs[n] for n in numbers), strict=True)
        return inference.logps(prompts, answers)

    logps = run_in_batches(score, [len(prompt) + len(answer) for prompt, answer in pairs], batch_size, "scoring")
    if math.isnan(sum(map(sum, logps))):
        problem = "the model's logits are NaN, so that its weights are invalid"
        raise InputError(f"{inference.section.name_or_path}: {problem}. Use another checkpoint")
    return logps


def reward_pairs(
    inference: "InferenceModel", pairs: list[dict[str, Any]], batch_size: int
) -> tuple[list[float], list[float]]:
    """Return the rewards of the chosen and of the rejected answers.

    Raises:
        InputError: For rewards that are NaN or infinite.
    """
    from ..scoring.layouts import Prompt

    prompts = [Prompt.from_row(row) for row in pairs]

    def score(numbers: list[int]) -> list[tuple[float, ...]]:
        """Return the rewards of both answers of the rows with these numbers."""
        answers = [[pairs[n]["chosen_ids"], pairs[n]["rejected_ids"]] for n in numbers]
        return inference.rewards([prompts[n] for n in numbers], answers)

    lengths = [len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in pairs]
    rewards = run_in_batches(score, lengths, batch_size, "scoring")
    if not all(math.isfinite(reward) for pair in rewards for reward in pair):
        problem = "its rewards are NaN or infinite, so that its weights are invalid"
        raise InputError(f"{inference.section.name_or_path}: {problem}. Use another checkpoint")
    chosen, rejected = zip(*rewards, strict=True)
    return list(chosen), list(rejected)


def run_in_batches(
    function: Callable[[list[int]], list[Any]],
    lengths: list[int],
    batch_size: int,
    title: str,
    stored: ResumableBatches | None = None,
) -> list[Any]:
    """Apply a function to batches of row numbers, sorted by length, and return the results in the order of the rows.

    Args:
        function: Computes one result for each of the row numbers that it receives.
        lengths: Length of each row in tokens.
        batch_size: Number of rows per batch.
        title: Title of the progress bar.
        stored: Results of an interrupted evaluation, to which new results are added.
    """
    from ..monitoring.progress import TaskProgress

    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    stored = stored or ResumableBatches(None, {})
    with TaskProgress(len(lengths), title, "row") as progress:
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            if not stored.results.keys() >= {*numbers}:
                stored.add(dict(zip(numbers, function(numbers), strict=True)))
            progress.add(len(numbers))
    return [stored.results[n] for n in range(len(lengths))]
