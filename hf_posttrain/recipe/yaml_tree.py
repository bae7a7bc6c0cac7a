"""A YAML file with overrides, as a plain tree and the place of each dotted key. A duplicate key is an error."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, path_hint
from .fields import join_key

# Kind of scalar -> the texts that are one, and their first letters: those of YAML 1.2, in which 5e-7 is a float and
# `no` a text; PyYAML has 1.1
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
OVERRIDE = re.compile(r"\w+(\.[\w-]+)*=")  # how section.key=value begins


class _Loader(yaml.SafeLoader):
    """With the plain scalars of YAML 1.2 alone."""

    yaml_implicit_resolvers: dict = {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would take for something else than a text, and repeats instead of aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_pattern, _first) in _PLAIN_SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)


def read_tree(path: Path, overrides: Iterable[str] = ()) -> tuple[Any, dict[str, str]]:
    """Read a YAML file and apply `section.key=value` overrides; returns its value and {dotted key: place}.

    A place is "recipes/kto.yaml:12" or "command line". Raises InputError, in one line, for a missing or unreadable
    file, a syntax error, a duplicate key, and an override that has another form or leads nowhere.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; a recipe is a YAML file") from None
    except (FileNotFoundError, NotADirectoryError):
        hint = path_hint(path) if path.parent.is_dir() else f": there is no folder {path.parent}"
        raise InputError(f"no recipe {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from None
    tree, places = _parse(text, lambda line: f"{path}:{line}")
    places[""] = str(path)
    for override in overrides:
        key, _, value = override.partition("=")
        if not OVERRIDE.match(override):
            raise InputError(f"command line: {override!r} is not section.key=value, such as train.learning_rate=5e-7")
        parsed, _ = _parse(value, lambda _: f"command line: {override}")  # noqa: B023 (called at once)
        if "#" in value and "#" not in str(parsed):
            raise InputError(f"command line: {override}: behind # is a comment: quote the value, {key}='\"{value}\"'")
        if tree and not isinstance(tree, dict):
            break  # no recipe: its reader says so
        tree = _assign(tree, key.split("."), parsed)
        # what stood below the key is gone; sections that the override has made are of the command line too
        places = {known: place for known, place in places.items() if not known.startswith(f"{key}.")}
        places[key] = "command line"
        while "." in key:
            key = key.rpartition(".")[0]
            places.setdefault(key, "command line")
    return tree, places


def write_tree(tree: object) -> str:
    """`tree` as YAML that `read_tree` (and any YAML 1.1 reader) reads back as the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def place_of(places: dict[str, str], key: str) -> str:
    """Where a key stands, or the nearest key above it; `places[""]` is the file."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, "recipe")


def _parse(text: str, place: Callable[[int], str]) -> tuple[Any, dict[str, str]]:
    """The value of one YAML document and {dotted key: place(line)}."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        if (node := loader.get_single_node()) is None:
            return None, {}
        _note_lines(node, "", place, lines, ())
        return loader.construct_document(node), {key: place(line) for key, line in lines.items()}
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML's errors differ in where they have line and problem; int() and recursion have none
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        context = f" {said}" if (said := getattr(error, "context", None)) else ""
        hint = "; a text with {{ in it wants quotes" if "{{" in text else ""
        where = place(mark.line + 1 if mark else 1)
        raise InputError(f"{where}: YAML syntax error{context}: {problem}{hint}") from None


def _note_lines(node: yaml.Node, key: str, place: Callable[[int], str], lines: dict[str, int], above: tuple) -> None:
    """Add the line of every key below `node`, which is that of `key`; `above` are the nodes around it."""
    if any(node is parent for parent in above):
        raise InputError(f"{place(node.start_mark.line + 1)}: {key} contains itself")
    _check_tag(node, place)
    if isinstance(node, yaml.MappingNode):
        for name, _ in node.value:
            _check_tag(name, place)
        children = [(name.value, name, child) for name, child in node.value]
    else:  # a list, whose items are numbered, or a scalar
        children = [(n, child, child) for n, child in enumerate(node.value if isinstance(node.value, list) else [])]
    for name, start, child in children:
        full = join_key(key, name)
        line = start.start_mark.line + 1
        if full in lines:
            raise InputError(f"{place(line)}: duplicate key {full} (first in line {lines[full]})")
        lines[full] = line
        _note_lines(child, full, place, lines, (*above, node))


def _check_tag(node: yaml.Node, place: Callable[[int], str]) -> None:
    """Refuse a tag such as `!!timestamp x`: PyYAML would fail at it, or make what is no plain value."""
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    kinds = [name for name in (kind, "int" * (kind == "float")) if name in _PLAIN_SCALARS]  # !!float 3 is 3.0
    plain = any(re.fullmatch(_PLAIN_SCALARS[name][0], str(node.value)) for name in kinds)
    if not plain and kind not in ("str", "seq", "map"):
        tag = kind if kind.startswith("!") else f"!!{kind}"
        raise InputError(f"{place(node.start_mark.line + 1)}: the tag {tag} is not read for such a value: drop it")


def _assign(tree: object, names: Sequence[str], value: object, key: str = "") -> Any:
    """A copy of `tree` with `value` at the path `names`; mappings that are missing or null on the way are made."""
    if not names:
        return value
    name = names[0]
    rest = names[1:]
    if isinstance(tree, list):
        if not (name.isdigit() and int(name) < len(tree)):
            say = f"{key}.{{0..{len(tree) - 1}}}" if tree else "its whole value"
            raise InputError(f"command line: {key} is a list of {len(tree)}: set {say}, not {key}.{name}")
        index = int(name)
        return [*tree[:index], _assign(tree[index], rest, value, join_key(key, name)), *tree[index + 1 :]]
    if not isinstance(tree, dict | None):
        raise InputError(
            f"command line: {join_key(key, name)} cannot be set, {key} is {tree!r}: set {key} to a mapping"
        )
    tree = tree or {}
    return {**tree, name: _assign(tree.get(name), rest, value, join_key(key, name))}
