"""Experiment b with TRL's SFTTrainer: the rows, options and adapter of gsm8k_lora.yaml.

    python -m recipes.real.trl_lora OUTPUT [--seed 0] [--rows 320] [--max_steps N]

Writes the adapter and trainer_state.json to OUTPUT.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hf_posttrain.scoring.cpu import bf16_instructions

MODELS = Path("outputs/real")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write the adapter."""
    parser = argparse.ArgumentParser(description="Experiment b with TRL's SFTTrainer.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=320, help="rows of GSM8K")
    parser.add_argument("--max_steps", type=int, default=-1)
    given = parser.parse_args(argv)
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    def conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
        roles = {"prompt": "user", "completion": "assistant"}
        return {column: [{"role": role, "content": row[column]}] for column, role in roles.items()}

    rows = load_dataset("json", data_files=str(MODELS / "data" / "gsm8k_train.jsonl"), split="train")
    options = SFTConfig(
        output_dir=str(given.output),
        max_length=512,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        max_steps=given.max_steps,
        learning_rate=5e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        seed=given.seed,
        gradient_checkpointing=False,  # as our run decides where memory suffices
        bf16=bool(bf16_instructions()),
    )
    trainer = SFTTrainer(
        model=str(MODELS / "smollm2"),
        args=options,
        train_dataset=rows.select(range(given.rows)).map(conversation),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
