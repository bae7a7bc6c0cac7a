# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posttrain @ git+https://github.com/OWNER/hf_posttrain"]
# ///
"""SFT with LoRA as one file, whose dependencies uv installs. Set OWNER to the account of the repository first.

    uv run sft_uv.py [section.key=value ...]
    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN sft_uv.py train.push_to_hub=true train.hub_model_id=NAME

Overrides are those of every recipe: model.name_or_path=..., 'data.train={path: mine.jsonl}', train.max_steps=...
"""

import sys
import tempfile
from pathlib import Path

from hf_posttrain.run import main

RECIPE = """
method: sft
model:
  name_or_path: Qwen/Qwen3-0.6B
  lora: {r: 16, alpha: 32}
data:
  train: {path: openai/gsm8k, name: main, split: train, columns: {prompt: question, completion: answer}}
train:
  output_dir: outputs/sft
  apply_chat_template: true
  learning_rate: 2e-4
  max_steps: 200
  logging_steps: 10
  report_to: none
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "sft.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        sys.exit(main([str(recipe), *sys.argv[1:]]))
