"""What a recipe may not say, beyond names and types of keys. Rules yield (dotted keys, sentence), without torch."""

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from huggingface_hub import constants as hub
from jinja2 import TemplateSyntaxError

from ..capabilities import Feature, conflict, conflicts, option_features
from ..data.column_inference import misspelling_problem
from ..data.files import expand_home, report_unreadable, source_problem
from ..data.template import parsed
from ..errors import path_hint
from ..methods import METHODS
from ..methods.rules import REFERENCE_FREE_LOSSES, teacher_problems, teacher_section_problems
from ..models.config import has_tokenizer, is_local
from ..monitoring.symptoms import listed
from ..rounds.config import RoundsSection, rounds_features, rounds_problems
from ..rounds.judges.config import MODEL_JUDGES
from ..teachers.options import TEACHER
from ..trainer.limits import BELOW_ONE, COUNT, Limit, Problem
from ..trainer.option_group import with_groups
from ..trainer.rules import REPORTERS, beyond, group_problems, merge_problem, one_of, problems
from .sections import Recipe

_LORA_LIMITS = {"r": COUNT, "alpha": COUNT, "dropout": BELOW_ONE}
_SOURCE_LIMITS = {
    "limit": Limit(COUNT.holds, "must be at least 1 (or null for all rows)"),
    "weight": Limit(lambda n: 0 < n <= 1000, "must be positive, and at most 1000"),
}
_EXCLUDE_EACH_OTHER = (  # keys of a model section, and why
    ("quantization", "from_scratch", "no weights to load"),
    ("adapter", "from_scratch", "it belongs to saved weights"),
    (
        "lora",
        "from_scratch",
        "an adapter is saved without its random base; drop {key}.lora, or save the random model first",
    ),
    ("adapter", "lora", "continue an adapter or begin a new one"),
)
ATTENTION = "auto", "eager", "sdpa", "flex_attention", *(f"flash_attention_{version}" for version in (2, 3, 4))
"""What transformers knows by itself; a kernel of the hub is owner/name, and a model's own code may bring others."""
_WANTS_EVAL = {  # values of the train section that ask for rows to evaluate on
    "load_best_model_at_end": (True,),
    "eval_strategy": ("steps", "epoch"),
    "eval_on_start": (True,),
    "eval_exact_match": (True,),
}


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """What makes no sense in the model, teacher and data sections."""
    # the teacher: methods either need one or cannot use it
    method = recipe.method
    users = [name for name, row in METHODS.items() if row.second == "teacher"]
    if method in users and not (recipe.teacher or recipe.teachers):
        yield ("method",), f"method {method} needs a teacher section (teacher.name_or_path: ...)"
    for name in ("teacher", "teachers"):
        if method not in users and getattr(recipe, name):
            problem = f"method {method} uses no teacher; that section belongs to {' and '.join(users)}"
            yield (name, "method"), problem
    if recipe.teacher and recipe.teachers is not None:
        yield ("teachers", "teacher"), "teacher and teachers exclude each other: one, or several by name"
    if recipe.teachers == {}:
        yield ("teachers",), "teachers is empty: name one at least, {NAME: {name_or_path: ...}}"
    for key, taught in recipe.teacher_sections():
        yield from teacher_section_problems(key, taught)
    for key, section in (("model", recipe.model), *recipe.teacher_sections()):
        if not section.name_or_path.strip() and not getattr(section, "self", None):
            yield (f"{key}.name_or_path",), f"{key}.name_or_path is empty"
        given = {name for name, value in vars(section).items() if value not in (None, False, "none", "")}
        for one, other, why in _EXCLUDE_EACH_OTHER:
            if {one, other} <= given:
                keys = f"{key}.{one}", f"{key}.{other}"
                yield keys, f"{keys[0]} and {keys[1]} exclude each other: {why.format(key=key)}"
        if key == "model" and "quantization" in given and not given & {"adapter", "lora"}:
            problem = "model.quantization needs model.lora or model.adapter: all weights cannot be trained"
            yield ("model.quantization",), problem
        # kernels of the hub, and what a model's own code brings, cannot be known here
        if not section.trust_remote_code and not re.search("[/|]", section.attn_implementation):
            yield from one_of(f"{key}.attn_implementation", section.attn_implementation, ATTENTION)
        if section.chat_template and (wrong := template_problem(section.chat_template)):
            yield (f"{key}.chat_template",), f"{key}.chat_template: {wrong}"
        if section.lora is not None:
            yield from _below(f"{key}.lora", beyond(_LORA_LIMITS, SimpleNamespace(**section.lora)))
            if section.lora.get("target_modules") in ("", []):
                yield (f"{key}.lora.target_modules",), f"{key}.lora.target_modules must not be empty"
    if recipe.rounds:
        yield from _of_rounds(recipe)
    # what only one of the two models can have
    if recipe.model.offload:
        problem = "model.offload is for a teacher; for a policy use accelerate_configs/zero3_offload.yaml"
        yield ("model.offload",), problem
    for name, taught in recipe.teacher_sections():
        for key, why in (
            ("lora", "the teacher is not trained (teacher.adapter loads one)"),
            ("chat_template", "it scores the ids of the student (model.chat_template)"),
        ):
            if getattr(taught, key) is not None:
                yield (f"{name}.{key}",), f"{name}.{key} makes no sense: {why}"
    for name, sources in recipe.data.splits():
        if sources == []:
            yield (f"data.{name}",), f"data.{name} is an empty list of sources: name one at least"
    for key, source in recipe.sources():
        if not source.path.strip():
            yield (f"{key}.path",), f"{key}.path is empty"
        yield from _below(key, beyond(_SOURCE_LIMITS, source))
        if wrong := misspelling_problem(
            name for name in source.columns or () if name != recipe.train.get("dataset_text_field")
        ):
            yield (f"{key}.columns",), f"{key}.columns: {wrong}"


def train_section_problems(recipe: Recipe, values: Any) -> Iterator[Problem]:
    """Yield what makes no sense in the train section, read into `values`. HF's Trainer would find some of it later."""
    method = METHODS[recipe.method]
    wrong = [*_below("train", group_problems(values, method))]
    yield from wrong
    if wrong:
        return
    values = with_groups(values, method.groups)
    for name, wanting in _WANTS_EVAL.items():
        if (value := getattr(values, name)) in wanting and recipe.data.eval is None:
            shown = "true" if value is True else getattr(value, "value", value)
            yield (f"train.{name}",), f"train.{name}: {shown} needs data.eval, the rows to evaluate on"
    if recipe.train.get("eval_steps") is not None and "eval_strategy" not in recipe.train:
        yield ("train.eval_steps",), "train.eval_steps needs eval_strategy: steps, which is no where it is not given"
    # the trainer says the next two as well, but only when the weights are loaded
    quantised = recipe.model.quantization != "none"
    has_adapter = recipe.model.lora is not None or bool(recipe.model.adapter)
    if values.merge_lora and (problem := merge_problem(has_adapter, quantised)):
        keys = ("train.merge_lora", "model.quantization") if has_adapter else ("train.merge_lora",)
        yield keys, f"train.{problem}"
    yield from conflicts(recipe_features(recipe, values))
    for key, section in recipe.teacher_sections() if recipe.model.images else ():
        if not (section.images or section.url or section.self):
            problem = f"{key}.images must be true, since the student reads images"
            yield (f"{key}.images", "model.images"), problem
    if recipe.rounds:
        yield from _of_training_in_rounds(recipe.rounds, values)
    for name, source in recipe.sources():
        if name.startswith("data.train") and source.streaming and values.max_steps <= 0:
            problem = "true needs train.max_steps, since the length of a stream is not known"
            yield (f"{name}.streaming",), f"{name}.streaming: {problem}"
    # scripts of HF's read these, its Trainer does not
    for name, done in (("do_train", True), ("do_eval", values.eval_strategy != "no"), ("do_predict", False)):
        if recipe.train.get(name, done) is not done:
            problem = "a run trains, and evaluates as eval_strategy says, whatever this says"
            yield (f"train.{name}",), f"train.{name}: {problem}: leave it out"
    given = TEACHER.as_mapping(recipe.train.get("teacher")) or {}
    for name in ("prompt", "tokenizer", "names"):
        if given.get(name) is not None:
            problem = "a recipe has prompt and own_tokenizer in the section teacher, and names in teachers"
            yield (f"train.teacher.{name}", "train.teacher"), f"train.teacher.{name}: {problem}"
    for key, section in recipe.teacher_sections():
        for names, problem in teacher_problems(values, section):
            yield (key, *(f"train.{name}" for name in names)), f"{key}: {problem}"
    yield from _below("train", problems(values, method))


def input_problems(recipe: Recipe) -> Iterator[Problem]:
    """What is missing or broken of that which the recipe reads, as far as it shows without reading all of it."""
    # a name that is no path here may be one of the hub
    for key, section in recipe.models():
        for field, problem_of in (("name_or_path", _model_problem), ("adapter", _adapter_problem)):
            name = getattr(section, field)
            if name is not None and (problem := problem_of(Path(name)) or _missing(name, recipe)):
                yield (f"{key}.{field}",), f"{key}.{field}: {problem}"
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        name = str(recipe.rounds.judge.name)
        if problem := _model_problem(Path(name)) or _missing(name, recipe):
            yield ("rounds.judge.name",), f"rounds.judge.name: {problem}"
    for key, source in recipe.sources():
        if problem := source_problem(source.path):
            yield (f"{key}.path",), f"{key}.path: {problem}"
    if problem := _unwritable(Path(os.environ.get("HF_DATASETS_CACHE") or Path(hub.HF_HOME) / "datasets")):
        yield (), f"the cache of data sets cannot be written: {problem}; HF_DATASETS_CACHE says where it is"


def run_problems(recipe: Recipe) -> Iterator[Problem]:
    """What keeps a run from loading weights, reporting, writing its output_dir and resuming."""
    for name, section in recipe.models():
        key = f"{name}.name_or_path"
        folder = Path(section.name_or_path)
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
    output = recipe.train.get("output_dir")
    wanted = recipe.train.get("resume_from_checkpoint")
    if not output:
        yield ("train",), "train.output_dir is missing: the folder in which the run leaves everything"
    elif problem := _unwritable(Path(output)):
        yield ("train.output_dir",), f"train.output_dir: {problem}"
    if wanted is True and not any(Path(output or "").glob("checkpoint-*")):
        problem = f"true, and no checkpoint is in {output}: auto begins anew where there is none"
        yield ("train.resume_from_checkpoint",), f"train.resume_from_checkpoint: {problem}"
    if isinstance(wanted, str) and wanted != "auto" and (problem := _no_checkpoint(Path(wanted))):
        yield ("train.resume_from_checkpoint",), f"train.resume_from_checkpoint: {problem}"


def _of_rounds(recipe: Recipe) -> Iterator[Problem]:
    """What makes no sense in the section of rounds, or for its method."""
    method = METHODS[recipe.method]
    rounds = recipe.rounds
    if method.second == "teacher":
        yield ("rounds", "method"), conflict(Feature.ROUNDS, Feature.TEACHER)
    yield from _below("rounds", rounds_problems(rounds, method.rows))  # type: ignore[arg-type]


def _of_training_in_rounds(rounds: RoundsSection, values: Any) -> Iterator[Problem]:
    losses = {*listed(getattr(values, "loss_type", None) or "none")}
    if rounds.reference == "round" and losses <= REFERENCE_FREE_LOSSES:
        problem = f"round is of losses with a reference, and {', '.join(losses)} has none: drop it"
        yield ("rounds.reference", "train.loss_type"), f"rounds.reference: {problem}"
    longest = rounds.max_completion_length
    if values.max_length is not None and values.max_length <= longest:
        problem = f"{values.max_length} leaves no prompt next to rounds.max_completion_length: {longest}"
        yield ("train.max_length", "rounds.max_completion_length"), f"train.max_length: {problem}"


def recipe_features(recipe: Recipe, values: Any) -> dict[Feature, str]:
    """Return the features of a recipe, each with its key. values: of the train section, with groups built."""
    features = {feature: f"train.{option}" for feature, option in option_features(values).items()}
    if recipe.rounds:
        features |= rounds_features(recipe.rounds)
    if recipe.model.images:
        features[Feature.IMAGES] = "model.images"
    if recipe.model.quantization != "none":
        features[Feature.QUANTIZED] = "model.quantization"
    for key, section in recipe.teacher_sections():
        if section.url:
            features[Feature.SERVED] = f"{key}.url"
        if section.self == "ema":
            features[Feature.MOVING_AVERAGE] = f"{key}.self"
    for key, source in recipe.sources():
        if source.streaming and (recipe.rounds or key.startswith("data.train")):
            features[Feature.STREAM] = f"{key}.streaming"
    return features


def _below(section: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Problems of the fields of an object, which is the `section` of a recipe, as problems of the recipe's keys."""
    for names, said in problems:
        yield tuple(f"{section}.{name}" for name in names), f"{section}.{said}" if said.startswith(names) else said


@report_unreadable
def template_problem(name: str) -> str | None:
    """What is wrong with the file of a chat template: missing, or not the Jinja that transformers renders."""
    path = Path(name)
    if not path.is_file():
        return f"no file {name}{path_hint(path)}"
    try:
        parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return f"{name} is not text in UTF-8"
    except TemplateSyntaxError as error:
        return f"{name}, line {error.lineno}: no valid Jinja template: {(error.message or '').rstrip('.')}"
    return None


@report_unreadable
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
    if not has_tokenizer(folder):
        return f"folder {folder} has no tokenizer (tokenizer.json and tokenizer_config.json)"
    return None


@report_unreadable
def _adapter_problem(folder: Path) -> str | None:
    found = not folder.exists() or (folder / "adapter_config.json").is_file()
    return None if found else f"{folder} has no adapter_config.json, so it is no PEFT adapter"


def _missing(name: str, recipe: Recipe) -> str | None:
    """Why there is no model of this name; None where it is there, or the hub may have it."""
    path = Path(name)
    cached = Path(hub.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if path.exists() or (not is_local(name) and (not hub.HF_HUB_OFFLINE or cached.is_dir())):
        return None
    offline = "" if is_local(name) else ", and with HF_HUB_OFFLINE the hub is not asked"
    hint = path_hint(path)
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


@report_unreadable
def _unwritable(folder: Path) -> str | None:
    """Why a folder that may not be there yet cannot be written to."""
    folder = expand_home(folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written to"


@report_unreadable
def _no_checkpoint(folder: Path) -> str | None:
    """Why this is no checkpoint to resume."""
    if not folder.is_dir():
        return f"there is no folder {folder}{path_hint(folder)}"
    return f"{folder} holds checkpoints: name one, or auto" if any(folder.glob("checkpoint-*")) else None
