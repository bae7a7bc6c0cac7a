"""Detection of keys in config files of Accelerate and DeepSpeed that these packages ignore without a warning."""

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from ..errors import InputError, LaunchError, name_hint, short_repr

_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Section of a file for `accelerate launch` -> the distributed_type that it is valid with."""
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Section -> the prefix that Accelerate adds to a key that lacks it."""

_DEEPSPEED_KEYS = {
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "comet",
    "comms_logger",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "hybrid_engine",
    "nebula",
    "pipeline",
    "progressive_layer_drop",
    "seed",
    "sequence_parallel_size",
    "sparse_attention",
    "sparse_gradients",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "wandb",
    "zero_optimization",
}
"""Top-level keys of a DeepSpeed config that are not among the constants of its module `constants`."""

_DEEPSPEED_SECTIONS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "fp16",
    "bf16",
)
"""Sections of a DeepSpeed config that transformers and Accelerate read. Each follows the one that it is in."""


def check_accelerate_file(file: Path) -> None:
    """Raise LaunchError for a key of a file for `accelerate launch` that Accelerate ignores."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        load_config_from_file(str(file))
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LaunchError(f"{file}: not a valid accelerate config: {' '.join(str(error).split())}") from error
    for problem in _accelerate_problems(settings):
        raise LaunchError(f"{file}: {problem}")
    if deepspeed_file := (settings.get("deepspeed_config") or {}).get("deepspeed_config_file"):
        check_deepspeed(deepspeed_file)


def _accelerate_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of the sections. Accelerate itself rejects unknown keys outside of them."""
    distributed_type = str(settings["distributed_type"]).upper()
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for name, section in settings.items():
        if not isinstance(section, dict) or not section:
            continue
        required = _SECTIONS.get(name, distributed_type)
        if required != distributed_type:
            yield (
                f"{name} is only valid with distributed_type: {required}, and it is {distributed_type}. Change it, or "
                "remove the section"
            )
        for key in map(str, section):
            prefix = _PREFIXES.get(name, "")
            argument = key if key.startswith(prefix) else prefix + key
            if argument not in known:
                hint = name_hint(argument, [valid for valid in known if valid.startswith(prefix)], list_valid=False)
                if key == "amax_compute_algorithm":  # written by `accelerate config`
                    hint = "; rename it to 'amax_compute_algo', which Accelerate reads"
                yield f"{name}: Accelerate ignores the unknown key {key!r}{hint}"


def find_launch_config() -> Path | None:
    """Return the config file of the `accelerate launch` that started this process, or None if it is unknown.

    It is read from the command line of the parent process, which only some systems provide.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")
    except (OSError, UnicodeDecodeError):
        return None
    # accelerate launch, accelerate-launch or python -m accelerate.commands.launch
    begin = next((n for n, word in enumerate(words, 1) if Path(word).name.startswith("accelerate")), None)
    if begin is None:
        return None
    arguments = words[begin + (words[begin] == "launch") :]
    # the parser does not read arguments after the script, which may have another --config_file
    config_file = launch_command_parser().parse_known_args(arguments)[0].config_file
    return Path(config_file) if config_file and Path(config_file).is_file() else None


def check_deepspeed_sections(config: object) -> None:
    """Raise InputError for a section of a DeepSpeed config that is not a mapping.

    Args:
        config: As in `check_deepspeed`.
    """
    settings, location = _read_deepspeed(config)
    for name in _DEEPSPEED_SECTIONS:
        parent, _, key = name.rpartition(".")
        section = ((settings.get(parent) or {}) if parent else settings).get(key)
        if not isinstance(section, Mapping | None):
            example = " such as {stage: 3}" if name == "zero_optimization" else ""
            raise InputError(f"{location}: {name} must be a mapping{example}, not {short_repr(section)}")


def check_deepspeed(config: object) -> None:
    """Raise InputError for a top-level key of a DeepSpeed config that DeepSpeed ignores.

    DeepSpeed rejects unknown keys in sections, but ignores them at the top level. A key is reported if it belongs into
    the section `zero_optimization`, or if it is similar to a key of DeepSpeed.

    Args:
        config: The path of a JSON file, or a mapping.
    """
    settings, location = _read_deepspeed(config)
    if not settings:
        return
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    values = (value for name, value in vars(constants).items() if name.isupper())
    fields = DeepSpeedZeroConfig.model_fields
    zero_keys = {"zero", "zero_stage", *fields, *(field.alias for field in fields.values())}
    known = _DEEPSPEED_KEYS | {value for value in values if isinstance(value, str) and value.isidentifier()}
    for key in map(str, settings):
        if key in known:
            continue
        if key in zero_keys:
            raise InputError(f"{location}: DeepSpeed ignores {key!r} at the top level. Move it into zero_optimization")
        if similar := difflib.get_close_matches(key, known, 1, 0.85):
            raise InputError(f"{location}: DeepSpeed ignores the unknown key {key!r}; did you mean {similar[0]!r}?")


def _read_deepspeed(config: object) -> tuple[Mapping[str, Any], str]:
    """Return the keys of a DeepSpeed config and its location; no keys if it cannot be read, which transformers reports.

    Args:
        config: As in `check_deepspeed`. transformers also reads base64, which is not read here.
    """
    if not isinstance(config, str | os.PathLike):
        return config if isinstance(config, Mapping) else {}, "deepspeed"
    try:
        settings = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    return settings if isinstance(settings, Mapping) else {}, f"deepspeed: {config}"
