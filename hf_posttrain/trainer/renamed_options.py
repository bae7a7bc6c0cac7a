"""Options that are now part of a group, under their names of the last release, which work for one more."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..errors import InputError, shown
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
"""Old name -> new name, `group.option` or an option."""


_DEFAULTS: dict[str, Any] = {
    "fresh": 0.25,
    "replay_windows": 16,
    "rollout": "transformers",
    "rollout_ahead": 0,
    "teacher_rest": "tail",
    "skew_alpha": 0.1,
}
"""Old name -> its default, where that is not None. The new options have the same defaults."""


def _no_place(option: str) -> str:
    """Return the place of an option that Python gives: none."""
    return ""


def with_new_names(
    given: Mapping[str, Any],
    groups: Mapping[str, OptionGroup],
    known: Collection[str],
    place: Callable[[str], str] = _no_place,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return options with their new names, and those that were renamed: old name -> new options with their values.

    An old option with its default is left out, and has no new options. groups: of the Config or section; known: the
    names of its options; place: start of an error about an option, such as "recipe.yaml:3: ".
    Raises InputError for old options that exclude each other, and for an option that is given under both names.
    """
    values = dict(given)
    old: dict[str, Any] = {}
    for name, new in RENAMED.items():
        key = new.partition(".")[0]
        # skew_alpha was an option of methods with a teacher
        has_option = key in known and ("teacher" in groups if new == "beta" else key in groups)
        if name in values and name not in known and has_option:
            old[name] = values.pop(name)
    changed = {name: value for name, value in old.items() if value is not None and value != _DEFAULTS.get(name)}
    for name, problem in _conflicts(changed, values):
        raise InputError(place(name) + problem)

    renamed = {name: _new_options(name, changed) if name in changed else {} for name in old}
    if values.get("rollouts") == "live" and "rollouts" in groups:
        values["rollouts"] = "on_policy"
        renamed["rollouts"] = {"rollouts": "on_policy"}
    for name in changed:
        for new, value in renamed[name].items():
            key, _, option = new.partition(".")
            group = groups.get(key)
            options: Mapping[str, Any] = {option: values.get(key)}
            if group is not None:
                options = group.as_mapping(values.get(key)) or {}
            if options.get(option) not in (None, value):
                raise InputError(f"{place(name)}{new} is given under an old name too: remove {name}")
            values[key] = value if group is None else {**options, option: value}
    return values, renamed


def _conflicts(changed: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with old options that exclude each other: the name of one, and a sentence."""
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
    """Return the options, new name -> value, that an old one stands for among all that are not at their defaults."""
    value = changed[name]
    if name in ("rollout", "vllm_mode"):
        on_server = "rollout_ahead" in changed or "vllm_server_base_url" in changed
        of_vllm = f"vllm_{changed.get('vllm_mode', 'server' if on_server else 'colocate')}"
        return {"sampler.kind": of_vllm if changed["rollout"] == "vllm" else changed["rollout"]}
    if name == "rollout_ahead":
        return {"sampler.prefetch": True}
    if name == "precompute_teacher_top_k":
        return {"teacher.top_k": value, "teacher.precompute": True}
    return {RENAMED[name]: value}


def warn_of_old_names(renamed: Mapping[str, Mapping[str, Any]], prefix: str = "") -> None:
    """Log one warning that names the new options with their values, if any option has its old name.

    renamed: as `with_new_names` returns it; prefix: of all names, such as "train.".
    """
    changes = []
    for name, options in renamed.items():
        old = f"{prefix}{name}: live" if name in options else f"{prefix}{name}"
        new = ", ".join(f"{prefix}{option}: {_written(value)}" for option, value in options.items())
        changes.append(f"{old} -> {new or 'remove it (its default)'}")
    if changes:
        logger.warning("options have new names; the old ones work in this release only: %s", "; ".join(changes))


def _written(value: object) -> str:
    """Return a value as recipes have it."""
    return str(value).lower() if isinstance(value, bool) else shown(value)
