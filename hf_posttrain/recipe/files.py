"""What the file system shows of a recipe's models, data and folders, before anything slow is imported."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from huggingface_hub import constants as hub
from jinja2 import Environment, TemplateSyntaxError

from ..data.files import or_unreadable, source_problem
from ..errors import nearest_path
from ..models.section import TOKENIZER_FILES, is_local
from ..trainer.method import Problem
from ..trainer.rules import REPORTERS
from ..watch.symptoms import listed
from .sections import Recipe


def inputs(recipe: Recipe) -> Iterator[Problem]:
    """What is missing or broken of that which the recipe reads, as far as it shows without reading all of it."""
    # a name that is no path here may be one of the hub
    for key, section in recipe.models():
        for field, problem_of in (("name_or_path", _model_problem), ("adapter", _adapter_problem)):
            name = getattr(section, field)
            if name is not None and (problem := problem_of(Path(name)) or _missing(name, recipe)):
                yield (f"{key}.{field}",), f"{key}.{field}: {problem}"
    for key, source in recipe.sources():
        if problem := source_problem(source.path):
            yield (f"{key}.path",), f"{key}.path: {problem}"
    if problem := _unwritable(Path(os.environ.get("HF_DATASETS_CACHE") or Path(hub.HF_HOME) / "datasets")):
        yield (), f"the cache of data sets cannot be written: {problem}; HF_DATASETS_CACHE says where it is"


def training(recipe: Recipe) -> Iterator[Problem]:
    """What keeps a run from loading weights, reporting, writing its output_dir and resuming."""
    for name, section in recipe.models():
        key, folder = f"{name}.name_or_path", Path(section.name_or_path)
        if section.from_scratch or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if not any(folder.glob("*.bin")):
            yield (key,), f"{key}: {folder} has no weights (*.safetensors): from_scratch: true begins with random ones"
        elif not section.trust_remote_code:
            why = "which can run code: trust_remote_code: true reads them all the same"
            yield (key,), f"{key}: {folder} has pickled weights alone (*.bin), {why}"
    for name in listed(recipe.train.get("report_to")):
        packages = REPORTERS.get(name, ())
        if packages and not any(map(importlib.util.find_spec, packages)):
            yield ("train.report_to",), f"train.report_to: {name} needs a package: pip install {packages[0]}"
    # the folder to write, and the one to go on from
    output, wanted = recipe.train.get("output_dir"), recipe.train.get("resume_from_checkpoint")
    if not output:
        yield ("train",), "train.output_dir is missing: the folder in which the run leaves everything"
    elif problem := _unwritable(Path(output)):
        yield ("train.output_dir",), f"train.output_dir: {problem}"
    if wanted and wanted != "auto" and (problem := _no_checkpoint(Path(wanted))):
        yield ("train.resume_from_checkpoint",), f"train.resume_from_checkpoint: {problem}"


@or_unreadable
def template_problem(name: str) -> str | None:
    """What is wrong with the file of a chat template: missing, or not the Jinja that transformers renders."""
    path = Path(name)
    if not path.is_file():
        return f"no file {name}{nearest_path(path)}"
    try:
        # {% generation %}, around what assistants wrote, is a tag that only transformers knows
        text = re.sub(r"{%-? *(end)?generation *-?%}", "", path.read_text(encoding="utf-8"))
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except UnicodeDecodeError:
        return f"{name} is not text in UTF-8"
    except TemplateSyntaxError as error:
        return f"{name}, line {error.lineno}: no valid Jinja template: {(error.message or '').rstrip('.')}"
    return None


@or_unreadable
def _model_problem(folder: Path) -> str | None:
    """Why a path that exists holds no model and tokenizer."""
    if not folder.exists():
        return None
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
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return f"folder {folder} has no tokenizer (tokenizer.json and tokenizer_config.json)"
    return None


@or_unreadable
def _adapter_problem(folder: Path) -> str | None:
    found = not folder.exists() or (folder / "adapter_config.json").is_file()
    return None if found else f"{folder} has no adapter_config.json, so it is no PEFT adapter"


def _missing(name: str, recipe: Recipe) -> str | None:
    """Why there is no model of this name; None where it is there, or the hub may have it."""
    path, cached = Path(name), Path(hub.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if path.exists() or (not is_local(name) and (not hub.HF_HUB_OFFLINE or cached.is_dir())):
        return None
    offline = "" if is_local(name) else ", and with HF_HUB_OFFLINE the hub is not asked"
    hint = nearest_path(path)
    # better than a similar name: the recipe in the same folder that would write it
    for sibling in sorted(recipe.path.parent.glob("*.yaml")):
        try:
            written = yaml.safe_load(sibling.read_text(encoding="utf-8"))["train"]["output_dir"]
            if path.is_relative_to(written) and not sibling.samefile(recipe.path):
                hint = f"; {sibling} trains it: run that first"
                break
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):  # another kind of file, or none
            continue
    return f"{name}: no such folder{offline}{hint}"


@or_unreadable
def _unwritable(folder: Path) -> str | None:
    """Why a folder that may not be there yet cannot be written to."""
    folder = folder.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written to"


@or_unreadable
def _no_checkpoint(folder: Path) -> str | None:
    """Why this is no checkpoint to resume."""
    if not folder.is_dir():
        return f"there is no folder {folder}{nearest_path(folder)}"
    return f"{folder} holds checkpoints: name one, or auto" if any(folder.glob("checkpoint-*")) else None
