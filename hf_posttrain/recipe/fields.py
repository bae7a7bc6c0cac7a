"""Which keys a recipe's sections have, of which types, and a mapping checked against them.

A key is dotted (`data.train.0.path`); `where(key)` says its place ("recipes/kto.yaml:12" or "command line").
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
Advice = Callable[[str], str | None]

FILE = Path(__file__).with_name("fields.json")
"""{"versions": of the packages that it was made with, "train": fields of every method, "train.sft": SFT's own, ...,
"model.lora": ...}. A field is [types, default]; a type is a name of `TYPES`, or a list of the values that are allowed.
`make fields` writes it."""
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
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


class Field(NamedTuple):
    """A key."""

    kind: Any  # its type, an annotation
    default: Any = dataclasses.MISSING  # of a key that must be given


Fields = Mapping[str, Field]


def fields_of(dataclass_type: Any) -> dict[str, Field]:
    """The fields that a dataclass is made with, without those that are no keys (`of_python`, or `hidden`). One that
    HfArgumentParser takes without a value (`--fsdp`), for which it becomes `const`, takes true and false too.
    """
    hints = typing.get_type_hints(dataclass_type)
    switches = [f.name for f in dataclasses.fields(dataclass_type) if f.metadata.get("const") is True]
    hints |= {name: bool | hints[name] for name in switches}
    return {
        f.name: Field(hints[f.name], f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(dataclass_type)
        if f.init and not f.metadata.get("hidden") and f.name not in getattr(dataclass_type, "of_python", ())
    }


def train_fields(method: str, imported: bool = False) -> dict[str, Field]:
    """The fields of the method's Config. imported: from the class itself, as for a method that fields.json lacks."""
    stored = _stored()
    if imported or f"train.{method}" not in stored:
        return fields_of(config_class(METHODS[method]))
    return _read(stored["train"] | stored[f"train.{method}"])


def lora_fields(imported: bool = False) -> dict[str, Field]:
    """The fields of `model.lora`: those of peft.LoraConfig, some under friendlier names, which `models.load` reads."""
    if not imported:
        return _read(_stored()["model.lora"])
    from peft import LoraConfig

    friendly = {"alpha": Field(int, 8), "dropout": Field(float, 0.0), "init_lora_weights": Field(bool | str, True)}
    return fields_of(LoraConfig) | friendly


def methods_with_option(name: str) -> list[str]:
    """The methods of fields.json that have a field `name` of their own, or with another default than others."""
    return [method for method in METHODS if name in _stored().get(f"train.{method}", {})]


def is_outdated() -> bool:
    """Is an installed package newer than fields.json, so that it may have fields that are not there?"""
    return any(Version(version(name)) > Version(known) for name, known in _stored()["versions"].items())


@cache
def _stored() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def _read(stored: Mapping[str, Any]) -> dict[str, Field]:
    """Fields from their form in fields.json."""
    fields = {}
    for name, (kinds, default) in stored.items():
        union = tuple(TYPES[kind] if isinstance(kind, str) else Literal[tuple(kind)] for kind in kinds)
        fields[name] = Field(Union[union], default)  # noqa: UP007
    return fields


def join_key(key: str, name: object) -> str:
    """`key.name`, or `name` at the top."""
    return f"{key}.{name}" if key else str(name)


def build_kwargs(
    fields: Fields, values: Any, key: str, where: Where, advice: Advice = lambda key: None
) -> dict[str, Any]:
    """The keyword arguments that `values` gives for `fields`, checked and of their types.

    `advice(key)` says what to write instead of a dotted key that does not exist. Raises InputError with place and key
    for an unknown name, a wrong type and a missing name.
    """
    if not isinstance(values, dict):
        problem = f"must be a mapping of keys to values, not {_in_yaml(values)}"
        raise InputError(f"{where(key)}: {key or 'the recipe'} {problem}")
    # unknown names first: a wrong type often follows from one
    for name in values:
        if name not in fields:
            full = join_key(key, name)
            problem = f"unknown {'key' if key else 'section'} {full}{name_hint(str(name), fields)}"
            if instead := advice(full):
                problem = f"{full} does not exist: {instead}"
            raise InputError(f"{where(full)}: {problem}")
    built = {
        name: _typed(value, fields[name].kind, join_key(key, name), where, advice) for name, value in values.items()
    }
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise InputError(f"{where(key)}: {join_key(key, name)} is missing")
    return built


def _typed(value: object, annotation: object, key: str, where: Where, advice: Advice) -> Any:
    """`value` as the annotation wants it: numbers from texts too, a dataclass from a mapping. Raises InputError."""
    kinds = union_members(annotation)
    # sections, and lists of them, have keys of their own
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            if issubclass(kind, OptionKind):
                return value  # checked by its group
            return kind(**build_kwargs(fields_of(kind), value, key, where, advice))
        if typing.get_origin(kind) is list and isinstance(value, list):
            (item,) = typing.get_args(kind)
            if dataclasses.is_dataclass(item):
                return [_typed(each, item, join_key(key, i), where, advice) for i, each in enumerate(value)]
        if typing.get_origin(kind) is dict and isinstance(value, dict):
            item = typing.get_args(kind)[1]
            if dataclasses.is_dataclass(item):
                if odd := [name for name in value if not isinstance(name, str) or not name.strip()]:
                    raise InputError(f"{where(key)}: {key}: {odd[0]!r} is no name: write a text")
                return {name: _typed(each, item, join_key(key, name), where, advice) for name, each in value.items()}
    try:
        coerced = _coerced(value, kinds)
        if isinstance(coerced, int) and coerced.bit_length() > 63:
            raise InputError(f"{where(key)}: {key} must be below 2**63, not {short_repr(coerced)}")
        return coerced
    except ValidationError:
        hint = ""
        section = next(filter(dataclasses.is_dataclass, kinds), None)
        if isinstance(value, str):
            hint = name_hint(value, [str(option) for kind in kinds for option in choices(kind)], list_valid=False)
            # a text where a section is wanted is meant for the section's first key
            if section and not hint:
                hint = f"; write {{{dataclasses.fields(section)[0].name}: {value}}}"
        problem = f"{key} must be {_expected(kinds)}, not {_in_yaml(value)}{hint}"
        raise InputError(f"{where(key)}: {problem}") from None


def _coerced(value: object, kinds: tuple[Any, ...]) -> Any:
    """Pydantic's lax conversion, but true is never 1, and a text that reads as a number is one where one may stand."""
    switch = any(k in (bool, Any, object) or True in choices(k) or False in choices(k) for k in kinds)
    if isinstance(value, bool) and not switch:
        kinds = tuple(k for k in kinds if k not in (int, float))
    elif isinstance(value, str):
        for simple in (k for k in (int, float, bool) if k in kinds):
            try:
                return TypeAdapter(simple).validate_python(value)
            except ValidationError:
                continue
    # in a list, since pydantic takes no config for a lone dataclass
    kind: Any = types.GenericAlias(list, (Union[kinds or (Literal["nothing"],)],))  # noqa: UP007
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # an annotation that pydantic has no schema for is not checked
        return value
    return adapter.validate_python([value])[0]


def union_members(annotation: object) -> tuple[Any, ...]:
    """The members of a union. `SomeEnum | str`, as in TrainingArguments, means the values of the enum alone."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return tuple(k for k in kinds if k is not str) if any(isinstance(k, EnumMeta) for k in kinds) else kinds


def choices(kind: Any) -> list[Any]:
    """The values that an enum or a Literal allows; none for another type."""
    if isinstance(kind, EnumMeta):
        return [member.value for member in typing.cast(Any, kind)]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def _expected(kinds: tuple[Any, ...]) -> str:
    """What may stand there, in words."""
    words = [str(option) for kind in kinds for option in choices(kind)]
    if len(words) > 12:
        words = [f"one of {len(words)} names"]
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        arguments = typing.get_args(kind)
        word = "a mapping" if dataclasses.is_dataclass(origin) else _WORDS.get(origin, getattr(origin, "__name__", ""))
        if origin is list and arguments:
            word += f", each item {_expected(union_members(arguments[0]))}"
        elif origin is dict and arguments and arguments[1] is not Any:
            word += f", each value {_expected(union_members(arguments[1]))}"
        words += [] if choices(kind) else [word or str(origin)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _in_yaml(value: object) -> str:
    """A value as a message shows it, as YAML has it where that differs from Python."""
    return {"None": "null", "True": "true", "False": "false"}.get(short_repr(value), short_repr(value))
