"""Post-training of language models on transformers.Trainer: SFT, DPO, KTO, KD and OPD.

Each trainer is imported when it is first asked for, so that `import hf_posttrain` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .methods.dpo import DPOConfig, DPOTrainer
    from .methods.kd import KDConfig, KDTrainer
    from .methods.kto import KTOConfig, KTOTrainer
    from .methods.opd import OPDConfig, OPDTrainer
    from .methods.sft import SFTConfig, SFTTrainer

__version__ = "0.1.0"
__all__ = [
    "DPOConfig", "DPOTrainer", "KDConfig", "KDTrainer", "KTOConfig", "KTOTrainer", "OPDConfig", "OPDTrainer",
    "SFTConfig", "SFTTrainer",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = name.removesuffix("Config").removesuffix("Trainer").lower()
    return getattr(import_module(f".methods.{method}", __name__), name)
