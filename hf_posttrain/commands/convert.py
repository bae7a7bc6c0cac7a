"""Conversion of the settings of Axolotl, LLaMA-Factory and TRL to a recipe, for `hf-posttrain init --from FILE`.

Names are in foreign_keys.yaml. This module converts what depends on several keys: the data, adapters, and intervals.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import yaml

from ..errors import InputError, short_repr
from ..methods import METHODS
from ..recipe.fields import train_fields
from ..recipe.read import suggest_key

Tree = dict[str, Any]
NO_COUNTERPART = "no counterpart"
EVALUATION = ("eval_strategy", "eval_steps", "evals_per_epoch", "load_best_model_at_end", "metric_for_best_model")
"""Options that require rows to evaluate on."""
BUILDERS = ("json", "csv", "parquet")
"""Paths of `datasets.load_dataset` that only name the format of `data_files`."""
INFO = "dataset_info.json"
"""File in which LLaMA-Factory describes its data sets."""
TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "system_tag": ("system",),
    "observation_tag": ("tool", "observation"),
    "function_tag": ("function_call",),
}
"""Names in the messages of LLaMA-Factory -> the values that are read here."""
ASSISTANT = {"assistant", "gpt", "model"}
"""Names of the role whose turns `assistant_only_loss` trains."""


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
    settings: Tree
    """Keys that are not converted yet."""
    folder: Path
    """Folder of the file."""
    recipe: Tree = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Key that is not converted -> what to do."""
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


def convert(file: Path, method: str | None) -> Conversion:
    """Return the conversion of a file of another tool.

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
    conversion = Conversion(tool, settings, file.parent)
    _set_method(conversion, file, method)
    _convert_data(conversion)
    if not conversion.recipe["data"].get("eval"):
        for key in [key for key in settings if key in EVALUATION]:
            conversion.notes[key] = "requires rows to evaluate on. Set data.eval first"
            conversion.take(key)
    _convert_adapter(conversion)
    _convert_schedule(conversion)
    if METHODS[conversion.recipe["method"]].second == "teacher":
        _convert_divergence(conversion)
    if "wandb_project" in settings:  # Axolotl's, which turns W&B on
        conversion.set("train.report_to", "wandb")
    for key, value in tool["defaults"].items():
        if not _is_unknown_option(conversion, tool["keys"].get(key, f"train.{key}")):
            settings.setdefault(key, value)
    for key in [*settings]:
        _convert_key(conversion, key)
    model = conversion.recipe["model"]
    for name, key in (("model", model.get("name_or_path")), ("data", conversion.recipe["data"].get("train"))):
        if not key:
            raise InputError(f"--from: {file} names no {name}. Add it, and convert again")
    conversion.recipe["model"] = {"name_or_path": model["name_or_path"], **model}  # first
    return conversion


@cache
def _tables() -> dict[str, Tool]:
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


def _set_method(conversion: Conversion, file: Path, method: str | None) -> None:
    """Set the method, and the options that follow from the name of the method of the other tool."""
    found: Tree = {"method": method}
    if named := conversion.tool.get("method"):
        key = named["key"]
        value = conversion.take(key, named["default"])
        supported = named["values"]
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


def _is_unknown_option(conversion: Conversion, ours: str) -> bool:
    """Return whether a key of the recipe is a training option that the method does not have."""
    section, _, name = ours.partition(".")
    return section == "train" and name.partition(".")[0] not in train_fields(conversion.recipe["method"])


def _convert_key(conversion: Conversion, key: str) -> None:
    """Convert a key by the tables of its tool, or by its name."""
    tool = conversion.tool
    value = conversion.take(key)
    chosen = tool["values"].get(key, {})
    if isinstance(value, str | bool | int) and value in chosen and type(value) in map(type, chosen):
        new = chosen[value]
    elif key in tool["ignored"]:
        conversion.ignored[key] = tool["ignored"][key]
        return
    elif key in tool["replaced"]:
        conversion.notes[key] = tool["replaced"][key]
        return
    else:
        new = {tool["keys"].get(key, f"train.{key}"): value}
    for ours, setting in new.items():
        if _is_unknown_option(conversion, ours):
            conversion.notes[key] = suggest_key(conversion.recipe["method"], ours) or NO_COUNTERPART
        else:
            conversion.set(ours, setting)


def _convert_schedule(conversion: Conversion) -> None:
    """Convert the intervals of saves and evaluations, and the warmup."""
    settings = conversion.settings
    for word, every in (("saves", "save"), ("evals", "eval")):  # Axolotl's
        if count := conversion.take(f"{word}_per_epoch"):
            share = 1 / (count * settings.get("num_epochs", 1))
            settings[f"{every}_strategy"] = "steps" if share < 1 else "epoch"
            if share < 1:
                settings[f"{every}_steps"] = round(share, 4)
    if ratio := conversion.take("warmup_ratio"):
        if settings.get("warmup_steps"):
            conversion.ignored["warmup_ratio"] = "warmup_steps comes first"
        else:
            settings["warmup_steps"] = ratio  # a value below 1 is a share of all steps


def _convert_divergence(conversion: Conversion) -> None:
    """Set the divergence from TRL's `beta`, whose ends are the two directions of the KL divergence."""
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    option = "train.divergence" if _is_unknown_option(conversion, "train.loss_type") else "train.loss_type"
    if (beta := conversion.settings.get("beta")) is not None:
        conversion.set(option, ends.get(beta, "jsd"))
        if beta in ends:
            conversion.take("beta")


# ---- data


def _convert_data(conversion: Conversion) -> None:
    """Set the data section, and the options of the rows."""
    if conversion.tool is _tables()["llama_factory"]:
        _convert_named_datasets(conversion)
        return
    settings = conversion.settings
    train = [_source(conversion, "datasets", entry) for entry in _entries(conversion.take("datasets"))]
    evaluation = [_source(conversion, "test_datasets", entry) for entry in _entries(conversion.take("test_datasets"))]
    if path := settings.get("dataset_name"):  # TRL's, which evaluates on `test` by default
        split = conversion.take("dataset_test_split", "test")
        if settings.get("eval_strategy", "no") != "no":
            source = {"path": path, "name": settings.get("dataset_config"), "split": split}
            evaluation.append({key: value for key, value in source.items() if value is not None})
    for name, sources in (("train", train), ("eval", evaluation)):
        if sources:
            conversion.set(f"data.{name}", sources[0] if len(sources) == 1 else sources)


def _entries(value: Any) -> list[Any]:
    """Return a list of sources."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _source(conversion: Conversion, key: str, entry: Any) -> Tree:
    """Return the source of an entry of Axolotl's or TRL's `datasets`."""
    rest = {"path": entry} if isinstance(entry, str) else dict(entry)
    source: Tree = {"path": rest.pop("path", None)}
    if files := _entries(rest.pop("data_files", None)):
        if source["path"] not in BUILDERS:
            conversion.notes[f"{key}.data_files"] = f"all files of {source['path']} are read"
        else:
            source["path"] = files[0]
            if len(files) > 1:
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
    elif form == "input_output":
        conversion.notes[f"{key}.type"] = "segments are not read. Write rows with a prompt and a completion"
    elif isinstance(form, str) and form != "completion":
        problem = f"its prompt format {form} is not applied: rows are read as prompt and completion"
        conversion.notes[f"{key}.type"] = f"{problem}. Set apply_chat_template: true for a chat model"
    if (roles := rest.pop("roles_to_train", None)) and set(roles) <= ASSISTANT:
        _train_on_assistants(conversion)
    elif roles:
        conversion.recipe["train"].pop("assistant_only_loss", None)
        conversion.notes[f"{key}.roles_to_train"] = (
            "all turns are trained. assistant_only_loss: true trains the assistant's alone, and other choices are not"
            " supported"
        )
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
    has_option = not _is_unknown_option(conversion, "train.assistant_only_loss")
    if has_option and not any(conversion.settings.get(key) is True for key in ("train_on_inputs", "train_on_prompt")):
        conversion.set("train.assistant_only_loss", True)


def _convert_named_datasets(conversion: Conversion) -> None:
    """Set the data section from the names of LLaMA-Factory's data sets, which dataset_info.json describes."""
    folder = Path(conversion.take("dataset_dir", "data"))
    # LLaMA-Factory reads from the current folder, that of its repository
    folder = next((one for one in (folder, conversion.folder / folder) if (one / INFO).is_file()), folder)
    entries: Tree = {}
    if (folder / INFO).is_file():
        try:
            entries = json.loads((folder / INFO).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"--from: {folder / INFO} is not valid JSON: {error}") from error
    for key, name in (("dataset", "train"), ("eval_dataset", "eval")):
        value = conversion.take(key)
        names = value.split(",") if isinstance(value, str) else value or []
        sources = [_named_source(conversion, one.strip(), folder, entries.get(one.strip())) for one in names]
        if sources:
            conversion.set(f"data.{name}", sources[0] if len(sources) == 1 else sources)


def _named_source(conversion: Conversion, name: str, folder: Path, entry: Mapping[str, Any] | None) -> Tree:
    """Return the source of a name in dataset_info.json."""
    if entry is None:
        conversion.notes[f"dataset {name}"] = f"was not found in {folder / INFO}. Set the path of its file"
        return {"path": name}
    rest = dict(entry)
    file = rest.pop("file_name", None)
    path = rest.pop("hf_hub_url", None) or (str(folder / file) if file else None)
    if path is None:
        conversion.notes[f"dataset {name}"] = "is neither a file nor on the Hugging Face Hub. Set the path of its file"
    source: Tree = {"path": path or name}
    for theirs, ours in (("subset", "name"), ("split", "split"), ("num_samples", "limit")):
        if value := rest.pop(theirs, None):
            source[ours] = value
    rest.pop("ranking", None)  # follows from the columns
    is_chat = rest.pop("formatting", "alpaca") in ("sharegpt", "openai")
    columns = _named_columns(rest.pop("columns", {}), is_chat)
    if is_chat:
        _train_on_assistants(conversion)
    tags = rest.pop("tags", {})
    for theirs, supported in TAGS.items():
        if (tag := tags.get(theirs)) and tag not in supported:
            conversion.notes[f"dataset {name}.tags.{theirs}"] = f"{tag} is not read. Rename it to {supported[0]}"
    for key in rest:
        conversion.notes[f"dataset {name}.{key}"] = NO_COUNTERPART
    return source | ({"columns": columns} if columns else {})


def _named_columns(theirs: Mapping[str, str], is_chat: bool) -> dict[str, str]:
    """Return the columns of an entry in dataset_info.json that have other names here."""
    names = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label"}
    if "prompt" in theirs and not theirs.keys() & {"response", "chosen", "kto_tag"}:
        names["prompt"] = "text"  # of pretraining
    columns = {names.get(key, key): column for key, column in theirs.items() if column}
    if is_chat and columns.get("messages") == "conversations":
        del columns["messages"]  # both names are read
    return {ours: column for ours, column in columns.items() if ours != column}


# ---- the adapter


def _convert_adapter(conversion: Conversion) -> None:
    """Add the section of a new adapter if there is one, and otherwise remove its options."""
    tool, settings = conversion.tool, conversion.settings
    wanted = tool["adapter"]
    has_adapter = settings.get(wanted["key"], wanted.get("default")) in wanted["values"]
    continued = next((key for key in settings if tool["keys"].get(key) == "model.adapter"), None)
    if continued or not has_adapter:
        reason = f"the adapter of {continued} has its own" if continued else "no adapter is trained"
        for key in [key for key in settings if _is_option_of_adapter(tool, key)]:
            conversion.ignored[key] = reason
            conversion.take(key)
        return
    conversion.recipe["model"]["lora"] = {}
    for key, value in tool["adapter_defaults"].items():
        settings.setdefault(key, value)
    if (target := conversion.take("lora_target")) is not None:  # LLaMA-Factory's, with names in one text
        settings["lora_target_modules"] = [name.strip() for name in str(target).split(",")]
        settings.setdefault("lora_alpha", 2 * settings["lora_rank"])
    modules = settings.get("lora_target_modules")
    if modules in (["all"], ["all-linear"]):
        settings["lora_target_modules"] = "all-linear"
    elif modules is None and tool is _tables()["trl"]:
        conversion.notes["lora_target_modules"] = (
            "in TRL, PEFT chooses layers by the model. Here all linear ones are used"
        )


def _is_option_of_adapter(tool: Tool, key: str) -> bool:
    """Return whether a key is an option of a new adapter."""
    ours = {tool["keys"].get(key, ""), *(new for value in tool["values"].get(key, {}).values() for new in value)}
    if "model.adapter" in ours:
        return False
    return key.startswith("lora_") or any(new.startswith("model.lora.") for new in ours)


def report(conversion: Conversion) -> Iterable[str]:
    """Yield the lines about the keys that were not converted."""
    title = conversion.tool["title"]
    if conversion.notes:
        yield f"keys of {title} that were not converted:"
        yield from (f"  {key}: {note}" for key, note in conversion.notes.items())
    if conversion.ignored:
        yield f"keys of {title} that are not needed:"
        yield from (f"  {key}: {reason}" for key, reason in conversion.ignored.items())
