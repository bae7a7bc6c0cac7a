"""What is saved under mixed precision is what was trained: DeepSpeed keeps a float32 copy behind its bf16 weights."""

import json
import tempfile
from pathlib import Path

import peft
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two
from safetensors.torch import load_file
from training_for_tests import LORA, quick, token_rows, trainer_for
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engines


def start():
    """Weights that bf16 can say."""
    model = tiny_model()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def small_steps(rank, engine, folder, lora):
    """Ten steps, each smaller than bf16 can say of most weights."""
    torch.manual_seed(0)
    trainer = trainer_for(
        "sft", start(), token_rows("sft"), tempfile.mkdtemp(), per_device_train_batch_size=2, max_steps=10, bf16=True,
        learning_rate=1e-6, **({"peft_config": peft.LoraConfig(**LORA)} if lora else {}), **engine_arguments(engine),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(folder)


@pytest.mark.parametrize("engine", quick("zero3", among=("ddp", "fsdp2", "zero1", "zero2", "zero3")))
def test_saved_weights_have_taken_every_small_step(engine, tmp_path):
    on_two(small_steps, engine, engine, str(tmp_path), False)
    saved, before = load_file(tmp_path / "model.safetensors"), start().state_dict()
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    moved = sum((tensor != before[name]).sum().item() for name, tensor in saved.items())
    assert moved > 0.9 * sum(tensor.numel() for tensor in saved.values())
    assert json.loads(Path(tmp_path, "config.json").read_text())["dtype"] == "float32"
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, saved.get(name, saved["model.embed_tokens.weight"]))


@pytest.mark.parametrize("engine", quick("zero2", among=("ddp", "fsdp2", "zero1", "zero2", "zero3")))
def test_a_saved_adapter_has_taken_every_small_step(engine, tmp_path):
    on_two(small_steps, engine, engine, str(tmp_path), True)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(tensor.bfloat16().float().ne(tensor).any() for tensor in saved.values())
