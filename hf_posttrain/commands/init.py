"""`hf-posttrain init METHOD`: a commented recipe that starts a run, with the keys that people change.

What differs between methods comes from their rows of the table, from the fields of their Configs with the help texts,
and from the shipped recipe of their name, which says where to begin. Torch is imported for a look at a data file alone.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..data import column_inference
from ..data.files import expand_home, source_problem
from ..errors import InputError, printable
from ..methods import METHODS
from ..recipe.cli import Parser, number_type, print_output
from ..recipe.fields import train_fields
from ..recipe.sections import Source
from ..recipe.yaml_tree import read_tree
from ..rounds.config import RoundsSection
from ..trainer.method_spec import Method
from .recipes import find_shipped

# Key -> (value, comment). Those of training are for where the shipped recipe has no value
_LORA = {
    "r": (16, "rank: more for larger data sets"),
    "alpha": (32, "the update is scaled by alpha / r"),
    "dropout": (0.0, "of what it reads"),
    "target_modules": ("all-linear", "every linear layer"),
}
_TRAIN = {
    "num_train_epochs": (1, "how often rows are seen; max_steps: N ends earlier"),
    "per_device_train_batch_size": (4, "rows at once on a GPU: fewer need less memory"),
    "gradient_accumulation_steps": (8, "such batches to a step of the optimizer"),
    "lr_scheduler_type": ("cosine", "how the rate falls: cosine, linear, constant_with_warmup, ..."),
    "warmup_steps": (0.1, "in which the rate rises; below 1: a share of all steps"),
}
_EACH_ROUND = "each: sample answers from the policy of now, judge, pair, train"
_JUDGES = "or {by: model, name: REWARD_MODEL}, {by: function, name: package.module:name}, ..."


def main(argv: Sequence[str] | None = None) -> int:
    """Write the recipe; returns the exit code. Raises InputError for arguments that do not go together, a data file
    that the method cannot train on, and a recipe that is there already.
    """
    parser = Parser("hf-posttrain init", description="Write a commented recipe that starts a run.", allow_abbrev=False)
    parser.add_argument("method", metavar="METHOD", choices=METHODS, help=", ".join(METHODS))
    parser.add_argument("--model", metavar="NAME", help="the model that is trained: a folder or a hub name")
    parser.add_argument("--teacher", metavar="NAME", help="the teacher, of methods with one")
    parser.add_argument("--data", metavar="FILE", help="rows to train on: a file or folder, or a hub name")
    parser.add_argument("--eval", metavar="FILE", help="rows to evaluate on")
    parser.add_argument("--output_dir", metavar="DIR", help="where the run leaves everything (outputs/NAME_OF_RECIPE)")
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of all weights")
    parser.add_argument("--rounds", metavar="N", type=number_type(1), help="N rounds on its own judged answers")
    parser.add_argument("-o", metavar="FILE", dest="file", type=Path, help="the recipe to write (METHOD.yaml)")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the defaults of what is not given")
    given = parser.parse_args(argv)
    method = METHODS[given.method]
    file = given.file or Path(f"{method.name}.yaml")
    if given.teacher and method.second != "teacher":
        parser.error(f"--teacher: {method.name} has no teacher: drop it")
    if given.rounds and (method.rows.sampled or method.second == "teacher"):
        parser.error(f"--rounds: {method.name} learns from its teacher, not from judged answers: drop it")
    if os.path.lexists(file):
        parser.error(f"-o: {file} is there already: name another file, or delete it")
    text = compose(method, given, file)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"-o: {file} cannot be written ({error.strerror})")
    name = shlex.quote(str(file))
    print_output(f"wrote {file}; next:\n  hf-posttrain {name} --check\n  accelerate launch -m hf_posttrain.run {name}")
    return 0


def compose(method: Method, given: argparse.Namespace, file: Path) -> str:
    """The text of the recipe, after the questions that are open. Raises InputError for rows that are of no use."""
    # rounds begin from prompts, as a method does that samples
    reader = next(row for row in METHODS.values() if row.rows.sampled) if given.rounds else method
    files = find_shipped()["recipes"]
    names = f"{method.name}_rounds" if given.rounds else method.name, method.name
    shipped = next((name for name in names if name in files), None)
    own, of_rows = (read_tree(files[name])[0] if name in files else {} for name in (shipped, reader.name))
    also = {"model": "; as it begins it is the reference too" if method.second == "reference" else ""}
    also |= {"teacher": "; its tokens are those of the model above"} if method.second == "teacher" else {}
    usual = {name: own.get(name, {}).get("name_or_path", f"ORG/{name.upper()}") for name in also}
    models = {name: getattr(given, name) or _answer(name, usual[name], given.yes) for name in also}
    sources, as_text, answered = _choose_rows(reader, of_rows, given)
    options = {"apply_chat_template": True} if as_text and _has_template(models["model"]) else {}
    if models["model"] == usual["model"]:
        options |= {name: value for name, value in own.get("train", {}).items() if name == "chat_template_kwargs"}
    of_source = field_docs("Source")
    of_model = field_docs("ModelSection")["name_or_path"]
    tree: dict[str, Any] = {"method": (method.name, method.title)}
    tree |= {name: {"name_or_path": (value, of_model + also[name])} for name, value in models.items()}
    tree["model"] |= {"lora": _LORA} if given.lora else {}
    tree["data"] = {
        name: {key: (value, of_source[key]) for key, value in each.items()} for name, each in sources.items()
    }
    tree["train"] = {"output_dir": (given.output_dir or f"outputs/{file.stem}", "model, metrics, checkpoints")}
    tree["train"] |= _training(method, own.get("train", {}), options, given, "eval" in sources)
    if given.rounds:
        tree["rounds"] = _rounds(given.rounds, own.get("rounds", {}), answered)
    formats = " | ".join(form for form in reader.rows.formats if "_ids" not in form)
    run = f"For {method.title} of {models['model']}: accelerate launch -m hf_posttrain.run {file}"
    head = (printable(line) for line in (run, *textwrap.wrap(f"Columns of rows: {formats}", 116)))
    return "".join([*(f"# {line}\n" for line in head), *_written(tree)])


def _rounds(count: int, shipped: dict, answered: bool) -> dict[str, tuple[Any, str]]:
    """{option: (value, comment)} of the section `rounds`. shipped: that of the shipped recipe."""
    docs = field_docs("RoundsSection")
    usual = vars(RoundsSection()) | shipped
    judge = "exact_match" if answered else {"by": "model", "name": "ORG/REWARD_MODEL"}
    names = ["num_generations", "temperature", "max_completion_length", *({"reference"} & shipped.keys())]
    found: dict[str, Any] = {"count": (count, _EACH_ROUND)} | {name: (usual[name], docs[name]) for name in names}
    return found | {"judge": (judge, _JUDGES if answered else f"the data have no right answers; {_JUDGES}")}


def _choose_rows(reader: Method, shipped: dict, given: argparse.Namespace) -> tuple[dict[str, dict], bool, bool]:
    """({train and, where there is one, eval: source}, are the prompts plain text, have they answers?): of what is
    given, or of `shipped`, the shipped recipe of the method that reads them.
    """
    rows = shipped.get("data", {"train": {"path": "ROWS.jsonl"}})
    path = given.data or _answer("data", rows["train"]["path"], given.yes)
    if path == rows["train"]["path"]:
        sources = dict(rows)
        as_text = shipped.get("train", {}).get("apply_chat_template", False)
        answered = True
    else:
        source, as_text, answered = inspect_data(path, reader, "--data")
        sources = {"train": source}
    if given.eval:
        sources["eval"], *_ = inspect_data(given.eval, reader, "--eval")
    return sources, as_text, answered


def _training(
    method: Method, shipped: dict, options: dict, given: argparse.Namespace, evaluates: bool
) -> dict[str, tuple[Any, str]]:
    """{option: (value, comment)} of the section `train`. shipped: that of the shipped recipe. options: of templates."""
    lora = given.lora
    common = field_docs("PostTrainConfig")
    docs = field_docs(method.config_name)
    defaults = {name: field.default for name, field in train_fields(method.name).items()}
    found = {name: (value, common[name]) for name, value in options.items()}
    # of the method's own options those that its shipped recipe sets; without one, those with a limit and a value
    asked = shipped or {name for name in ("loss_type", *method.limits) if defaults.get(name) is not None}
    left_out = {*common, "learning_rate", *(["precompute_ref_log_probs"] if given.rounds else [])}
    for name in (name for name in docs if name in asked and name not in left_out):
        comment = re.sub("the names in `.*`", ", ".join(method.loss_papers), docs[name])
        found[name] = shipped.get(name, defaults[name]), comment
    found |= {name: (shipped.get(name, value), comment) for name, (value, comment) in _TRAIN.items()}
    rate = defaults["learning_rate"]
    of_adapter = "; an adapter takes ten times that of all weights"
    found["learning_rate"] = float(f"{rate * 10**lora:g}"), docs["learning_rate"] + of_adapter * lora
    found["max_length"] = shipped.get("max_length", defaults["max_length"]), common["max_length"]
    if given.rounds:
        found["per_device_train_batch_size"] = found["per_device_train_batch_size"][0], "prompts, whose rows go at once"
        when: dict[str, Any] = {"eval_strategy": ("epoch", "after each pass over a round's rows")}
        again = "a run that is killed goes on with resume_from_checkpoint=auto"
        saved: dict[str, Any] = {"save_strategy": ("epoch", again)}
    else:
        when = {"eval_strategy": ("steps", "while training,"), "eval_steps": (0.1, "after this share of all steps")}
        saved = {"save_steps": (0.25, "checkpoints after this share of all steps")}
    found |= (when if evaluates else {}) | saved | {"save_total_limit": (2, "the newest")}
    found["logging_steps"] = defaults["logging_steps"], f"{', '.join(method.key_metrics)}, and more"
    return found | {"report_to": ("none", "or wandb, or tensorboard"), "seed": (42, "the same seed repeats the run")}


def field_docs(name: str) -> dict[str, str]:
    """Return {field: first sentence of its help text} of a section or a Config and its bases, {} for a class of others.

    The texts come from the source, since an import takes torch.
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
    """Return the first sentence of the help text of a field, which is a call of `option`, or an empty text."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "option":
        return ""
    given = [keyword.value for keyword in value.keywords if keyword.arg == "help"] + value.args[1:2]
    text = str(ast.literal_eval(given[0])).replace("None", "null")
    text = re.sub(r"^[A-Z](?=[a-z]*\b)", lambda found: found[0].lower(), text)
    return text.partition(". ")[0].removesuffix(".")


def inspect_data(path: str, method: Method, option: str) -> tuple[dict[str, Any], bool, bool]:
    """(source, are its prompts plain text, have they answers?): a file or folder with the `columns` that it needs, or a
    hub name. Raises InputError for a file that is missing, cannot be read, or that the method cannot train on.
    """
    if problem := source_problem(path):
        raise InputError(f"{option}: {problem}")
    if not expand_home(path).exists():
        return {"path": path}, False, True
    from ..data.formats import detect_format, canonical_name, read_label
    from ..data.prepare import filled_by_arrow, without_filled
    from ..data.sources import load
    from .data import MAX_ROWS, describe_file

    stream = load(Source(path, streaming=True), option)
    filled = filled_by_arrow(stream)
    rows = [without_filled(row, filled) for row in itertools.islice(stream, MAX_ROWS)]
    if not rows:
        raise InputError(f"{option}: {path} has no rows")
    lines, code = describe_file(rows, path, [method.name], {}, None, {"image_ids": (), "image_folder": None})
    if code == 2:
        raise InputError(f"{option}: nothing was written: {'; '.join(lines)}")
    rows = [{canonical_name(column, row): value for column, value in row.items()} for row in rows]
    nearest = column_inference.suggest_format(rows, [method]) if code else None
    columns = {ours: theirs for ours, theirs in nearest.columns.items() if ours != theirs} if nearest else {}
    form = nearest.form if nearest else detect_format([*rows[0]], method)
    asked = [rows[0][columns.get(name, name)] for name in ("prompt", "instruction") if name in form.split(" + ")]
    answered = bool(rows[0].get("completion_ids")) if form == "prompt_ids" else form != "prompt"
    if form == "messages" and (turns := rows[0].get(columns.get("messages", "messages"))):
        answered = (turns[-1].get("role") or turns[-1].get("from")) in ("assistant", "gpt")
    with suppress(InputError):  # a column of that name may be another thing
        answered &= all(read_label(row["label"]) for row in rows if row.get("label") is not None)
    as_text = any(isinstance(each, str) for each in asked)
    return {"path": path} | ({"columns": columns} if columns else {}), as_text, answered


def _has_template(model: str) -> bool:
    """Has a model a chat template, as far as its folder shows? One of the hub is taken to have one."""
    folder = expand_home(model)
    texts = (file.read_text(encoding="utf-8") for file in folder.glob("tokenizer_config.json"))
    return not os.path.isdir(folder) or any(folder.glob("*.jinja")) or any('"chat_template"' in text for text in texts)


def _answer(question: str, default: str, yes: bool) -> str:
    """A line of stdin, or the default: for an empty line, at the end of stdin, and where nothing is to be asked."""
    if yes or sys.stdin is None:
        return default
    print(f"{question} [{default}]: ", end="" if sys.stdin.isatty() else "\n", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def _written(tree: dict[str, Any], depth: int = 0) -> Iterator[str]:
    """The lines of sections. A comment that is too long ends where a clause of it does."""
    for key, given in tree.items():
        if isinstance(given, dict):
            yield f"{'  ' * depth}{key}:\n"
            yield from _written(given, depth + 1)
            continue
        line = f"{'  ' * depth}{key}: {format_yaml(given[0])}".ljust(37)
        comment = given[1]
        fitting = f".{{1,{max(40, 116 - len(line))}}}"
        ends = (re.match(f"{fitting}(?={end})", comment) for end in ("$", "; ", r"[:,] (?![^{]*\})| \("))
        cut = next(filter(None, ends), None)
        yield f"{line}  # {cut[0] + ', ...' * comment[cut.end() :].startswith(',') if cut else comment}\n"


def format_yaml(value: object) -> str:
    """A value on one line."""
    if not isinstance(value, str | dict):
        return json.dumps(value).replace("e-0", "e-")
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.strip().removesuffix("...").strip()
