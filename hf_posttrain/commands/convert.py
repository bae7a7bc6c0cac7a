"""Conversion of the settings of Axolotl, LLaMA-Factory and TRL to a recipe, for `hf-posttrain init --from FILE`.

Names are in foreign_keys.yaml. A module for each tool converts what depends on several keys.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError, short_repr
from ..methods import METHODS
from ..recipe.fields import train_fields
from ..recipe.read import suggest_key
from ..trainer.rules import drop_trl_defaults
from . import convert_axolotl, convert_llama_factory, convert_trl
from .conversion import NO_COUNTERPART, Conversion, Tool, Tree

_PREPARE: dict[str, Callable[[Conversion], None]] = {
    "axolotl": convert_axolotl.prepare,
    "llama_factory": convert_llama_factory.prepare,
    "trl": convert_trl.prepare,
}
"""Name of a tool -> the function that converts what depends on several keys."""
_EVALUATION = ("eval_strategy", "eval_steps", "evals_per_epoch", "load_best_model_at_end", "metric_for_best_model")
"""Options that require rows to evaluate on."""


def convert(file: Path, method: str | None) -> Conversion:
    """Return the conversion of a file of another tool.

    Args:
        file: YAML or JSON file of Axolotl, LLaMA-Factory or TRL.
        method: The method, which a file of TRL does not name.

    Raises:
        InputError: For a file that cannot be read or belongs to none of the tools, for a method that is missing or
            differs from that of the file, for a method that does not exist here, and for values of a wrong type.
    """
    settings = _read(file)
    name = next((name for name, tool in _tables().items() if settings.keys() & {*tool["recognized_by"]}), None)
    if name is None:
        titles = ", ".join(table["title"] for table in _tables().values())
        keys = [key for table in _tables().values() for key in table["recognized_by"]]
        raise InputError(f"--from: {file} is no file of {titles}: it has none of the keys {', '.join(keys)}")
    conversion = Conversion(_tables()[name], file, settings)
    _set_method(conversion, method)
    _PREPARE[name](conversion)
    if named := conversion.tool.get("method"):
        conversion.take(named["key"])
    _convert_warmup(conversion)
    _drop_evaluation(conversion)
    conversion.add_defaults(conversion.tool["defaults"])
    for key in [*conversion.settings]:
        _convert_key(conversion, key)
    model = conversion.recipe["model"]
    sources = conversion.recipe["data"].get("train", {})
    has_data = all(source.get("path") for source in sources) if isinstance(sources, list) else sources.get("path")
    for part, is_named in (("model", model.get("name_or_path")), ("data", has_data)):
        if not is_named:
            raise InputError(f"--from: {file} names no {part}. Add it, and convert again")
    conversion.recipe["model"] = {"name_or_path": model["name_or_path"], **model}  # first
    return conversion


@cache
def _tables() -> dict[str, Tool]:
    """Return foreign_keys.yaml."""
    return yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))


def _read(file: Path) -> Tree:
    """Return the settings of a file, without those that are null or an empty text. Old names are replaced."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--from: {file} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except yaml.YAMLError as error:
        raise InputError(f"--from: {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise InputError(f"--from: {file} must be a mapping of keys to values, not {short_repr(settings)}")
    given = {str(key): value for key, value in settings.items() if value is not None and value != ""}
    if "evaluation_strategy" in given:
        given.setdefault("eval_strategy", given.pop("evaluation_strategy"))
    return {key: _undo_yaml(key, value) for key, value in given.items()}


def _undo_yaml(key: str, value: Any) -> Any:
    """Return the value that a text means where YAML 1.1 reads another one: a number such as 1e-5, and `no`."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", value, re.IGNORECASE):
        return float(value)
    return "no" if value is False and key.endswith("_strategy") else value


def _set_method(conversion: Conversion, method: str | None) -> None:
    """Set the method, and the options that follow from the name of the method of the other tool."""
    file = conversion.file
    found: Tree = {"method": method}
    if named := conversion.tool.get("method"):
        key = named["key"]
        value = conversion.settings.get(key, named["default"])
        supported = named["values"]
        if not isinstance(value, str) or value not in supported:
            names = ", ".join(supported)
            raise InputError(f"--from: {file}: {key}: {value} is not supported. The supported values are {names}")
        found = supported[value]
        if conversion.settings.get("reward_model") is True:
            conversion.take("reward_model")
            found = {"method": next(name for name, row in METHODS.items() if row.head == "score")}
    if found["method"] is None:
        raise InputError(f"--from: {file} does not name a method. Use hf-posttrain init METHOD --from {file}")
    if method not in (None, found["method"]):
        raise InputError(f"--from: {file} is for the method {found['method']}, not {method}. Remove {method}")
    conversion.recipe = {"method": found["method"], "model": {}, "data": {}, "train": {}}
    conversion.recipe["train"].update(found.get("train", {}))


def _drop_evaluation(conversion: Conversion) -> None:
    """Remove the options of evaluation that have no effect, or that require rows."""
    if not conversion.evaluates:
        conversion.ignore(["eval_steps"], "there are no evaluations during training")
    if conversion.recipe["data"].get("eval"):
        return
    for key in [key for key in conversion.settings if key in _EVALUATION]:
        if conversion.take(key) in ("no", False):
            conversion.ignored[key] = "it is the default"
        else:
            conversion.notes[key] = "requires rows to evaluate on. Set data.eval first"


def _convert_warmup(conversion: Conversion) -> None:
    """Convert `warmup_ratio`, which `warmup_steps` above 0 replaces."""
    ratio = conversion.take_number("warmup_ratio")
    if ratio is None:
        return
    if not 0 <= ratio <= 1:
        raise conversion.error("warmup_ratio", f"must be from 0 to 1, not {ratio:g}")
    if conversion.settings.get("warmup_steps"):
        conversion.ignored["warmup_ratio"] = "warmup_steps comes first"
    else:  # a value below 1 is a share of all steps, and is rounded up
        conversion.settings["warmup_steps"] = min(ratio, 0.9999)


def _convert_key(conversion: Conversion, key: str) -> None:
    """Convert a key by the tables of its tool, or by its name."""
    tool = conversion.tool
    method = conversion.recipe["method"]
    value = conversion.take(key)
    new = _known_value(tool["values"].get(key, {}), value)
    if new is None and key in tool["ignored"]:
        conversion.ignored[key] = tool["ignored"][key]
        return
    if new is None and key in tool["replaced"]:
        if value is False or value in ([], {}):
            conversion.ignored[key] = "it is off"
        else:
            conversion.notes[key] = tool["replaced"][key]
        return
    if new is None:
        new = {conversion.target(key): value}
    for ours, setting in new.items():
        if conversion.get(ours) not in (None, setting):
            conversion.notes[key] = f"{ours} is {short_repr(conversion.get(ours))}, by another key of the file"
        elif conversion.has_option(ours):
            conversion.set(ours, setting)
        elif drop_trl_defaults({key: value}, (), METHODS[method].config_name):
            similar = difflib.get_close_matches(key, [*tool["keys"], *train_fields(method)], n=1, cutoff=0.85)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            conversion.notes[key] = suggest_key(method, ours) or f"{NO_COUNTERPART}{hint}"
        else:
            conversion.ignored[key] = "its value makes no difference here"


def _known_value(known: dict[str | bool | int, Tree], value: Any) -> Tree | None:
    """Return the keys and values of the recipe for a value of a key, or None if the table does not have the value."""
    for each, new in known.items():
        if each == value and isinstance(each, bool) == isinstance(value, bool):  # True == 1
            return new
    return None


def report(conversion: Conversion) -> Iterable[str]:
    """Yield the lines about the keys that were not converted."""
    title = conversion.tool["title"]
    if conversion.notes:
        yield f"keys of {title} that were not converted:"
        yield from (f"  {key}: {note}" for key, note in conversion.notes.items())
    if conversion.ignored:
        yield f"keys of {title} that are not needed:"
        yield from (f"  {key}: {reason}" for key, reason in conversion.ignored.items())
