"""What every measurement imports; `supervisor` imports it once, in the server that measurements are forked from."""

import contextlib

import datasets  # noqa: F401
import peft  # noqa: F401
import transformers.models.gemma3.modeling_gemma3
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from hf_posttrain import DPOTrainer, KDTrainer, KTOTrainer, OPDTrainer, SFTTrainer  # noqa: F401

with contextlib.suppress(ImportError):  # the extra `bench`
    import trl.experimental.gkd
    import trl.trainer.distillation_trainer
    import trl.trainer.dpo_trainer
    import trl.trainer.kto_trainer
    import trl.trainer.sft_trainer  # noqa: F401
