"""Groups of options. One option of a Config holds all options of a component, such as the sampler.

A group with several kinds has a selector, the key that names the kind. Such a group is written as the name of a kind
(`sampler: policy`) or as a mapping (`sampler: {kind: vllm_server, base_url: ...}`), and each kind has its own options.
A group without a selector has one kind and is written as a mapping of options. A Config holds an `OptionKind`, an
instance of the class of the selected kind.
"""

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml
from pydantic import TypeAdapter

from ..errors import InputError, name_hint, short_repr
from ..options import OptionValues
from .limits import Limit, Problem

_TYPE_WORDS: dict[object, str] = {
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
    """The options of a group for one kind, such as those of the sampler vllm_server. Subclasses are frozen dataclasses.

    Attributes:
        selector: Key that names the kind, empty for a group of one kind.
        kind: Name of this kind.
        limits: Limits of numeric options.
        implementation: `module:name` of the class with these options, in a subpackage of hf_posttrain.
    """

    selector: ClassVar[str] = "kind"
    kind: ClassVar[str] = ""
    limits: ClassVar[Mapping[str, Limit]] = {}
    implementation: ClassVar[str] = ""

    def load(self) -> Any:
        """Import the implementation."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(f"..{module}", __package__), name)

    def to_dict(self) -> dict[str, Any]:
        """Return the group as a mapping, as a recipe may have it."""
        name = {self.selector: self.kind} if self.selector else {}
        return name | dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the group as a recipe may have it: the name of its kind and the options that are not at defaults."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        if self.selector and not changed:
            return self.kind
        name = {self.selector: self.kind} if self.selector else {}
        return "{" + ", ".join(f"{option}: {value}" for option, value in (name | changed).items()) + "}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that the results of a run depend on."""
        return self.to_dict()


class OptionGroup:
    """The kinds of a group.

    Args:
        kinds: The kinds.
        optional: Whether the option may be None. If not, the first kind is the default, and the kind of a mapping
            without the selector.
    """

    def __init__(self, *kinds: type[OptionKind], optional: bool = False) -> None:
        self.kinds = {kind.kind: kind for kind in kinds}
        self.selector = kinds[0].selector
        self.optional = optional

    def problems(self, key: str, value: object) -> Iterator[Problem]:
        """Yield the problems of a group's value.

        Args:
            key: Name of the group. The names of a problem are those of the option, `key.option`, and of the group.
            value: Value of the group.
        """
        if value is None and self.optional:
            return
        mapping = self.as_mapping(value)
        if mapping is None:
            yield (key,), f"{key} must be {self._expected()}, not {short_repr(value)}"
            return
        if self.optional and self.selector and self.selector not in mapping:
            yield (key,), f"{key} requires {key}.{self.selector}, which is one of {', '.join(self.kinds)}"
            return
        has_kind = self.selector in mapping
        name = mapping.pop(self.selector, next(iter(self.kinds)))
        if not isinstance(name, str) or name not in self.kinds:
            hint = name_hint(str(name), self.kinds, list_valid=False)
            full_name = f"{key}.{self.selector}" if isinstance(value, Mapping) else key
            yield (f"{key}.{self.selector}", key), f"{full_name}={name!r} is not one of {', '.join(self.kinds)}{hint}"
            return
        yield from self._option_problems(key, mapping, self.kinds[name], has_kind)

    def _option_problems(
        self, key: str, mapping: Mapping[str, Any], kind: type[OptionKind], has_kind: bool
    ) -> Iterator[Problem]:
        """Yield the problems of the options of a kind.

        Args:
            key: Name of the group.
            mapping: The options.
            kind: The kind.
            has_kind: Whether the value of the group names the kind.
        """
        options = {option.name: option for option in dataclasses.fields(kind)}
        types = typing.get_type_hints(kind)
        of_kind = f" of {self.selector} {kind.kind}" if self.selector else ""
        for option, option_value in mapping.items():
            full_name = f"{key}.{option}"
            if option not in options:
                owners = self.kinds_with_option(option)
                default = "" if has_kind or not self.selector else ", the default"
                hint = name_hint(str(option), options)
                if owners:
                    hint = f". Set {key}.{self.selector}: {' or '.join(owners)}, or remove it"
                yield (full_name, key), f"{full_name} is not an option{of_kind}{default}{hint}"
                continue

            try:
                value = _converted(option_value, types[option])
            except ValueError:
                expected = describe_type(types[option])
                yield (full_name, key), f"{full_name} must be {expected}, not {short_repr(option_value)}"
                continue

            limit = kind.limits.get(option)
            if limit and isinstance(value, int | float) and not limit.is_valid(value):
                yield (full_name, key), f"{full_name}={value:.12g} {limit.message}"

        for option, field in options.items():
            if option not in mapping and field.default is dataclasses.MISSING:
                yield (key,), f"{key} requires {key}.{option}{of_kind}"

    def kinds_with_option(self, option: str) -> list[str]:
        """Return the names of the kinds that have an option."""
        return [name for name, kind in self.kinds.items() if option in _option_names(kind)]

    def build(self, key: str, value: object) -> Any:
        """Return the instance of a group's value, or None.

        Args:
            key: Name of the group.
            value: Value of the group.

        Raises:
            InputError: If the value has a problem.
        """
        if value is None and self.optional:
            return None
        for _, problem in self.problems(key, value):
            raise InputError(problem)
        mapping: Any = self.as_mapping(value)
        kind = self.kinds[mapping.pop(self.selector, next(iter(self.kinds)))]
        types = typing.get_type_hints(kind)
        return kind(**{option: _converted(option_value, types[option]) for option, option_value in mapping.items()})

    def restore(self, value: object) -> Any:
        """Return the instance of a value that another release has written, in order to compare it with a present one.

        Options that no longer exist are left out. A kind that no longer exists becomes the first kind, and a required
        option that is missing becomes an empty text.
        """
        if value is None and self.optional:
            return None
        mapping = self.as_mapping(value) or {}
        kind = self.kinds.get(mapping.get(self.selector, ""), next(iter(self.kinds.values())))
        required = {field.name: "" for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
        return kind(**required | {option: mapping[option] for option in _option_names(kind) if option in mapping})

    def as_mapping(self, value: object) -> dict[str, Any] | None:
        """Return the options of a group's value as a new mapping, or None for a value of an invalid type.

        A value from a command line is a string of YAML or JSON.
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
        """Return a description of the valid values."""
        first = next(iter(self.kinds.values()))
        if self.selector:
            return f"one of {', '.join(self.kinds)}, or a mapping such as {{{self.selector}: {first.kind}}}"
        return f"a mapping with the options {', '.join(_option_names(first))}"


def build_groups(values: OptionValues, groups: Mapping[str, OptionGroup]) -> OptionValues:
    """Return a copy of the options with instances of their groups."""
    built = {key: group.build(key, getattr(values, key)) for key, group in groups.items()}
    return SimpleNamespace(**vars(values) | built)


def _option_names(kind: type[OptionKind]) -> list[str]:
    return [option.name for option in dataclasses.fields(kind)]


def _converted(value: object, annotation: Any) -> Any:
    """Convert a value to the type of an option, for example a string of a number. Raise ValueError on failure."""
    members = typing.get_args(annotation) or (annotation,)
    if isinstance(value, bool) and bool not in members:
        raise ValueError("true and false are not numbers")
    return TypeAdapter(annotation).validate_python(value)


def describe_type(annotation: object) -> str:
    """Return the words for the type of an option, such as "a number or null"."""
    origin = typing.get_origin(annotation)
    if origin in (list, dict):
        return _TYPE_WORDS[origin]
    return " or ".join(describe_type(member) for member in typing.get_args(annotation)) or _TYPE_WORDS[annotation]
