"""Strict fields: a mapping checked against a dataclass, name by name and type by type. It knows no section and no key.

    build(cls, values, key, where)  a mapping -> arguments of a dataclass: every name known, every value of its type
    typed(value, kind, key, where)  one value as its type annotation wants it

A key is dotted (`data.train.0.path`); `where(key)` says its place ("recipes/kto.yaml:12" or "command line").
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ..errors import InputError, nearest

Where = Callable[[str], str]
Advice = Callable[[str], str | None]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a mapping"}


def join(key: str, name: object) -> str:
    """`key.name`, or `name` at the top."""
    return f"{key}.{name}" if key else str(name)


def build(cls: type, values: Any, key: str, where: Where, advice: Advice = lambda key: None) -> dict[str, Any]:
    """The keyword arguments that `values` gives to the dataclass `cls`, checked and of the fields' types.

    `advice(key)` says what to write instead of a dotted key that does not exist. Fields whose metadata has `hidden` are
    not keys. Raises InputError with place and key for an unknown name, a wrong type and a missing name.
    """
    if not isinstance(values, dict):
        raise InputError(
            f"{where(key)}: {key or 'the recipe'} must be a mapping of keys to values, not {_shown(values)}"
        )
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("hidden")}
    for name in values:
        if name in known:
            continue
        place, full = where(join(key, name)), join(key, name)
        if instead := advice(full):
            raise InputError(f"{place}: {full} does not exist: {instead}")
        raise InputError(f"{place}: unknown {'key' if key else 'section'} {full}{nearest(str(name), known)}")
    built = {name: typed(value, hints[name], join(key, name), where, advice) for name, value in values.items()}
    for name, f in known.items():
        if name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"{where(key)}: {join(key, name)} is missing")
    return built


def typed(value: Any, kind: Any, key: str, where: Where, advice: Advice = lambda key: None) -> Any:
    """`value` as the annotation `kind` wants it; a dataclass is built from a mapping.

    Numbers and switches may be written as text. Raises InputError with place, key, what was expected and was given.
    """
    kinds = _kinds(kind)
    for member in kinds:
        if dataclasses.is_dataclass(member) and isinstance(member, type) and isinstance(value, dict):
            return member(**build(member, value, key, where, advice))
        if typing.get_origin(member) is list and isinstance(value, list):
            (item,) = typing.get_args(member)
            if dataclasses.is_dataclass(item):
                return [typed(each, item, join(key, i), where, advice) for i, each in enumerate(value)]
    try:
        return _coerced(value, kinds)
    except ValidationError:
        options = _options(kinds)
        hint = (nearest(value, options, listed=False) or _as_mapping(value, kinds)) if isinstance(value, str) else ""
        place = where(key)
        raise InputError(f"{place}: {key} must be {_expected(kinds)}, not {_shown(value)}{hint}") from None


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union. `SomeEnum | str`, as in TrainingArguments, means the values of the enum alone."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return tuple(k for k in kinds if k is not str) if any(map(_is_enum, kinds)) else kinds


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _coerced(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Pydantic's lax conversion, but true is never 1, and a text that reads as a number is one where one may stand."""
    switch = any(k in (bool, Any, object) or True in typing.get_args(k) or False in typing.get_args(k) for k in kinds)
    if isinstance(value, bool) and not switch:
        kinds = tuple(k for k in kinds if k not in (int, float))
    elif isinstance(value, str):
        for simple in (k for k in (int, float, bool) if k in kinds):
            try:
                return TypeAdapter(simple).validate_python(value)
            except ValidationError:
                continue
    kind: Any = types.GenericAlias(list, (Union[kinds or (Literal["nothing"],)],))  # noqa: UP007
    try:  # in a list, since pydantic takes no config for a lone dataclass
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # an annotation that pydantic has no schema for is not checked
        return value
    return adapter.validate_python([value])[0]


def _options(kinds: Iterable[Any]) -> list[str]:
    """The texts that may stand where only certain values may."""
    literals = [v for k in kinds if typing.get_origin(k) is Literal for v in typing.get_args(k)]
    return [str(v) for v in [*literals, *(m.value for k in kinds if _is_enum(k) for m in k)]]


def _as_mapping(value: str, kinds: tuple[Any, ...]) -> str:
    """The end of a message about a text where a section is wanted: its first key is what the text is meant for."""
    sections = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    return f"; write {{{dataclasses.fields(sections[0])[0].name}: {value}}}" if sections else ""


def _expected(kinds: tuple[Any, ...]) -> str:
    options = _options(kinds)
    words = options if len(options) <= 12 else [f"one of {len(options)} names"]
    for kind in kinds:
        if typing.get_origin(kind) is Literal or _is_enum(kind):
            continue
        origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is list:
            words.append(f"a list, each item {_expected(_kinds(arguments[0]))}" if arguments else "a list")
        elif origin is dict and arguments and arguments[1] is not Any:
            words.append(f"a mapping, each value {_expected(_kinds(arguments[1]))}")
        elif dataclasses.is_dataclass(origin):
            words.append("a mapping")
        else:
            words.append(
                "null" if origin is type(None) else _WORDS.get(origin, getattr(origin, "__name__", str(origin)))
            )
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _shown(value: Any) -> str:
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
