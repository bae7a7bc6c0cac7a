"""JSON Schema of a recipe, with which editors complete and check recipes.

It has every section and option with its type, default and help text, and accepts the names and types that
`read.load_recipe` accepts. Limits and combinations of options are left to `--check`.
"""

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ..methods import METHODS, config_class
from ..rollouts.options import SAMPLERS
from ..teachers.options import COMPARISON_OPTIONS, TeacherOptions
from ..trainer.config import PostTrainConfig
from ..trainer.method_spec import Method
from ..trainer.option_group import OptionGroup
from ..trainer.renamed_options import old_names
from ..trainer.rules import COMPILE_MODES, REPORTER_PACKAGES, trl_values_without_effect
from .fields import Field, choices, fields_of, lora_fields, train_fields, union_members
from .sections import Recipe

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that yaml-language-server supports completely."""
_NULL: Schema = {"type": "null"}
_HIDDEN: Schema = {"doNotSuggest": True}
"""For editors: keys that are accepted, and not offered."""
_TEXT: Schema = {"type": "string"}
_CHOICES = {
    "report_to": ("all", "none", *REPORTER_PACKAGES),
    "torch_compile_mode": COMPILE_MODES,
    "ddp_backend": (),  # torch has others than those that transformers lists
}
"""Values of options of transformers, in place of its own lists."""
_TYPES: dict[object, Schema] = {
    str: _TEXT,
    type(None): _NULL,
    dict: {"type": "object"},
    list: {"type": "array"},
    # also texts that are read as the type: 5e-7 is a text in YAML 1.1
    int: {
        "type": ["integer", "string"],
        "pattern": r"^\s*[-+]?\d+(_\d+)*(\.0+)?\s*$",
        "patternErrorMessage": "must be an integer",  # shown by editors
    },
    float: {
        "type": ["number", "string"],
        "pattern": r"^\s*[-+]?((\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?|[iI]nf(inity)?|[nN]a[nN])\s*$",
        "patternErrorMessage": "must be a number",
    },
    bool: {
        "type": ["boolean", "integer", "string"],
        "pattern": "^([tTyYfFnN01]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|[yY][eE][sS]|[nN][oO]|[oO][nN]|[oO][fF][fF])$",
        "patternErrorMessage": "must be true or false",
        "minimum": 0,
        "maximum": 1,
    },
}


def recipe_schema() -> Schema:
    """Return the JSON Schema of a recipe, with the options of each method."""
    root = _section(Recipe)
    sections = {kind.__name__: _section(kind) for kind in _sections(Recipe)}
    sections["lora"] = _mapping(lora_fields(from_class=True), _lora_help())
    for name in ("ModelSection", "TeacherSection"):
        lora = sections[name]["properties"]["lora"]
        sections[name]["properties"]["lora"] = lora | {"anyOf": [{"$ref": "#/definitions/lora"}, _NULL]}
    comparison = _section(TeacherOptions)["properties"]
    sections["TeacherSection"]["properties"] |= {name: comparison[name] for name in COMPARISON_OPTIONS}
    rounds = sections["RoundsSection"]["properties"]
    rounds["sampler"] = _group(SAMPLERS, rounds["sampler"])
    kinds = sections["JudgeSection"]["properties"]["by"]
    function_or_url = {"type": "string", "pattern": ":"}
    rounds["judge"] = _or(rounds["judge"], _any_of([{"enum": kinds["enum"]}, function_or_url]))
    rounds |= _old_names({"sampler": SAMPLERS}, rounds)
    root["properties"]["rounds"] = _or(root["properties"]["rounds"], {"type": "integer"})

    root["properties"]["train"] = _or(root["properties"]["train"], _NULL)
    shared = _section(PostTrainConfig)
    sections["train"] = {"properties": shared["properties"]}
    for name, method in METHODS.items():
        sections[f"train.{name}"] = _train(method, shared["properties"])
    methods = [
        {
            "if": {"properties": {"method": {"const": name}}, "required": ["method"]},
            "then": {"properties": {"train": {"anyOf": [{"$ref": f"#/definitions/train.{name}"}, _NULL]}}},
        }
        for name in METHODS
    ]
    head = {"$schema": DIALECT, "title": "Recipe of hf_posttrain"}
    return head | root | {"allOf": methods, "definitions": sections}


def _sections(kind: type) -> list[type]:
    """Return the dataclasses in the fields of a dataclass, and in theirs."""
    found: list[type] = []
    for field in fields_of(kind).values():
        for member in _leaves(field.kind):
            if dataclasses.is_dataclass(member) and isinstance(member, type) and member not in found:
                found += [member, *(other for other in _sections(member) if other not in found)]
    return found


def _leaves(annotation: object) -> list[object]:
    """Return the members of a union, and the items of its lists and the values of its dictionaries."""
    leaves: list[object] = []
    for kind in union_members(annotation):
        is_nested = typing.get_origin(kind) in (list, dict)
        leaves += [leaf for part in typing.get_args(kind) for leaf in _leaves(part)] if is_nested else [kind]
    return leaves


def _section(kind: type) -> Schema:
    """Return the schema of a dataclass: a section, a Config, or a kind of a group."""
    schema = _mapping(fields_of(kind), _help(kind))
    for field in dataclasses.fields(kind):
        if allowed := _CHOICES.get(field.name, field.metadata.get("choices")):
            schema["properties"][field.name] = _limit_texts(schema["properties"][field.name], allowed)
    return schema


def _limit_texts(schema: Schema, allowed: Iterable[str]) -> Schema:
    """Return a schema that accepts some texts in place of all texts."""
    if schema.get("type") == "string":
        kept = {key: value for key, value in schema.items() if key != "type"}
        return {"enum": [*allowed]} | kept
    if "anyOf" in schema:
        return schema | {"anyOf": [_limit_texts(member, allowed) for member in schema["anyOf"]]}
    return schema | ({"items": _limit_texts(schema["items"], allowed)} if "items" in schema else {})


def _train(method: Method, shared: Mapping[str, Schema]) -> Schema:
    """Return the schema of the section `train` of a method.

    Args:
        method: The method.
        shared: Options of all methods, which are referenced if the method has no other default.
    """
    section = _section(config_class(method))
    options = section["properties"]
    for name, group in method.groups.items():
        options[name] = _group(group, options[name])
    for name, option in options.items():
        if shared.get(name) == option:
            options[name] = {"$ref": f"#/definitions/train/properties/{name}"}
    options |= _old_names(method.groups, options)
    others = {name for other in METHODS for name in train_fields(other)}
    accepted = trl_values_without_effect(method.config_name)
    for name in sorted((others | accepted.keys()) - options.keys()):
        values = [value for value in accepted.get(name, ()) if value is not None]
        # null removes an option of another method
        null = [None] if name in others or None in accepted[name] else []
        options[name] = ({"enum": [*values, *null]} if values else _NULL) | _HIDDEN
    return section


def _old_names(groups: Mapping[str, OptionGroup], options: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schemas of old names of options, which are accepted for one release."""
    return {
        old: {"deprecated": True, "description": f"Use {new}."} | _HIDDEN
        for old, new in old_names(groups, options).items()
    }


def _mapping(fields: Mapping[str, Field], help_texts: Mapping[str, str]) -> Schema:
    """Return the schema of a mapping with some fields."""
    options = {name: _option(field, help_texts.get(name, "")) for name, field in fields.items()}
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    schema: Schema = {"type": "object", "properties": options, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _option(field: Field, help_text: str) -> Schema:
    """Return the schema of a field with its default and help text."""
    schema = dict(_type(field.kind))
    default = getattr(field.default, "value", field.default)  # of an enum
    if isinstance(default, str | int | float | list) or default is None:
        schema["default"] = default
    return schema | ({"description": help_text} if help_text else {})


def _type(annotation: object) -> Schema:
    """Return the schema of the values that are accepted for an annotation."""
    return _any_of([_member(kind) for kind in union_members(annotation)])


def _member(kind: Any) -> Schema:
    """Return the schema of a type that is no union."""
    if allowed := choices(kind):
        return {"enum": allowed}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        is_ours = kind.__module__.startswith(__package__.partition(".")[0])
        return {"$ref": f"#/definitions/{kind.__name__}"} if is_ours else {"type": "object"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if origin is tuple:
        items = [_type(argument) for argument in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return _TYPES.get(kind, {})


def _any_of(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of the values that one of several schemas accepts."""
    distinct: list[Schema] = []
    for schema in schemas:
        distinct += [part for part in schema.get("anyOf", [schema]) if part not in distinct]
    if {} in distinct:
        return {}
    # sorted, since typing returns the members of equal unions in the order in which one of them was first written
    return distinct[0] if len(distinct) == 1 else {"anyOf": sorted(distinct, key=json.dumps)}


def _or(option: Schema, schema: Schema) -> Schema:
    """Return the schema of an option that also accepts another schema."""
    notes = {key: value for key, value in option.items() if key in ("default", "description")}
    accepted = {key: value for key, value in option.items() if key not in notes}
    return _any_of([accepted, schema]) | notes


def _group(group: OptionGroup, option: Schema) -> Schema:
    """Return the schema of a group of options: the name of a kind, or a mapping with the options of a kind.

    Args:
        group: The group.
        option: Schema of the option, whose default and help text are kept.
    """
    kept = {key: option[key] for key in ("default", "description") if key in option}
    kinds = []
    names = []  # of a selector, kinds without required options
    for name, kind in group.kinds.items():
        schema = _section(kind)
        if group.selector:
            schema["properties"] = {group.selector: {"const": name}, **schema["properties"]}
            is_default = not group.optional and name == next(iter(group.kinds))
            if not schema.get("required"):
                names.append(name)
            schema["required"] = [*([] if is_default else [group.selector]), *schema.get("required", ())]
        kinds.append(schema)
    text = {"type": "string", "pattern": r"^\s*\{"}  # a mapping of the command line
    return _any_of([*([{"enum": names}] if names else []), *kinds, text, _NULL]) | kept


def _help(kind: type) -> dict[str, str]:
    """Return the help text of each field of a dataclass."""
    return {field.name: " ".join(str(field.metadata.get("help", "")).split()) for field in dataclasses.fields(kind)}


def _lora_help() -> dict[str, str]:
    """Return the help text of each option of `model.lora`."""
    from peft import LoraConfig

    texts = _help(LoraConfig)
    return texts | {"alpha": texts["lora_alpha"], "dropout": texts["lora_dropout"]}
