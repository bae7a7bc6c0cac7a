"""Post-training of language models with transformers.Trainer.

The public names are the Config and the Trainer of each method in `methods`. Each is imported at its first use, so that
`import hf_posttrain` stays fast.
"""

import logging
from importlib import import_module
from typing import Any

from .methods import METHODS

__version__ = "0.1.0"
_MODULES = {name: method.module for method in METHODS.values() for name in (method.config_name, method.trainer_name)}
_MODULES["TeacherSection"] = "hf_posttrain.models.config"
_MODULES["in_rounds"] = "hf_posttrain.rounds.iterative_trainer"
_TRL_SCRIPT_NAMES = (
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ModelConfig",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
)
"""Other names that scripts of TRL import."""
_MODULES |= dict.fromkeys(_TRL_SCRIPT_NAMES, "hf_posttrain.recipe.trl_scripts")
__all__ = sorted(_MODULES)


def is_relevant_kernel_record(record: logging.LogRecord) -> bool:
    """Return whether a log record of bitsandbytes is not about the kernel that only 4-bit weights on a CPU use."""
    return "gemm_4bit_forward" not in str(record.msg)


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(is_relevant_kernel_record)  # peft imports bitsandbytes


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from .trainer.rules import replacement_hint

        if hint := replacement_hint(name, "python"):
            raise ImportError(f"hf_posttrain has no {name}: {hint}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
