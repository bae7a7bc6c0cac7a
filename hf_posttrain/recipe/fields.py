"""Keys of a recipe's sections with their types, and the validation of mappings against them.

A key is dotted (`data.train.0.path`). `where(key)` returns its location, "recipes/kto.yaml:12" or "command line".
"""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from enum import EnumMeta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from packaging.version import Version
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ..errors import InputError, name_hint, short_repr
from ..methods import METHODS, config_class
from ..trainer.option_group import OptionKind

Where = Callable[[str], str]
"""Dotted key -> its location."""
KeyHint = Callable[[str], str | None]
"""Dotted key that does not exist -> what to write instead."""

FILE = Path(__file__).with_name("fields.json")
"""File that `make fields` writes: {"versions": of the packages that it was generated with, "train": fields of every
method, "train.sft": fields of SFT only, ..., "model.lora": ...}. A field is [types, default]. A type is a name in
`TYPES`, or a list of the allowed values."""
TYPES: dict[str, Any] = {
    "null": type(None),
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list[str]": list[str],
    "list[int]": list[int],
    "list[float]": list[float],
    "list[tuple[int, int]]": list[tuple[int, int]],
    "dict": dict,
    "dict[str, Any]": dict[str, Any],
    "dict[str, bool]": dict[str, bool],
    "any": Any,
}
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


class Field(NamedTuple):
    """Type and default of a key."""

    kind: Any
    """Annotation of the type."""
    default: Any = dataclasses.MISSING
    """Default, or MISSING for a required key."""


Fields = Mapping[str, Field]


def fields_of(dataclass_type: type) -> dict[str, Field]:
    """Return the init fields of a dataclass that are keys of a recipe, without those in `python_only` or `hidden`.

    A field that HfArgumentParser accepts without a value (`--fsdp`, metadata `const`) also accepts true and false.
    """
    hints = typing.get_type_hints(dataclass_type)
    flags = [f.name for f in dataclasses.fields(dataclass_type) if f.metadata.get("const") is True]
    hints |= {name: bool | hints[name] for name in flags}
    return {
        f.name: Field(hints[f.name], f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(dataclass_type)
        if f.init and not f.metadata.get("hidden") and f.name not in getattr(dataclass_type, "python_only", ())
    }


def train_fields(method: str, from_class: bool = False) -> dict[str, Field]:
    """Return the fields of a method's Config.

    Args:
        method: Name of the method.
        from_class: Whether to import the class instead of reading fields.json. A method that is not in fields.json is
            always imported.
    """
    stored = _stored_fields()
    if from_class or f"train.{method}" not in stored:
        return fields_of(config_class(METHODS[method]))
    return _parse_fields(stored["train"] | stored[f"train.{method}"])


def lora_fields(from_class: bool = False) -> dict[str, Field]:
    """Return the fields of `model.lora`, the fields of peft.LoraConfig and shorter names that `models.load` reads.

    Args:
        from_class: Whether to import the class instead of reading fields.json.
    """
    if not from_class:
        return _parse_fields(_stored_fields()["model.lora"])
    from peft import LoraConfig

    aliases = {"alpha": Field(int, 8), "dropout": Field(float, 0.0), "init_lora_weights": Field(bool | str, True)}
    return fields_of(LoraConfig) | aliases


def methods_with_option(name: str) -> list[str]:
    """Return the methods in fields.json that have their own field `name`, or another default of it than the rest."""
    return [method for method in METHODS if name in _stored_fields().get(f"train.{method}", {})]


def is_outdated() -> bool:
    """Return whether an installed package is newer than fields.json, and may have fields that are not in it."""
    return any(Version(version(name)) > Version(known) for name, known in _stored_fields()["versions"].items())


@cache
def _stored_fields() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def _parse_fields(stored: Mapping[str, Any]) -> dict[str, Field]:
    """Parse fields in the format of fields.json."""
    fields = {}
    for name, (kinds, default) in stored.items():
        union = tuple(TYPES[kind] if isinstance(kind, str) else Literal[tuple(kind)] for kind in kinds)
        fields[name] = Field(Union[union], default)  # noqa: UP007
    return fields


def join_key(key: str, name: object) -> str:
    """Return `key.name`, or `name` at the top level."""
    return f"{key}.{name}" if key else str(name)


def _no_hint(_: str) -> None:
    """Return no hint for a key that does not exist."""


def build_kwargs(fields: Fields, values: Any, key: str, where: Where, key_hint: KeyHint = _no_hint) -> dict[str, Any]:
    """Validate a mapping, and convert its values to the types of the fields.

    Args:
        fields: The valid keys.
        values: The mapping.
        key: Dotted key of the mapping.
        where: Function that returns the location of a dotted key.
        key_hint: Function that returns what to write instead of a dotted key that does not exist.

    Returns:
        The keyword arguments for the class with the fields.

    Raises:
        InputError: For an unknown key, a value of another type, and a missing key.
    """
    if not isinstance(values, dict):
        problem = f"must be a mapping of keys to values, not {_format_yaml(values)}"
        raise InputError(f"{where(key)}: {key or 'the recipe'} {problem}")
    # unknown keys first, since they often cause wrong types
    for name in values:
        if name not in fields:
            full = join_key(key, name)
            problem = f"unknown {'key' if key else 'section'} {full}{name_hint(str(name), fields)}"
            if replacement := key_hint(full):
                problem = f"{full} does not exist: {replacement}"
            raise InputError(f"{where(full)}: {problem}")
    arguments = {
        name: _convert(value, fields[name].kind, join_key(key, name), where, key_hint) for name, value in values.items()
    }
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise InputError(f"{where(key)}: {join_key(key, name)} is missing")
    return arguments


def _convert(value: object, annotation: object, key: str, where: Where, key_hint: KeyHint) -> Any:
    """Convert a value to the type of an annotation, such as a text to a number and a mapping to a dataclass.

    Raises:
        InputError: For a value that cannot be converted.
    """
    kinds = union_members(annotation)
    # sections, and lists and dictionaries of sections
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            if issubclass(kind, OptionKind):
                return value  # validated by its group
            return kind(**build_kwargs(fields_of(kind), value, key, where, key_hint))
        if typing.get_origin(kind) is list and isinstance(value, list):
            (item,) = typing.get_args(kind)
            if dataclasses.is_dataclass(item):
                return [_convert(entry, item, join_key(key, i), where, key_hint) for i, entry in enumerate(value)]
        if typing.get_origin(kind) is dict and isinstance(value, dict):
            item = typing.get_args(kind)[1]
            if dataclasses.is_dataclass(item):
                if invalid := [name for name in value if not isinstance(name, str) or not name.strip()]:
                    raise InputError(f"{where(key)}: names in {key} must be non-empty strings, not {invalid[0]!r}")
                return {
                    name: _convert(entry, item, join_key(key, name), where, key_hint) for name, entry in value.items()
                }
    try:
        converted = _coerce(value, kinds)
        if isinstance(converted, int) and converted.bit_length() > 63:
            raise InputError(f"{where(key)}: {key} must be below 2**63, not {short_repr(converted)}")
        return converted
    except ValidationError:
        hint = ""
        section = next(filter(dataclasses.is_dataclass, kinds), None)
        if isinstance(value, str):
            hint = name_hint(value, [str(option) for kind in kinds for option in choices(kind)], list_valid=False)
            # a text in place of a section is probably the section's first key
            if section and not hint:
                hint = f". Use {{{dataclasses.fields(section)[0].name}: {value}}}"
        problem = f"{key} must be {_describe_types(kinds)}, not {_format_yaml(value)}{hint}"
        raise InputError(f"{where(key)}: {problem}") from None


def _coerce(value: object, kinds: tuple[Any, ...]) -> Any:
    """Convert a value with Pydantic's lax rules.

    In contrast to Pydantic, true is never 1, and a text that can be parsed as a number is one if a number is allowed.
    """
    allows_bool = any(k in (bool, Any, object) or True in choices(k) or False in choices(k) for k in kinds)
    if isinstance(value, bool) and not allows_bool:
        kinds = tuple(k for k in kinds if k not in (int, float))
    elif isinstance(value, str):
        for simple in (k for k in (int, float, bool) if k in kinds):
            try:
                return TypeAdapter(simple).validate_python(value)
            except ValidationError:
                continue
    # in a list, since pydantic accepts no config for a single dataclass
    kind: Any = types.GenericAlias(list, (Union[kinds or (Literal["nothing"],)],))  # noqa: UP007
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # an annotation without a schema is not checked
        return value
    return adapter.validate_python([value])[0]


def union_members(annotation: object) -> tuple[Any, ...]:
    """Return the members of a union. `SomeEnum | str`, as in TrainingArguments, only allows values of the enum."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return tuple(k for k in kinds if k is not str) if any(isinstance(k, EnumMeta) for k in kinds) else kinds


def choices(kind: object) -> list[Any]:
    """Return the values that an enum or a Literal allows, or none for another type."""
    if isinstance(kind, EnumMeta):
        return [member.value for member in typing.cast(Any, kind)]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def _describe_types(kinds: tuple[Any, ...]) -> str:
    """Describe the allowed types in words."""
    words = [str(option) for kind in kinds for option in choices(kind)]
    if len(words) > 12:
        words = [f"one of {len(words)} names"]
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        arguments = typing.get_args(kind)
        word = _TYPE_NAMES.get(origin, getattr(origin, "__name__", ""))
        if dataclasses.is_dataclass(origin):
            word = "a mapping"
        if origin is list and arguments:
            word += f", each item {_describe_types(union_members(arguments[0]))}"
        elif origin is dict and arguments and arguments[1] is not Any:
            word += f", each value {_describe_types(union_members(arguments[1]))}"
        words += [] if choices(kind) else [word or str(origin)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _format_yaml(value: object) -> str:
    """Return a shortened representation of a value, with YAML's null, true and false."""
    return {"None": "null", "True": "true", "False": "false"}.get(short_repr(value), short_repr(value))
