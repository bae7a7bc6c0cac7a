"""The keys of `train` and `model.lora`, read from source: wrong names, types and values are said within a second.

    train_fields   a stand-in for a method's Config, made without importing torch or transformers
    lora_fields    the same for peft.LoraConfig
    owners         which methods have a field

The classes themselves check again, with what only they know.
"""

import ast
import copy
import dataclasses
import importlib.util
import re
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..methods import METHODS

_WITH_ENUMS = ("trainer_utils.py", "debug_utils.py", "training_args.py")
"""Files of transformers whose enums TrainingArguments names."""
_FRIENDLY_LORA = (("alpha", int, 8), ("dropout", float, 0.0), ("init_lora_weights", bool | str, True))
"""What model.lora takes beside LoraConfig's fields, or in other types; models.py says what they become."""


def train_fields(method: str) -> type:
    """A dataclass with the fields of the method's Config and their defaults, None where a default is no literal.

    Annotations that name what only transformers defines become Any, but for its enums, which are read as well.
    """
    here = Path(__file__).parents[1]
    declared = [(here / "trainer/config.py", "PostTrainConfig"), _config_of(method)]
    folder = _source_of("transformers")
    if folder is None:
        return _stand_in("TrainSection", declared, {})
    enums = {name: enum for file in _WITH_ENUMS for name, enum in _enums(folder / file)}
    return _stand_in("TrainSection", [(folder / "training_args.py", "TrainingArguments"), *declared], enums)


def lora_fields() -> type:
    """A dataclass with the fields of `model.lora`: those of peft.LoraConfig, and the friendly names of some."""
    folder = _source_of("peft")
    files = [("config.py", "PeftConfigMixin"), ("config.py", "PeftConfig"), ("tuners/lora/config.py", "LoraConfig")]
    return _stand_in("Lora", [(folder / file, cls) for file, cls in files] if folder else [], {}, *_FRIENDLY_LORA)


def owners(name: str) -> list[str]:
    """The methods whose own Config declares the field `name`."""
    return [method for method in METHODS if any(name == field for field, _, _ in _fields(*_config_of(method), {}))]


def _config_of(method: str) -> tuple[Path, str]:
    return Path(__file__).parents[1] / f"methods/{method}.py", METHODS[method].config_name


def _source_of(package: str) -> Path | None:
    """The folder of a package that is installed; it is not imported."""
    found = importlib.util.find_spec(package)
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _stand_in(name: str, declared: list[tuple[Path, str]], known: dict[str, Any], *more: tuple[str, Any, Any]) -> type:
    """A dataclass of the fields that the classes declare, later ones in place of earlier ones."""
    of_all = [field for file, cls in declared for field in _fields(file, cls, known)]
    fields = {field: (kind, default) for field, kind, default in (*of_all, *more)}
    return dataclasses.make_dataclass(
        name,
        [(field, kind, dataclasses.field(default_factory=partial(copy.copy, default)))
         for field, (kind, default) in fields.items()],
    )  # fmt: skip


def _fields(file: Path, cls: str, known: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, default) of each field that the class itself declares."""
    [body] = [node.body for node in _classes(file) if node.name == cls]
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if not annotation.startswith("ClassVar"):
                yield node.target.id, _evaluated(annotation, known), _default(node.value)


def _enums(file: Path) -> Iterator[tuple[str, type[Enum]]]:
    """The enums of texts that a file defines."""
    for node in _classes(file):
        if any("Enum" in ast.unparse(base) for base in node.bases):
            members = [
                (member.targets[0].id, member.value.value) for member in node.body
                if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name)
                and isinstance(member.value, ast.Constant)
            ]  # fmt: skip
            yield node.name, Enum(node.name, members, type=str)  # type: ignore[misc]


@cache
def _classes(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def _default(given: ast.expr | None) -> Any:
    """The literal that a field is set to, by `field(default=...)` or a `default_factory` too; otherwise None."""
    if isinstance(given, ast.Call) and ast.unparse(given.func).endswith("field"):
        arguments = {keyword.arg: keyword.value for keyword in given.keywords}
        given = arguments.get("default", arguments.get("default_factory"))
    if isinstance(given, ast.Lambda):
        given = given.body
    if isinstance(given, ast.Name) and given.id in ("list", "dict"):
        return [] if given.id == "list" else {}
    try:
        return None if given is None else ast.literal_eval(given)
    except ValueError:
        return None


def _evaluated(annotation: str, known: dict[str, Any]) -> Any:
    """The type that an annotation means with nothing but the standard library and `known` at hand."""
    quoted = '"' in annotation or "'" in annotation
    if quoted and not re.fullmatch(r"Literal\[[^\[\]]*\]", annotation):  # a forward reference: the Config checks it
        return Any
    try:
        return eval(annotation, vars(typing) | {"typing": typing} | known)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
