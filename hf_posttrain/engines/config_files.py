"""Keys of Accelerate's and DeepSpeed's config files that these packages would drop without a word."""

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from ..errors import InputError, LaunchError, name_hint

_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Section of a file for `accelerate launch` -> the distributed_type that reads it."""
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
"""Keys at the top of a DeepSpeed config that its module of constants does not have."""


def check_accelerate_file(file: Path) -> None:
    """Raise LaunchError for a key of a file for `accelerate launch` that is not read."""
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        load_config_from_file(str(file))
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LaunchError(f"{file}: no accelerate config: {' '.join(str(error).split())}") from error
    for problem in _accelerate_problems(given):
        raise LaunchError(f"{file}: {problem}")
    if theirs := (given.get("deepspeed_config") or {}).get("deepspeed_config_file"):
        check_deepspeed(theirs)


def _accelerate_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the sections; Accelerate itself rejects unknown keys outside of them."""
    kind = str(given["distributed_type"]).upper()
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for name, section in given.items():
        if not isinstance(section, dict) or not section:
            continue
        reader = _SECTIONS.get(name, kind)
        if reader != kind:
            yield f"{name} is read with distributed_type: {reader}, and it is {kind}: change it, or drop the section"
        for key in map(str, section):
            prefix = _PREFIXES.get(name, "")
            argument = key if key.startswith(prefix) else prefix + key
            if argument not in known:
                # the names of a section's keys, to suggest one of them
                near = name_hint(argument, [one for one in known if one.startswith(prefix)], list_valid=False)
                if key == "amax_compute_algorithm":  # as `accelerate config` itself writes it
                    near = "; rename it to 'amax_compute_algo', which Accelerate reads"
                yield f"{name}: Accelerate drops the unknown key {key!r}{near}"


def find_launch_config() -> Path | None:
    """Return the config file of the `accelerate launch` that started this process, where the system shows it."""
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
    options = words[begin + (words[begin] == "launch") :]
    # the parser leaves all that follows the script to it, which may have a --config_file of its own
    given = launch_command_parser().parse_known_args(options)[0].config_file
    return Path(given) if given and Path(given).is_file() else None


def check_deepspeed(given: object) -> None:
    """Raise InputError for a key at the top of a DeepSpeed config that resembles one of DeepSpeed's, or belongs into a
    section: DeepSpeed ignores unknown keys there, and rejects them in sections.

    given: a file or a mapping.
    """
    where = "deepspeed"
    tree = given
    if isinstance(given, str | os.PathLike):
        where = str(given)
        try:
            tree = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # transformers reports it, and reads base64 too
            return
    if not isinstance(tree, Mapping):
        return
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    values = (value for name, value in vars(constants).items() if name.isupper())
    fields = DeepSpeedZeroConfig.model_fields
    of_zero = {"zero", "zero_stage", *fields, *(field.alias for field in fields.values())}
    known = _DEEPSPEED_KEYS | {value for value in values if isinstance(value, str) and value.isidentifier()}
    for key in map(str, tree):
        if key in known:
            continue
        if key in of_zero:
            raise InputError(f"{where}: DeepSpeed ignores {key!r} at the top: write it into zero_optimization")
        if close := difflib.get_close_matches(key, known, 1, 0.85):
            raise InputError(f"{where}: DeepSpeed ignores the unknown key {key!r}; did you mean {close[0]!r}?")
