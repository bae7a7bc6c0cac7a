"""`hf-posttrain merge`: the merged model computes what base and adapter do, and what is refused leaves nothing."""

import copy
import errno
import json
import shutil

import peft
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import LLAMA, base_tokenizer, byte_tokenizer
from training_for_tests import token_rows, trainer_for
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as RewardModel
from vision_for_tests import seeing

from hf_posttrain.commands import merge
from hf_posttrain.data.images import get_image_reader
from hf_posttrain.engines import sharded
from hf_posttrain.errors import InputError
from hf_posttrain.trainer import saving

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def same(model, other):
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-5, atol=1e-5)


def write_base(name="qwen3", tokenizer=None, **changes):
    """A model in the folder base, loaded from there."""
    tiny_model(name, **changes).save_pretrained("base")
    (tokenizer or byte_tokenizer()).save_pretrained("base")
    return AutoModelForCausalLM.from_pretrained("base")


def write_adapter(model, to="adapter", **config):
    """An adapter in a folder, all of whose weights are random."""
    options = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | config
    policy = peft.get_peft_model(model, peft.LoraConfig(**options))
    torch.manual_seed(3)
    for _, weight in policy.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    policy.save_pretrained(to)
    return policy


def refused(*arguments):
    with pytest.raises(InputError) as caught:
        merge.main([*arguments])
    return str(caught.value)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "option"), [
    ("qwen3", {}), ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
    ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}), ("qwen3", {"modules_to_save": ["lm_head"]}),
    ("qwen3", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("qwen3", {"trainable_token_indices": [5, 6]}), ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"use_dora": True}),
    ("llama", {"init_lora_weights": "pissa"}), ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
])  # fmt: skip
def test_the_merged_model_computes_what_base_and_adapter_do(name, option):
    policy = write_adapter(write_base(name), **copy.deepcopy(option))
    assert (logits(policy) - logits(tiny_model(name))).abs().max() > 0.1
    assert merge.main(["adapter", "merged"]) == 0
    same(AutoModelForCausalLM.from_pretrained("merged"), policy)


@pytest.fixture
def trained(folder):
    """A run's output_dir: an adapter and norms of the base, with checkpoints, a template of its own and two ends."""
    base = write_base("llama", byte_tokenizer(None))
    policy = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    tokenizer = base_tokenizer(LLAMA.replace("{{ bos_token }}", ""))
    trainer = trainer_for(
        "sft", policy, token_rows("sft"), folder / "run", max_steps=2, learning_rate=3e-2, tokenizer=tokenizer,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer


def test_a_run_is_merged_as_it_was_trained_with_its_template_and_ends(trained):
    assert merge.main(["run", "merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged")
    same(merged, trained.model)
    assert AutoTokenizer.from_pretrained("merged").chat_template == trained.tokenizer.chat_template
    assert merged.generation_config.eos_token_id == trained.terminal_ids == [258, 256]
    # a checkpoint has other weights
    assert merge.main(["run/checkpoint-1", "first"]) == 0
    first = AutoModelForCausalLM.from_pretrained("first")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "run/checkpoint-1")
    same(first, loaded)
    assert not torch.allclose(logits(first), logits(merged), atol=1e-2)
    # a run that was stopped has checkpoints alone
    shutil.move("run/adapter_config.json", "elsewhere.json")
    assert refused("run", "new").endswith("; did you mean 'run/checkpoint-2'?")


def test_an_adapter_of_other_tools_gets_tokenizer_and_ends_of_its_base(folder):
    write_adapter(write_base(tokenizer=base_tokenizer()))
    (folder / "merged").mkdir()
    assert merge.main(["adapter", "merged", "--dtype", "bfloat16"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert merged.generation_config.eos_token_id == [258, 256]
    assert AutoTokenizer.from_pretrained("merged").chat_template == base_tokenizer().chat_template


def test_a_model_that_sees_is_merged_with_its_tower(folder):
    """A run on pictures has saved its processor, which tells that its adapter is on the model with a tower."""
    model, tokenizer = seeing("qwen3_5")
    model.save_pretrained("base")
    get_image_reader(tokenizer).processor.save_pretrained("base")
    policy = write_adapter(type(model).from_pretrained("base"), target_modules=r".*language_model.*(q_proj|up_proj)")
    assert "not found in the base model" in refused("adapter", "merged")
    get_image_reader(tokenizer).processor.save_pretrained("adapter")
    assert merge.main(["adapter", "merged"]) == 0
    merged = type(model).from_pretrained("merged")
    same(merged, policy)
    assert (folder / "merged" / "processor_config.json").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (["adaptr", "new"], "there is no folder adaptr; did you mean 'adapter'?"),
    (["base", "new"], "base is a plain model already, with neither an adapter nor shards. Use it as it is"),
    (["file", "new"], "file has no adapter (adapter_config.json and adapter_model.safetensors)"),
    (["adapter", "base"], "OUT: base exists"), (["adapter", "file"], "OUT: file exists"),
    (["adapter", "file/new"], "OUT: file/new cannot be written (Not a directory)"),
    (["adapter", "new", "--base", "bas"], "the base of adapter (--base sets another): model bas: no such folder"),
    (["adapter", "new", "--base", "less"], "was not trained on less. The base lacks 2 weights"),
    (["adapter", "new", "--base", "more"], "was not trained on more. The adapter lacks 2 weights"),
    (["adapter", "new", "--base", "wide"], "adapter adapter does not fit wide: size mismatch"),
    (["adapter", "new", "--base", "other"], "adapter adapter: "),
    (["adapter", "new", "--base", "quantised"], "quantised is quantized (bitsandbytes), which would round"),
    (["biased", "new"], "biased cannot be merged: Impossible to merge LoRA with `lora_bias=True`"),
    (["shards", "new"], "shards has no config.json. Set --base to the model that the run started from"),
    (["shards", "new", "--base", "less"], "shards does not fit less. The model lacks 9 weights"),
    (["shards", "new", "--base", "more"], "shards does not fit more. The checkpoint lacks 9 weights"),
    (["shards", "new", "--base", "wide"], "shards does not fit wide: model.embed_tokens.weight: copying a param"),
    (["half", "new", "--base", "base"], "half: the shards are not complete (FileNotFoundError: "),
    (["global", "new", "--base", "base"], "global: the shards are not complete (Unable to find 'latest' file at "),
    (["moved", "new"], "moved/adapter_config.json names the base model /elsewhere/base, which does not exist on this "),
    (["nameless", "new"], "does not name the base model of the adapter"), (["cut", "new"], "adapter cut: "),
    (["empty", "new"], "empty has no adapter"),
    (["prompt", "new"], "PROMPT_TUNING is not supported. Use an adapter that acts only inside layers"),
    (["adapter", "new", "--dtype", "int8"], "--dtype"), (["adapter"], "OUT"),
])  # fmt: skip
def test_what_cannot_be_merged_is_said_in_a_line_and_leaves_nothing(arguments, said, folder):
    write_adapter(write_base("llama"))
    write_variants(folder)
    before = sorted(folder.rglob("*"))
    assert said in refused(*arguments)
    assert sorted(folder.rglob("*")) == before


def write_variants(folder):
    """Other bases (of fewer and more layers, wider, of another kind, quantised), and adapters that cannot be merged."""
    for name, changes in (("less", {"num_hidden_layers": 1}), ("more", {"num_hidden_layers": 3}),
                          ("wide", {"hidden_size": 64})):  # fmt: skip
        tiny_model("llama", **changes).save_pretrained(name)
        byte_tokenizer().save_pretrained(name)
    tiny_model("gpt2").save_pretrained("other")
    byte_tokenizer().save_pretrained("other")
    (folder / "file").write_text("")
    shutil.copytree("base", "quantised")
    for name, file, changes in (
        ("quantised", "config.json", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        ("nameless", "adapter_config.json", {"base_model_name_or_path": None}),
        ("moved", "adapter_config.json", {"base_model_name_or_path": "/elsewhere/base"}),
    ):
        if not (folder / name).exists():
            shutil.copytree("adapter", name)
        known = json.loads((folder / name / file).read_text())
        (folder / name / file).write_text(json.dumps(known | changes))
    for name in ("cut", "empty"):
        shutil.copytree("adapter", name)
    (folder / "cut" / "adapter_model.safetensors").write_bytes(b"\x10")
    (folder / "empty" / "adapter_model.safetensors").unlink()
    write_adapter(AutoModelForCausalLM.from_pretrained("base"), to="biased", lora_bias=True)
    write_shards("shards", AutoModelForCausalLM.from_pretrained("base"))
    shutil.copytree("shards", "half")
    next((folder / "half" / sharded.FSDP_FOLDER).glob("*.distcp")).unlink()
    (folder / "global" / "global_step2").mkdir(parents=True)
    tuned = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained("base"), tuned).save_pretrained("prompt")


def write_shards(to, model):
    """The files of FSDP2's SHARDED_STATE_DICT, of one process."""
    state = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.save(state, checkpoint_id=f"{to}/{sharded.FSDP_FOLDER}", no_dist=True)


def test_shards_of_a_reward_model_are_merged_with_the_config_of_its_base(folder):
    """tests/trainer/test_saving.py merges those of two processes."""
    write_base("llama")
    model = RewardModel.from_pretrained("base", num_labels=1)
    write_shards("shards", model)
    assert merge.main(["shards", "merged", "--base", "base", "--dtype", "float16"]) == 0
    merged = RewardModel.from_pretrained("merged", dtype="auto")
    assert merged.num_labels == 1
    assert merged.dtype == torch.float16
    same_weights = {name: weight.half() for name, weight in model.state_dict().items()}
    assert {name: weight.tolist() for name, weight in merged.state_dict().items()} == {
        name: weight.tolist() for name, weight in same_weights.items()
    }
    assert AutoTokenizer.from_pretrained("merged").chat_template == byte_tokenizer().chat_template


@pytest.mark.parametrize(("error", "raised", "said"), [
    (OSError(errno.ENOSPC, "No space left on device"), InputError, "No space left on device"),
    (KeyboardInterrupt(), KeyboardInterrupt, ""), (RuntimeError("is not the whole model"), RuntimeError, "whole"),
])  # fmt: skip
def test_a_half_written_model_does_not_stay(error, raised, said, folder, monkeypatch):
    def write_half(policy, state, processing_class, generation, place):
        processing_class.save_pretrained(place)
        raise error

    write_adapter(write_base())
    monkeypatch.setattr(saving, "write_merged", write_half)
    with pytest.raises(raised, match=said):
        merge.main(["adapter", "merged"])
    assert sorted(path.name for path in folder.iterdir()) == ["adapter", "base"]
