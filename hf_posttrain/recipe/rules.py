"""Rules of a recipe beyond names and types of keys. They yield (dotted keys, message), and do not import torch."""

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import yaml
from huggingface_hub import constants as hub

from ..capabilities import Feature, conflict_message, conflicts, option_features
from ..data.column_inference import misspelling_problem
from ..data.files import expand_home, report_unreadable, source_problem
from ..data.template import template_problem
from ..errors import path_hint
from ..methods import METHODS
from ..methods.rules import REFERENCE_FREE_LOSSES, no_reference, teacher_problems, teacher_section_problems
from ..models.config import OFFLINE_FIX, has_tokenizer, is_local, unreadable_weights
from ..monitoring.symptoms import as_list
from ..options import OptionValues
from ..rounds.config import RoundsSection, rounds_features, rounds_problems
from ..rounds.judges.config import MODEL_JUDGES
from ..teachers.options import TEACHER
from ..trainer.limits import COUNT, FRACTION_BELOW_ONE, Limit, Problem
from ..trainer.option_group import build_groups
from ..trainer.rules import REPORTER_PACKAGES, choice_problems, group_problems, limit_problems, merge_problem, problems
from .sections import Recipe

_LORA_LIMITS = {"r": COUNT, "alpha": COUNT, "dropout": FRACTION_BELOW_ONE}
_SOURCE_LIMITS = {
    "limit": Limit("must be at least 1 (or null for all rows)", at_least=1),
    "weight": Limit("must be positive, and at most 1000", above=0, at_most=1000),
}
_EXCLUSIVE_KEYS = (  # two keys of a model section that cannot be combined, and the reason with the fix
    ("quantization", "from_scratch", "there are no saved weights to quantize. Remove one of them"),
    ("adapter", "from_scratch", "an adapter belongs to saved weights. Remove one of them"),
    (
        "lora",
        "from_scratch",
        "an adapter is saved without its random base. Remove {key}.lora, or save the random model first",
    ),
    ("adapter", "lora", "an adapter is either continued or new. Remove one of them"),
)
ATTENTION = "auto", "eager", "sdpa", "flex_attention", *(f"flash_attention_{version}" for version in (2, 3, 4))
"""Implementations of transformers. Kernels of the hub are named owner/name, and code of a model may define others."""
_REQUIRES_EVAL = {  # values of the train section that require rows to evaluate on
    "load_best_model_at_end": (True,),
    "eval_strategy": ("steps", "epoch"),
    "eval_on_start": (True,),
    "eval_exact_match": (True,),
}


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the model, teacher and data sections."""
    problem: str | None
    # the teacher, which a method either requires or does not support
    method = recipe.method
    users = [name for name, row in METHODS.items() if row.second == "teacher"]
    is_recorded = (TEACHER.as_mapping(recipe.train.get("teacher")) or {}).get("logprobs_column") is not None
    if method in users and not (recipe.teacher or recipe.teachers or is_recorded):
        yield ("method",), f"method {method} requires a teacher. Add the section teacher: {{name_or_path: ...}}"
    for name in ("teacher", "teachers"):
        if method not in users and getattr(recipe, name):
            problem = f"{name} is only valid with method {' or '.join(users)}, not {method}. Remove the section"
            yield (name, "method"), problem
    if recipe.teacher and recipe.teachers is not None:
        problem = "teacher cannot be combined with teachers. Use teacher for one, and teachers for several by name"
        yield ("teachers", "teacher"), problem
    if recipe.teachers == {}:
        yield ("teachers",), "teachers must not be empty. Add {NAME: {name_or_path: ...}}"
    for key, teacher in recipe.teacher_sections():
        if is_recorded:
            yield ("train.teacher.logprobs_column", key), conflict_message(Feature.RECORDED, Feature.TEACHER_MODEL)
        yield from teacher_section_problems(key, teacher)

    # keys of models
    for key, section in (("model", recipe.model), *recipe.teacher_sections()):
        if not section.name_or_path.strip() and not getattr(section, "self", None):
            yield (f"{key}.name_or_path",), f"{key}.name_or_path must not be empty"
        keys_set = {name for name, value in vars(section).items() if value not in (None, False, "none", "")}
        for name, other_name, reason in _EXCLUSIVE_KEYS:
            if {name, other_name} <= keys_set:
                keys = (f"{key}.{name}", f"{key}.{other_name}")
                yield keys, f"{keys[0]} cannot be combined with {keys[1]}: {reason.format(key=key)}"
        if key == "model" and "quantization" in keys_set and not keys_set & {"adapter", "lora"}:
            problem = "model.quantization requires an adapter, since quantized weights cannot be trained"
            yield ("model.quantization",), f"{problem}. Set model.lora or model.adapter"
        # kernels of the hub, and implementations of a model's own code, are not known here
        if not section.trust_remote_code and not re.search("[/|]", section.attn_implementation):
            yield from choice_problems(f"{key}.attn_implementation", section.attn_implementation, ATTENTION)
        if section.chat_template and (problem := template_problem(section.chat_template)):
            yield (f"{key}.chat_template",), f"{key}.chat_template: {problem}"
        if section.lora is not None:
            yield from _prefix_keys(f"{key}.lora", limit_problems(_LORA_LIMITS, SimpleNamespace(**section.lora)))
            if section.lora.get("target_modules") in ("", []):
                yield (f"{key}.lora.target_modules",), f"{key}.lora.target_modules must not be empty"
    if recipe.rounds:
        yield from _rounds_section_problems(recipe)

    # keys that only a teacher or only a policy may have
    if recipe.model.offload:
        problem = "model.offload is only valid for a teacher. For a policy, use accelerate_configs/zero3_offload.yaml"
        yield ("model.offload",), problem
    for name, teacher in recipe.teacher_sections():
        for key, reason in (
            ("lora", "a teacher is not trained. To load a saved adapter, use teacher.adapter"),
            ("chat_template", "a teacher scores the token ids of the student. Use model.chat_template"),
        ):
            if getattr(teacher, key) is not None:
                yield (f"{name}.{key}",), f"{name}.{key} is not supported: {reason}"

    # sources of rows
    for name, sources in recipe.data.splits():
        if sources == []:
            yield (f"data.{name}",), f"data.{name} must not be an empty list. Add a source"
    for key, source in recipe.sources():
        if not source.path.strip():
            yield (f"{key}.path",), f"{key}.path must not be empty"
        yield from _prefix_keys(key, limit_problems(_SOURCE_LIMITS, source))
        column_names = (name for name in source.columns or () if name != recipe.train.get("dataset_text_field"))
        if problem := misspelling_problem(column_names):
            yield (f"{key}.columns",), f"{key}.columns: {problem}"


def train_section_problems(recipe: Recipe, values: OptionValues) -> Iterator[Problem]:
    """Yield problems of the train section, some of which transformers' Trainer would only report later.

    Args:
        recipe: The recipe.
        values: The section, as an object with all fields of the method's Config.
    """
    problem: str | None
    method = METHODS[recipe.method]
    invalid_groups = [*_prefix_keys("train", group_problems(values, method))]
    yield from invalid_groups
    if invalid_groups:
        return
    values = build_groups(values, method.groups)

    # evaluation
    for name, evaluating_values in _REQUIRES_EVAL.items():
        if (value := getattr(values, name)) in evaluating_values and recipe.data.eval is None:
            text = "true" if value is True else getattr(value, "value", value)
            yield (f"train.{name}",), f"train.{name}: {text} requires rows to evaluate on. Set data.eval"
    if recipe.train.get("eval_steps") is not None and "eval_strategy" not in recipe.train:
        problem = "train.eval_steps is only valid with eval_strategy: steps, and the default is no. Set eval_strategy"
        yield ("train.eval_steps",), problem

    # the trainer reports the next two as well, but only after the weights are loaded
    quantized = recipe.model.quantization != "none"
    has_adapter = recipe.model.lora is not None or bool(recipe.model.adapter)
    if values.merge_lora and (problem := merge_problem(has_adapter, quantized)):
        keys = ("train.merge_lora", "model.quantization") if has_adapter else ("train.merge_lora",)
        yield keys, f"train.{problem}"
    yield from conflicts(recipe_features(recipe, values))
    for key, section in recipe.teacher_sections() if recipe.model.images else ():
        if not (section.images or section.url or section.self):
            problem = f"{key}.images must be true, since the student reads images"
            yield (f"{key}.images", "model.images"), problem
    if recipe.rounds:
        yield from _rounds_train_problems(recipe.rounds, values)
    for name, source in recipe.sources():
        if name.startswith("data.train") and source.streaming and values.max_steps <= 0:
            problem = "true requires train.max_steps, since the length of a stream is not known. Set it"
            yield (f"{name}.streaming",), f"{name}.streaming: {problem}"

    # options that scripts of transformers read, but its Trainer does not
    for name, is_done in (("do_train", True), ("do_eval", values.eval_strategy != "no"), ("do_predict", False)):
        if recipe.train.get(name, is_done) is not is_done:
            problem = "has no effect: a run always trains, and eval_strategy determines when it evaluates"
            yield (f"train.{name}",), f"train.{name} {problem}. Remove it"

    # teachers
    teacher_options = TEACHER.as_mapping(recipe.train.get("teacher")) or {}
    for name, section_key in (
        ("prompt", "teacher.prompt"),
        ("tokenizer", "teacher.own_tokenizer"),
        ("names", "the section teachers"),
    ):
        if teacher_options.get(name) is not None:
            problem = f"train.teacher.{name} is not supported in a recipe. Use {section_key}"
            yield (f"train.teacher.{name}", "train.teacher"), problem
    for key, section in recipe.teacher_sections():
        for names, problem in teacher_problems(values, section, method):
            yield (key, *(f"train.{name}" for name in names)), f"{key}: {problem}"
    yield from _prefix_keys("train", problems(values, method))


def input_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the files that a recipe reads, as far as they are found without reading all of them."""
    # a name that is not a path may be a name of the hub
    for key, section in recipe.models():
        for field, problem_of in (("name_or_path", _model_problem), ("adapter", _adapter_problem)):
            name = getattr(section, field)
            if name is not None and (problem := problem_of(Path(name)) or _missing_model_problem(name, recipe)):
                yield (f"{key}.{field}",), f"{key}.{field}: {problem}"
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        name = str(recipe.rounds.judge.name)
        fix = "Merge it with `hf-posttrain merge`, and set the folder of the result"
        if problem := _model_problem(Path(name), adapter_fix=fix) or _missing_model_problem(name, recipe):
            yield ("rounds.judge.name",), f"rounds.judge.name: {problem}"
    for key, source in recipe.sources():
        if problem := source_problem(source.path):
            yield (f"{key}.path",), f"{key}.path: {problem}"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(hub.HF_HOME) / "datasets")
    if problem := _write_problem(cache):
        yield (), f"the cache of datasets cannot be written: {problem}. Set HF_DATASETS_CACHE to another folder"


def run_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems that prevent a run from loading weights, reporting, writing its output_dir and resuming."""
    problem: str | None
    for name, section in recipe.models():
        name_or_path = None if section.from_scratch else section.name_or_path
        for option, value in (("name_or_path", name_or_path), ("adapter", section.adapter)):
            if value and (problem := unreadable_weights(value)):
                yield (f"{name}.{option}",), f"{name}.{option}: {problem}"
        key = f"{name}.name_or_path"
        folder = Path(section.name_or_path)
        if section.from_scratch or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if not any(folder.glob("*.bin")):
            problem = f"{folder} has no weights (*.safetensors). To start from random weights, set from_scratch: true"
            yield (key,), f"{key}: {problem}"
        elif not section.trust_remote_code:
            problem = f"{folder} has only pickled weights (*.bin), which can run code"
            yield (key,), f"{key}: {problem}. To load them, set trust_remote_code: true"
    for name in as_list(recipe.train.get("report_to")):
        packages = REPORTER_PACKAGES.get(name, ())
        if packages and not any(map(importlib.util.find_spec, packages)):
            problem = f"{name} requires a package that is not installed. Run pip install {packages[0]}"
            yield ("train.report_to",), f"train.report_to: {problem}"

    # the folder to write, and the checkpoint to resume
    output_dir = recipe.train.get("output_dir")
    checkpoint = recipe.train.get("resume_from_checkpoint")
    if not output_dir:
        yield ("train",), "train.output_dir is missing. Set it to the output folder of the run"
    elif problem := _write_problem(Path(output_dir)):
        yield ("train.output_dir",), f"train.output_dir: {problem}"
    if checkpoint is True and not any(Path(output_dir or "").glob("checkpoint-*")):
        problem = f"true requires a checkpoint in {output_dir}. To start a new run if there is none, set auto"
        yield ("train.resume_from_checkpoint",), f"train.resume_from_checkpoint: {problem}"
    if isinstance(checkpoint, str) and checkpoint != "auto" and (problem := _checkpoint_problem(Path(checkpoint))):
        yield ("train.resume_from_checkpoint",), f"train.resume_from_checkpoint: {problem}"


def _rounds_section_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the section `rounds`."""
    method = METHODS[recipe.method]
    rounds = recipe.rounds
    if method.second == "teacher":
        yield ("rounds", "method"), conflict_message(Feature.ROUNDS, Feature.TEACHER)
    yield from _prefix_keys("rounds", rounds_problems(rounds, method.rows))  # type: ignore[arg-type]


def _rounds_train_problems(rounds: RoundsSection, values: OptionValues) -> Iterator[Problem]:
    """Yield problems of the train section of a run in rounds."""
    losses = as_list(getattr(values, "loss_type", None) or "none")
    if rounds.reference == "round" and {*losses} <= REFERENCE_FREE_LOSSES:
        problem = f"rounds.reference: round has no effect: {no_reference(losses)}. Remove rounds.reference"
        yield ("rounds.reference", "train.loss_type"), problem
    max_new_tokens = rounds.max_completion_length
    if values.max_length is not None and values.max_length <= max_new_tokens:
        problem = f"train.max_length={values.max_length} must exceed rounds.max_completion_length={max_new_tokens}"
        keys = ("train.max_length", "rounds.max_completion_length")
        yield keys, f"{problem}, so that prompts have tokens. Raise max_length, or lower max_completion_length"


def recipe_features(recipe: Recipe, values: OptionValues) -> dict[Feature, str]:
    """Return the features of a recipe, each with its key.

    Args:
        recipe: The recipe.
        values: The train section, with its groups built.
    """
    features = {feature: f"train.{option}" for feature, option in option_features(values).items()}
    if METHODS[recipe.method].head == "score":
        features[Feature.REWARD_MODEL] = "method"
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


def _prefix_keys(section: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Convert problems of the fields of a section to problems of the recipe's keys."""
    for names, message in problems:
        keys = tuple(f"{section}.{name}" for name in names)
        yield keys, f"{section}.{message}" if message.startswith(names) else message


@report_unreadable
def _model_problem(
    folder: Path, adapter_fix: str = "Set the base model here, and the adapter in `adapter`"
) -> str | None:
    """Return why an existing path is not a model with a tokenizer, or None if it is one or does not exist.

    Args:
        folder: The path.
        adapter_fix: What to do with an adapter.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is a file. Set the folder of a model, or a hub name"
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return f"{folder} is an adapter. {adapter_fix}"
        return f"folder {folder} is not a model, since it has no config.json"
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{folder}/config.json is not valid JSON ({error})"
    if not has_tokenizer(folder):
        return f"folder {folder} has no tokenizer (tokenizer.json and tokenizer_config.json)"
    return None


@report_unreadable
def _adapter_problem(folder: Path) -> str | None:
    """Return why an existing path is not an adapter, or None if it is one or does not exist."""
    if not folder.exists() or (folder / "adapter_config.json").is_file():
        return None
    return f"{folder} is not a PEFT adapter, since it has no adapter_config.json"


def _missing_model_problem(name: str, recipe: Recipe) -> str | None:
    """Return why there is no model with a name, or None if there is one or the hub may have it."""
    path = Path(name)
    cached = Path(hub.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if path.exists() or (not is_local(name) and (not hub.HF_HUB_OFFLINE or cached.is_dir())):
        return None
    offline = "" if is_local(name) else ", and HF_HUB_OFFLINE disables the hub"
    hint = path_hint(path)
    # a recipe in the same folder that writes the model is a better hint than a similar name
    for sibling in sorted(recipe.path.parent.glob("*.yaml")):
        try:
            output_dir = yaml.safe_load(sibling.read_text(encoding="utf-8"))["train"]["output_dir"]
            if path.is_relative_to(output_dir) and not sibling.samefile(recipe.path):
                hint = f". {sibling} trains it; run that recipe first"
                break
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):  # not a recipe
            continue
    return f"{name}: no such folder{offline}{hint or (OFFLINE_FIX if offline else '')}"


@report_unreadable
def _write_problem(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, cannot be written to, or None if it can."""
    folder = expand_home(folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"there is no permission to write to {existing}"


@report_unreadable
def _checkpoint_problem(folder: Path) -> str | None:
    """Return why a folder is not a checkpoint to resume, or None if it may be one."""
    if not folder.is_dir():
        return f"there is no folder {folder}{path_hint(folder)}"
    if any(folder.glob("checkpoint-*")):
        return f"{folder} is a folder with checkpoints. Set one of them, or auto"
    return None
