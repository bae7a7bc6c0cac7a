"""What the file system shows of a recipe's models, data and folders: told before anything slow is imported.

    inputs          models, tokenizers, adapters and data files, as problems (dotted keys, sentence)
    training        what only a run needs: weights, packages, output_dir, the checkpoint to resume
    template_problem    a chat template's file

A name that the hub may have is left to the hub, unless HF_HUB_OFFLINE is set and its cache has none of that name.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from huggingface_hub import constants as hub
from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ..data.files import or_unreadable, source_problem
from ..errors import nearest_path
from ..models.section import TOKENIZER_FILES, ModelSection, is_local
from ..trainer.method import Problem
from ..trainer.rules import REPORTERS
from ..watch.symptoms import listed
from .sections import Recipe


def inputs(recipe: Recipe) -> Iterator[Problem]:
    """What is missing or broken of that which the recipe reads, as far as it shows without reading all of it."""
    for key, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        if section:
            yield from _model(recipe, key, section)
    for key, source in recipe.sources():
        if problem := source_problem(source.path):
            yield (f"{key}.path",), f"{key}.path: {problem}"
    if problem := _unwritable(Path(os.environ.get("HF_DATASETS_CACHE") or Path(hub.HF_HOME) / "datasets")):
        yield (), f"the cache of data sets cannot be written: {problem}; HF_DATASETS_CACHE says where it is"


def training(recipe: Recipe) -> Iterator[Problem]:
    """What keeps a run from loading weights, reporting, writing its output_dir and resuming."""
    for key, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        if section and not section.from_scratch and (problem := _lacks_weights(section)):
            yield (f"{key}.name_or_path",), f"{key}.name_or_path: {section.name_or_path} {problem}"
    for name in listed(recipe.train.get("report_to")):
        packages = REPORTERS.get(name, ())
        if packages and not any(map(importlib.util.find_spec, packages)):
            yield ("train.report_to",), f"train.report_to: {name} needs a package: pip install {packages[0]}"
    yield from _folders(recipe)


def _folders(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.train.get("output_dir"):
        yield ("train",), "train.output_dir is missing: the folder in which the run leaves everything"
    elif problem := _unwritable(Path(recipe.train["output_dir"])):
        yield ("train.output_dir",), f"train.output_dir: {problem}"
    wanted, key = recipe.train.get("resume_from_checkpoint"), "train.resume_from_checkpoint"
    if wanted and wanted != "auto" and (problem := _no_checkpoint(Path(wanted))):
        yield (key,), f"{key}: {problem}"


@or_unreadable
def _no_checkpoint(folder: Path) -> str | None:
    """Why this is no checkpoint to resume."""
    if not folder.is_dir():
        return f"there is no folder {folder}{nearest_path(folder)}"
    return f"{folder} holds checkpoints: name one, or auto" if any(folder.glob("checkpoint-*")) else None


@or_unreadable
def _unwritable(folder: Path) -> str | None:
    """Why a folder that may not be there yet cannot be written to."""
    folder = folder.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written to"


@or_unreadable
def template_problem(name: str) -> str | None:
    """What is wrong with the file of a chat template: missing, or not the Jinja that transformers renders."""
    path = Path(name)
    if not path.is_file():
        return f"no file {name}{nearest_path(path)}"
    try:
        Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"]).parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return f"{name} is not text in UTF-8"
    except TemplateSyntaxError as error:
        return f"{name}, line {error.lineno}: no valid Jinja template: {(error.message or '').rstrip('.')}"
    return None


class _Generation(Extension):
    """Lets `{% generation %}` ... `{% endgeneration %}` stand, the tag of transformers around what assistants wrote."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _model(recipe: Recipe, key: str, section: ModelSection) -> Iterator[Problem]:
    named = [("name_or_path", section.name_or_path, _model_problem), ("adapter", section.adapter, _adapter_problem)]
    for field, name, problem_of in named:
        if name is not None and (problem := _named_problem(recipe, name, problem_of)):
            yield (f"{key}.{field}",), f"{key}.{field}: {problem}"


def _named_problem(recipe: Recipe, name: str, problem_of: Callable[[Path], str | None]) -> str | None:
    """Why there is nothing of this name, or what `problem_of` says of the folder."""

    @or_unreadable
    def problem(name: str) -> str | None:
        return problem_of(Path(name)) if Path(name).exists() else _missing(recipe, name)

    return problem(name)


def _adapter_problem(folder: Path) -> str | None:
    if (folder / "adapter_config.json").is_file():
        return None
    return f"{folder} has no adapter_config.json, so it is no PEFT adapter"


def _model_problem(folder: Path) -> str | None:
    """Why a path that exists holds no model and tokenizer."""
    if not folder.is_dir():
        return f"{folder} is a file: give the folder of a model, or a hub name"
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return f"{folder} is an adapter: name its base model here, and the adapter in `adapter`"
        return f"folder {folder} has no config.json, so it is no model"
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{folder}/config.json is not valid JSON ({error})"
    if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
        return f"folder {folder} has no tokenizer (tokenizer.json and tokenizer_config.json)"
    return None


def _missing(recipe: Recipe, name: str) -> str | None:
    """Why there is no model of this name; None where the hub may have it."""
    cached = Path(hub.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if not is_local(name) and (not hub.HF_HUB_OFFLINE or cached.is_dir()):
        return None
    hint = _trained_by(recipe, name) or nearest_path(Path(name))
    offline = "" if is_local(name) else ", and with HF_HUB_OFFLINE the hub is not asked"
    return f"{name}: no such folder{offline}{hint}"


def _trained_by(recipe: Recipe, name: str) -> str:
    """The end of a message about a missing path: the recipe beside this one that would write it."""
    for sibling in sorted(recipe.path.parent.glob("*.yaml")):
        try:
            tree = yaml.safe_load(sibling.read_text(encoding="utf-8"))
            written = Path(tree["train"]["output_dir"])
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):  # another kind of file, or none
            continue
        if Path(name).is_relative_to(written) and not sibling.samefile(recipe.path):
            return f"; {sibling} trains it: run that first"
    return ""


def _lacks_weights(section: ModelSection) -> str | None:
    folder = Path(section.name_or_path)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    if not any(folder.glob("*.bin")):
        return "has no weights (*.safetensors): from_scratch: true begins with random ones"
    if section.trust_remote_code:
        return None
    return "has pickled weights alone (*.bin), which can run code: trust_remote_code: true reads them all the same"
