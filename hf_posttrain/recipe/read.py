"""A recipe: one YAML file and `section.key=value` overrides, read into dataclasses, strictly.

    load_recipe(path, overrides)        -> Recipe; everything that YAML alone shows is checked here, without torch
    train_config(recipe, config_class)  -> the method's Config from the `train` section
    Recipe.to_yaml()                    -> the recipe as resolved; load_recipe reads it back

    method: kto
    model:  {name_or_path, from_scratch, dtype, ...}       ModelSection
    teacher: same keys, kd and opd only                    ModelSection
    data:   {train: source or list, eval: ...}             DataSection of Source
    train:  every TrainingArguments field and the method's own

Every mistake is an InputError that begins with its place: "recipes/kto.yaml:12: " or "command line: ".
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import InputError, LaunchError
from ..trainer import rule_table as rules
from ..trainer.limits import Problem
from . import hints
from .contradictions import between_sections, with_train
from .fields import build
from .keys import METHODS, Method, lora_fields, train_fields
from .yaml_tree import place_of, read_tree, write_tree

Config = TypeVar("Config")


@dataclass
class ModelSection:
    """A model: where it comes from and how it is loaded (`model` and `teacher`)."""

    name_or_path: str
    """Hub name or folder."""
    from_scratch: bool = False
    """Random weights from the folder's config.json instead of saved ones; the tokenizer is in the same folder."""
    dtype: Literal["default", "auto", "float32", "bfloat16", "float16"] = "default"
    """`default`: float32 if all weights are trained; a LoRA base or frozen model bfloat16 on GPU, float32 on CPU."""
    attn_implementation: str = "auto"
    """`auto` leaves the choice to transformers; otherwise eager, sdpa, flex_attention, flash_attention_2, ..."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Weights quantised by bitsandbytes: for a LoRA base or a teacher."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, and read weights that are not safetensors."""
    adapter: str | None = None
    """Continue from this saved PEFT adapter (folder or hub name)."""
    lora: dict[str, Any] | None = None
    """Train a new LoRA adapter: r, alpha, dropout, target_modules (all-linear) and every other LoraConfig field."""
    chat_template: str | None = None
    """A file with a Jinja chat template, for a tokenizer that has none or the wrong one."""
    offload: bool = False
    """Keep the model on CPU between uses: for a teacher."""


@dataclass
class Source:
    """Rows from one place."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a folder (of files or saved to disk) or a hub name."""
    name: str | None = None
    """The hub data set's configuration."""
    split: str = "train"
    """Split of a hub data set or saved DatasetDict; slices as `train[:90%]` are allowed."""
    columns: dict[str, str] | None = None
    """Our column: the data set's column, such as {prompt: question, completion: answer}."""
    limit: int | None = None
    """Take the first so many rows."""
    weight: float = 1.0
    """How many times its rows count (0.5: half of them, drawn at random); the share of a stream."""
    streaming: bool = False
    """Read rows as training goes; never all of them at once."""


@dataclass
class DataSection:
    """What is trained and evaluated on; the sources of a list are mixed by weight."""

    train: Source | list[Source]
    """Training rows."""
    eval: Source | list[Source] | None = None
    """Evaluation rows."""


@dataclass
class Recipe:
    """A whole run."""

    method: Method
    """The training method."""
    model: ModelSection
    """The policy or student."""
    data: DataSection
    """Training and evaluation rows."""
    teacher: ModelSection | None = None
    """The teacher of kd and opd."""
    train: dict[str, Any] = field(default_factory=dict)
    """Arguments of the method's Config, as given."""
    path: Path = field(default=Path("recipe"), metadata={"hidden": True})
    """The file it was read from."""
    places: dict[str, str] = field(default_factory=dict, repr=False, compare=False, metadata={"hidden": True})
    """Where each dotted key stands: file:line or "command line"."""

    def where(self, key: str) -> str:
        """The place of a dotted key, or of the nearest key above it."""
        return place_of(self.places, key)

    def sources(self) -> Iterator[tuple[str, Source]]:
        """(dotted key, source) of everything that is read."""
        for key, given in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            if isinstance(given, list):
                yield from ((f"{key}.{i}", source) for i, source in enumerate(given))
            elif given is not None:
                yield key, given

    def to_dict(self) -> dict[str, Any]:
        """The recipe as resolved: every key of every section; `train` holds the given ones, without secrets."""
        tree = dataclasses.asdict(self)
        tree["train"] = {name: value for name, value in tree["train"].items() if not name.endswith("_token")}
        return {name: tree[name] for name in ("method", "model", "teacher", "data", "train")}

    def to_yaml(self) -> str:
        """The same as YAML, which `load_recipe` reads back."""
        return f"# resolved from {self.path}\n" + write_tree(self.to_dict())


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
    refuse(recipe, between_sections(recipe))
    return recipe


@contextmanager
def placed(recipe: Recipe, key: str) -> Iterator[None]:
    """Adds to an InputError where the recipe says what it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{recipe.where(key)}: {error}") from error


def check_train(recipe: Recipe) -> None:
    """Names, types and values of the train section, and what in it contradicts others, without importing transformers.

    Raises InputError as `train_config` does.
    """
    config_class = train_fields(recipe.method)
    values = config_class(**build(config_class, recipe.train, "train", recipe.where, _advice(recipe.method)))
    refuse(recipe, with_train(recipe, values))
    for kind in ("shared", recipe.method):
        refuse(recipe, map(_in_train, rules.problems(kind, values)))


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
