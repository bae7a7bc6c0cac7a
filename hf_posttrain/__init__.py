"""Post-training of language models on transformers.Trainer, by the methods of `methods`.

Each trainer is imported when it is first asked for, so that `import hf_posttrain` stays fast.
"""

import logging
from importlib import import_module
from typing import Any

from .methods import METHODS

__version__ = "0.1.0"
_MODULES = {name: method.module for method in METHODS.values() for name in (method.config_name, method.trainer_name)}
_MODULES["TeacherSection"] = "hf_posttrain.models.config"
_MODULES["in_rounds"] = "hf_posttrain.rounds.iterative_trainer"
_OF_SCRIPTS = (
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
"""Names that scripts of TRL import in addition."""
_MODULES |= dict.fromkeys(_OF_SCRIPTS, "hf_posttrain.recipe.trl_scripts")
__all__ = sorted(_MODULES)


def is_of_used_kernel(record: logging.LogRecord) -> bool:
    """Return whether a record of bitsandbytes is about anything but the kernel that only 4-bit weights on a CPU use."""
    return "gemm_4bit_forward" not in str(record.msg)


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(is_of_used_kernel)  # peft imports bitsandbytes


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from .trainer.rules import instead_of

        if instead := instead_of(name, "python"):
            raise ImportError(f"hf_posttrain has no {name}: {instead}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
