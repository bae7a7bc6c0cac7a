"""A recipe: one YAML file and `section.key=value` overrides, read into dataclasses, strictly.

    load_recipe(path, overrides)        -> Recipe; everything that YAML alone shows is checked here, without torch
    train_config(recipe, config_class)  -> the method's Config from the `train` section

Every mistake is an InputError that begins with its place: "recipes/kto.yaml:12: " or "command line: ".
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError, LaunchError
from ..methods import METHODS
from ..models.section import ModelSection
from ..trainer import rules
from ..trainer.method import Problem
from . import hints
from .contradictions import between_sections, with_train
from .fields import build
from .keys import lora_fields, train_fields
from .sections import DataSection, Recipe, Source
from .yaml_tree import place_of, read_tree

Config = TypeVar("Config")


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe file and its `section.key=value` overrides.

    Relative paths are taken from the current directory or, where nothing is there, from the recipe's folder.
    Raises InputError for a missing or malformed file, an unknown or missing key (with the nearest valid one), a wrong
    type, and for options that contradict each other.
    """
    path = Path(path)
    tree, places = read_tree(path, overrides)
    if isinstance(tree, dict):
        tree = {name: value for name, value in tree.items() if value is not None}  # an empty section is no section
    method = tree.get("method") if isinstance(tree, dict) else None
    sections = build(Recipe, tree, "", lambda key: place_of(places, key), _advice(method))
    recipe = Recipe(**sections, path=path, places=places)
    _resolve_paths(recipe)
    _read_lora(recipe)
    refuse(recipe, between_sections(recipe))
    return recipe


def check_train(recipe: Recipe) -> None:
    """Names, types and values of the train section, and what in it contradicts others, without importing transformers.

    Raises InputError as `train_config` does.
    """
    config_class = train_fields(recipe.method)
    values = config_class(**build(config_class, recipe.train, "train", recipe.where, _advice(recipe.method)))
    refuse(recipe, with_train(recipe, values))
    refuse(recipe, map(_in_train, rules.problems(values, METHODS[recipe.method])))


def train_config(recipe: Recipe, config_class: type[Config]) -> Config:
    """The method's Config from `recipe.train`, its values converted to the fields' types (`"5e-7"` is a float).

    Raises InputError for an unknown name, a wrong type, a contradiction that the class itself finds, or a
    package that an option needs and that is not installed.
    """
    values = build(config_class, recipe.train, "train", recipe.where, _advice(recipe.method))
    try:
        return config_class(**values)
    except LaunchError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # a contradiction, or a package that an option needs
        problem = " ".join(str(error).split())
        key = next((f"train.{name}" for name in re.findall(r"\w+", problem) if name in recipe.train), "train")
        raise InputError(f"{recipe.where(key)}: {problem}") from error


def refuse(recipe: Recipe, problems: Iterable[Problem]) -> None:
    """Raises InputError for the first of the problems, (dotted keys, sentence), with the place of each key.

    One without keys is not of the recipe.
    """
    for keys, problem in problems:
        if not keys:
            raise InputError(problem)
        given = [key for key in keys if key in recipe.places] or [keys[0]]
        first, *others = ((key, recipe.where(key)) for key in given)
        beside = "".join(f"; {key} is at {place}" for key, place in others if place != first[1])
        raise InputError(f"{first[1]}: {problem}{beside}")


def _in_train(problem: Problem) -> Problem:
    """A problem of a Config's fields as one of a recipe's keys."""
    names, said = problem
    return tuple(f"train.{name}" for name in names), f"train.{said}" if said.startswith(names) else said


def _advice(method: Any) -> Callable[[str], str | None]:
    """What to write instead of a key that does not exist, in a recipe of this method, which may be unknown itself."""
    method = method if method in METHODS else None

    def instead(key: str) -> str | None:
        classes = {"model": ModelSection, "data.train": Source, "data": DataSection, "model.lora": lora_fields()}
        if not key.startswith("train."):
            classes["train"] = train_fields(method or "sft")
        names = {section: [f.name for f in dataclasses.fields(cls)] for section, cls in classes.items()}
        return hints.belongs(key, names, method)

    return instead


def _read_lora(recipe: Recipe) -> None:
    """Check and convert the keys of each `lora`, which is a plain mapping of peft's names and our friendly ones."""
    for key, section in (("model.lora", recipe.model), ("teacher.lora", recipe.teacher)):
        if section is not None and section.lora is not None:
            section.lora = build(lora_fields(), section.lora, key, recipe.where, {f"{key}.rank": "use r"}.get)


def _resolve_paths(recipe: Recipe) -> None:
    def found(name: str | None) -> str | None:
        name = os.path.expanduser(name) if name else name
        beside = recipe.path.parent / name if name else None
        here, there = (os.path.exists(path or "") for path in (name, beside))  # False where not to be entered
        return str(beside) if there and not here else name

    for section in (recipe.model, recipe.teacher):
        if section:
            section.name_or_path = found(section.name_or_path) or ""
            section.adapter, section.chat_template = found(section.adapter), found(section.chat_template)
    for _, source in recipe.sources():
        source.path = found(source.path) or ""
