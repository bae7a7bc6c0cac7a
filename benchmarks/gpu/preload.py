"""Import what measurements need. `supervisor` imports this once, in the server that they are forked from."""

import importlib
import traceback

MODULES = (
    "datasets",
    "peft",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.qwen3.modeling_qwen3",
    "hf_posttrain.methods.dpo",
    "hf_posttrain.methods.kd",
    "hf_posttrain.methods.kto",
    "hf_posttrain.methods.opd",
    "hf_posttrain.methods.sft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.distillation_trainer",
    "trl.experimental.gkd",
)
"""Without Liger, which asks for the CUDA device when it is imported."""

for name in MODULES:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue  # TRL is optional
    except Exception:  # a server that raises starts no process at all; the measurement that needs it reports it
        traceback.print_exc()
