"""The command `hf-posttrain init METHOD`, which writes a commented recipe with the options that users usually change.

With `--from FILE` it converts a file of another tool, see `convert`.

The values come from the table of methods, from the fields of the method's Config with their help texts, and from the
shipped recipe of the same name. Torch is only imported to read a data file.
"""

import argparse
import ast
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..data import column_inference
from ..data.files import expand_home, source_problem
from ..errors import InputError, printable
from ..methods import METHODS
from ..recipe.cli import Parser, number_type, print_output
from ..recipe.fields import train_fields
from ..recipe.read import load_recipe
from ..recipe.sections import Source
from ..recipe.yaml_tree import read_tree, write_tree
from ..rounds.config import RoundsSection
from ..trainer.method_spec import Method
from ..trainer.rules import ADAPTER_RATE_FACTOR
from .convert import convert, report
from .recipes import find_shipped, schema_lines

# Key -> (value, comment). The values of training options apply if the shipped recipe has none.
_LORA = {
    "r": (16, "rank: larger for larger datasets"),
    "alpha": (32, "scale: the update is multiplied by alpha / r"),
    "dropout": (0.0, "dropout of the adapter's input"),
    "target_modules": ("all-linear", "every linear layer"),
}
_TRAIN = {
    "num_train_epochs": (1, "number of passes over the rows; max_steps: N ends earlier"),
    "per_device_train_batch_size": (4, "rows per device and micro-batch: fewer need less memory"),
    "gradient_accumulation_steps": (8, "micro-batches per optimizer step"),
    "lr_scheduler_type": ("cosine", "schedule of the learning rate: cosine, linear, constant_with_warmup, ..."),
    "warmup_steps": (0.1, "steps in which the learning rate rises; below 1: a share of all steps"),
}
_ROUND_COMMENT = "each round: sample answers from the current policy, judge, pair, train"
_JUDGE_COMMENT = "or {by: model, name: REWARD_MODEL}, {by: function, name: package.module:name}, ..."

Commented = tuple[Any, str]
"""(value of an option, comment)."""


class InspectedData(NamedTuple):
    """A source of rows, and properties of its first rows."""

    source: dict[str, Any]
    """The source with the `columns` that it requires, as in a recipe."""
    is_plain_text: bool
    """Whether the prompts are plain text."""
    has_answers: bool
    """Whether the rows have right answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the recipe, and return the exit code.

    Raises:
        InputError: For arguments that cannot be combined, for data that the method cannot train on, and for a recipe
            that exists.
    """
    parser = Parser("hf-posttrain init", description="Write a commented recipe that starts a run.")
    parser.add_argument("method", metavar="METHOD", nargs="?", choices=METHODS, help=", ".join(METHODS))
    parser.add_argument(
        "--from",
        metavar="FILE",
        dest="foreign",
        type=Path,
        help="convert a YAML file of Axolotl, LLaMA-Factory or TRL (`trl METHOD --config FILE`), and list the keys that"
        " are not converted",
    )
    parser.add_argument("--model", metavar="NAME", help="model to train: a folder or a hub name")
    parser.add_argument("--teacher", metavar="NAME", help="the teacher, for methods with one")
    parser.add_argument("--data", metavar="FILE", help="training rows: a file, a folder or a hub name")
    parser.add_argument("--eval", metavar="FILE", help="evaluation rows")
    parser.add_shared("columns")
    parser.add_argument(
        "--output_dir", metavar="DIR", help="output folder of the run (default: outputs/NAME_OF_RECIPE)"
    )
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of all weights")
    parser.add_argument(
        "--rounds", metavar="N", type=number_type(1), help="train in N rounds on judged answers of the model itself"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", dest="file", type=Path, help="recipe to write (default: METHOD.yaml)"
    )
    parser.add_argument("--yes", action="store_true", help="use the defaults of missing options instead of asking")
    arguments = parser.parse_args(argv)
    if arguments.foreign:
        return _convert(parser, arguments)
    if not arguments.method:
        parser.error(f"METHOD is missing. It is one of {', '.join(METHODS)}")
    method = METHODS[arguments.method]
    file = arguments.file or Path(f"{method.name}.yaml")
    if arguments.teacher and method.second != "teacher":
        parser.error(f"--teacher is not supported for {method.name}, which has no teacher. Remove --teacher")
    if arguments.rounds and (method.rows.sampled or method.second == "teacher"):
        problem = f"--rounds is not supported for {method.name}, which learns from a teacher, not from judged answers"
        parser.error(f"{problem}. Remove --rounds")
    if arguments.columns and not (arguments.data or arguments.eval):
        parser.error("--columns requires --data or --eval")
    if os.path.lexists(file):  # before anything is asked
        parser.error(f"-o: {file} exists. Set another file, or delete it")
    _write(parser, file, compose(method, arguments, file))
    name = shlex.quote(str(file))
    print_output(f"wrote {file}; next:\n  hf-posttrain {name} --check\n  hf-posttrain {name}")
    print_output(f"on several GPUs:\n  accelerate launch -m hf_posttrain.run {name}")
    return 0


def _write(parser: Parser, file: Path, text: str) -> None:
    """Write a new recipe."""
    if os.path.lexists(file):
        parser.error(f"-o: {file} exists. Set another file, or delete it")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"-o: {file} cannot be written ({error.strerror})")


def _convert(parser: Parser, arguments: argparse.Namespace) -> int:
    """Write the recipe of another tool's file, and return the exit code."""
    given = ("model", "teacher", "data", "eval", "columns", "output_dir", "lora", "rounds")
    if combined := [name for name in given if getattr(arguments, name)]:
        parser.error(f"--{combined[0]} cannot be combined with --from. Change the recipe afterwards")
    conversion = convert(arguments.foreign, arguments.method)
    file = arguments.file or Path(f"{conversion.recipe['method']}.yaml")
    lines = [*report(conversion)]
    head = [
        *schema_lines(find_shipped()["recipes"]),
        f"# Converted from {printable(str(arguments.foreign))} of {conversion.tool['title']}",
    ]
    text = "\n".join([*head, write_tree(conversion.recipe).rstrip(), *(f"# {printable(line)}" for line in lines)])
    _write(parser, file, f"{text}\n")
    try:
        load_recipe(file)
    except InputError as error:
        lines.append(f"before it can run: {error}")
    name = shlex.quote(str(file))
    print_output("\n".join([*lines, f"wrote {file}; next:", f"  hf-posttrain {name} --check"]))
    return 0


def compose(method: Method, arguments: argparse.Namespace, file: Path) -> str:
    """Ask for missing options, and return the text of the recipe.

    Raises:
        InputError: For rows that the method cannot train on.
    """
    # rounds start from prompts, like a method that samples answers
    reader = next(row for row in METHODS.values() if row.rows.sampled) if arguments.rounds else method
    files = find_shipped()["recipes"]
    names = (f"{method.name}_rounds" if arguments.rounds else method.name, method.name)
    shipped_name = next((name for name in names if name in files), None)
    shipped = read_tree(files[shipped_name])[0] if shipped_name in files else {}
    shipped_reader = read_tree(files[reader.name])[0] if reader.name in files else {}

    notes = {"model": "; its initial weights are also the reference" if method.second == "reference" else ""}
    notes |= {"teacher": "; it must have the same tokens as the model"} if method.second == "teacher" else {}
    defaults = {name: shipped.get(name, {}).get("name_or_path", f"ORG/{name.upper()}") for name in notes}
    models = {name: getattr(arguments, name) or _ask(name, defaults[name], arguments.yes) for name in notes}
    sources, is_plain_text, has_answers = _choose_rows(reader, shipped_reader, arguments)
    options = {"apply_chat_template": True} if is_plain_text and _has_template(models["model"]) else {}
    if models["model"] == defaults["model"]:
        options |= {name: value for name, value in shipped.get("train", {}).items() if name == "chat_template_kwargs"}

    source_docs = field_docs("Source")
    model_doc = field_docs("ModelSection")["name_or_path"]
    tree: dict[str, Any] = {"method": (method.name, method.title)}
    tree |= {name: {"name_or_path": (value, model_doc + notes[name])} for name, value in models.items()}
    tree["model"] |= {"lora": _LORA} if arguments.lora else {}
    tree["data"] = {
        name: {key: (value, source_docs[key]) for key, value in source.items()} for name, source in sources.items()
    }
    tree["train"] = {"output_dir": (arguments.output_dir or f"outputs/{file.stem}", "model, metrics, checkpoints")}
    tree["train"] |= _train_section(method, shipped.get("train", {}), options, arguments, "eval" in sources)
    if arguments.rounds:
        tree["rounds"] = _rounds_section(arguments.rounds, shipped.get("rounds", {}), has_answers)
    formats = " | ".join(form for form in reader.rows.formats if "_ids" not in form)
    title = f"For {method.title} of {models['model']}: hf-posttrain {file}"
    head = (printable(line) for line in (title, *textwrap.wrap(f"Columns of rows: {formats}", 116)))
    schema = (f"{line}\n" for line in schema_lines(files))
    return "".join([*schema, *(f"# {line}\n" for line in head), *_yaml_lines(tree)])


def _rounds_section(count: int, shipped: Mapping[str, Any], has_answers: bool) -> dict[str, Commented]:
    """Return the options of the section `rounds`.

    Args:
        count: Number of rounds.
        shipped: The section of the shipped recipe.
        has_answers: Whether the rows have right answers.
    """
    docs = field_docs("RoundsSection")
    values = {**vars(RoundsSection()), **shipped}
    judge = "exact_match" if has_answers else {"by": "model", "name": "ORG/REWARD_MODEL"}
    comment = _JUDGE_COMMENT if has_answers else f"the data have no right answers; {_JUDGE_COMMENT}"
    names = ["num_generations", "temperature", "max_completion_length", *({"reference"} & shipped.keys())]
    section: dict[str, Commented] = {"count": (count, _ROUND_COMMENT)}
    section |= {name: (values[name], docs[name]) for name in names}
    return section | {"judge": (judge, comment)}


def _choose_rows(
    reader: Method, shipped: Mapping[str, Any], arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], bool, bool]:
    """Return the data section, whether its prompts are plain text, and whether its rows have right answers.

    Args:
        reader: The method that reads the rows.
        shipped: The shipped recipe of that method, whose data are the default.
        arguments: The parsed command line.
    """
    rows = shipped.get("data", {"train": {"path": "ROWS.jsonl"}})
    path = arguments.data or _ask("data", rows["train"]["path"], arguments.yes)
    columns = dict(arguments.columns)
    if path == rows["train"]["path"]:
        sources = dict(rows)
        is_plain_text = shipped.get("train", {}).get("apply_chat_template", False)
        has_answers = True
    else:
        source, is_plain_text, has_answers = inspect_data(path, reader, "--data", columns)
        sources = {"train": source}
    if arguments.eval:
        sources["eval"] = inspect_data(arguments.eval, reader, "--eval", columns).source
    return sources, is_plain_text, has_answers


def _train_section(
    method: Method,
    shipped: Mapping[str, Any],
    template_options: Mapping[str, Any],
    arguments: argparse.Namespace,
    has_eval: bool,
) -> dict[str, Commented]:
    """Return the options of the section `train`.

    Args:
        method: The method.
        shipped: The section of the shipped recipe.
        template_options: Options of the chat template.
        arguments: The parsed command line.
        has_eval: Whether there are rows to evaluate on.
    """
    common = field_docs("PostTrainConfig")
    docs = field_docs(method.config_name)
    defaults = {name: field.default for name, field in train_fields(method.name).items()}
    options: dict[str, Commented] = {name: (value, common[name]) for name, value in template_options.items()}

    # The method's own options come from its shipped recipe. Without one, all with a limit and a default are written.
    names = shipped or {name for name in ("loss_type", *method.limits) if defaults.get(name) is not None}
    left_out = {*common, "learning_rate", *(["precompute_ref_log_probs"] if arguments.rounds else [])}
    for name in (name for name in docs if name in names and name not in left_out):
        comment = re.sub("the names in `.*`", ", ".join(method.loss_papers), docs[name])
        options[name] = (shipped.get(name, defaults[name]), comment)

    options |= {name: (shipped.get(name, value), comment) for name, (value, comment) in _TRAIN.items()}
    rate = method.initial_rate or defaults["learning_rate"]
    comment = docs["learning_rate"]
    if arguments.lora:
        rate = rate * ADAPTER_RATE_FACTOR
        comment += "; ten times that of all weights, for an adapter"
    options["learning_rate"] = (float(f"{rate:g}"), comment)
    options["max_length"] = (shipped.get("max_length", defaults["max_length"]), common["max_length"])

    if arguments.rounds:
        batch_size = options["per_device_train_batch_size"][0]
        options["per_device_train_batch_size"] = (batch_size, "prompts, whose rows are trained together")
        if has_eval:
            options["eval_strategy"] = ("epoch", "after each pass over the rows of a round")
        options["save_strategy"] = ("epoch", "resume an interrupted run with resume_from_checkpoint=auto")
    else:
        if has_eval:
            options["eval_strategy"] = ("steps", "during training")
            options["eval_steps"] = (0.1, "after this share of all steps")
        options["save_steps"] = (0.25, "checkpoints after this share of all steps")
    options["save_total_limit"] = (2, "number of checkpoints to keep")
    options["logging_steps"] = (defaults["logging_steps"], f"{', '.join(method.key_metrics)}, and more")
    options["report_to"] = ("none", "or wandb, trackio or tensorboard")
    options["seed"] = (42, "the same seed repeats the run")
    return options


def field_docs(name: str) -> dict[str, str]:
    """Return {field: first sentence of its help text} for a class and its bases, or {} for a class of another package.

    The texts are parsed from the source, since importing a Config would import torch.

    Args:
        name: Name of a section or a Config.
    """
    package = Path(__file__).parents[1]
    docs = dict[str, str]()
    for file in (*package.glob("methods/*.py"), *package.rglob("config.py"), package / "recipe" / "sections.py"):
        text = file.read_text(encoding="utf-8")
        nodes = ast.parse(text).body if f"class {name}" in text else []
        for definition in (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name):
            for base in definition.bases:
                docs |= field_docs(ast.unparse(base))
            for field in definition.body:
                if isinstance(field, ast.AnnAssign) and (text := _help_text(field.value)):
                    docs[ast.unparse(field.target)] = text
    return docs


def _help_text(value: ast.expr | None) -> str:
    """Return the first sentence of the help text of a field that is defined with `option`, or an empty string."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "option":
        return ""
    arguments = [keyword.value for keyword in value.keywords if keyword.arg == "help"] + value.args[1:2]
    text = str(ast.literal_eval(arguments[0])).replace("None", "null")
    if first_word := re.match(r"[A-Z][a-z]*\b", text):
        text = first_word[0].lower() + text[first_word.end() :]
    return text.partition(". ")[0].removesuffix(".")


def inspect_data(path: str, method: Method, option: str, renamed: Mapping[str, str]) -> InspectedData:
    """Read the first rows of a file or folder. A hub name is not read.

    Args:
        path: File, folder or hub name.
        method: The method that reads the rows.
        option: Option of the command line, for messages.
        renamed: Renamed columns, {canonical name: column of the file}.

    Raises:
        InputError: For a file that does not exist or cannot be read, or that the method cannot train on.
    """
    if problem := source_problem(path):
        raise InputError(f"{option}: {problem}")
    if not expand_home(path).exists():
        return InspectedData(_source(path, renamed), is_plain_text=False, has_answers=True)
    from ..data.formats import canonical_name, detect_format, read_label
    from ..data.prepare import drop_null_fields, null_filled_columns
    from ..data.sources import load
    from .data import MAX_ROWS, RENAME_HINT, describe_file

    stream = load(Source(path, columns=dict(renamed) or None, streaming=True), option)
    filled = null_filled_columns(stream)
    rows = [drop_null_fields(row, filled) for row in itertools.islice(stream, MAX_ROWS)]
    if not rows:
        raise InputError(f"{option}: {path} has no rows")
    lines, code = describe_file(rows, path, [method.name], renamed, None)
    if code == 2:
        problem = "; ".join(line for line in lines if line != RENAME_HINT)
        fix = "To rename columns, use --columns NAME=COLUMN"
        raise InputError(f"{option}: nothing was written. {problem}. {fix}")

    rows = [{canonical_name(column, row): value for column, value in row.items()} for row in rows]
    suggestion = column_inference.suggest_format(rows, [method]) if code else None
    mapping = suggestion.columns if suggestion else {}
    columns = {**renamed, **{name: column for name, column in mapping.items() if name != column}}
    form = suggestion.form if suggestion else detect_format([*rows[0]], method)
    prompts = [rows[0][mapping.get(name, name)] for name in ("prompt", "instruction") if name in form.split(" + ")]
    has_answers = bool(rows[0].get("completion_ids")) if form == "prompt_ids" else form != "prompt"
    if form == "messages" and (turns := rows[0].get(mapping.get("messages", "messages"))):
        has_answers = (turns[-1].get("role") or turns[-1].get("from")) in ("assistant", "gpt")
    with suppress(InputError):  # a column of that name may have another meaning
        has_answers &= all(read_label(row["label"]) for row in rows if row.get("label") is not None)
    return InspectedData(_source(path, columns), any(isinstance(prompt, str) for prompt in prompts), has_answers)


def _source(path: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a source of a recipe, with `columns` only if there are any."""
    return {"path": path} | ({"columns": dict(columns)} if columns else {})


def _has_template(model: str) -> bool:
    """Return whether the folder of a model has a chat template. A model of the hub is assumed to have one."""
    folder = expand_home(model)
    texts = (file.read_text(encoding="utf-8") for file in folder.glob("tokenizer_config.json"))
    return not os.path.isdir(folder) or any(folder.glob("*.jinja")) or any('"chat_template"' in text for text in texts)


def _ask(question: str, default: str, yes: bool) -> str:
    """Ask a question, and return a line of stdin.

    The default is returned for an empty line, at the end of stdin, with --yes, and without a stdin.
    """
    if yes or sys.stdin is None:
        return default
    print(f"{question} [{default}]: ", end="" if sys.stdin.isatty() else "\n", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(f"no answer, since the input has ended: {default}", file=sys.stderr, flush=True)
    return line.strip() or default


def _yaml_lines(tree: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the lines of a recipe, with comments that are truncated after a clause if they are too long."""
    for key, entry in tree.items():
        if isinstance(entry, dict):
            yield f"{'  ' * depth}{key}:\n"
            yield from _yaml_lines(entry, depth + 1)
            continue
        value, comment = entry
        line = f"{'  ' * depth}{key}: {format_yaml(value)}".ljust(37)
        fitting = f".{{1,{max(40, 116 - len(line))}}}"
        ends = ("$", "; ", r"[:,] (?![^{]*\})| \(", " ")  # the whole comment, clauses, words
        clauses = (re.match(f"{fitting}(?={end})", comment) for end in ends)
        if clause := next(filter(None, clauses), None):
            rest = comment[clause.end() :]
            ellipsis = ", ..." if rest.startswith(",") else ""
            if rest.startswith(" ") and not rest.startswith(" ("):
                ellipsis = " ..."
            comment = clause[0] + ellipsis
        yield f"{line}  # {comment}\n"


def format_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    if not isinstance(value, str | dict):
        return json.dumps(value).replace("e-0", "e-")
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.strip().removesuffix("...").strip()
