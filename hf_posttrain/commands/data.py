"""`hf-posttrain data FILE`: what a data file is to each method, and its first example as it would be trained.

The file is read as a stream. What reads rows is imported once it is needed, so that --help is quick.
"""

import argparse
import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from ..data import column_inference
from ..errors import InputError, error_context, join_names
from ..methods import METHODS
from ..models.config import ModelSection
from ..recipe.cli import print_output
from ..recipe.sections import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ROWS = 100  # that are looked at
_EXAMPLES = """examples:
  hf-posttrain data mine.jsonl
  hf-posttrain data mine.jsonl prompt=question completion=answer --model Qwen/Qwen3-0.6B
  hf-posttrain data pairs.parquet --split test

exit code: 0 the columns are read as they are; 1 write the `columns:` that are printed into the recipe; 2 the file
cannot be read, and the text says what to change
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what FILE is; returns the exit code. Raises InputError for arguments and files that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="hf-posttrain data",
        description="Show the format of a data file, the columns that are read and its first example as it is trained.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a .jsonl, .json, .csv or .parquet file, a folder or a hub name")
    parser.add_argument("columns", metavar="ours=theirs", nargs="*", default=[], help="columns of the recipe's source")
    parser.add_argument("--method", choices=METHODS, help="for this method alone; otherwise for all of them")
    tokens = "show the example in this model's tokens, and what its chat template does"
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help=tokens)
    shows = "the rows have pictures, and the model sees, as with model.images: true"
    parser.add_argument("--images", action="store_true", help=shows)
    parser.add_argument("--image_folder", metavar="FOLDER", help="where relative paths of pictures start")
    parser.add_argument("--split", default="train", help="split of a hub data set or saved DatasetDict (train)")
    parser.add_argument("--name", help="the hub data set's configuration")
    given = parser.parse_intermixed_args(argv)
    if wrong := next((pair for pair in given.columns if "=" not in pair), None):
        raise InputError(f"command line: {wrong!r} is not ours=theirs, such as prompt=question")
    from ..data.prepare import filled_by_arrow, without_filled
    from ..data.sources import load

    columns = dict(pair.split("=", 1) for pair in given.columns)
    source = Source(given.file, given.name, given.split, columns or None, streaming=True)
    stream = load(source, "data")
    filled = filled_by_arrow(stream)
    rows = [without_filled(row, filled) for row in itertools.islice(stream, MAX_ROWS)]
    if not rows:
        raise InputError(f"data: {given.file} has no rows")
    tokenizer = None
    if given.model is not None:
        from ..models.load import load_tokenizer

        tokenizer = load_tokenizer(ModelSection(given.model, images=given.images))
    # of a model that is not known, some id stands for pictures
    seen = {"image_ids": (-1,) if given.images else (), "image_folder": given.image_folder}
    methods = [given.method] if given.method else list(METHODS)
    lines, code = describe_file(rows, given.file, methods, columns, tokenizer, seen)
    if tokenizer:
        from ..data.template_report import traps

        lines += ["chat template:", *(f"  {line}" for line in traps(tokenizer))]
    print_output("\n".join(lines))
    return code


def describe_file(
    rows: list[dict],
    name: str,
    methods: Sequence[str],
    columns: dict,
    tokenizer: "PreTrainedTokenizerBase | None",
    seen: dict[str, Any],
) -> tuple[list, int]:
    """(lines, exit code) of the first rows of a data set, in which `columns` {ours: theirs} have our names. seen: what
    a `Plan` has of pictures.
    """
    lines = [f"{name}: columns {join_names(rows[0])}"]
    from ..data.formats import canonical_name, unread_columns
    from ..data.images import COLUMNS as PICTURES

    theirs = {canonical_name(column, rows[0]): column for column in rows[0]} | columns
    rows = [{canonical_name(column, row): value for column, value in row.items()} for row in rows]
    forms, problems, lost = _readable(rows, methods, seen)
    nearest = column_inference.suggest_format(rows, [METHODS[method] for method in methods])
    renames = nearest is not None and not nearest.missing and any(a != b for a, b in nearest.columns.items())
    problems |= {} if renames and not forms else lost
    # it can be read as it is, unless all that is read are prompts, and answers are there under another name
    bare = {*forms.values()} == {"prompt"} and nearest is not None and len(nearest.columns) > 1 and not nearest.missing
    if forms and not bare:
        for form in dict.fromkeys(forms.values()):
            lines.append(f"format: {form} ({', '.join(method for method in forms if forms[method] == form)})")
        # a column that some of the formats read is used
        aside = [
            column
            for column in rows[0]
            if all(column in unread_columns(rows[0], form) for form in forms.values())
            and not (seen["image_ids"] and column in PICTURES)
        ]
        used = dict.fromkeys([*(name for form in forms.values() for name in form.split(" + ")), *rows[0]])
        lines.append("columns: " + join_names(f"{ours} from {theirs[ours]}" for ours in used if ours not in aside))
        lines += [f"not read: {join_names(aside)}"] if aside else []
        lines += filter(None, [column_inference.misspelling_problem(aside)])
        lines += [f"not {method}: {problem}" for method, problem in problems.items()]
        return [*lines, *_first_example(rows[0], forms, tokenizer, seen)], 0
    # it cannot, and other names of columns would not help
    if problems:
        return [*lines, *(f"{method}: {problem}" for method, problem in problems.items())], 2
    if advice := column_inference.layout_advice(rows, nearest, METHODS.values()):
        return [*lines, "format: none that is read", advice], 2
    if nearest is None or nearest.missing:
        lines.append("format: none that is read")
        if nearest:
            found = join_names(f"{ours} could be {theirs}" for ours, theirs in nearest.columns.items())
            lines.append(f"the nearest is {nearest.form}: {found}; there is no column for {', '.join(nearest.missing)}")
        lines += filter(None, [column_inference.misspelling_problem(rows[0])])
        return [*lines, *(f"{method} reads {' | '.join(METHODS[method].rows.formats)}" for method in methods)], 2
    # it can with other names: those to write, and the first example with them
    mapping = {ours: theirs for ours, theirs in nearest.columns.items() if ours != theirs}
    tree = {"data": {"train": {"path": name, "columns": columns | mapping}}}
    section = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None)
    if aside := [column for column in rows[0] if column not in nearest.columns.values()]:
        lines.append(f"not read: {join_names(aside)}")
    lines.append(f"format: none that is read as it is; the nearest is {nearest.form} ({', '.join(nearest.methods)})")
    lines += ["write into the recipe:", *textwrap.indent(section, "  ").splitlines()]
    renamed = [
        {column: value for column, value in row.items() if column not in mapping.values()}
        | {ours: row[theirs] for ours, theirs in mapping.items()}
        for row in rows
    ]
    forms, problems, _ = _readable(renamed, nearest.methods, seen)
    if not forms:
        return [*lines, *(f"then {method}: {problem}" for method, problem in problems.items())], 2
    return [*lines, *_first_example(renamed[0], forms, tokenizer, seen)], 1


def _readable(
    rows: list[dict], methods: Sequence[str], seen: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """({method: format} of the methods that can read all rows, {method: problem} of those that fail at a row, {method:
    problem} of those whose format leaves a prompt unread).
    """
    from ..data.encode import Plan, check_misread, read
    from ..data.formats import detect_format, unread_columns

    forms = {}
    problems = {}
    lost = {}
    for method in methods:
        try:
            form = detect_format(list(rows[0]), METHODS[method])
        except InputError:
            continue
        aside = unread_columns(rows[0], form)
        unseen = None if seen["image_ids"] else column_inference.image_problem(rows, aside)
        left = column_inference.prompt_problem(rows, aside, form)
        if problem := unseen or (left if "prompt" not in form else None):
            lost[method] = problem
            continue
        samples = []
        plan = Plan(method, METHODS[method].rows, form, "data", **seen)
        try:
            for n, row in enumerate(rows):
                with error_context(f"row {n}"):
                    samples += read(row, plan)
            check_misread({name: [row.get(name) for row in rows] for name in rows[0]}, samples, plan)
            forms[method] = form
        except InputError as error:
            problems[method] = str(error)
            # a column of the right name that grades answers by scores or words
            if form.endswith(" + label") and column_inference.value_type(row.get("label")) in ("text", "number"):
                labels = [row.get("label") for row in rows]
                problems[method] += f"; {column_inference.label_advice('label', labels, METHODS.values())}"
    return forms, problems, lost


def _first_example(row: dict, forms: dict[str, str], tokenizer: Any, seen: dict[str, Any]) -> list[str]:
    """The first example, of the method that reads most of it: what is trained is green or in [[brackets]]."""
    from ..check.token_preview import Piece, mark_trained, row_parts, split_pieces
    from ..data.encode import Plan, read
    from ..data.prepare import plan_for, tokenise

    # the method whose format has most columns shows most of the row
    name = max(forms, key=lambda name: len(forms[name].split(" + ")))
    method = METHODS[name]
    form = forms[name]
    colour = sys.stdout.isatty()
    if tokenizer:
        plan = plan_for(form, method, tokenizer, None, "data")._replace(image_folder=seen["image_folder"])
        batch = tokenise({column: [value] for column, value in row.items()}, [0], tokenizer, plan)
        made = {column: values[0] for column, values in batch.items()}
        write = tokenizer.decode
    else:  # a row as the file has it, in the columns of a prepared one: a value is a text, a message or an id
        sample = read(row, Plan(name, method.rows, form, "data", **seen))[0]
        found = zip(("prompt_ids", *method.rows.answers), (sample.prompt, *sample.branches), strict=False)
        made = {column: [part] if part and isinstance(part, str) else part or [] for column, part in found}
        made = made | {"completion_mask": sample.mask}
        write = _as_text
    shown = split_pieces(row_parts(made, method.rows), write)
    if method.rows.sampled:
        prompt = [piece for piece in shown if piece.role == "prompt"]
        shown = [*prompt, Piece("completion", False, "(sampled by the student)", 0)]
    how = f"{'trained tokens' if tokenizer else 'what is trained'} {'green' if colour else 'in [[brackets]]'}"
    lines = [f"first example ({name}), {how}:"]
    for role, runs in itertools.groupby(shown, lambda piece: piece.role):
        lines += [f"  {role}:", *(f"    {line}" for line in mark_trained(runs, colour).split("\n"))]
    if not method.rows.sampled and not any(piece.role != "prompt" for piece in shown):
        lines.append("  (its answer is empty: such rows are dropped)")
    if method.rows.masked and form == "messages":
        lines.append("  (with assistant_only_loss: true, the assistant's turns alone)")
    return lines


def _as_text(values: list) -> str:
    """Messages on lines of their own, with their calls; ids with spaces."""
    from ..data.images import MARK, PLACEHOLDER

    if not isinstance(values[0], dict):
        return " ".join(map(str, values))
    texts = [m["content"].replace(MARK, PLACEHOLDER) for m in values]
    calls = [map(json.dumps, m.get("tool_calls", [])) for m in values]
    said = [(f"{m['role']}:", text, *own) for m, text, own in zip(values, texts, calls, strict=True)]
    return "\n".join(" ".join(filter(None, parts)) for parts in said)
