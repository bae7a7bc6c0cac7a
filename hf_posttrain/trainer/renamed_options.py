"""Options that have moved into a group or have a new name. Their old names are accepted for one release."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..errors import InputError, short_repr
from .option_group import OptionGroup

logger = logging.getLogger(__name__)

RENAMED = {
    "fresh": "rollouts.fresh_fraction",
    "replay_windows": "rollouts.replay_steps",
    "horizon": "rollouts.train_max_tokens",
    "rollout": "sampler.kind",
    "vllm_mode": "sampler.kind",
    "generation_batch_size": "sampler.batch_size",
    "vllm_server_base_url": "sampler.base_url",
    "vllm_check_steps": "sampler.check_steps",
    "vllm_gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "rollout_ahead": "sampler.prefetch",
    "teacher_top_k": "teacher.top_k",
    "precompute_teacher_top_k": "teacher.precompute",
    "teacher_rest": "teacher.top_k_remainder",
    "one_stop_outcome": "teacher.merge_eos",
    "teacher_prompt": "teacher.prompt",
    "teacher_tokenizer": "teacher.tokenizer",
    "teacher_names": "teacher.names",
    "skew_alpha": "beta",
}
"""New name, an option or `group.option`, of each old name."""


_DEFAULTS: dict[str, Any] = {
    "fresh": 0.25,
    "replay_windows": 16,
    "rollout": "transformers",
    "rollout_ahead": 0,
    "teacher_rest": "tail",
    "skew_alpha": 0.1,
}
"""Default of each old name whose default is not None. The new options have the same defaults."""


def _no_location(option: str) -> str:
    """Return the location of an option that is set in Python, which is empty."""
    return ""


def old_names(groups: Mapping[str, OptionGroup], valid_names: Collection[str]) -> dict[str, str]:
    """Return the rows of `RENAMED` that are accepted in a Config or section, with these groups and option names."""
    accepted = {}
    for old, new in RENAMED.items():
        key = new.partition(".")[0]
        # skew_alpha was an option of methods with a teacher
        has_option = key in valid_names and ("teacher" in groups if new == "beta" else key in groups)
        if has_option and old not in valid_names:
            accepted[old] = new
    return accepted


def rename_options(
    options: Mapping[str, Any],
    groups: Mapping[str, OptionGroup],
    valid_names: Collection[str],
    location: Callable[[str], str] = _no_location,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Replace the old names of options by their new names.

    Args:
        options: The options, with old or new names.
        groups: Groups of the Config or section.
        valid_names: Names of all options of the Config or section.
        location: Returns the start of an error about an option, such as "recipe.yaml:3: ".

    Returns:
        The options with their new names, and for each old name a mapping of its new options to their values. An old
        option with its default value is removed, and its mapping is empty.

    Raises:
        InputError: If old options exclude each other, or an option is set under both names.
    """
    values = dict(options)
    old: dict[str, Any] = {name: values.pop(name) for name in old_names(groups, valid_names) if name in values}
    changed = {name: value for name, value in old.items() if value is not None and value != _DEFAULTS.get(name)}
    for name, problem in _conflicts(changed, values):
        raise InputError(location(name) + problem)

    renamed = {name: _new_options(name, changed) if name in changed else {} for name in old}
    if values.get("rollouts") == "live" and "rollouts" in groups:
        values["rollouts"] = "on_policy"
        renamed["rollouts"] = {"rollouts": "on_policy"}
    for name in changed:
        for new, value in renamed[name].items():
            key, _, option = new.partition(".")
            group = groups.get(key)
            group_values: Mapping[str, Any] = {option: values.get(key)}
            if group is not None:
                group_values = group.as_mapping(values.get(key)) or {}
            if group_values.get(option) not in (None, value):
                raise InputError(f"{location(name)}{new} is also set under its old name. Remove {name}")
            values[key] = value if group is None else {**group_values, option: value}
    return values, renamed


def _conflicts(changed: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of an option and the message for each conflict between old options."""
    loss = values.get("divergence") or values.get("loss_type") or "the default loss"
    if "skew_alpha" in changed and not str(loss).startswith("skew"):
        problem = f"skew_alpha, now beta, is only valid with skew_forward_kl and skew_reverse_kl, not {loss}"
        yield "skew_alpha", f"{problem}. Remove it"
    if "vllm_mode" in changed and "rollout" not in changed:
        yield "vllm_mode", "vllm_mode is only valid with rollout: vllm. Use sampler: vllm_colocate or vllm_server"
    if {"teacher_top_k", "precompute_teacher_top_k"} <= changed.keys():
        problem = "teacher_top_k cannot be combined with precompute_teacher_top_k"
        yield "precompute_teacher_top_k", f"{problem}. Use teacher: {{top_k: K, precompute: true}}"
    if changed.get("rollout_ahead", 1) != 1:
        problem = f"rollout_ahead={changed['rollout_ahead']!r} must be 0 or 1"
        yield "rollout_ahead", f"{problem}. Use sampler: {{kind: vllm_server, prefetch: true}}"


def _new_options(name: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new options, with their values, that replace an old option.

    Args:
        name: The old name.
        changed: All old options that are not at their defaults.
    """
    value = changed[name]
    if name in ("rollout", "vllm_mode"):
        on_server = "rollout_ahead" in changed or "vllm_server_base_url" in changed
        vllm_kind = f"vllm_{changed.get('vllm_mode', 'server' if on_server else 'colocate')}"
        return {"sampler.kind": vllm_kind if changed["rollout"] == "vllm" else changed["rollout"]}
    if name == "rollout_ahead":
        return {"sampler.prefetch": True}
    if name == "precompute_teacher_top_k":
        return {"teacher.top_k": value, "teacher.precompute": True}
    return {RENAMED[name]: value}


def warn_about_old_names(renamed: Mapping[str, Mapping[str, Any]], prefix: str = "") -> None:
    """Log one warning with the new options and their values, if any option was set under its old name.

    Args:
        renamed: Second return value of `rename_options`.
        prefix: Prefix of all names, such as "train.".
    """
    changes = []
    for name, options in renamed.items():
        old = f"{prefix}{name}: live" if name in options else f"{prefix}{name}"
        new = ", ".join(f"{prefix}{option}: {_as_yaml(value)}" for option, value in options.items())
        changes.append(f"{old} -> {new or 'remove it (its default)'}")
    if changes:
        logger.warning("options have new names; the old ones work in this release only: %s", "; ".join(changes))


def _as_yaml(value: object) -> str:
    """Return a value as a recipe has it."""
    return str(value).lower() if isinstance(value, bool) else short_repr(value)
