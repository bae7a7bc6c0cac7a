"""Conversion of the settings of LLaMA-Factory that depend on several keys, and of its dataset_info.json."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError, short_repr
from .conversion import MIXED_ROWS, NO_COUNTERPART, TRUNCATED, UNPACKED_STREAM, Conversion, Tree

_INFO = "dataset_info.json"
"""File in which LLaMA-Factory describes its data sets."""
_TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "system_tag": ("system",),
    "observation_tag": ("tool", "observation"),
    "function_tag": ("function_call",),
}
"""Names in the messages of LLaMA-Factory -> the values that are read here."""
_COLUMNS = {
    *("prompt", "query", "response", "system", "tools", "messages", "chosen", "rejected", "kto_tag", "images"),
}
"""Names of columns that are read."""
_UNREAD_COLUMNS = {
    "history": "not supported. Write the earlier turns and the last one as messages",
    "videos": "not supported",
    "audios": "not supported",
}
"""Names of columns that are not read -> what to do."""
_OWN_TEMPLATES = ("alpaca", "default", "vanilla")
"""Templates that are not those of a model."""


def prepare(conversion: Conversion) -> None:
    """Convert what depends on several keys of LLaMA-Factory."""
    settings = conversion.settings
    is_pretraining = settings.get("stage") == "pt"
    if is_pretraining and "neat_packing" not in settings:
        settings.setdefault("packing", True)
    if is_pretraining:
        conversion.notes["stage"] = TRUNCATED
    if settings.get("streaming") is True and conversion.take("packing") is True:
        conversion.notes["packing"] = UNPACKED_STREAM
    _convert_sources(conversion, is_pretraining)
    _convert_earlier_adapters(conversion)
    if conversion.take_new_adapter():
        _convert_adapter(conversion)


def _convert_earlier_adapters(conversion: Conversion) -> None:
    """Convert the adapters that are loaded: the last one is trained, unless a new one is. The others are merged."""
    *merged, last = conversion.take_names("adapter_name_or_path") or [""]
    if conversion.take("create_new_adapter") is True and last:
        merged.append(last)
    elif last:
        conversion.settings["adapter_name_or_path"] = last
    if merged:
        problem = f"merge {' and '.join(merged)} into the model first (hf-posttrain merge)"
        conversion.notes["adapter_name_or_path"] = f"{problem}, and set model.name_or_path"


def _convert_adapter(conversion: Conversion) -> None:
    """Set the options of a new adapter."""
    conversion.settings["lora_target_modules"] = conversion.take_names("lora_target") or ["all"]
    conversion.set_target_modules()
    if modules := conversion.take_names("additional_target"):
        conversion.set("model.lora.modules_to_save", modules)
    rank = conversion.take_count("lora_rank") or 8  # the default of LLaMA-Factory
    conversion.set("model.lora.r", rank)
    conversion.settings.setdefault("lora_alpha", 2 * rank)


def _convert_sources(conversion: Conversion, is_pretraining: bool) -> None:
    """Set the data section from the names of data sets, and the options of the rows."""
    folder = Path(str(conversion.take("dataset_dir", "data")))
    # LLaMA-Factory reads from the current folder, that of its repository
    folder = next((one for one in (folder, conversion.file.parent / folder) if (one / _INFO).is_file()), folder)
    entries = _read_info(folder)
    limit = conversion.take_count("max_samples")
    choices: dict[str, bool | None] = {}
    for key, section in (("dataset", "train"), ("eval_dataset", "eval")):
        names = conversion.take_names(key)
        sources = [_source(conversion, name, folder, entries.get(name)) for name in names]
        if limit is not None:
            sources = [source | {"limit": min(source.get("limit", limit), limit)} for source in sources]
        conversion.set_sources(section, sources)
        if section == "train":
            choices = {f"dataset {name}": _is_chat(entries.get(name)) for name in names}
    conversion.split_sources("val_size")
    is_chat = {choice for choice in choices.values() if choice is not None}
    if len(is_chat) > 1:
        conversion.notes["dataset"] = MIXED_ROWS
    elif conversion.settings.get("train_on_prompt") is not True:
        conversion.set_assistant_only_loss(choices)
    if False in is_chat and not is_pretraining:
        _convert_template(conversion)


def _read_info(folder: Path) -> dict[str, Tree]:
    """Return the entries of dataset_info.json, of which there are none without the file."""
    file = folder / _INFO
    if not file.is_file():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"--from: {file} is not valid JSON: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise InputError(f"--from: {file} must be a mapping of names to mappings")
    for name, entry in entries.items():
        for key in ("columns", "tags"):
            if not isinstance(entry.get(key) or {}, dict):
                raise InputError(f"--from: {file}: {name}.{key} must be a mapping, not {short_repr(entry[key])}")
        if not isinstance(entry.get("file_name") or "", str):
            raise InputError(f"--from: {file}: {name}.file_name must be a file, not {short_repr(entry['file_name'])}")
    return entries


def _is_chat(entry: Tree | None) -> bool | None:
    """Return whether the rows of an entry are conversations, or None for a data set without an entry."""
    if entry is None:
        return None
    columns = entry.get("columns") or {}
    return entry.get("formatting", "alpaca") in ("sharegpt", "openai") or "messages" in columns


def _convert_template(conversion: Conversion) -> None:
    """Apply the template to prompts of plain text, which LLaMA-Factory does with every template but `empty`."""
    template = conversion.settings.get("template")
    if template == "empty":
        return
    if template in _OWN_TEMPLATES:
        conversion.take("template")
        problem = f"the template {template} is not applied"
        conversion.notes["template"] = f"{problem}. Write it to a file, and set model.chat_template"
    conversion.set("train.apply_chat_template", True)


def _source(conversion: Conversion, name: str, folder: Path, entry: Tree | None) -> Tree:
    """Return the source of a name in dataset_info.json."""
    if entry is None:
        problem = f"was not found in {folder / _INFO}. Set the path of its file"
        conversion.notes[f"dataset {name}"] = f"{problem}, and apply_chat_template: true for prompts of plain text"
        return {"path": name}
    rest = dict(entry)
    file = rest.pop("file_name", None)
    path = rest.pop("hf_hub_url", None) or (str(folder / file) if file else None)
    for key in ("ms_hub_url", "om_hub_url") if path else ():
        rest.pop(key, None)  # the same data set on other hubs
    if path is None:
        problem = "is neither a file nor on the Hugging Face Hub. Set the path of its file"
        conversion.notes[f"dataset {name}"] = problem
    source: Tree = {"path": path or name}
    for key, ours in (("subset", "name"), ("split", "split"), ("num_samples", "limit")):
        if value := rest.pop(key, None):
            source[ours] = value
    rest.pop("ranking", None)  # follows from the columns
    rest.pop("formatting", None)
    given = {key: column for key, column in (rest.pop("columns", None) or {}).items() if column}
    theirs = {key: column for key, column in given.items() if key in _COLUMNS}
    for key in [key for key in given if key not in theirs]:
        conversion.notes[f"dataset {name}.columns.{key}"] = _UNREAD_COLUMNS.get(key, NO_COUNTERPART)
    if "images" in theirs:
        conversion.set("model.images", True)
    columns = _columns(theirs, is_chat=bool(_is_chat(entry)))
    tags = rest.pop("tags", None) or {}
    for key, supported in _TAGS.items():
        if (tag := tags.get(key)) and tag not in supported:
            conversion.notes[f"dataset {name}.tags.{key}"] = f"{tag} is not read. Rename it to {supported[0]}"
    conversion.note_rest(f"dataset {name}", rest)
    return source | ({"columns": columns} if columns else {})


def _columns(theirs: Mapping[str, str], is_chat: bool) -> dict[str, str]:
    """Return the columns of an entry in dataset_info.json that have other names here."""
    names = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label"}
    if "prompt" in theirs and not theirs.keys() & {"response", "chosen", "kto_tag"}:
        names["prompt"] = "text"  # of pretraining
    columns = {names.get(key, key): column for key, column in theirs.items()}
    if is_chat and columns.get("messages") == "conversations":
        del columns["messages"]  # both names are read
    return {ours: column for ours, column in columns.items() if ours != column}
