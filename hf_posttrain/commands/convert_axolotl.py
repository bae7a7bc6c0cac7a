"""Conversion of the settings of Axolotl that depend on several keys."""

from typing import Any

from ..errors import short_repr
from .conversion import NO_COUNTERPART, Conversion, Tree, take_source

_ASSISTANT = {"assistant", "gpt", "model"}
"""Names of the role whose turns `assistant_only_loss` trains."""
_COLUMNS = {
    "field": "text",
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Keys of a data set that name a column -> the column here."""
_PAIR_COLUMNS = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
}
"""Formats of preference rows -> the columns that have other names here."""
_USUAL_MESSAGES = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})


def prepare(conversion: Conversion) -> None:
    """Convert what depends on several keys of Axolotl."""
    _convert_sources(conversion)
    _convert_schedule(conversion)
    _convert_trackers(conversion)
    if "hub_model_id" in conversion.settings:  # alone makes Axolotl push
        conversion.set("train.push_to_hub", True)
        conversion.set("train.hub_private_repo", True)
    plugins = conversion.take_names("plugins")
    if any("kd" in plugin.split(".") for plugin in plugins):
        conversion.notes["plugins"] = "for KDPlugin, set method to kd, and add a teacher"
    elif plugins:
        conversion.ignored["plugins"] = "none is needed for the options here"
    if conversion.take_new_adapter():
        conversion.set_target_modules()


def _convert_sources(conversion: Conversion) -> None:
    """Set the data section, and the options of the rows."""
    choices: dict[str, bool | None] = {}
    train = []
    for name, entry in conversion.take_entries("datasets").items():
        choices[name] = _trains_assistant_only(entry)
        train.append(_source(conversion, name, entry))
    for name, entry in conversion.take_entries("pretraining_dataset").items():
        columns = {"text": entry.pop("text_column", "text")}
        entry.pop("type", None)
        source = take_source(conversion, name, entry)
        train.append(source | {"columns": columns, "streaming": True})
        _note_rest(conversion, name, entry)
    conversion.set_sources("train", train)
    evaluation = []
    for name, entry in conversion.take_entries("test_datasets").items():
        entry.pop("roles_to_train", None)
        evaluation.append(_source(conversion, name, entry))
    conversion.set_sources("eval", evaluation)
    if conversion.settings.get("train_on_inputs") is not True:
        conversion.set_assistant_only_loss(choices)


def _trains_assistant_only(entry: Tree) -> bool | None:
    """Return whether the assistant's turns alone are trained, or None if the rows of a source are no conversations."""
    form = entry.get("type")
    if not isinstance(form, str) or not ("chat_template" in form or form == "sharegpt"):
        return None
    roles = entry.get("roles_to_train") or ["assistant"]
    return {*map(str, roles if isinstance(roles, list) else [roles])} <= _ASSISTANT


def _source(conversion: Conversion, name: str, entry: Tree) -> Tree:
    """Return the source of an entry of `datasets`."""
    trains_assistant_only = _trains_assistant_only(entry)
    source = take_source(conversion, name, entry)
    given = {ours: entry.pop(theirs, None) for theirs, ours in _COLUMNS.items()}
    columns = {ours: column for ours, column in given.items() if column}
    columns |= _convert_type(conversion, name, entry.pop("type", None))
    if entry.pop("roles_to_train", None) and trains_assistant_only is False:
        problem = "all turns are trained. assistant_only_loss: true trains the assistant's alone"
        conversion.notes[f"{name}.roles_to_train"] = f"{problem}, and other choices are not supported"
    mapping = entry.pop("message_property_mappings", None)
    if mapping and mapping not in _USUAL_MESSAGES:
        problem = "messages require the keys role and content, or from and value"
        conversion.notes[f"{name}.message_property_mappings"] = problem
    entry.pop("ds_type", None)
    _note_rest(conversion, name, entry)
    return source | ({"columns": columns} if columns else {})


def _convert_type(conversion: Conversion, name: str, form: Any) -> dict[str, str]:
    """Return the columns of a `type`, the format of the rows of a source, and note what is not applied."""
    if isinstance(form, dict):
        columns: dict[str, str] = {}
        for key, value in form.items():
            column = key.removeprefix("field_")
            if column in ("instruction", "input", "output", "system", "prompt", "chosen", "rejected") and column != key:
                columns |= {column: value} if value else {}
            else:
                conversion.notes[f"{name}.type.{key}"] = NO_COUNTERPART
        return columns
    if form is None:
        return {}
    if not isinstance(form, str):
        raise conversion.error(f"{name}.type", f"must be a text or a mapping, not {short_repr(form)}")
    if "chat_template" in form or form in ("sharegpt", "completion"):
        return {}
    template, _, preset = form.partition(".")
    if template in ("chatml", "llama3") and preset in _PAIR_COLUMNS and conversion.recipe["method"] in ("dpo", "cpo"):
        conversion.set("train.apply_chat_template", True)
        conversion.ignored[f"{name}.type"] = "the chat template of the tokenizer is applied"
        return dict(_PAIR_COLUMNS[preset])
    if form == "input_output":
        conversion.notes[f"{name}.type"] = "segments are not read. Write rows with a prompt and a completion"
        return {}
    problem = f"its format {form} is not applied. Name other columns in columns"
    conversion.notes[f"{name}.type"] = f"{problem}, and set apply_chat_template: true for a chat model"
    return {}


def _note_rest(conversion: Conversion, name: str, entry: Tree) -> None:
    """Note the keys of an entry that were not converted."""
    for key in entry:
        conversion.notes[f"{name}.{key}"] = NO_COUNTERPART


def _convert_schedule(conversion: Conversion) -> None:
    """Convert the intervals of saves and evaluations."""
    settings = conversion.settings
    has_rows_to_evaluate = bool(conversion.recipe["data"].get("eval"))
    for word, every in [("saves", "save"), *([("evals", "eval")] if has_rows_to_evaluate else [])]:
        count = conversion.take_number(f"{word}_per_epoch")
        if not count:
            continue
        epochs = conversion.take_number("num_epochs") or 1.0
        settings["num_epochs"] = epochs
        share = 1 / (count * epochs)
        settings[f"{every}_strategy"] = "steps" if share < 1 else "epoch"
        if share < 1:
            settings[f"{every}_steps"] = round(share, 4)
    if not settings.get("save_steps"):
        settings.setdefault("save_strategy", "epoch")
    if has_rows_to_evaluate and settings.keys() & {"eval_steps", "eval_strategy"}:
        conversion.set("train.eval_on_start", True)


def _convert_trackers(conversion: Conversion) -> None:
    """Set the trackers, and the name of the run."""
    settings = conversion.settings
    if settings.get("wandb_project"):
        settings.setdefault("use_wandb", True)
    used = {"wandb": "wandb_name", "mlflow": "mlflow_run_name", "tensorboard": None, "comet": None}
    used["trackio"] = "trackio_run_name"
    trackers = []
    for tracker, name in used.items():
        is_used = conversion.take(f"use_{tracker}") is True
        run_name = conversion.take(name) if name else None
        if is_used:
            trackers.append("comet_ml" if tracker == "comet" else tracker)
        if is_used and run_name and "run_name" not in conversion.recipe["train"]:
            conversion.set("train.run_name", run_name)
    if trackers:
        conversion.set("train.report_to", trackers[0] if len(trackers) == 1 else trackers)
