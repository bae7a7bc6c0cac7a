"""The conversion of one file of another tool to a recipe, and the parts that several tools have in common."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ..errors import InputError, short_repr
from ..methods import METHODS
from ..recipe.fields import train_fields
from ..trainer.renamed_options import RENAMED

Tree = dict[str, Any]
NO_COUNTERPART = "no counterpart"
MIXED_ROWS = "rows with messages and rows with prompts or texts cannot be mixed. Convert one kind to the other"
TRUNCATED = "texts that are longer than max_length are truncated, not split. Split them first"
UNPACKED_STREAM = "a stream cannot be packed"
_UNREAD_FORMATS = ("text", "arrow")
_FORMATS = ("json", "csv", "parquet", *_UNREAD_FORMATS)
"""Paths of `datasets.load_dataset` that only name the format of `data_files`."""


class MethodKey(TypedDict):
    """The key that names the method in the files of a tool."""

    key: str
    default: str
    values: dict[str, Tree]


class AdapterKey(TypedDict):
    """The key that says whether an adapter is trained, and its values that say so."""

    key: str
    default: NotRequired[str]
    values: list[str | bool]


class Tool(TypedDict):
    """A tool, as foreign_keys.yaml describes it."""

    title: str
    recognized_by: list[str]
    method: NotRequired[MethodKey]
    adapter: AdapterKey
    defaults: Tree
    adapter_defaults: Tree
    keys: dict[str, str]
    values: dict[str, dict[str | bool | int, Tree]]
    ignored: dict[str, str]
    replaced: dict[str, str]


@dataclass
class Conversion:
    """A recipe in the making."""

    tool: Tool
    file: Path
    """The file that is converted."""
    settings: Tree
    """Keys of the file that are not converted yet."""
    recipe: Tree = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Key that is not converted -> what to do."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Key that is not needed -> the reason."""

    def error(self, key: str, problem: str) -> InputError:
        """Return the error about the value of a key."""
        return InputError(f"--from: {self.file}: {key} {problem}")

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key, and return its value. A null counts as missing."""
        value = self.settings.pop(key, None)
        return default if value is None else value

    def take_number(self, key: str) -> float | None:
        """Remove a key whose value is a finite number, and return it, or None for a missing key."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.error(key, f"must be a number, not {short_repr(value)}")
        return number

    def take_count(self, key: str) -> int | None:
        """Remove a key whose value is a whole number of at least 1, and return it, or None for a missing key."""
        value = self.settings.get(key)
        number = self.take_number(key)
        if number is None:
            return None
        if number < 1 or number != int(number):
            raise self.error(key, f"must be a whole number of at least 1, not {short_repr(value)}")
        return int(number)

    def take_names(self, key: str) -> list[str]:
        """Remove a key whose value is a list of names, or one text with commas between them, and return the names."""
        value = self.take(key, [])
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error(key, f"must be names, not {short_repr(value)}")
        return [name.strip() for name in names if name.strip()]

    def take_entries(self, key: str) -> dict[str, Tree]:
        """Remove a key with data sets, and return {name of an entry in messages: its keys}. A text is a path."""
        value = self.take(key, [])
        entries = value if isinstance(value, list) else [value]
        result = {}
        for number, entry in enumerate(entries):
            name = f"{key}[{number}]" if len(entries) > 1 else key
            if not isinstance(entry, str | dict):
                raise self.error(name, f"must be a path or a mapping, not {short_repr(entry)}")
            result[name] = {"path": entry} if isinstance(entry, str) else dict(entry)
        return result

    def ignore(self, keys: Iterable[str], reason: str) -> None:
        """Remove the keys that the file has, and list them as not needed."""
        for key in [key for key in keys if key in self.settings]:
            self.take(key)
            self.ignored[key] = reason

    def note_rest(self, name: str, entry: Iterable[str]) -> None:
        """Note the keys of an entry that were not converted. The name is that of the entry in messages."""
        for key in entry:
            self.notes[f"{name}.{key}"] = NO_COUNTERPART

    @property
    def evaluates(self) -> bool:
        """Whether the file asks for evaluations during training."""
        return self.settings.get("eval_strategy", "no") != "no"

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key of the recipe. A key of a source is set in all sources of a list."""
        *sections, name = key.split(".")
        section: Any = self.recipe
        for part in sections:
            section = section.setdefault(part, {})
        for mapping in section if isinstance(section, list) else [section]:
            mapping[name] = value

    def get(self, key: str) -> Any:
        """Return the value of a dotted key of the recipe, or None."""
        *sections, name = key.split(".")
        section: Any = self.recipe
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        return section.get(name) if isinstance(section, dict) else None

    def target(self, key: str) -> str:
        """Return the dotted key of the recipe that a key of the file becomes."""
        return self.tool["keys"].get(key, f"train.{RENAMED.get(key, key)}")

    def set_sources(self, name: str, sources: list[Tree]) -> None:
        """Set `data.train` or `data.eval`."""
        if sources:
            self.set(f"data.{name}", sources[0] if len(sources) == 1 else sources)

    def split_sources(self, key: str) -> None:
        """Move the last rows of each source to `data.eval`, and note it.

        The key stays, and is noted later, for shares that are not whole percentages, for a number of rows of several
        sources, and for sources that are streams, have a limit or a slice, or are not converted completely.

        Args:
            key: Key with a share of the rows, or with their number.
        """
        size = self.settings.get(key)
        data = self.recipe["data"]
        sources = data.get("train")
        if isinstance(size, bool) or not isinstance(size, int | float) or not sources or "eval" in data:
            return
        given = _as_list(sources)
        splits = [str(source.get("split", "train")) for source in given]
        percent = round(100 * size, 6)
        is_share = 0 < percent < 100 and percent % 1 == 0
        is_number = size >= 1 and size % 1 == 0 and len(given) == 1 and "+" not in splits[0]
        is_part = any("limit" in source for source in given) or any("[" in split for split in splits)
        lacks_files = any(name.endswith("data_files") or name.startswith("dataset ") for name in self.notes)
        is_unknown = is_part or lacks_files or "all" in splits or self.settings.get("streaming") is True
        if is_unknown or not (is_share or is_number):
            return
        end = f"{100 - int(percent)}%" if is_share else f"-{int(size)}"
        held_out = []
        for source, split in zip(given, splits, strict=True):
            held_out.append({**source, "split": _slice(split, f"{end}:")})
            source["split"] = _slice(split, f":{end}")
        self.set_sources("eval", held_out)
        self.take(key)
        self.notes[key] = f"the last rows of each source are held out. {self.tool['title']} chooses them at random"

    def has_option(self, key: str) -> bool:
        """Return whether a key of the recipe exists: any outside of `train`, and the options of the method in it."""
        section, _, name = key.partition(".")
        return section != "train" or name.partition(".")[0] in train_fields(self.recipe["method"])

    def set_assistant_only_loss(self, choices: Mapping[str, bool | None]) -> None:
        """Train the turns of the assistant alone, if the method reads conversations and all sources ask for it.

        Args:
            choices: {name of a source in messages: whether the assistant's turns alone are trained}. The value is None
                for sources whose rows are not conversations.
        """
        if not self.has_option("train.assistant_only_loss"):
            return
        decided = {choice for choice in choices.values() if choice is not None}
        if decided == {True}:
            self.set("train.assistant_only_loss", True)
        for name in [name for name, choice in choices.items() if len(decided) > 1 and choice]:
            self.notes[name] = "all turns are trained, as those of another source. Train with one of them at a time"

    def take_new_adapter(self) -> bool:
        """Add the section of a new adapter, with the defaults of the tool, and return whether there is one.

        The options of an adapter are removed if none is trained, or if it is continued and has its own.
        """
        tool, settings = self.tool, self.settings
        wanted = tool["adapter"]
        has_adapter = settings.get(wanted["key"], wanted.get("default")) in wanted["values"]
        continued = next((key for key in settings if tool["keys"].get(key) == "model.adapter"), None)
        if continued or not has_adapter:
            reason = f"the adapter of {continued} has its own" if continued else "no adapter is trained"
            self.ignore([key for key in settings if _is_option_of_adapter(tool, key)], reason)
            return False
        self.recipe["model"]["lora"] = {}
        self.add_defaults(tool["adapter_defaults"])
        return True

    def missing(self, defaults: Mapping[str, Any]) -> Tree:
        """Return the defaults whose key of the recipe exists, and is not set in the file."""
        given = {self.target(key) for key in self.settings}
        targets = {key: self.target(key) for key in defaults}
        return {key: defaults[key] for key, ours in targets.items() if ours not in given and self.has_option(ours)}

    def add_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Add the defaults of the tool that the file does not set to the settings."""
        self.settings |= self.missing(defaults)

    def set_target_modules(self) -> None:
        """Set the layers of a new adapter from `lora_target_modules`."""
        modules = self.take("lora_target_modules")
        if modules in (["all"], ["all-linear"]):
            modules = "all-linear"
        if modules is not None:
            self.set("model.lora.target_modules", modules)
        else:
            problem = f"not set in the file. In {self.tool['title']}, PEFT chooses layers by the model"
            self.notes["lora_target_modules"] = f"{problem}. Here all linear ones are used"


def distillation_method(sampled: bool) -> str:
    """Return the method with a teacher, on answers that the student samples or on data."""
    return next(name for name, row in METHODS.items() if row.second == "teacher" and row.rows.sampled is sampled)


def take_source(conversion: Conversion, name: str, entry: Tree) -> Tree:
    """Return the source of an entry with the arguments of `datasets.load_dataset`, which are removed from it.

    Args:
        conversion: The conversion, which gets notes about files that are not converted.
        name: Name of the entry in messages.
        entry: The entry.
    """
    source: Tree = {"path": entry.pop("path", None)}
    key = f"{name}.data_files"
    given = entry.pop("data_files", None)
    if isinstance(given, dict):  # split -> files
        split, bracket, part = str(entry.pop("split", None) or "train").partition("[")
        if missing := [each for each in split.split("+") if each not in given]:
            raise conversion.error(key, f"must have files of the split {missing[0]}, not {short_repr(given)}")
        given = [file for each in split.split("+") for file in _as_list(given[each])]
        if part:  # the files are the rows to train on of their own source
            source["split"] = f"train{bracket}{part}"
    files = _as_list(given)
    if not all(isinstance(file, str) for file in files):
        raise conversion.error(key, f"must be files, not {short_repr(given)}")
    if files and source["path"] not in _FORMATS:
        conversion.notes[key] = f"all files of {source['path']} are read"
    elif source["path"] in _FORMATS and not files:
        raise conversion.error(key, f"must name the files of the format {source['path']}")
    elif files:
        if source["path"] in _UNREAD_FORMATS:
            conversion.notes[key] = f"the format {source['path']} is not read. Write the rows to a .jsonl file"
        first, *others = files
        source["path"] = first
        if others:
            conversion.notes[key] = f"only {first} was converted. Add a source for each file"
    for argument in ("name", "split"):
        if (value := entry.pop(argument, None)) is not None:
            source[argument] = value
    return source


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, one value as a list, and an empty list for a value that is null or empty."""
    return value if isinstance(value, list) else [value] if value else []


def _slice(split: str, part: str) -> str:
    """Return a part of each split in a sum of splits such as train+test."""
    return "+".join(f"{each}[{part}]" for each in split.split("+"))


def _is_option_of_adapter(tool: Tool, key: str) -> bool:
    """Return whether a key is an option of a new adapter."""
    ours = {tool["keys"].get(key, ""), *(new for value in tool["values"].get(key, {}).values() for new in value)}
    if "model.adapter" in ours:
        return False
    return key.startswith("lora_") or any(new.startswith("model.lora.") for new in ours)
