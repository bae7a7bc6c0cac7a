"""Options that are now part of a group, under their names of the last release, which work for one more."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import InputError
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


def with_new_names(
    given: Mapping[str, Any], groups: Mapping[str, OptionGroup], known: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options with their new names, and those that were renamed: old name -> new name.

    Old names with their defaults are left out. groups: of the Config or section; known: the names of its options.
    Raises InputError for old options that exclude each other, and for an option that is given under both names.
    """
    values = dict(given)
    moved: dict[str, Any] = {}
    for old, new in RENAMED.items():
        key = new.partition(".")[0]
        # skew_alpha was an option of methods with a teacher
        has_option = key in known and ("teacher" in groups if new == "beta" else key in groups)
        if old not in values or old in known or not has_option:
            continue
        value = values.pop(old)
        if value is not None and value != _DEFAULTS.get(old):
            moved[old] = value
    renamed = {old: RENAMED[old] for old in moved}
    if values.get("rollouts") == "live" and "rollouts" in groups:
        values["rollouts"] = "on_policy"
        renamed["rollouts: live"] = "rollouts: on_policy"

    _check(moved, values)
    for new, value in _new_options(moved).items():
        key, _, option = new.partition(".")
        group = groups.get(key)
        current = values.get(key)
        if group is None:
            options = {} if current is None else {option: current}
        else:
            options = ({} if current is None else group.as_mapping(current)) or {}
        if options.get(option) not in (None, value):
            raise InputError(f"{new} is given under an old name too: remove {_old(new, renamed)}")
        values[key] = value if group is None else options | {option: value}
    return values, renamed


def _check(moved: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise InputError for old options that excluded each other."""
    loss = values.get("divergence") or values.get("loss_type") or "the default loss"
    if "skew_alpha" in moved and not str(loss).startswith("skew"):
        raise InputError(f"skew_alpha, now beta, is only valid with skew_forward_kl and skew_reverse_kl, not {loss}")
    if "vllm_mode" in moved and "rollout" not in moved:
        raise InputError("vllm_mode is only valid with rollout: vllm. Use sampler: vllm_colocate or vllm_server")
    if {"teacher_top_k", "precompute_teacher_top_k"} <= moved.keys():
        problem = "teacher_top_k cannot be combined with precompute_teacher_top_k"
        raise InputError(f"{problem}. Use teacher: {{top_k: K, precompute: true}}")
    if moved.get("rollout_ahead", 1) != 1:
        raise InputError(f"rollout_ahead={moved['rollout_ahead']!r} must be 0 or 1. Use sampler.prefetch")


def _new_options(moved: Mapping[str, Any]) -> dict[str, Any]:
    """Return new name -> value."""
    options: dict[str, Any] = {RENAMED[old]: value for old, value in moved.items()}
    if "rollout" in moved:
        on_server = "rollout_ahead" in moved or "vllm_server_base_url" in moved
        of_vllm = f"vllm_{moved.get('vllm_mode', 'server' if on_server else 'colocate')}"
        options["sampler.kind"] = of_vllm if moved["rollout"] == "vllm" else moved["rollout"]
    if "rollout_ahead" in moved:
        options["sampler.prefetch"] = True
    if "precompute_teacher_top_k" in moved:
        options["teacher.top_k"] = moved["precompute_teacher_top_k"]
        options["teacher.precompute"] = True
    return options


def warn_of_old_names(renamed: Mapping[str, str]) -> None:
    """Log one warning that names the new options, if any option has its old name."""
    if renamed:
        pairs = ", ".join(f"{old} -> {new}" for old, new in renamed.items())
        logger.warning("options have new names; the old ones work in this release only: %s", pairs)


def _old(new: str, renamed: Mapping[str, str]) -> str:
    return next((old for old, name in renamed.items() if name == new), "precompute_teacher_top_k")
