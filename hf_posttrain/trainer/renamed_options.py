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


def with_new_names(
    given: Mapping[str, Any], groups: Mapping[str, OptionGroup], known: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options with their new names, and those that were renamed: old name -> new name.

    groups: of the Config or section; known: the names of its options. Raises InputError for an option that is given
    under both names.
    """
    values = dict(given)
    renamed: dict[str, str] = {}
    moved: dict[str, Any] = {}
    for old, new in RENAMED.items():
        key = new.partition(".")[0]
        if old not in values or old in known or key not in known or (key != new and key not in groups):
            continue
        value = values.pop(old)
        renamed[old] = new
        if value is not None:
            moved[old] = value
    if values.get("rollouts") == "live" and "rollouts" in groups:
        values["rollouts"] = "on_policy"
        renamed["rollouts: live"] = "rollouts: on_policy"

    options: dict[str, Any] = {RENAMED[old]: value for old, value in moved.items()}
    if "sampler.kind" in options:
        program = moved.get("rollout", "transformers")
        of_vllm = f"vllm_{moved.get('vllm_mode', 'colocate')}"
        options["sampler.kind"] = {"transformers": "policy", "vllm": of_vllm}.get(program, program)
    if "precompute_teacher_top_k" in moved:
        options["teacher.top_k"] = moved["precompute_teacher_top_k"]
        options["teacher.precompute"] = True
        renamed["precompute_teacher_top_k"] = "teacher.top_k and teacher.precompute"
    if "rollout_ahead" in moved:
        options["sampler.prefetch"] = bool(moved["rollout_ahead"])
        if not moved["rollout_ahead"]:
            del options["sampler.prefetch"]

    for new, value in options.items():
        key, _, option = new.partition(".")
        group = groups.get(key)
        current = values.get(key)
        mapping = {} if group is None or current is None else group.as_mapping(current)
        if (group is None and current is not None) or option in (mapping or {}):
            raise InputError(f"{new} is given under an old name too: remove {_old(new, renamed)}")
        if group is None:
            values[key] = value
        elif mapping is not None:
            values[key] = mapping | {option: value}
    return values, renamed


def warn_of_old_names(renamed: Mapping[str, str]) -> None:
    """Log one warning that names the new options, if any option has its old name."""
    if renamed:
        pairs = ", ".join(f"{old} -> {new}" for old, new in renamed.items())
        logger.warning("options have new names; the old ones work in this release only: %s", pairs)


def _old(new: str, renamed: Mapping[str, str]) -> str:
    return next(old for old, name in renamed.items() if new in name)
