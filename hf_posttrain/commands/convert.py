"""Conversion of the settings of Axolotl, LLaMA-Factory and TRL to a recipe, for `hf-posttrain init --from FILE`.

Names are in foreign_keys.yaml. This module converts what depends on several keys: the data, adapters, and intervals.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, short_repr
from ..methods import METHODS
from ..recipe.fields import train_fields
from ..recipe.read import suggest_key

Tree = dict[str, Any]
NO_COUNTERPART = "no counterpart"
EVALUATION = ("eval_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model")
"""Options that require rows to evaluate on."""


@dataclass
class Conversion:
    """A recipe in the making."""

    settings: Tree
    """Keys that are not converted yet."""
    folder: Path
    """Folder of the file, from which its paths start."""
    recipe: Tree = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Key without a counterpart -> what to do."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Key that is not needed -> the reason."""

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key, and return its value. A null counts as missing."""
        value = self.settings.pop(key, None)
        return default if value is None else value

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key of the recipe. A key of a source is set in all sources of a list."""
        *sections, name = key.split(".")
        section: Any = self.recipe
        for part in sections:
            section = section.setdefault(part, {})
        for mapping in section if isinstance(section, list) else [section]:
            mapping[name] = value


def convert(file: Path, method: str | None) -> tuple[str, Conversion]:
    """Return the name of the tool that a file belongs to, and the conversion of its settings.

    Args:
        file: YAML or JSON file of Axolotl, LLaMA-Factory or TRL.
        method: The method, which a file of TRL does not name.

    Raises:
        InputError: For a file that cannot be read or belongs to none of the tools, for a method that is missing or
            differs from that of the file, and for a method that does not exist here.
    """
    settings = _read(file)
    tool = next((t for t in _tables().values() if settings.keys() & {*t["recognized_by"]}), None)
    if tool is None:
        titles = ", ".join(table["title"] for table in _tables().values())
        keys = [key for table in _tables().values() for key in table["recognized_by"]]
        raise InputError(f"--from: {file} is no file of {titles}: it has none of the keys {', '.join(keys)}")
    conversion = Conversion(settings, file.parent)
    _set_method(conversion, tool, file, method)
    _convert_data(conversion, tool["title"])
    _convert_adapter(conversion, tool["title"])
    if not conversion.recipe["data"].get("eval"):
        for key in [key for key in conversion.settings if key in EVALUATION]:
            conversion.notes[key] = "requires rows to evaluate on. Set data.eval first"
            conversion.take(key)
    for key in [*conversion.settings]:
        _convert_key(conversion, tool, key)
    model = conversion.recipe["model"]
    for name, key in (("model", model.get("name_or_path")), ("data", conversion.recipe["data"].get("train"))):
        if not key:
            raise InputError(f"--from: {file} names no {name}. Add it, and convert again")
    conversion.recipe["model"] = {"name_or_path": model["name_or_path"], **model}  # first
    return tool["title"], conversion


@cache
def _tables() -> dict[str, Any]:
    """Return foreign_keys.yaml."""
    return yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))


def _read(file: Path) -> Tree:
    """Return the settings of a file, without those that are null."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--from: {file} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except yaml.YAMLError as error:
        raise InputError(f"--from: {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise InputError(f"--from: {file} must be a mapping of keys to values, not {short_repr(settings)}")
    # YAML 1.1 reads 1e-5 as a text
    is_number = re.compile(r"[-+]?\d+(\.\d*)?e[-+]?\d+", re.IGNORECASE).fullmatch
    return {
        str(key): float(value) if isinstance(value, str) and is_number(value) else value
        for key, value in settings.items()
        if value is not None
    }


def _set_method(conversion: Conversion, tool: Tree, file: Path, method: str | None) -> None:
    """Set the method, and the options that follow from the name of the method of the other tool."""
    found: Tree = {"method": method}
    if "method" in tool:
        key = tool["method"]["key"]
        value = conversion.take(key, tool["method"]["default"])
        supported = tool["method"]["values"]
        if value not in supported:
            names = ", ".join(supported)
            raise InputError(f"--from: {file}: {key}: {value} is not supported. The supported values are {names}")
        found = supported[value]
        if conversion.settings.get("reward_model") is True:
            found = {"method": next(name for name, row in METHODS.items() if row.head == "score")}
            conversion.take("reward_model")
    if found["method"] is None:
        raise InputError(f"--from: {file} does not name a method. Use hf-posttrain init METHOD --from {file}")
    if method not in (None, found["method"]):
        raise InputError(f"--from: {file} is for the method {found['method']}, not {method}. Remove {method}")
    conversion.recipe = {"method": found["method"], "model": {}, "data": {}, "train": {}}
    conversion.recipe["train"].update(found.get("train", {}))


def _convert_key(conversion: Conversion, tool: Tree, key: str) -> None:
    """Convert a key by the tables of its tool, or by its name."""
    value = conversion.take(key)
    method = conversion.recipe["method"]
    chosen = tool["values"].get(key, {})
    if isinstance(value, str | bool | int) and value in chosen and type(value) in map(type, chosen):
        for ours, new in chosen[value].items():
            conversion.set(ours, new)
    elif key in tool["keys"]:
        ours = tool["keys"][key]
        name = ours.partition(".")[2]
        if ours.startswith("train.") and name not in train_fields(method):
            conversion.notes[key] = suggest_key(method, ours) or NO_COUNTERPART
        else:
            conversion.set(ours, value)
    elif key in tool["ignored"]:
        conversion.ignored[key] = tool["ignored"][key]
    elif key in tool["replaced"]:
        conversion.notes[key] = tool["replaced"][key]
    elif key in train_fields(method):
        conversion.set(f"train.{key}", value)
    else:
        conversion.notes[key] = suggest_key(method, f"train.{key}") or NO_COUNTERPART


# ---- data


def _convert_data(conversion: Conversion, title: str) -> None:
    """Set the data section, and the options of the rows."""
    if title == "LLaMA-Factory":
        _convert_named_datasets(conversion)
        return
    train = [_source(conversion, "datasets", entry) for entry in _entries(conversion.take("datasets"))]
    evaluation = [_source(conversion, "test_datasets", entry) for entry in _entries(conversion.take("test_datasets"))]
    for name, sources in (("train", train), ("eval", evaluation)):
        if sources:
            conversion.set(f"data.{name}", sources[0] if len(sources) == 1 else sources)
    split = conversion.take("dataset_test_split")
    if split and (path := conversion.settings.get("dataset_name")):
        evaluation_source = {"path": path, "name": conversion.settings.get("dataset_config"), "split": split}
        conversion.set("data.eval", {key: value for key, value in evaluation_source.items() if value is not None})
    for word, every in (("saves", "save"), ("evals", "eval")):  # Axolotl's; a share of all steps here
        if count := conversion.take(f"{word}_per_epoch"):
            conversion.settings[f"{every}_strategy"] = "steps"
            conversion.settings[f"{every}_steps"] = round(1 / (count * conversion.settings.get("num_epochs", 1)), 4)


def _entries(value: Any) -> list[Any]:
    """Return a list of sources."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _source(conversion: Conversion, key: str, entry: Any) -> Tree:
    """Return the source of an entry of Axolotl's or TRL's `datasets`."""
    rest = {"path": entry} if isinstance(entry, str) else dict(entry)
    source: Tree = {"path": rest.pop("path", None)}
    if files := rest.pop("data_files", None):
        source["path"] = files if isinstance(files, str) else files[0]
        if not isinstance(files, str) and len(files) > 1:
            conversion.notes[f"{key}.data_files"] = f"only {files[0]} was converted. Add a source for each file"
    for name in ("name", "split"):
        if (value := rest.pop(name, None)) is not None:
            source[name] = value
    rest.pop("ds_type", None)
    form = rest.pop("type", None)
    columns = {
        ours: rest.pop(theirs)
        for theirs, ours in (("field_messages", "messages"), ("field", "text"), ("field_chosen", "chosen"),
                             ("field_rejected", "rejected"), ("field_tools", "tools"), ("field_system", "system"))
        if theirs in rest
    }  # fmt: skip
    if isinstance(form, dict):
        for column in ("instruction", "input", "output", "system"):
            if theirs := form.pop(f"field_{column}", None):
                columns[column] = theirs
        rest |= {f"type.{name}": value for name, value in form.items()}
    elif isinstance(form, str) and ("chat_template" in form or form == "sharegpt"):
        _train_on_assistants(conversion)
    elif isinstance(form, str) and form not in ("completion", "input_output"):
        problem = f"its prompt format {form} is not applied: rows are read as prompt and completion"
        conversion.notes[f"{key}.type"] = f"{problem}. Set apply_chat_template: true for a chat model"
    if rest.pop("roles_to_train", None):
        _train_on_assistants(conversion)
    mapping = rest.pop("message_property_mappings", None) or {}
    if mapping and mapping not in ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}):
        conversion.notes[f"{key}.message_property_mappings"] = (
            "messages require the keys role and content, or from and value"
        )
    source |= {"columns": columns} if columns else {}
    for name in rest:
        conversion.notes[f"{key}.{name}"] = NO_COUNTERPART
    return source


def _train_on_assistants(conversion: Conversion) -> None:
    """Train the assistant's turns alone, if the method reads whole conversations."""
    has_option = "assistant_only_loss" in train_fields(conversion.recipe["method"])
    if has_option and conversion.settings.get("train_on_inputs") is not True:
        conversion.set("train.assistant_only_loss", True)


def _convert_named_datasets(conversion: Conversion) -> None:
    """Set the data section from the names of LLaMA-Factory's data sets, which dataset_info.json describes."""
    folder = Path(conversion.take("dataset_dir", "data"))
    info: Tree = {}
    file = conversion.folder / folder / "dataset_info.json"
    if file.is_file():
        info = json.loads(file.read_text(encoding="utf-8"))
    for key, name in (("dataset", "train"), ("eval_dataset", "eval")):
        value = conversion.take(key)
        names = value.split(",") if isinstance(value, str) else value or []
        sources = [_named_source(conversion, key, one.strip(), folder, info) for one in names]
        if sources:
            conversion.set(f"data.{name}", sources[0] if len(sources) == 1 else sources)


def _named_source(conversion: Conversion, key: str, name: str, folder: Path, info: Mapping[str, Any]) -> Tree:
    """Return the source of a name in dataset_info.json."""
    entry = info.get(name)
    if entry is None:
        conversion.notes[key] = f"{name} was not found in {folder / 'dataset_info.json'}. Set the path of its file"
        return {"path": name}
    path = entry.get("hf_hub_url") or str(folder / entry.get("file_name", name))
    source: Tree = {"path": path}
    source |= {ours: entry[theirs] for theirs, ours in (("subset", "name"), ("split", "split")) if entry.get(theirs)}
    names = {"prompt": "instruction", "query": "input", "response": "output"}
    columns = {names.get(theirs, theirs): ours for theirs, ours in entry.get("columns", {}).items()}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs and theirs}
    if entry.get("formatting") == "sharegpt" and columns.get("messages") == "conversations":
        columns.pop("messages")  # both names are read
    if entry.get("formatting") == "sharegpt":
        _train_on_assistants(conversion)
    return source | ({"columns": columns} if columns else {})


# ---- the adapter


def _convert_adapter(conversion: Conversion, title: str) -> None:
    """Add the section of the adapter if there is one, and otherwise remove its options."""
    settings = conversion.settings
    if title == "LLaMA-Factory":
        has_adapter = settings.get("finetuning_type", "lora") == "lora"
    else:
        has_adapter = settings.get("adapter") in ("lora", "qlora") or settings.get("use_peft") is True
    target = conversion.take("lora_target")  # LLaMA-Factory's, with names in one text
    if not has_adapter:
        for key in [key for key in settings if key.startswith(("lora_", "peft_")) and key != "lora_model_dir"]:
            conversion.ignored[key] = "no adapter is trained"
            conversion.take(key)
        return
    conversion.recipe["model"]["lora"] = {}
    if target is not None:
        names = [name.strip() for name in str(target).split(",")]
        conversion.set("model.lora.target_modules", "all-linear" if names == ["all"] else names)
    if title == "LLaMA-Factory" and "lora_alpha" not in settings:
        conversion.set("model.lora.alpha", 2 * settings.get("lora_rank", 8))


def report(title: str, conversion: Conversion) -> Iterable[str]:
    """Yield the lines about the keys that were not converted."""
    if conversion.notes:
        yield f"keys of {title} without a counterpart:"
        yield from (f"  {key}: {note}" for key, note in conversion.notes.items())
    if conversion.ignored:
        yield f"keys of {title} that are not needed:"
        yield from (f"  {key}: {reason}" for key, reason in conversion.ignored.items())
