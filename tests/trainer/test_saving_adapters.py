"""What is saved of an adapter, and of what is trained besides it, is what was trained."""

import copy

import peft
import pytest
import torch
from architectures import tiny
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import LORA, logged, token_rows, trainer_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posttrain.errors import InputError

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def with_norms(base):
    policy = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    return policy


def test_unfrozen_weights_of_the_base_are_saved_with_the_adapter_and_resumed(tmp_path):
    base, rows = tiny_model("llama"), token_rows("sft")
    options = {"max_steps": 4, "learning_rate": 3e-2}
    trainer = trainer_for(
        "sft", with_norms(copy.deepcopy(base)), rows, tmp_path, **options, save_strategy="steps", save_steps=2
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))
    resumed = trainer_for("sft", with_norms(copy.deepcopy(base)), rows, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed)[:4] == logged(trainer)[:4]


@pytest.mark.parametrize("name", ["default", "other"])
def test_the_best_model_is_loaded_into_an_adapter_of_any_name(name, tmp_path):
    policy = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(**LORA), adapter_name=name)
    rows = token_rows("sft", 4)
    trainer = trainer_for(
        "sft", policy, rows, tmp_path, eval_rows=rows, max_steps=2, learning_rate=3e-2, save_strategy="steps",
        save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    trained = [n for n, weight in policy.named_parameters() if weight.requires_grad]
    assert trained
    assert all(f".{name}." in n for n in trained)


TIED = {"ensure_weight_tying": True}


@pytest.mark.parametrize(("option", "tied"), [
    ({"target_modules": ["q_proj", "lm_head"]}, False), ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    ({"modules_to_save": ["lm_head"]}, False), ({"modules_to_save": ["lm_head"]} | TIED, True),
    ({"modules_to_save": ["embed_tokens"]} | TIED, True), ({}, True), ({"trainable_token_indices": [5, 6]}, True),
    ({"trainable_token_indices": {"lm_head": [5, 6]}}, False),
    ({"trainable_token_indices": {"lm_head": [5], "embed_tokens": [6]}}, False),
])  # fmt: skip
def test_an_adapter_on_a_tied_head_merges_into_what_was_trained(option, tied, tmp_path):
    """It stays tied where head and embedding were trained as one."""
    config = peft.LoraConfig(r=4, **{"target_modules": ["q_proj"]} | copy.deepcopy(option))
    model = tiny_model("qwen3")
    assert model.config.tie_word_embeddings
    before = logits(model)
    trainer = trainer_for(
        "sft", model, token_rows("sft"), tmp_path, peft_config=config, learning_rate=1e-2, max_steps=3, merge_lora=True
    )
    trainer.train()
    trainer.save_model(tmp_path / "merged")
    trained = logits(trainer.model)
    assert (trained - before).abs().max() > 0.1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained)
    assert merged.config.tie_word_embeddings is tied


def test_vera_is_saved_with_its_projections(tmp_path):
    base = tiny_model("llama")
    trainer = trainer_for(
        "sft", copy.deepcopy(base), token_rows("sft"), tmp_path, max_steps=2, learning_rate=1e-2,
        save_strategy="steps", save_steps=1, peft_config=peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_text"])
def test_buffers_and_odd_prefixes_of_a_model_are_no_obstacle(name, tmp_path):
    """DeepSeek's router has a bias that is a buffer; Llama 4 names its backbone otherwise than its prefix says."""
    trainer = trainer_for("sft", tiny(name), token_rows("sft"), tmp_path, learning_rate=1e-3)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"alora_invocation_tokens": [4, 5]}, r"PEFT cannot merge this adapter \(aLoRA does not"),
        ({"lora_bias": True}, r"PEFT cannot merge this adapter \(Impossible to merge LoRA with `lora_bias=True`"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "the copies of layer_replication share weights"),
    ],
)
def test_an_adapter_that_peft_cannot_merge_is_told_at_construction(options, problem, tmp_path):
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
    with pytest.raises(InputError, match=problem):
        trainer_for("sft", tiny_model("llama"), token_rows("sft"), tmp_path, peft_config=config, merge_lora=True)


def test_a_model_card_is_asked_for_as_in_trl(tmp_path):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    trainer.create_model_card(model_name="mine", dataset_name="the/rows")
    assert "the/rows" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("merged", [False, True])
def test_a_chat_template_of_an_earlier_run_does_not_stay_with_a_tokenizer_without_one(merged, tmp_path):
    """transformers leaves the files there, and they are loaded with the tokenizer."""
    earlier = byte_tokenizer()
    earlier.chat_template = {"default": earlier.chat_template, "tool_use": "another"}
    earlier.save_pretrained(tmp_path)
    lora = {"peft_config": peft.LoraConfig(**LORA)} if merged else {}
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, **lora, merge_lora=merged)
    trainer.tokenizer.chat_template = None
    trainer.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is None
    trainer.tokenizer.chat_template = "one"
    trainer.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "one"
