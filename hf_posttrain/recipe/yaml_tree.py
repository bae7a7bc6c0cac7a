"""Reader and writer of YAML files, with overrides and the location of each dotted key. Duplicate keys are errors."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, path_hint
from .fields import join_key

# Type of scalar -> its pattern and the possible first characters, as in YAML 1.2, in which 5e-7 is a float and `no` is
# a string. PyYAML implements YAML 1.1.
_PLAIN_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(0|[1-9][0-9]*)", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        [*"-+.0123456789"],
    ),
    "merge": (r"<<", ["<"]),
}
OVERRIDE = re.compile(r"\w+(\.[\w-]+)*=")
"""Start of section.key=value."""


class _Loader(yaml.SafeLoader):
    """Loader with the plain scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings which YAML 1.1 or 1.2 would read as another type, and writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that repeated values are written again."""
        return True


for _kind, (_pattern, _first) in _PLAIN_SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)


def read_tree(path: Path, overrides: Iterable[str] = ()) -> tuple[Any, dict[str, str]]:
    """Read a YAML file, and apply overrides.

    Args:
        path: The file.
        overrides: Texts of the form `section.key=value`.

    Returns:
        The value, and {dotted key: location}. A location is "recipes/kto.yaml:12" or "command line".

    Raises:
        InputError: For a missing or unreadable file, a syntax error, a duplicate key, and an invalid override.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise InputError(f"a recipe must be a YAML file, and {path} is a folder") from None
    except (FileNotFoundError, NotADirectoryError):
        hint = path_hint(path) if path.parent.is_dir() else f", since there is no folder {path.parent}"
        raise InputError(f"there is no recipe {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from None
    tree, locations = _parse(text, lambda line: f"{path}:{line}")
    locations[""] = str(path)
    for override in overrides:
        key, _, value = override.partition("=")
        if not OVERRIDE.match(override):
            problem = "must have the form section.key=value, such as train.learning_rate=5e-7"
            raise InputError(f"command line: {override!r} {problem}")
        parsed, _ = _parse(value, lambda _: f"command line: {override}")  # noqa: B023 (called at once)
        if "#" in value and "#" not in str(parsed):
            problem = f"the text after # is a comment. To include it, quote the value: {key}='\"{value}\"'"
            raise InputError(f"command line: {override}: {problem}")
        if tree and not isinstance(tree, dict):
            break  # not a recipe, which its reader reports
        tree = _assign(tree, key.split("."), parsed)
        # keys below the override are replaced, and sections that it creates belong to the command line as well
        locations = {known: location for known, location in locations.items() if not known.startswith(f"{key}.")}
        locations[key] = "command line"
        while "." in key:
            key = key.rpartition(".")[0]
            locations.setdefault(key, "command line")
    return tree, locations


def write_tree(tree: object) -> str:
    """Return a tree as YAML that `read_tree` and every YAML 1.1 reader read as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def location_of(locations: dict[str, str], key: str) -> str:
    """Return the location of a key, or of its closest parent with a location. `locations[""]` is the file."""
    while key and key not in locations:
        key = key.rpartition(".")[0]
    return locations.get(key, "recipe")


def _parse(text: str, location: Callable[[int], str]) -> tuple[Any, dict[str, str]]:
    """Return the value of one YAML document, and {dotted key: location(line)}."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        if (node := loader.get_single_node()) is None:
            return None, {}
        _record_lines(node, "", location, lines, ())
        return loader.construct_document(node), {key: location(line) for key, line in lines.items()}
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML's errors have line and problem in different attributes; errors of int() and of recursion have neither
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        context = getattr(error, "context", None)
        context = f" {context}" if context else ""
        hint = ". Put texts that contain {{ in quotes" if "{{" in text else ""
        where = location(mark.line + 1 if mark else 1)
        raise InputError(f"{where}: YAML syntax error{context}: {problem}{hint}") from None


def _record_lines(
    node: yaml.Node, key: str, location: Callable[[int], str], lines: dict[str, int], parents: tuple[yaml.Node, ...]
) -> None:
    """Add the line of every key below a node.

    Args:
        node: The node.
        key: Dotted key of the node.
        location: Function that returns the location of a line, for messages.
        lines: Dictionary to fill, dotted key -> line.
        parents: The nodes around this one.
    """
    if any(node is parent for parent in parents):
        raise InputError(f"{location(node.start_mark.line + 1)}: {key} contains itself")
    _check_tag(node, location)
    if isinstance(node, yaml.MappingNode):
        for name, _ in node.value:
            _check_tag(name, location)
        children = [(name.value, name, child) for name, child in node.value]
    else:  # the items of a list are numbered; a scalar has no children
        children = [(n, child, child) for n, child in enumerate(node.value if isinstance(node.value, list) else [])]
    for name, start, child in children:
        full = join_key(key, name)
        line = start.start_mark.line + 1
        if full in lines:
            raise InputError(f"{location(line)}: duplicate key {full} (first in line {lines[full]})")
        lines[full] = line
        _record_lines(child, full, location, lines, (*parents, node))


def _check_tag(node: yaml.Node, location: Callable[[int], str]) -> None:
    """Raise InputError for a tag such as `!!timestamp x`, with which PyYAML fails or returns no plain value."""
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    kinds = [name for name in (kind, "int" * (kind == "float")) if name in _PLAIN_SCALARS]  # !!float 3 is 3.0
    is_plain = any(re.fullmatch(_PLAIN_SCALARS[name][0], str(node.value)) for name in kinds)
    if not is_plain and kind not in ("str", "seq", "map"):
        tag = kind if kind.startswith("!") else f"!!{kind}"
        problem = f"the tag {tag} is not supported for this value. Remove it"
        raise InputError(f"{location(node.start_mark.line + 1)}: {problem}")


def _assign(tree: object, names: Sequence[str], value: object, key: str = "") -> Any:
    """Return a copy of a tree with a value at a path. Mappings on the path that are missing or null are created."""
    if not names:
        return value
    name = names[0]
    rest = names[1:]
    if isinstance(tree, list):
        if not (name.isdigit() and int(name) < len(tree)):
            target = f"{key}.{{0..{len(tree) - 1}}}" if tree else "the whole list"
            problem = f"{key}.{name} cannot be set, since {key} is a list of length {len(tree)}"
            raise InputError(f"command line: {problem}. Set {target}")
        index = int(name)
        return [*tree[:index], _assign(tree[index], rest, value, join_key(key, name)), *tree[index + 1 :]]
    if not isinstance(tree, dict | None):
        problem = f"{join_key(key, name)} cannot be set, since {key} is {tree!r}"
        raise InputError(f"command line: {problem}. Set {key} to a mapping")
    tree = tree or {}
    return {**tree, name: _assign(tree.get(name), rest, value, join_key(key, name))}
