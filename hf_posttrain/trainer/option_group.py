"""Groups of options: the value of one option of a Config holds the options of one concept, such as the sampler.

A group with several kinds has a selector, the key that names the kind. Such a group is written as the name of a kind
(`sampler: policy`) or as a mapping (`sampler: {kind: vllm_server, base_url: ...}`), and each kind has its own options.
A group without a selector has one kind and is written as a mapping of options. A Config holds an instance of the kind.
"""

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml
from pydantic import TypeAdapter, ValidationError

from ..errors import InputError, nearest, shown
from .limits import Limit, Problem

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of texts",
    dict: "a mapping",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class OptionKind:
    """The options of one kind of a group. Subclasses are frozen dataclasses."""

    selector: ClassVar[str] = "kind"
    """Key that names the kind, empty for a group of one kind."""
    kind: ClassVar[str] = ""
    """Name of this kind."""
    limits: ClassVar[Mapping[str, Limit]] = {}
    """Option -> limit of its number."""
    implementation: ClassVar[str] = ""
    """`module:name` of the class with these options, in a subpackage of hf_posttrain."""

    def load(self) -> Any:
        """Import the implementation."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(f"..{module}", __package__), name)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that the group is written as."""
        name = {self.selector: self.kind} if self.selector else {}
        return name | dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the value as a recipe may have it: the name of its kind, and the options that are set."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        if self.selector and not changed:
            return self.kind
        name = {self.selector: self.kind} if self.selector else {}
        return "{" + ", ".join(f"{option}: {value}" for option, value in (name | changed).items()) + "}"

    def described(self) -> dict[str, Any]:
        """Return what the results of a run depend on."""
        return self.to_dict()


class OptionGroup:
    """The kinds of a group.

    optional: whether the option may be None. Otherwise the first kind is the default, without its name as well.
    """

    def __init__(self, *kinds: type[OptionKind], optional: bool = False):
        self.kinds = {kind.kind: kind for kind in kinds}
        self.selector = kinds[0].selector
        self.optional = optional

    def problems(self, key: str, value: object) -> Iterator[Problem]:
        """Yield what is wrong with the value of the option `key`. Problems are of `key.option`, then of `key`."""
        if value is None and self.optional:
            return
        mapping = self.as_mapping(value)
        if mapping is None:
            yield (key,), f"{key} must be {self._expected()}, not {shown(value)}"
            return
        if self.optional and self.selector and self.selector not in mapping:
            yield (key,), f"{key} requires {key}.{self.selector}, which is one of {', '.join(self.kinds)}"
            return
        named = self.selector in mapping
        name = mapping.pop(self.selector, next(iter(self.kinds)))
        if not isinstance(name, str) or name not in self.kinds:
            hint = nearest(str(name), self.kinds, listed=False)
            full = f"{key}.{self.selector}" if isinstance(value, Mapping) else key
            yield (f"{key}.{self.selector}", key), f"{full}={name!r} is not one of {', '.join(self.kinds)}{hint}"
            return
        yield from self._of_options(key, mapping, self.kinds[name], named)

    def _of_options(
        self, key: str, mapping: Mapping[str, Any], kind: type[OptionKind], named: bool
    ) -> Iterator[Problem]:
        """Yield what is wrong with the options that are given for a kind. named: whether the kind is given too."""
        options = {option.name: option for option in dataclasses.fields(kind)}
        types = typing.get_type_hints(kind)
        of_kind = f" of {self.selector} {kind.kind}" if self.selector else ""
        for option, given in mapping.items():
            full = f"{key}.{option}"
            if option not in options:
                owners = self.kinds_with(option)
                default = "" if named or not self.selector else ", the default"
                hint = nearest(str(option), options)
                if owners:
                    hint = f". Set {key}.{self.selector}: {' or '.join(owners)}, or remove it"
                yield (full, key), f"{full} is not an option{of_kind}{default}{hint}"
                continue
            try:
                value = _converted(given, types[option])
            except ValidationError:
                yield (full, key), f"{full} must be {in_words(types[option])}, not {shown(given)}"
                continue
            limit = kind.limits.get(option)
            if limit and isinstance(value, int | float) and not limit.holds(value):
                yield (full, key), f"{full}={value:g} {limit.otherwise}"
        for option, field in options.items():
            if option not in mapping and field.default is dataclasses.MISSING:
                yield (key,), f"{key} requires {key}.{option}{of_kind}"

    def kinds_with(self, option: str) -> list[str]:
        """Return the names of the kinds that have an option."""
        return [name for name, kind in self.kinds.items() if option in _names(kind)]

    def build(self, key: str, value: object) -> Any:
        """Return the instance that the value of the option `key` stands for. Raises InputError if it has a problem."""
        if value is None and self.optional:
            return None
        for _, problem in self.problems(key, value):
            raise InputError(problem)
        mapping: Any = self.as_mapping(value)
        kind = self.kinds[mapping.pop(self.selector, next(iter(self.kinds)))]
        types = typing.get_type_hints(kind)
        return kind(**{option: _converted(given, types[option]) for option, given in mapping.items()})

    def restore(self, value: object) -> Any:
        """Return the instance of a value that another release has written, without the options that its kind lacks."""
        if value is None and self.optional:
            return None
        mapping = self.as_mapping(value) or {}
        kind = self.kinds.get(mapping.get(self.selector, ""), next(iter(self.kinds.values())))
        required = {field.name: "" for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
        return kind(**required | {option: mapping[option] for option in _names(kind) if option in mapping})

    def as_mapping(self, value: object) -> dict[str, Any] | None:
        """Return a new mapping of the options that a value gives, None for a value of another type.

        On a command line the value is a text of YAML or JSON.
        """
        if value is None:
            return {}
        if isinstance(value, OptionKind):
            return value.to_dict()
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = yaml.safe_load(value)
            except yaml.YAMLError:
                return None
        if isinstance(value, str) and self.selector:
            return {self.selector: value}
        return dict(value) if isinstance(value, Mapping) else None

    def _expected(self) -> str:
        first = next(iter(self.kinds.values()))
        if self.selector:
            return f"one of {', '.join(self.kinds)}, or a mapping such as {{{self.selector}: {first.kind}}}"
        return f"a mapping with the options {', '.join(_names(first))}"


def with_groups(values: Any, groups: Mapping[str, OptionGroup]) -> Any:
    """Return an object with the fields of a Config, whose groups are built."""
    built = {key: group.build(key, getattr(values, key)) for key, group in groups.items()}
    return SimpleNamespace(**vars(values) | built)


def _names(kind: type[OptionKind]) -> list[str]:
    return [option.name for option in dataclasses.fields(kind)]


def _converted(value: Any, annotation: Any) -> Any:
    """Return a value of the type of an option. Texts of numbers become numbers. Raises ValidationError."""
    members = typing.get_args(annotation) or (annotation,)
    if isinstance(value, bool) and bool not in members:
        raise ValidationError.from_exception_data("true and false are no numbers", [])
    return TypeAdapter(annotation).validate_python(value)


def in_words(annotation: Any) -> str:
    """Return what an option of this type may be, such as "a number or null"."""
    origin = typing.get_origin(annotation)
    if origin in (list, dict):
        return _WORDS[origin]
    return " or ".join(in_words(member) for member in typing.get_args(annotation)) or _WORDS[annotation]
