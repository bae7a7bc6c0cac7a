"""Experiment b with TRL's SFTTrainer: the rows, options and adapter of gsm8k_lora.yaml.

    python -m recipes.real.trl_lora OUTPUT [--seed 0] [--bf16] [--max_steps N]

Writes the adapter and trainer_state.json to OUTPUT.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.sections import Source

from .lab import HERE

OPTIONS = (
    "max_length",
    "per_device_train_batch_size",
    "learning_rate",
    "num_train_epochs",
    "save_strategy",
    "logging_steps",
    "lr_scheduler_type",
    "warmup_steps",
    "report_to",
)
"""Options of the recipe that SFTConfig has as well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write the adapter."""
    parser = argparse.ArgumentParser(description="Experiment b with TRL's SFTTrainer.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--max_steps", type=int, default=-1)
    arguments = parser.parse_args(argv)
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    def conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
        roles = {"prompt": "user", "completion": "assistant"}
        return {column: [{"role": role, "content": row[column]}] for column, role in roles.items()}

    recipe = load_recipe(HERE / "gsm8k_lora.yaml")
    source = recipe.data.train
    lora = recipe.model.lora
    assert isinstance(source, Source)
    assert source.limit
    assert lora
    rows = load_dataset("json", data_files=source.path, split="train")
    options = SFTConfig(
        output_dir=str(arguments.output),
        max_steps=arguments.max_steps,
        seed=arguments.seed,
        bf16=arguments.bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,  # as our run decides where memory suffices
        **{name: recipe.train[name] for name in OPTIONS},
    )
    trainer = SFTTrainer(
        model=recipe.model.name_or_path,
        args=options,
        train_dataset=rows.select(range(source.limit)).map(conversation),
        peft_config=LoraConfig(
            r=lora["r"], lora_alpha=lora["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
