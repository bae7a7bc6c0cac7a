"""The command `hf-posttrain data FILE`, which shows how each method reads a data file, and the first training example.

The file is read as a stream. Heavy imports are deferred, so that --help is quick.
"""

import argparse
import itertools
import json
import operator
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from ..data import column_inference
from ..errors import InputError, error_context, join_names
from ..methods import METHODS
from ..models.config import ModelSection
from ..recipe.cli import Parser, print_output
from ..recipe.sections import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENAME_HINT = "to rename columns, add NAME=COLUMN for each, such as prompt=COLUMN completion=COLUMN"
MAX_ROWS = 100
"""Number of rows that are read."""
READ_OPTIONS: Mapping[str, Any] = {"image_ids": (), "image_folder": None, "as_chat": False}
"""Fields of a `Plan` for text, with their defaults."""
_EXAMPLES = """examples:
  hf-posttrain data mine.jsonl
  hf-posttrain data mine.jsonl prompt=question completion=answer --model Qwen/Qwen3-0.6B
  hf-posttrain data pairs.parquet --split test

exit code: 0 if the columns are read without changes; 1 if the printed `columns:` must be added to the recipe; 2 if the
file cannot be read, in which case the output describes what to change
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the description of the file, and return the exit code.

    Raises:
        InputError: For invalid arguments, and for a file that cannot be read.
    """
    parser = Parser(
        prog="hf-posttrain data",
        description="Show the format of a data file, the columns that are read and the first training example.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a .jsonl, .json, .csv or .parquet file, a folder or a hub name")
    parser.add_argument(
        "columns", metavar="NAME=COLUMN", nargs="*", default=[], help="renamed columns, as in the recipe's source"
    )
    parser.add_argument("--method", choices=METHODS, help="describe the file for this method only (default: all)")
    model_help = "show the example in the tokens of this model, and describe its chat template"
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help=model_help)
    parser.add_argument(
        "--images", action="store_true", help="read rows with images for a vision-language model, as model.images: true"
    )
    parser.add_argument("--image_folder", metavar="FOLDER", help="folder that relative image paths start from")
    parser.add_argument(
        "--apply_chat_template",
        action="store_true",
        help="with --model: convert prompts of plain text to a user turn, as train.apply_chat_template",
    )
    parser.add_argument(
        "--chat_template", metavar="FILE", help="with --model: a Jinja template, as model.chat_template"
    )
    parser.add_argument("--split", default="train", help="split of a hub dataset or saved DatasetDict (train)")
    parser.add_argument("--name", help="configuration of the hub dataset")
    arguments = parser.parse_intermixed_args(argv)
    if invalid := next((pair for pair in arguments.columns if "=" not in pair), None):
        raise InputError(f"command line: {invalid!r} must have the form NAME=COLUMN, such as prompt=question")
    for name in ("apply_chat_template", "chat_template"):
        if getattr(arguments, name) and arguments.model is None:
            parser.error(f"--{name} requires --model")
    from ..data.prepare import drop_null_fields, null_filled_columns
    from ..data.sources import load

    columns = dict(pair.split("=", 1) for pair in arguments.columns)
    source = Source(arguments.file, arguments.name, arguments.split, columns or None, streaming=True)
    stream = load(source, "data")
    filled = null_filled_columns(stream)
    rows = [drop_null_fields(row, filled) for row in itertools.islice(stream, MAX_ROWS)]
    if not rows:
        raise InputError(f"data: {arguments.file} has no rows")

    tokenizer = None
    if arguments.model is not None:
        from ..models.load import load_tokenizer

        section = ModelSection(arguments.model, images=arguments.images, chat_template=arguments.chat_template)
        tokenizer = load_tokenizer(section)
    # the image token of an unknown model is represented by an arbitrary id
    options = {
        "image_ids": (-1,) if arguments.images else (),
        "image_folder": arguments.image_folder,
        "as_chat": arguments.apply_chat_template,
    }
    methods = [arguments.method] if arguments.method else list(METHODS)
    lines, code = describe_file(rows, arguments.file, methods, columns, tokenizer, options)
    if tokenizer:
        from ..data.template_report import describe_template

        lines += ["chat template:", *(f"  {line}" for line in describe_template(tokenizer))]
    print_output("\n".join(lines))
    return code


def describe_file(
    rows: list[dict[str, Any]],
    name: str,
    methods: Sequence[str],
    columns: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: Mapping[str, Any] = READ_OPTIONS,
) -> tuple[list[str], int]:
    """Describe how methods read a data set.

    Args:
        rows: The first rows.
        name: Name or path of the data set.
        methods: Names of the methods.
        columns: Renamed columns, {canonical name: column of the file}. The rows have the canonical names.
        tokenizer: Tokenizer of the model, or None to show the example as text.
        options: Fields of a `Plan`, those of READ_OPTIONS.

    Returns:
        The lines of the description, and the exit code.
    """
    lines = [f"{name}: columns {join_names(rows[0])}"]
    from ..data.formats import canonical_name, unread_columns
    from ..data.images import IMAGE_COLUMNS

    file_columns = {canonical_name(column, rows[0]): column for column in rows[0]}
    file_columns |= columns
    rows = [{canonical_name(column, row): value for column, value in row.items()} for row in rows]
    formats, problems, unread_problems = _readable_formats(rows, methods, options)
    suggestion = column_inference.suggest_format(rows, [METHODS[method] for method in methods])
    is_complete = suggestion is not None and not suggestion.missing
    renames = suggestion is not None and is_complete and any(a != b for a, b in suggestion.columns.items())
    problems |= {} if renames and not formats else unread_problems

    # The file can be read unchanged, unless only prompts are read and there are answers under another name.
    only_prompts = {*formats.values()} == {"prompt"} and suggestion is not None and len(suggestion.columns) > 1
    if formats and not (only_prompts and is_complete):
        for form in dict.fromkeys(formats.values()):
            names = ", ".join(method for method in formats if formats[method] == form)
            lines.append(f"format: {form} ({names})")
        # columns that no format reads
        unused = [
            column
            for column in rows[0]
            if all(column in unread_columns(rows[0], form) for form in formats.values())
            and not (options["image_ids"] and column in IMAGE_COLUMNS)
        ]
        ordered = dict.fromkeys([*(column for form in formats.values() for column in form.split(" + ")), *rows[0]])
        used = (f"{column} from {file_columns[column]}" for column in ordered if column not in unused)
        lines.append(f"columns: {join_names(used)}")
        lines += [f"not read: {join_names(unused)}"] if unused else []
        lines += filter(None, [column_inference.misspelling_problem(unused)])
        lines += [f"not {method}: {problem}" for method, problem in problems.items()]
        return [*lines, *_first_example(rows[0], formats, tokenizer, options)], 0

    # The file cannot be read, and renaming columns would not help.
    if problems:
        return [*lines, *(f"{method}: {problem}" for method, problem in problems.items())], 2
    if advice := column_inference.layout_advice(rows, suggestion, METHODS.values()):
        return [*lines, "format: not supported", advice], 2
    if suggestion is None or suggestion.missing:
        lines.append("format: not supported")
        if suggestion:
            mapping = join_names(f"{expected} could be {column}" for expected, column in suggestion.columns.items())
            missing = ", ".join(suggestion.missing)
            lines.append(f"the most similar format is {suggestion.form}: {mapping}; there is no column for {missing}")
        lines += filter(None, [column_inference.misspelling_problem(rows[0])])
        lines += (f"{method} reads {' | '.join(METHODS[method].rows.formats)}" for method in methods)
        lines.append(RENAME_HINT)
        return lines, 2

    # The file can be read with renamed columns.
    renamed_columns = {new: old for new, old in suggestion.columns.items() if new != old}
    tree = {"data": {"train": {"path": name, "columns": {**columns, **renamed_columns}}}}
    section = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None)
    if unused := [column for column in rows[0] if column not in suggestion.columns.values()]:
        lines.append(f"not read: {join_names(unused)}")
    readers = ", ".join(suggestion.methods)
    lines.append(f"format: not supported without renaming; the most similar format is {suggestion.form} ({readers})")
    lines += ["add to the recipe:", *textwrap.indent(section, "  ").splitlines()]
    renamed_rows = [
        {column: value for column, value in row.items() if column not in renamed_columns.values()}
        | {new: row[old] for new, old in renamed_columns.items()}
        for row in rows
    ]
    formats, problems, _ = _readable_formats(renamed_rows, suggestion.methods, options)
    if not formats:
        return [*lines, *(f"then {method}: {problem}" for method, problem in problems.items())], 2
    return [*lines, *_first_example(renamed_rows[0], formats, tokenizer, options)], 1


def _readable_formats(
    rows: list[dict[str, Any]], methods: Sequence[str], options: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return three dictionaries by method.

    They contain the formats of the methods that can read all rows, the problems of those that fail at a row, and the
    problems of those whose format leaves a prompt or an image unread.
    """
    from ..data.encode import Plan, check_misread, read
    from ..data.formats import detect_format, unread_columns

    formats = {}
    problems = {}
    unread_problems = {}
    for method in methods:
        try:
            form = detect_format(list(rows[0]), METHODS[method])
        except InputError:
            continue
        unread = unread_columns(rows[0], form)
        image_problem = None if options["image_ids"] else column_inference.image_problem(rows, unread)
        prompt_problem = column_inference.prompt_problem(rows, unread, form)
        if problem := image_problem or (prompt_problem if "prompt" not in form else None):
            unread_problems[method] = problem
            continue

        samples = []
        plan = Plan(method, METHODS[method].rows, form, "data", **options)
        try:
            for n, row in enumerate(rows):
                with error_context(f"row {n}"):
                    samples += read(row, plan)
            check_misread({name: [row.get(name) for row in rows] for name in rows[0]}, samples, plan)
            formats[method] = form
        except InputError as error:
            problems[method] = str(error)
            # a column with the right name, but with scores or words instead of labels
            if form.endswith(" + label") and column_inference.value_type(row.get("label")) in ("text", "number"):
                labels = [row.get("label") for row in rows]
                problems[method] += f"; {column_inference.label_advice('label', labels, METHODS.values())}"
    return formats, problems, unread_problems


def _first_example(
    row: dict[str, Any],
    formats: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: Mapping[str, Any],
) -> list[str]:
    """Return the lines of the first example, in which trained text is green, or in [[brackets]] without a terminal."""
    from ..check.token_preview import Piece, mark_trained, row_parts, split_pieces
    from ..data.encode import Plan, read
    from ..data.prepare import build_plan, tokenise

    # the method whose format has the most columns shows the most of the row
    name = max(formats, key=lambda name: len(formats[name].split(" + ")))
    method = METHODS[name]
    form = formats[name]
    color = sys.stdout.isatty()
    if tokenizer:
        config = SimpleNamespace(apply_chat_template=options["as_chat"], image_folder=options["image_folder"])
        plan = build_plan(form, method, tokenizer, config, "data")
        batch = tokenise({column: [value] for column, value in row.items()}, [0], tokenizer, plan)
        prepared = {column: values[0] for column, values in batch.items()}
        decode: Callable[[Any], Any] = tokenizer.decode
    else:  # a row in the columns of a prepared one, whose values are texts, messages or ids
        sample = read(row, Plan(name, method.rows, form, "data", **options))[0]
        parts = zip(("prompt_ids", *method.rows.answers), (sample.prompt, *sample.branches), strict=False)
        prepared = {column: [part] if part and isinstance(part, str) else part or [] for column, part in parts}
        prepared = prepared | {"completion_mask": sample.mask}
        decode = _as_text

    pieces = split_pieces(row_parts(prepared, method.rows), decode)
    if method.rows.sampled:
        prompt = [piece for piece in pieces if piece.role == "prompt"]
        pieces = [*prompt, Piece("completion", False, "(sampled by the student)", 0)]
    marking = f"{'trained tokens' if tokenizer else 'trained text'} {'green' if color else 'in [[brackets]]'}"
    lines = [f"first example ({name}), {marking}:"]
    for role, runs in itertools.groupby(pieces, operator.attrgetter("role")):
        lines += [f"  {role}:", *(f"    {line}" for line in mark_trained(runs, color).split("\n"))]
    if not method.rows.sampled and not any(piece.role != "prompt" for piece in pieces):
        lines.append("  (the answer is empty. Such rows are dropped)")
    if method.rows.masked and form == "messages":
        lines.append("  (with assistant_only_loss: true, only the turns of the assistant)")
    return lines


def _as_text(values: Sequence[Any]) -> str:
    """Return messages as one line each, with their tool calls, or ids separated by spaces."""
    from ..data.images import MARK, PLACEHOLDER

    if not isinstance(values[0], dict):
        return " ".join(map(str, values))
    texts = [message["content"].replace(MARK, PLACEHOLDER) for message in values]
    tool_calls = [map(json.dumps, message.get("tool_calls", [])) for message in values]
    lines = [
        (f"{message['role']}:", text, *calls) for message, text, calls in zip(values, texts, tool_calls, strict=True)
    ]
    return "\n".join(" ".join(filter(None, line)) for line in lines)
