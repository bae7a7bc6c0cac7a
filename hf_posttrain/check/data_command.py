"""`hf-posttrain data FILE`: what a data file is to each method, and its first example as it would be trained.

    main         arguments, exit codes: 0 it can be read, 1 with `columns` that it prints, 2 it cannot
    described    the same for rows that are read: text and exit code
    example      the first example, what is trained marked

The file is read as a stream, so that a large one is as quick as a small one: ROWS rows are looked at.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from ..errors import InputError, named
from ..methods import METHODS
from ..models.section import ModelSection
from ..recipe.sections import Source
from .pieces import Piece, marked, pieces, printable

ROWS = 100
"""Rows that are looked at."""
SAMPLED = Piece("completion", False, "(sampled by the student)")
"""OPD's answers are not in the file."""
_EXAMPLES = """examples:
  hf-posttrain data mine.jsonl
  hf-posttrain data mine.jsonl prompt=question completion=answer --model Qwen/Qwen3-0.6B
  hf-posttrain data pairs.parquet --method dpo

exit code: 0 the columns are read as they are; 1 write the `columns:` that are printed into the recipe; 2 the file
cannot be read, and the text says what to change
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what FILE is; returns the exit code. Raises InputError for arguments and files that cannot be read."""
    arguments = _arguments(argv)
    from ..data.sources import load

    columns = dict(pair.split("=", 1) for pair in arguments.columns)
    source = Source(arguments.file, arguments.name, arguments.split, columns or None, streaming=True)
    rows = list(itertools.islice(load(source, "data"), ROWS))
    if not rows:
        raise InputError(f"data: {arguments.file} has no rows")
    methods = (arguments.method,) if arguments.method else tuple(METHODS)
    lines, code = described(rows, arguments.file, methods, columns, _tokenizer(arguments.model))
    print("\n".join(lines))
    return code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help="show the example in this model's tokens")
    parser.add_argument("--split", default="train", help="split of a hub data set or saved DatasetDict (train)")
    parser.add_argument("--name", help="the hub data set's configuration")
    arguments = parser.parse_intermixed_args(argv)
    if wrong := next((pair for pair in arguments.columns if "=" not in pair), None):
        raise InputError(f"command line: {wrong!r} is not ours=theirs, such as prompt=question")
    return arguments


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from ..models.load import load_tokenizer

    return load_tokenizer(ModelSection(name))


def described(
    rows: list[dict], name: str, methods: tuple[str, ...], columns: dict[str, str], tokenizer: Any
) -> tuple[list[str], int]:
    """(lines, exit code) of the first rows of a data set, in which `columns` {ours: theirs} have our names."""
    from ..data import suggest

    lines = [f"{name}: columns {named(rows[0])}"]
    forms, problems = readable(rows, methods)
    nearest = suggest.suggest(rows, [METHODS[name] for name in methods])
    bare = {*forms.values()} == {"prompt"} and nearest is not None and len(nearest.columns) > 1 and not nearest.missing
    if forms and not bare:  # bare: answers stand beside the prompts under another name
        for form in dict.fromkeys(forms.values()):
            lines.append(f"format: {form} ({', '.join(method for method in forms if forms[method] == form)})")
        used = dict.fromkeys(column for form in forms.values() for column in form.split(" + "))
        lines.append("columns: " + named(f"{ours} from {columns.get(ours, ours)}" for ours in used))
        lines += [f"not {method}: {problem}" for method, problem in problems.items()]
        return lines + example(rows[0], forms, tokenizer), 0
    if problems:
        return lines + [f"{method}: {problem}" for method, problem in problems.items()], 2
    if advice := suggest.no_mapping(rows, nearest):
        return [*lines, "format: none that is read", advice], 2
    if nearest is None or nearest.missing:
        return lines + _unknown(nearest, methods), 2
    more, code = _to_be_mapped(rows, name, columns, nearest, tokenizer)
    return lines + more, code


def _to_be_mapped(
    rows: list[dict], name: str, columns: dict[str, str], nearest: Any, tokenizer: Any
) -> tuple[list[str], int]:
    """(lines, exit code) where other names of columns make the rows readable."""
    lines = [
        f"format: none that is read as it is; the nearest is {nearest.form} ({', '.join(nearest.methods)})",
        "write into the recipe:", *columns_of_recipe(name, columns | nearest.mapping),
    ]  # fmt: skip
    renamed = [_renamed(row, nearest.mapping) for row in rows]
    forms, problems = readable(renamed, nearest.methods)
    if not forms:
        return lines + [f"then {method}: {problem}" for method, problem in problems.items()], 2
    return lines + example(renamed[0], forms, tokenizer), 1


def readable(rows: list[dict], methods: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """({method: format} of the methods that can read all rows, {method: problem} of those that fail at a row)."""
    from ..data.encode import read
    from ..data.formats import detect
    from ..data.suggest import remedy

    forms, problems = {}, {}
    for method in methods:
        try:
            form = detect(list(rows[0]), METHODS[method])
        except InputError:
            continue
        for n, row in enumerate(rows):
            try:
                read(row, _plan(method, form))
            except InputError as error:
                problems[method] = f"row {n}: {error}{remedy(row, form)}"
                break
        else:
            forms[method] = form
    return forms, problems


def columns_of_recipe(path: str, columns: dict[str, str]) -> list[str]:
    """The lines of a recipe's data section that rename columns."""
    named, mapping = (
        yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=flow).strip()
        for value, flow in (({"path": path}, False), (columns, True))
    )
    return ["  data:", "    train:", f"      {named}", f"      columns: {mapping}"]


def example(row: dict, forms: dict[str, str], tokenizer: Any) -> list[str]:
    """The first example, of the method that reads most of it: what is trained is green or in [[brackets]]."""
    method = max(forms, key=lambda method: len(forms[method].split(" + ")))
    shown = _tokenised(row, method, forms[method], tokenizer) if tokenizer else _as_text(row, method, forms[method])
    how = "trained tokens" if tokenizer else "what is trained"
    colour = sys.stdout.isatty()
    lines = [f"first example ({method}), {how} {'green' if colour else 'in [[brackets]]'}:"]
    for role, runs in itertools.groupby(shown, lambda piece: piece.role):
        lines += [f"  {role}:", *(f"    {line}" for line in marked(runs, colour).split("\n"))]
    if METHODS[method].rows.masked and forms[method] in ("messages", "conversations"):
        lines.append("  (with assistant_only_loss: true, the assistant's turns alone)")
    return lines


def _plan(method: str, form: str) -> Any:
    from ..data.encode import Plan

    return Plan(method, METHODS[method].rows, form, "data")


def _renamed(row: dict, columns: dict[str, str]) -> dict:
    kept = {column: value for column, value in row.items() if column not in columns.values()}
    return kept | {ours: row[theirs] for ours, theirs in columns.items()}


def _unknown(nearest: Any, methods: tuple[str, ...]) -> list[str]:
    lines = ["format: none that is read"]
    if nearest:
        found = named(f"{ours} could be {theirs}" for ours, theirs in nearest.columns.items())
        lines.append(f"the nearest is {nearest.form}: {found}; there is no column for {', '.join(nearest.missing)}")
    return lines + [f"{name} reads {' | '.join(METHODS[name].rows.formats)}" for name in methods]


def _as_text(row: dict, method: str, form: str) -> list[Piece]:
    """The prompt and each answer, as the file has them."""
    from ..data.encode import read

    sample = read(row, _plan(method, form))[0]
    prompt = [Piece("prompt", False, _flat(sample.prompt))] if sample.prompt else []
    kind = METHODS[method].rows
    if kind.sampled:
        return [*prompt, SAMPLED]
    if sample.mask is not None:
        groups = itertools.groupby(zip(sample.branches[0], sample.mask, strict=True), lambda pair: bool(pair[1]))
        return [*prompt, *(Piece("completion", one, " ".join(str(i) for i, _ in group)) for one, group in groups)]
    roles = [column.removesuffix("_ids") for column in kind.answers]
    return [*prompt, *(Piece(role, True, _flat(part)) for role, part in zip(roles, sample.branches, strict=False))]


def _flat(value: Any) -> str:
    """Text, messages or ids as lines of printable text."""
    if isinstance(value, str):
        return printable(value)
    if value and isinstance(value[0], dict):
        return printable("\n".join(f"{message['role']}: {message['content']}" for message in value))
    return " ".join(map(str, value))


def _tokenised(row: dict, method: str, form: str, tokenizer: Any) -> list[Piece]:
    """The prompt and each answer, as text of their tokens."""
    from ..data.prepare import plan_for, tokenise

    plan = plan_for(form, METHODS[method], tokenizer, None, "data")
    made = tokenise({column: [value] for column, value in row.items()}, [0], tokenizer, plan)
    shown = pieces({column: values[0] for column, values in made.items()}, METHODS[method], tokenizer)
    return [*shown[:1], SAMPLED] if METHODS[method].rows.sampled else shown
