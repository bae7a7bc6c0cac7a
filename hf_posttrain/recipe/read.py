"""A recipe: one YAML file and `section.key=value` overrides, read into dataclasses, strictly and without torch.

Every mistake is an InputError that begins with its place, such as "recipes/kto.yaml:12: " or "command line: ".
"""

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import InputError, LaunchError
from ..methods import METHODS
from ..models.config import ModelSection
from ..rollouts.options import SAMPLERS
from ..rounds.config import RoundsSection, expand_rounds
from ..rounds.judges.config import MODEL_JUDGES
from ..teachers.options import COMPARISON_OPTIONS, TEACHER
from ..trainer.limits import Problem
from ..trainer.renamed_options import RENAMED, warn_of_old_names, with_new_names
from ..trainer.rules import instead_of, without_defaults
from . import rules
from .fields import Fields, build_kwargs, fields_of, is_outdated, lora_fields, methods_with_option, train_fields
from .sections import DataSection, Recipe, Source
from .yaml_tree import place_of, read_tree

_ELSEWHERE = {  # names of other libraries and habits -> the key that they mean
    "model_name_or_path": "model.name_or_path",
    "model.path": "model.name_or_path",
    "model.name": "model.name_or_path",
    "teacher.path": "teacher.name_or_path",
    "teacher.name": "teacher.name_or_path",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization: 4bit",
    "load_in_8bit": "model.quantization: 8bit",
    "use_peft": "model.lora: {r: 16}",
    "lora_r": "model.lora.r",
    "dataset": "data.train",
    "dataset_name": "data.train.path",
    "dataset_config": "data.train.name",
    "train_file": "data.train.path",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
}


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and its overrides, and check everything that YAML alone shows.

    Raises InputError for a missing or malformed file, an unknown or missing key (with the nearest valid one), a wrong
    type, and for options that contradict each other.
    """
    recipe = read_recipe(path, overrides)
    raise_first_problem(recipe, rules.recipe_problems(recipe))
    # the train section stays as it is given; its rules are asked of an object with all fields of the Config
    fields = partial(train_fields, recipe.method)
    # null of another method's option takes it back, where a recipe is run with that method's name replaced
    recipe.train = {
        name: value
        for name, value in recipe.train.items()
        if value is not None or name in fields() or not methods_with_option(name)
    }
    recipe.train = without_defaults(recipe.train, fields(), METHODS[recipe.method].config_name)
    given = _checked(recipe, fields, recipe.train, "train", partial(_advise, recipe.method))
    given = add_teacher_options(recipe, given)
    values = SimpleNamespace(**{name: field.default for name, field in fields().items()} | given)
    raise_first_problem(recipe, rules.train_section_problems(recipe, values))
    recipe.checked = add_teacher_options(recipe, dict(recipe.train))
    return recipe


def read_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """The same with names and types alone, and not those of `train`. Raises InputError."""
    path = Path(path)
    tree, places = read_tree(path, overrides)
    if isinstance(tree, dict):
        tree = _with_new_names(_with_compared(tree, places), places)
        known = fields_of(Recipe)  # of which an empty section is no section
        tree = {name: value for name, value in tree.items() if value is not None or name not in known}
        if "rounds" in tree:
            tree["rounds"] = expand_rounds(tree["rounds"])
    method = tree.get("method") if isinstance(tree, dict) else None
    given = build_kwargs(fields_of(Recipe), tree, "", partial(place_of, places), partial(_advise, method))
    recipe = Recipe(**given, path=path, places=places)

    def expanded(name: str, key: str) -> str:
        """A path with its home folder and environment variables."""
        path = os.path.expanduser(os.path.expandvars(name))
        if (unset := re.search(r"\$(\w+|\{\w+\})", path)) and not os.path.exists(path):
            raise InputError(f"{recipe.where(key)}: {key}: the environment variable {unset[0]} is not set")
        return path

    def found(name: str | None, key: str) -> Any:
        """The same, and in the recipe's folder where it is there and not here."""
        if not name:
            return name
        here = expanded(name, key)
        near = path.parent / here
        # unlike Path.exists, this is False in a folder that may not be entered
        return _normalised(near) if os.path.exists(near) and not os.path.exists(here) else here

    for name in ("output_dir", "resume_from_checkpoint", "deepspeed", "fsdp_config"):
        if isinstance(value := recipe.train.get(name), str):
            recipe.train[name] = expanded(value, f"train.{name}")
    section: ModelSection
    for key, section in (("model", recipe.model), *recipe.teacher_sections()):
        for name in ("name_or_path", "adapter", "chat_template"):
            setattr(section, name, found(getattr(section, name), f"{key}.{name}"))
        # `lora` is a plain mapping of peft's names and our friendly ones
        if section.lora is not None:
            section.lora = _checked(recipe, lora_fields, section.lora, f"{key}.lora", _advise_lora)
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        recipe.rounds.judge.name = found(recipe.rounds.judge.name, "rounds.judge.name")
    for key, source in recipe.sources():
        source.path = found(source.path, f"{key}.path")
    return recipe


def _with_compared(tree: dict[Any, Any], places: dict[str, Any]) -> dict[Any, Any]:
    """Return the tree of a recipe whose section `teacher` has only keys of the teacher itself: options of how student
    and teacher are compared go to `train.teacher`. Raises InputError for one that is given in both.
    """
    section = tree.get("teacher")
    train = tree.get("train") or {}
    if not isinstance(section, dict) or not isinstance(train, dict):
        return tree
    moved = {option: section[option] for option in COMPARISON_OPTIONS if option in section}
    given = TEACHER.as_mapping(train.get("teacher"))
    if not moved or given is None:
        return tree
    for option in moved:
        key = f"train.teacher.{option}"
        if option in given:
            raise InputError(f"{place_of(places, key)}: {key} is given as teacher.{option} too: remove one of the two")
        places[key] = places.get(f"teacher.{option}", places.get("teacher", "recipe"))
    left = {option: value for option, value in section.items() if option not in moved}
    return tree | {"teacher": left, "train": train | {"teacher": given | moved}}


def _with_new_names(tree: dict[Any, Any], places: dict[str, Any]) -> dict[Any, Any]:
    """Return the tree of a recipe with the new names of options, which get the places of the old ones."""
    method = METHODS.get(tree["method"]) if isinstance(tree.get("method"), str) else None
    sections = {
        "train": (method.groups if method else {}, train_fields(method.name) if method else ()),
        "rounds": ({"sampler": SAMPLERS}, fields_of(RoundsSection)),
    }
    for section, (groups, known) in sections.items():
        if not isinstance(tree.get(section), dict):
            continue
        place = partial(_start_of_error, places, section)
        values, renamed = with_new_names(tree[section], groups, known, place)
        tree = tree | {section: values}
        for old, options in renamed.items():
            for new in options:
                for key in (new, new.partition(".")[0]):
                    places.setdefault(f"{section}.{key}", place_of(places, f"{section}.{old}"))
        warn_of_old_names(renamed, f"{section}.")
    return tree


def _start_of_error(places: dict[str, str], section: str, option: str) -> str:
    """Return the place of an option as errors begin with it."""
    return f"{place_of(places, f'{section}.{option}')}: {section}."


def _normalised(path: Path) -> str:
    """Return an existing path without `folder/..`, unless a symbolic link on the way changes what that means."""
    plain = os.path.normpath(path)
    return plain if os.path.exists(plain) and os.path.samefile(plain, path) else str(path)


def train_config(recipe: Recipe, config_class: Any) -> Any:
    """The method's Config from `recipe.train`, its values converted to the fields' types (`"5e-7"` is a float). Raises
    InputError for an unknown name, a wrong type, a contradiction that the class finds, or a package that is missing.
    """
    values = build_kwargs(fields_of(config_class), recipe.train, "train", recipe.where, partial(_advise, recipe.method))
    values = add_teacher_options(recipe, values)
    try:
        # its rules are run once, by `load_recipe`, unless the section has changed since
        unchanged = recipe.checked == add_teacher_options(recipe, dict(recipe.train))
        is_checked = unchanged and hasattr(config_class, "of_checked")
        return config_class.of_checked(**values) if is_checked else config_class(**values)
    except LaunchError:
        raise
    except (ValueError, TypeError, ImportError, OSError, ArithmeticError) as error:
        # the first key of the recipe that the message names is to blame, or whose text it quotes
        problem = " ".join(str(error).split())
        named = [name for name in re.findall(r"\w+", problem) if name in recipe.train]
        quoted = [name for name, value in recipe.train.items() if isinstance(value, str) and repr(value) in problem]
        key = f"train.{(named or quoted)[0]}" if named or quoted else "train"
        raise InputError(f"{recipe.where(key)}: {key + ': ' if quoted and not named else ''}{problem}") from error


def add_teacher_options(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the train section with those options of `teacher` that the teachers' sections give."""
    sections = {key.partition(".")[2]: section for key, section in recipe.teacher_sections()}
    prompts = {name: section.prompt for name, section in sections.items() if section.prompt is not None}
    own = {name: section.name_or_path for name, section in sections.items() if section.own_tokenizer}
    found = {"prompt": prompts, "tokenizer": own, "names": [*(recipe.teachers or ())]}
    options = {
        option: value[""] if isinstance(value, dict) and "" in value else value
        for option, value in found.items()
        if value
    }
    given = TEACHER.as_mapping(values.get("teacher"))
    return values if given is None or not options else values | {"teacher": given | options}


def raise_first_problem(recipe: Recipe, problems: Iterable[Problem]) -> None:
    """Raises InputError for the first of the problems, with the place of each key; one without keys is general."""
    for keys, problem in problems:
        if not keys:
            raise InputError(problem)
        # a default has no place of its own: name those keys that the recipe gives, if any
        given = [key for key in keys if key in recipe.places] or [keys[0]]
        first, *others = ((key, recipe.where(key)) for key in given)
        also = "".join(f"; {key} is at {place}" for key, place in others if place != first[1])
        raise InputError(f"{first[1]}: {problem}{also}")


def _checked(recipe: Recipe, fields: Callable[..., Fields], values: Any, key: str, advice: Any) -> dict[str, Any]:
    """`values` checked against fields.json; what that refuses, against the classes themselves if they are newer."""
    try:
        return build_kwargs(fields(), values, key, recipe.where, advice)
    except InputError:
        if not is_outdated():
            raise
    return build_kwargs(fields(imported=True), values, key, recipe.where, advice)


def _advise_lora(key: str) -> str | None:
    """Return what to write instead of a key of `model.lora` that does not exist."""
    names = {"rank": "r", "ranks": "r", "lora_rank": "r", "lora_r": "r", "target": "target_modules"}
    name = names.get(key.rpartition(".")[2])
    return f"use {name}" if name else None


def _advise(method: Any, key: str) -> str | None:
    """What to write instead of a key that does not exist, such as "write model.lora"; None for a name known nowhere."""
    method = next((name for name in METHODS if name == method), None)  # anything may have been given
    section, _, name = re.sub(r"\.\d+\.", ".", key).rpartition(".")
    owner = METHODS[method].config_name if method else ""
    if (
        section == "train"
        and (group := RENAMED.get(name, "").partition(".")[0])
        and (methods := methods_with_option(group))
    ):
        return f"its name is now {RENAMED[name]}, which method {method} does not have, only {' and '.join(methods)}"
    if section == "train" and (instead := instead_of(name, "recipe", owner)):
        return instead
    if meant := _ELSEWHERE.get(f"{section}.{name}") or _ELSEWHERE.get(name):
        return f"write {meant}"
    sections = {
        "model": fields_of(ModelSection),
        "data.train": fields_of(Source),
        "data": fields_of(DataSection),
        "model.lora": lora_fields(),
        "train": train_fields(method or next(iter(METHODS))),
    }
    for other, names in sections.items():
        if name in names and other != section:
            return f"write {other}.{name}"
    in_rounds = name in fields_of(RoundsSection)
    if section in ("", "train") and (methods := methods_with_option(name)):
        more = f", or write rounds.{name} for rounds" if in_rounds else ""
        return f"method {method} has no such option, only {' and '.join(methods)}. Remove it{more}"
    if in_rounds and section != "rounds":
        return f"write rounds.{name}"
    return None
