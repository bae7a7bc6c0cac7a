"""Conversion of the settings of Axolotl that depend on several keys."""

from typing import Any

from ..data.row_schema import PREFERENCE
from ..errors import short_repr
from ..methods import METHODS
from .conversion import (
    MIXED_ROWS,
    NO_COUNTERPART,
    TRUNCATED,
    UNPACKED_STREAM,
    Conversion,
    Tree,
    distillation_method,
    take_source,
)

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
_ROW_COLUMNS = {
    *("instruction", "input", "output", "system", "prompt", "completion", "label", "chosen", "rejected"),
}
"""Columns that a mapping as `type` names, after `field_`."""
_PAIR_COLUMNS = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
}
"""Formats of preference rows -> the columns that have other names here."""
_PROJECTS = {
    "wandb": ("wandb_project", "wandb_name"),
    "mlflow": ("mlflow_experiment_name", "mlflow_run_name"),
    "tensorboard": (None, None),
    "comet_ml": ("comet_project_name", None),
    "trackio": ("trackio_project_name", "trackio_run_name"),
}
"""Tracker -> the key of its project, which turns it on, and the key that becomes `run_name`."""
_USUAL_MESSAGES = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})


def prepare(conversion: Conversion) -> None:
    """Convert what depends on several keys of Axolotl."""
    _convert_sources(conversion)
    _convert_schedule(conversion)
    _convert_trackers(conversion)
    _convert_section_of_trl(conversion)
    if "hub_model_id" in conversion.settings:  # alone makes Axolotl push
        conversion.set("train.push_to_hub", True)
        conversion.set("train.hub_private_repo", True)
    plugins = conversion.take_names("plugins")
    if any(plugin.endswith("KDPlugin") for plugin in plugins):
        method = distillation_method(sampled=False)
        conversion.notes["plugins"] = f"for KDPlugin, set method to {method}, and add a teacher"
    elif plugins:
        conversion.ignored["plugins"] = "none is needed for the options here"
    if conversion.take_new_adapter():
        if conversion.settings.get("lora_target_linear") is not True:
            conversion.set_target_modules()
        elif conversion.take("lora_target_modules"):
            conversion.notes["lora_target_modules"] = "all linear layers are trained, and no others"


def _convert_section_of_trl(conversion: Conversion) -> None:
    """Convert the section `trl`, of which Axolotl reads `beta` alone without GRPO."""
    section = conversion.take("trl", {})
    if not isinstance(section, dict):
        raise conversion.error("trl", f"must be a mapping, not {short_repr(section)}")
    if section.get("beta") is not None:
        conversion.settings["rl_beta"] = section["beta"]
    for key in [key for key in section if key != "beta"]:
        fix = f". Set train.{key}" if conversion.has_option(f"train.{key}") else ""
        conversion.notes[f"trl.{key}"] = f"Axolotl uses it for GRPO alone{fix}"


def _convert_sources(conversion: Conversion) -> None:
    """Set the data section, and the options of the rows."""
    choices: dict[str, bool | None] = {}
    train = []
    for name, entry in conversion.take_entries("datasets").items():
        choices[name] = _take_assistant_only(entry)
        train.append(_source(conversion, name, entry))
        if choices[name] is False:
            problem = "all turns are trained. assistant_only_loss: true trains the assistant's alone"
            conversion.notes[f"{name}.roles_to_train"] = f"{problem}, and other choices are not supported"
    for name, entry in conversion.take_entries("pretraining_dataset").items():
        columns = {"text": entry.pop("text_column", "text")}
        entry.pop("type", None)
        source = take_source(conversion, name, entry)
        train.append(source | {"columns": columns})
        conversion.notes[name] = TRUNCATED
        conversion.settings["streaming"] = True
        conversion.note_rest(name, entry)
    if conversion.settings.get("streaming") is True and conversion.take("sample_packing") is True:
        conversion.notes["sample_packing"] = UNPACKED_STREAM
    conversion.set_sources("train", train)
    kinds = {choice is None for choice in choices.values()}
    if len(kinds) > 1 and conversion.has_option("train.assistant_only_loss"):
        conversion.notes["datasets"] = MIXED_ROWS
    evaluation = []
    for name, entry in conversion.take_entries("test_datasets").items():
        _take_assistant_only(entry)
        evaluation.append(_source(conversion, name, entry))
    conversion.set_sources("eval", evaluation)
    conversion.split_sources("val_set_size")
    if conversion.settings.get("train_on_inputs") is not True:
        conversion.set_assistant_only_loss(choices)


def _is_chat(form: object) -> bool:
    """Return whether the rows of a `type` are conversations."""
    return isinstance(form, str) and (form.startswith("chat_template") or form == "sharegpt")


def _take_assistant_only(entry: Tree) -> bool | None:
    """Remove `roles_to_train`, and return whether the assistant's turns alone are trained.

    None is returned for a source whose rows are no conversations.
    """
    roles = entry.pop("roles_to_train", None) or ["assistant"]
    if not _is_chat(entry.get("type")):
        return None
    return {*map(str, roles if isinstance(roles, list) else [roles])} <= _ASSISTANT


def _source(conversion: Conversion, name: str, entry: Tree) -> Tree:
    """Return the source of an entry of `datasets`."""
    source = take_source(conversion, name, entry)
    given = {ours: entry.pop(theirs, None) for theirs, ours in _COLUMNS.items()}
    columns = {ours: column for ours, column in given.items() if column}
    columns |= _convert_type(conversion, name, entry.pop("type", None))
    given = {"role": entry.pop("message_field_role", "role"), "content": entry.pop("message_field_content", "content")}
    mapping = entry.pop("message_property_mappings", given)
    if mapping and mapping not in _USUAL_MESSAGES:
        problem = "messages require the keys role and content, or from and value"
        conversion.notes[f"{name}.message_property_mappings"] = problem
    for key, usual in (("ds_type", None), ("chat_template", "tokenizer_default"), ("train_on_eos", "turn")):
        if usual is None or entry.get(key) == usual:
            entry.pop(key, None)
    conversion.note_rest(name, entry)
    return source | ({"columns": columns} if columns else {})


def _convert_type(conversion: Conversion, name: str, form: Any) -> dict[str, str]:
    """Return the columns of a `type`, the format of the rows of a source, and note what is not applied."""
    if isinstance(form, dict):
        columns: dict[str, str] = {}
        for key, value in form.items():
            column = key.removeprefix("field_")
            if column in _ROW_COLUMNS and column != key:
                columns |= {column: value} if value else {}
            else:
                conversion.notes[f"{name}.type.{key}"] = NO_COUNTERPART
        return columns
    if form is None:
        return {}
    if not isinstance(form, str):
        raise conversion.error(f"{name}.type", f"must be a text or a mapping, not {short_repr(form)}")
    if form.startswith("bradley_terry."):
        conversion.set("train.apply_chat_template", True)
        conversion.ignored[f"{name}.type"] = "the chat template of the tokenizer is applied"
        return {"prompt": "input"}
    if _is_chat(form):
        return {}
    if form == "completion":
        conversion.notes[f"{name}.type"] = TRUNCATED
        return {}
    template, _, preset = form.partition(".")
    reads_pairs = METHODS[conversion.recipe["method"]].rows is PREFERENCE
    if template in ("chatml", "llama3") and preset in _PAIR_COLUMNS and reads_pairs:
        conversion.set("train.apply_chat_template", True)
        conversion.ignored[f"{name}.type"] = "the chat template of the tokenizer is applied"
        return dict(_PAIR_COLUMNS[preset])
    if form == "input_output":
        conversion.notes[f"{name}.type"] = "segments are not read. Write rows with a prompt and a completion"
        return {}
    problem = f"its format {form} is not applied. Name other columns in columns"
    conversion.notes[f"{name}.type"] = f"{problem}, and set apply_chat_template: true for a chat model"
    return {}


def _convert_schedule(conversion: Conversion) -> None:
    """Convert the intervals of saves and evaluations, and the learning rates."""
    settings = conversion.settings
    has_rows_to_evaluate = bool(conversion.recipe["data"].get("eval"))
    for word, every in [("saves", "save"), *([("evals", "eval")] if has_rows_to_evaluate else [])]:
        key = f"{word}_per_epoch"
        count = conversion.take_number(key)
        if count is None:
            continue
        if count < 0:
            raise conversion.error(key, f"must be 0 or more, not {count:g}")
        if count == 0:
            conversion.ignored[key] = "it is off"
            continue
        epochs = conversion.take_number("num_epochs") or 1.0
        settings["num_epochs"] = epochs
        share = 1 / (count * epochs)
        settings[f"{every}_strategy"] = "steps" if share < 1 else "epoch"
        if share < 1:
            settings[f"{every}_steps"] = round(share, 4)
    if not settings.get("save_steps"):
        settings.setdefault("save_strategy", "epoch")
    if settings.get("eval_steps"):
        settings["eval_strategy"] = "steps"
    if has_rows_to_evaluate:
        settings.setdefault("eval_batch_size", settings.get("micro_batch_size", 1))
        if conversion.evaluates:
            conversion.set("train.eval_on_start", True)
    if settings.get("lr_scheduler") == "constant":
        conversion.ignore(["warmup_steps", "warmup_ratio"], "the learning rate is constant")
        settings["warmup_steps"] = 0
    elif "warmup_steps" in settings:
        conversion.ignore(["warmup_ratio"], "warmup_steps comes first")
    _convert_lowest_rate(conversion)


def _convert_lowest_rate(conversion: Conversion) -> None:
    """Convert `cosine_min_lr_ratio`, which the cosine schedule alone has, in place of `lr_scheduler_kwargs`."""
    settings = conversion.settings
    if settings.get("lr_scheduler", "cosine") != "cosine":
        conversion.ignore(["cosine_min_lr_ratio"], "the learning rate has another schedule")
    elif lowest := conversion.take_number("cosine_min_lr_ratio"):
        conversion.ignore(["lr_scheduler_kwargs"], "cosine_min_lr_ratio comes first")
        settings["lr_scheduler"] = "cosine_with_min_lr"
        settings["lr_scheduler_kwargs"] = {"min_lr_rate": lowest}


def _convert_trackers(conversion: Conversion) -> None:
    """Set the trackers, and ignore the keys of those that are not used."""
    settings = conversion.settings
    trackers = []
    if settings.get("wandb_mode") == "disabled":
        keys = [key for key in settings if key.startswith("wandb_")]
        conversion.ignore([*keys, "use_wandb"], "W&B is disabled")
    for tracker, (project, name) in _PROJECTS.items():
        if conversion.take(f"use_{tracker.removesuffix('_ml')}") is True or project in settings:
            trackers.append(tracker)
        elif name:
            conversion.ignore([name], f"{tracker} is not used")
    if trackers:
        conversion.set("train.report_to", trackers[0] if len(trackers) == 1 else trackers)
