"""Reader of recipes, YAML files with `section.key=value` overrides, which does not import torch.

Every mistake raises an InputError that starts with its location, such as "recipes/kto.yaml:12: " or "command line: ".
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..data.row_schema import MAX_GROUPS, SOURCE_COLUMN
from ..errors import InputError, LaunchError, short_repr
from ..methods import METHODS
from ..models.config import ModelSection, RewardModelSection
from ..rollouts.options import SAMPLERS
from ..rounds.config import RoundsSection, expand_rounds
from ..rounds.judges.config import MODEL_JUDGES
from ..teachers.options import COMPARISON_OPTIONS, TEACHER
from ..trainer.limits import Problem
from ..trainer.method_spec import Method
from ..trainer.option_group import OptionGroup
from ..trainer.renamed_options import RENAMED, rename_options, warn_about_old_names
from ..trainer.rules import drop_trl_defaults, replacement_hint
from . import rules
from .fields import (
    Fields,
    KeyHint,
    build_kwargs,
    fields_of,
    is_outdated,
    lora_fields,
    methods_with_option,
    train_fields,
)
from .sections import DataSection, Recipe, Source
from .yaml_tree import location_of, read_tree

if TYPE_CHECKING:
    from ..trainer.config import PostTrainConfig

_FOREIGN_NAMES = {  # names of other libraries, and likely mistakes -> the key of a recipe
    "model_name_or_path": "model.name_or_path",
    "model.path": "model.name_or_path",
    "model.name": "model.name_or_path",
    "teacher.path": "teacher.name_or_path",
    "teacher.name": "teacher.name_or_path",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization: 4bit",
    "load_in_8bit": "model.quantization: 8bit",
    "use_peft": "model.lora: {r: 16}",
    "lora_r": "model.lora.r",
    "dataset": "data.train",
    "dataset_name": "data.train.path",
    "dataset_config": "data.train.name",
    "train_file": "data.train.path",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
}


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and its overrides, and validate everything that does not require other files.

    Args:
        path: The file.
        overrides: Texts of the form `section.key=value`.

    Raises:
        InputError: For a missing or malformed file, an unknown or missing key, a wrong type, and for options that
            cannot be combined.
    """
    recipe = read_recipe(path, overrides)
    raise_first_problem(recipe, rules.recipe_problems(recipe))

    # The train section keeps its values. The rules are applied to an object with all fields of the Config.
    fields = partial(train_fields, recipe.method)
    # null removes an option of another method, so that the method of a recipe can be overridden
    recipe.train = {
        name: value
        for name, value in recipe.train.items()
        if value is not None or name in fields() or not methods_with_option(name)
    }
    recipe.train = drop_trl_defaults(recipe.train, fields(), METHODS[recipe.method].config_name)
    options = _check_fields(recipe, fields, recipe.train, "train", partial(suggest_key, recipe.method))
    options = add_teacher_options(recipe, options)
    values = SimpleNamespace(**{name: field.default for name, field in fields().items()} | options)
    raise_first_problem(recipe, rules.train_section_problems(recipe, values))
    recipe.validated_train = add_teacher_options(recipe, dict(recipe.train))
    return recipe


def read_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and its overrides, and validate keys and types of all sections except for `train`.

    Args:
        path: The file.
        overrides: Texts of the form `section.key=value`.

    Raises:
        InputError: For a missing or malformed file, an unknown or missing key, and a wrong type.
    """
    path = Path(path)
    tree, locations = read_tree(path, overrides)
    if isinstance(tree, dict):
        tree = _rename_old_options(_move_comparison_options(tree, locations), locations)
        known = fields_of(Recipe)  # an empty section of these is left out
        tree = {name: value for name, value in tree.items() if value is not None or name not in known}
        if "rounds" in tree:
            tree["rounds"] = expand_rounds(tree["rounds"])
    method = tree.get("method") if isinstance(tree, dict) else None
    sections = build_kwargs(fields_of(Recipe), tree, "", partial(location_of, locations), partial(suggest_key, method))
    recipe = Recipe(**sections, path=path, locations=locations)
    if METHODS[recipe.method].head == "score":
        recipe.model = RewardModelSection(**vars(recipe.model))

    def expand_path(name: str, key: str) -> str:
        """Expand the home folder and environment variables."""
        expanded = os.path.expanduser(os.path.expandvars(name))
        if (unset := re.search(r"\$(\w+|\{\w+\})", expanded)) and not os.path.exists(expanded):
            raise InputError(f"{recipe.where(key)}: {key}: the environment variable {unset[0]} is not set")
        return expanded

    def resolve_path(name: str | None, key: str) -> str | None:
        """Expand a path, and search for it in the recipe's folder if it is not in the current one."""
        if not name:
            return name
        expanded = expand_path(name, key)
        sibling = path.parent / expanded
        # unlike Path.exists, os.path.exists is False in a folder without permission
        return _normalize(sibling) if os.path.exists(sibling) and not os.path.exists(expanded) else expanded

    for name in ("output_dir", "resume_from_checkpoint", "deepspeed", "fsdp_config"):
        if isinstance(value := recipe.train.get(name), str):
            recipe.train[name] = expand_path(value, f"train.{name}")
    section: ModelSection
    for key, section in (("model", recipe.model), *recipe.teacher_sections()):
        for name in ("name_or_path", "adapter", "chat_template"):
            setattr(section, name, resolve_path(getattr(section, name), f"{key}.{name}"))
        # `lora` is a plain mapping with the names of peft and shorter ones
        if section.lora is not None:
            section.lora = _check_fields(recipe, lora_fields, section.lora, f"{key}.lora", _suggest_lora_key)
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        recipe.rounds.judge.name = resolve_path(recipe.rounds.judge.name, "rounds.judge.name")
    for key, source in recipe.sources():
        source.path = resolve_path(source.path, f"{key}.path") or ""
    return recipe


def _move_comparison_options(tree: dict[Any, Any], locations: dict[str, str]) -> dict[Any, Any]:
    """Move the options of the comparison of student and teacher from the section `teacher` to `train.teacher`.

    Of an option in both sections, one on the command line overrides one of the file.

    Raises:
        InputError: For an option that is set in both sections at the same place.
    """
    section = tree.get("teacher")
    train = {} if tree.get("train") is None else tree["train"]
    if not isinstance(section, dict) or not isinstance(train, dict):
        return tree
    moved_options = {option: section[option] for option in COMPARISON_OPTIONS if option in section}
    if "teacher" in train and train["teacher"] is None and locations.get("train.teacher") == "command line":
        # null on the command line resets the options of the file
        section = {
            option: value
            for option, value in section.items()
            if option not in moved_options or locations.get(f"teacher.{option}") == "command line"
        }
        tree = tree | {"teacher": section}
        moved_options = {option: value for option, value in moved_options.items() if option in section}
    options = TEACHER.as_mapping(train.get("teacher"))
    if not moved_options or options is None:
        return tree
    for option in moved_options:
        key = f"train.teacher.{option}"
        location = locations.get(f"teacher.{option}", locations.get("teacher", "recipe"))
        overrides = location == "command line"
        if option in options and overrides == (location_of(locations, key) == "command line"):
            problem = f"{key} cannot be combined with teacher.{option}. Remove one of them"
            raise InputError(f"{location_of(locations, key)}: {problem}")
        if option not in options or overrides:
            options = options | {option: moved_options[option]}
            locations[key] = location
    remaining = {option: value for option, value in section.items() if option not in moved_options}
    # with recorded log-probabilities there is no model
    has_model = remaining or "logprobs_column" not in moved_options
    return tree | {"teacher": remaining if has_model else None, "train": train | {"teacher": options}}


def _without_overridden_names(
    options: dict[Any, Any], section: str, groups: Mapping[str, OptionGroup], locations: dict[str, str]
) -> dict[Any, Any]:
    """Return the options of a section without those of the file that the command line sets under their other name."""
    for old, new in RENAMED.items():
        key, _, option = new.partition(".")
        group = groups.get(key)
        values = group.as_mapping(options.get(key)) if group else {"": options.get(key)}
        if old not in options or not values or values.get(option) is None:
            continue
        old_overrides, new_overrides = (
            location_of(locations, f"{section}.{name}") == "command line" for name in (old, new)
        )
        if new_overrides and not old_overrides:
            options = {name: value for name, value in options.items() if name != old}
        elif old_overrides and not new_overrides:
            rest = {name: value for name, value in values.items() if name != option}
            options = options | ({key: rest} if group else {key: None})
    return options


def _rename_old_options(tree: dict[Any, Any], locations: dict[str, str]) -> dict[Any, Any]:
    """Give options their new names, which get the locations of the old ones."""
    method = _method_spec(tree.get("method"))
    sections = {
        "train": (method.groups if method else {}, train_fields(method.name) if method else ()),
        "rounds": ({"sampler": SAMPLERS}, fields_of(RoundsSection)),
    }
    for section, (groups, known) in sections.items():
        if not isinstance(tree.get(section), dict):
            continue
        location = partial(_error_prefix, locations, section)
        options = _without_overridden_names(tree[section], section, groups, locations)
        values, renamed = rename_options(options, groups, known, location)
        tree = tree | {section: values}
        for old, options in renamed.items():
            for new in options:
                for key in (new, new.partition(".")[0]):
                    locations.setdefault(f"{section}.{key}", location_of(locations, f"{section}.{old}"))
        warn_about_old_names(renamed, f"{section}.")
    return tree


def _error_prefix(locations: dict[str, str], section: str, option: str) -> str:
    """Return the start of an error about an option."""
    return f"{location_of(locations, f'{section}.{option}')}: {section}."


def _normalize(path: Path) -> str:
    """Collapse `..` if the result is the same file (symlinks may change it)."""
    normalized = os.path.normpath(path)
    return normalized if os.path.exists(normalized) and os.path.samefile(normalized, path) else str(path)


def train_config(recipe: Recipe, config_class: "type[PostTrainConfig]") -> "PostTrainConfig":
    """Build the method's Config from `recipe.train`, with values converted to the types of the fields.

    Raises:
        InputError: For an unknown key, a wrong type, options that cannot be combined, and a missing package.
    """
    fields = fields_of(config_class)
    values = build_kwargs(fields, recipe.train, "train", recipe.where, partial(suggest_key, recipe.method))
    values = add_teacher_options(recipe, values)
    sources = recipe.data.train if isinstance(recipe.data.train, list) else []
    streams = any(source.streaming for _, source in recipe.sources())
    if 1 < len(sources) <= MAX_GROUPS and not (streams or recipe.rounds or recipe.data_method.rows.sampled):
        values.setdefault("log_loss_by", SOURCE_COLUMN)
    # Errors of TrainingArguments for invalid values. It reads configuration files, and requires packages for some
    # options. A TypeError is one of AcceleratorConfig for an unknown key, and otherwise a bug.
    expected_errors: tuple[type[Exception], ...] = (ValueError, ImportError, OSError)
    if isinstance(values.get("accelerator_config"), dict):
        expected_errors += (TypeError,)
    try:
        # `load_recipe` has applied the rules, unless the section has changed since
        unchanged = recipe.validated_train == add_teacher_options(recipe, dict(recipe.train))
        return config_class.from_checked(**values) if unchanged else config_class(**values)
    except LaunchError:
        raise
    except expected_errors as error:
        # use the location of the first key that the message names, or whose value it quotes
        problem = " ".join(str(error).split())
        named = [name for name in re.findall(r"\w+", problem) if name in recipe.train]
        quoted = [name for name, value in recipe.train.items() if isinstance(value, str) and repr(value) in problem]
        key = f"train.{(named or quoted)[0]}" if named or quoted else "train"
        raise InputError(f"{recipe.where(key)}: {key + ': ' if quoted and not named else ''}{problem}") from error


def add_teacher_options(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the train section with the options of `teacher` that come from the teachers' sections."""
    sections = {key.partition(".")[2]: section for key, section in recipe.teacher_sections()}
    prompts = {name: section.prompt for name, section in sections.items() if section.prompt is not None}
    tokenizers = {name: section.name_or_path for name, section in sections.items() if section.own_tokenizer}
    by_option = {"prompt": prompts, "tokenizer": tokenizers, "names": [*(recipe.teachers or ())]}
    section_options = {
        option: value[""] if isinstance(value, dict) and "" in value else value
        for option, value in by_option.items()
        if value
    }
    options = TEACHER.as_mapping(values.get("teacher"))
    return values if options is None or not section_options else values | {"teacher": options | section_options}


def raise_first_problem(recipe: Recipe, problems: Iterable[Problem]) -> None:
    """Raise InputError for the first problem, if there is any.

    Args:
        recipe: The recipe, which has the locations of the keys.
        problems: (dotted keys, message). A problem without keys has no location.
    """
    for keys, problem in problems:
        if not keys:
            raise InputError(problem)
        # defaults have no location: name the keys that the recipe sets, if any
        located = [key for key in keys if key in recipe.locations] or [keys[0]]
        (_, location), *others = ((key, recipe.where(key)) for key in located)
        suffix = "".join(f"; {key} is at {other}" for key, other in others if other != location)
        raise InputError(f"{location}: {problem}{suffix}")


def _check_fields(
    recipe: Recipe, fields: Callable[..., Fields], values: Mapping[str, Any], key: str, key_hint: KeyHint
) -> dict[str, Any]:
    """Validate values and convert them to the types of the fields.

    First against the cached fields.json. If that fails and it is outdated, against the Config classes.
    """
    try:
        return build_kwargs(fields(), values, key, recipe.where, key_hint)
    except InputError:
        if not is_outdated():
            raise
    return build_kwargs(fields(from_class=True), values, key, recipe.where, key_hint)


def _suggest_lora_key(key: str) -> str | None:
    """Return what to write instead of a key of `model.lora` that does not exist, or None for an unknown name."""
    names = {"rank": "r", "ranks": "r", "lora_rank": "r", "lora_r": "r", "target": "target_modules"}
    name = names.get(key.rpartition(".")[2])
    return f"use {name}" if name else None


def suggest_key(method: object, key: str) -> str | None:
    """Return what to write instead of a key that does not exist, or None for an unknown name.

    Args:
        method: Value of the key `method`, which may be missing or invalid.
        key: The dotted key.
    """
    section, _, name = re.sub(r"\.\d+\.", ".", key).rpartition(".")
    spec = _method_spec(method)
    if section.startswith("teacher") and (similar := difflib.get_close_matches(name, COMPARISON_OPTIONS, 1)):
        return f"use {'teacher' if section == 'teacher' else 'train.teacher'}.{similar[0]}"
    if section == "train" and (hint := _suggest_renamed_option(method, name)):
        return hint
    if known_key := _FOREIGN_NAMES.get(f"{section}.{name}") or _FOREIGN_NAMES.get(name):
        return f"use {known_key}"
    if known_key := _find_in_other_section(spec, section, name):
        return f"use {known_key}"
    if section in ("", "train") and (methods := methods_with_option(name)):
        return _suggest_method(method, name, methods)
    if section != "rounds" and name in fields_of(RoundsSection):
        return f"use rounds.{name}"
    return None


def _suggest_renamed_option(method: object, name: str) -> str | None:
    """Return what to write instead of an old or TRL's name of an option in `train`, or None for other names."""
    group = RENAMED.get(name, "").partition(".")[0]
    if group and (methods := methods_with_option(group)):
        if problem := _method_problem(method):
            return f"its name is now {RENAMED[name]}, and {problem}. Set method to {' or '.join(methods)}"
        fix = "Remove it" + (", or use rounds.sampler for rounds" if group == "sampler" else "")
        only = _enumerate(methods)
        return f"its name is now {RENAMED[name]}, which method {method} does not have, only {only}. {fix}"
    spec = _method_spec(method)
    return replacement_hint(name, "recipe", spec.config_name if spec else "")


def _find_in_other_section(spec: Method | None, section: str, name: str) -> str | None:
    """Return the dotted key of another section in which a name is known, or None."""
    sections = {
        "model": fields_of(ModelSection),
        "data.train": fields_of(Source),
        "data": fields_of(DataSection),
        "model.lora": lora_fields(),
        "train": train_fields(spec.name if spec else next(iter(METHODS))),
    }
    return next((f"{other}.{name}" for other, names in sections.items() if name in names and other != section), None)


def _suggest_method(method: object, name: str, methods: list[str]) -> str:
    """Return the hint for an option of `methods` that the recipe's method does not have.

    Args:
        method: Value of the key `method`, which may be missing or invalid.
        name: Name of the option.
        methods: Methods with the option.
    """
    if problem := _method_problem(method):
        return f"{problem}. Set method to {' or '.join(methods)}, and use train.{name}"
    alternative = f", or use rounds.{name} for rounds" if name in fields_of(RoundsSection) else ""
    return f"method {method} has no such option, only {_enumerate(methods)}. Remove it{alternative}"


def _enumerate(names: list[str]) -> str:
    """Return names as text, such as "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _method_problem(method: object) -> str | None:
    """Return the problem with the value of the key `method`, or None for a valid value."""
    if method is None:
        return "method is missing"
    return None if _method_spec(method) else f"there is no method {short_repr(method)}"


def _method_spec(method: object) -> Method | None:
    """Return the row of the table of methods for the value of the key `method`, or None for an invalid value."""
    return METHODS.get(method) if isinstance(method, str) else None
